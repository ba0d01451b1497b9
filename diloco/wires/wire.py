"""How values travel: what a wire does with a block of float32 values, and what is the same for every wire.

A payload is cut into blocks, the last one shorter. Each block is encoded by itself, so that any range of whole blocks
can be read, proved and reduced without the rest. What counts is what a block decodes to: that is the same bits on
every processor, while an encoder may differ by a unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Pieces: TypeAlias = Iterator[tuple[int, Floats]]
"""Consecutive values: the first one's number, and the values, valid until the next piece."""

BLOCK_ELEMENTS = 1 << 20
"""What one digest covers. Shards are whole blocks."""
PIECE = 512 << 10
"""Elements that are worked on at a time: fewer cost more in calls than they save in the cache, and more leave it. To
encode as int8 takes a sixth longer with half of them, half as long again with an eighth. A multiple of every group and
page of a wire."""


class Hash(Protocol):
    """A digest in the making."""

    def update(self, data: Any, /) -> None: ...

    def hexdigest(self) -> str:
        """Return 32 hexadecimal characters."""


class NotFiniteError(ValueError):
    """A value is not finite, or too large for the wire."""


class Wire(Protocol):
    """One way to write float32 values as bytes. A block of `n` values may be gone through in pieces, in order."""

    @property
    def name(self) -> str: ...

    @property
    def is_exact(self) -> bool:
        """Whether each value is decoded as it was encoded."""

    @property
    def is_relative(self) -> bool:
        """Whether the error of each value is a share of that value, and not of the largest one beside it."""

    def size(self, n: int) -> int:
        """Return the bytes of a block of `n` values."""

    def span(self, n: int, start: int, end: int) -> slice:
        """Return which bytes of a block hold these values; what is before the first value's belongs to all.

        Args:
            start: a multiple of `PIECE`.
            end: another one, or `n`.
        """

    def place(self, block: memoryview, n: int, start: int, room: Floats) -> Floats:
        """Return where values may be put that are to be encoded from `start` on: `room`, or the block itself."""

    def encode(self, values: Floats, block: memoryview, n: int, start: int) -> float:
        """Write values from `start` on into a block; return the sum of the squares of what is decoded from it.

        Args:
            values: memory that is used to work in.

        Raises: NotFiniteError.
        """

    def decode(self, block: memoryview, n: int, start: int, room: Floats) -> Floats:
        """Return as many values as `room` has, from `start` on: in `room`, or a view of the block."""

    def accumulate(
        self, block: memoryview, n: int, start: int, weight: np.float32, acc: Floats, product: Floats, *, first: bool
    ) -> None:
        """Add weighted values from `start` on, as many as `acc` has; the first time, set them.

        Each product and each sum is rounded by itself.

        Args:
            product: memory to work in, as large as `acc`.
        """

    def is_finite(self, block: memoryview, n: int) -> bool:
        """Return whether every value of a block is."""


class Block(NamedTuple):
    """One block of a payload."""

    n: int
    """Number of its values."""
    start: int
    end: int
    """Its bytes in the payload."""


def blocks_of(wire: Wire, n_elements: int, block_elements: int) -> Iterator[Block]:
    """Yield the blocks of a payload."""
    at = 0
    for first in range(0, n_elements, block_elements):
        n = min(block_elements, n_elements - first)
        yield Block(n, at, at + wire.size(n))
        at += wire.size(n)


class BlockWriter:
    """Encodes a block piece by piece, and digests it on the way where its bytes come in their order."""

    def __init__(self, wire: Wire, block: memoryview, n: int, digest: Hash) -> None:
        self.square = 0.0
        """The sum of the squares of what is decoded from it."""
        self._wire = wire
        self._block = block
        self._n = n
        self._digest = digest
        self._is_in_order = not wire.span(n, 0, n).start

    def write(self, values: Floats, start: int) -> None:
        """Raises: NotFiniteError."""
        self.square += self._wire.encode(values, self._block, self._n, start)
        if self._is_in_order:
            self._digest.update(self._block[self._wire.span(self._n, start, start + len(values))])

    def digest(self) -> str:
        """Return the digest of the whole block."""
        if not self._is_in_order:
            self._digest.update(self._block)
        return self._digest.hexdigest()


def decoded(wire: Wire, ranges: Sequence[memoryview], n_elements: int, block_elements: int) -> Pieces:
    """Yield a payload's values in pieces of up to `PIECE`.

    Args:
        ranges: the payload, cut anywhere between blocks.
    """
    room = np.empty(min(PIECE, block_elements, n_elements), np.float32)
    first = 0
    for data in ranges:
        at = 0
        while at < len(data):
            n = min(block_elements, n_elements - first)
            block = data[at : at + wire.size(n)]
            for start in range(0, n, PIECE):
                yield first + start, wire.decode(block, n, start, room[: min(PIECE, n - start)])
            first, at = first + n, at + len(block)


def square_of(values: Floats) -> float | None:
    """Return the sum of the squares; None when a value is not finite. In the usual case, for one dot product."""
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(values, values))
    if math.isfinite(square):
        return square
    return float(np.dot(values, values.astype(np.float64))) if np.isfinite(values).all() else None
