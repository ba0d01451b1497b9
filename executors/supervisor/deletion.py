"""Notices that a run was deleted from its store while its replicas run, as by a lifecycle rule of the bucket."""

from __future__ import annotations

import time
from collections.abc import Callable

from executors.settings.run_spec import LEASE_S
from executors.store import Store
from executors.store.record_names import run_was_deleted
from executors.store.staleness import StalenessTracker
from executors.store.url import is_near

LOOK_S = 60.0


class DeletionWatch:
    """Reports whether a run was deleted from its store. Its replicas then work for nothing, and must end.

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
        self._look_s = min(LOOK_S, limit_s / 5)
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
