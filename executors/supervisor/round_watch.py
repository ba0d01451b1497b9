"""Notices that no round has come for much longer than usual. A supervisor judges that from the pages of its ranks."""

from __future__ import annotations

import math
import statistics
from collections import deque

from executors.settings.durations import name_duration
from executors.task.notice_record import Notice

TIMES = 5.0  # the usual time between two rounds times this number is too long
N_USUAL = 20
LEAST_ROUNDS = 3  # intervals that must be known before a time counts as usual
LEAST_S = 60.0
"""The shortest time without a round that is reported, because rounds of a second may pause for an evaluation."""


class RoundWatch:
    """Measures the time between the rounds of a supervisor's ranks.

    Args:
        least_s: the shortest time without a round that is reported, in seconds. Default: a minute.

    Example:
        watch = RoundWatch()
        notice = watch.note([page.round for page in pages], time.monotonic(), time.time())
    """

    def __init__(self, least_s: float = LEAST_S) -> None:
        self._least_s = least_s
        self._round = -math.inf
        self._since: float | None = None
        self._intervals: deque[float] = deque(maxlen=N_USUAL)
        self._reported = -math.inf

    def note(self, rounds: list[float], now: float, at: float) -> Notice | None:
        """Note the rounds that the ranks have reached. Return a notice if there was none for too long.

        Args:
            rounds: the round of each running rank. nan: the rank has reported none.
            now: the time of a monotonic clock.
            at: Unix time.

        Returns: the notice, once for each round.
        """
        newest = max((each for each in rounds if not math.isnan(each)), default=-math.inf)
        if not rounds:
            self._since = None  # without a running rank no round can come, and that is another event
            return None
        if newest > self._round or self._since is None:
            if newest > self._round and self._since is not None and self._round > -math.inf:
                self._intervals.append(now - self._since)
            self._round, self._since = max(newest, self._round), now
            return None
        if len(self._intervals) < LEAST_ROUNDS or self._reported == self._round:
            return None
        usual_s = statistics.median(self._intervals)
        if now - self._since < max(TIMES * usual_s, self._least_s):
            return None
        self._reported = self._round
        return Notice(
            id=f"no_round-{self._round:.0f}",
            kind="no_round",
            text=f"No round has come for {name_duration(now - self._since)} after round {self._round:.0f}. The usual "
            f"time is {name_duration(usual_s)}.",
            at=at,
        )
