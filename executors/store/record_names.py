"""The names of the records of a run and of its attempts, and functions that find out whether a run was deleted.

An attempt has typed methods for its records: see `executors.attempt.Attempt`. `shipping/bootstrap.py` and
`shipping/install_progress.py` repeat some names. They run before this package is installed, so they cannot import it.
"""

from __future__ import annotations

import contextlib

from executors.errors import StoreError
from executors.store.protocol import Store
from executors.store.records import exists, is_gone
from executors.store.url import directory_of, is_directory

RUN_RECORD = "run.json"
"""The record of a run. A run exists as long as this record does."""
INTENT = "intent.json"
"""The record that a process writes before it asks a service for the attempt. It names the process."""
HANDLE = "handle.json"
"""The values with which an executor finds the attempt again."""
CLAIM = "started.json"
"""The claim of the attempt's process: its nonce, its process number and its host."""
BOOT = "boot.json"
"""The progress of a container that installs packages before the attempt's process starts. It is overwritten."""
HEARTBEAT = "heartbeat.json"
"""The newest sign of life: its time, and the last numbers that the replica reported. It is overwritten."""
CANCEL = "cancel.json"
"""The marker that asks the attempt to end."""
OUTCOME = "outcome.json"
"""The end of the attempt: its status, and the result, or the reason and the traceback. For a replica of several
processes, `members` has the end of each, and `member` names the first that failed. `goes_on` is true if the process
stays for the next attempt."""
SERVICE_REASON = "service.json"
"""The reason that the service gave for the end, if the outcome has only a signal."""
REMOVAL = "removing.json"
"""The record that a removal of the run writes first and deletes last; see `executors.task.removal_record`."""
BEGINNINGS = (CLAIM, HANDLE, INTENT, OUTCOME)
"""The records that make an attempt the newest one of its rank: any of them is enough."""


def run_record_key(run_id: str) -> str:
    """Return the key of a run's record: `<run>/run.json`.

    Args:
        run_id: the run.

    Example:
        find_record(store, run_record_key("brave-otter-7f3a"), RunRecord.parse)
    """
    return f"{run_id}/{RUN_RECORD}"


def removal_key(run_id: str) -> str:
    """Return the key of the record of a removal: `<run>/removing.json`.

    Args:
        run_id: the run.

    Example:
        find_record(store, removal_key("brave-otter-7f3a"), Removal.parse)
    """
    return f"{run_id}/{REMOVAL}"


def run_exists(store: Store, run_id: str) -> bool:
    """Return True if a run has its record. This asks the store once.

    Args:
        store: the run's store.
        run_id: the run.

    Raises:
        StoreError: the store does not answer.

    Example:
        run_exists(store, "brave-otter-7f3a")
    """
    return exists(store, run_record_key(run_id))


def run_was_deleted(store: Store, run_id: str) -> bool:
    """Return True if the record of a run that existed is gone. It looks three times within two seconds.

    A single answer may be out of date, so several are needed. A store that fails gives False, because an outage must
    not end a replica. Use this function for a decision that ends something. For a write that must not create the run's
    folder again, `run_folder_was_deleted` is enough.

    Args:
        store: the run's store.
        run_id: the run.

    Example:
        run_was_deleted(store, "brave-otter-7f3a")
    """
    return is_gone(store, run_record_key(run_id))


def run_folder_was_deleted(store: Store, run_id: str) -> bool:
    """Return True if the folder of a run is gone from a directory, so that a write would create it again.

    A bucket gives False, because the question would be a request that costs money. A directory that cannot be read
    gives False as well. There, the first write raises the error.

    Args:
        store: the run's store.
        run_id: the run.

    Example:
        run_folder_was_deleted(store, "brave-otter-7f3a")
    """
    directory = directory_of(store.url)
    with contextlib.suppress(StoreError):
        return directory is not None and not is_directory(directory / run_id)
    return False
