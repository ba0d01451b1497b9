"""Deleting all that a run left, on this machine and in its store."""

from __future__ import annotations

import contextlib

from executors.errors import BackendError, ReplicasError, StoreError
from executors.native import LeavesFiles
from executors.run.run_index import folder_of_run, forget
from executors.run.traces import Traces
from executors.store import Store


def remove_files(run: Traces) -> None:
    """Delete what replicas left by the executors of their run, where these are to be had here."""
    with contextlib.suppress(ReplicasError):  # what cannot be read can be removed
        run.fleet.read_added()
        for site in run.fleet.sites:
            with contextlib.suppress(BackendError):
                if isinstance(site.executor, LeavesFiles):
                    site.executor.remove_files(run.store.url, run.run_id, run.record.created_at)


def remove_run(store: Store, run_id: str) -> None:
    """Delete a run that is over, where its records are and in the directory of runs.

    Raises:
        StoreError: something is left, or the store does not answer.
    """
    folder = folder_of_run(run_id, store.url)
    left = []
    for entry in list(store.list(f"{run_id}/")):
        try:
            store.delete(entry.key)
        except ValueError:  # not a key that a store takes: somebody put it there by other means
            left.append(entry.key)
    forget(folder)
    if left:
        raise StoreError(
            f"Run {run_id!r} is removed, but for {len(left)} objects under names that no run has, such as "
            f"{left[0][:200]!r}. Delete these with the tools of the rendezvous.",
            url=store.url,
        )
