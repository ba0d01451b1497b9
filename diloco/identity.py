"""Who this process is in a run: given, taken from the replica it is, or the next rank that is free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco.errors import DiLoCoError
from diloco.keys import Keys
from diloco.membership import Identity, claim, process_nonce
from diloco.patience import PatientStore
from executors.errors import ReplicasError
from executors.replica import Replica, current_replica
from executors.store import Store, store_at
from executors.store.watch import Watch

JOIN = "join"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a DiLoCo meets others, and as whom; None: not known before it has claimed a rank."""

    replica: Replica | None
    store: Store
    run_id: str
    rank: int | None
    world_size: int

    def identify(self, store: PatientStore, keys: Keys, watch: Watch) -> Identity:
        """Return the claim that this process has already, or claim the next attempt, or the next rank."""
        replica = self.replica
        if replica is not None and (replica.run_id, replica.rank) == (self.run_id, self.rank):
            return Identity(replica.rank, self.world_size, replica.attempt, replica.nonce)
        nonce = process_nonce(store.store.url, self.run_id, self.rank)
        return claim(store, keys, self.rank, self.world_size, nonce, lambda: watch.wait(0.01, ()))


def find_place(
    store: Store | str | None, run_id: str | None, rank: int | Literal["join"] | None, world_size: int | None
) -> Place:
    """Take what was not given from the replica that this process is.

    Raises: DiLoCoError: it is none.
    """
    if isinstance(rank, str) and rank != JOIN:
        raise ValueError(f'rank must be an integer or "join", got rank={rank!r}.')
    try:
        replica = current_replica()
    except ReplicasError as error:
        if store is None or run_id is None or rank is None or world_size is None:
            raise DiLoCoError(
                f"DiLoCo needs to know where and who it is: pass store, run_id, rank and world_size. ({error})"
            ) from error
        opened = store_at(store) if isinstance(store, str) else store
        return Place(None, opened, run_id, None if isinstance(rank, str) else rank, world_size)
    opened = store_at(store) if isinstance(store, str) else replica.store if store is None else store
    return Place(
        replica,
        opened,
        replica.run_id if run_id is None else run_id,
        None if isinstance(rank, str) else replica.rank if rank is None else rank,
        replica.world_size if world_size is None else world_size,
    )
