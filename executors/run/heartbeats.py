"""What replicas say of themselves: the last heartbeat of each, or what its outcome took of it."""

from __future__ import annotations

import time
from dataclasses import replace

from executors.attempt import Attempt, Beat
from executors.errors import CorruptObjectError
from executors.status import ReplicaState


class Heartbeats:
    """Reads heartbeats: at each look while a replica goes on, and once after its end."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, Beat | None]] = {}
        """By rank, the number of an attempt that has ended, and its last heartbeat."""

    def over(self, state: ReplicaState, attempt: Attempt, *, has_beat: bool) -> ReplicaState:
        """Return the state of an attempt with what it reports.

        Args:
            has_beat: whether it has left a heartbeat.
        """
        if state.outcome is not None and state.outcome.reported is not None:
            return replace(state, reported=dict(state.outcome.reported))
        number, beat = self._last.get(state.rank, (None, None))
        if number != state.attempt:
            try:
                beat = attempt.beat() if has_beat else None
            except CorruptObjectError as error:
                return replace(state, doing=str(error))
            if state.status.is_terminal:
                self._last[state.rank] = (state.attempt, beat)
        if beat is None:
            return state
        return replace(state, heartbeat_age_s=max(0.0, time.time() - beat.at), reported=dict(beat.reported))
