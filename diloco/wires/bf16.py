"""Two bytes a value: bfloat16, the upper half of a float32, rounded to the nearest, to even where it is between two."""

from __future__ import annotations

import numpy as np

from diloco.wires.wire import Floats, NotFiniteError, square_of

INFINITY = 0x7F80  # its bits, without the sign; those of what is not a number are greater


class Bf16:
    """Half of fp32's bytes."""

    name = "bf16"
    is_exact = False
    is_relative = True

    def size(self, n: int) -> int:
        return 2 * n

    def span(self, n: int, start: int, end: int) -> slice:
        return slice(2 * start, 2 * end)

    def place(self, block: memoryview, n: int, start: int, room: Floats) -> Floats:
        return room

    def encode(self, values: Floats, block: memoryview, n: int, start: int) -> float:
        if square_of(values) is None:
            raise NotFiniteError
        bits = values.view(np.uint32)
        to = np.frombuffer(block, np.uint16, len(values), 2 * start)
        bits += 0x7FFF + ((bits >> 16) & 1)
        np.copyto(to, bits >> 16, casting="unsafe")
        bits &= 0xFFFF0000
        square = square_of(values)
        if square is None:  # the largest of all are rounded to infinity
            raise NotFiniteError
        return square

    def decode(self, block: memoryview, n: int, start: int, room: Floats) -> Floats:
        bits = room.view(np.uint32)
        np.copyto(bits, np.frombuffer(block, np.uint16, len(room), 2 * start))
        np.left_shift(bits, 16, out=bits)
        return room

    def accumulate(
        self, block: memoryview, n: int, start: int, weight: np.float32, acc: Floats, product: Floats, *, first: bool
    ) -> None:
        values = self.decode(block, n, start, acc if first else product)
        np.multiply(values, weight, out=values)
        if not first:
            np.add(acc, product, out=acc)

    def is_finite(self, block: memoryview, n: int) -> bool:
        return bool((np.frombuffer(block, np.uint16, n) & 0x7FFF).max() < INFINITY)
