"""The wire `top8`: the signs of one value in eight, with one scale for each chunk of 4096 values.

A chunk is sent as the positions of its largest values, in rising order, each with the sign of its value. Positions are
encoded by the method of Elias and Fano with three low bits. A position and its sign take 6 bits. A 12-bit index and a
2-bit value would take 14. The size of a block still follows from its number of values alone.

The values that are not sent are not a rounding error: they are seven eighths of the work. `Wire.keeps` and `Wire.live`
decide how much of them a sender keeps, and where. Three published methods are close to this one: signs with error
feedback (Karimireddy et al., arXiv:1901.09847), sparse contributions with error feedback (Stich et al.,
arXiv:1809.07599), and SparseLoCo (arXiv:2508.15706). ADR 0084 has the measurements that this wire follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from diloco.wires.wire import Floats, MalformedBlockError, NotFiniteError

CHUNK, ALIGN = 4096, 8
SENT = 8
"""One value in this number of values is sent."""
OVER_RELAXATION = 1.5
"""The scale is this factor times the mean magnitude of the sent values.

The excess returns with the next contribution, as a rest of the opposite sign. A factor of 1.5 halves the additional
loss of a factor of 1. 1.75 is as good, 2 is worse, and 2.5 diverges.
"""
LEAST = np.float32(2.0**-100)
"""A smaller scale becomes zero, because processors round smaller products in different ways."""
MOST_SCALE_BITS = int(np.float32(np.finfo(np.float32).max / 2).view(np.uint32))
"""The bits of the largest scale. The bits of negative numbers, infinities and NaN are larger."""
NO_SIGN = np.uint32(0x7FFFFFFF)
AT_ONCE = 32
"""The number of whole chunks that are encoded at once.

Their temporary arrays stay in the cache, and are used again for the next chunks. With all chunks of a piece at once, a
sender takes twice as long to subtract, encode and digest its work.
"""

Positions = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]


class Rows(NamedTuple):
    """Chunks of one length in a piece: all whole ones, or the shorter last one."""

    n: int
    """The number of chunks."""
    length: int
    """The number of values of each chunk."""
    n_sent: int
    """The number of values of each chunk that are sent."""
    first: int
    """The position of the first value in the piece."""
    chunks: slice
    """The chunks, by their numbers in the piece."""
    data: slice
    """The bytes of the chunks, without scales, in the bytes of the piece."""

    @property
    def end(self) -> int:
        """The position after the last value in the piece."""
        return self.first + self.n * self.length

    @property
    def high_bytes(self) -> int:
        """The number of bytes of the high bits of each chunk."""
        return -(-2 * self.n_sent // 8)


class EncoderScratch:
    """Memory for the temporary arrays of an encoder.

    Args:
        n_chunks: the largest number of chunks that are encoded at once.

    Example:
        EncoderScratch(16).magnitudes
    """

    def __init__(self, n_chunks: int) -> None:
        n_sent = n_chunks * _n_sent(CHUNK)
        self.magnitudes = np.empty(n_chunks * CHUNK, np.uint32)
        self.ordered = np.empty(n_chunks * CHUNK, np.uint32)
        self.chosen = np.empty(n_chunks * CHUNK, np.bool_)
        self.high = np.empty(8 * -(-2 * n_sent // 8), np.bool_)


class Top8:
    """Encodes a value in one 42nd of the bytes of fp32."""

    name = "top8"
    is_exact = False
    is_relative = False
    is_sparse = True
    # Two measured constants. A tenth of the rest is given up in each round. Without that, values that are never large
    # enough to be sent would grow old in the rest, and old work no longer fits the anchor. With 0.8 the loss is the
    # same as with 0.9.
    keeps = 0.9
    # With the whole rest in the live parameters, replicas train too far apart in long runs. With none of it, each
    # replica trains from parameters that lack its own work.
    live = 0.25

    def size(self, n: int) -> int:
        return _scale_bytes(n) + _chunk_bytes(n)

    def span(self, n: int, start: int, end: int) -> slice:
        first = _scale_bytes(n)
        return slice(first + _chunk_bytes(start), first + _chunk_bytes(end))

    def encode_buffer(self, block: memoryview, n: int, start: int, scratch: Floats) -> Floats:
        return scratch

    def encode(self, values: Floats, block: memoryview, n: int, start: int) -> float:
        end, square = start + len(values), 0.0
        pad = slice(4 * -(-n // CHUNK), _scale_bytes(n))
        block[pad] = bytes(pad.stop - pad.start)
        scales, data = _scales(block, n, start, end), np.frombuffer(block[self.span(n, start, end)], np.uint8)
        scratch = EncoderScratch(min(AT_ONCE, -(-len(values) // CHUNK)))
        for rows in _rows(len(values), AT_ONCE):
            mine = values[rows.first : rows.end]
            positions = _largest(mine, rows, scratch)
            sent = mine.take(positions)
            with np.errstate(invalid="ignore", over="ignore"):  # the check below refuses NaN and infinity
                means = np.abs(sent).reshape(rows.n, rows.n_sent).sum(1, dtype=np.float64) / rows.n_sent
                scale = (OVER_RELAXATION * means).astype(np.float32)
            if not _are_legal(scale):
                raise NotFiniteError
            scale[scale < LEAST] = 0.0
            scales[rows.chunks] = scale
            _write(positions, sent < 0, rows, data[rows.data], scratch)
            square += rows.n_sent * float(np.square(scale, dtype=np.float64).sum())
        return square

    def decode(self, block: memoryview, n: int, start: int, scratch: Floats) -> Floats:
        scratch.fill(0.0)
        for where, values in self._sent(block, n, start, len(scratch), None):
            scratch[where] = values
        return scratch

    def accumulate(
        self, block: memoryview, n: int, start: int, weight: np.float32, acc: Floats, product: Floats, *, first: bool
    ) -> None:
        # Everything is read and checked before anything is added, so a malformed block leaves the sum as it was.
        sent = list(self._sent(block, n, start, len(acc), weight))
        if first:
            acc.fill(0.0)
        total = torch.from_numpy(acc)
        for where, values in sent:
            # No position occurs twice, so the order of the sums does not matter. `index_add_` takes half as long again,
            # and a sum by numpy twice as long.
            total.scatter_add_(0, torch.from_numpy(where), torch.from_numpy(values))

    def is_finite(self, block: memoryview, n: int) -> bool:
        try:
            for _ in self._sent(block, n, 0, n, None):
                pass
        except MalformedBlockError:
            return False
        return True

    def _sent(
        self, block: memoryview, n: int, start: int, n_values: int, weight: np.float32 | None
    ) -> Iterator[tuple[Positions, Floats]]:
        """Yield positions in a piece and their values: for all whole chunks, and then for the shorter last one.

        Args:
            block: the block.
            n: the number of values of the block.
            start: the first value of the piece.
            n_values: the number of values of the piece.
            weight: a factor of all values. None: no factor.

        Raises:
            MalformedBlockError: the bytes are not what an encoder may write.
        """
        end = start + n_values
        if any(block[4 * -(-n // CHUNK) : _scale_bytes(n)]):
            raise MalformedBlockError("has bytes other than 0 after its scales")
        scales, data = _scales(block, n, start, end), np.frombuffer(block[self.span(n, start, end)], np.uint8)
        if not _are_legal(scales):
            raise MalformedBlockError("has a scale that is negative, not finite or too large")
        for rows in _rows(n_values):
            positions, signs = _read(data[rows.data], rows)
            scale = scales[rows.chunks] if weight is None else scales[rows.chunks] * weight
            signs.reshape(rows.n, rows.n_sent)[...] |= scale.view(np.uint32)[:, None]
            positions += rows.first
            yield positions, signs.view(np.float32)


def _largest(values: Floats, rows: Rows, scratch: EncoderScratch) -> Positions:
    """Return the positions of the largest magnitudes of each chunk, in rising order.

    If magnitudes are equal, the lower positions are taken.

    Args:
        values: the values of the chunks.
        rows: the chunks.
        scratch: memory for temporary arrays.
    """
    shape, n = (rows.n, rows.length), rows.n * rows.length
    magnitudes, ordered = scratch.magnitudes[:n].reshape(shape), scratch.ordered[:n].reshape(shape)
    chosen = scratch.chosen[:n].reshape(shape)
    # Magnitudes have the order of their bits as whole numbers. NaN is above all of them, so it reaches the scale.
    # `argpartition` of the values takes three times as long as this, and `torch.topk` sixteen times.
    bits = values.view(np.uint32).reshape(shape)
    np.bitwise_and(bits, NO_SIGN, out=magnitudes)
    # A copy of `magnitudes` takes up to ten times as long as this on some processors of AMD, where `memcpy` is slow if
    # both addresses have the same offset in a page (https://sourceware.org/bugzilla/show_bug.cgi?id=30994).
    np.bitwise_and(bits, NO_SIGN, out=ordered)
    ordered.partition(rows.length - rows.n_sent, axis=1)
    least = ordered[:, rows.length - rows.n_sent, None]
    np.greater_equal(magnitudes, least, out=chosen)
    positions = np.flatnonzero(chosen)
    if len(positions) > rows.n * rows.n_sent:
        for row in np.flatnonzero(np.count_nonzero(chosen, axis=1) > rows.n_sent):
            ties = np.flatnonzero(magnitudes[row] == least[row])
            n_larger = np.count_nonzero(magnitudes[row] > least[row])
            chosen[row, ties[rows.n_sent - n_larger :]] = False
        positions = np.flatnonzero(chosen)
    return positions


def _write(
    positions: Positions, is_negative: npt.NDArray[np.bool_], rows: Rows, to: Bytes, scratch: EncoderScratch
) -> None:
    """Write the positions and signs of chunks as bytes.

    Args:
        positions: the positions, which rise, counted from the first value of the first chunk.
        is_negative: True for each of these values that is negative.
        rows: the chunks.
        to: the bytes of the chunks.
        scratch: memory for temporary arrays.
    """
    # Several whole chunks have 2 * n_sent bits each, without gaps. So the bit of the i-th position of all chunks has
    # the number i + (position >> 3), as in one chunk.
    high = scratch.high[: 8 * rows.n * rows.high_bytes]
    high.fill(False)
    bits = positions >> 3
    bits += _numbers(len(positions))
    high[bits] = True
    codes = np.zeros(len(positions) + len(positions) % 2, np.uint8)
    np.copyto(codes[: len(positions)], positions, casting="unsafe")
    codes &= 7
    codes[: len(positions)] |= is_negative.view(np.uint8) << 3
    pairs = codes.view(np.uint16)
    both = to.reshape(rows.n, -1)
    both[:, : rows.high_bytes] = np.packbits(high, bitorder="little").reshape(rows.n, -1)
    both[:, rows.high_bytes :] = (pairs | pairs >> 4).astype(np.uint8).reshape(rows.n, -1)


def _read(data: Bytes, rows: Rows) -> tuple[Positions, Bits]:
    """Return the positions of chunks, counted from the first value of the first chunk, and the sign bit of each value.

    Args:
        data: the bytes of the chunks.
        rows: the chunks.

    Raises:
        MalformedBlockError: the bytes are not what an encoder may write.
    """
    n_sent, both = rows.n * rows.n_sent, data.reshape(rows.n, -1)
    high = np.unpackbits(both[:, : rows.high_bytes].reshape(-1), bitorder="little")
    positions = np.flatnonzero(high.view(np.bool_))  # with a view of bool, this takes a sixth of the time
    if len(positions) != n_sent:
        raise MalformedBlockError("does not name one value in eight")
    pairs = both[:, rows.high_bytes :].reshape(-1).astype(np.uint16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    codes = pairs.view(np.uint8)
    if codes[n_sent:].any():
        raise MalformedBlockError("has bits other than 0 after its last value")
    codes = codes[:n_sent]
    positions -= _numbers(n_sent)
    positions <<= 3
    positions += codes & 7
    # Each chunk must name values of its own, and none of them twice. If a value is named twice, one library adds it
    # once, and another one twice.
    of_chunk = positions.reshape(rows.n, rows.n_sent)
    starts = rows.length * np.arange(rows.n)
    are_inside = (of_chunk[:, 0] >= starts).all() and (of_chunk[:, -1] < starts + rows.length).all()
    if not are_inside or (positions[1:] <= positions[:-1]).any():
        raise MalformedBlockError("names positions that do not rise, or that are outside of their chunk")
    signs = (codes >> 3).astype(np.uint32)
    signs <<= np.uint32(31)
    return positions, signs


def _rows(n_values: int, at_once: int | None = None) -> Iterator[Rows]:
    """Yield the whole chunks of a piece, and then the shorter last one.

    Args:
        n_values: the number of values of the piece.
        at_once: the largest number of whole chunks in one item. None: all of them.
    """
    n_whole = n_values // CHUNK
    most = at_once or max(1, n_whole)
    for first in range(0, n_whole, most):
        end = min(first + most, n_whole)
        data = slice(first * _chunk_bytes(CHUNK), end * _chunk_bytes(CHUNK))
        yield Rows(end - first, CHUNK, _n_sent(CHUNK), first * CHUNK, slice(first, end), data)
    if length := n_values % CHUNK:
        data = slice(n_whole * _chunk_bytes(CHUNK), _chunk_bytes(n_values))
        yield Rows(1, length, _n_sent(length), n_whole * CHUNK, slice(n_whole, n_whole + 1), data)


@lru_cache(maxsize=6)
def _numbers(n: int) -> Positions:
    """Return the whole numbers from 0 to n - 1. A sender and a reader need few lengths: whole pieces and last ones."""
    numbers = np.arange(n)
    numbers.flags.writeable = False
    return numbers


def _n_sent(length: int) -> int:
    return -(-length // SENT)


def _chunk_bytes(n: int) -> int:
    """Return the number of bytes of the chunks of n values, without their scales."""

    def bytes_of(length: int) -> int:
        return -(-2 * _n_sent(length) // 8) + -(-_n_sent(length) // 2)

    return n // CHUNK * bytes_of(CHUNK) + bytes_of(n % CHUNK)


def _scale_bytes(n: int) -> int:
    """Return the size of the scales of a block of n values, with the zeros after them."""
    return -(-4 * -(-n // CHUNK) // ALIGN) * ALIGN


def _scales(block: memoryview, n: int, start: int, end: int) -> Floats:
    """Return the scales of the chunks from value `start` to value `end`, in a block of n values."""
    scales: Floats = np.frombuffer(block, np.float32, -(-n // CHUNK))
    return scales[start // CHUNK : -(-end // CHUNK)]


def _are_legal(scales: Floats) -> bool:
    """Return True if no scale is negative, not finite, or larger than half of the largest float32."""
    return bool(scales.view(np.uint32).max() <= MOST_SCALE_BITS)
