"""StalenessTracker measures for how long a value has not changed, by the clock of the process that looks at it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator
from typing import Any


class StalenessTracker:
    """Measures for how long values have not changed, by this process's own clock.

    Records contain times of other machines, whose clocks may be wrong. So a process that judges a heartbeat, a lease or
    an end notes the value at each look. It measures from its first look at the current value.

    Args:
        clock: returns seconds of a monotonic clock. Default: `time.monotonic`.
        longest_gap_s: the most seconds that count between two looks. A process that was suspended for an hour has seen
            nothing of that hour, and the watched process may have been suspended as well. Default: all time counts.

    Example:
        tracker = StalenessTracker()
        if tracker.note("rank 3", attempt.beat()) >= 60.0:
            print("rank 3 has not sent a heartbeat for a minute")
    """

    def __init__(self, clock: Callable[[], float] | None = None, *, longest_gap_s: float = math.inf) -> None:
        self._clock = clock or (lambda: time.monotonic())
        self._longest_gap_s = longest_gap_s
        self._seen: dict[Hashable, tuple[Any, float, float]] = {}
        """For each key: the last value, the time of the last look, and the seconds that had counted by then."""

    def note(self, key: Hashable, value: Any = None) -> float:
        """Note a look, and return for how many seconds the value has not changed: 0.0 at the first look.

        Args:
            key: names the watched thing.
            value: the value at this look. Default: None, to measure the time since the first look.
        """
        now = self._clock()
        seen = self._seen.get(key)
        unchanged_s = 0.0 if seen is None or seen[0] != value else self._counted_s(seen, now)
        self._seen[key] = (value, now, unchanged_s)
        return unchanged_s

    def unchanged_s(self, key: Hashable) -> float:
        """Return for how many seconds a value has not changed, assuming that it has not changed since the last look.

        Args:
            key: names the watched thing. `note` was called with it before.

        Raises:
            KeyError: `note` was never called with the key.
        """
        return self._counted_s(self._seen[key], self._clock())

    def forget(self, key: Hashable) -> None:
        """Start to count again at the next look.

        Args:
            key: names the watched thing. A key that was never noted is ignored.
        """
        self._seen.pop(key, None)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._seen

    def __iter__(self) -> Iterator[Any]:
        """Yield the keys that are watched."""
        return iter(list(self._seen))

    def _counted_s(self, seen: tuple[Any, float, float], now: float) -> float:
        _, looked_at, counted_s = seen
        return counted_s + min(now - looked_at, self._longest_gap_s)
