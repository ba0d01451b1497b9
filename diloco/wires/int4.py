"""Half a byte a value: whole numbers from -7 to 7, and a float32 scale for each group of 128.

A block is the scales of all groups, zeros up to a multiple of 8 bytes, and then pages of 8192 values. A page of m
values, one zero more where m is odd, is m / 2 bytes: byte i holds value i in its low half and value m / 2 + i in its
high half, each plus 8. So both halves of a page are consecutive values, and none is moved on its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from diloco.wires.groups import are_finite, scales_of, times_scales, to_whole
from diloco.wires.wire import Floats, square_by_pieces

Codes: TypeAlias = npt.NDArray[np.uint8]
GROUP, MOST, PAGE, ZERO = 128, 7, 8192, 8


class Int4:
    """An eighth of fp32's bytes."""

    name = "int4"
    is_exact = False

    def size(self, n: int) -> int:
        return _scale_bytes(n) + -(-n // 2)

    def span(self, n: int, start: int, end: int) -> slice:
        return slice(_scale_bytes(n) + start // 2, _scale_bytes(n) + -(-end // 2))

    def place(self, block: memoryview, n: int, start: int, room: Floats) -> Floats:
        return room

    def encode(self, values: Floats, block: memoryview, n: int, start: int) -> float:
        end = start + len(values)
        pad = slice(4 * -(-n // GROUP), _scale_bytes(n))
        block[pad] = bytes(pad.stop - pad.start)
        square = to_whole(values, GROUP, MOST, scales_of(block, n, GROUP, start, end))
        codes = np.full(len(values) + len(values) % 2, ZERO, np.int8)
        np.copyto(codes[: len(values)], values, casting="unsafe")
        codes[: len(values)] += ZERO
        for packed, low, high in _pages(block[self.span(n, start, end)], codes):
            np.left_shift(high, 4, out=packed)
            np.bitwise_or(packed, low, out=packed)
        return square

    def decode(self, block: memoryview, n: int, start: int, room: Floats) -> Floats:
        self._unpack(block, n, start, room)
        times_scales(room, GROUP, scales_of(block, n, GROUP, start, start + len(room)))
        return room

    def accumulate(
        self, block: memoryview, n: int, start: int, weight: np.float32, acc: Floats, product: Floats, *, first: bool
    ) -> None:
        to = acc if first else product
        self._unpack(block, n, start, to)
        times_scales(to, GROUP, scales_of(block, n, GROUP, start, start + len(acc)) * weight)
        if not first:
            np.add(acc, product, out=acc)

    def square(self, block: memoryview, n: int) -> float | None:
        return square_by_pieces(self, block, n) if are_finite(scales_of(block, n, GROUP, 0, n), MOST) else None

    def _unpack(self, block: memoryview, n: int, start: int, to: Floats) -> None:
        codes = np.empty(len(to) + len(to) % 2, np.int8)
        for packed, low, high in _pages(block[self.span(n, start, start + len(to))], codes):
            np.bitwise_and(packed, 15, out=low)
            np.floor_divide(packed, 16, out=high)  # sooner than a shift
        codes -= ZERO
        np.copyto(to, codes[: len(to)])


def _scale_bytes(n: int) -> int:
    return 8 * -(-n // (2 * GROUP))


def _pages(data: memoryview, codes: npt.NDArray[np.int8]) -> Iterator[tuple[Codes, Codes, Codes]]:
    """Yield pages, many at a time where they are whole: their bytes, and the codes of both halves."""
    packed, each = np.frombuffer(data, np.uint8), codes.view(np.uint8)
    whole = len(codes) // PAGE * PAGE
    for first, end, page in ((0, whole, PAGE), (whole, len(codes), len(codes) - whole)):
        if first < end:
            halves = each[first:end].reshape(-1, 2, page // 2)
            yield packed[first // 2 : end // 2].reshape(-1, page // 2), halves[:, 0], halves[:, 1]
