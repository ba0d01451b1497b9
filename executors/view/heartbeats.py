"""Reads the last report of each replica, from its heartbeat or its outcome, and the age of the heartbeat."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from executors.attempt import Attempt, Beat
from executors.errors import CorruptObjectError
from executors.status import ReplicaState


@dataclass(frozen=True)
class _Sighting:
    """A heartbeat, with the times at which this process first and last saw it, by the clock of this process."""

    attempt: int
    at: float
    """The time in the heartbeat, by the clock of the replica's host."""
    after: float
    """The time of the last look that saw the previous heartbeat."""
    first: float
    last: float


class Heartbeats:
    """Reads the heartbeat of each running replica again and again, and once more after its end.

    Args:
        clock: returns seconds of a monotonic clock.

    Example:
        Heartbeats().over(state, attempt, has_beat=True).heartbeat_age_s
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[int, _Sighting] = {}
        self._last: dict[int, tuple[int, Beat | None]] = {}
        """The last heartbeat of each attempt that has ended, by rank, with the number of the attempt."""

    def over(self, state: ReplicaState, attempt: Attempt, *, has_beat: bool) -> ReplicaState:
        """Return the state of an attempt with the progress and the numbers that its replica reported last.

        Args:
            state: the state without the report.
            attempt: the attempt that the state belongs to.
            has_beat: True if the attempt has left a heartbeat.
        """
        if state.outcome is not None and state.outcome.reported is not None:
            return replace(state, reported=dict(state.outcome.reported), warned=state.outcome.warned)
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
        age_s = self._age_s(state, beat)
        return replace(state, heartbeat_age_s=age_s, reported=dict(beat.reported), warned=beat.warned)

    def _age_s(self, state: ReplicaState, beat: Beat) -> float:
        """Return the age of a heartbeat in seconds.

        The clock of the replica's host may be wrong. So the age is limited to the times at which this process looked.
        """
        now, seen = self._clock(), self._seen.get(state.rank)
        if seen is None or (seen.attempt, seen.at) != (state.attempt, beat.at):
            after = seen.last if seen is not None and seen.attempt == state.attempt else -math.inf
            seen = _Sighting(state.attempt, beat.at, after=after, first=now, last=now)
        self._seen[state.rank] = replace(seen, last=now)
        return min(max(time.time() - beat.at, now - seen.first), now - seen.after)
