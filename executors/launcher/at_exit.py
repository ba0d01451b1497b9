"""What a process says that ends before the run that it launched attached."""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING

from executors.attempt import Attempt
from executors.errors import ReplicasError
from executors.native import NativeExecutor
from executors.store.records import exists
from executors.store.url import impatient_store

if TYPE_CHECKING:
    from executors.run.run import Run

STORE_LIMIT_S = 5.0  # how long an exit may take where the store is silent


def ends_with_this_process(run: Run, *, detach: bool) -> Run:
    """Return the run; if it goes on when this process ends, and is ended so, a line on stderr says it then."""
    executor, pid = run.executor, os.getpid()
    if detach or not isinstance(executor, NativeExecutor) or not executor.ends_with_launcher:
        return run
    when = "" if executor.lease_s is None else f", {executor.lease_s / 60:.0f} minutes after it"

    def tell() -> None:
        if pid != os.getpid() or run.is_awaited:
            return
        try:
            store = impatient_store(run.store.url, STORE_LIMIT_S)
            if not exists(store, f"{run.run_id}/run.json"):
                return  # it was deleted
            attempts = (Attempt(store, run.run_id, rank) for rank in run.fleet.ranks)
            # One by one: at the exit no thread can be started any more.
            if all(each.newest().outcome() is not None for each in attempts):
                return
        except ReplicasError:
            pass  # nobody can tell now: as far as this process knows, it goes on
        print(
            f"replicas: run {run.run_id} ends with this process{when}. Wait for it with run.wait(), or let it go on "
            "with launch(…, detach=True).",
            file=sys.stderr,
        )

    atexit.register(tell)
    return run
