"""DiLoCo through a store: replicas that train one model together and meet only in a directory or a bucket."""

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
