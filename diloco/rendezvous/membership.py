"""Finds out which replicas are expected in a round and which have left.

The replicas that the newest seal names are expected. A replica has left if it has written its bye object or its
outcome. Nothing here depends on clocks of other machines, heartbeats or modification times.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic

from diloco.errors import AbortedError, FencedError
from diloco.rendezvous.earlier_call import EarlierCall
from diloco.rendezvous.frames import Contribution, Seal
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.retrying_store import THREADS, Map, RetryingStore
from executors.attempt.outcome import MAX_OUTCOME_BYTES, parse_outcome
from executors.errors import CorruptObjectError, RunNotFoundError
from executors.replica.restartable import AWAITED_S
from executors.store.added_ranks import MAX_ADDED, AddedRanks
from executors.store.records import MAX_RECORD_BYTES

MISREAD = 3
"""The number of wrong readings after which a record counts as missing."""
FENCE_S = 10.0
"""Seconds after which a replica out of phase checks again whether a newer attempt of its rank exists."""
RETURNS_S = 2 * AWAITED_S
"""The longest time, in seconds, for which an ended attempt is expected to continue in its process.

The process writes a bye object after `AWAITED_S`. The rest is for its clean-up, or for its death before that.
"""
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
