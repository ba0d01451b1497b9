"""Trains one model on several replicas with DiLoCo. They exchange averages through a directory or a bucket only.

Read `outer.py` first: it has `DiLoCo`, the object that a training loop calls. `model_state.py` and
`live_parameters.py` read and change the model, and know torch. `rendezvous/` runs the rounds, and does not know torch.
A round leaves its mean in the live parameters, a `RoundReport` for the caller, and records in the store.
`stale_copies/` finds optimizers that undo a round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.outer import DiLoCo
    from diloco.rendezvous.round import RoundReport

__all__ = ["DiLoCo", "RoundReport"]

# Loaded when first used, because the import of torch takes seconds and not every module here needs torch.
_LAZY = {"DiLoCo": "diloco.outer", "RoundReport": "diloco.rendezvous.round"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'diloco' has no attribute {name!r}")
    import importlib

    from executors.errors import raise_missing_package

    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    except ImportError as error:
        # A machine that only launches and watches does not have the packages of the extra `diloco`.
        raise_missing_package(name, error, "diloco")
