"""Reads the progress of package installations in the containers of a run, from the record `boot.json` of each
attempt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from executors.attempt import Attempt
from executors.errors import CorruptObjectError
from executors.status import INSTALLING, Installation, ReplicaState


class Installations:
    """Reads the progress of each replica's package installation, until the replica's process has started.

    Args:
        clock: returns seconds of a monotonic clock.
        wall_clock: returns Unix time.

    Example:
        Installations().over(state, attempt, launched_at=record.created_at)
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._seen: dict[str, float] = {}
        """The time at which a look of this process first saw the installation, by attempt."""

    def over(self, state: ReplicaState, attempt: Attempt, *, launched_at: float) -> ReplicaState:
        """Return the state of an attempt with the progress of its installation.

        The state is returned unchanged if nothing is installed.

        Args:
            state: the state without the progress.
            attempt: the attempt that the state belongs to.
            launched_at: the Unix time of the launch of the run.

        Example:
            Installations().over(state, attempt, launched_at=record.created_at).note  # "installing torch, 40 s"
        """
        if state.doing != INSTALLING or state.status.is_terminal:
            return state
        try:
            boot = attempt.boot()
        except CorruptObjectError:  # users read this record, and no decision depends on it
            return state
        if boot is None:
            return state
        now, wall_now = self._clock(), self._wall_clock()
        seen_s = now - self._seen.setdefault(attempt.full_name, now)
        # The container's clock may be wrong. So the duration is at least the time that this process has watched, and at
        # most the time since the launch.
        for_s = max(seen_s, min(wall_now - boot.at, wall_now - launched_at))
        found = Installation(boot.package, for_s, boot.n_bytes, boot.of_bytes)
        return replace(state, doing=found.what, installation=found)
