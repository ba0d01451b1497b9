"""Weighs and sends the work of this replica, and keeps count of the steps that no seal has counted yet.

If the store streams, a contribution is packed and written in one pass. Otherwise it is packed into memory and then
sent. A streamed contribution in fp32 leaves only one shard in memory: the shard that this replica will probably reduce.
If this replica has to reduce another shard, it reads its own input from the store.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

from diloco.errors import ContributionError
from diloco.rendezvous.envelope import unframe
from diloco.rendezvous.frames import MAX_WEIGHT, Contribution, Seal
from diloco.rendezvous.round import Context, EntryState, PendingWork, ResolvedSteps, shards_of
from diloco.rendezvous.seal import Sealer, SealLog
from diloco.rendezvous.training_state import PackedWork, Verdict
from executors.store import Buffer

log = logging.getLogger(__name__)

NOTABLY_SLOWER = 1.1
"""If a replica's phase takes this many times as long as the other replicas' phase, a warning advises about its speed.
"""


# -- weighing ----------------------------------------------------------------------------------------------------------


class WorkScale:
    """Weighs the work of one replica.

    Args:
        context: the services of the rendezvous. `context.weight` is the weight that the user gave.

    Example:
        WorkScale(context).weigh(0, entry=12, is_early=False)
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._phase = context.phase
        self._plan = context.plan
        self._work_per_step = 1.0
        """The weight of one step, computed from the last value that a callable weight returned."""

    @property
    def undecided(self) -> float:
        """The work that no seal has decided on, as the mean over all fragments.

        It has the unit of `RoundReport.work`.
        """
        made = self._phase.uncounted_steps
        return sum(made) / len(made) * self._work_per_step

    def weigh(self, entry: int, *, is_early: bool) -> PendingWork:
        """Return the weight and the steps of the live work of an entry's fragment.

        Args:
            entry: the entry that the work is for.
            is_early: True if this replica is out of phase and continues to train, so the work has any number of steps.

        Raises:
            ContributionError: the user's weight is not a positive number.
        """
        fragment = entry % len(self._phase.uncounted_steps)
        weight = self._early_weight(entry, fragment) if is_early else self._weight_of(entry, fragment)
        steps = self._phase.uncounted_steps[fragment]
        work = float(steps) if weight else 0.0
        if callable(self._context.weight) and steps and weight:
            work, self._work_per_step = weight, weight / steps
        return PendingWork(entry, weight, steps, work, self._phase.n_steps, is_early)

    def _weight(self, entry: int, *, may_be_zero: bool = False) -> float:
        return check_weight(self._context.weight, self._context.me.rank, entry, may_be_zero=may_be_zero)

    def _weight_of(self, entry: int, fragment: int) -> float:
        """Return the weight of the work of a whole phase.

        With rounds by the clock, it grows with the number of steps.
        """
        weight = self._weight(entry)
        if callable(self._context.weight):
            return weight
        if self._plan.entry_s is None:
            is_short, steps = self._phase.is_short[fragment], self._phase.uncounted_steps[fragment]
            return weight * min(1.0, steps / self._plan.inner_steps) if is_short and steps else weight
        return min(weight * self._phase.uncounted_steps[fragment], MAX_WEIGHT)

    def _early_weight(self, entry: int, fragment: int) -> float:
        """Return the weight of work with fewer steps than a phase.

        The weight is 0 if the replica has no work, or if its number of steps is not known.
        """
        steps = self._phase.uncounted_steps[fragment]
        if not steps or self._phase.has_restored_work[fragment]:
            return 0.0
        if callable(self._context.weight):
            return self._weight(entry, may_be_zero=True)
        if self._plan.entry_s is not None:
            return self._weight_of(entry, fragment)
        return self._weight(entry) * min(1.0, steps / self._plan.inner_steps)


def check_weight(weight: float | Callable[[], float], rank: int, entry: int, *, may_be_zero: bool = False) -> float:
    """Return the weight of a contribution, and call `weight` if it is a function.

    A scalar of torch or numpy also counts as a number, because users often count tokens in one.

    Args:
        weight: a number, or a callable without parameters that returns one.
        rank: the rank of this replica, for the message.
        entry: the entry of the contribution, for the message.
        may_be_zero: True if 0 is legal: the replica then sends a head without work.

    Raises:
        ContributionError: the weight is not a positive number.

    Example:
        check_weight(lambda: 4096, rank=0, entry=12)
    """
    value: Any = weight() if callable(weight) else weight
    if hasattr(value, "item"):
        with suppress(RuntimeError, ValueError):  # a tensor or array with more than one element
            value = value.item()
    if may_be_zero and not isinstance(value, bool) and value == 0:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_WEIGHT:
        raise ContributionError(
            f"Contribution of rank {rank} for round {entry + 1}: weight must be a positive number, at most "
            f"{MAX_WEIGHT:g}, got {value!r}."
        )
    return float(value)


# -- sending -----------------------------------------------------------------------------------------------------------


def send_contribution(context: Context, entry: EntryState, pending: PendingWork, waited_s: float) -> None:
    """Try to store the contribution to an entry. Read the store to know whether it is there.

    Args:
        context: the services of the rendezvous.
        entry: the open entry.
        pending: the held work. If it has no weight, a head without payload is sent.
        waited_s: seconds that this replica waited for others in its last round.

    Raises:
        ContributionError: the work is not finite, or a parameter has changed its shape.

    Example:
        send_contribution(context, entry, pending, waited_s=0.0)
    """
    store, me, members, phase = context.store, context.me, context.members, context.phase
    layout, training = entry.layout, context.training
    key = context.keys.contribution(entry.index, me.rank)

    def head(packed: PackedWork | None) -> bytes:
        head = Contribution(
            rank=me.rank,
            attempt=me.attempt,
            nonce=me.nonce,
            weight=pending.weight,
            anchor=training.digest(entry.fragment),
            size_bytes=layout.size_bytes if packed else 0,
            blocks=packed.blocks if packed else (),
            norms=packed.norms if packed else (),
            waited_s=waited_s,
            phase_s=phase.phase_s or (members.seal.phase_s if members.seal else 0.0),
            head_start_s=0.0 if pending.is_early else phase.head_start_s + phase.ahead_s(entry.index),
            in_phase=not pending.is_early,
            wire=layout.wire.name,
            steps=pending.steps if packed else 0,
            stop=phase.wants_to_stop,
        ).head(key, context.proof, layout.n_blocks)
        entry.sent.add(unframe(head, key, context.proof)[1])
        return head

    def produce(write: Callable[[Buffer], None]) -> bytes:
        # Mark the work as not packed first, so that an error in the middle leaves no half-packed work.
        entry.packed = None
        entry.packed = packed = training.pack(entry.index, write, _range_to_keep(context, entry))
        return head(packed)

    if not pending.weight:
        store.create(key, head(None))
    elif layout.is_small or not store.streams or (entry.packed and len(entry.packed.kept) == layout.size_bytes):
        entry.packed = packed = entry.packed or training.pack(entry.index)
        store.create(key, [head(packed), packed.kept])
    else:
        store.create_streamed(key, layout.head_bytes, layout.head_bytes + layout.size_bytes, produce)


def _range_to_keep(context: Context, entry: EntryState) -> tuple[int, int] | None:
    """Return the range of bytes that stays in memory. None: all bytes, because a lossy wire needs the values that the
    others decode.

    With an exact wire, the range is the shard that this replica will reduce if the seal counts all expected ranks.
    """
    if not entry.layout.wire.is_exact:
        return None
    rank = context.me.rank
    ranks = {*context.members.expected, rank}
    n_shards = entry.layout.n_shards(len(ranks))
    for shard in shards_of(rank, entry.index, ranks, n_shards):
        part = entry.layout.shard(shard, n_shards)
        return part.start, part.start + part.size_bytes
    return 0, 0


class ContributionSender:
    """Sends this replica's contribution to the open entry, until the store has it.

    Args:
        context: the services of the rendezvous.
        seals: the seals of the run. A sealed entry takes no contribution.
        sealer: reads contributions, and raises an error when an entry takes too long.
        account: notes which work is in flight.

    Example:
        ContributionSender(context, seals, sealer, account).send(entry, pending, waited_s=0.0)
    """

    def __init__(self, context: Context, seals: SealLog, sealer: Sealer, account: StepAccount) -> None:
        self._context = context
        self._seals = seals
        self._sealer = sealer
        self._account = account

    def send(self, entry: EntryState, pending: PendingWork, waited_s: float) -> None:
        """Send the held work, unless the work is for another entry, was sent already, or the entry is sealed.

        Args:
            entry: the open entry.
            pending: the held work.
            waited_s: seconds that this replica waited for others in its last round.

        Raises:
            ContributionError: the work is not finite, or a parameter has changed its shape.
        """
        if entry.published or pending.entry != entry.index:
            return
        clock = self._context.clock
        began = clock()
        entry.pending = self._account.pending = pending
        entry.busy_from_s = began if entry.busy_from_s is None else entry.busy_from_s
        if self._seals.is_sealed(entry.index):
            return
        pauses = self._context.pauses()
        is_there = pending.is_early and self._is_there(entry)  # an earlier attempt may have sent the contribution
        while not is_there:
            send_contribution(self._context, entry, pending, waited_s)
            is_there = self._is_there(entry)
            if is_there or self._seals.is_sealed(entry.index):
                break
            self._sealer.check_time(entry, None)
            self._context.wait(next(pauses), ())
        # A replica out of phase may have read a seal that does not exist, from damaged bytes. Then the next look sends
        # the work again.
        if is_there or not pending.is_early:
            entry.published, entry.published_s = True, clock()
        entry.move_s += clock() - began

    def handle_forgeries(self, entry: EntryState, seal: Seal | None, waited_s: float) -> None:
        """Report forged objects that block an entry of a signed run. Send the contribution again if its key is free.

        Args:
            entry: the open entry.
            seal: its seal. None: it has none, or it could not be read this time.
            waited_s: seconds that this replica waited for others in its last round.
        """
        context, store = self._context, self._context.store
        rank = context.me.rank
        began_s = entry.started_s if entry.began_s is None else entry.began_s
        good = {each: head for each, (head, _) in entry.seen.items()}
        context.standstill.look(entry.index, began_s, good, entry.blocked)
        key, pending = context.keys.contribution(entry.index, rank), entry.pending
        is_spoilt = rank not in entry.seen and store.count_misreads(key) > 0
        if seal is None and pending is not None and entry.published and is_spoilt and store.is_missing(key):
            # The user has deleted the forgery. Creating the object again is safe: the first one that exists counts.
            entry.misread.pop(rank, None)
            send_contribution(context, entry, pending, waited_s)

    def has_predecessor(self, entry: EntryState) -> bool:
        """Return True if an earlier attempt of this rank has sent the contribution to the open entry."""
        if self._is_there(entry) and entry.is_foreign:
            entry.published, entry.published_s = True, self._context.clock()
        return entry.published

    def _is_there(self, entry: EntryState) -> bool:
        """Return True if a contribution of this rank exists, from this process or from another one."""
        me = self._context.me
        if not self._sealer.look_at_contribution(entry, me.rank):
            return False
        seen = entry.seen.get(me.rank)
        entry.is_foreign = seen is not None and seen[0].nonce != me.nonce
        return True


# -- the account -------------------------------------------------------------------------------------------------------


class StepAccount:
    """The inner steps of this replica that no seal has counted yet, and the decisions of entries about them.

    The account belongs to the round runner. The training thread gets its changes with each `RoundResult`.

    Args:
        context: the services of the rendezvous.
        seals: the seals of the run.

    Example:
        account = StepAccount(context, SealLog(context))
        account.resolve_work(entry, seal, *account.verdict(entry, seal))
    """

    def __init__(self, context: Context, seals: SealLog) -> None:
        self._context = context
        self._me = context.me
        self._plan = context.plan
        self._training = context.training
        self._phase = context.phase
        self._seals = seals
        self.pending: PendingWork | None = None
        """The work that the training thread has handed over for the open entry."""
        self.uncounted_since = [0] * len(context.layouts)
        """For each fragment, the entry at which its uncounted work began."""
        self.resolved: list[ResolvedSteps] = []
        """The decisions that the training thread has not received yet."""

    def begin_at(self, position: int) -> None:
        """Set the beginning of the uncounted work of each fragment to its first entry from a position on.

        Args:
            position: the next entry to apply.
        """
        n = len(self.uncounted_since)
        self.uncounted_since = [self._next_entry(fragment, position) for fragment in range(n)]

    def take_resolved(self) -> tuple[ResolvedSteps, ...]:
        """Return the decisions since the last call."""
        resolved, self.resolved = self.resolved, []
        return tuple(resolved)

    def verdict(self, entry: EntryState, seal: Seal) -> tuple[Verdict, bool]:
        """Return the decision of an entry about the live work, and True if it concerns only the held part of that work.

        If it concerns only the held part, the steps that were made after the work was held are not affected.

        Args:
            entry: the entry.
            seal: its seal.
        """
        member, verdict = seal.replicas.get(self._me.rank), self._seals.verdict(seal)
        if verdict is Verdict.DROPPED:
            return verdict, entry.is_foreign
        if verdict is Verdict.KEPT and self._must_give_up(entry, seal):
            return Verdict.DROPPED, False
        is_early = entry.pending is not None and entry.pending.is_early
        return verdict, member is not None and is_early

    def resolve_work(self, entry: EntryState, verdict: Verdict, *, is_partly: bool) -> None:
        """Record which steps an entry has counted or dropped, and the entry at which the uncounted work now begins.

        Args:
            entry: the entry.
            verdict: the decision, as `StepAccount.verdict` returned it.
            is_partly: True if the decision concerns only the held work.
        """
        is_final = self._plan.is_final(entry.index)
        is_kept = verdict is Verdict.KEPT and (is_partly or self._training.carries)
        if is_kept and not is_final:
            return
        is_partly = is_partly or (verdict is Verdict.COUNTED and self._training.keeps_later_work)
        steps = entry.pending.steps if is_partly and entry.pending is not None else None
        self.resolved.append(ResolvedSteps(entry.fragment, None if is_final else steps))
        self.uncounted_since[entry.fragment] = entry.index + len(self.uncounted_since)

    def resolve_passed(self, first: int, end: int) -> list[Verdict | None]:
        """Return the decisions of passed entries about the live work of each fragment, and record the steps that they
        resolve.

        Args:
            first: the first of the passed entries.
            end: the entry after the last of them.
        """
        verdicts = self._seals.verdicts(first, end)
        for fragment, verdict in enumerate(verdicts):
            if verdict is not None and not (verdict is Verdict.KEPT and self._training.carries):
                is_part = fragment == self.counted_in_flight(verdicts)
                steps = self.pending.steps if is_part and self.pending is not None else None
                self.resolved.append(ResolvedSteps(fragment, steps))
                self.uncounted_since[fragment] = self._next_entry(fragment, end)
        return verdicts

    def counted_in_flight(self, verdicts: Sequence[Verdict | None]) -> int | None:
        """Return the fragment whose work in flight was counted, if later steps stay in its live parameters.

        None: no fragment.
        """
        if self.pending is None or not (self.pending.is_early or self._training.keeps_later_work):
            return None
        fragment = self.pending.entry % len(verdicts)
        return fragment if verdicts[fragment] is Verdict.COUNTED else None

    def give_up_old(self, verdicts: list[Verdict | None], progress: Any, position: int) -> list[Verdict | None]:
        """Drop restored work that has waited for the allowed number of rounds, and return the verdicts with these
        drops.

        Otherwise the restored work would be dropped later, together with the work that this process adds to it.

        Args:
            verdicts: the decisions of the passed entries about each fragment.
            progress: the restored work of each fragment.
            position: the next entry.
        """
        most, n_fragments = self._context.carry_rounds, len(verdicts)
        for fragment, since in enumerate(self.uncounted_since):
            waited = (position - since) // n_fragments
            if verdicts[fragment] is not Verdict.KEPT or most is None or waited < most:
                continue
            if progress[fragment].any():
                log.warning(
                    "Rank %s: the work of an earlier attempt is dropped because %s rounds ended before this replica "
                    "started again. You need not do anything.",
                    self._me.rank, waited,
                )  # fmt: skip
            verdicts[fragment] = Verdict.DROPPED
            self.resolved.append(ResolvedSteps(fragment, None))
            self.uncounted_since[fragment] = self._next_entry(fragment, position)
        return verdicts

    def reported_verdict(
        self, entry: EntryState, seal: Seal, verdict: Verdict
    ) -> tuple[Literal["counted", "carried", "dropped"], float]:
        """Return the verdict for the report of an entry, and the amount of this replica's work.

        Args:
            entry: the entry, whose mean was applied.
            seal: its seal.
            verdict: the decision, as `StepAccount.verdict` returned it.
        """
        pending = entry.pending
        work = 0.0 if pending is None else pending.work
        if self._seals.verdict(seal) is Verdict.COUNTED:
            return "dropped" if self._me.rank in entry.left_out else "counted", work
        if not callable(self._context.weight):
            work = (
                self._phase.uncounted_steps[entry.fragment]
                if pending is None or not entry.is_foreign
                else pending.steps
            )
        is_kept = verdict is Verdict.KEPT and self._training.carries and not self._plan.is_final(entry.index)
        return "carried" if is_kept else "dropped", work

    def _steps_left(self, fragment: int) -> int:
        """Return the number of steps in the live work that are not resolved yet."""
        steps = self._phase.uncounted_steps[fragment]
        for each in self.resolved:
            if each.fragment == fragment:
                steps = 0 if each.steps is None else steps - each.steps
        return steps

    def _next_entry(self, fragment: int, position: int) -> int:
        return position + (fragment - position) % len(self.uncounted_since)

    def _must_give_up(self, entry: EntryState, seal: Seal) -> bool:
        """Return True if this entry does not count work that has already waited for the allowed number of rounds."""
        most = self._context.carry_rounds
        waited = (entry.index - self.uncounted_since[entry.fragment]) // len(self.uncounted_since)
        steps = self._steps_left(entry.fragment)
        if most is None or waited < most or not steps:
            return False
        rounds = f"{waited} rounds" if waited > 1 else "1 round"
        log.warning(
            "Rank %s: %s inner step%s dropped because no mean of %s counted it: %s",
            self._me.rank, steps, "s are" if steps > 1 else " is", rounds, self._why_uncounted(entry, seal),
        )  # fmt: skip
        return True

    def _why_uncounted(self, entry: EntryState, seal: Seal) -> str:
        """Return why rounds did not count the work of this replica, and the remedy."""
        mine, theirs = self._phase.phase_s, seal.phase_s
        # If no step of this process was counted, it has not taken part in a round since it began.
        if self._me.attempt and self._phase.n_steps <= self._phase.uncounted_steps[entry.fragment]:
            return "this replica was starting while the others continued. You need not do anything."
        if mine >= NOTABLY_SLOWER * theirs > 0:
            advice = "round_seconds" if self._plan.entry_s is None else "longer round_seconds"
            return f"its steps take {mine / theirs:.1f} times as long as a round allows. Use {advice}, or more grace_s."
        return "they arrived after the round was decided. Use a larger grace_s to wait for them."
