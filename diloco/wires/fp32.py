"""The wire `fp32`: four bytes per value, as float32 in little-endian order, without any rounding."""

from __future__ import annotations

import numpy as np

from diloco.wires.wire import Floats, NotFiniteError, square_of


class Fp32:
    """Copies float32 values."""

    name = "fp32"
    is_exact = True
    is_relative = True
    is_sparse = False
    keeps = 1.0
    live = 1.0

    def size(self, n: int) -> int:
        return 4 * n

    def span(self, n: int, start: int, end: int) -> slice:
        return slice(4 * start, 4 * end)

    def encode_buffer(self, block: memoryview, n: int, start: int, scratch: Floats) -> Floats:
        return np.frombuffer(block, np.float32, len(scratch), 4 * start)

    def encode(self, values: Floats, block: memoryview, n: int, start: int) -> float:
        square = square_of(values)
        if square is None:
            raise NotFiniteError
        buffer = self.encode_buffer(block, n, start, values)
        if buffer.ctypes.data != values.ctypes.data:
            buffer[:] = values
        return square

    decode = encode_buffer

    def accumulate(
        self, block: memoryview, n: int, start: int, weight: np.float32, acc: Floats, product: Floats, *, first: bool
    ) -> None:
        values = self.encode_buffer(block, n, start, acc)
        if first:
            np.multiply(values, weight, out=acc)
        else:
            np.multiply(values, weight, out=product)
            np.add(acc, product, out=acc)

    def is_finite(self, block: memoryview, n: int) -> bool:
        return square_of(np.frombuffer(block, np.float32, n)) is not None
