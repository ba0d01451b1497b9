"""The decision about an entry: look for contributions, judge them, and create the seal that names those that count.

Any replica may do it at any time; before it has waited a while only one looks, so that the others need not. Whatever
two of them would decide, the first seal created is the decision.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from diloco.errors import QuorumTimeoutError
from diloco.keys import Keys
from diloco.membership import Identity, Membership
from diloco.parallel import Map
from diloco.patience import PatientStore
from diloco.phase import Phase
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

LEAST_GRACE_PHASES, GRACE_PHASES = 0.1, 0.05
"""Phases of half an hour that differ by a hundredth spread by 18 s: the grace is at least a twentieth of a phase, and
what was learned, as far as `grace_s` allows, at least a tenth."""

ANSWERS_PER_LOOK = 20
"""A replica sees a seal after a pause of up to a quarter of `grace_s` and about so many answers of the store."""


class Sealing:
    """Brings the seal of an entry about."""

    def __init__(
        self,
        store: PatientStore,
        keys: Keys,
        me: Identity,
        members: Membership,
        phase: Phase,
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
        self._phase = phase
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
        if r.began_s is not None and now - r.began_s < min(patience_s, self._most_grace_s / 2):
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
        seen = {rank: head for rank, (head, _) in r.seen.items()}
        good = {rank: head for rank, head in seen.items() if head.anchor == anchor and rank not in r.useless}
        expected = self._members.still_expected(good) - r.useless
        # A replica whose anchor is the odd one out leaves the decision to the others for as long again.
        is_over = self._is_over(r, good, now, grace_factor=2 if theirs > ours else 1)
        is_enough = self._is_enough(expected, good, is_over=is_over)
        if not is_enough and is_over:
            r.unreadable.clear()  # perhaps it was the reading, after all: there is nothing left to lose
        if not is_enough or not (expected <= good.keys() or is_over):
            return False
        return self._seal_with(r, set(good), anchor)

    def _is_over(self, r: Round, good: Mapping[int, Contribution], now: float, *, grace_factor: int) -> bool:
        """Tell whether nobody is to be waited for any more.

        The grace begins when an expected process is known to wait: this one, or one whose contribution stands. Who
        came early by its own account waits so much longer. While nobody of them is known to wait, the rest of a phase
        may still be theirs.
        """
        starts = [] if r.grace_from_s is None else [r.grace_from_s]
        if self._members.names_me and r.began_s is not None:
            starts.append(r.began_s + self._phase.head_start_s)
        starts += [
            now + head.head_start_s
            for rank, head in good.items()
            if self._members.names(rank, head.attempt, head.nonce)
        ]
        r.grace_from_s = min(starts, default=None)
        if r.grace_from_s is not None:
            return now - r.grace_from_s >= self._grace_s(r) * grace_factor + self._phase.slack_s(r.entry)
        if self._members.seal is None and not self._phase.has_trained:
            return False
        since_s = r.began_s if r.published_s is None else r.published_s
        return since_s is not None and now - since_s >= self.lone_s

    def _is_enough(self, expected: set[int], good: Mapping[int, Contribution], *, is_over: bool) -> bool:
        """Tell whether enough of those who could bring work have; where nobody can, whether enough are present."""
        present = expected | good.keys()
        working = {rank for rank, head in good.items() if head.weight > 0}
        able = {rank for rank in present if rank in working or rank not in good}
        if working or (able and not is_over):
            return len(working) >= max(1, min(self.min_quorum, len(able)))
        return len(good) >= max(1, min(self.min_quorum, len(present)))

    @property
    def lone_s(self) -> float:
        """How long after it has sent something a replica waits that sees nobody who is expected, before it decides.

        They may be in the midst of a phase, and who presents itself early is not to decide alone. A seal's word on how
        long a phase takes is not trusted for more than half of the time in which a round must come about, unless this
        replica's own phase is as long.
        """
        most_s = 2 * self._phase_s + self._most_grace_s
        if not self._phase.has_trained:
            return most_s
        return min(most_s, max(self._pace.round_timeout_s / 2, 2 * self._phase.seconds + self._most_grace_s))

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
            fits = head.rank == rank and head.size_bytes == (r.size_bytes if head.weight else 0)
            if fits and (not small or _is_intact(head, payload, self._pace.block_bytes)):
                r.seen[rank], r.payloads[rank] = (head, digest), payload
                return True
        r.unreadable[rank] = r.unreadable.get(rank, 0) + 1
        return True

    def _is_my_turn(self, r: Round) -> bool:
        """Tell whether this replica is the first of the named processes, in the entry's hash order, that lives.

        The first time it does not ask who lives: usually all do.
        """
        for rank in hash_order(self._members.expected, "seal", r.entry):
            if rank == self._me.rank and self._members.names_me:
                return True
            if not r.turn_s or (rank != self._me.rank and self._members.lives(rank)):
                return False
        return True

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

    def learn(self, r: Round, waited_s: float) -> None:
        """Take note of how far apart the members of a round arrived."""
        self._spread_s = max(0.8 * self._spread_s, waited_s, self._spread_seen(r))
        self._rounds_learned += 1

    @property
    def _phase_s(self) -> float:
        """How long the inner steps of an entry take, by the newest seal; before the first, by this replica."""
        return self._phase.seconds if self._members.seal is None else self._members.seal.phase_s

    @property
    def _most_grace_s(self) -> float:
        """What was asked for, or a twentieth of a phase; a seal's word is trusted for half the round's time."""
        return max(self._pace.grace_s, min(self._phase_s * GRACE_PHASES, self._pace.round_timeout_s / 2))

    def _grace_s(self, r: Round) -> float:
        """Return how long to wait for the rest: several times the usual spread, within bounds."""
        most_s = self._most_grace_s
        if self._rounds_learned < LEARNING_ROUNDS:
            return most_s
        looking_s = ANSWERS_PER_LOOK * min(self._store.answer_s, 1.0)
        least_s = max(most_s * LEAST_GRACE + looking_s, self._phase_s * LEAST_GRACE_PHASES)
        return min(most_s, max(GRACE_SPREADS * max(self._spread_s, self._spread_seen(r)), least_s))

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
            rank: Member(head.nonce, head.attempt, head.weight, digest, head.in_phase)
            for rank, (head, digest) in sorted(r.seen.items())
            if rank in good
        }
        seal = Seal(members, anchor, 0, mean or b"", phase_s=max(r.seen[rank][0].phase_s for rank in good))
        if mean is None and seal.inputs:
            seal = replace(seal, shards=count_shards(len(seal.owners), r.size_bytes, self._pace.block_bytes))
        self._store.create(self._keys.seal(r.entry), seal.data())
        return True

    def _small_mean(self, r: Round, good: set[int]) -> memoryview | None:
        """Average whole contributions; None when one of them turns out to be bad: decide again without it."""
        began = self._clock()
        working = [rank for rank in sorted(good) if r.seen[rank][0].weight > 0]
        if not working:
            return memoryview(b"")
        out = np.empty(r.size_bytes, np.uint8).data
        inputs = [Input(rank, r.seen[rank][0].weight, r.payloads[rank], r.seen[rank][0].blocks) for rank in working]
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
