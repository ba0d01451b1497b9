"""Samples: a few neighboring values of a parameter, which are cheap to read around each round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VALUES = 32
"""Neighboring values compared of each."""
Values = NDArray[np.float32]


class Sample:
    """A few neighboring values of one parameter.

    Args:
        name, parameter: as the model has them.
        start: the first value, of the flat parameter.
    """

    __slots__ = ("_array", "_pointer", "name", "parameter", "start")

    def __init__(self, name: str, parameter: Tensor, start: int) -> None:
        self.name, self.parameter, self.start = name, parameter, start
        self._pointer = -1
        self._array: Values | None = None

    @property
    def n_values(self) -> int:
        return min(VALUES, self.parameter.numel())

    def read(self) -> Values:
        """Return the values as they are now in float32, perhaps as a view of the parameter."""
        # The view is kept, since making it takes ten times as long as reading it: the check is part of a step.
        if self._array is None or self._pointer != self.parameter.data_ptr():
            view = self.view()
            if view.dtype != torch.float32 or view.device.type != "cpu":
                return view.float().cpu().numpy()
            self._array, self._pointer = view.numpy(), self.parameter.data_ptr()
        return self._array

    def view(self) -> Tensor:
        """Return the values as they are now, as a view of the parameter: what is written to it is written there."""
        values = self.parameter.detach()
        if values.is_contiguous():
            return values.view(-1)[self.start : self.start + VALUES]
        while values.dim() > 1:  # a convolution in channels_last: values beside each other in its last dimension
            values = values[self.start % len(values)]
        return values[:VALUES]


def read(samples: Sequence[Sample]) -> Values:
    """Return the values of some samples as (n_samples, VALUES), with zeros where a sample has fewer."""
    values = np.zeros((len(samples), VALUES), np.float32)
    for row, sample in zip(values, samples, strict=True):
        now = sample.read()
        row[: len(now)] = now
    return values


def distance(a: Values, b: Values) -> float:
    return float(np.linalg.norm(a - b))


def largest(values: Values) -> float:
    return float(np.abs(values).max()) if values.size else 0.0
