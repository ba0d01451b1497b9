"""From a handle to its replica's records in the store: where `poll`, `cancel` and `collect` of our executors begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from executors.attempt_records import MAX_ATTEMPTS, MAX_RANK, parse_handle
from executors.errors import CorruptObjectError, UnknownHandleError
from executors.outcome import Outcome, find_outcome, newest_attempt, record_loss
from executors.protocol import ReplicaHandle, ReplicaStatus
from executors.records import Fields, exists, find_record, integer, text
from executors.replica import replica_key
from executors.run_record import find_run_record
from executors.store import Store, store_at
from executors.task import RUN_ID
from executors.waiting import wait_until_terminal


@dataclass(frozen=True)
class FoundReplica:
    """The newest attempt of the replica that a handle names."""

    store: Store
    run_id: str
    rank: int
    attempt: int
    launched: int
    """The attempt of the newest handle: an earlier one where a copy was started since."""
    metadata: Mapping[str, Any]
    """Of that handle, which names who runs it. It may come from the store: whoever uses it checks it."""

    @property
    def place(self) -> str:
        """What tells this attempt from all others of all runs."""
        return f"{self.store.url} {self.key('')}"

    def key(self, name: str) -> str:
        return replica_key(self.run_id, self.rank, self.attempt, name)

    def outcome(self) -> Outcome | None:
        return find_outcome(self.store, self.run_id, self.rank, self.attempt)

    @property
    def world_size(self) -> int:
        record = find_run_record(self.store, self.run_id)
        return self.rank + 1 if record is None else record.world_size

    def write_off(self, who_says: str) -> Outcome:
        """Record that the replica vanished without an outcome; see `record_loss`."""
        return record_loss(self.store, self.run_id, self.rank, self.attempt, self.world_size, who_says)


def find_replica(handle: ReplicaHandle, backend: str) -> FoundReplica:
    """Find a replica's newest attempt: the handle's, or a later one that was launched or claimed since.

    Raises:
        UnknownHandleError: no such replica was ever launched by this backend.
    """
    metadata: Mapping[str, Any] = handle.metadata
    try:
        fields = Fields(metadata, f"the handle of rank {handle.rank}")
        url, run_id = fields.take("store_url", text()), fields.take("run_id", text(40, RUN_ID))
        launched, rank = fields.take("attempt", integer(0, MAX_ATTEMPTS)), integer(0, MAX_RANK)(handle.rank)
    except (CorruptObjectError, ValueError) as error:
        raise UnknownHandleError(
            f"No replica: the handle of rank {handle.rank} was not made by the {backend} backend: {error}"
        ) from None
    store = store_at(url)
    key = replica_key(run_id, rank, launched, "handle.json")
    if (url, key) not in _known and not exists(store, key):
        raise UnknownHandleError(f"No replica with run_id={run_id!r}, rank {rank} at {url}.")
    _known.add((url, key))
    newest = newest_attempt(store, run_id, rank, launched)
    for attempt in range(newest, launched, -1):
        if found := find_record(store, replica_key(run_id, rank, attempt, "handle.json"), parse_handle):
            launched, metadata = attempt, found.metadata
            break
    return FoundReplica(store, run_id, rank, newest, launched, metadata)


def read_handle(store: Store, run_id: str, rank: int, attempt: int, backend: str) -> ReplicaHandle | None:
    """Read the handle of an attempt; None when it left none.

    Where it was found says which replica it is of, and not what is written in it; the store may have moved, too.

    Raises:
        CorruptObjectError: it is no handle, or one of another backend.
    """
    key = replica_key(run_id, rank, attempt, "handle.json")
    handle = find_record(store, key, parse_handle)
    if handle is None:
        return None
    if handle.backend_name != backend:
        raise CorruptObjectError(
            f"{key!r} in {store.url} is a handle of backend {handle.backend_name!r}; the run is on {backend!r}.",
            key=key,
            url=store.url,
        )
    place = {"store_url": store.url, "run_id": run_id, "attempt": attempt}
    here = place if "store_url" in handle.metadata else {}
    return replace(handle, rank=rank, metadata={**handle.metadata, **here})


_known: set[tuple[str, str]] = set()
"""Handles that were seen in their store, which is asked for each but once: they are never taken back."""


def collect_rows(
    poll: Callable[[ReplicaHandle], ReplicaStatus],
    backend: str,
    handles: Sequence[ReplicaHandle],
    timeout: float | None,
) -> list[dict[str, Any]]:
    """Wait for the replicas' outcomes, at most `timeout` seconds; return what `collect` does, in the order given."""
    wait_until_terminal(poll, handles, timeout)
    rows = []
    for handle in handles:
        status = poll(handle)
        found = find_replica(handle, backend)
        rows.append((found.outcome() or Outcome(found.rank, found.attempt, status)).to_row())
    return rows
