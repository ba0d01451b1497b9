"""The process of a rank: it claims its attempt, loads the task, calls the entrypoint, and records one outcome.

Read `main.py` first. `claim.py` takes the number of an attempt, `surroundings.py` makes the process a replica,
`heartbeat.py` reports while the entrypoint runs, and `failure.py` and `result.py` turn its end into an outcome.
`executors/supervisor` is the other process: the one that starts, watches and ends this one.

Data enters as an `Assignment`, from a fork or from the environment. It leaves as records of the attempt in the store,
and through the page of memory that the supervisor reads.
"""

from __future__ import annotations

from typing import Any


def call(run: str) -> Any:
    """Run one replica inside a third party's process; see `main.call_replica`.

    Args:
        run: `<store url>/<run id>`. The rank comes from `REPLICA_RANK`.
    """
    from executors.worker import main

    return main.call_replica(run)
