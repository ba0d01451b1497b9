"""The protocol of a wire, which encodes float32 values as bytes, and the loops over blocks that all wires share.

A payload is cut into blocks, and the last block may be shorter. Each block is encoded by itself, so any range of whole
blocks can be read, checked and reduced without the others. Decoding a block gives the same bits on every processor. An
encoder may differ by one unit between processors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Pieces: TypeAlias = Iterator[tuple[int, Floats]]
"""Consecutive values in pieces.

Each piece has the number of its first value, and its values, which are valid until the next piece.
"""

BLOCK_ELEMENTS = 1 << 20
"""The number of elements that one digest covers. A shard consists of whole blocks."""
PIECE = 512 << 10
"""The number of elements that a loop works on at a time, so that they stay in the cache.

Smaller pieces cost more calls: encoding as int8 takes a sixth longer with half of this size, and half as long again
with an eighth. It is a multiple of every group and every page of a wire.
"""


class Hash(Protocol):
    """A hash that gets its data piece by piece."""

    def update(self, data: Any, /) -> None:
        """Add data."""

    def hexdigest(self) -> str:
        """Return 32 hexadecimal characters."""


class NotFiniteError(ValueError):
    """A value is not finite, or is too large for the wire."""


class MalformedBlockError(ValueError):
    """The bytes of a block are not what an encoder may write. The message is the end of a sentence about the block."""


class Wire(Protocol):
    """One format of float32 values as bytes. The callers go through a block of n values in pieces, in order."""

    @property
    def name(self) -> str:
        """The name of the wire, as `DiLoCo(wire=…)` takes it."""

    @property
    def is_exact(self) -> bool:
        """True if each value is decoded as it was encoded, without rounding."""

    @property
    def is_relative(self) -> bool:
        """True if rounding errors are relative to each value.

        False: they are relative to the largest value of a group.
        """

    @property
    def is_sparse(self) -> bool:
        """True if only some values are sent, and the others are meant to come with later contributions.

        Such a wire cannot encode means, because a mean has no later one.
        """

    @property
    def keeps(self) -> float:
        """The share of the work that was not sent which a sender keeps. It gives up the remainder in each round."""

    @property
    def live(self) -> float:
        """The share of the kept rest that stays in the live parameters.

        The remainder waits in a buffer, and training does not see it.
        """

    def size(self, n: int) -> int:
        """Return the number of bytes of a block of n values."""

    def span(self, n: int, start: int, end: int) -> slice:
        """Return the range of the bytes of a block that hold some of its values.

        Bytes before the range of the first value, such as scales, belong to the whole block.

        Args:
            n: the number of values of the block.
            start: the first value, a multiple of `PIECE`.
            end: the value after the last one, a multiple of `PIECE` or n.
        """

    def encode_buffer(self, block: memoryview, n: int, start: int, scratch: Floats) -> Floats:
        """Return memory into which the caller writes values before it encodes them.

        An exact wire returns a view of the block itself, which saves a copy.

        Args:
            block: the block.
            n: the number of values of the block.
            start: the first of the values.
            scratch: other memory for the values.
        """

    def encode(self, values: Floats, block: memoryview, n: int, start: int) -> float:
        """Encode values into a block, and return the sum of the squares of the decoded values.

        Args:
            values: the values. The encoder may overwrite this memory.
            block: the block.
            n: the number of values of the block.
            start: the position of the first value in the block.

        Raises:
            NotFiniteError: a value is not finite, or is too large for the wire.
        """

    def decode(self, block: memoryview, n: int, start: int, scratch: Floats) -> Floats:
        """Return decoded values, either in `scratch` or as a view of the block.

        Args:
            block: the block.
            n: the number of values of the block.
            start: the position of the first value in the block.
            scratch: memory. Its length is the number of values.
        """

    def accumulate(
        self, block: memoryview, n: int, start: int, weight: np.float32, acc: Floats, product: Floats, *, first: bool
    ) -> None:
        """Add weighted values of a block to a sum. Each product and each sum is rounded separately.

        Args:
            block: the block.
            n: the number of values of the block.
            start: the position of the first value in the block.
            weight: the factor.
            acc: the sum. Its length is the number of values.
            product: memory for the products, as large as `acc`.
            first: True: set the sum to the products instead of adding them.
        """

    def is_finite(self, block: memoryview, n: int) -> bool:
        """Return True if every value of a block is finite."""


class BlockSpan(NamedTuple):
    """One block of a payload."""

    n: int
    """The number of its values."""
    start: int
    """The offset of its first byte in the payload."""
    end: int
    """The offset of the byte after its last one."""


def blocks_of(wire: Wire, n_elements: int, block_elements: int) -> Iterator[BlockSpan]:
    """Yield the blocks of a payload.

    Args:
        wire: the encoding.
        n_elements: the number of values of the payload.
        block_elements: the number of values of each block but the last one.
    """
    at = 0
    for first in range(0, n_elements, block_elements):
        n = min(block_elements, n_elements - first)
        yield BlockSpan(n, at, at + wire.size(n))
        at += wire.size(n)


class BlockWriter:
    """Encodes a block piece by piece, and computes its digest on the way if the wire writes the bytes in order.

    Args:
        wire: the encoding.
        block: memory for the block.
        n: the number of values of the block.
        digest: a new hash.

    Example:
        writer = BlockWriter(wire, block, n, proof.hash())
        writer.write(values, 0)
        writer.digest()
    """

    def __init__(self, wire: Wire, block: memoryview, n: int, digest: Hash) -> None:
        self.square = 0.0
        """The sum of the squares of the decoded values."""
        self._wire = wire
        self._block = block
        self._n = n
        self._digest = digest
        self._is_in_order = not wire.span(n, 0, n).start

    def write(self, values: Floats, start: int) -> None:
        """Encode a piece.

        Args:
            values: the values. The encoder may overwrite this memory.
            start: the position of the first value in the block.

        Raises:
            NotFiniteError: a value is not finite, or is too large for the wire.
        """
        self.square += self._wire.encode(values, self._block, self._n, start)
        if self._is_in_order:
            self._digest.update(self._block[self._wire.span(self._n, start, start + len(values))])

    def digest(self) -> str:
        """Return the digest of the whole block."""
        if not self._is_in_order:
            self._digest.update(self._block)
        return self._digest.hexdigest()


def decoded(wire: Wire, ranges: Sequence[memoryview], n_elements: int, block_elements: int) -> Pieces:
    """Yield the values of a payload in pieces of up to `PIECE` values.

    Args:
        wire: the encoding.
        ranges: the payload as consecutive ranges of whole blocks.
        n_elements: the number of values of the payload.
        block_elements: the number of values of each block but the last one.
    """
    scratch = np.empty(min(PIECE, block_elements, n_elements), np.float32)
    first = 0
    for data in ranges:
        at = 0
        while at < len(data):
            n = min(block_elements, n_elements - first)
            block = data[at : at + wire.size(n)]
            for start in range(0, n, PIECE):
                yield first + start, wire.decode(block, n, start, scratch[: min(PIECE, n - start)])
            first, at = first + n, at + len(block)


def square_of(values: Floats) -> float | None:
    """Return the sum of the squares of values. None: a value is not finite.

    One dot product is enough unless the sum overflows float32.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        square = float(np.dot(values, values))
    if math.isfinite(square):
        return square
    return float(np.dot(values, values.astype(np.float64))) if np.isfinite(values).all() else None
