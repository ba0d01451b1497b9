"""How fast a replica's `step` goes on, measured beside it: who looks from elsewhere sees too few of its steps."""

from __future__ import annotations

from collections import deque

MAX_STEP = 1e15  # reports may be any number
WINDOW_S = 60.0  # long enough that a round of some seconds moves the rate little


class Pace:
    """Steps per second over the last minute, by the steps seen now and then."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()  # when the step had changed, and the step

    def look(self, now: float, step: float | None) -> None:
        """Take down what the step is now."""
        if step is None or not abs(step) < MAX_STEP or (self._seen and step == self._seen[-1][1]):
            return
        if self._seen and step < self._seen[-1][1]:  # it went back to a checkpoint
            self._seen.clear()
        self._seen.append((now, step))
        while len(self._seen) > 2 and self._seen[1][0] < now - WINDOW_S:
            self._seen.popleft()

    def steps_per_s(self, now: float) -> float | None:
        """Return the rate, which falls while the step has stood for longer than it used to; None: not known yet."""
        if len(self._seen) < 2:
            return None
        (began, first), (changed, last) = self._seen[0], self._seen[-1]
        usual_s = (changed - began) / (len(self._seen) - 1)
        rate = (last - first) / (changed - began + max(0.0, now - changed - usual_s))
        return float(f"{rate:.3g}")
