"""Starts the spares of a run. A spare is an additional job that takes over a rank whose container is lost."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from executors.errors import ReplicasError
from executors.settings.run_spec import RunSpec

GATHER_S = 30.0  # the longest time that a detached launch waits for its spares


def start_spares(run: RunSpec, start: Callable[[RunSpec], object]) -> None:
    """Start the spares of a run whose ranks have started.

    The start continues in the background. A detached launch waits for it, because its process may end soon. If a spare
    does not start, this prints a warning.

    Args:
        run: the run.
        start: starts the jobs of the run that it is given.

    Example:
        start_spares(run, lambda spares: executor.launch_replicas(2, "", {}, run=spares))
    """

    def attempt() -> None:
        try:
            start(spares_of(run))
        except (ReplicasError, OSError) as error:
            print(f"replicas: the run has no spare: {error}", file=sys.stderr)

    thread = threading.Thread(target=attempt, name="replicas-spares", daemon=True)
    thread.start()
    if run.settings.detach:
        thread.join()


def spares_of(run: RunSpec) -> RunSpec:
    """Return the run with its spares in place of its ranks, for a launch of the spares.

    Args:
        run: the run.

    Example:
        spares_of(run).ranks
    """
    spares = replace(run, ranks=tuple(range(run.settings.spares)), is_of_spares=True)
    # With min_replicas=1, the launch of the spares does not wait for a spare that is late.
    return spares.with_settings(spares=0, min_replicas=1, gather_s=GATHER_S, detach=True)
