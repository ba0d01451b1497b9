"""`<run>/removing.json`: the record that the removal of a run writes first and deletes last.

A removal that was killed leaves this record. So later commands know that the run is incomplete, and another
`replicas rm` can finish the removal.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict, dataclass

from executors.errors import RunBeingRemovedError
from executors.process import IDENTITY, has_ended, identify_process, this_process
from executors.store import Store
from executors.store.record_names import removal_key, run_exists
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

WRITTEN = ("decisions/", "added/", "handles/", "replicas/", "launched.json")
"""The keys that a resume or an addition may write before its replicas have started. The last one is written only if the
store is the state directory."""


@dataclass(frozen=True, kw_only=True)
class Removal(Record):
    """The record of a removal that has begun."""

    nonce: str = checked(text(100))
    by: str = checked(text(1000))
    """The host and the pid of the process that began the removal, for messages."""
    at: float = checked(number(LONG_AGO, FAR_AHEAD))
    """The Unix time at which the removal began, by the clock of its process."""
    process: str | None = checked(nullable(text(600, IDENTITY)), None)
    """The process that began the removal, as `identify_process` names it."""
    is_deleting: bool = checked(flag, False)
    """True if the removal has found that the run has ended. Before that, nothing is deleted."""

    @classmethod
    def new(cls) -> Removal:
        """Return the record of a removal that this process begins now."""
        return cls(nonce=os.urandom(8).hex(), by=this_process(), at=time.time(), process=identify_process())

    @property
    def has_stopped(self) -> bool:
        """True if the process that began the removal is known to have ended."""
        return self.process is not None and has_ended(self.process)

    @property
    def is_void(self) -> bool:
        """True if the process of the removal ended before it deleted anything."""
        return self.has_stopped and not self.is_deleting

    def describe(self, run_id: str, reference: str) -> str:
        """Return two sentences for the user: the state of the removal, and the command that finishes it.

        Args:
            run_id: the run.
            reference: the name of the run for a command on this machine, quoted for a shell.
        """
        began = f"Run {run_id!r} is being removed by {self.by}."
        if self.has_stopped:
            began = f"The removal of run {run_id!r} by {self.by} was interrupted."
        return f"{began} To finish the removal: replicas rm {reference}"


def find_removal(store: Store, run_id: str) -> Removal | None:
    """Return the removal of a run that has begun. None: there is none, or its process ended before it deleted anything.

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
    """Write the record of a removal, and replace an earlier one.

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

    A caller that starts replicas checks twice: before it writes anything, and after it has written a record that a
    removal looks for. A removal writes its own record before it checks the run. So at least one of the two processes
    sees the other's record.

    Args:
        store: the store of the run.
        run_id: the run.
        reference: the name of the run for a command on this machine, quoted for a shell.

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
    """Delete the objects that this process wrote for a run after its removal had listed the run.

    Args:
        store: the store of the run.
        run_id: the run.

    Returns: True if there was anything to delete.

    Raises:
        StoreError: the store does not answer.
    """
    # The keys are listed before run.json is looked for. A new run with the same id writes its run.json first, so none
    # of these keys can belong to such a run.
    keys = [entry.key for entry in store.list(f"{run_id}/") if entry.key != removal_key(run_id)]
    written = tuple(f"{run_id}/{name}" for name in WRITTEN)
    # If other keys are left, no removal has deleted the run, and its run.json was lost in another way.
    if not all(key.startswith(written) for key in keys) or run_exists(store, run_id):
        return False
    for key in keys:
        store.delete(key)
    return bool(keys)
