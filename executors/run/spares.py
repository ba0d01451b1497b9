"""Starts spares: additional jobs of a run. A spare takes over a rank that loses its container."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from executors.errors import ReplicasError
from executors.settings.run_spec import StartSpec

GATHER_S = 30.0  # the time that the start waits for spares that have not come


def start_spares(ranks: StartSpec, start: Callable[[StartSpec], object]) -> None:
    """Start the spares of a run whose ranks were started, in the background.

    A detached launch waits for them, because its process ends next. If a spare does not start, a warning is printed,
    because the run also works without it.

    Args:
        ranks: the values that started the ranks.
        start: starts jobs by such values.

    Example:
        start_spares(start, backend.start_ranks)
    """

    def start_or_warn() -> None:
        try:
            start(spares_of(ranks))
        except (ReplicasError, OSError) as error:
            print(f"replicas: the run has no spare: {error}", file=sys.stderr)

    thread = threading.Thread(target=start_or_warn, name="replicas-spares", daemon=True)
    thread.start()
    if ranks.spec.settings.detach:
        thread.join()


def spares_of(ranks: StartSpec) -> StartSpec:
    """Return the values that start the spares of a run.

    Args:
        ranks: the values that start its ranks.

    Example:
        spares_of(start).ranks  # (0, 1) for a launch with spares=2
    """
    spares = ranks.with_spec(ranks=tuple(range(ranks.spec.settings.spares)), is_of_spares=True)
    # With `detach`, a late spare is given up. Otherwise the start would wait for it in the background.
    return spares.with_settings(spares=0, min_replicas=1, gather_s=GATHER_S, detach=True)
