"""The lease of an attached run on other machines: its replicas go on as long as somebody here renews it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from executors.errors import StoreError
from executors.native import RunSpec
from executors.patience import GLANCE
from executors.process import this_process
from executors.store import Store
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    Record,
    checked,
    exists,
    find_record,
    flag,
    is_gone,
    number,
    text,
    to_bytes,
)
from executors.store.url import impatient_store

LEASE_S = 900.0
RENEW_S = 60.0
AGAIN_S = 5.0  # after a renewal that failed
LATE = 2.5  # renewals that are missed before somebody else's lease is taken over

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Lease(Record):
    """`lease.json`: who watches an attached run."""

    holder: str = checked(text(100), "")
    """Tells this holder from any other."""
    by: str = checked(text(1000), "")
    at: float = checked(number(LONG_AGO, FAR_AHEAD), 0.0)
    detached: bool = checked(flag, False)
    """Whether the run goes on without anybody."""


class LeaseHolder:
    """Renews the lease of a run from a thread of its own, whether or not anybody waits.

    Args:
        is_second: leave the lease alone while somebody else renews it.
    """

    def __init__(self, store: Store, run_id: str, *, is_second: bool = False, renew_s: float = RENEW_S) -> None:
        self._store = store
        self._run_id = run_id
        self._is_second = is_second
        self._renew_s = renew_s
        self._holder = os.urandom(8).hex()
        self._others: Lease | None = None
        self._others_since = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="replicas-lease", daemon=True)

    @property
    def is_let_go(self) -> bool:
        """Whether somebody has let the run go, as of the last look: then it needs no renewal, nor ends without one."""
        return self._others is not None and self._others.detached

    def start(self) -> None:
        """Begin: the first renewal is tried before this returns."""
        self._renew_or_tell()
        self._thread.start()

    def end(self) -> None:
        """Renew it no more."""
        self._ended.set()

    def release(self) -> None:
        """Let the run go on without anybody, unless somebody else renews the lease; a store that fails is told of."""
        self.end()
        store = impatient_store(self._store.url, GLANCE.limit_s)
        try:
            standing = find_record(store, key_of(self._run_id), Lease.parse)
            if standing is not None and standing.holder == self._holder:
                release_lease(store, self._run_id)
        except StoreError as error:
            log.warning("run %s may end %.0f min from now unless somebody watches it: its lease could not be let go: "
                        "%s", self._run_id, LEASE_S / 60, error)  # fmt: skip

    def renew(self) -> None:
        """Renew it now.

        Raises:
            StoreError: the store does not answer.
        """
        if is_gone(self._store, f"{self._run_id}/run.json"):
            self.end()  # the run was deleted, and would begin to exist again
        elif not (self._is_second and self._others_hold()):
            lease = Lease(holder=self._holder, by=this_process(), at=time.time())
            self._store.put(key_of(self._run_id), to_bytes(asdict(lease)))

    def _others_hold(self) -> bool:
        """Return whether somebody else has renewed it lately, or let the run go."""
        found = find_record(self._store, key_of(self._run_id), Lease.parse)
        if found is None or found.holder == self._holder:
            self._others = None
            return False
        now = time.monotonic()
        if found != self._others:
            self._others, self._others_since = found, now
        return found.detached or now - self._others_since < LATE * self._renew_s

    def _hold(self) -> None:
        was_renewed = True
        while not self._ended.wait(self._renew_s if was_renewed else AGAIN_S):
            was_renewed = self._renew_or_tell(is_first_failure=was_renewed)

    def _renew_or_tell(self, *, is_first_failure: bool = True) -> bool:
        try:
            self.renew()
        except StoreError as error:
            if is_first_failure:
                log.warning("the lease of run %s cannot be renewed; trying again: %s", self._run_id, error)
            return False
        return True


class LeaseWatch:
    """Tells a container whether anybody watches its run: then the lease changes.

    Args:
        limit_s: how long a lease counts, by this process's clock, while it reads the same content again and again.
    """

    def __init__(self, store: Store, run_id: str, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s = limit_s
        self._store = store
        self._run_id = run_id
        self._clock = clock
        self._look_s = min(RENEW_S, limit_s / 5)
        self._seen: Lease | None = None
        self._same_s = 0.0
        self._read_at = self._look_at = clock()

    @property
    def is_held(self) -> bool:
        """Whether, as of the last look, somebody renews it."""
        is_detached = self._seen is not None and self._seen.detached
        return not is_detached and self._same_s < 3 * RENEW_S

    def is_over(self) -> bool:
        """Look at the lease when it is time to; looks that fail, and those that were left out, count for nothing."""
        now = self._clock()
        if now < self._look_at:
            return False
        self._look_at = now + self._look_s
        try:
            found = find_record(self._store, key_of(self._run_id), Lease.parse)
        except StoreError:
            return False
        if found != self._seen or (found is not None and found.detached):
            self._seen, self._same_s = found, 0.0
        else:  # after an outage this is one look: whoever renews it was without the store, too, and may come later
            self._same_s += min(now - self._read_at, self._look_s)
        self._read_at = now
        return self._same_s >= self.limit_s


def hold_lease(store: Store, spec: RunSpec) -> LeaseHolder | None:
    """Begin to renew the lease of a run, where what is started needs one."""
    if spec.detach or spec.lease_s is None:
        return None
    holder = LeaseHolder(store, spec.run_id)
    holder.start()
    return holder


def release_lease(store: Store, run_id: str) -> None:
    """Let an attached run go on without anybody.

    Raises:
        StoreError: the store does not answer.
    """
    if exists(store, key_of(run_id)):
        store.put(key_of(run_id), to_bytes(asdict(Lease(by=this_process(), at=time.time(), detached=True))))


def key_of(run_id: str) -> str:
    """Name the lease of a run."""
    return f"{run_id}/lease.json"
