"""One byte a value: whole numbers from -127 to 127, and a float32 scale for each group of 256.

A block is the scales of all groups, and then the numbers.
"""

from __future__ import annotations

import numpy as np

from diloco.wires.groups import are_finite, scales_of, times_scales, to_whole
from diloco.wires.wire import Floats, square_by_pieces

GROUP, MOST = 256, 127


class Int8:
    """A quarter of fp32's bytes."""

    name = "int8"
    is_exact = False

    def size(self, n: int) -> int:
        return _scale_bytes(n) + n

    def span(self, n: int, start: int, end: int) -> slice:
        return slice(_scale_bytes(n) + start, _scale_bytes(n) + end)

    def place(self, block: memoryview, n: int, start: int, room: Floats) -> Floats:
        return room

    def encode(self, values: Floats, block: memoryview, n: int, start: int) -> float:
        end = start + len(values)
        square = to_whole(values, GROUP, MOST, scales_of(block, n, GROUP, start, end))
        np.copyto(np.frombuffer(block[self.span(n, start, end)], np.int8), values, casting="unsafe")
        return square

    def decode(self, block: memoryview, n: int, start: int, room: Floats) -> Floats:
        end = start + len(room)
        np.copyto(room, np.frombuffer(block[self.span(n, start, end)], np.int8))
        times_scales(room, GROUP, scales_of(block, n, GROUP, start, end))
        return room

    def accumulate(
        self, block: memoryview, n: int, start: int, weight: np.float32, acc: Floats, product: Floats, *, first: bool
    ) -> None:
        end, to = start + len(acc), acc if first else product
        np.copyto(to, np.frombuffer(block[self.span(n, start, end)], np.int8))
        times_scales(to, GROUP, scales_of(block, n, GROUP, start, end) * weight)
        if not first:
            np.add(acc, product, out=acc)

    def square(self, block: memoryview, n: int) -> float | None:
        return square_by_pieces(self, block, n) if are_finite(scales_of(block, n, GROUP, 0, n), MOST) else None


def _scale_bytes(n: int) -> int:
    return 4 * -(-n // GROUP)
