"""DiLoCo through a store: replicas that train one model together and meet only in a directory or a bucket.

Read `outer.py` first: `DiLoCo` is what a training loop calls. Live parameters enter through `model_state.py` and
`live_parameters.py`, which know torch. `rendezvous/` runs the rounds and knows no torch. A round leaves its mean in the
live parameters, a `RoundReport` for the caller, and records in the store. `stale_copies/` finds optimizers that undo
a round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.outer import DiLoCo
    from diloco.rendezvous.round import RoundReport

__all__ = ["DiLoCo", "RoundReport"]

# Loaded when first used: torch takes seconds to import, and not everything in here needs it.
_LAZY = {"DiLoCo": "diloco.outer", "RoundReport": "diloco.rendezvous.round"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'diloco' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
