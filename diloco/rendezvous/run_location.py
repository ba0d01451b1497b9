"""Finds the run, the store and the rank of a DiLoCo, from its arguments or from the replica that this process is."""

from __future__ import annotations

from dataclasses import dataclass
from time import sleep
from typing import Any, Literal

from diloco.errors import DiLoCoError
from diloco.rendezvous.claims import claim, claim_process, process_nonce
from diloco.rendezvous.envelope import Proof, check_run_key, check_signed
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity
from diloco.rendezvous.retrying_store import RetryingStore
from executors.errors import ReplicasError
from executors.patience import START, retry
from executors.replica import Replica, current_replica, find_replica, run_key
from executors.store import MemoryStore, Store, store_at
from executors.store.record_names import run_record_key
from executors.store.records import Fields, find_record, nullable, text
from executors.store.run_key import KEY_ID, key_id

JOIN = "join"


@dataclass(frozen=True, slots=True)
class RunLocation:
    """The run, the store and the rank of a DiLoCo, as its arguments or the replica of this process give them.

    Example:
        find_location(store=None, run_id=None, rank=None, world_size=None).run_id
    """

    replica: Replica | None
    """The replica that this process is. None: it was not launched as a replica."""
    store: Store
    run_id: str
    rank: int | None
    """None: the process joins the run, and claims a rank later."""
    world_size: int
    is_alone: bool = False
    """True if this process is not a replica, so that no other process will read the objects that it stores."""

    @property
    def is_of_replica(self) -> bool:
        """True if this process is a replica of the run."""
        return self.replica is not None and self.replica.run_id == self.run_id and not self.is_alone

    @property
    def begins_warm(self) -> bool:
        """True if the run begins with the model and the momentum of another run."""
        return self.is_of_replica and self.replica is not None and self.replica.begins_warm

    @property
    def origin(self) -> str | None:
        """The id of the run from whose newest complete snapshot this run begins. None: from no run."""
        replica = self.replica
        return replica.continues if replica is not None and replica.run_id == self.run_id else None

    def key_of_run(self, given: bytes | None) -> bytes | None:
        """Return the key of a signed run. None: the run is not signed.

        Args:
            given: the key that DiLoCo was created with. None: the key of the launch is used, if there is one.

        Raises:
            TypeError: `given` is neither None nor bytes.
            ValueError: `given` is too short.
            ContributionError: the run's record names another key, or this process has no key.
        """
        check_run_key(given)
        is_of_run = self.replica is None or self.replica.run_id == self.run_id
        key = run_key() if given is None and is_of_run and not self.is_alone else given
        record = self.replica.record if self.replica is not None and is_of_run else None
        if record is not None and record.key_id is not None:
            check_signed(record.key_id, None if key is None else key_id(key))
        return key

    def key_of_outcomes(self, given: bytes | None) -> bytes | None:
        """Return the key with which the outcomes of the run's replicas are signed. None: they are not signed.

        It is the key of the launch. A key that the script gives to DiLoCo signs no outcomes. But a process that joins a
        signed run may get the key of the launch in this way.

        Args:
            given: the key that DiLoCo was created with. None: no key was given.
        """
        is_of_run = self.replica is None or self.replica.run_id == self.run_id
        if is_of_run and not self.is_alone and (key := run_key()) is not None:
            return key
        if given is None or self.is_alone:
            return None
        key_of_run = retry(lambda: find_record(self.store, run_record_key(self.run_id), _parse_key_id), START)
        return given if key_of_run == key_id(given) else None

    def identify(self, store: RetryingStore, keys: Keys, proof: Proof) -> Identity:
        """Return the identity of this process. If it has no claim yet, claim the next attempt, or the next rank.

        Args:
            store: the store of the run.
            keys: the keys of the rendezvous.
            proof: signs and checks records.

        Raises:
            DiLoCoError: the DiLoCo of this name has left already, so no other replica waits for it. Or another process
                of the replica takes part.
        """
        replica = self.replica
        is_own = replica is not None and (replica.run_id, replica.rank) == (self.run_id, self.rank)
        if is_own and replica is not None:
            me = Identity(replica.rank, self.world_size, replica.attempt, replica.nonce)
        else:
            nonce = process_nonce(store.store.url, self.run_id, self.rank)
            me = claim(store, keys, self.rank, self.world_size, nonce, lambda: sleep(0.01))
        if store.exists(keys.bye(me.rank, me.attempt)):
            raise DiLoCoError(
                f"This replica has closed a DiLoCo named {keys.name!r} already, and a second one of this name would "
                "continue its training. Give each training its own name: DiLoCo(model, name=…)."
            )
        if is_own:  # otherwise this process already has the claim
            claim_process(store, keys, me, proof, lambda: sleep(0.01))
        return me


def find_location(
    store: Store | str | None, run_id: str | None, rank: int | Literal["join"] | None, world_size: int | None
) -> RunLocation:
    """Return the run, the store and the rank of a DiLoCo.

    Missing arguments come from the replica that this process is. A process that is not a replica, and gets no argument,
    is alone: its world size is 1, and its store is in memory.

    Args:
        store: the store or its URL. None: the store of this replica.
        run_id: the id of the run. None: the run of this replica.
        rank: the rank, or "join" for one more replica. None: the rank of this replica.
        world_size: the number of replicas in the first world. None: the number of replicas in this replica's launch.

    Raises:
        DiLoCoError: this process is not a replica, and an argument is missing.
        ValueError: `rank` is a text, but not "join".

    Example:
        find_location("file:///runs", "first-try", rank=0, world_size=4)
    """
    if isinstance(rank, str) and rank != JOIN:
        raise ValueError(f'rank must be an integer or "join", got rank={rank!r}.')
    problem = "This process is not a replica."
    try:
        replica = find_replica()
    except ReplicasError as error:
        replica, problem = None, str(error)
    else:
        if replica is None and {store, run_id, rank, world_size} == {None}:
            current_replica()  # this call prints that the process trains alone
            return RunLocation(None, MemoryStore("alone"), "alone", 0, 1, is_alone=True)
    given = {"store": store, "run_id": run_id, "rank": rank, "world_size": world_size}
    missing = [name for name, value in given.items() if value is None]
    if replica is None and missing:
        raise DiLoCoError(
            f"DiLoCo needs the arguments store, run_id, rank and world_size: "
            f"{' and '.join(missing)} {'are' if missing[1:] else 'is'} missing. {problem}"
        )
    if replica is not None:
        store = replica.store if store is None else store
        run_id = replica.run_id if run_id is None else run_id
        rank = replica.rank if rank is None else rank
        world_size = replica.world_size if world_size is None else world_size
    assert store is not None
    assert run_id is not None
    assert world_size is not None
    opened = store_at(store) if isinstance(store, str) else store
    return RunLocation(replica, opened, run_id, None if isinstance(rank, str) else rank, world_size)


def _parse_key_id(data: Any, key: str, url: str) -> str | None:
    """Return the id of the key of a signed run from its `run.json`. None: the run is not signed."""
    return Fields(data, key, url).take("key_id", nullable(text(8, KEY_ID)), None)
