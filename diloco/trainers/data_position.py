"""Saves a replica's position in its data, for trainers whose data loaders cannot save it themselves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, Sampler

log = logging.getLogger(__name__)


class DataPosition:
    """The part of its data that a replica has seen: epochs, and batches of the current epoch.

    Example:
        position = DataPosition()
        diloco.attach_state("data", position)
        position.go_to(loader)
    """

    def __init__(self) -> None:
        self._epoch = self._batches = 0
        self._next = (0, 0)
        """The position from which the next epoch begins: the number of the epoch, and the number of its batches that
        were already seen.
        """
        self._of_trainer = (0, 0)
        """The position at which the trainer begins by itself: after the data that its checkpoint has seen."""
        self.is_loaded = False
        """True if an earlier attempt has saved a position. That position has precedence over the trainer's."""
        self._start = (0, 0)
        """The position at which this process began."""
        self._loader: Any = None
        self._length: int | None = None

    def state_dict(self) -> dict[str, int]:
        """Return the current epoch, and the number of its batches that were seen."""
        return {"epoch": self._epoch, "batches": self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load a position that an earlier attempt saved.

        Args:
            state: the value that `state_dict` returned.
        """
        self._next, self.is_loaded = (state["epoch"], state["batches"]), True

    def begin_at(self, epoch: int, batches: int = 0) -> None:
        """Set the position at which the trainer begins by itself.

        Args:
            epoch: the epoch.
            batches: the number of its batches that were seen already.
        """
        self._next = self._of_trainer = epoch, batches

    def go_to(self, loader: Any, *, is_stateful: bool = False) -> None:
        """Let a loader begin at the loaded position, if there is one. The trainer itself must then skip no batch.

        Args:
            loader: the trainer's data loader.
            is_stateful: True: the loader has loaded its own position.
        """
        self._loader = loader
        with contextlib.suppress(TypeError):  # a stream has no length
            self._length = len(loader)
        epoch, batches = self._next
        if self._length is not None and batches >= self._length:
            epoch, batches = epoch + 1, 0
        if epoch < self._of_trainer[0] and not is_stateful:
            # The trainer begins with a checkpoint of a later epoch, so it makes only the epochs after that one, each as
            # a whole.
            epoch, batches = self._of_trainer[0], 0
        self._start = self._next = epoch, batches
        if not self.is_loaded or is_stateful:
            return
        epoch -= self._of_trainer[0]
        if (epoch, batches) == (0, 0):
            return
        sampler, dataset = getattr(loader, "batch_sampler", None), getattr(loader, "dataset", None)
        if isinstance(dataset, IterableDataset) and hasattr(loader, "skip_batches"):
            if (set_epoch := getattr(dataset, "set_epoch", None)) is not None:
                loader.dataset.set_epoch = lambda number: set_epoch(number + epoch)
        elif isinstance(sampler, BatchSampler) and not isinstance(dataset, IterableDataset):
            # In a replica of several processes, accelerate deals whole batches, or parts of each, to the processes.
            n_shares = 1
            shard: Any = sampler
            if hasattr(shard, "num_processes") and isinstance(getattr(shard, "batch_sampler", None), BatchSampler):
                n_shares = 1 if shard.split_batches else shard.num_processes
                sampler = shard.batch_sampler
            sampler.sampler = LaterSampler(sampler.sampler, epoch, batches * n_shares * sampler.batch_size)
        else:
            log.warning(
                "The data of this replica start from the beginning, because a %s cannot start in the middle. Use a "
                "StatefulDataLoader.", type(loader).__name__,
            )  # fmt: skip

    def epoch_begins(self) -> None:
        """Note that an epoch begins."""
        self._epoch, self._batches = self._next
        self._next = self._epoch + 1, 0
        if isinstance(getattr(self._loader, "dataset", None), IterableDataset) and hasattr(
            self._loader, "skip_batches"
        ):
            self._loader.skip_batches = self._batches

    def batch_seen(self) -> None:
        """Note that a batch was seen."""
        self._batches += 1

    @property
    def began_in_the_middle(self) -> bool:
        """True if the current epoch began in the middle."""
        return self._epoch == self._start[0] and self._start[1] > 0

    @property
    def left_out(self) -> int:
        """The number of batches of this epoch that an earlier attempt has seen. It is 0 after the first batch."""
        return 0 if self.has_seen_any else self._batches

    @property
    def has_seen_any(self) -> bool:
        """True if this process has seen a batch of the current epoch."""
        return (self._epoch, self._batches) != self._start

    def epochs(self, as_the_trainer_counts: float) -> float:
        """Return the number of epochs that were seen, as a fraction.

        Args:
            as_the_trainer_counts: the trainer's own number of epochs, which is right if this process began at the first
                batch.
        """
        if self._start == (0, 0) or self._length is None:
            return as_the_trainer_counts
        return self._epoch + self._batches / self._length


class LaterSampler(Sampler[int]):
    """A sampler that begins at a later position: at a later epoch, and after some items of it.

    Args:
        sampler: the sampler of the loader.
        epoch: added to the number of each epoch.
        n_items: the number of items that the first epoch skips.

    Example:
        batch_sampler.sampler = LaterSampler(batch_sampler.sampler, epoch=2, n_items=640)
    """

    def __init__(self, sampler: Any, epoch: int, n_items: int) -> None:
        self._sampler = sampler
        self._epoch = epoch
        self._n_items = n_items

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, as the trainer counts it.

        Args:
            epoch: the number of the epoch.
        """
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch + self._epoch)

    def __iter__(self) -> Iterator[int]:
        n_items, self._n_items = self._n_items, 0
        return islice(iter(self._sampler), n_items, None)
