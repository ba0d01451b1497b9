"""Deleting all that a run left, on this machine and in its store."""

from __future__ import annotations

from executors.errors import StoreError
from executors.run_index import folder_of_run, forget
from executors.store import Store


def remove_run(store: Store, run_id: str) -> None:
    """Delete a run that is over.

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
