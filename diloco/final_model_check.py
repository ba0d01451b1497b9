"""Warns if the script changes its replica's model after the run, for example by a checkpoint or `update_bn`.

After `close()` all replicas hold the same model. A script that then changes the model changes it in its own replica
only. That is right if each replica makes the same change, or if the change is meant for one replica only. So each
replica records a number that identifies its changed model, and the run warns if replicas have recorded different
numbers.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from diloco.stale_copies.optimizer_hook import unwatch, watch

MOST_BYTES = 4 << 20
"""The largest size in bytes of all tensors that are compared. Their memory stays in use until the model is deleted."""
MOST_VALUES = 256
"""The largest number of values that are compared in each tensor. A comparison of all values would take as long as
another round.
"""


class FinalModelCheck:
    """Compares a model with its values at `close()`, when the model is deleted or the script has ended.

    This object keeps only the smallest tensors of the model in memory, such as biases, weights of norms and running
    statistics. A loaded checkpoint changes these tensors, and so does `update_bn`. The tensors are kept until the owner
    is deleted: the garbage collector deletes a model together with its tensors, so weak references would be dead by
    then.

    Args:
        owner: the module that has the tensors, usually the model.
        tensors: the tensors that all replicas have in common now, by name.
        note: called at most once, with a number that identifies the changed values. Replicas that have changed their
            models in the same way get nearly the same number.

    Example:
        check = FinalModelCheck(model, dict(model.named_parameters()), print)
        model.load_state_dict(torch.load("best.pt"))
        check.look()  # prints a number
    """

    def __init__(self, owner: nn.Module, tensors: Mapping[str, Tensor], note: Callable[[float], None]) -> None:
        self._tensors = {name: (tensor, _some_values(tensor)) for name, tensor in _smallest(tensors)}
        """Each tensor and its values at `close()`, by name."""
        self._ids = {id(tensor) for tensor in tensors.values()}
        self._note = note
        self._pid = os.getpid()
        self._finalizer = finalize(owner, self.look)
        self._finalizer.atexit = False
        _all[id(self)] = self
        watch(self._note_step)

    def look(self) -> None:
        """Compare the model with its values at `close()`. Later calls do nothing."""
        tensors, self._tensors = self._tensors, {}
        self.drop()
        if os.getpid() != self._pid:
            return
        # The check is only a hint. It must not end a finished training with an error, for example because a GPU is
        # gone.
        with suppress(Exception):
            if (mark := _mark_of_changed(tensors)) is not None:
                self._note(mark)

    def drop(self) -> None:
        """End the check without a result, because the script trains the model again and so changes it on purpose."""
        self._tensors = {}
        self._finalizer.detach()
        _all.pop(id(self), None)
        unwatch(self._note_step)

    def has_any_of(self, tensors: Iterable[Tensor]) -> bool:
        """Return True if this check compares one of the tensors.

        Args:
            tensors: any tensors.
        """
        return bool(self._tensors) and any(id(tensor) in self._ids for tensor in tensors)

    def _note_step(self, optimizer: Optimizer) -> None:
        if self.has_any_of(p for group in optimizer.param_groups for p in group["params"]):
            self.drop()


_all: dict[int, FinalModelCheck] = {}
"""The checks that have not ended. Other threads may begin and end checks during a loop, so loops use a copy."""


def drop_checks_of(model: nn.Module) -> None:
    """End the checks of a model that a new DiLoCo trains.

    Args:
        model: the model of the new DiLoCo.
    """
    for each in _all.copy().values():
        if each.has_any_of((*model.parameters(), *model.buffers())):
            each.drop()


@torch.no_grad()
def _some_values(tensor: Tensor) -> Tensor:
    """Return at most `MOST_VALUES` values of a tensor, at equal distances, as a copy on the CPU."""
    values = tensor.detach()
    if not values.is_contiguous():
        values = values.contiguous()
    values = values.view(-1)
    return values[:: -(-values.numel() // MOST_VALUES) or 1].to("cpu", copy=True)


def _smallest(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the smallest tensors with their names, at most `MOST_BYTES` together. All replicas choose the same tensors.

    Args:
        tensors: the tensors by name.
    """
    # A tensor may be a view of a larger tensor, whose whole memory then stays in use.
    sizes = {name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items() if not tensor.is_meta}
    total = 0
    for name, size in sorted(sizes.items(), key=lambda item: (item[1], item[0])):
        total += size
        if total > MOST_BYTES:
            return
        yield name, tensors[name]


def _mark_of_changed(tensors: Mapping[str, tuple[Tensor, Tensor]]) -> float | None:
    """Return a number that identifies all changed values. None: no value has changed.

    The number is the sum of the values with random signs, divided by their norm, so its size is about 1. Other values
    give another number. The same values give nearly the same number on a processor that adds them in another order.

    Args:
        tensors: each tensor and its values at `close()`, by name.
    """
    total = square = 0.0
    for name, (tensor, before) in sorted(tensors.items()):
        if tensor.is_meta:
            continue
        now = _some_values(tensor)
        # A cast, such as `model.half()` before an evaluation, does not count as a change.
        if now.shape != before.shape or torch.equal(now, before.to(now.dtype)) or not now.isfinite().all():
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        signs = torch.randint(2, now.shape, generator=generator, device="cpu") * 2 - 1
        total += float((now.double() * signs).sum())
        square += float(now.double().square().sum())
    return total / square**0.5 if square > 0 else None
