"""How fast a replica's `step` goes on, measured beside it: who looks from elsewhere sees too few of its steps."""

from __future__ import annotations

from collections import deque

MAX_STEP = 1e15  # reports may be any number
LEAP = 3.0  # times as many steps as usual
ENOUGH = 3  # steps seen; one of two may be a leap
WINDOW_S = 60.0  # long enough that a round of some seconds moves the rate little


class Pace:
    """Steps per second over the last minute, by the steps seen now and then."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()  # when the step had changed, and the step
        self._has_caught_up = False

    def look(self, now: float, step: float | None) -> None:
        """Take down what the step is now."""
        if step is None or not abs(step) < MAX_STEP or (self._seen and step == self._seen[-1][1]):
            return
        if self._seen and step < self._seen[-1][1]:  # it went back to a checkpoint
            self._seen.clear()
        self._seen.append((now, step))
        if not self._has_caught_up:
            self._catch_up()
        while len(self._seen) > ENOUGH and self._seen[1][0] < now - WINDOW_S:
            self._seen.popleft()

    def _catch_up(self) -> None:
        """Begin anew behind the first leap, by which a replica that came back catches up with the run.

        One that goes on leaping is always late: that is how it gets on.
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
        """Return the rate, which falls while the step has stood for longer than it used to; None: not known yet."""
        if len(self._seen) < ENOUGH:
            return None
        (began, first), (changed, last) = self._seen[0], self._seen[-1]
        usual_s = (changed - began) / (len(self._seen) - 1)
        rate = (last - first) / (changed - began + max(0.0, now - changed - usual_s))
        return float(f"{rate:.3g}")
