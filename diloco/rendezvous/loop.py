"""One entry after another, as in the paper: pseudo-gradient, agreement, mean, outer step.

The loop is level-triggered: look at what exists, do the next idempotent thing that is missing, wait. It may die between
any two store calls, and a second copy of it may run at the same time. When an entry is due is `participant.py`'s
business; what to do when this replica's state is not the log's, `restore.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import hypot
from typing import Literal

from diloco.rendezvous.contribution import check_weight, send
from diloco.rendezvous.frames import Seal
from diloco.rendezvous.keys import folder_of
from diloco.rendezvous.mean import Reducer
from diloco.rendezvous.restore import Cursor
from diloco.rendezvous.round import MOST_PAUSE_S, Context, EntryState, RoundReport
from diloco.rendezvous.seal import Sealer, SealLog
from diloco.rendezvous.snapshot import SnapshotWriter
from diloco.rendezvous.training_state import Part, Verdict


class Rendezvous:
    """Publishes, seals, reduces and adopts the entries of the log in their order."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store
        self._keys = context.keys
        self._me = context.me
        self._training = context.training
        self._phase = context.phase
        self.seals = SealLog(context)
        self.reducer = Reducer(context)
        self.sealer = Sealer(context, reload=lambda: self.cursor.reload())
        self.cursor = Cursor(context, self.seals, self.reducer, self.sealer)
        self._writer = SnapshotWriter(context)
        self.entry: EntryState | None = None
        """What is known of the open entry; may be of an earlier one."""
        self._waited_s = 0.0
        """How long this replica waited for others in its last round."""
        self._work_per_step = 1.0
        """By the last answer of a callable weight."""

    # -- the pseudo-gradient: anchor - live --------------------------------------------------------------------------

    def publish(self, *, early: bool = False) -> None:
        """Send the pseudo-gradient of the fragment whose turn it is, unless its entry is decided already.

        Args:
            early: in the midst of a phase, weighed by the steps it is made of.

        Raises:
            ContributionError: it is not finite, or a parameter has changed its shape.
        """
        entry = self.current()
        if entry.published or self.seals.is_sealed(entry.index):
            return
        began = self._context.clock()
        if entry.packed is None:  # else what could not be sent before is sent again
            self._weigh(entry, early=early)
        pauses = self._context.pauses()
        is_there = early and self._is_there(entry)  # of an earlier attempt, perhaps
        while not is_there:
            send(self._context, entry, self._waited_s)
            is_there = self._is_there(entry)
            if is_there or self.seals.is_sealed(entry.index):
                break
            self.sealer.check_time(entry)
            self._context.wait(next(pauses), ())
        if is_there or not early:  # else the seal may only seem to exist: look again after the next step
            entry.published, entry.published_s = True, self._context.clock()
        entry.move_s += self._context.clock() - began

    def _weigh(self, entry: EntryState, *, early: bool) -> None:
        """Note what the work that is to be sent weighs, and of how many steps it is made."""
        if early:
            weight = self._early_weight(entry)
        else:
            weight = check_weight(self._context.weight, self._me.rank, entry.index)
        entry.weight, entry.is_early = weight, early
        entry.sent_steps = self._phase.made[entry.fragment] if weight else 0
        entry.work = entry.sent_steps
        if callable(self._context.weight) and entry.sent_steps:
            entry.work, self._work_per_step = weight, weight / entry.sent_steps

    def _early_weight(self, entry: EntryState) -> float:
        """Weigh work of fewer steps than a phase has; 0 where there is none, or its number of steps is not known."""
        steps, weight = self._phase.made[entry.fragment], self._context.weight
        if not steps or self._phase.is_restored[entry.fragment]:
            return 0.0
        if callable(weight):
            return check_weight(weight, self._me.rank, entry.index, may_be_zero=True)
        return check_weight(weight, self._me.rank, entry.index) * min(1.0, steps / self._context.plan.inner_steps)

    def _is_there(self, entry: EntryState) -> bool:
        """Return whether this rank's contribution exists; keep what there is of work when another process's does."""
        if not self.sealer.look_at_contribution(entry, self._me.rank):
            return False
        seen = entry.seen.get(self._me.rank)
        if seen is not None and seen[0].nonce != self._me.nonce and entry.foreign is None:
            entry.foreign = self._training.work(entry.index)
            entry.foreign_steps = self._phase.made[entry.fragment]
        return True

    def note_predecessor(self) -> None:
        """Where an earlier attempt's contribution to the open entry exists, it is this rank's: keep later work."""
        entry = self.current()
        if self._is_there(entry) and entry.foreign is not None:
            entry.published, entry.published_s = True, self._context.clock()

    # -- the agreement on whose counts, and their mean ---------------------------------------------------------------

    def adopt(self) -> RoundReport | None:
        """Wait until the next entry is sealed and its mean exists, helping both along, and apply it.

        Returns: None when the entry was jumped over: what it needs is no longer there, but a newer snapshot is.
        """
        clock, entry = self._context.clock, self.current()
        entry.started_s = began = clock()
        entry.began_s = began if entry.began_s is None else entry.began_s
        waited_before, reduced_before = entry.wait_s, entry.reduce_s
        pauses = self._context.pauses()
        while True:
            seal = self.seals.seal(entry.index)
            if seal is None:
                self._context.members.check_abort()
                if self.sealer.try_seal(entry, self.reducer.takeover_after_s):
                    seal = self.seals.seal(entry.index)
            if seal is not None and self.position == entry.index:
                mean = self.reducer.collect(entry, seal)
                if mean is not None:
                    self.cursor.check_anchor(entry, seal)
                    if self.position != entry.index:
                        return None
                    waited_s, reduced_s = entry.wait_s - waited_before, entry.reduce_s - reduced_before
                    entry.move_s += clock() - began - waited_s - reduced_s
                    return self._apply(entry, seal, mean)
                self._context.members.check_abort()
            if self.position != entry.index:
                return None
            if self.cursor.is_blocked(entry) and self.cursor.reload(above=entry.index):
                return None
            self.sealer.check_time(entry)
            paused = clock()
            pause_s = max(next(pauses), min(self._store.answer_s, MOST_PAUSE_S))  # a far store is not asked on and on
            if seal is not None:
                awaited = [self._keys.mean(entry.index, 0)]
            else:
                awaited = [self._keys.seal(entry.index)]
                awaited += [self._keys.contribution(entry.index, 0)] if entry.looks else []
            self._context.wait(pause_s, [folder_of(key) for key in awaited])
            entry.wait_s += clock() - paused

    def adopt_sealed(self) -> list[RoundReport]:
        """Adopt every entry that is sealed already."""
        reports = []
        while self.cursor.unsealed != self.position and self.seals.is_sealed(self.position):
            if (report := self.adopt()) is not None:
                reports.append(report)
        self.cursor.unsealed = -1
        return reports

    # -- the outer step ----------------------------------------------------------------------------------------------

    def _apply(self, entry: EntryState, seal: Seal, mean: Sequence[memoryview]) -> RoundReport:
        verdict, part = self._verdict(entry, seal)
        began = self._context.clock()
        mean_norm = self.reducer.norm(entry, mean)  # before the step: the mean may be in memory that it uses
        self._writer.before_step(entry.index, seal)
        self._training.apply(entry.index, mean, verdict, part)
        ended = self._context.clock()
        fate, work = self._fate(entry, seal)
        self._count_steps(entry, verdict, part)
        self._context.members.seal = seal
        self.cursor.position = entry.index + 1
        self.entry = None
        if entry.published:
            self._store.remove(self._keys.contribution(entry.index, self._me.rank))
        self.cursor.check_next_seal(entry)
        # How far apart replicas arrive that came from one phase, less a known head start.
        self._waited_s = 0.0 if self._phase.is_out else max(0.0, entry.wait_s - self._phase.head_start_s)
        if not self._phase.is_out:
            self.sealer.learn(entry, self._waited_s)
        is_counted = self.seals.verdict(seal) is Verdict.COUNTED
        return RoundReport(
            round=entry.index + 1,
            fragment=entry.fragment,
            ranks=tuple(rank for rank in seal.inputs if rank not in entry.left_out),
            counted=is_counted,
            verdict=fate,
            work=work,
            same=next((group for group in seal.same if is_counted and self._me.rank in group), ()),
            bytes_up=self._store.written_bytes - entry.written_before,
            bytes_down=self._store.read_bytes - entry.read_before,
            wait_s=entry.wait_s,
            move_s=entry.move_s,
            reduce_s=entry.reduce_s,
            step_s=ended - began,
            train_s=self._phase.tell_trained_s(),
            norm=None if entry.packed is None else hypot(*entry.packed.norms),
            mean_norm=mean_norm,
            ended=ended,
        )

    def _fate(self, entry: EntryState, seal: Seal) -> tuple[Literal["counted", "carried", "dropped"], float]:
        """Return what became of this replica's work, and how much that is."""
        verdict, work = self.seals.verdict(seal), entry.work
        if verdict is Verdict.COUNTED:
            return "dropped" if self._me.rank in entry.left_out else "counted", work
        if not callable(self._context.weight):
            work = self._phase.made[entry.fragment] if entry.foreign is None else entry.foreign_steps
        is_kept = verdict is Verdict.KEPT and self._training.carries and not self._context.plan.is_final(entry.index)
        return "carried" if is_kept else "dropped", work

    def _verdict(self, entry: EntryState, seal: Seal) -> tuple[Verdict, Part | None]:
        """Return what became of the live work, and of which part of it; None: of all.

        After something was sent early, steps were made that are still this replica's own; and so is what the wire has
        left out. Where it is not known what was counted, all is dropped: nothing may count twice.
        """
        member = seal.members.get(self._me.rank)
        verdict = self.seals.verdict(seal)
        if verdict is Verdict.DROPPED:
            return verdict, entry.foreign
        if member is not None and not member.weight:
            return Verdict.COUNTED, Part(entry.layout.wire)
        if member is None or (entry.layout.wire.is_exact and not entry.is_early):
            return verdict, None
        if entry.packed is None or member.digest not in entry.sent:
            return Verdict.DROPPED, None
        return verdict, Part(entry.layout.wire, [entry.packed.kept])

    def _count_steps(self, entry: EntryState, verdict: Verdict, part: Part | None) -> None:
        """Keep account of how many steps the live work is made of."""
        f, made, is_restored = entry.fragment, self._phase.made, self._phase.is_restored
        is_kept = verdict is Verdict.KEPT and self._training.carries
        if self._context.plan.is_final(entry.index) or (part is None and not is_kept):
            made[f], is_restored[f] = 0, False
        elif part is not None and verdict is Verdict.COUNTED:
            made[f] -= entry.sent_steps
        elif part is not None:
            made[f], is_restored[f] = made[f] - entry.foreign_steps, False

    # -- where it is -------------------------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The next entry to apply."""
        return self.cursor.position

    def current(self) -> EntryState:
        """Return what is known of the open entry."""
        if self.entry is None or self.entry.index != self.position:
            self.entry = EntryState.begin(self._context, self.position)
        return self.entry

    @property
    def undecided(self) -> float:
        """How much work no seal has decided on, in the unit of `RoundReport.work`: the mean over all fragments."""
        made = self._phase.made
        return sum(made) / len(made) * self._work_per_step

    @property
    def in_flight(self) -> bool:
        """Whether something was sent in phase whose round was not applied yet."""
        entry = self.entry
        if entry is None or entry.index != self.position:
            return False
        return entry.published and not entry.is_early and entry.foreign is None
