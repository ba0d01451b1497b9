"""How often a vendor is asked about a job: vendors count requests, and a run of many replicas asks for each of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_PAUSE_S = 0.25
GROWTH = 1.5
LONGEST_PAUSE_S = 5.0
JOBS_PER_PAUSE = 8
"""So many jobs may be asked for in one longest pause: beyond, the pause grows with their number. That is 480 requests
in five minutes, half of what Hugging Face allows a free account."""


class Pace:
    """Tells whether it is time to ask about a job again: soon at first, then ever less often.

    Safe for threads.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next: dict[str, tuple[float, float]] = {}
        """By job: when it may be asked for again, and the pause after that."""
        self._lock = threading.Lock()

    def is_due(self, job: str) -> bool:
        """Tell whether to ask about this job now. Whoever hears True asks."""
        now = self._clock()
        with self._lock:
            due_at, pause_s = self._next.get(job, (now, FIRST_PAUSE_S))
            if now < due_at:
                return False
            longest_s = LONGEST_PAUSE_S * max(1.0, len(self._next) / JOBS_PER_PAUSE)
            self._next[job] = (now + pause_s, min(pause_s * GROWTH, longest_s))
            return True

    def forget(self, job: str) -> None:
        """Ask about a job at once the next time, and often: something happened to it. Or never, when it has ended."""
        with self._lock:
            self._next.pop(job, None)
