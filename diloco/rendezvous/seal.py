"""Decides which contributions count in an entry, and reads that decision: the seal.

Any replica may look for contributions at any time, check them, and create the seal. At first only one replica looks, so
that the others save requests. If two replicas decide differently, the seal that was created first is the decision.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum

import numpy as np

from diloco.errors import QuorumTimeoutError
from diloco.rendezvous.envelope import BadRecordError, Proof
from diloco.rendezvous.frames import READ_TRIES, Contribution, Seal, SealedReplica, digests_of, hash_order
from diloco.rendezvous.reduction import BadInputError, ShardInput, is_mean
from diloco.rendezvous.retrying_store import backoff
from diloco.rendezvous.round import Context, EntryState
from diloco.rendezvous.training_state import Verdict
from executors.errors import CorruptObjectError
from executors.store.standstill import Standstill, describe_standstill

FIRST_TO_LOOK = 8
"""The number of replicas that look for contributions first, if the replica whose turn it is has not decided in time."""
LOOKS_AT_ONCE = 16
"""The number of contributions that a look asks for before it may end at a late replica."""
LOOKS_PER_FRONTIER = 8
"""After this number of looks for contributions, look for joiners again, because a claim may become visible late."""
GRACE_SPREADS, LEAST_GRACE, LEARNING_ROUNDS = 4.0, 0.25, 3
"""The grace is four times the usual spread of arrivals, and at least a quarter of `grace_s`.

In the first rounds the spread is not known yet, so the grace is the whole `grace_s`.
"""
LEAST_GRACE_PHASES, GRACE_PHASES = 0.1, 0.05
"""The grace is at least a twentieth of a phase, because long phases differ more: 1 % of half an hour is 18 s.

A grace that is computed from the spread of arrivals is at least a tenth of a phase, and at most `grace_s`.
"""
ANSWERS_PER_LOOK = 20
"""A replica reads a new seal after a pause of up to a quarter of `grace_s`, and after about this number of requests."""


class SealLog:
    """Reads the seals of a rendezvous.

    Args:
        context: the services of the rendezvous.

    Example:
        seal = SealLog(context).seal(12)
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._newest: tuple[int, Seal] | None = None
        """The entry and the seal that were read last. A seal never changes."""

    def seal(self, entry: int) -> Seal | None:
        """Return the seal of an entry. None: there is none, or this reading of it failed."""
        if self._newest is not None and self._newest[0] == entry:
            return self._newest[1]
        context, key = self._context, self._context.keys.seal(entry)
        data = context.store.peek(key)
        if data is None:
            return None
        seal = None
        with suppress(BadRecordError):
            layout = context.layouts[entry % len(context.layouts)]
            size_bytes, wire = layout.mean_bytes, layout.mean_wire.name
            whole = not self.is_damaged(entry)
            seal = Seal.parse(data, key, context.proof, size_bytes=size_bytes, wire=wire, whole=whole)
            blocks = layout.blocks(layout.n_elements, context.proof)
            if seal.mean and not is_mean(memoryview(seal.mean), blocks, None):
                seal = None
        if seal is None or seal.lost_mean is not None:
            context.store.record_misread(key, data)
        else:
            self._newest = entry, seal
            context.members.read_seal = context.members.read_seal or key
        return seal

    def is_sealed(self, entry: int) -> bool:
        """Return True if the entry has a seal, even if this reading of it failed."""
        return self.seal(entry) is not None or self.misread(entry) > 0

    def misread(self, entry: int) -> int:
        """Return the number of wrong readings of an entry's seal."""
        return self._context.store.count_misreads(self._context.keys.seal(entry))

    def is_damaged(self, entry: int) -> bool:
        """Return True if the stored seal counts as damaged, and is not read again."""
        return self.misread(entry) >= READ_TRIES

    def read_seal_or_none(self, entry: int) -> Seal | None:
        """Wait until a seal that exists can be read, and return it. None: it is damaged, or the wait took too long."""
        context = self._context
        began, pauses = context.clock(), backoff(context.rng)
        while (seal := self.seal(entry)) is None:
            if self.is_damaged(entry) and (seal := self.seal(entry)) is None:
                return None
            if context.clock() - began > context.limits.round_timeout_s:
                return None
            context.wait(next(pauses), ())
        return seal

    def verdict(self, seal: Seal) -> Verdict:
        """Return the decision of a seal about the work of this process.

        KEPT: the seal does not name this rank, or names this process without weight. DROPPED: it names another process
        of this rank.
        """
        me = self._context.me
        member = seal.replicas.get(me.rank)
        if member is None or (member.nonce == me.nonce and not member.weight):
            return Verdict.KEPT
        return Verdict.COUNTED if member.nonce == me.nonce else Verdict.DROPPED

    def verdicts(self, first: int, end: int) -> list[Verdict | None]:
        """Return the decision of passed entries about this process's work, by fragment. None: no entry of the fragment
        was passed.

        Args:
            first: the first of the passed entries.
            end: the entry after the last of them.
        """
        n_fragments = len(self._context.layouts)
        verdicts: list[Verdict | None] = [None] * n_fragments
        for entry in range(first, end):
            seal = self.read_seal_or_none(entry)
            # An unreadable seal may have counted the work. So it is dropped: to send it again could count it twice.
            verdict = Verdict.DROPPED if seal is None else self.verdict(seal)
            if verdict is not Verdict.KEPT or verdicts[entry % n_fragments] is None:
                verdicts[entry % n_fragments] = verdict
        return verdicts


class SealingResult(Enum):
    """The result of `Sealer.try_seal`."""

    OPEN = "open"
    """The entry may not be decided yet."""
    TRIED = "tried"
    """A seal was written, by this replica or by another one. Read it to know which."""
    OUTVOTED = "outvoted"
    """Among the contributions, another anchor is at least as frequent as the anchor of this replica."""


class Sealer:
    """Creates the seal of an entry once enough contributions have arrived, or the wait for the others has ended.

    Args:
        context: the services of the rendezvous.
        seals: reads the seals.

    Example:
        Sealer(context, seals).try_seal(entry, takeover_after_s=5.0)
    """

    def __init__(self, context: Context, seals: SealLog) -> None:
        self._context = context
        self._seals = seals
        self._store = context.store
        self._me = context.me
        self._members = context.members
        self._phase = context.phase
        self._limits = context.limits
        self._spread_s = 0.0
        self._rounds_learned = 0

    def try_seal(self, entry: EntryState, takeover_after_s: float) -> SealingResult:
        """Create the seal if the entry may be decided now.

        Args:
            entry: the open entry.
            takeover_after_s: seconds after which the first replicas look for contributions although it is another
                replica's turn.

        Returns:
            The result of the try. It is `SealingResult.OUTVOTED` at most once for an entry. The caller then loads the
            state from the log again.
        """
        now = self._context.clock()
        turn_after_s = min(takeover_after_s, self._most_grace_s / 2) * self._turns_to_wait(entry)
        if entry.began_s is not None and now - entry.began_s < turn_after_s:
            if now < entry.turn_s:
                return SealingResult.OPEN
            if not self._is_my_turn(entry):
                entry.turn_s = now + self._context.ask_again_s
                return SealingResult.OPEN
        if entry.looks % LOOKS_PER_FRONTIER == 0:
            self._members.look_for_joiners()
        entry.looks += 1
        has_looked_at_all = self._look_for_contributions(entry, now)
        anchor = self._context.training.digest(entry.fragment)
        votes = Counter(head.anchor for head, _ in entry.seen.values())
        ours, theirs = votes.pop(anchor, 0), max(votes.values(), default=0)
        if theirs and theirs >= ours and not entry.reloaded:
            entry.reloaded = True
            return SealingResult.OUTVOTED
        unreadable = entry.unreadable_ranks
        good = {r: head for r, (head, _) in entry.seen.items() if head.anchor == anchor and r not in unreadable}
        # A replica in the minority gives the others twice the grace to decide, because its own anchor may be wrong.
        # This call also begins the grace, so it comes before the end of a look at a late replica.
        is_over = self._is_over(entry, good, now, grace_factor=2 if theirs > ours else 1)
        if not has_looked_at_all:
            return SealingResult.OPEN
        # If no replica has any work to send, the replicas themselves are counted.
        n_sent = sum(head.weight > 0 for head in good.values()) or len(good)
        is_enough = is_over and n_sent >= max(1, self._context.min_quorum)
        if not is_enough and (not n_sent or self._members.misses_any(good, others=unreadable)):
            if is_over:
                # Too few contributions are readable to decide. Perhaps only the readings were wrong, so wait.
                entry.misread.clear()
            return SealingResult.OPEN
        return SealingResult.TRIED if self._seal_with(entry, set(good), anchor) else SealingResult.OPEN

    def _look_for_contributions(self, entry: EntryState, now: float) -> bool:
        """Look for the contributions that were not seen yet.

        Return False if a replica is only late, so that the entry cannot be decided yet. The look may then have ended at
        that replica, and the next look begins behind it. So a look costs few requests among a thousand replicas, too.

        Args:
            entry: the open entry.
            now: the time.
        """
        known = entry.seen.keys() | entry.unreadable_ranks
        unseen = [rank for rank in self._ranks() if rank not in known]
        begin = bisect_right(unseen, entry.looked_to)
        unseen = unseen[begin:] + unseen[:begin]
        # Until the grace runs, any contribution may begin it. After the grace, each contribution that exists counts.
        is_running = entry.grace_from_s is not None and now - entry.grace_from_s < self._grace_s(entry)
        size = LOOKS_AT_ONCE if is_running else max(1, len(unseen))
        for group in (unseen[first : first + size] for first in range(0, len(unseen), size)):
            list(self._context.map(lambda rank: self.look_at_contribution(entry, rank), group))
            entry.looked_to = group[-1]
            known = entry.seen.keys() | entry.unreadable_ranks
            late = [rank for rank in group if rank in self._members.expected and rank not in known]
            if is_running and self._members.any_of(self._members.is_gone, late, answer=False):
                return False
        return True

    def _is_over(self, entry: EntryState, good: Mapping[int, Contribution], now: float, *, grace_factor: int) -> bool:
        """Return True if the wait for missing replicas has ended.

        The grace begins when an expected process is known to wait: this process, or a process whose contribution was
        found. If that process reports a head start, the grace begins that much later. As long as no expected process
        waits, all of them may still be in the middle of a phase.

        Args:
            entry: the open entry.
            good: the contributions that can count, by rank.
            now: the time.
            grace_factor: a factor by which the grace is multiplied.
        """
        starts = [] if entry.grace_from_s is None else [entry.grace_from_s]
        if self._members.names_me and entry.began_s is not None:
            ahead_s = self._phase.ahead_s(entry.index) if self._context.in_background else 0.0
            starts.append(entry.began_s + self._phase.head_start_s + ahead_s)
        starts += [
            now + head.head_start_s
            for rank, head in good.items()
            if self._members.names(rank, head.attempt, head.nonce)
        ]
        entry.grace_from_s = min(starts, default=None)
        if entry.grace_from_s is not None:
            return now - entry.grace_from_s >= self._grace_s(entry) * grace_factor + self._phase.slack_s(entry.index)
        if self._members.seal is None and not self._phase.has_trained:
            return False
        since_s = entry.began_s if entry.published_s is None else entry.published_s
        return since_s is not None and now - since_s >= self.unobserved_wait_s

    @property
    def unobserved_wait_s(self) -> float:
        """Seconds from sending work to deciding an entry, if this replica sees no expected process.

        The expected processes may be in the middle of a phase, and a replica that contributes early must not decide
        alone. The length of a phase comes from the newest seal. It counts for at most half of `round_timeout_s`, unless
        a phase of this replica takes as long.
        """
        most_s = 2 * self._phase_s + self._most_grace_s
        if not self._phase.has_trained:
            return most_s
        return min(most_s, max(self._limits.round_timeout_s / 2, 2 * self._phase.phase_s + self._most_grace_s))

    def _ranks(self) -> Sequence[int]:
        """Return every rank that may send a contribution."""
        return sorted({*self._members.claimed, *self._members.expected, self._me.rank})

    def look_at_contribution(self, entry: EntryState, rank: int) -> bool:
        """Read a contribution into the state of an entry, and return True if it exists.

        Only the head of a large contribution is read. A small contribution is read whole, unless this process has sent
        it.

        Args:
            entry: the entry.
            rank: the rank of the contribution.
        """
        layout, packed = entry.layout, entry.packed
        key = self._context.keys.contribution(entry.index, rank)
        if rank == self._me.rank and packed is not None:
            data = self._store.peek(key, size=layout.head_bytes)
            if data is None:
                return False
            with suppress(BadRecordError):
                head, digest = Contribution.parse(data, key, self._context.proof)
                if digest in entry.sent:
                    entry.seen[rank], entry.payloads[rank] = (head, digest), packed.kept
                    return True
        data = self._store.peek(key, size=None if layout.is_small else layout.head_bytes)
        if data is None:
            return False
        with suppress(BadRecordError):
            head, digest = Contribution.parse(data, key, self._context.proof)
            payload = data[layout.head_bytes :]
            fits = head.rank == rank and head.size_bytes == (layout.size_bytes if head.weight else 0)
            fits = fits and head.wire == layout.wire.name
            if fits and (not layout.is_small or _is_intact(head, payload, layout.block_bytes, self._context.proof)):
                entry.seen[rank], entry.payloads[rank] = (head, digest), payload
                return True
        entry.misread[rank] = entry.misread.get(rank, 0) + 1
        self._store.record_misread(key, data)
        return True

    def _is_my_turn(self, entry: EntryState) -> bool:
        """Return True if this replica is the first live one in the entry's hash order of the named processes.

        The first call does not ask the store which processes have left, because usually none has.
        """
        order = self._order(entry)
        before = order[: order.index(self._me.rank)] if self._members.names_me else order
        others = [rank for rank in before if rank != self._me.rank]
        return not before or (bool(entry.turn_s) and not self._members.any_of(self._members.lives, others))

    def _turns_to_wait(self, entry: EntryState) -> int:
        """Return after how many times the usual wait this replica looks although it is another replica's turn.

        One look costs one request for each replica. So if all replicas looked at once, the requests of a round would
        grow like the square of their number. The first replicas in the hash order look after the usual wait, and after
        each further wait twice as many.
        """
        return 1 + (self._order(entry).index(self._me.rank) // FIRST_TO_LOOK).bit_length()

    def _order(self, entry: EntryState) -> list[int]:
        """Return the named ranks and this rank in the order in which they look for contributions."""
        if not entry.order:
            entry.order = hash_order({*self._members.expected, self._me.rank}, "seal", entry.index)
        return entry.order

    def is_late(self, entry: EntryState) -> bool:
        """Return True if an entry has taken longer than `round_timeout_s`."""
        since_s = entry.started_s
        # the other replicas may be in the middle of a phase
        if entry.published_s is not None and not self._members.names_me:
            since_s = max(since_s, entry.published_s + self.unobserved_wait_s)
        return self._context.clock() - since_s > self._limits.round_timeout_s

    def is_stuck(self, entry: EntryState, seal: Seal | None) -> bool:
        """Return True if only a newer snapshot can help: an object is damaged or missing, or the entry takes too long.

        Args:
            entry: the open entry.
            seal: its seal. None: it has none, or it could not be read this time.
        """
        is_blocked = entry.blocked is not None or self._seals.is_damaged(entry.index)
        return is_blocked or (seal is not None and self.is_late(entry))

    def check_time(self, entry: EntryState, seal: Seal | None) -> None:
        """Raise an error if waiting for an entry is pointless or takes too long.

        Args:
            entry: the open entry.
            seal: its seal. None: it had none at the last look, or it could not be read this time.

        Raises:
            QuorumTimeoutError: `round_timeout_s` passed without a seal, or without a mean.
            CorruptObjectError: the seal or the mean is damaged, and no replica continued for `grace_s`.
        """
        keys, number = self._context.keys, entry.index + 1
        damaged, looks = entry.blocked or keys.seal(entry.index), [keys.seal(entry.index + 1)] * READ_TRIES
        if self._store.is_damaged(damaged, self._limits.grace_s) and all(map(self._store.is_missing, looks)):
            if self._context.proof.is_signed:
                what = describe_standstill(Standstill(number, damaged), self._store.store.url, has_ended=True)
                raise CorruptObjectError(
                    f"{what}; then continue the run: replicas resume {keys.run_id}",
                    key=damaged,
                    url=self._store.store.url,
                )
            raise CorruptObjectError(
                f"Round {number} cannot be completed: {damaged} is damaged in the store, and no later snapshot exists. "
                "Start a new run from the newest complete snapshot of this one: "
                f"replicas resume {keys.run_id} --from-snapshot",
                key=damaged,
                url=self._store.store.url,
            )
        if not self.is_late(entry):
            return
        timeout_s = self._limits.round_timeout_s
        if self._store.exists(key := keys.seal(entry.index)):
            if seal is None and not self._seals.misread(entry.index):
                return  # this process was suspended, and the others have sealed the entry meanwhile
            raise QuorumTimeoutError(
                f"Round {number} cannot be completed: its seal ({key}), its mean or a contribution is missing or "
                f"damaged in the store, and no later snapshot exists (waited {timeout_s:g} s). Start a new run from "
                f"the newest complete snapshot of this one: replicas resume {keys.run_id} --from-snapshot",
                round=number,
            )
        ranks = self._ranks()
        spoilt = [
            rank
            for rank in ranks
            if rank not in entry.seen and self._store.count_misreads(keys.contribution(entry.index, rank))
        ]
        missing = [rank for rank in ranks if rank not in entry.seen and rank not in spoilt]
        forged = ""
        if spoilt and self._context.proof.is_signed:
            found = Standstill(number, keys.contribution(entry.index, spoilt[0]))
            forged = f" {describe_standstill(found, self._store.store.url, has_ended=True)}"
        raise QuorumTimeoutError(
            f"Round {number}: {len(ranks) - len(missing) - len(spoilt)} of {len(ranks)} contributions arrived in "
            f"{timeout_s:g} s, min_quorum is {self._context.min_quorum}. "
            f"Missing ranks: {', '.join(map(str, missing)) or 'none'}."
            + (f" Damaged contributions: ranks {', '.join(map(str, spoilt))}." if spoilt else "")
            + forged,
            round=number,
            missing=missing,
        )

    def learn(self, entry: EntryState, waited_s: float) -> None:
        """Update the usual spread of arrivals after a round.

        Args:
            entry: the entry that was applied.
            waited_s: seconds that this replica waited for the others.
        """
        self._spread_s = max(0.8 * self._spread_s, waited_s, _spread_seen(entry))
        self._rounds_learned += 1

    @property
    def _phase_s(self) -> float:
        """Seconds that a phase takes, according to the newest seal.

        Before the first seal, the phase of this replica.
        """
        return self._phase.phase_s if self._members.seal is None else self._members.seal.phase_s

    @property
    def _most_grace_s(self) -> float:
        """The longest grace: `grace_s`, or a twentieth of a phase, but at most half of `round_timeout_s`."""
        needed_s = max(self._phase_s * GRACE_PHASES, self._phase.apart_s(self._phase_s))
        return max(self._limits.grace_s, min(needed_s, self._limits.round_timeout_s / 2))

    def _grace_s(self, entry: EntryState) -> float:
        """Return the seconds to wait for missing replicas: four times the usual spread of arrivals, within bounds."""
        most_s = self._most_grace_s
        if self._rounds_learned < LEARNING_ROUNDS:
            return most_s
        looking_s = ANSWERS_PER_LOOK * min(self._store.answer_s, 1.0)
        apart_s = self._phase.apart_s(self._phase_s)
        least_s = max(most_s * LEAST_GRACE + looking_s, self._phase_s * LEAST_GRACE_PHASES, apart_s)
        return min(most_s, max(GRACE_SPREADS * max(self._spread_s, _spread_seen(entry)), least_s))

    def _seal_with(self, entry: EntryState, good: set[int], anchor: str) -> bool:
        """Create the seal with these ranks.

        Return False if a contribution turned out to be bad, so that the caller decides again.
        """
        mean: memoryview | None = None
        clipped: set[int] = set()
        if entry.layout.is_small:
            mean = self._small_mean(entry, good, clipped)
            if mean is None:
                return False
        members = {
            rank: SealedReplica(head.nonce, head.attempt, head.weight, digest, head.in_phase)
            for rank, (head, digest) in sorted(entry.seen.items())
            if rank in good
        }
        heads = {rank: entry.seen[rank][0] for rank in good}
        phase_s, same = max(head.phase_s for head in heads.values()), groups_of_same_work(heads)
        stops = tuple(rank for rank, head in sorted(heads.items()) if head.stop)
        wire = entry.layout.mean_wire.name
        seal = Seal(
            members, anchor, 0, mean or b"", phase_s=phase_s, same=same, wire=wire, stops=stops,
            clipped=tuple(sorted(clipped)),
        )  # fmt: skip
        if mean is None and seal.inputs:
            seal = replace(seal, shards=entry.layout.n_shards(len(seal.owners)))
        key = self._context.keys.seal(entry.index)
        self._store.create(key, seal.data(key, self._context.proof))
        return True

    def _small_mean(self, entry: EntryState, good: set[int], clipped: set[int]) -> memoryview | None:
        """Return the mean of small contributions. None: a contribution is bad, and is now marked as bad.

        Args:
            good: the ranks of the contributions.
            clipped: the ranks whose contribution was scaled down are added to this set.
        """
        began, heads = self._context.clock(), {rank: entry.seen[rank][0] for rank in sorted(good)}
        inputs = [
            ShardInput(rank, head.weight, entry.payloads[rank], head.blocks)
            for rank, head in heads.items()
            if head.weight > 0
        ]
        if not inputs:
            return memoryview(b"")
        layout = entry.layout
        out = np.empty(layout.mean_bytes, np.uint8).data
        blocks = layout.blocks(layout.n_elements, self._context.proof)
        try:
            self._context.reduce(inputs, out, blocks, clipped=clipped)
        except BadInputError as bad:
            entry.misread[bad.rank] = READ_TRIES
            return None
        finally:
            entry.reduce_s += self._context.clock() - began
        return out


def groups_of_same_work(heads: Mapping[int, Contribution]) -> tuple[tuple[int, ...], ...]:
    """Return groups of ranks that sent equal work. Work of zeros, as from a frozen model, is not compared.

    Args:
        heads: the heads of the contributions, by rank.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, head in sorted(heads.items()):
        if any(head.norms):
            groups.setdefault(head.blocks, []).append(rank)
    return tuple(tuple(ranks) for ranks in groups.values() if len(ranks) > 1)


def _spread_seen(entry: EntryState) -> float:
    """Return the longest wait, in seconds, that the contributions report for their senders' last round."""
    return max((head.waited_s for head, _ in entry.seen.values()), default=0.0)


def _is_intact(head: Contribution, payload: memoryview, block_bytes: int, proof: Proof) -> bool:
    """Return True if a payload has the size and the digests that its head names."""
    return len(payload) == head.size_bytes and digests_of(payload, block_bytes, proof) == head.blocks
