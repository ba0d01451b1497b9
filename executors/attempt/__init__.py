"""One attempt of one rank, and its records in the store: claim, heartbeat, cancel marker, intent, handle and outcome.

Read `Attempt` first. `outcome.py` has the record of an end and its sentences, `handles.py` the handles of a launch, and
`signed_record.py` the records of a signed run. Other packages use the methods of `Attempt`, and not the names of its
records.
"""

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
"""The field of a heartbeat with its count of warnings. A replica cannot report this name, because names that replicas
report are keyword arguments, which have no dot."""


@dataclass(frozen=True, kw_only=True)
class Claim(Record):
    """`started.json`: the process that has claimed the attempt."""

    nonce: str = checked(text(100))
    """A random text that no other claim has."""
    pid: int | None = checked(nullable(PID), None)
    """The process on its host. None: a replica that joined without a launch."""
    pid_started: int | None = checked(nullable(TICKS), None)
    """The start time of the process. Together with the pid it names one process."""
    host: str = checked(text(1000), "")
    at: float | None = checked(nullable(number(LONG_AGO, FAR_AHEAD)), None)
    """The Unix time of the claim, by the host's clock."""


@dataclass(frozen=True, kw_only=True)
class Boot(Record):
    """`boot.json`: the progress of a container that installs packages which its image lacks."""

    at: float = checked(number(LONG_AGO, FAR_AHEAD))
    """The Unix time of the begin, by the container's clock."""
    what: str = checked(text(100), "")
    """The requirement that takes longest, as in "torch==2.13.0"."""
    n_bytes: int | None = checked(nullable(integer(0, MAX_INSTALLED)), None)
    """The bytes that were downloaded. None: not known."""
    of_bytes: int | None = checked(nullable(integer(0, MAX_INSTALLED)), None)
    """The bytes to download, of the packages that are known so far."""

    @property
    def package(self) -> str:
        """The name of the package that takes longest, as in "torch"; empty if the requirement is a path or a URL."""
        found = PACKAGE.match(self.what)
        return found[0] if found else ""


@dataclass(frozen=True)
class Beat:
    """`heartbeat.json`: the time of the heartbeat, the last report of the replica, and its count of warnings."""

    at: float
    """The Unix time of the heartbeat, by the replica's clock."""
    reported: Mapping[str, float]
    warned: WarningCount | None = None

    @classmethod
    def parse(cls, data: Any, key: str = HEARTBEAT, url: str = "") -> Beat:
        """Parse the bytes of a heartbeat. Reported values that are not numbers are left out.

        Args:
            data: the bytes.
            key: the key of the object, for the error. Default: the record's name.
            url: the url of the store, for the error. Default: not named.

        Raises:
            CorruptObjectError: the bytes are not a heartbeat. The message names the field.
        """
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


STALE_INTENT_S = 1800.0  # the calls of a launch wait for each other, and each waits until its job is scheduled


@dataclass(frozen=True)
class CancelMarker(Record):
    """`cancel.json`: a process has asked the attempt to end."""

    why: str = checked(text(), "cancelled")


@dataclass(frozen=True)
class Intent(Record):
    """`intent.json`: a process is about to ask a service for the replica."""

    nonce: str = checked(text(100))
    by: str = checked(text(1000))
    at: float = checked(number(LONG_AGO, FAR_AHEAD))
    takes_s: float = checked(number(0.0, FAR_AHEAD), STALE_INTENT_S)
    """The seconds that the request may take. If the service has no job after them, the request never reached it."""


@dataclass(frozen=True, kw_only=True)
class ServiceReason(Record):
    """`service.json`: the reason why a service ended an attempt whose outcome has only a signal."""

    reason: str = checked(one_of(*SERVICE_REASONS))
    error: str = checked(text())


def parse_handle(data: Any, key: str = HANDLE, url: str = "") -> ReplicaHandle:
    """Parse `handle.json`: the data by which an executor finds a replica again.

    The metadata of a handle has no fixed form. The executor checks each value that it takes from it.

    Args:
        data: the bytes.
        key: the key of the object, for the error. Default: the record's name.
        url: the url of the store, for the error. Default: not named.

    Raises:
        CorruptObjectError: the bytes are not a handle. The message names the field.
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
"""Handles that were seen in their store. They are never deleted, so the store is asked only once for each."""


def replica_prefix(run_id: str, rank: int) -> str:
    """Return the prefix of the objects of all attempts of one rank: `<run>/replicas/0003/`."""
    return f"{run_id}/replicas/{rank:04d}/"


def replica_key(run_id: str, rank: int, attempt: int, name: str) -> str:
    """Return the key of an object of one attempt of one rank: `<run>/replicas/0003/0/<name>`."""
    return f"{replica_prefix(run_id, rank)}{attempt}/{name}"


def spare_key(run_id: str, number: int, attempt: int, name: str) -> str:
    """Return the key of an object of a spare: `<run>/spares/0000/0/<name>`."""
    return f"{run_id}/spares/{number:04d}/{attempt}/{name}"


# More than 20 methods: for each record there is a method that reads it, or that finds out whether it exists. So no
# other file needs the name of a record.
@dataclass(frozen=True)
class Attempt:
    """One attempt of one rank of a run: its records in the run's store."""

    store: Store
    run_id: str
    rank: int
    number: int = 0
    is_spare: bool = False
    """Whether this is a spare. Then `rank` is the number of the spare."""

    @classmethod
    def from_handle(cls, handle: ReplicaHandle, backend: str) -> Attempt:
        """Return the attempt that a handle names, without a request to the store.

        The handle of a signed run names the run's key. If this machine has the key, this process uses it from then on,
        because a script that asks an executor about a handle never reads the run's record.

        Args:
            handle: the handle.
            backend: the name of the handle's backend, for the error.

        Raises:
            UnknownHandleError: this is not a handle of the backend.

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
        """Return the newest attempt of the replica that a handle names, and the newest handle of the replica.

        The newest attempt is the handle's, or a later one that was launched or claimed since. The newest handle may
        belong to an earlier attempt, if the last one was started as a copy. It may come from the store, so a caller
        checks the metadata that it uses. Only `store_url`, `run_id` and `attempt` were checked here.

        Args:
            handle: the handle.
            backend: the name of the handle's backend.

        Raises:
            UnknownHandleError: this backend never launched such a replica.
            StoreError: the store does not answer.
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
                place = (
                    newest.at(later).bare_handle(backend).metadata
                )  # the record may lack these fields, or have others
                return newest, replace(found, metadata={**found.metadata, **place})
        return newest, handle

    @property
    def full_name(self) -> str:
        """A text that identifies this attempt among all attempts of all runs. It contains the url of the store."""
        return f"{self.store.url} {self.key('')}"

    def key(self, name: str) -> str:
        """Return the key of one of its objects: `<run>/replicas/0003/0/<name>`.

        Args:
            name: the name of the object.
        """
        key = spare_key if self.is_spare else replica_key
        return key(self.run_id, self.rank, self.number, name)

    def at(self, number: int) -> Attempt:
        """Return another attempt of the same rank.

        Args:
            number: the number of the other attempt.
        """
        return replace(self, number=number)

    def newest(self) -> Attempt:
        """Return the newest attempt of this rank that has begun. Its number is at least the number of this attempt.

        The numbers of attempts have no gaps. The records that show that an attempt has begun differ. A launched attempt
        has a handle, or at least an intent on a cloud. A second copy of a launched attempt has only a claim. An attempt
        whose launch was interrupted has only an outcome. In a signed run, a record counts only with a proof of the
        run's key.

        Raises:
            StoreError: the store does not answer.
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
        """Return True if an object of the attempt exists. In a signed run, the records in `SIGNED` need a proof.

        Args:
            name: the name of the object.
        """
        run_key = held_key(self.store.url, self.run_id) if name in SIGNED else None
        return exists(self.store, self.key(name) if run_key is None else signed_key(self.key(name), run_key))

    def find(self, name: str, parse: Parse[T], max_bytes: int = MAX_RECORD_BYTES) -> T | None:
        """Read a record of the attempt.

        Args:
            name: the name of the record.
            parse: parses the bytes of the record.
            max_bytes: the most bytes that are read. Default: the limit of small records.

        Returns: the record. None: there is none, or in a signed run none with a proof of the run's key.

        Raises:
            StoreError: the store does not answer, or holds a record that `parse` refuses.
        """
        run_key = held_key(self.store.url, self.run_id) if name in SIGNED else None
        if run_key is not None:
            return find_signed(self.store, self.key(name), parse, max_bytes, run_key)
        return find_record(self.store, self.key(name), parse, max_bytes)

    def read(self, name: str, parse: Parse[T]) -> T:
        """Read a record of the attempt, which must exist.

        Args:
            name: the name of the record, such as `CLAIM`.
            parse: parses the bytes of the record.

        Raises:
            KeyNotFoundError: there is none, or in a signed run none with a proof of the run's key.
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
        """Create a record of the attempt unless it exists. In a signed run, a process with the key adds a proof.

        Args:
            name: the name of the record, such as `HANDLE`.
            data: the record as JSON.
            replaces: True to replace an existing record. Default False.

        Returns: True if this call wrote it. After a lost reply this may be False although the call wrote it, so the
            caller reads the record to know.

        Raises:
            StoreError: the store did not accept the record.

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

    def create_intent(self, nonce: str, **more: Any) -> bool:
        """Claim the start of the attempt by creating its intent. Only then may the caller start a process for it.

        Args:
            nonce: a random text of this launch.
            more: further fields of the intent, such as `takes_s`.

        Returns: False if another launch has created an intent before.
        """
        intent = {"nonce": nonce, "by": this_process(), **more, "at": time.time()}
        created = self.create(INTENT, to_bytes(intent))
        # An existing intent may be ours, from a create whose reply was lost.
        return created or self.read(INTENT, Intent.parse).nonce == nonce

    def started_by(self) -> str | None:
        """Return the name of the process that started the attempt. "": unknown. None: the attempt has not started."""
        if (intent := self.find(INTENT, Intent.parse)) is not None:
            return intent.by
        if (handle := self.find(HANDLE, parse_handle)) is not None:
            by = handle.metadata.get("by")
            return by if isinstance(by, str) else ""
        return "" if self.has_started() else None

    def has_started(self) -> bool:
        """Return True if a process has claimed the attempt."""
        return self.has(CLAIM)

    def has_handle(self) -> bool:
        """Return True if a backend has started the attempt, and written its handle."""
        return self.has(HANDLE)

    def has_intent(self) -> bool:
        """Return True if a process is asking, or has asked, a service for the replica."""
        return self.has(INTENT)

    def has_outcome(self) -> bool:
        """Return True if the end of the attempt is recorded."""
        return self.has(OUTCOME)

    def has_begun(self) -> bool:
        """Return True if the attempt has any record that shows that it was started."""
        return any(map(self.has, BEGINNINGS))

    def has_cancel_marker(self) -> bool:
        """Return True if a process has asked the attempt to end."""
        return self.has(CANCEL)

    def boot(self) -> Boot | None:
        """Return the progress of an installation in its container. None: there is no installation so far."""
        return self.find(BOOT, Boot.parse)

    def beat(self) -> Beat | None:
        """Return the last heartbeat. None: there is none yet."""
        return self.find(HEARTBEAT, Beat.parse)

    def handle(self, backend: str) -> ReplicaHandle | None:
        """Return the handle of the attempt. None: there is none.

        The place of a handle in the store decides which replica it belongs to, and not its content. The store itself
        may have moved since.

        Args:
            backend: the name of the handle's backend.

        Raises:
            CorruptObjectError: the object is not a handle, or belongs to another backend.
        """
        handle = self.find(HANDLE, parse_handle)
        return None if handle is None else self.rebind_handle(handle, backend)

    def rebind_handle(self, handle: ReplicaHandle, backend: str) -> ReplicaHandle:
        """Return a handle with the rank, the run and the store of this attempt, whatever its content names; see
        `handle`.

        Args:
            handle: a handle that was found among the records of this attempt.
            backend: the name of the handle's backend.

        Raises:
            CorruptObjectError: the handle belongs to another backend.
        """
        if handle.backend_name != backend:
            key, url = self.key(HANDLE), self.store.url
            raise CorruptObjectError(
                f"{key!r} in {url} is a handle of backend {handle.backend_name!r}; the run is on {backend!r}.",
                key=key,
                url=url,
            )
        here = self.bare_handle(backend).metadata if "store_url" in handle.metadata else {}
        return replace(handle, rank=self.rank, metadata={**handle.metadata, **here})

    def bare_handle(self, backend: str) -> ReplicaHandle:
        """Return a handle without the data of a backend. It names the attempt, and the key of a signed run.

        Args:
            backend: the name of the backend.
        """
        place: dict[str, Any] = {"store_url": self.store.url, "run_id": self.run_id, "attempt": self.number}
        return ReplicaHandle(self.rank, backend, {**place, **self.named_key})

    @property
    def named_key(self) -> dict[str, str]:
        """The field of a handle that names the key of a signed run, so that its reader checks proofs."""
        run_key = held_key(self.store.url, self.run_id)
        return {} if run_key is None else {"key_id": key_id(run_key)}

    def outcome(self) -> Outcome | None:
        """Return the outcome, with the reason of its service if only that knew it. None: there is no outcome yet.

        In a signed run, only an outcome with a proof of the run's key counts. A process without the key cannot check
        the proof, so for it each outcome is `unproven`.

        Raises:
            CorruptObjectError: the object is not an outcome of this attempt.
            StoreError: the store does not answer.
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
        """True if the attempt's `outcome.json` lacks the proof of the run's key. False in a process without the key."""
        run_key, key = held_key(self.store.url, self.run_id), self.key(OUTCOME)
        if run_key is None:
            return False
        try:
            data = find_record(self.store, key, lambda data, *_: data, MAX_OUTCOME_BYTES + PROOF_BYTES)
        except CorruptObjectError:  # it is larger than any outcome
            return True
        return data is not None and not is_proven(data, key, run_key)

    def record_service_reason(self, reason: Reason | None, error: str | None) -> None:
        """Record the service's reason for the end of the attempt, if the outcome can only have a signal.

        Args:
            reason: the reason. Only "preempted" and "timeout" are recorded.
            error: a sentence about the end. None: there is none.
        """
        if lacks_key(self.store.url, self.run_id):
            return  # a restart after `preempted` is free, so only a process with the run's key may record it
        if reason in SERVICE_REASONS and not run_folder_was_deleted(self.store, self.run_id):
            with contextlib.suppress(UnwritableStoreError):  # a user who looks at the run may be allowed to read only
                self.create(SERVICE_REASON, to_bytes({"reason": reason, "error": error or ""}))

    def new_outcome(self, status: ReplicaStatus, reason: Reason | None = None, **more: Any) -> Outcome:
        """Return a new outcome of this attempt, which is not recorded yet.

        Args:
            status: the status.
            reason: the reason. None, the default: it succeeded.
            more: further fields of the outcome.
        """
        return Outcome(self.rank, self.number, status, reason, **more)

    def record(self, outcome: Outcome, *, tolerance: OutageTolerance | None = None) -> Outcome:
        """Write the outcome of the attempt, and return the outcome that counts, which is the first one.

        If the attempt has a cancel marker, its outcome becomes `cancelled`, whatever ended it. Nothing is written if
        the run was deleted. In a signed run the outcome gets a proof. A process without the key writes nothing, because
        it cannot end a rank for other processes, and returns the outcome that it found.

        Args:
            outcome: the outcome.
            tolerance: how long to try while the store fails. None, the default: one try.

        Raises:
            UnwritableStoreError: the store is read-only or full. The error has the outcome in `outcome`.
            StoreError: the store does not answer.
        """
        if tolerance is not None:
            return retry(lambda: self.record(outcome), tolerance)
        marker = self.find(CANCEL, CancelMarker.parse)
        if marker is not None:
            reported = None if outcome.reason == "signal" else outcome.error  # the cancel itself sent the signal
            error = reported or describe_cancel(outcome.rank, marker.why)
            code = outcome.exit_code or None  # an exit code of 0 would look like a success
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
        """Write the outcome of a replica that ended without writing one. Its end is the time of its last heartbeat.

        Args:
            who_says: the evidence, as in "its supervisor is gone" or "Modal reports it gone".
        """
        beat = self.beat()
        age = f" Its last heartbeat was {time.time() - beat.at:.0f} s ago." if beat else " It never sent a heartbeat."
        error = f"{self.title()} was lost: {who_says} and it left no outcome.{age}"
        # The loss may be found a day later, so the time of the last heartbeat counts. 0.0 stands for now.
        last_at = beat.at if beat else 0.0
        return self.record(self.new_outcome(ReplicaStatus.FAILED, "lost", error=error, finished_at=last_at))

    def title(self) -> str:
        """Return the name of the attempt, to begin a sentence with: `Replica 3 of 8 (attempt 1)`."""
        n = find_record(self.store, run_record_key(self.run_id), _parse_world_size) or self.rank + 1
        return f"Replica {self.rank} of {n} (attempt {self.number})"

    def request_cancel(self, why: str = BY_USER) -> None:
        """Write the cancel marker, so that any end of the attempt from now on is a cancel. The call may be repeated.

        Args:
            why: the reason. Default: the user cancelled it.
        """
        marker = {"by": this_process(), "why": why, "at": time.time()}
        if not run_folder_was_deleted(self.store, self.run_id):
            self.store.put_if_absent(self.key(CANCEL), to_bytes(marker))

    def abandon(self, error: BaseException) -> None:
        """Record the end of an attempt whose launch failed. If its replica starts late, the replica ends at once.

        Args:
            error: the error of the launch.
        """
        why = launch_failed_message(error)
        if self.outcome() is None:
            if not self.has_handle():
                self.record(self.new_outcome(ReplicaStatus.FAILED, "start_failed", error=why))
            self.request_cancel(why)  # also without a handle, because the process that starts it may still live


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
    """Wait for the outcomes of replicas, and return the rows of `collect`, in the order of the handles.

    A process without the key of a signed run does not know which attempt is the newest, or whether it has ended. So all
    its rows are `unproven`.

    Args:
        poll: returns the status of a replica.
        backend: the name of the handles' backend.
        handles: the handles of the replicas.
        timeout: the longest wait in seconds. None: until all have ended.

    Raises:
        UnknownHandleError: this backend never launched the replica of a handle.

    Example:
        collect_rows(executor.poll, "local", run.handles, timeout=60.0)
    """
    wait_until_terminal(poll, handles, timeout)
    rows = list[Any]()
    for handle in handles:
        status = poll(handle)
        attempt, _ = Attempt.of_handle(handle, backend)
        found = attempt.outcome() or attempt.new_outcome(status)
        rows.append(replace(found, unproven=found.unproven or lacks_key(attempt.store.url, attempt.run_id)).to_row())
    return rows
