"""Samples: a few neighboring values of a parameter, which are fast to read before and after each round."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

VALUES = 32
"""Number of neighboring values of a parameter that are compared."""
Values = NDArray[np.float32]


class Sample:
    """A few neighboring values of one parameter.

    Args:
        name: the name of the parameter.
        parameter: the parameter.
        start: the number of the first value, in the flat parameter.

    Example:
        Sample("head.weight", model.head.weight, 0).read()
    """

    __slots__ = ("_array", "_pointer", "name", "parameter", "start")

    def __init__(self, name: str, parameter: Tensor, start: int) -> None:
        self.name, self.parameter, self.start = name, parameter, start
        self._pointer = -1
        self._array: Values | None = None

    @property
    def n_values(self) -> int:
        """The number of values."""
        return min(VALUES, self.parameter.numel())

    def read(self) -> Values:
        """Return the values as they are now, in float32. The array may be a view of the parameter."""
        # The view is kept, because its creation takes ten times as long as a read, and would be needed in every step.
        if self._array is None or self._pointer != self.parameter.data_ptr():
            view = self.view()
            if view.dtype != torch.float32 or view.device.type != "cpu":
                return view.float().cpu().numpy()
            self._array, self._pointer = view.numpy(), self.parameter.data_ptr()
        return self._array

    def view(self) -> Tensor:
        """Return the values as they are now, as a view of the parameter. A write to it changes the parameter."""
        values = self.parameter.detach()
        if values.is_contiguous():
            return values.view(-1)[self.start : self.start + VALUES]
        while values.dim() > 1:  # such as a convolution in channels_last: neighbors in the last dimension are used
            values = values[self.start % len(values)]
        return values[:VALUES]


def read_samples(samples: Sequence[Sample]) -> Values:
    """Return the values of samples as (n_samples, VALUES), with zeros if a sample has fewer values.

    Args:
        samples: the samples.

    Example:
        read_samples([Sample("head.weight", model.head.weight, 0)])
    """
    values = np.zeros((len(samples), VALUES), np.float32)
    for row, sample in zip(values, samples, strict=True):
        now = sample.read()
        row[: len(now)] = now
    return values


def distance(a: Values, b: Values) -> float:
    """Return the Euclidean distance of two arrays.

    Args:
        a: an array.
        b: an array of the same shape.

    Example:
        distance(before, after)
    """
    return float(np.linalg.norm(a - b))


def largest(values: Values) -> float:
    """Return the largest absolute value of an array; 0 if it is empty.

    Args:
        values: the array.

    Example:
        largest(after - before)
    """
    return float(np.abs(values).max()) if values.size else 0.0
