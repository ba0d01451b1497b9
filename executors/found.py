"""From a handle to its replica's records in the store: where `poll`, `cancel` and `collect` of our executors begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors.errors import UnknownHandleError
from executors.outcome import Outcome, find_outcome, newest_attempt, record_loss
from executors.protocol import ReplicaHandle, ReplicaStatus
from executors.records import exists, find_json
from executors.replica import replica_key
from executors.store import Store, store_at
from executors.waiting import wait_until_terminal


@dataclass(frozen=True)
class FoundReplica:
    """The newest attempt of the replica that a handle names."""

    store: Store
    run_id: str
    rank: int
    attempt: int
    metadata: Mapping[str, Any]
    """Of the newest handle, which names who runs it. Its `attempt` is an earlier one where a copy was started since."""

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
        record = find_json(self.store, f"{self.run_id}/run.json") or {}
        return int(record.get("world_size", self.rank + 1))

    def write_off(self, who_says: str) -> Outcome:
        """Record that the replica vanished without an outcome; see `record_loss`."""
        return record_loss(self.store, self.run_id, self.rank, self.attempt, self.world_size, who_says)


def find_replica(handle: ReplicaHandle, backend: str) -> FoundReplica:
    """Find a replica's newest attempt: the handle's, or a later one that was launched or claimed since.

    Raises:
        UnknownHandleError: no such replica was ever launched by this backend.
    """
    metadata = handle.metadata
    try:
        url, run_id, launched = (metadata[name] for name in ("store_url", "run_id", "attempt"))
    except KeyError as error:
        raise UnknownHandleError(
            f"No replica: the handle of rank {handle.rank} was not made by the {backend} backend; it has no {error}."
        ) from None
    store = store_at(url)
    key = replica_key(run_id, handle.rank, launched, "handle.json")
    if (url, key) not in _known and not exists(store, key):
        raise UnknownHandleError(f"No replica with run_id={run_id!r}, rank {handle.rank} at {url}.")
    _known.add((url, key))
    newest = newest_attempt(store, run_id, handle.rank, launched)
    for attempt in range(newest, launched, -1):
        if record := find_json(store, replica_key(run_id, handle.rank, attempt, "handle.json")):
            metadata = record["metadata"]
            break
    return FoundReplica(store, run_id, handle.rank, newest, metadata)


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
