"""Claims a rank for this process, and finds out which replicas are expected in a round and which have left.

The replicas that the newest seal names are expected. A replica has left if it has written its bye object or its
outcome. Nothing here depends on clocks of other machines, heartbeats or modification times.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any, Literal, Self

from diloco.errors import AbortedError, DiLoCoError, FencedError
from diloco.rendezvous.earlier_call import EarlierCall
from diloco.rendezvous.envelope import (
    BadRecordError,
    Proof,
    check_run_key,
    check_signed,
    frame,
    reading,
    typed,
    unframe,
)
from diloco.rendezvous.frames import Contribution, Seal
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.retrying_store import THREADS, Map, RetryingStore
from executors.attempt.outcome import MAX_OUTCOME_BYTES, parse_outcome
from executors.attempt.signed_record import is_proven, proof_of_record
from executors.errors import CorruptObjectError, ReplicasError, RunNotFoundError, StoreError
from executors.patience import START, retry
from executors.replica import Replica, current_replica, find_replica, run_key
from executors.replica.restartable import AWAITED_S
from executors.store import MemoryStore, Store, store_at
from executors.store.added_ranks import MAX_ADDED, AddedRanks
from executors.store.record_names import run_record_key
from executors.store.records import MAX_RECORD_BYTES, Fields, find_record, nullable, text
from executors.store.run_key import KEY_ID, key_id

log = logging.getLogger(__name__)

JOIN = "join"
MAX_HOST = 255
MISREAD = 3
"""The number of wrong readings after which a record counts as missing."""
FENCE_S = 10.0
"""Seconds after which a replica out of phase checks again whether a newer attempt of its rank exists."""
RETURNS_S = 2 * AWAITED_S
"""The longest time, in seconds, for which an ended attempt is expected to continue in its process.

The process writes a bye object after `AWAITED_S`. The rest is for its clean-up, or for its death before that.
"""
BYE_TRIES = 3
"""The number of tries to store a bye object. Without it, the other replicas wait for a few seconds longer."""
DELETED_LOOKS, DELETED_LOOK_S = 3, 10.0
"""A run counts as deleted if objects that a run always has are missing in three looks, ten seconds apart."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of one process as a replica of a run.

    Example:
        Identity(rank=0, world_size=4, attempt=0, nonce=secrets.token_hex(8))
    """

    rank: int
    world_size: int
    attempt: int
    nonce: str
    """A random text that distinguishes this process from all others, also from other attempts of its rank."""


def claim(
    store: RetryingStore, keys: Keys, rank: int | None, world_size: int, nonce: str, pause: Callable[[], None]
) -> Identity:
    """Claim the next free attempt of a rank, and return once the stored claim is from this process.

    A claim that exists and cannot be read counts as a claim of another process.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        rank: the rank. None: this process joins the run, and claims the next free rank beyond the first world.
        world_size: the number of replicas in the first world.
        nonce: the nonce of this process.
        pause: waits before the store is asked again.

    Example:
        me = claim(store, keys, rank=0, world_size=4, nonce="a1b2", pause=lambda: sleep(0.01))
    """
    joins = rank is None
    rank, attempt = world_size if rank is None else rank, 0
    misread: dict[str, int] = {}
    added = KnownAddedRanks(store, keys)
    if joins:
        added.look()
    while True:
        # only a joining process needs the added ranks, because it must not take a rank that the user has added
        if rank in added.ranks:
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
            if plain != key and owner == nonce:  # a copy for users and for processes without the key
                store.create(plain, json.dumps(fields).encode())
            misread[key] = misread.get(key, 0) + (owner is None and claimed is not None)
            if misread[key] == MISREAD:
                log.warning(
                    "%s in %s cannot be read as a claim. It counts as a claim of another process.", key, store.store.url
                )
                owner = ""
        if owner is None:
            pause()
        elif owner == nonce:
            if joins:
                # The command that adds ranks first writes its record and then looks for claims. This process first
                # claims and then looks for records. So at least one of the two sees the other.
                added.look()
            if rank in added.ranks:
                continue
            return Identity(rank, world_size, attempt, nonce)
        elif joins:
            rank += 1
        else:
            attempt += 1


class KnownAddedRanks:
    """The ranks that were added to a run after its launch, as far as this process has read their records.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
    """

    def __init__(self, store: RetryingStore, keys: Keys) -> None:
        self.ranks: set[int] = set()
        self._store = store
        self._keys = keys
        self._n_read = self._n_misread = 0

    def look(self) -> None:
        """Read the new records of added ranks. A record that cannot be read adds no rank."""
        while len(self.ranks) < MAX_ADDED and self._n_read < MAX_ADDED:
            key = self._keys.added(self._n_read)
            data = self._store.peek(key, size=MAX_RECORD_BYTES)
            if data is None:
                return
            try:
                self.ranks.update(AddedRanks.parse(data, key).ranks)
            except CorruptObjectError:
                self._n_misread += 1
                if self._n_misread < MISREAD:  # perhaps the record is intact and only the reading was wrong
                    return
            self._n_read, self._n_misread = self._n_read + 1, 0


def _owner(claimed: memoryview | None, plain: str, run_key: bytes | None) -> str | None:
    """Return the nonce in a claim. None: the claim is missing, or this reading of it failed or was not proven."""
    if run_key is not None and claimed is not None and not is_proven(claimed, plain, run_key):
        return None
    try:
        return None if claimed is None else str(json.loads(bytes(claimed))["nonce"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


_claimed: dict[tuple[str, str, int | None, int], str] = {}


def process_nonce(url: str, run_id: str, rank: int | None) -> str:
    """Return the nonce of this process for a rank of a run. All DiLoCos of a process share one nonce and one claim.

    A forked process has other nonces.

    Args:
        url: the URL of the store.
        run_id: the id of the run.
        rank: the rank. None: the process joins the run.
    """
    return _claimed.setdefault((url, run_id, rank, os.getpid()), secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """The content of `process/<rank>/<attempt>`: the one process of an attempt that takes part in a rendezvous.

    Example:
        ProcessRecord(nonce, os.getpid(), socket.gethostname()).data(key, proof)
    """

    nonce: str
    pid: int
    host: str

    def data(self, key: str, proof: Proof) -> bytes:
        """Return the record as bytes for the store.

        Args:
            key: the key of the record. A signature covers the key.
            proof: signs the record or adds a checksum.
        """
        return frame({"nonce": self.nonce, "pid": self.pid, "host": self.host[:MAX_HOST]}, key, proof)

    @classmethod
    def parse(cls, data: memoryview, key: str, proof: Proof) -> Self:
        """Read a record from bytes of the store.

        Args:
            data: the bytes.
            key: the key of the record.
            proof: checks the signature or the checksum.

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
    """Record that this process takes part in a rendezvous for its replica. Do nothing if the record exists from this
    process.

    The processes of one replica share its rank and its nonce. If two of them took part, the other replicas would treat
    them as one, and the work of one of them would be lost without a message.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        me: the identity of the replica.
        proof: signs and checks the record, so that a forged record does not keep the replica out of a signed run.
        pause: waits before the store is asked again.

    Raises:
        DiLoCoError: another process of this attempt takes part.
    """
    key, mine = keys.process(me.rank, me.attempt), process_nonce(store.store.url, keys.run_id, me.rank)
    while True:
        store.create(key, ProcessRecord(mine, os.getpid(), socket.gethostname()).data(key, proof))
        data = store.peek(key, size=MAX_RECORD_BYTES)
        if data is None:
            pause()
            continue
        try:
            claimant = ProcessRecord.parse(data, key, proof)
        except BadRecordError as error:
            store.record_misread(key, data)
            # The check protects against a mistake of the user. A damaged record must not end a replica.
            if store.count_misreads(key) >= MISREAD:
                log.warning(
                    "Rank %s cannot check that only one of its processes takes part: %s (%s)", me.rank, error, key
                )
                return
            pause()
            continue
        if claimant.nonce == mine:
            return
        where = "" if claimant.host == socket.gethostname() else f" on {claimant.host!r}"
        raise DiLoCoError(
            f"Another process of this replica (pid {claimant.pid}{where}) has the DiLoCo {keys.name!r} open. Several "
            "processes open one together in a process group, see DiLoCo's group=."
        )


def bye_writer(store: RetryingStore, keys: Keys, me: Identity) -> Callable[[], None]:
    """Return a function that records that an attempt sends no more work. It holds no model.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        me: the identity of the attempt.

    Example:
        replica.at_dismissal.append(bye_writer(store, keys, me))
    """

    def write() -> None:
        try:
            for _ in range(BYE_TRIES):
                # Without its claim the run was deleted, and a bye object would create its folder again.
                if not store.exists(keys.claim(me.rank, me.attempt)) or store.write(keys.bye(me.rank, me.attempt), b""):
                    return
        except StoreError:
            return  # the others stop waiting by themselves

    return write


# More than 20 methods: each is one question about the replicas of the run, and all answer from the same few objects.
class Membership:
    """Finds out which replicas are expected in the next round, which of them have left, and which ranks exist.

    A *named process* is a process that the newest applied seal names. Before the first seal, the named processes are
    the first attempts of the ranks of the first world. The ranks of named processes are *expected*: any attempt of such
    a rank may contribute.

    Args:
        store: the store of the run.
        keys: the keys of the rendezvous.
        me: the identity of this process.
        clock: returns seconds of a monotonic clock.
        abort_check_s: the shortest time, in seconds, between two looks for an abort.
        map: applies a function to several ranks, perhaps in several threads.

    Example:
        Membership(store, keys, me).is_behind()
    """

    def __init__(
        self,
        store: RetryingStore,
        keys: Keys,
        me: Identity,
        clock: Callable[[], float] = monotonic,
        abort_check_s: float = 1.0,
        map: Map = map,
    ) -> None:
        self._store = store
        self._map = map
        self._keys = keys
        self._me = me
        self._clock = clock
        self._abort_check_s = abort_check_s
        self._gone: set[tuple[int, int]] = set()
        self._dead: set[tuple[int, int]] = set()
        self.earlier: EarlierCall | None = None
        """The failed attempts of this rank in this process, in whose place this attempt continues. None: there are
        none."""
        self._staying_from_s: dict[tuple[int, int], float] = {}
        """By rank and attempt, the time at which an outcome was first seen whose process stays."""
        self.frontier = me.world_size
        """The first rank beyond the first world that is neither claimed nor added, as of the last look."""
        self._added = KnownAddedRanks(store, keys)
        self._missing: set[int] = set()
        """The ranks below `frontier` that were added and are not claimed yet."""
        self.seal: Seal | None = None
        """The newest seal that was applied."""
        self.read_seal: str | None = None
        """The key of the first seal that was read.

        If the run was deleted, replicas may have written later seals again, but not this one.
        """
        self.missing_looks = 0
        """The number of looks in a row at which the objects that a run always has were missing."""
        self.fence_checked_s = self._abort_checked_s = self._looked_s = clock()

    @property
    def expected(self) -> Mapping[int, int]:
        """The attempts of the named processes, by rank."""
        if self.seal is None:
            return dict.fromkeys(range(self._me.world_size), 0)
        return {rank: member.attempt for rank, member in self.seal.replicas.items()}

    def names(self, rank: int, attempt: int, nonce: str) -> bool:
        """Return True if a process is a named process.

        Args:
            rank: its rank.
            attempt: its attempt.
            nonce: its nonce.
        """
        if self.seal is None:
            return rank < self._me.world_size and attempt == 0
        member = self.seal.replicas.get(rank)
        return member is not None and member.nonce == nonce

    @property
    def names_me(self) -> bool:
        """True if this process is a named process, or continues in the place of one."""
        mine = () if self.earlier is None else self.earlier.identities
        return any(
            self.names(self._me.rank, attempt, nonce) for attempt, nonce in ((self._me.attempt, self._me.nonce), *mine)
        )

    @property
    def is_first_member(self) -> bool:
        """True if this rank is the lowest that the newest seal names. It does the work that one replica must do."""
        return self.seal is not None and min(self.seal.replicas) == self._me.rank

    @property
    def is_alone(self) -> bool:
        """True if one replica was launched, and the newest seal names no other rank."""
        return self._me.world_size == 1 and (self.seal is None or self.seal.replicas.keys() <= {self._me.rank})

    @property
    def claimed(self) -> set[int]:
        """The ranks that may contribute: all ranks of the first world, and the claimed ranks beyond it."""
        return {*range(self.frontier)} - self._missing

    def look_for_joiners(self) -> None:
        """Find out which ranks beyond the first world were claimed. Only added ranks leave gaps between them."""
        self._added.look()
        self._missing = {rank for rank in self._missing if not self._is_claimed(rank, 0)}
        while (is_claimed := self._is_claimed(self.frontier, 0)) or self.frontier in self._added.ranks:
            if not is_claimed:
                self._missing.add(self.frontier)
            self.frontier += 1

    def has_live_peer(self) -> bool:
        """Return True if a named process of another rank seems to be alive."""
        return self.any_of(self.lives, [rank for rank in self.expected if rank != self._me.rank])

    def is_behind(self) -> bool:
        """Return True if this replica is out of phase: the newest seal names other live processes, and not this one.

        Raises:
            FencedError: a newer attempt of this rank has begun. This is checked every `FENCE_S` seconds.
        """
        if self._clock() - self.fence_checked_s >= FENCE_S:
            self.check_fence()
        return not self.names_me and self.has_live_peer()

    def lives(self, rank: int) -> bool:
        """Return True if the named process of a rank has not left, and no newer attempt has replaced it.

        Args:
            rank: an expected rank.
        """
        named = (rank, self.expected[rank])
        if named in self._dead:
            return False
        if self._has_left(*named) or self._is_claimed(rank, named[1] + 1):
            self._dead.add(named)
            return False
        return True

    def runs(self, rank: int, attempt: int) -> bool:
        """Return True if an attempt has begun and not left, and no newer attempt has replaced it.

        Args:
            rank: its rank.
            attempt: its attempt.
        """
        if self._has_left(rank, attempt) or self._is_claimed(rank, attempt + 1):
            return False
        return self._is_claimed(rank, attempt)

    def misses_any(self, known: Mapping[int, Contribution], others: Collection[int] = ()) -> bool:
        """Return True if a contribution is missing whose sender is still expected: an expected rank that has not left.

        If all expected ranks have left, as in a run that was resumed as a whole, the ranks with a newer attempt that
        has not left are expected.

        The answer is True as soon as one such rank is found. In a usual round the first missing replica is only later
        than the others, so this costs a few requests, also among a thousand replicas.

        Args:
            known: the contributions that were found, by rank. A named process that has contributed has not left.
            others: further ranks that are not missing.

        Example:
            members.misses_any(good, others=unreadable)
        """
        expected = self.expected
        missing = [rank for rank in expected if rank not in known and rank not in others]
        if not missing or self.any_of(self.is_gone, missing, answer=False):
            return bool(missing)
        sent = {rank: known.get(rank) for rank in expected if rank in known or rank in others}
        if any(head is not None and self.names(rank, head.attempt, head.nonce) for rank, head in sent.items()):
            return False
        have_all_left = not self.any_of(self.is_gone, [*sent], answer=False)
        return have_all_left and self.any_of(self._newer_lives, missing)

    def is_gone(self, rank: int, attempt: int | None = None) -> bool:
        """Return True if an attempt of a rank, or a later attempt, has written its bye object or its outcome.

        Args:
            rank: the rank.
            attempt: the attempt. None: the attempt of the named process.
        """
        attempt = self.expected.get(rank, 0) if attempt is None else attempt
        if (rank, attempt) in self._gone:
            return True
        newest = attempt
        # An attempt with an outcome and without a claim never took part, so its end proves nothing.
        while not (self._has_left(rank, newest) and self._is_claimed(rank, newest)):
            newest += 1
            if not self._is_claimed(rank, newest):
                return False
        self._gone.add((rank, attempt))
        return True

    def any_of(self, question: Callable[[int], bool], ranks: Sequence[int], *, answer: bool = True) -> bool:
        """Return True if the answer to a question is as given for one of these ranks.

        Each question costs up to three requests. So the first rank is asked about alone, because its answer usually
        suffices. The others are asked about in groups at once: one after the other, a thousand questions would keep
        this replica away from its rounds for minutes.

        Args:
            question: asks the store about a rank.
            ranks: expected ranks.
            answer: the answer that is looked for. Default True.

        Example:
            members.any_of(members.is_gone, [3, 7], answer=False)
        """
        for group in (ranks[:1], *(ranks[first : first + THREADS] for first in range(1, len(ranks), THREADS))):
            if answer in list(self._map(question, group)):
                return True
        return False

    def _newer_lives(self, rank: int) -> bool:
        """Return True if the newest attempt of a rank is newer than the named one and has not left."""
        named = newest = self.expected[rank]
        while self._is_claimed(rank, newest + 1):
            newest += 1
        return newest > named and not self._has_left(rank, newest)

    def _has_left(self, rank: int, attempt: int) -> bool:
        outcome, bye = self._keys.outcome(rank, attempt), self._keys.bye(rank, attempt)
        if self._store.peek(outcome, size=1) is not None and not self._stays(rank, attempt):
            return True
        return self._store.peek(bye) is not None

    def _stays(self, rank: int, attempt: int) -> bool:
        """Return True if the process of an ended attempt stays, and the next attempt begins in it in a moment.

        Without this, the others would decide the open round alone during the milliseconds between two attempts.
        """
        since_s = self._staying_from_s.get((rank, attempt))
        if since_s is None:
            key = self._keys.outcome(rank, attempt)
            data = self._store.peek(key, size=MAX_OUTCOME_BYTES)
            try:
                # An outcome that cannot be read is an end as any other.
                if data is None or not parse_outcome(data, key).goes_on:
                    return False
            except CorruptObjectError:
                return False
            since_s = self._staying_from_s[rank, attempt] = self._clock()
        return self._clock() - since_s < RETURNS_S

    def _is_claimed(self, rank: int, attempt: int) -> bool:
        return self._store.peek(self._keys.claim(rank, attempt), size=0) is not None

    def check_fence(self) -> None:
        """Check that no newer attempt of this rank has begun.

        Raises:
            FencedError: a newer attempt has begun.
            RunNotFoundError: the run was deleted.
        """
        self.fence_checked_s = self._clock()
        self.check_run()
        newer = self._me.attempt + 1
        if self._is_claimed(self._me.rank, newer):
            raise FencedError(
                f"Attempt {self._me.attempt} of rank {self._me.rank} in run {self._keys.run_id!r} ends, because "
                f"attempt {newer} of this rank has begun. Only the newest attempt of a rank takes part."
            )

    def check_abort(self) -> None:
        """Check that no peer has aborted the run. The store is asked at most every `abort_check_s` seconds.

        Raises:
            AbortedError: a peer has aborted the run.
            RunNotFoundError: the run was deleted.
        """
        self.check_run()
        if self._clock() - self._abort_checked_s < self._abort_check_s:
            return
        self._abort_checked_s = self._clock()
        data = self._store.peek(self._keys.abort())
        if data is not None:
            raise AbortedError.from_record(self._keys.run_id, bytes(data))

    def check_run(self) -> None:
        """Check that the run was not deleted, because this replica must not write new objects into a deleted run.

        A stale answer or a failing store does not end the replica: three looks in a row must find nothing.

        Raises:
            RunNotFoundError: the run was deleted.
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
                f"{self._me.rank} ({kept[0]}) nor {kept[-1]} exists any more. This replica ends."
            )

    @property
    def is_deleted(self) -> bool:
        """True if the run counts as deleted."""
        return self.missing_looks >= DELETED_LOOKS


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
