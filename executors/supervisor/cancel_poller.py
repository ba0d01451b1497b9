"""Reads the cancel markers of attempts, at most a second at a time, because the supervisor's only thread has other
work.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

from executors.attempt import Attempt
from executors.errors import StoreError
from executors.restarts.session import READ_TURN_S
from executors.store.url import is_near

# A canceller on this machine also wakes the supervisor, but one on another machine only writes a marker.
NEAR_LOOK_S = 1.0
FAR_LOOK_S = 10.0  # at a bucket, where each marker costs a request


class CancelPoller:
    """Reads the cancel markers of attempts. A call ends after a second, and the next call continues.

    Args:
        store_url: the store of the run.
    """

    def __init__(self, store_url: str) -> None:
        self.every_s = NEAR_LOOK_S if is_near(store_url) else FAR_LOOK_S
        self.next_at = time.monotonic() + self.every_s
        """The time of the next look, by `time.monotonic`."""
        self._unseen: deque[Attempt] = deque()

    def look_soon(self) -> None:
        """Read all markers in the next call, because another process reports a new one."""
        self._unseen.clear()
        self.next_at = 0.0

    def cancelled(self, attempts: Sequence[Attempt]) -> Iterator[Attempt]:
        """Look for markers for at most a second, and yield the cancelled attempts.

        Args:
            attempts: all attempts of the supervisor. Those that the last turn did not reach come first.
        """
        self._unseen = deque(each for each in self._unseen if each in attempts) or deque(attempts)
        now = time.monotonic()
        self.next_at, until = now + self.every_s, now + READ_TURN_S
        while self._unseen and time.monotonic() < until:
            attempt = self._unseen.popleft()
            with contextlib.suppress(StoreError):  # a later call reads the same markers again
                if attempt.has_cancel_marker():
                    yield attempt
        if self._unseen:
            self.next_at = time.monotonic()
