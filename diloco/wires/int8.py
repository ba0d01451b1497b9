"""The wire `int8`: one byte per value, a whole number from -127 to 127, and one scale for each group of 256 values.

`GroupedWire.encode` in `groups.py` rounds the values to whole numbers, and this file writes them as bytes.
"""

from __future__ import annotations

import numpy as np

from diloco.wires.groups import GroupedWire
from diloco.wires.wire import Floats


class Int8(GroupedWire):
    """Encodes a value in a quarter of the bytes of fp32."""

    name = "int8"
    group = 256
    most = 127

    def _bytes(self, n: int) -> int:
        return n

    def _write(self, whole: Floats, to: memoryview) -> None:
        np.copyto(np.frombuffer(to, np.int8), whole, casting="unsafe")

    def _read(self, data: memoryview, to: Floats) -> None:
        np.copyto(to, np.frombuffer(data, np.int8))
