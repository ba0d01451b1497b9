"""The wire `bf16`: two bytes per value. bfloat16 is the upper half of a float32, rounded to nearest, ties to even."""

from __future__ import annotations

import numpy as np

from diloco.wires.wire import Floats, NotFiniteError, square_of

INFINITY = 0x7F80  # the bits of infinity without the sign. The bits of NaN are greater.


class Bf16:
    """Encodes a value in half the bytes of fp32."""

    name = "bf16"
    is_exact = False
    is_relative = True
    is_sparse = False
    keeps = 1.0
    live = 1.0

    def size(self, n: int) -> int:
        return 2 * n

    def span(self, n: int, start: int, end: int) -> slice:
        return slice(2 * start, 2 * end)

    def encode_buffer(self, block: memoryview, n: int, start: int, scratch: Floats) -> Floats:
        return scratch

    def encode(self, values: Floats, block: memoryview, n: int, start: int) -> float:
        if square_of(values) is None:
            raise NotFiniteError
        bits = values.view(np.uint32)
        to = np.frombuffer(block, np.uint16, len(values), 2 * start)
        bits += 0x7FFF + ((bits >> 16) & 1)
        np.copyto(to, bits >> 16, casting="unsafe")
        bits &= 0xFFFF0000
        square = square_of(values)
        if square is None:  # the largest float32 values are rounded to infinity
            raise NotFiniteError
        return square

    def decode(self, block: memoryview, n: int, start: int, scratch: Floats) -> Floats:
        bits = scratch.view(np.uint32)
        np.copyto(bits, np.frombuffer(block, np.uint16, len(scratch), 2 * start))
        np.left_shift(bits, 16, out=bits)
        return scratch

    def accumulate(
        self, block: memoryview, n: int, start: int, weight: np.float32, acc: Floats, product: Floats, *, first: bool
    ) -> None:
        values = self.decode(block, n, start, acc if first else product)
        np.multiply(values, weight, out=values)
        if not first:
            np.add(acc, product, out=acc)

    def is_finite(self, block: memoryview, n: int) -> bool:
        return bool((np.frombuffer(block, np.uint16, n) & 0x7FFF).max() < INFINITY)
