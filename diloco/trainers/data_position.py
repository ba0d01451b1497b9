"""Where in its data a replica is, for trainers whose loaders cannot say it themselves."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, Sampler

log = logging.getLogger(__name__)


class DataPosition:
    """How much of its data a replica has seen: epochs, and batches of the one it is in."""

    def __init__(self) -> None:
        self._epoch = self._batches = 0
        self._next = (0, 0)
        """Where the next epoch begins: its number, and the batches of it that were seen already."""
        self._of_trainer = (0, 0)
        """Where the trainer begins by itself: behind what its checkpoint has seen."""
        self.is_loaded = False
        """Whether an earlier attempt has kept a position, which wins over the trainer's."""
        self._start = (0, 0)
        self._loader: Any = None
        self._length: int | None = None

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self._epoch, "batches": self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._next, self.is_loaded = (state["epoch"], state["batches"]), True

    def begin_at(self, epoch: int, batches: int = 0) -> None:
        """Count from where the trainer begins by itself."""
        self._next = self._of_trainer = epoch, batches

    def go_to(self, loader: Any, *, is_stateful: bool = False) -> None:
        """Let a loader begin at the position that was loaded, if one was; the trainer then leaves out no batch.

        Args:
            is_stateful: the loader is there by itself.
        """
        self._loader = loader
        with contextlib.suppress(TypeError):  # a stream has none
            self._length = len(loader)
        epoch, batches = self._next
        if self._length is not None and batches >= self._length:
            epoch, batches = epoch + 1, 0
        if epoch < self._of_trainer[0] and not is_stateful:
            # By a later checkpoint: the trainer has epochs from there on only, each a whole one.
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
            sampler.sampler = LaterSampler(sampler.sampler, epoch, batches * sampler.batch_size)
        else:
            log.warning("The data of this replica begin anew: a %s cannot begin in the midst.", type(loader).__name__)

    def epoch_begins(self) -> None:
        self._epoch, self._batches = self._next
        self._next = self._epoch + 1, 0
        if isinstance(getattr(self._loader, "dataset", None), IterableDataset) and hasattr(
            self._loader, "skip_batches"
        ):
            self._loader.skip_batches = self._batches

    def batch_seen(self) -> None:
        self._batches += 1

    @property
    def began_in_the_midst(self) -> bool:
        """Whether this epoch did."""
        return self._epoch == self._start[0] and self._start[1] > 0

    @property
    def left_out(self) -> int:
        """How many batches of this epoch were seen by an earlier attempt, before the first of it; then 0."""
        return 0 if self.has_seen_any else self._batches

    @property
    def has_seen_any(self) -> bool:
        """Whether there was a batch in this epoch, since it began in the midst."""
        return (self._epoch, self._batches) != self._start

    def epochs(self, as_the_trainer_counts: float) -> float:
        """Return how many epochs were seen."""
        if self._start == (0, 0) or self._length is None:
            return as_the_trainer_counts
        return self._epoch + self._batches / self._length


class LaterSampler(Sampler[int]):
    """A sampler from a later place on: epochs count from a later one, and the first begins behind some items."""

    def __init__(self, sampler: Any, epoch: int, n_items: int) -> None:
        self._sampler = sampler
        self._epoch = epoch
        self._n_items = n_items

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch + self._epoch)

    def __iter__(self) -> Iterator[int]:
        n_items, self._n_items = self._n_items, 0
        return islice(iter(self._sampler), n_items, None)
