"""The decision about an entry: look for contributions, judge them, and create the seal that names those that count.

Any replica may do it at any time; before it has waited a while only one looks, so that the others need not. Whatever
two of them would decide, the first seal created is the decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from diloco.errors import QuorumTimeoutError
from diloco.keys import Keys
from diloco.membership import Identity, Membership
from diloco.parallel import Map
from diloco.patience import PatientStore
from diloco.records import (
    BadRecordError,
    Contribution,
    Member,
    Seal,
    count_blocks,
    digests_of,
    hash_order,
    head_bytes,
)
from diloco.reduction import BadInputError, Input, Reduce
from diloco.rounds import READ_TRIES, Pace, Round, asking_again_s
from diloco.sharding import count_shards
from diloco.work import Work

LOOKS_PER_FRONTIER = 8
"""How often contributions are looked for until joiners are, again: a claim may be seen late."""


GRACE_SPREADS, LEAST_GRACE, LEARNING_ROUNDS = 4.0, 0.25, 3
"""The grace is four times the usual spread of arrivals, at least a quarter of `grace_s`; the first rounds have all."""


class Sealing:
    """Brings the seal of an entry about."""

    def __init__(
        self,
        store: PatientStore,
        keys: Keys,
        me: Identity,
        members: Membership,
        work: Work,
        pace: Pace,
        *,
        min_quorum: int,
        reduce: Reduce,
        clock: Callable[[], float],
        map: Map,
        reload: Callable[[], object],
    ) -> None:
        self.min_quorum = min_quorum
        self._store = store
        self._keys = keys
        self._me = me
        self._members = members
        self._work = work
        self._pace = pace
        self._reduce = reduce
        self._clock = clock
        self._map = map
        self._reload = reload
        self._spread_s = 0.0
        self._rounds_learned = 0

    def try_seal(self, r: Round, patience_s: float) -> bool:
        """Create the seal if the entry may be decided now; return whether that was tried."""
        now = self._clock()
        waited_s = now - r.started_s
        if waited_s < patience_s:
            if now < r.turn_s:
                return False
            if not self._is_my_turn(r):
                r.turn_s = now + asking_again_s(self._store)
                return False
        if r.looks % LOOKS_PER_FRONTIER == 0:
            self._members.look_for_joiners()
        r.looks += 1
        unseen = [rank for rank in self.ranks() if rank not in r.seen and rank not in r.useless]
        list(self._map(lambda rank: self.look_at_contribution(r, rank), unseen))
        anchor = self._work.digest(r.fragment)
        votes = Counter(head.anchor for head, _ in r.seen.values())
        ours, theirs = votes.pop(anchor, 0), max(votes.values(), default=0)
        if theirs and theirs >= ours and not r.reloaded:
            r.reloaded = True
            self._reload()
            return True  # look again: also the position may be another one
        good = {rank for rank, (head, _) in r.seen.items() if head.anchor == anchor and rank not in r.useless}
        expected = self._expected(r, good)
        need = max(1, min(self.min_quorum, len(expected | good)))
        # A replica whose anchor is the odd one out leaves the decision to the others for as long again.
        grace_s = self._grace_s(r) * (2 if theirs > ours else 1)
        if len(good) < need and waited_s >= grace_s:
            r.unreadable.clear()  # perhaps it was the reading, after all: there is nothing left to lose
        if len(good) < need or not (expected <= good or waited_s >= grace_s):
            return False
        return self._seal_with(r, good, anchor)

    def ranks(self) -> Sequence[int]:
        """Return every rank that may send something."""
        return sorted({*range(self._members.frontier), *self._members.expected, self._me.rank})

    def look_at_contribution(self, r: Round, rank: int) -> bool:
        """Read a contribution's head, of a small one everything; return whether something stands there."""
        small = self._is_small(r)
        head_size = head_bytes(count_blocks(r.size_bytes, self._pace.block_bytes))
        data = self._store.look(self._keys.contribution(r.entry, rank), size=None if small else head_size)
        if data is None:
            return False
        with suppress(BadRecordError):
            head, digest = Contribution.parse(data)
            payload = data[head_size:]
            fits = head.rank == rank and head.size_bytes == r.size_bytes
            if fits and (not small or _is_intact(head, payload, self._pace.block_bytes)):
                r.seen[rank], r.payloads[rank] = (head, digest), payload
                return True
        r.unreadable[rank] = r.unreadable.get(rank, 0) + 1
        return True

    def _is_my_turn(self, r: Round) -> bool:
        """Tell whether this replica is the first of the expected ones, in the entry's hash order, that is not gone.

        The first time it does not ask who is gone: usually nobody is.
        """
        for rank in hash_order(self._members.expected, "seal", r.entry):
            if rank == self._me.rank:
                return True
            if not r.turn_s or not self._members.is_gone(rank):
                return False
        return True

    def _expected(self, r: Round, good: set[int]) -> set[int]:
        """Return whom to wait for: the members of the newest seal, less who is gone or sent something unreadable."""
        expected = set(self._members.expected)
        if expected <= good:
            return expected
        expected -= r.useless
        return {rank for rank in expected if rank in good or not self._members.is_gone(rank)}

    def out_of_time(self, r: Round) -> QuorumTimeoutError:
        """Say why an entry did not come about: it was not decided, or what was decided cannot be read."""
        timeout_s = self._pace.round_timeout_s
        if self._store.stands(key := self._keys.seal(r.entry)):
            return QuorumTimeoutError(
                f"Round {r.entry}: it was sealed, but its mean could not be had in {timeout_s:g} s. The seal ({key}), "
                "or what the mean is made of, is missing or is not what was written, and no later snapshot stands.",
                round=r.entry,
            )
        ranks = self.ranks()
        missing = [rank for rank in ranks if rank not in r.seen]
        return QuorumTimeoutError(
            f"Round {r.entry}: {len(ranks) - len(missing)} of {len(ranks)} contributions arrived in {timeout_s:g} s, "
            f"min_quorum is {self.min_quorum}. Missing ranks: {', '.join(map(str, missing)) or 'none'}.",
            round=r.entry,
            missing=missing,
        )

    def learn(self, r: Round) -> None:
        """Take note of how far apart the members of a round arrived."""
        self._spread_s = max(0.8 * self._spread_s, r.wait_s, self._spread_seen(r))
        self._rounds_learned += 1

    def _grace_s(self, r: Round) -> float:
        """Return how long to wait for the rest: several times the usual spread, within bounds."""
        most_s = self._pace.grace_s
        if self._rounds_learned < LEARNING_ROUNDS:
            return most_s
        usual_s = GRACE_SPREADS * max(self._spread_s, self._spread_seen(r))
        return min(most_s, max(usual_s, most_s * LEAST_GRACE))

    def _spread_seen(self, r: Round) -> float:
        """Return the longest that one of those seen has waited for others in its last round, by its own clock."""
        return max((head.waited_s for head, _ in r.seen.values()), default=0.0)

    def _seal_with(self, r: Round, good: set[int], anchor: str) -> bool:
        mean: memoryview | None = None
        if self._is_small(r):
            mean = self._small_mean(r, good)
            if mean is None:
                return False
        members = {
            rank: Member(head.nonce, head.attempt, head.weight, digest)
            for rank, (head, digest) in sorted(r.seen.items())
            if rank in good
        }
        shards = 0 if mean is not None else count_shards(len(members), r.size_bytes, self._pace.block_bytes)
        self._store.create(self._keys.seal(r.entry), Seal(members, anchor, shards, mean or b"").data())
        return True

    def _small_mean(self, r: Round, good: set[int]) -> memoryview | None:
        """Average whole contributions; None when one of them turns out to be bad: decide again without it."""
        began = self._clock()
        out = np.empty(r.size_bytes, np.uint8).data
        inputs = [
            Input(rank, r.seen[rank][0].weight, r.payloads[rank], r.seen[rank][0].blocks) for rank in sorted(good)
        ]
        try:
            self._reduce(inputs, out, block_bytes=self._pace.block_bytes)
        except BadInputError as bad:
            r.unreadable[bad.rank] = READ_TRIES
            return None
        finally:
            r.reduce_s += self._clock() - began
        return out

    def _is_small(self, r: Round) -> bool:
        return r.size_bytes <= self._pace.small_bytes


def _is_intact(head: Contribution, payload: memoryview, block_bytes: int) -> bool:
    return len(payload) == head.size_bytes and digests_of(payload, block_bytes) == head.blocks
