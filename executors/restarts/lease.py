"""Leases: the containers of a run continue only while a process outside renews theirs, or has released them.

An attached run has `lease.json`, which the launching process renews for as long as it watches the run. The containers
that a detached launch, resume or addition starts have a lease of their own, `starts/<nonce>.json`. Its launcher renews
it while it starts them, and releases them when the handle of the last one is written: a launcher that dies half-way
leaves nothing that is paid for until its time limit.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from executors.errors import CorruptObjectError, StoreError
from executors.patience import GLANCE, REQUEST, retry
from executors.process import may_live, this_process
from executors.settings.run_spec import ATTACHED_LEASE, LEASE_S, RunSpec
from executors.store import Store
from executors.store.record_names import run_was_deleted
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    Record,
    checked,
    exists,
    find_record,
    flag,
    number,
    text,
    to_bytes,
)
from executors.store.staleness import StalenessTracker
from executors.store.url import impatient_store

RENEW_S = 60.0
AGAIN_S = 5.0  # after a renewal that failed
STARTS = "starts/"
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
        yields: leave the lease alone while somebody else renews it.
        renew_s: seconds between two renewals. Default: a minute.
        name: which lease of the run. Default: the attached run's.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        yields: bool = False,
        renew_s: float = RENEW_S,
        name: str = ATTACHED_LEASE,
    ) -> None:
        self._store = store
        self._run_id = run_id
        self._key = f"{run_id}/{name}"
        self._yields = yields
        self._renew_s = renew_s
        self._holder = os.urandom(8).hex()
        self._others: Lease | None = None
        self._renewals = StalenessTracker()
        """For how long no other process has renewed the lease."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="replicas-lease", daemon=True)

    @property
    def is_released(self) -> bool:
        """Whether somebody has let the run go, as of the last look: then it needs no renewal, nor ends without one."""
        return self._others is not None and self._others.detached

    def start(self) -> None:
        """Begin: the first renewal is tried before this returns."""
        self._renew_or_warn()
        self._thread.start()

    def end(self) -> None:
        """Renew it no more."""
        self._ended.set()

    def release(self) -> None:
        """Let the run go on without anybody, unless somebody else renews the lease; a store that fails is told of."""
        self.end()
        store = impatient_store(self._store.url, GLANCE.limit_s)
        try:
            standing = find_record(store, self._key, Lease.parse)
            if standing is not None and standing.holder == self._holder:
                release_lease(store, self._run_id)
        except StoreError as error:
            log.warning("run %s may end %.0f min from now unless somebody watches it: its lease could not be let go: "
                        "%s", self._run_id, LEASE_S / 60, error)  # fmt: skip

    def release_containers(self) -> None:
        """Release containers that were all started: they need nobody any more.

        Raises:
            StoreError: the store does not take it. The containers end when their lease is over.
        """
        self.end()
        retry(
            lambda: self._store.put(self._key, to_bytes(asdict(_released()))), REQUEST, "the lease of what was started"
        )

    def renew(self) -> None:
        """Renew it now.

        Raises:
            StoreError: the store does not answer.
        """
        if run_was_deleted(self._store, self._run_id):
            self.end()  # the run was deleted, and would begin to exist again
        elif not (self._yields and self._others_hold()):
            lease = Lease(holder=self._holder, by=this_process(), at=time.time())
            self._store.put(self._key, to_bytes(asdict(lease)))

    def _others_hold(self) -> bool:
        """Return whether somebody else has renewed it lately, or let the run go."""
        found = find_record(self._store, self._key, Lease.parse)
        if found is None or found.holder == self._holder:
            self._others = None
            self._renewals.forget(self._key)
            return False
        self._others = found
        return self._renewals.note(self._key, found) < LATE * self._renew_s or found.detached

    def _hold(self) -> None:
        was_renewed = True
        while not self._ended.wait(self._renew_s if was_renewed else AGAIN_S):
            was_renewed = self._renew_or_warn(is_first_failure=was_renewed)

    def _renew_or_warn(self, *, is_first_failure: bool = True) -> bool:
        try:
            self.renew()
        except StoreError as error:
            if is_first_failure:
                log.warning("the lease of run %s cannot be renewed; trying again: %s", self._run_id, error)
            return False
        return True


class LeaseWatch:
    """Tells a container whether to continue: whether its lease changes, or it was released.

    What a read that fails says of the lease depends on why it fails. An outage passes, and whoever renews the lease is
    without the store as well, so it counts for nothing. A store that refuses its credentials for a whole lease will not
    be read again, so nothing of what this container does can be seen by anybody.

    Args:
        store: the run's store. A request should be tried once.
        run_id: the run.
        limit_s: how long a lease counts, by this process's clock, while it reads the same content again and again.
        clock: this process's clock.
        name: which lease of the run. Default: the attached run's.

    Example:
        watch = LeaseWatch(store, "brave-otter-7f3a", 900.0)
        if watch.has_expired():
            print(watch.why)
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
        name: str = ATTACHED_LEASE,
    ) -> None:
        self.limit_s = limit_s
        self._store = store
        self._run_id = run_id
        self._name = name
        self._clock = clock
        self._look_s = min(RENEW_S, limit_s / 5)
        self._seen: Lease | None = None
        # An outage counts as one look: the process that renews it was without the store, too, and may be later.
        self._renewals = StalenessTracker(clock, longest_gap_s=self._look_s)
        self._same_s = self._renewals.note(name, None)
        self._refused_s = 0.0
        self._refusal = ""
        self._tried_at = self._look_at = clock()

    @property
    def is_held(self) -> bool:
        """Whether, as of the last look, somebody renews it."""
        return not self.is_released and self._same_s < 3 * RENEW_S

    @property
    def is_released(self) -> bool:
        """Whether, as of the last look, the containers were released: they need nobody."""
        return self._seen is not None and self._seen.detached

    @property
    def why(self) -> str:
        """Why it is over, in a sentence's end."""
        minutes = f"{self.limit_s / 60:.3g} min"
        if self._refused_s >= self.limit_s:
            return f"its store has refused it for {minutes}: {self._refusal}"
        if self._name != ATTACHED_LEASE:
            return "its launcher ended before all replicas of this detached launch were started"
        return f"nobody watched this attached run for {minutes}; launch with --detach to let it go on"

    def has_expired(self) -> bool:
        """Look at the lease when it is time to; return whether the container is to end."""
        now = self._clock()
        if now < self._look_at:
            return False
        self._look_at = now + self._look_s
        try:
            found = find_record(self._store, f"{self._run_id}/{self._name}", Lease.parse)
        except StoreError as error:
            if error.refusal:
                self._refused_s += min(now - self._tried_at, self._look_s)
                self._refusal = str(error)
            self._tried_at = now
            return self._refused_s >= self.limit_s and not self.is_released
        self._refused_s = 0.0
        if found is not None and found.detached:
            self._renewals.forget(self._name)
        self._seen, self._same_s = found, self._renewals.note(self._name, found)
        self._tried_at = now
        return self._same_s >= self.limit_s


def with_lease(spec: RunSpec, lease_s: float | None, *, detach: bool) -> RunSpec:
    """Return what starts containers together with the lease that these get.

    Args:
        spec: what starts them.
        lease_s: how long a lease counts, in seconds. None: they need none.
        detach: whether they continue on their own once all of them are started.

    Example:
        with_lease(spec, executor.lease_s, detach=True).lease_name  # "starts/3f9a6c0b21d4e870.json"
    """
    name = f"{STARTS}{os.urandom(8).hex()}.json" if detach else ATTACHED_LEASE
    return replace(spec, lease_s=lease_s, lease_name=name)


def was_start_abandoned(store: Store, run_id: str, now: float) -> bool:
    """Return True if a launch, resume or addition of a run ended before all its replicas were started.

    An attached run whose lease has ended counts as well: its launcher starts nothing any more.

    Args:
        store: the run's store.
        run_id: the run.
        now: Unix time.

    Raises:
        StoreError: the store does not answer.

    Example:
        was_start_abandoned(store, "brave-otter-7f3a", time.time())
    """
    for entry in store.list(f"{run_id}/{STARTS}"):
        with contextlib.suppress(CorruptObjectError):
            lease = find_record(store, entry.key, Lease.parse)
            if lease is not None and _is_abandoned(lease, now, LATE * RENEW_S):
                return True
    return has_lease_ended(store, run_id, now)


def has_lease_ended(store: Store, run_id: str, now: float) -> bool:
    """Return True if an attached run has a lease that no process renews any more.

    On the machine of the process that renewed it last, that process's end is enough. On another machine the lease must
    be older than its containers accept: a launcher that had an outage of its store may still continue until then.

    Args:
        store: the run's store.
        run_id: the run.
        now: Unix time.

    Raises:
        StoreError: the store does not answer.

    Example:
        has_lease_ended(store, "brave-otter-7f3a", time.time())
    """
    with contextlib.suppress(CorruptObjectError):
        lease = find_record(store, attached_lease_key(run_id), Lease.parse)
        return lease is not None and _is_abandoned(lease, now, LEASE_S)
    return False


def _is_abandoned(lease: Lease, now: float, limit_s: float) -> bool:
    """Return True if a lease was not released, and its holder has ended or has not renewed it for `limit_s`."""
    return not lease.detached and (now - lease.at > limit_s or not may_live(lease.by))


def finish_start(lease: LeaseHolder | None, spec: RunSpec) -> None:
    """Release the containers of a detached start, all of which were started; an attached start keeps its lease.

    Args:
        lease: holds their lease. None: they need none.
        spec: what started them.

    Example:
        finish_start(lease, spec)
    """
    if lease is None or spec.lease_name == ATTACHED_LEASE:
        return
    try:
        lease.release_containers()
    except StoreError as error:
        print(
            f"replicas: run {spec.run_id} was started, but ends {LEASE_S / 60:.0f} min from now, because its store "
            f"does not take the note that it continues: {error}",
            file=sys.stderr,
        )


def _released() -> Lease:
    return Lease(by=this_process(), at=time.time(), detached=True)


def hold_lease(store: Store, spec: RunSpec) -> LeaseHolder | None:
    """Begin to renew the lease of what is about to be started; None if it needs none."""
    if spec.lease_s is None:
        return None
    holder = LeaseHolder(store, spec.run_id, name=spec.lease_name)
    holder.start()
    return holder


def release_lease(store: Store, run_id: str) -> None:
    """Let an attached run go on without anybody.

    Raises:
        StoreError: the store does not answer.
    """
    if exists(store, attached_lease_key(run_id)):
        store.put(attached_lease_key(run_id), to_bytes(asdict(_released())))


def attached_lease_key(run_id: str) -> str:
    """Name the lease of an attached run."""
    return f"{run_id}/{ATTACHED_LEASE}"
