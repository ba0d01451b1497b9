"""Starting the spares of a run: jobs beyond its ranks, one of which takes over a rank that loses its container."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace

from executors.errors import ReplicasError
from executors.settings.run_spec import RunSpec

GATHER_S = 30.0  # a detached launch waits no longer for them


def start_spares(run: RunSpec, start: Callable[[RunSpec], object]) -> None:
    """Start the spares of a run whose ranks are up, in the background where this process stays.

    A spare that does not start is a warning.
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
    """Return what starts the spares of a run instead of its ranks."""
    spares = replace(run, ranks=tuple(range(run.settings.spares)), is_of_spares=True)
    # A spare that comes late is given up.
    return spares.with_settings(spares=0, min_replicas=1, gather_s=GATHER_S, detach=True)
