"""Predicts when an awaited object will be there, from the times at which it was there in earlier rounds.

A replica behind a slow link looks for a seal or a mean again and again. Without a prediction, its pauses grow, so the
last one may waste a second. With a prediction, the replica waits for the predicted time, and then looks again after
short pauses. That takes fewer requests, because the looks before that time are left out.
"""

from __future__ import annotations

from collections import deque

N_KEPT = 3
"""The number of rounds from which the time is predicted. The earliest of them counts."""
FIRST_STEP = 0.25
"""If the first look at the predicted time finds the object, it may have been there earlier. So the next prediction is
earlier by this share of an answer's time. The step doubles with each such round in a row, up to half the whole time.
"""


class ArrivalForecast:
    """Predicts the seconds from the begin of a wait until the awaited object is there.

    Example:
        forecast = ArrivalForecast()
        forecast.note("seal", missed_s=2.0, found_s=2.2, answer_s=0.1)
        forecast.expected_s("seal")  # 2.15
    """

    def __init__(self) -> None:
        self._times: dict[str, deque[float]] = {}
        self._steps: dict[str, float] = {}

    def note(self, kind: str, *, missed_s: float, found_s: float, answer_s: float) -> None:
        """Record a wait that has ended.

        Args:
            kind: the kind of the awaited object, as in "seal".
            missed_s: seconds from the begin of the wait to the last look that did not find the object.
            found_s: seconds to the look that found it.
            answer_s: seconds that the store takes to answer.
        """
        times = self._times.setdefault(kind, deque(maxlen=N_KEPT))
        middle_s = (missed_s + found_s) / 2
        if found_s - missed_s <= 2 * answer_s:  # the looks were as close as they can be, so the time is known
            self._steps[kind] = FIRST_STEP
            times.append(max(middle_s, found_s - answer_s / 2))
            return
        step = self._steps.get(kind, FIRST_STEP)
        self._steps[kind] = 2 * step
        times.append(max(middle_s, found_s - step * answer_s))
        while times[0] > times[-1]:  # later times of before would not count, and an earlier one must count at once
            times.popleft()

    def expected_s(self, kind: str) -> float:
        """Return the seconds after which the object is expected. 0 if nothing is known.

        Args:
            kind: the kind of the awaited object.
        """
        return min(self._times.get(kind, (0.0,)))
