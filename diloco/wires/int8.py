"""One byte a value: whole numbers from -127 to 127, and a scale for each group of 256."""

from __future__ import annotations

import numpy as np

from diloco.wires.groups import GroupedWire
from diloco.wires.wire import Floats


class Int8(GroupedWire):
    """A quarter of fp32's bytes."""

    name = "int8"
    group = 256
    most = 127

    def _bytes(self, n: int) -> int:
        return n

    def _write(self, whole: Floats, to: memoryview) -> None:
        np.copyto(np.frombuffer(to, np.int8), whole, casting="unsafe")

    def _read(self, data: memoryview, to: Floats) -> None:
        np.copyto(to, np.frombuffer(data, np.int8))
