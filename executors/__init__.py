"""Launch N ranked replicas on a serverless backend, and follow, collect or cancel them from anywhere.

from executors import launch
run = launch("local", train, n=4, args={"steps": 200})
print(run.results())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from executors.errors import ReplicasError
from executors.protocol import ReplicaHandle, ReplicaStatus, ServerlessExecutor
from executors.replica import current_replica
from executors.store import Store, open_store

if TYPE_CHECKING:
    from executors.hf_jobs import HFJobsExecutor
    from executors.known_runs import attach, list_runs
    from executors.launching import launch
    from executors.local import LocalProcessExecutor
    from executors.modal import ModalExecutor
    from executors.run import Run

__all__ = [
    "HFJobsExecutor",
    "LocalProcessExecutor",
    "ModalExecutor",
    "ReplicaHandle",
    "ReplicaStatus",
    "ReplicasError",
    "Run",
    "ServerlessExecutor",
    "Store",
    "attach",
    "current_replica",
    "launch",
    "list_runs",
    "open_store",
]

# Loaded when first used, so that a replica's `import executors` costs little.
_LAZY = {
    "HFJobsExecutor": "executors.hf_jobs",
    "LocalProcessExecutor": "executors.local",
    "ModalExecutor": "executors.modal",
    "Run": "executors.run",
    "attach": "executors.known_runs",
    "launch": "executors.launching",
    "list_runs": "executors.known_runs",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'executors' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
