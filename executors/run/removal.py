"""Deleting all that a run left, on this machine and in its store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from executors.errors import BackendError, ReplicasError, StoreError
from executors.native import LeavesFiles, MayBeQueued
from executors.run.run_index import folder_of_run, forget
from executors.run.traces import Traces
from executors.store import Store
from executors.store.parallel import at_store

ENDS = ("replicas", "decisions", "added", "handles")  # what tells whether a run is over
MANY = 4096  # objects whose deletion is begun together


def remove_files(run: Traces) -> None:
    """Delete what replicas left by the executors of their run, where these are to be had here."""
    with contextlib.suppress(ReplicasError):  # what cannot be read can be removed
        run.fleet.read_added()
        for site in run.fleet.sites:
            with contextlib.suppress(BackendError):
                if isinstance(site.executor, LeavesFiles):
                    site.executor.remove_files(run.store.url, run.run_id, run.record.created_at)


def withdraw_jobs(run: Traces) -> int:
    """Delete the jobs of an ended run that a queue still holds, on all its backends; return how many.

    Args:
        run: the run.

    Raises:
        BackendError: a service refuses, or does not answer.
    """
    n = 0
    for site in run.fleet.sites:
        if isinstance(site.executor, MayBeQueued):
            n += site.executor.withdraw_jobs(run.store.url, run.run_id, run.record.created_at)
    return n


def remove_run(store: Store, run_id: str, tell: Callable[[str], None] = lambda words: None) -> None:
    """Delete a run that is over, where its records are and in the directory of runs.

    What says that it is over goes behind the rest, and the run's record last, so a removal that ends half-way can be
    begun again; where it was among the ends of replicas already, a cancel has to say first that these are over.

    Args:
        tell: gets a few words on how far it is.

    Raises:
        StoreError: something is left, or the store does not answer.
    """
    folder, record = folder_of_run(run_id, store.url), f"{run_id}/run.json"
    over = tuple(f"{run_id}/{name}/" for name in ENDS)
    stages: list[list[str]] = [[], [], []]
    for entry in store.list(f"{run_id}/"):
        stages[2 if entry.key == record else entry.key.startswith(over)].append(entry.key)
    left, n_done, n_all = list[str](), 0, sum(map(len, stages))

    def delete(key: str) -> str | None:
        try:
            store.delete(key)
        except ValueError:  # not a key that a store takes: somebody put it there by other means
            return key
        return None

    for keys in stages:
        for start in range(0, len(keys), MANY):
            tell(f"{n_done:,} of {n_all:,} objects")
            batch = keys[start : start + MANY]
            left += [key for key in at_store(store, delete, batch) if key is not None]
            n_done += len(batch)
    forget(folder)
    if left:
        raise StoreError(
            f"Run {run_id!r} is removed, but for {len(left)} objects under names that no run has, such as "
            f"{left[0][:200]!r}. Delete these with the tools of the rendezvous.",
            url=store.url,
        )
