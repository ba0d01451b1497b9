"""The process of a rank: it claims its attempt, loads the task, calls the entrypoint, and records one outcome.

Read `main.py` first. `claim.py` claims an attempt, `surroundings.py` prepares the process, and `heartbeat.py` reports
while the entrypoint runs. `failure.py` and `result.py` turn the end of the entrypoint into an outcome.
`executors/supervisor` is the process that starts, watches and ends this one.

The process gets an `Assignment` from a fork or from the environment. It writes records of the attempt to the store, and
its progress to the memory that the supervisor reads.
"""

from __future__ import annotations

from typing import Any


def call(run: str) -> Any:
    """Run one replica inside the process of another executor; see `main.call_replica`.

    Args:
        run: `<store url>/<run id>`. The rank comes from `REPLICA_RANK`.
    """
    from executors.worker import main

    return main.call_replica(run)
