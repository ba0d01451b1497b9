"""Reads the store for a supervisor from time to time: cancel markers of attempts, and the deletion of the run."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from executors.attempt import Attempt
from executors.errors import StoreError
from executors.restarts.session import READ_TURN_S
from executors.settings.run_spec import LEASE_S
from executors.store import Store
from executors.store.record_names import run_was_deleted
from executors.store.staleness import StalenessTracker
from executors.store.url import is_near

# A canceller on this machine also wakes the supervisor, but one on another machine only writes a marker.
NEAR_LOOK_S = 1.0
FAR_LOOK_S = 10.0  # the pause between two looks at a bucket, where each marker costs a request
DELETION_LOOK_S = 60.0


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
            attempts: all attempts of the supervisor. Attempts that the last call did not reach come first.
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


class DeletionWatch:
    """Reports whether a run was deleted from its store. The work of its replicas is then lost, so they must end.

    Args:
        store: the run's store. It should try each request once.
        run_id: the run.
        limit_s: the seconds for which the run's record must be missing in a directory, because the disk of the
            directory may come back. In a bucket, two reads in a row are enough. Default: as long as a lease.
        clock: returns the seconds of a monotonic clock. Default: the system's clock.

    Example:
        DeletionWatch(store, "brave-otter-7f3a").is_gone()
    """

    def __init__(
        self, store: Store, run_id: str, limit_s: float = LEASE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._clock = clock
        self._look_s = min(DELETION_LOOK_S, limit_s / 5)
        self._gone_s = limit_s if is_near(store.url) else self._look_s
        self._look_at = clock() + self._look_s
        self._record = StalenessTracker(clock)

    def is_gone(self) -> bool:
        """Look for the run's record if a look is due. Return True if the run was deleted."""
        now = self._clock()
        if now < self._look_at:
            return False
        self._look_at = now + self._look_s
        is_missing = run_was_deleted(self._store, self._run_id)
        return self._record.note(self._run_id, is_missing) >= self._gone_s and is_missing
