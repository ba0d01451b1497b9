"""Measures a replica's steps per second, in its own process, because readers of heartbeats see too few of its steps."""

from __future__ import annotations

from collections import deque

MAX_STEP = 1e15  # a reported step may be any number
LEAP = 3.0  # an advance of this many times the usual rate is a leap
ENOUGH = 3  # the fewest observations for a rate, because one of two may be a leap
WINDOW_S = 60.0  # long enough that a round of some seconds changes the rate little


class Pace:
    """The steps per second over the last minute, computed from occasional observations of the step."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()  # the time of each change of the step, and the step
        self._has_caught_up = False

    def look(self, now: float, step: float | None) -> None:
        """Note the current step.

        Args:
            now: the time in seconds, by a monotonic clock.
            step: the step that the replica reported last. None: it has reported none.
        """
        if step is None or not abs(step) < MAX_STEP or (self._seen and step == self._seen[-1][1]):
            return
        if self._seen and step < self._seen[-1][1]:  # the replica went back to a checkpoint
            self._seen.clear()
        self._seen.append((now, step))
        if not self._has_caught_up:
            self._catch_up()
        while len(self._seen) > ENOUGH and self._seen[1][0] < now - WINDOW_S:
            self._seen.popleft()

    def _catch_up(self) -> None:
        """Begin the measurement again after the first leap: a returned replica jumps to the current step of the run.

        Later leaps count. A replica that repeatedly leaps is always late, so leaps are a part of its real rate.
        """
        if len(self._seen) < ENOUGH:
            return
        (t0, first), (t1, second), (t2, third), (t3, last) = (*list(self._seen)[:2], *list(self._seen)[-2:])
        if (last - third) * (t2 - t0) > LEAP * (third - first) * (t3 - t2):
            self._seen = deque([(t3, last)])
        elif len(self._seen) == ENOUGH and (second - first) * (t3 - t1) > LEAP * (last - second) * (t1 - t0):
            self._seen.popleft()
        else:
            return
        self._has_caught_up = True

    def steps_per_s(self, now: float) -> float | None:
        """Return the steps per second. The rate falls while the step has not changed for longer than usual.

        Args:
            now: the time in seconds, by the same clock.

        Returns: the rate with three digits. None: there are too few observations.
        """
        if len(self._seen) < ENOUGH:
            return None
        (began, first), (changed, last) = self._seen[0], self._seen[-1]
        usual_s = (changed - began) / (len(self._seen) - 1)
        rate = (last - first) / (changed - began + max(0.0, now - changed - usual_s))
        return float(f"{rate:.3g}")
