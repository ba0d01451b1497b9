"""How far the containers of a run are with their installations, from what each notes in `boot.json`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from executors.attempt import Attempt
from executors.errors import CorruptObjectError
from executors.status import INSTALLING, Installation, ReplicaState


class Installations:
    """Reads how far an installation is, at each look until the replica's process has started.

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
        """By attempt, when a look of this process saw the installation first."""

    def over(self, state: ReplicaState, attempt: Attempt, *, launched_at: float) -> ReplicaState:
        """Return the state of an attempt with how far its installation is, if it installs.

        Args:
            state: the state.
            attempt: the attempt that the state is of.
            launched_at: when the run was launched, in Unix time.

        Example:
            Installations().over(state, attempt, launched_at=record.created_at).note  # "installing torch, 40 s"
        """
        if state.doing != INSTALLING or state.status.is_terminal:
            return state
        try:
            boot = attempt.boot()
        except CorruptObjectError:  # other records decide; this one is for users to read
            return state
        if boot is None:
            return state
        now, wall_now = self._clock(), self._wall_clock()
        seen_s = now - self._seen.setdefault(attempt.place, now)
        # The container's clock may be wrong. The installation lasts at least as long as this process has seen it, and
        # it began after the launch.
        for_s = max(seen_s, min(wall_now - boot.at, wall_now - launched_at))
        found = Installation(boot.package, for_s, boot.n_bytes, boot.of_bytes)
        return replace(state, doing=found.what, installation=found)
