"""Warns of copies of the weights that are wrong from the start: made before the first anchor, or averaged locally."""

from __future__ import annotations

import re
import warnings
from collections.abc import Container, Iterable
from contextlib import suppress
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor, nn

from diloco.stale_copies.samples import VALUES, Sample, Values, largest
from diloco.stale_copies.search import reachable_objects, reachable_tensors, tensors_in
from diloco.tensor_names import find_tensor

AVERAGE = re.compile(r"(?<![A-Z])EMA(?![a-z])|Ema(?![a-z])|ExponentialMovingAverage|AveragedModel")
"""Matches class names of averages of weights: ModelEmaV3 (timm), EMAModel (diffusers), AveragedModel (torch)."""


class EarlyCopies:
    """Finds copies of the parameters that were made before the first anchor replaced them.

    An EMA of the weights that is made before `DiLoCo(model)` begins at values that the run does not have.

    Args:
        model: the model, before the first anchor.
        names: the names of the parameters that the anchor will replace.

    Example:
        early = EarlyCopies(model, names)
        take_first_anchor()
        early.look()
        early.warn()
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._before: dict[tuple[int, ...], list[tuple[Sample, Values]]] = {}
        for name in names:
            parameter = find_tensor(model, name, "parameter")
            if parameter.numel() >= VALUES:  # two small biases often have equal values by chance
                sample = Sample(name, parameter, 0)
                self._before.setdefault(tuple(parameter.shape), []).append((sample, sample.read().copy()))
        self.found: list[tuple[ReferenceType[Tensor], Sample, Values]] = []

    def look(self) -> None:
        """Find tensors that still have the values from before the anchor. Call it once, because it takes
        milliseconds.
        """
        changed: dict[tuple[int, ...], list[tuple[Sample, Values]]] = {}
        for shape, samples in self._before.items():
            if moved := [(s, b) for s, b in samples if not np.array_equal(s.read(), b) and largest(b)]:
                changed[shape] = moved
        own = {s.parameter.data_ptr() for samples in self._before.values() for s, _ in samples}
        for thing in reachable_tensors() if changed else ():
            with suppress(Exception):  # a tensor may have no storage, or may be of a class that cannot be read
                if not thing.is_floating_point() or thing.data_ptr() in own:
                    continue
                for sample, before in changed.get(tuple(thing.shape), ()):
                    values = thing.detach().reshape(-1)[:VALUES].float().cpu().numpy()
                    if np.array_equal(values, before):
                        self.found.append((ref(thing), sample, before))
        self._before = {}

    def take_anchor(self, tensors: Iterable[Tensor]) -> None:
        """Set copies among these tensors to the values that the parameters have now.

        Args:
            tensors: the tensors that `average_also` was given.
        """
        pointers = {tensor.data_ptr() for tensor in tensors}
        left = []
        for reference, sample, before in self.found:
            tensor = reference()
            if tensor is not None and tensor.data_ptr() in pointers:
                with torch.no_grad():
                    tensor.copy_(sample.parameter)
            else:
                left.append((reference, sample, before))
        self.found = left

    def warn(self) -> None:
        """Warn once about copies that still have the old values."""
        found, self.found = self.found, []
        names = []
        for reference, sample, before in found:
            tensor = reference()
            if tensor is not None and np.array_equal(tensor.detach().reshape(-1)[:VALUES].float().cpu(), before):
                names.append(sample.name)
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            warnings.warn(
                f"A tensor outside the model holds {names[0]!r}{more} as it was before the first anchor, like an EMA "
                "made too early. Make copies of the weights after DiLoCo(model), or pass them to "
                "diloco.average_also().",
                stacklevel=4,
            )


def warn_of_own_averages(model: nn.Module, averaged: Container[int]) -> None:
    """Warn once if each replica makes its own average of the weights, such as an EMA of timm.

    The average is recognized by its class name, among all objects that the user's variables lead to. Its values prove
    nothing: a new average equals the model, and so does a copy of the best model.

    Args:
        model: the trained model.
        averaged: the memory addresses (`data_ptr()`) of all tensors that `average_also()` averages over the replicas.

    Example:
        warn_of_own_averages(model, {tensor.data_ptr() for tensor in extra})
    """
    own = {parameter.data_ptr() for parameter in model.parameters()}
    shapes = {tuple(p.shape) for p in model.parameters() if p.requires_grad and p.numel() >= VALUES}
    for thing in reachable_objects():
        if AVERAGE.search(type(thing).__name__) is None:
            continue
        copies: list[Tensor] = []
        with suppress(Exception):  # an object of the user may refuse access to its attributes
            held = (
                [*thing.parameters(), *thing.buffers()] if isinstance(thing, nn.Module) else tensors_in([vars(thing)])
            )
            copies = [each for each in held if tuple(each.shape) in shapes and each.data_ptr() not in own]
        if not copies or any(each.data_ptr() in averaged for each in copies):
            continue
        warnings.warn(
            f"{type(thing).__name__} averages the weights of this replica alone, so each replica ends with another "
            "average. Pass it to diloco.average_also() before the first step. In a trainer, call "
            "DiLoCoCallback.diloco.average_also() in on_train_begin of a callback that comes after DiLoCoCallback.",
            stacklevel=3,
        )
        return
