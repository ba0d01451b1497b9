"""The small records of one attempt of one rank, typed: its claim, heartbeat, cancel marker, intent and handle."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from executors.attempt.outcome import (
    MAX_ATTEMPTS,
    MAX_OUTCOME_BYTES,
    MAX_RANK,
    PID,
    describe_cancel,
    encode_outcome,
    only_numbers,
    parse_outcome,
    warning_count,
)
from executors.attempt.pauses import wait_until_terminal
from executors.attempt.signed_record import PROOF_BYTES, find_signed, is_proven, signed_key, write_signed
from executors.errors import CorruptObjectError, KeyNotFoundError, UnknownHandleError, UnwritableStoreError
from executors.patience import OutageTolerance, retry
from executors.process import this_process
from executors.protocol import BY_USER, Outcome, Reason, ReplicaHandle, ReplicaStatus, WarningCount
from executors.store import Store, store_at
from executors.store.record_names import (
    BEGINNINGS,
    BOOT,
    CANCEL,
    CLAIM,
    HANDLE,
    HEARTBEAT,
    INTENT,
    OUTCOME,
    SERVICE_REASON,
    run_folder_was_deleted,
    run_record_key,
)
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    MAX_RECORD_BYTES,
    Fields,
    Parse,
    Record,
    checked,
    exists,
    find_record,
    integer,
    json_object,
    nullable,
    number,
    one_of,
    text,
    to_bytes,
)
from executors.store.run_key import KEY_ID, held_key, hold_named_key, key_id, lacks_key
from executors.store.url import RUN_ID

T = TypeVar("T")
SERVICE_REASONS = ("preempted", "timeout")
TICKS = integer(0, 2**63)
MAX_INSTALLED = 1 << 50  # bytes
PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?=$|[\s\[=<>!~;@(])")  # the name that a requirement begins with
WARNED = "replicas.warnings"
"""Where a heartbeat has its count of warnings. Names that replicas report are keyword arguments: they have no dot."""


@dataclass(frozen=True, kw_only=True)
class Claim(Record):
    """`started.json`: the process that has the attempt."""

    nonce: str = checked(text(100))
    pid: int | None = checked(nullable(PID), None)
    """None: a replica that joined without being launched."""
    pid_started: int | None = checked(nullable(TICKS), None)
    host: str = checked(text(1000), "")
    at: float | None = checked(nullable(number(LONG_AGO, FAR_AHEAD)), None)
    """When it was claimed, by the host's clock."""


@dataclass(frozen=True, kw_only=True)
class Boot(Record):
    """`boot.json`: a container of the attempt began to install what its image lacks, and how far it is."""

    at: float = checked(number(LONG_AGO, FAR_AHEAD))
    """When it began, by the container's clock."""
    what: str = checked(text(100), "")
    """The requirement that takes longest, as in "torch==2.13.0"."""
    n_bytes: int | None = checked(nullable(integer(0, MAX_INSTALLED)), None)
    """How much has been downloaded. None: not known."""
    of_bytes: int | None = checked(nullable(integer(0, MAX_INSTALLED)), None)
    """How much there is to download, of the packages that are known by now."""

    @property
    def package(self) -> str:
        """The name of the package that takes longest, as in "torch"; empty if the requirement is a path or a URL."""
        found = PACKAGE.match(self.what)
        return found[0] if found else ""


@dataclass(frozen=True)
class Beat:
    """`heartbeat.json`: that a replica lived at a time, what it reported last, and how many warnings it left."""

    at: float
    reported: Mapping[str, float]
    warned: WarningCount | None = None

    @classmethod
    def parse(cls, data: Any, key: str = HEARTBEAT, url: str = "") -> Beat:
        fields = Fields(data, key, url)
        at = fields.take("at", number(LONG_AGO, FAR_AHEAD))
        warned = fields.take(WARNED, nullable(warning_count), None)
        reported = {name: value for name, value in fields.values.items() if name not in ("at", WARNED)}
        return cls(at, only_numbers(reported), warned)

    def to_bytes(self) -> bytes:
        """Return the heartbeat as it is stored: one line of JSON."""
        record: dict[str, Any] = {name: value for name, value in self.reported.items() if name != WARNED}
        if self.warned is not None:
            record[WARNED] = asdict(self.warned)
        return to_bytes({**record, "at": self.at})


STALE_INTENT_S = 1800.0  # of a launch: its calls wait for each other, and each until its job is scheduled


@dataclass(frozen=True)
class CancelMarker(Record):
    """`cancel.json`: somebody asked the attempt to end."""

    why: str = checked(text(), "cancelled")


@dataclass(frozen=True)
class Intent(Record):
    """`intent.json`: somebody is about to ask a service for a replica."""

    nonce: str = checked(text(100))
    by: str = checked(text(1000))
    at: float = checked(number(LONG_AGO, FAR_AHEAD))
    takes_s: float = checked(number(0.0, FAR_AHEAD), STALE_INTENT_S)
    """How long that may take; a service that knows no job then never got to hear of it."""


@dataclass(frozen=True, kw_only=True)
class ServiceReason(Record):
    """`service.json`: why a service ended an attempt whose outcome knows no more than a signal."""

    reason: str = checked(one_of(*SERVICE_REASONS))
    error: str = checked(text())


def parse_handle(data: Any, key: str = HANDLE, url: str = "") -> ReplicaHandle:
    """Read `handle.json`: what an executor needs to find a replica again.

    Its metadata is the executor's own, which has to check what it takes from it.
    """
    fields = Fields(data, key, url)
    return ReplicaHandle(
        rank=fields.take("rank", integer(0, MAX_RANK)),
        backend_name=fields.take("backend_name", text(100)),
        metadata=fields.take("metadata", json_object),
    )


SIGNED = (CLAIM, HANDLE, INTENT, OUTCOME, SERVICE_REASON)
"""The records of an attempt that need a proof in a signed run.

The first three begin an attempt: any of them makes it the newest one of its rank, which fences the attempt before. A
handle also says which process or job is asked whether the rank lives. The others end a rank, or make its restart free.
"""

_known: set[tuple[str, str]] = set()
"""Handles that were seen in their store, which is asked for each but once: they are never taken back."""


def replica_prefix(run_id: str, rank: int) -> str:
    """Name where the objects of all attempts of one rank are: `<run>/replicas/0003/`."""
    return f"{run_id}/replicas/{rank:04d}/"


def replica_key(run_id: str, rank: int, attempt: int, name: str) -> str:
    """Name an object of one attempt of one rank: `<run>/replicas/0003/0/<name>`."""
    return f"{replica_prefix(run_id, rank)}{attempt}/{name}"


def spare_key(run_id: str, number: int, attempt: int, name: str) -> str:
    """Name an object of a spare: `<run>/spares/0000/0/<name>`."""
    return f"{run_id}/spares/{number:04d}/{attempt}/{name}"


# More than 20 methods: each record has one that reads it or finds out whether it exists, so that no other file needs to
# know the name of a record.
@dataclass(frozen=True)
class Attempt:
    """One attempt of one rank of a run: its records in the run's store."""

    store: Store
    run_id: str
    rank: int
    number: int = 0
    is_spare: bool = False
    """Whether it stands by for any rank; `rank` then numbers the spares."""

    @classmethod
    def from_handle(cls, handle: ReplicaHandle, backend: str) -> Attempt:
        """Return the attempt that a handle names, asking no store.

        The handle of a signed run names the run's key. This process holds the key from then on if this machine has it:
        a script that asks an executor about a handle never reads the run's record.

        Args:
            handle: the handle.
            backend: the name of the backend that the handle must be of, for the message.

        Raises:
            UnknownHandleError: it is not a handle of this backend.

        Example:
            Attempt.from_handle(run.handle(0), "local").outcome()
        """
        try:
            fields = Fields(handle.metadata, f"the handle of rank {handle.rank}")
            url, run_id = fields.take("store_url", text()), fields.take("run_id", text(40, RUN_ID))
            number, rank = fields.take("attempt", integer(0, MAX_ATTEMPTS)), integer(0, MAX_RANK)(handle.rank)
            signed_with = fields.take("key_id", nullable(text(8, KEY_ID)), None)
        except (CorruptObjectError, ValueError) as error:
            raise UnknownHandleError(
                f"No replica: the handle of rank {handle.rank} was not made by the {backend} backend: {error}"
            ) from None
        store = store_at(url)
        if signed_with is not None:
            hold_named_key(store.url, run_id, signed_with)
        return cls(store, run_id, rank, number)

    @classmethod
    def of_handle(cls, handle: ReplicaHandle, backend: str) -> tuple[Attempt, ReplicaHandle]:
        """Return the newest attempt of the replica that a handle names, and its newest handle.

        The newest attempt is the handle's, or a later one that was launched or claimed since. The newest handle may be
        of an earlier attempt, where a copy was started since, and may come from the store: whoever uses its metadata
        checks it, but for `store_url`, `run_id` and `attempt`.

        Raises:
            UnknownHandleError: no such replica was ever launched by this backend.
        """
        launched = cls.from_handle(handle, backend)
        seen = (launched.store.url, launched.key(HANDLE))
        if seen not in _known and not launched.has_handle():
            where = f"run_id={launched.run_id!r}, rank {launched.rank} at {launched.store.url}"
            raise UnknownHandleError(f"No replica with {where}.")
        _known.add(seen)
        newest = launched.newest()
        for later in range(newest.number, launched.number, -1):
            if found := newest.at(later).handle(backend):
                place = newest.at(later).announced(backend).metadata  # also where the record has no place, or another
                return newest, replace(found, metadata={**found.metadata, **place})
        return newest, handle

    @property
    def place(self) -> str:
        """A name that no other attempt of any run has."""
        return f"{self.store.url} {self.key('')}"

    def key(self, name: str) -> str:
        """Name one of its objects: `<run>/replicas/0003/0/<name>`."""
        key = spare_key if self.is_spare else replica_key
        return key(self.run_id, self.rank, self.number, name)

    def at(self, number: int) -> Attempt:
        """Return another attempt of the same rank."""
        return replace(self, number=number)

    def newest(self) -> Attempt:
        """Return the rank's newest attempt that was launched or claimed, from this one on.

        Attempts are dense: launched ones have a handle, or on a cloud an intent at least; a second copy of a launched
        one has a claim alone, and one whose launch was interrupted an outcome alone. In a signed run only records that
        were made with the run's key begin an attempt.
        """
        number = self.number
        while self.at(number + 1).has_begun():
            number += 1
            if number > MAX_ATTEMPTS:
                raise CorruptObjectError(
                    f"Rank {self.rank} of run {self.run_id!r} has more than {MAX_ATTEMPTS} attempts."
                )
        return self.at(number)

    def has(self, name: str) -> bool:
        """Return True if one of its objects exists. In a signed run the records in `SIGNED` need the run's key."""
        run_key = held_key(self.store.url, self.run_id) if name in SIGNED else None
        return exists(self.store, self.key(name) if run_key is None else signed_key(self.key(name), run_key))

    def find(self, name: str, parse: Parse[T], max_bytes: int = MAX_RECORD_BYTES) -> T | None:
        """Read one of its records; None when there is none, or none with the run's key where it has to have that."""
        run_key = held_key(self.store.url, self.run_id) if name in SIGNED else None
        if run_key is not None:
            return find_signed(self.store, self.key(name), parse, max_bytes, run_key)
        return find_record(self.store, self.key(name), parse, max_bytes)

    def read(self, name: str, parse: Parse[T]) -> T:
        """Read one of its records, which must exist.

        Args:
            name: the name of the record, such as `CLAIM`.
            parse: makes the record of its bytes.

        Raises:
            KeyNotFoundError: there is none, or in a signed run none with the run's key.
            StoreError: the store does not answer, or holds a record that `parse` refuses.

        Example:
            attempt.read(CLAIM, Claim.parse).nonce
        """
        found = self.find(name, parse)
        if found is None:
            key, url = self.key(name), self.store.url
            raise KeyNotFoundError(f"No object {key!r} in {url}.", key=key, url=url)
        return found

    def create(self, name: str, data: bytes, *, replaces: bool = False) -> bool:
        """Create one of its records unless it exists; in a signed run with a proof, for a process with the key.

        Args:
            name: the name of the record, such as `HANDLE`.
            data: the record as JSON.
            replaces: write it also if it exists.

        Returns: True if this call wrote it. A lost reply may hide that it did: what exists decides.

        Raises:
            StoreError: the store did not take it.

        Example:
            is_ours = attempt.create(HANDLE, handle.to_json().encode())
        """
        run_key = held_key(self.store.url, self.run_id) if name in SIGNED else None
        if run_key is not None:
            return write_signed(self.store, self.key(name), data, run_key, replaces=replaces)
        if replaces:
            self.store.put(self.key(name), data)
            return True
        return self.store.put_if_absent(self.key(name), data)

    def claim_start(self, nonce: str, **more: Any) -> bool:
        """Begin it by creating its intent; False if there is one of another launch, which has another nonce."""
        intent = {"nonce": nonce, "by": this_process(), **more, "at": time.time()}
        created = self.create(INTENT, to_bytes(intent))
        # Perhaps the one that exists is ours, by a create whose answer was lost.
        return created or self.read(INTENT, Intent.parse).nonce == nonce

    def started_by(self) -> str | None:
        """Name the process that began it, as its first record does, perhaps by ""; None: nobody has begun it."""
        if (intent := self.find(INTENT, Intent.parse)) is not None:
            return intent.by
        if (handle := self.find(HANDLE, parse_handle)) is not None:
            by = handle.metadata.get("by")
            return by if isinstance(by, str) else ""
        return "" if self.has_started() else None

    def has_started(self) -> bool:
        """Return True if a process has claimed it."""
        return self.has(CLAIM)

    def has_handle(self) -> bool:
        """Return True if a backend has started it, and left the handle."""
        return self.has(HANDLE)

    def has_intent(self) -> bool:
        """Return True if a process has begun to ask a service for its replica."""
        return self.has(INTENT)

    def has_outcome(self) -> bool:
        """Return True if it has ended, and its end is recorded."""
        return self.has(OUTCOME)

    def has_begun(self) -> bool:
        """Return True if it has any of the records that make it the newest attempt of its rank."""
        return any(map(self.has, BEGINNINGS))

    def has_cancel_marker(self) -> bool:
        """Return True if a process has asked it to end."""
        return self.has(CANCEL)

    def boot(self) -> Boot | None:
        """Return how far its container is with an installation. None: it installs nothing, or has not begun to."""
        return self.find(BOOT, Boot.parse)

    def beat(self) -> Beat | None:
        """Return its last heartbeat. None: it has sent none."""
        return self.find(HEARTBEAT, Beat.parse)

    def handle(self, backend: str) -> ReplicaHandle | None:
        """Return its handle; None when it left none.

        Where the handle is found says which replica it is of, not what is written in it; the store may have moved, too.

        Raises:
            CorruptObjectError: it is not a handle, or one of another backend.
        """
        handle = self.find(HANDLE, parse_handle)
        return None if handle is None else self.rebind_handle(handle, backend)

    def rebind_handle(self, handle: ReplicaHandle, backend: str) -> ReplicaHandle:
        """Return a handle that was found among its records; see `handle`."""
        if handle.backend_name != backend:
            key, url = self.key(HANDLE), self.store.url
            raise CorruptObjectError(
                f"{key!r} in {url} is a handle of backend {handle.backend_name!r}; the run is on {backend!r}.",
                key=key,
                url=url,
            )
        here = self.announced(backend).metadata if "store_url" in handle.metadata else {}
        return replace(handle, rank=self.rank, metadata={**handle.metadata, **here})

    def announced(self, backend: str) -> ReplicaHandle:
        """Return a handle that says no more than which attempt it is of, and the key of a signed run."""
        place: dict[str, Any] = {"store_url": self.store.url, "run_id": self.run_id, "attempt": self.number}
        return ReplicaHandle(self.rank, backend, {**place, **self.named_key})

    @property
    def named_key(self) -> dict[str, str]:
        """The field of a handle that names the key of a signed run, so that its reader asks for proofs."""
        run_key = held_key(self.store.url, self.run_id)
        return {} if run_key is None else {"key_id": key_id(run_key)}

    def outcome(self) -> Outcome | None:
        """Return how it ended, with the reason that only its service knew; None while it has no outcome.

        In a signed run only an outcome that was made with the run's key counts. A process without the key cannot tell:
        what it reads is `unproven`.
        """
        found = self.find(OUTCOME, parse_outcome, MAX_OUTCOME_BYTES)
        if found is not None and lacks_key(self.store.url, self.run_id):
            found = replace(found, unproven=True)
        if found is not None and (found.rank, found.attempt) != (self.rank, self.number):
            key, url = self.key(OUTCOME), self.store.url
            whose = f"rank {found.rank}, attempt {found.attempt}"
            raise CorruptObjectError(f"{key!r} in {url} is the outcome of {whose}.", key=key, url=url)
        if found is not None and found.was_told_to_end:
            word = self.find(SERVICE_REASON, ServiceReason.parse)
            if word is not None:
                reason: Any = word.reason
                return replace(found, reason=reason, error=word.error, error_line=None)
        return found

    @property
    def has_forged_outcome(self) -> bool:
        """Whether its `outcome.json` is there and lacks the proof of the run's key, which this process holds."""
        run_key, key = held_key(self.store.url, self.run_id), self.key(OUTCOME)
        if run_key is None:
            return False
        try:
            data = find_record(self.store, key, lambda data, *_: data, MAX_OUTCOME_BYTES + PROOF_BYTES)
        except CorruptObjectError:  # it is larger than any outcome
            return True
        return data is not None and not is_proven(data, key, run_key)

    def record_service_reason(self, reason: Reason | None, error: str | None) -> None:
        """Leave why its service ended it, where that says more than the signal that its outcome has."""
        if lacks_key(self.store.url, self.run_id):
            return  # a restart after `preempted` is free: only a process with the run's key may say that
        if reason in SERVICE_REASONS and not run_folder_was_deleted(self.store, self.run_id):
            with contextlib.suppress(UnwritableStoreError):  # who looks may only read
                self.create(SERVICE_REASON, to_bytes({"reason": reason, "error": error or ""}))

    def ended(self, status: ReplicaStatus, reason: Reason | None = None, **more: Any) -> Outcome:
        """Return an outcome of this attempt, not yet recorded."""
        return Outcome(self.rank, self.number, status, reason, **more)

    def record(self, outcome: Outcome, *, patience: OutageTolerance | None = None) -> Outcome:
        """Write its outcome unless there is one, or its run was deleted, and return the one that counts: the first.

        What ends after its cancel marker was written is `cancelled`, however it ended.

        In a signed run the outcome is written with the run's key. A process without the key writes nothing: it cannot
        end a rank for others, and returns what it found.

        Args:
            outcome: how it ended.
            patience: how long to try while the store fails. None: once.

        Raises:
            UnwritableStoreError: it cannot be written there; the error has what would be recorded.
        """
        if patience is not None:
            return retry(lambda: self.record(outcome), patience)
        marker = self.find(CANCEL, CancelMarker.parse)
        if marker is not None:
            reported = None if outcome.reason == "signal" else outcome.error  # the signal was the cancellation's
            error = reported or describe_cancel(outcome.rank, marker.why)
            code = outcome.exit_code or None  # with 0 it would look like a success
            outcome = replace(outcome, status=ReplicaStatus.CANCELLED, reason="cancelled", exit_code=code)
            outcome = replace(outcome, result=None, error=error)
        outcome = replace(
            outcome, host=outcome.host or socket.gethostname(), finished_at=outcome.finished_at or time.time()
        )
        if lacks_key(self.store.url, self.run_id):
            return self.outcome() or replace(outcome, unproven=True)
        if run_folder_was_deleted(self.store, self.run_id):
            return outcome
        try:
            self.create(OUTCOME, encode_outcome(outcome))
        except UnwritableStoreError as error:
            error.outcome = outcome
            raise
        return self.outcome() or outcome

    def record_lost(self, who_says: str) -> Outcome:
        """Write the outcome of a replica that vanished without one, and ended with its last heartbeat, if it sent one.

        Args:
            who_says: as in "its supervisor is gone" or "Modal reports it gone".
        """
        beat = self.beat()
        age = f" Its last heartbeat was {time.time() - beat.at:.0f} s ago." if beat else " It never sent a heartbeat."
        error = f"{self.title()} was lost: {who_says} and it left no outcome.{age}"
        # Whoever finds it lost may come a day later; 0.0: now.
        last_at = beat.at if beat else 0.0
        return self.record(self.ended(ReplicaStatus.FAILED, "lost", error=error, finished_at=last_at))

    def title(self) -> str:
        """Return its name at the beginning of a sentence: `Replica 3 of 8 (attempt 1)`."""
        n = find_record(self.store, run_record_key(self.run_id), _parse_world_size) or self.rank + 1
        return f"Replica {self.rank} of {n} (attempt {self.number})"

    def request_cancel(self, why: str = BY_USER) -> None:
        """Leave its cancel marker, so that whatever ends it now is a cancellation. Idempotent."""
        marker = {"by": this_process(), "why": why, "at": time.time()}
        if not run_folder_was_deleted(self.store, self.run_id):
            self.store.put_if_absent(self.key(CANCEL), to_bytes(marker))

    def abandon(self, error: BaseException) -> None:
        """Close an attempt whose launch failed: nobody waits for it, and its replica ends if it comes up late."""
        why = launch_failed_message(error)
        if self.outcome() is None:
            if not self.has_handle():
                self.record(self.ended(ReplicaStatus.FAILED, "start_failed", error=why))
            self.request_cancel(why)  # also where no handle is: its starter may live on


def launch_failed_message(error: BaseException) -> str:
    """Return the sentence that records a launch which failed before all its replicas were started."""
    return f"The launch failed before all replicas were started: {str(error) or type(error).__name__}"


def _parse_world_size(data: Any, key: str, url: str) -> int:
    settings = Fields(data, key, url).take("settings", json_object)
    return Fields(settings, key, url).take("n", integer(1, MAX_RANK))


def collect_rows(
    poll: Callable[[ReplicaHandle], ReplicaStatus],
    backend: str,
    handles: Sequence[ReplicaHandle],
    timeout: float | None,
) -> list[dict[str, Any]]:
    """Wait for the replicas' outcomes; return what `collect` does, in the order given.

    A process without the key of a signed run cannot tell which attempt is the newest, nor whether it has ended. All its
    rows are `unproven`.

    Args:
        poll: returns the status of a replica.
        backend: the name of the backend that the handles must be of.
        handles: of the replicas.
        timeout: how long to wait at most, in seconds. None: until all have ended.

    Raises:
        UnknownHandleError: a handle is of no replica that was launched by this backend.

    Example:
        collect_rows(executor.poll, "local", run.handles, timeout=60.0)
    """
    wait_until_terminal(poll, handles, timeout)
    rows = []
    for handle in handles:
        status = poll(handle)
        attempt, _ = Attempt.of_handle(handle, backend)
        found = attempt.outcome() or attempt.ended(status)
        rows.append(replace(found, unproven=found.unproven or lacks_key(attempt.store.url, attempt.run_id)).to_row())
    return rows
