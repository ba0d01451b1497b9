"""The wire `int4`: half a byte per value, a whole number from -7 to 7, and one scale for each group of 128 values.

The numbers are stored in pages of 8192. A page of m numbers takes m / 2 bytes. If m is odd, a zero is added. The low
half of byte i holds number i plus 8, and its high half holds number m / 2 + i plus 8. So the low halves of a page hold
consecutive numbers, and so do the high halves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from diloco.wires.groups import GroupedWire
from diloco.wires.wire import Floats

Codes: TypeAlias = npt.NDArray[np.uint8]
PAGE, ZERO = 8192, 8


class Int4(GroupedWire):
    """Encodes a value in an eighth of the bytes of fp32."""

    name = "int4"
    group = 128
    most = 7
    align = 8

    def _bytes(self, n: int) -> int:
        return -(-n // 2)

    def _write(self, whole: Floats, to: memoryview) -> None:
        codes = np.full(2 * len(to), ZERO, np.int8)
        np.copyto(codes[: len(whole)], whole, casting="unsafe")
        codes[: len(whole)] += ZERO
        for packed, low, high in _pages(to, codes.view(np.uint8)):
            np.left_shift(high, 4, out=packed)
            np.bitwise_or(packed, low, out=packed)

    def _read(self, data: memoryview, to: Floats) -> None:
        codes = np.empty(2 * len(data), np.int8)
        for packed, low, high in _pages(data, codes.view(np.uint8)):
            np.bitwise_and(packed, 15, out=low)
            np.floor_divide(packed, 16, out=high)  # in numpy this is faster than a bit shift
        codes -= ZERO
        np.copyto(to, codes[: len(to)])


def _pages(data: memoryview, codes: Codes) -> Iterator[tuple[Codes, Codes, Codes]]:
    """Yield the bytes of pages, and the codes of both halves. All whole pages come at once, then the shorter one."""
    packed: Codes = np.frombuffer(data, np.uint8)
    whole = len(codes) // PAGE * PAGE
    for first, end, page in ((0, whole, PAGE), (whole, len(codes), len(codes) - whole)):
        if first < end:
            halves = codes[first:end].reshape(-1, 2, page // 2)
            yield packed[first // 2 : end // 2].reshape(-1, page // 2), halves[:, 0], halves[:, 1]
