"""The wires: how contributions and means travel, one file each.

Read `wire.py` first: it has the protocol of a wire and the loop over blocks and pieces. Values enter as float32 pieces
of a fragment, and leave as the bytes of a block; the way back is the same. `WIRES` has all wires by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from diloco.wires.bf16 import Bf16
from diloco.wires.fp32 import Fp32
from diloco.wires.int4 import Int4
from diloco.wires.int8 import Int8
from diloco.wires.wire import Wire

FP32 = Fp32()
WIRES: Mapping[str, Wire] = {wire.name: wire for wire in (FP32, Bf16(), Int8(), Int4())}
DEFAULT_MEAN_WIRE: Mapping[str, str] = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8"}
"""How means travel, by the wire of the contributions."""


def wire_named(name: str) -> Wire:
    """Return a wire of `WIRES`."""
    return WIRES[name]
