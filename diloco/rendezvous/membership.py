"""Who takes part: claims, who is expected in a round, who is gone, and whether this replica may go on.

Nothing here depends on clocks, heartbeats or modification times: the members of the newest seal are expected, and a
replica is gone when it said bye or left an outcome.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Literal, Self

from diloco.errors import AbortedError, DiLoCoError, FencedError
from diloco.rendezvous.envelope import BadRecordError, Proof, check_key, check_signed, frame, reading, typed, unframe
from diloco.rendezvous.frames import Contribution, Seal
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.retrying_store import RetryingStore
from executors.attempt.signed_record import is_proven, proof_of_record
from executors.errors import CorruptObjectError, ReplicasError, RunNotFoundError
from executors.patience import START, retry
from executors.replica import Replica, current_replica, find_replica, run_key
from executors.store import MemoryStore, Store, store_at
from executors.store.added_ranks import MAX_ADDED, AddedRanks
from executors.store.record_names import run_record_key
from executors.store.records import MAX_RECORD_BYTES, Fields, find_record, nullable, text
from executors.store.run_key import KEY_ID, key_id

log = logging.getLogger(__name__)

JOIN = "join"
MAX_HOST = 255
MISREAD = 3
"""So many readings that are no record mean that there is none."""
FENCE_S = 10.0
"""Seconds between two looks of a replica out of phase for a newer attempt of its rank."""
DELETED_LOOKS, DELETED_LOOK_S = 3, 10.0
"""A run is held to be deleted when what is never deleted was missing in three looks, ten seconds apart."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One process as a replica of a run."""

    rank: int
    world_size: int
    attempt: int
    nonce: str


def claim(
    store: RetryingStore, keys: Keys, rank: int | None, world_size: int, nonce: str, pause: Callable[[], None]
) -> Identity:
    """Take the next free attempt of a rank. Returns when the stored claim is this process's.

    One that exists and cannot be read is somebody else's.

    Args:
        rank: None: a joiner, which takes the next free rank beyond the first world.
    """
    joins = rank is None
    rank, attempt = world_size if rank is None else rank, 0
    misread: dict[str, int] = {}
    added = KnownAddedRanks(store, keys)
    if joins:
        added.look()
    while True:
        if rank in added.ranks:  # known to a joiner alone
            rank += 1
            continue
        key, plain = keys.claim(rank, attempt), keys.plain_claim(rank, attempt)
        owner = _owner(store.peek(key), plain, keys.run_key)
        if owner is None:
            fields = {"nonce": nonce}
            if keys.run_key is not None:
                fields["proof"] = proof_of_record(keys.run_key, plain, fields)
            store.create(key, json.dumps(fields).encode())
            claimed = store.peek(key)
            owner = _owner(claimed, plain, keys.run_key)
            if plain != key and owner == nonce:  # for people, and for processes without the key
                store.create(plain, json.dumps(fields).encode())
            misread[key] = misread.get(key, 0) + (owner is None and claimed is not None)
            if misread[key] == MISREAD:
                log.warning("%s in %s is no claim: its owner is not known, and it is taken.", key, store.store.url)
                owner = ""
        if owner is None:
            pause()
        elif owner == nonce:
            if joins:
                added.look()  # behind the claim: who adds ranks looks for claims behind the record
            if rank in added.ranks:
                continue
            return Identity(rank, world_size, attempt, nonce)
        elif joins:
            rank += 1
        else:
            attempt += 1


class KnownAddedRanks:
    """The ranks that were added to a run after its launch, as far as one process has read of them."""

    def __init__(self, store: RetryingStore, keys: Keys) -> None:
        self.ranks: set[int] = set()
        self._store = store
        self._keys = keys
        self._n_read = self._n_misread = 0

    def look(self) -> None:
        """Read what is new; a record that cannot be read adds nothing."""
        while len(self.ranks) < MAX_ADDED and self._n_read < MAX_ADDED:
            key = self._keys.added(self._n_read)
            data = self._store.peek(key, size=MAX_RECORD_BYTES)
            if data is None:
                return
            try:
                self.ranks.update(AddedRanks.parse(data, key).ranks)
            except CorruptObjectError:
                self._n_misread += 1
                if self._n_misread < MISREAD:  # perhaps it was the reading
                    return
            self._n_read, self._n_misread = self._n_read + 1, 0


def _owner(claimed: memoryview | None, plain: str, run_key: bytes | None) -> str | None:
    """Return the nonce in a claim; None when there is no claim, or none that can be read or is proven just now."""
    if run_key is not None and claimed is not None and not is_proven(claimed, plain, run_key):
        return None
    try:
        return None if claimed is None else str(json.loads(bytes(claimed))["nonce"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


_claimed: dict[tuple[str, str, int | None, int], str] = {}


def process_nonce(url: str, run_id: str, rank: int | None) -> str:
    """Return this process's nonce for a rank of a run. Several DiLoCos share one nonce and one claim.

    A forked process is another process and has other nonces.
    """
    return _claimed.setdefault((url, run_id, rank, os.getpid()), secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """The content of `process/<rank>/<attempt>`: the process of an attempt that opened a DiLoCo of a name."""

    nonce: str
    pid: int
    host: str

    def data(self, key: str, proof: Proof) -> bytes:
        """Return the record as it is stored under a key."""
        return frame({"nonce": self.nonce, "pid": self.pid, "host": self.host[:MAX_HOST]}, key, proof)

    @classmethod
    def parse(cls, data: memoryview, key: str, proof: Proof) -> Self:
        """Return the record that a replica has stored under a key.

        Raises:
            BadRecordError: these bytes are not such a record.
        """
        fields, _, _ = unframe(data, key, proof)
        with reading("record of a process"):
            nonce, pid, host = typed(str, fields["nonce"]), typed(int, fields["pid"]), typed(str, fields["host"])
            if len(nonce) > MAX_HOST or len(host) > MAX_HOST:
                raise ValueError(f"more than {MAX_HOST} characters")
            return cls(nonce, pid, host)


def claim_process(store: RetryingStore, keys: Keys, me: Identity, proof: Proof, pause: Callable[[], None]) -> None:
    """Claim this attempt's part in a rendezvous for this process, which may have claimed it before.

    The processes of a replica share its rank and its nonce. Two of them would be one replica to all others, and the
    work of one would silently be lost.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        me: the replica that this process takes itself for.
        proof: what proves records: a forged one must not keep the replica out of a signed run.
        pause: waits before the store is asked again.

    Raises:
        DiLoCoError: another process of this attempt has claimed it.
    """
    key, mine = keys.process(me.rank, me.attempt), process_nonce(store.store.url, keys.run_id, me.rank)
    while True:
        store.create(key, ProcessRecord(mine, os.getpid(), socket.gethostname()).data(key, proof))
        data = store.peek(key, size=MAX_RECORD_BYTES)
        if data is None:
            pause()
            continue
        try:
            opener = ProcessRecord.parse(data, key, proof)
        except BadRecordError as error:
            store.record_misread(key, data)
            if store.count_misreads(key) >= MISREAD:  # better several processes unseen than a replica kept out
                log.warning("Whether other processes of rank %s take part is not known: %s (%s)", me.rank, error, key)
                return
            pause()
            continue
        if opener.nonce == mine:
            return
        raise DiLoCoError(
            f"Rank {me.rank} takes part by another process already: {opener.pid} on {opener.host!r}, and this is "
            f"{os.getpid()} on {socket.gethostname()!r}. DiLoCo takes one process per replica so far, so launch more "
            "replicas instead of several processes in each."
        )


class Membership:
    """Knows who is expected, who is gone, and which of those that the newest seal names are alive.

    A *named process* is a member of the newest adopted seal; before the first seal, a first attempt of the launch's
    world. Expected are ranks, whichever of their attempts sends something.
    """

    def __init__(
        self,
        store: RetryingStore,
        keys: Keys,
        me: Identity,
        clock: Callable[[], float] = monotonic,
        abort_check_s: float = 1.0,
    ) -> None:
        self._store = store
        self._keys = keys
        self._me = me
        self._clock = clock
        self._abort_check_s = abort_check_s
        self._gone: set[tuple[int, int]] = set()
        self._dead: set[tuple[int, int]] = set()
        self.frontier = me.world_size
        """The first rank beyond the first world that nobody has claimed and nobody was given, as far as was looked."""
        self._added = KnownAddedRanks(store, keys)
        self._missing: set[int] = set()
        """The ranks below it that were added, and have not been claimed."""
        self.seal: Seal | None = None
        """The newest seal that was adopted."""
        self.read_seal: str | None = None
        """The key of the first seal that was read: where a run was deleted, later ones may be there again."""
        self.missing_looks = 0
        """How often in a row nothing was found of what is never deleted."""
        self.fence_checked_s = self._abort_checked_s = self._looked_s = clock()

    @property
    def expected(self) -> Mapping[int, int]:
        """The attempts of the named processes, by rank."""
        if self.seal is None:
            return dict.fromkeys(range(self._me.world_size), 0)
        return {rank: member.attempt for rank, member in self.seal.replicas.items()}

    def names(self, rank: int, attempt: int, nonce: str) -> bool:
        """Return whether this is a named process."""
        if self.seal is None:
            return rank < self._me.world_size and attempt == 0
        member = self.seal.replicas.get(rank)
        return member is not None and member.nonce == nonce

    @property
    def names_me(self) -> bool:
        """True if this process is a named process."""
        return self.names(self._me.rank, self._me.attempt, self._me.nonce)

    @property
    def is_first_member(self) -> bool:
        """True if this is the lowest rank that the newest seal names: one replica does what every replica could do."""
        return self.seal is not None and min(self.seal.replicas) == self._me.rank

    @property
    def is_alone(self) -> bool:
        """True if one replica was launched, and the newest seal names no other rank."""
        return self._me.world_size == 1 and (self.seal is None or self.seal.replicas.keys() <= {self._me.rank})

    @property
    def claimed(self) -> set[int]:
        """The ranks that may send something: of the first world, and beyond it those that were claimed."""
        return {*range(self.frontier)} - self._missing

    def look_for_joiners(self) -> None:
        """Find out which ranks beyond the first world were claimed; they are dense, but for those that were added."""
        self._added.look()
        self._missing = {rank for rank in self._missing if not self._is_claimed(rank, 0)}
        while (is_claimed := self._is_claimed(self.frontier, 0)) or self.frontier in self._added.ranks:
            if not is_claimed:
                self._missing.add(self.frontier)
            self.frontier += 1

    def someone_lives(self) -> bool:
        """Return whether a named process of another rank lives, as far as can be seen."""
        return any(self.lives(rank) for rank in self.expected if rank != self._me.rank)

    def is_behind(self) -> bool:
        """Return True if this replica is out of phase: the newest seal names other live processes, and not this one.

        Raises:
            FencedError: a newer attempt of this rank has begun, which is looked for now and then.
        """
        if self._clock() - self.fence_checked_s >= FENCE_S:
            self.check_fence()
        return not self.names_me and self.someone_lives()

    def lives(self, rank: int) -> bool:
        """Return whether the named process of a rank has neither ended nor been replaced by a newer attempt."""
        named = (rank, self.expected[rank])
        if named in self._dead:
            return False
        if self._has_left(*named) or self._is_claimed(rank, named[1] + 1):
            self._dead.add(named)
            return False
        return True

    def still_expected(self, good: Mapping[int, Contribution]) -> set[int]:
        """Return the ranks to wait for.

        Those of the newest seal that are not gone; when all of them are gone, as in a run that was resumed as a whole,
        the ranks whose newest attempts have claimed and not ended.

        Args:
            good: the contributions found, by rank.
        """
        expected = self.expected
        if expected.keys() <= good.keys():
            return set(expected)
        named = {rank for rank, head in good.items() if self.names(rank, head.attempt, head.nonce)}
        here = {rank for rank in expected if rank in named or not self.is_gone(rank)}
        return here or {rank for rank in expected if self._newer_lives(rank)}

    def is_gone(self, rank: int, attempt: int | None = None) -> bool:
        """Return whether an attempt of this rank has said bye or left an outcome.

        Args:
            attempt: or a later one; None: the named process's.
        """
        attempt = self.expected.get(rank, 0) if attempt is None else attempt
        if (rank, attempt) in self._gone:
            return True
        newest = attempt
        # An outcome without a claim is of an attempt that never took part.
        while not (self._has_left(rank, newest) and self._is_claimed(rank, newest)):
            newest += 1
            if not self._is_claimed(rank, newest):
                return False
        self._gone.add((rank, attempt))
        return True

    def _newer_lives(self, rank: int) -> bool:
        """Return whether a newer attempt than the named one has not left; the newest of them is the rank."""
        named = newest = self.expected[rank]
        while self._is_claimed(rank, newest + 1):
            newest += 1
        return newest > named and not self._has_left(rank, newest)

    def _has_left(self, rank: int, attempt: int) -> bool:
        outcome, bye = self._keys.outcome(rank, attempt), self._keys.bye(rank, attempt)
        return self._store.peek(outcome, size=1) is not None or self._store.peek(bye) is not None

    def _is_claimed(self, rank: int, attempt: int) -> bool:
        return self._store.peek(self._keys.claim(rank, attempt), size=0) is not None

    def check_fence(self) -> None:
        """Raise FencedError when a newer attempt of this rank has begun."""
        self.fence_checked_s = self._clock()
        self.check_run()
        newer = self._me.attempt + 1
        if self._is_claimed(self._me.rank, newer):
            raise FencedError(
                f"Rank {self._me.rank} of run {self._keys.run_id!r}: attempt {newer} has begun, and this is attempt "
                f"{self._me.attempt}. The newest one is the rank; this one ends."
            )

    def check_abort(self) -> None:
        """Raise AbortedError when a peer has aborted the run; asks at most every `abort_check_s`."""
        self.check_run()
        if self._clock() - self._abort_checked_s < self._abort_check_s:
            return
        self._abort_checked_s = self._clock()
        data = self._store.peek(self._keys.abort())
        if data is not None:
            raise AbortedError.from_record(self._keys.run_id, bytes(data))

    def check_run(self) -> None:
        """Raise RunNotFoundError when the run was deleted: nobody could end a replica that wrote on into its place.

        One stale answer, or a store that fails, ends nobody.
        """
        if self._clock() - self._looked_s < DELETED_LOOK_S:
            return
        self._looked_s = self._clock()
        kept = [self._keys.claim(self._me.rank, self._me.attempt), self._keys.snapshot(0)]
        kept += [] if self.read_seal is None else [self.read_seal]
        self.missing_looks = self.missing_looks + 1 if all(map(self._store.is_missing, kept)) else 0
        if self.is_deleted:
            raise RunNotFoundError(
                f"Run {self._keys.run_id!r} was deleted from {self._store.store.url}: neither the claim of rank "
                f"{self._me.rank} ({kept[0]}) nor {kept[-1]} is there any more. This replica ends."
            )

    @property
    def is_deleted(self) -> bool:
        return self.missing_looks >= DELETED_LOOKS


@dataclass(frozen=True, slots=True)
class RunLocation:
    """Where a DiLoCo meets others, and under which rank; None: not known before it has claimed one."""

    replica: Replica | None
    store: Store
    run_id: str
    rank: int | None
    world_size: int
    is_alone: bool = False
    """Whether this process is no replica at all, so that nobody will ever read what it stores."""

    @property
    def is_of_replica(self) -> bool:
        """Whether this is the run that this process is a replica of."""
        return self.replica is not None and self.replica.run_id == self.run_id and not self.is_alone

    @property
    def begins_warm(self) -> bool:
        """Whether the run begins with the model of another one."""
        return self.is_of_replica and self.replica is not None and self.replica.begins_warm

    @property
    def origin(self) -> str | None:
        """The run whose newest whole snapshot this one begins from."""
        replica = self.replica
        return replica.continues if replica is not None and replica.run_id == self.run_id else None

    def key_of_run(self, given: bytes | None) -> bytes | None:
        """Return the key that the run is signed with: the one given, or handed over by the launch; None: it is not.

        Raises:
            TypeError, ValueError: it is not a key.
            ContributionError: the run's record names another key, or there is none here.
        """
        check_key(given)
        is_of_run = self.replica is None or self.replica.run_id == self.run_id
        key = run_key() if given is None and is_of_run and not self.is_alone else given
        record = self.replica.record if self.replica is not None and is_of_run else None
        if record is not None and record.key_id is not None:
            check_signed(record.key_id, None if key is None else key_id(key))
        return key

    def key_of_outcomes(self, given: bytes | None) -> bytes | None:
        """Return the key that the outcomes of the run's replicas are signed with; None: they are not signed.

        That is the key of the launch. A key that a script gives to DiLoCo alone signs no outcomes, but a process that
        joins a signed run may get the launch's key in this way.

        Args:
            given: the key that DiLoCo was created with.
        """
        is_of_run = self.replica is None or self.replica.run_id == self.run_id
        if is_of_run and not self.is_alone and (key := run_key()) is not None:
            return key
        if given is None or self.is_alone:
            return None
        key_of_run = retry(lambda: find_record(self.store, run_record_key(self.run_id), _parse_key_id), START)
        return given if key_of_run == key_id(given) else None

    def identify(self, store: RetryingStore, keys: Keys, proof: Proof) -> Identity:
        """Return the claim that this process has already, or claim the next attempt, or the next rank.

        Args:
            store: the store of the run.
            keys: the keys of the rendezvous.
            proof: what proves records of the run.

        Raises:
            DiLoCoError: the replica has left under this name, so no other replica waits for it. Or another process of
                the replica takes part.
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
                f"The DiLoCo named {keys.name!r} of this replica has left, and this one would go on with its model, at "
                "its step. Give each training another name: DiLoCo(model, name=…)."
            )
        if is_own:  # else the claim is this process's own already
            claim_process(store, keys, me, proof, lambda: sleep(0.01))
        return me


def find_location(
    store: Store | str | None, run_id: str | None, rank: int | Literal["join"] | None, world_size: int | None
) -> RunLocation:
    """Take what was not given from the replica that this process is.

    A process that is no replica, and is told nothing, is alone: world size 1, in memory.

    Raises: DiLoCoError: this process is not a replica, and too little was given.
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
            current_replica()  # says that it is alone
            return RunLocation(None, MemoryStore("alone"), "alone", 0, 1, is_alone=True)
    given = {"store": store, "run_id": run_id, "rank": rank, "world_size": world_size}
    missing = [name for name, value in given.items() if value is None]
    if replica is None and missing:
        raise DiLoCoError(
            "DiLoCo needs to know its run and its rank: pass store, run_id, rank and world_size. "
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
    """Return the id of the key that a run is signed with, as its `run.json` says; None: it is not signed."""
    return Fields(data, key, url).take("key_id", nullable(text(8, KEY_ID)), None)
