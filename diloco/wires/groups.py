"""The common part of the wires `int8` and `int4`: whole numbers in groups, and one scale for each group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch

from diloco.wires.wire import Floats, NotFiniteError

LEAST = np.float32(2.0**-100)
"""A group whose values are all smaller than this becomes zero, because processors round smaller products in different
ways.
"""
LARGEST = float(np.finfo(np.float32).max)


class GroupedWire(ABC):
    """Encodes a block as the float32 scales of its groups, zeros up to a multiple of `align` bytes, and whole numbers.

    Loops over groups use torch: they take half the time of numpy's loops, and give the same bits.
    """

    name: ClassVar[str]
    group: ClassVar[int]
    """The number of values in a group."""
    most: ClassVar[int]
    """The largest whole number. The smallest one is its negative."""
    align: ClassVar[int] = 4
    is_exact: ClassVar[bool] = False
    is_relative: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = False
    keeps: ClassVar[float] = 1.0
    live: ClassVar[float] = 1.0

    @abstractmethod
    def _bytes(self, n: int) -> int:
        """Return the number of bytes that n whole numbers take. The numbers of one piece never share a byte."""

    @abstractmethod
    def _write(self, whole: Floats, to: memoryview) -> None:
        """Write whole numbers as bytes."""

    @abstractmethod
    def _read(self, data: memoryview, to: Floats) -> None:
        """Read whole numbers from bytes."""

    def size(self, n: int) -> int:
        return self._scale_bytes(n) + self._bytes(n)

    def span(self, n: int, start: int, end: int) -> slice:
        first = self._scale_bytes(n)
        return slice(first + self._bytes(start), first + self._bytes(end))

    def encode_buffer(self, block: memoryview, n: int, start: int, scratch: Floats) -> Floats:
        return scratch

    def encode(self, values: Floats, block: memoryview, n: int, start: int) -> float:
        end = start + len(values)
        pad = slice(4 * -(-n // self.group), self._scale_bytes(n))
        block[pad] = bytes(pad.stop - pad.start)
        square = self._to_whole(values, self._scales(block, n, start, end))
        self._write(values, block[self.span(n, start, end)])
        return square

    def decode(self, block: memoryview, n: int, start: int, scratch: Floats) -> Floats:
        end = start + len(scratch)
        self._read(block[self.span(n, start, end)], scratch)
        return self._times(scratch, self._scales(block, n, start, end))

    def accumulate(
        self, block: memoryview, n: int, start: int, weight: np.float32, acc: Floats, product: Floats, *, first: bool
    ) -> None:
        end, to = start + len(acc), acc if first else product
        self._read(block[self.span(n, start, end)], to)
        self._times(to, self._scales(block, n, start, end) * weight)
        if not first:
            np.add(acc, product, out=acc)

    def is_finite(self, block: memoryview, n: int) -> bool:
        return self._are_finite(self._scales(block, n, 0, n))

    def _to_whole(self, values: Floats, scales: Floats) -> float:
        """Replace values by whole numbers, and set their scales. Return the sum of squares of the decoded values."""
        square = 0.0
        for rows, of in self._rows(values):
            all_rows = torch.from_numpy(rows)
            top: Floats = torch.maximum(all_rows.amax(1), -all_rows.amin(1)).numpy()
            scale: Floats = top * np.float32(1 / self.most)
            inverse: Floats = np.divide(np.float32(self.most), np.maximum(top, LEAST))
            scale[top < LEAST] = inverse[top < LEAST] = 0.0
            if not self._are_finite(scale):
                raise NotFiniteError
            _times(rows, inverse)
            np.rint(rows, out=rows)  # top * inverse is less than most + 0.5, so the result is at most `most`
            scales[of] = scale
            square += _square(rows, scale)
        return square

    def _times(self, whole: Floats, scales: Floats) -> Floats:
        """Multiply whole numbers by their scales, in place. Each product is rounded once."""
        for rows, of in self._rows(whole):
            _times(rows, scales[of])
        return whole

    def _are_finite(self, scales: Floats) -> bool:
        """Return True if every value that a group with these scales can have is finite.

        A stored block may also have the number -most - 1, which no encoder writes.
        """
        return bool(np.abs(scales).max() <= LARGEST / (self.most + 1))

    def _scale_bytes(self, n: int) -> int:
        """Return the size of the scales of a block of n values, with the zeros after them."""
        return -(-4 * -(-n // self.group) // self.align) * self.align

    def _scales(self, block: memoryview, n: int, start: int, end: int) -> Floats:
        """Return the scales of the groups from value `start` to value `end`, in a block of n values."""
        scales: Floats = np.frombuffer(block, np.float32, -(-n // self.group))
        return scales[start // self.group : -(-end // self.group)]

    def _rows(self, values: Floats) -> Iterator[tuple[Floats, slice]]:
        """Yield the whole groups as rows, and then the shorter last group, each with the slice of its scales."""
        n_whole = len(values) // self.group
        if n_whole:
            yield values[: n_whole * self.group].reshape(n_whole, self.group), slice(n_whole)
        if len(values) > n_whole * self.group:
            yield values[n_whole * self.group :].reshape(1, -1), slice(n_whole, n_whole + 1)


def _times(rows: Floats, factors: Floats) -> None:
    """Multiply each row by its factor, in place."""
    all_rows = torch.from_numpy(rows)
    # The factors may be a read-only view of a mapped file, which torch does not accept. So they are copied.
    torch.mul(all_rows, torch.from_numpy(factors.copy())[:, None], out=all_rows)


def _square(rows: Floats, scales: Floats) -> float:
    """Return the sum of the squares of the decoded values."""
    whole = np.vecdot(rows, rows)  # this sum is exact, because all sums are less than 2**24
    return float(np.dot(whole.astype(np.float64), np.square(scales, dtype=np.float64)))
