"""The wires: each file encodes float32 values as bytes in one format, for contributions and means.

Read `wire.py` first. It has the protocol of a wire, and the loops over blocks and pieces. A wire encodes float32 pieces
of a fragment as the bytes of a block, and decodes them again. `WIRES` has all wires by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from diloco.wires.bf16 import Bf16
from diloco.wires.each import Each
from diloco.wires.fp32 import Fp32
from diloco.wires.int4 import Int4
from diloco.wires.int8 import Int8
from diloco.wires.top8 import Top8
from diloco.wires.wire import Wire

FP32, EACH = Fp32(), Each()
WIRES: Mapping[str, Wire] = {wire.name: wire for wire in (FP32, Bf16(), Int8(), Int4(), Top8())}
"""The wires of contributions."""
MEAN_WIRES: Mapping[str, Wire] = {
    **{name: wire for name, wire in WIRES.items() if not wire.is_sparse},
    EACH.name: EACH,
}
"""The wires of means. A sparse wire is not among them, because a mean has no later one that could bring the rest."""
DEFAULT_MEAN_WIRE: Mapping[str, str] = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8", "top8": "int4"}
"""The default of `mean_wire` for each wire of contributions."""


def wire_named(name: str) -> Wire:
    """Return the wire of contributions or of means with a name.

    Raises:
        KeyError: no wire has this name.
    """
    return MEAN_WIRES[name] if name in MEAN_WIRES else WIRES[name]
