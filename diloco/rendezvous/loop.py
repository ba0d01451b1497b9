"""One entry after another, as in the paper: pseudo-gradient, agreement, mean, outer step.

The loop is level-triggered: look at what exists, do the next idempotent thing that is missing, wait. It may die between
any two store calls, and a second copy of it may run at the same time. When an entry is due is `participant.py`'s
business; what to do when this replica's state is not the log's, `restore.py`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from math import hypot
from typing import Literal

from diloco.rendezvous.contribution import send_contribution
from diloco.rendezvous.end import end_with
from diloco.rendezvous.frames import Seal
from diloco.rendezvous.keys import folder_of
from diloco.rendezvous.mean import Reducer
from diloco.rendezvous.restore import Cursor
from diloco.rendezvous.round import MOST_PAUSE_S, Context, EntryState, RoundReport, Send, Settlement
from diloco.rendezvous.seal import Sealer, SealLog
from diloco.rendezvous.snapshot import SnapshotWriter
from diloco.rendezvous.training_state import Verdict

log = logging.getLogger(__name__)

NOTABLY_SLOWER = 1.1


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

    # -- the pseudo-gradient: anchor - live --------------------------------------------------------------------------

    def publish(self, send: Send) -> None:
        """Send the pseudo-gradient that is held of the open entry's fragment, unless the entry is decided already.

        Raises:
            ContributionError: it is not finite, or a parameter has changed its shape.
        """
        entry = self.current()
        if entry.published or send.entry != entry.index:
            return
        began = self._context.clock()
        entry.send = self.cursor.handed = send
        entry.busy_from_s = began if entry.busy_from_s is None else entry.busy_from_s
        if self.seals.is_sealed(entry.index):
            return
        pauses = self._context.pauses()
        is_there = send.is_early and self._is_there(entry)  # of an earlier attempt, perhaps
        while not is_there:
            send_contribution(self._context, entry, send, self._waited_s)
            is_there = self._is_there(entry)
            if is_there or self.seals.is_sealed(entry.index):
                break
            self.sealer.check_time(entry)
            self._context.wait(next(pauses), ())
        if is_there or not send.is_early:  # else the seal may only seem to exist: look again after the next step
            entry.published, entry.published_s = True, self._context.clock()
        entry.move_s += self._context.clock() - began

    def _is_there(self, entry: EntryState) -> bool:
        """Return whether this rank's contribution exists, this process's or another's."""
        if not self.sealer.look_at_contribution(entry, self._me.rank):
            return False
        seen = entry.seen.get(self._me.rank)
        entry.is_foreign = seen is not None and seen[0].nonce != self._me.nonce
        return True

    def has_predecessor(self) -> bool:
        """Return whether an earlier attempt's contribution to the open entry exists: it is this rank's then."""
        entry = self.current()
        if self._is_there(entry) and entry.is_foreign:
            entry.published, entry.published_s = True, self._context.clock()
        return entry.published

    # -- the agreement on whose counts, and their mean ---------------------------------------------------------------

    def adopt(self) -> RoundReport | None:
        """Wait until the next entry is sealed and its mean exists, helping both along, and apply it.

        Returns: None when the entry was jumped over: what it needs is no longer there, but a newer snapshot is.
        """
        report = self._adopt()
        self._context.standstill.end()  # an error that ends the wait leaves it, for the outcome
        return report

    def _adopt(self) -> RoundReport | None:
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
            if self.cursor.is_stuck(entry, seal) and self.cursor.reload(above=entry.index):
                return None
            self._look_for_forgeries(entry, seal)
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

    def _look_for_forgeries(self, entry: EntryState, seal: Seal | None) -> None:
        """Report the objects that hold an entry of a signed run up, and send a contribution again that had no place."""
        if not self._context.proof.is_signed:
            return
        began_s = entry.started_s if entry.began_s is None else entry.began_s
        good = {rank: head for rank, (head, _) in entry.seen.items()}
        self._context.standstill.look(entry.index, began_s, good, entry.blocked)
        key, send = self._keys.contribution(entry.index, self._me.rank), entry.send
        is_spoilt = self._me.rank not in entry.seen and self._store.bad_readings(key) > 0
        if seal is None and send is not None and entry.published and is_spoilt and self._store.is_missing(key):
            # The user has deleted the forgery. Creating the object again is safe: the first one that exists counts.
            entry.misread.pop(self._me.rank, None)
            send_contribution(self._context, entry, send, self._waited_s)

    def adopt_sealed(self, reports: list[RoundReport]) -> None:
        """Adopt every entry that is sealed already, and add what each was."""
        while self.cursor.unsealed != self.position and self.seals.is_sealed(self.position):
            if (report := self.adopt()) is not None:
                reports.append(report)
        self.cursor.unsealed = -1

    # -- the outer step ----------------------------------------------------------------------------------------------

    def _apply(self, entry: EntryState, seal: Seal, mean: Sequence[memoryview]) -> RoundReport:
        context = self._context
        end_with(seal, entry.index, context.plan, self._store, self._keys, context.proof)
        verdict, is_partly = self._verdict(entry, seal)
        began = context.clock()
        self._writer.before_step(entry.index, seal)
        applied = self._training.apply(entry.index, mean, verdict, entry.packed, partly=is_partly)
        ended = self._context.clock()
        self._settle(entry, verdict, is_partly=is_partly)
        self._context.members.seal = seal
        self.cursor.position, self.cursor.handed = entry.index + 1, None
        self.entry = None
        if entry.published:
            self._store.remove(self._keys.contribution(entry.index, self._me.rank))
        self.cursor.check_next_seal(entry)
        # How far apart replicas arrive that came from one phase, less a known head start.
        self._waited_s = 0.0 if self._phase.is_out else max(0.0, entry.wait_s - self._phase.head_start_s)
        if not self._phase.is_out:
            self.sealer.learn(entry, self._waited_s)
        is_counted = self.seals.verdict(seal) is Verdict.COUNTED
        fate, work = self._fate(entry, seal, verdict)
        return RoundReport(
            round=entry.index + 1,
            fragment=entry.fragment,
            ranks=tuple(rank for rank in seal.inputs if rank not in entry.left_out),
            counted=is_counted,
            verdict=fate,
            work=work,
            same=next((group for group in seal.same if is_counted and self._me.rank in group), ()),
            elements=entry.layout.n_elements,
            wire=entry.layout.wire.name,
            mean_wire=entry.layout.mean_wire.name,
            bytes_up=self._store.written_bytes - entry.written_before,
            bytes_down=self._store.read_bytes - entry.read_before,
            wait_s=entry.wait_s,
            move_s=entry.move_s,
            reduce_s=entry.reduce_s,
            step_s=ended - began,
            train_s=0.0,
            norm=None if entry.packed is None else hypot(*entry.packed.norms),
            mean_norm=applied.mean_norm,
            ended=ended,
            busy_s=self._context.clock() - (entry.started_s if entry.busy_from_s is None else entry.busy_from_s),
            wire_error=applied.wire_error,
        )

    def _fate(
        self, entry: EntryState, seal: Seal, verdict: Verdict
    ) -> tuple[Literal["counted", "carried", "dropped"], float]:
        """Return what became of this replica's work, and how much that is."""
        send = entry.send
        work = 0.0 if send is None else send.work
        if self.seals.verdict(seal) is Verdict.COUNTED:
            return "dropped" if self._me.rank in entry.left_out else "counted", work
        if not callable(self._context.weight):
            work = self._phase.made[entry.fragment] if send is None or not entry.is_foreign else send.steps
        is_kept = verdict is Verdict.KEPT and self._training.carries and not self._context.plan.is_final(entry.index)
        return "carried" if is_kept else "dropped", work

    def _verdict(self, entry: EntryState, seal: Seal) -> tuple[Verdict, bool]:
        """Return what became of the live work, and whether only of what was held of it: steps were made since."""
        member, verdict = seal.members.get(self._me.rank), self.seals.verdict(seal)
        if verdict is Verdict.DROPPED:
            return verdict, entry.is_foreign
        if verdict is Verdict.KEPT and self._is_to_give_up(entry, seal):
            return Verdict.DROPPED, False
        is_early = entry.send is not None and entry.send.is_early
        return verdict, member is not None and is_early

    def _settle(self, entry: EntryState, verdict: Verdict, *, is_partly: bool) -> None:
        """Note what this entry means for the account of steps, and since when there is uncounted work."""
        is_kept = verdict is Verdict.KEPT and (is_partly or self._training.carries)
        if is_kept and not self._context.plan.is_final(entry.index):
            return
        is_partly = is_partly or (verdict is Verdict.COUNTED and self._training.keeps_later_work)
        steps = entry.send.steps if is_partly and entry.send is not None else None
        if self._context.plan.is_final(entry.index):
            steps = None
        self.cursor.settlements.append(Settlement(entry.fragment, steps))
        self.cursor.uncounted_since[entry.fragment] = entry.index + len(self._context.layouts)

    def _is_to_give_up(self, entry: EntryState, seal: Seal) -> bool:
        """Return True if this round does not count work that has already waited for the allowed number of rounds."""
        most, n_fragments = self._context.carry_rounds, len(self._context.layouts)
        waited = (entry.index - self.cursor.uncounted_since[entry.fragment]) // n_fragments
        steps = self.cursor.steps_left(entry.fragment)
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
        mine, theirs = self._phase.seconds, seal.phase_s
        # Every step of this process is still uncounted: it has not met the others since it began.
        if self._me.attempt and self._phase.n_steps <= self._phase.made[entry.fragment]:
            return "this replica was starting while the others continued. You need not do anything."
        if mine >= NOTABLY_SLOWER * theirs > 0:
            advice = "round_seconds" if self._context.plan.entry_s is None else "longer round_seconds"
            return f"its steps take {mine / theirs:.1f} times as long as a round allows. Use {advice}, or more grace_s."
        return "they arrived after the round was decided. Use a larger grace_s to wait for them."

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
    def in_flight(self) -> bool:
        """Whether something was sent in phase whose round was not applied yet."""
        entry = self.entry
        if entry is None or entry.index != self.position or entry.send is None:
            return False
        return entry.published and not entry.send.is_early and not entry.is_foreign
