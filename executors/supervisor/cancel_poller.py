"""How a supervisor looks for cancel markers: its one thread has more to do than to wait for a store."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

from executors.attempt import Attempt
from executors.errors import StoreError
from executors.restarts.session import READ_TURN_S
from executors.store.url import is_near

NEAR_LOOK_S = 1.0  # a canceller on this machine wakes us; one elsewhere leaves only its marker
FAR_LOOK_S = 10.0  # how often a bucket is looked into


class CancelPoller:
    """Looks for the cancel markers of attempts now and then; where the store takes long, at a few in a turn."""

    def __init__(self, store_url: str) -> None:
        self.every_s = NEAR_LOOK_S if is_near(store_url) else FAR_LOOK_S
        self.next_at = time.monotonic() + self.every_s
        """When to look next, by `time.monotonic`."""
        self._unseen: deque[Attempt] = deque()

    def soon(self) -> None:
        """Have all looked at anew: there is news."""
        self._unseen.clear()
        self.next_at = 0.0

    def cancelled(self, attempts: Sequence[Attempt]) -> Iterator[Attempt]:
        """Look at attempts, those not seen in the turn before first; yield the cancelled ones."""
        self._unseen = deque(each for each in self._unseen if each in attempts) or deque(attempts)
        now = time.monotonic()
        self.next_at, until = now + self.every_s, now + READ_TURN_S
        while self._unseen and time.monotonic() < until:
            attempt = self._unseen.popleft()
            with contextlib.suppress(StoreError):  # asked again in a while
                if attempt.has_cancel_marker():
                    yield attempt
        if self._unseen:
            self.next_at = time.monotonic()
