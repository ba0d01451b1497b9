"""Launch N ranked replicas on a serverless backend, and follow, collect or cancel them from anywhere.

from executors import launch
run = launch("local", train, n=4, args={"steps": 200})
print(run.results())
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import executors.process  # noqa: F401 - first: on Windows it ends the process with one sentence
from executors.errors import ReplicasError, ReplicasWarning
from executors.protocol import Outcome, ReplicaHandle, ReplicaStatus, ServerlessExecutor
from executors.replica import Replica, current_replica
from executors.store import Store, open_store

if TYPE_CHECKING:
    from executors.backends.hf_jobs import HFJobsExecutor
    from executors.backends.inline import InlineExecutor
    from executors.backends.kubernetes import KubernetesExecutor
    from executors.backends.local.executor import LocalProcessExecutor
    from executors.backends.modal import ModalExecutor
    from executors.backends.ray import RayExecutor
    from executors.backends.slurm import SlurmExecutor
    from executors.launcher import launch
    from executors.metrics.metrics import Metrics
    from executors.replica.restartable import restartable
    from executors.run.lookup import attach, list_runs
    from executors.run.run import Run
    from executors.settings.policy import Restarts
    from executors.status import RunStatus
    from executors.store.artifacts import Artifact
    from executors.view.report.event_reader import Event

__all__ = [
    "Artifact",
    "Event",
    "HFJobsExecutor",
    "InlineExecutor",
    "KubernetesExecutor",
    "LocalProcessExecutor",
    "Metrics",
    "ModalExecutor",
    "Outcome",
    "RayExecutor",
    "Replica",
    "ReplicaHandle",
    "ReplicaStatus",
    "ReplicasError",
    "ReplicasWarning",
    "Restarts",
    "Run",
    "RunStatus",
    "ServerlessExecutor",
    "SlurmExecutor",
    "Store",
    "attach",
    "current_replica",
    "launch",
    "list_runs",
    "open_store",
    "restartable",
]

# Loaded when first used, so that a replica's `import executors` costs little.
_LAZY = {
    "Artifact": "executors.store.artifacts",
    "Event": "executors.view.report.event_reader",
    "HFJobsExecutor": "executors.backends.hf_jobs",
    "InlineExecutor": "executors.backends.inline",
    "KubernetesExecutor": "executors.backends.kubernetes",
    "LocalProcessExecutor": "executors.backends.local.executor",
    "Metrics": "executors.metrics.metrics",
    "ModalExecutor": "executors.backends.modal",
    "RayExecutor": "executors.backends.ray",
    "Restarts": "executors.settings.policy",
    "Run": "executors.run.run",
    "RunStatus": "executors.status",
    "SlurmExecutor": "executors.backends.slurm",
    "attach": "executors.run.lookup",
    "launch": "executors.launcher",
    "list_runs": "executors.run.lookup",
    "restartable": "executors.replica.restartable",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'executors' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
