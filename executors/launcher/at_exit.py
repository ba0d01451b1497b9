"""What a process says that ends before the run that it launched attached."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import TYPE_CHECKING

from executors.attempt import Attempt
from executors.errors import ReplicasError
from executors.native import NativeExecutor
from executors.store.records import exists

if TYPE_CHECKING:
    from executors.run.run import Run


def ends_with_this_process(run: Run, *, detach: bool) -> Run:
    """Return the run; if it goes on when this process ends, and is ended so, a line on stderr says it then."""
    executor, pid = run.executor, os.getpid()
    if detach or not isinstance(executor, NativeExecutor) or not executor.ends_with_launcher:
        return run
    when = "" if executor.lease_s is None else f", {executor.lease_s / 60:.0f} minutes after it"

    def tell() -> None:
        if pid != os.getpid() or run.is_awaited:
            return
        with contextlib.suppress(ReplicasError):
            if not exists(run.store, f"{run.run_id}/run.json"):
                return  # it was deleted
            attempts = (Attempt(run.store, run.run_id, rank) for rank in range(run.world_size))
            # One by one: at the exit no thread can be started any more.
            if any(each.newest().outcome() is None for each in attempts):
                print(
                    f"replicas: run {run.run_id} ends with this process{when}. Wait for it with run.wait(), or let it "
                    "go on with launch(…, detach=True).",
                    file=sys.stderr,
                )

    atexit.register(tell)
    return run
