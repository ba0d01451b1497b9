"""Leases: a container of a run ends itself if no process outside renews its lease, unless the lease was released.

An attached run has `lease.json`. The launching process renews it for as long as it watches the run. The containers of
a detached launch, resume or addition share a lease of their own, `starts/<nonce>.json`. The launcher renews that lease
while it starts them, and releases it after it has written the last handle. So if a launcher dies before all containers
were started, the started ones end soon, and do not cost money until their time limit.
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
AGAIN_S = 5.0  # the pause after a renewal that failed
STARTS = "starts/"
LATE = 2.5  # renewals that must be missing before another process may take over a lease

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Lease(Record):
    """`lease.json`: the process that watches an attached run, and the time of the last renewal."""

    holder: str = checked(text(100), "")
    """A random name of the holder, which no other process has."""
    by: str = checked(text(1000), "")
    """The process of the holder, as `this_process` names it."""
    at: float = checked(number(LONG_AGO, FAR_AHEAD), 0.0)
    """The Unix time of the last renewal, by the holder's clock."""
    detached: bool = checked(flag, False)
    """True if the lease was released: the containers continue, and need no more renewals."""


class LeaseHolder:
    """Renews a lease of a run from a thread of its own, also while no code of this process waits for the run.

    Args:
        store: the store of the run.
        run_id: the run.
        yields: True if this holder renews nothing while another process renews the lease. Default False.
        renew_s: seconds between two renewals. Default: a minute.
        name: the name of the lease. Default: the lease of an attached run.
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
        """Measures for how long no other process has renewed the lease."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="replicas-lease", daemon=True)

    @property
    def is_released(self) -> bool:
        """True if another process had released the lease at the last read: the run continues without renewals."""
        return self._others is not None and self._others.detached

    def start(self) -> None:
        """Start to renew the lease. The first renewal is tried before the call returns."""
        self._renew_or_warn()
        self._thread.start()

    def end(self) -> None:
        """Stop renewing the lease. The containers end when the lease expires."""
        self._ended.set()

    def release(self) -> None:
        """Release the lease, so that the run continues on its own. Nothing happens if another process renews it.

        If the store fails, a warning is logged.
        """
        self.end()
        store = impatient_store(self._store.url, GLANCE.limit_s)
        try:
            standing = find_record(store, self._key, Lease.parse)
            if standing is not None and standing.holder == self._holder:
                release_lease(store, self._run_id)
        except StoreError as error:
            log.warning("run %s may end %.0f min from now unless a process watches it, because its lease could not be "
                        "released: %s", self._run_id, LEASE_S / 60, error)  # fmt: skip

    def release_containers(self) -> None:
        """Release the lease of containers that were all started, so that they continue on their own.

        Raises:
            StoreError: the store did not accept the release. The containers end when their lease expires.
        """
        self.end()
        retry(lambda: self._store.put(self._key, to_bytes(asdict(_released()))), REQUEST, "the lease of new replicas")

    def renew(self) -> None:
        """Renew the lease now.

        Raises:
            StoreError: the store does not answer.
        """
        if run_was_deleted(self._store, self._run_id):
            self.end()  # a renewal would write into the store of a run that the user has deleted
        elif not (self._yields and self._others_hold()):
            lease = Lease(holder=self._holder, by=this_process(), at=time.time())
            self._store.put(self._key, to_bytes(asdict(lease)))

    def _others_hold(self) -> bool:
        """Return True if another process has released the lease, or renews it now."""
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
    """Reads the lease of a container, and reports whether the lease has expired.

    A lease expires if its content has not changed for `limit_s`, by this process's clock. Reads that fail in an outage
    do not count, because an outage passes, and the process that renews the lease cannot write during it either. Reads
    that are refused because of the credentials do count. If they are refused for the whole time of a lease, no process
    will ever see the work of this container.

    Args:
        store: the run's store. It should try each request once.
        run_id: the run.
        limit_s: the seconds without a change after which the lease has expired.
        clock: returns the seconds of a monotonic clock. Default: the system's clock.
        name: the name of the lease. Default: the lease of an attached run.

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
        # The holder cannot renew during an outage either, so the time of an outage counts as a single interval.
        self._renewals = StalenessTracker(clock, longest_gap_s=self._look_s)
        self._same_s = self._renewals.note(name, None)
        self._refused_s = 0.0
        self._refusal = ""
        self._tried_at = self._look_at = clock()

    @property
    def is_held(self) -> bool:
        """True if a process renewed the lease, as of the last read."""
        return not self.is_released and self._same_s < 3 * RENEW_S

    @property
    def is_released(self) -> bool:
        """True if the lease was released as of the last read: the containers need no process outside."""
        return self._seen is not None and self._seen.detached

    @property
    def why(self) -> str:
        """The reason why the lease has expired, as the end of a sentence."""
        minutes = f"{self.limit_s / 60:.3g} min"
        if self._refused_s >= self.limit_s:
            return f"its store has refused it for {minutes}: {self._refusal}"
        if self._name != ATTACHED_LEASE:
            return "its launcher ended before all replicas of this detached launch were started"
        return (
            f"no process watched this attached run for {minutes}; launch with --detach for a run that continues alone"
        )

    def has_expired(self) -> bool:
        """Read the lease if a read is due, and return True if the container must end."""
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
    """Return the spec of a start with the lease that its containers get.

    Args:
        spec: the spec of the start.
        lease_s: the seconds after which a lease expires. None: the containers need no lease.
        detach: True if the containers continue on their own after all of them were started.

    Example:
        with_lease(spec, executor.lease_s, detach=True).lease_name  # "starts/3f9a6c0b21d4e870.json"
    """
    name = f"{STARTS}{os.urandom(8).hex()}.json" if detach else ATTACHED_LEASE
    return replace(spec, lease_s=lease_s, lease_name=name)


def was_start_abandoned(store: Store, run_id: str, now: float) -> bool:
    """Return True if a launch, resume or addition of a run ended before it had started all its replicas.

    An attached run whose lease has expired counts as well, because its launcher no longer starts anything.

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
    """Return True if an attached run has a lease, and no process renews it now.

    If the last holder was on this machine, it is enough that its process has ended. Otherwise the lease must be so old
    that its containers end. Until then, a launcher whose store had an outage may still continue.

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
    """Release the containers of a detached start after all of them were started. An attached start keeps its lease.

    Args:
        lease: the holder of the containers' lease. None: they have no lease.
        spec: the spec of the start.

    Example:
        finish_start(lease, spec)
    """
    if lease is None or spec.lease_name == ATTACHED_LEASE:
        return
    try:
        lease.release_containers()
    except StoreError as error:
        print(
            f"replicas: run {spec.run_id} was started, but ends {LEASE_S / 60:.0f} min from now, because its lease "
            f"could not be released: {error}",
            file=sys.stderr,
        )


def _released() -> Lease:
    return Lease(by=this_process(), at=time.time(), detached=True)


def new_lease(store: Store, spec: RunSpec, *, yields: bool = False) -> LeaseHolder | None:
    """Return the holder of a new lease for containers that are started next. None if they need no lease.

    The holder renews nothing until its `start` is called.

    Args:
        store: the run's store.
        spec: the values that start the containers.
        yields: True: do not renew the lease while another process renews it. Default: False.

    Example:
        lease = new_lease(store, spec)
    """
    if spec.lease_s is None:
        return None
    return LeaseHolder(store, spec.run_id, yields=yields, name=spec.lease_name)


def release_lease(store: Store, run_id: str) -> None:
    """Release the lease of an attached run, so that the run continues on its own.

    Args:
        store: the store of the run.
        run_id: the run.

    Raises:
        StoreError: the store does not answer.
    """
    if exists(store, attached_lease_key(run_id)):
        store.put(attached_lease_key(run_id), to_bytes(asdict(_released())))


def attached_lease_key(run_id: str) -> str:
    """Return the key of the lease of an attached run."""
    return f"{run_id}/{ATTACHED_LEASE}"
