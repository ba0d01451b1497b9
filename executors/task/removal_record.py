"""`<run>/removing.json`: the record with which the removal of a run begins, and which is deleted last.

A removal that was killed leaves this record. Then every later command knows that the rest of the run means nothing, and
another `replicas rm` can finish.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass

from executors.errors import RunBeingRemovedError
from executors.process import IDENTITY, has_ended, identify_process, this_process
from executors.store import Store
from executors.store.record_names import run_exists
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    Record,
    checked,
    find_record,
    flag,
    nullable,
    number,
    text,
    to_bytes,
)

REMOVAL = "removing.json"
WRITTEN = ("decisions/", "added/", "handles/", "replicas/", "launched.json")
"""What a resume or an addition writes before its replicas have started; the last one where the store is the state
directory."""


@dataclass(frozen=True, kw_only=True)
class Removal(Record):
    """A removal that has begun."""

    nonce: str = checked(text(100))
    by: str = checked(text(1000))
    """The process that began the removal, for people."""
    at: float = checked(number(LONG_AGO, FAR_AHEAD))
    """When it began, by that process's clock."""
    process: str | None = checked(nullable(text(600, IDENTITY)), None)
    """The same process, as `identify_process` names it."""
    is_deleting: bool = checked(flag, False)
    """Whether the run was found to have ended. Nothing is deleted before, and the run is whole."""

    @classmethod
    def new(cls) -> Removal:
        """Return the record of a removal that this process begins now."""
        return cls(nonce=os.urandom(8).hex(), by=this_process(), at=time.time(), process=identify_process())

    @property
    def has_stopped(self) -> bool:
        """Whether the process that began the removal is known to have ended."""
        return self.process is not None and has_ended(self.process)

    @property
    def is_void(self) -> bool:
        """Whether the removal came to nothing: its process has ended before it deleted anything."""
        return self.has_stopped and not self.is_deleting

    def describe(self, run_id: str, reference: str) -> str:
        """Return two sentences for people: the state of the removal, and what finishes it.

        Args:
            run_id: the run.
            reference: what finds the run from this machine, for a shell.
        """
        began = f"Run {run_id!r} is being removed by {self.by}."
        if self.has_stopped:
            began = f"The removal of run {run_id!r} by {self.by} was interrupted."
        return f"{began} To finish the removal: replicas rm {reference}"


def removal_key(run_id: str) -> str:
    """Return the key of the record: `<run>/removing.json`."""
    return f"{run_id}/{REMOVAL}"


def find_removal(store: Store, run_id: str) -> Removal | None:
    """Return the removal of a run that has begun; None if there is none, or it came to nothing.

    Args:
        store: the store of the run.
        run_id: the run.

    Raises:
        CorruptObjectError: the record cannot be read.
        StoreError: the store does not answer.
    """
    found = find_record(store, removal_key(run_id), Removal.parse)
    return None if found is None or found.is_void else found


def write_removal(store: Store, run_id: str, removal: Removal) -> None:
    """Write the record of a removal, over one that is there.

    Args:
        store: the store of the run.
        run_id: the run.
        removal: the record.

    Raises:
        UnwritableStoreError: nothing can be written there, as on a full disk.
        StoreError: the store does not answer.
    """
    store.put(removal_key(run_id), to_bytes(asdict(removal)))


def check_not_removed(store: Store, run_id: str, reference: str) -> None:
    """Check that a run exists and is not being removed.

    A caller that starts replicas checks twice: before it writes anything, and after it has written what a removal looks
    for. A removal writes its record before it looks. So at least one of the two sees the other.

    Args:
        store: the store of the run.
        run_id: the run.
        reference: what finds the run from this machine, for a shell.

    Raises:
        RunBeingRemovedError: a removal has begun, or has deleted the run.
        CorruptObjectError: the record of a removal cannot be read.
        StoreError: the store does not answer.
    """
    if (removal := find_removal(store, run_id)) is not None:
        raise RunBeingRemovedError(removal.describe(run_id, reference))
    if not run_exists(store, run_id):
        raise RunBeingRemovedError(f"Run {run_id!r} was removed from {store.url} a moment ago.")


def sweep_behind_removal(store: Store, run_id: str) -> bool:
    """Delete what this process wrote for a run whose removal did not see it any more; return whether there was any.

    Args:
        store: the store of the run.
        run_id: the run.

    Raises:
        StoreError: the store does not answer.
    """
    # In this order: a new run of the same id writes its run.json first, so none of the keys can be of that run.
    keys = [entry.key for entry in store.list(f"{run_id}/") if entry.key != removal_key(run_id)]
    written = tuple(f"{run_id}/{name}" for name in WRITTEN)
    # Where more is left, no removal has deleted the run: its run.json was lost by other means.
    if not all(key.startswith(written) for key in keys) or run_exists(store, run_id):
        return False
    for key in keys:
        store.delete(key)
    return bool(keys)
