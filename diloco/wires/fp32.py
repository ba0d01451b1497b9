"""Values as they are: float32, little-endian."""

from __future__ import annotations

import numpy as np

from diloco.wires.wire import Floats, NotFiniteError, square_of


class Fp32:
    """Four bytes a value, and nothing is lost."""

    name = "fp32"
    is_exact = True
    is_relative = True

    def size(self, n: int) -> int:
        return 4 * n

    def span(self, n: int, start: int, end: int) -> slice:
        return slice(4 * start, 4 * end)

    def place(self, block: memoryview, n: int, start: int, room: Floats) -> Floats:
        return np.frombuffer(block, np.float32, len(room), 4 * start)

    def encode(self, values: Floats, block: memoryview, n: int, start: int) -> float:
        square = square_of(values)
        if square is None:
            raise NotFiniteError
        place = self.place(block, n, start, values)
        if place.ctypes.data != values.ctypes.data:
            place[:] = values
        return square

    decode = place

    def accumulate(
        self, block: memoryview, n: int, start: int, weight: np.float32, acc: Floats, product: Floats, *, first: bool
    ) -> None:
        values = self.place(block, n, start, acc)
        if first:
            np.multiply(values, weight, out=acc)
        else:
            np.multiply(values, weight, out=product)
            np.add(acc, product, out=acc)

    def is_finite(self, block: memoryview, n: int) -> bool:
        return square_of(np.frombuffer(block, np.float32, n)) is not None
