"""Runs the rounds of one replica: sends held work, helps to decide the round, and applies the mean to the anchor.

An entry goes through four stages: contribution, seal, mean and outer step. The runner reacts to states and not to
events: it looks which objects exist, makes the next missing one, and waits. Each of these actions may be repeated
safely. So the runner may die between any two calls of the store, and a second copy of it may run at the same time.

The runner owns the anchor, the outer state, the position in the log, and every call of the store. It may run in a
thread of its own while training continues (`training_side.py` hands it jobs). It reads no live parameter except held
work. A job ends with a `RoundResult`. The runner then changes nothing until the training thread has merged that result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from math import hypot

from diloco.rendezvous.contribution import ContributionSender, StepAccount
from diloco.rendezvous.early_end import apply_sealed_end
from diloco.rendezvous.frames import Seal
from diloco.rendezvous.keys import watch_prefix
from diloco.rendezvous.mean import Reducer
from diloco.rendezvous.restore import LogReplayer
from diloco.rendezvous.round import MOST_PAUSE_S, Context, EntryState, PendingWork, RoundReport, RoundResult
from diloco.rendezvous.seal import Sealer, SealingResult, SealLog
from diloco.rendezvous.snapshot import SnapshotWriter
from diloco.rendezvous.training_state import ApplyStats, Verdict

LOOK_S, ANSWERS_PER_LOOK = 1.0, 40
"""A replica out of phase looks for the seal at intervals of 40 times the store's answer time, and at least once a
second.
"""


class RoundRunner:
    """Runs the rounds of a replica, one job at a time.

    Args:
        context: the services of the rendezvous.
        merge_ready: is called with the result of each job, which the training thread then merges.

    Example:
        runner = RoundRunner(context, merge_ready=results.append)
        runner.replayer.begin()
        runner.run_round(pending)
    """

    def __init__(self, context: Context, merge_ready: Callable[[RoundResult], None]) -> None:
        self._context = context
        self._store = context.store
        self._keys = context.keys
        self._me = context.me
        self._members = context.members
        self._training = context.training
        self._phase = context.phase
        self._merge_ready = merge_ready
        # The parts of the rendezvous. Each part gets the earlier ones as arguments.
        self.seals = SealLog(context)
        self.reducer = Reducer(context)
        self.sealer = Sealer(context, self.seals)
        self.account = StepAccount(context, self.seals)
        self.sender = ContributionSender(context, self.seals, self.sealer, self.account)
        self.replayer = LogReplayer(context, self.seals, self.reducer, self.sealer, self.account)
        self._writer = SnapshotWriter(context)
        self.poll = SealPoll(context)
        self.entry: EntryState | None = None
        """The state of the open entry. It may belong to an earlier entry; `current` returns the right one."""
        self.known_open_entry = -1
        """The entry that had no seal at the last look."""
        self.n_results = 0
        """The number of results so far."""
        self._waited_s = 0.0
        """Seconds that this replica waited for others in its last round."""

    @property
    def position(self) -> int:
        """The next entry to apply."""
        return self.replayer.position

    def go_back(self, position: int) -> None:
        """Continue from an earlier position, whose training state was loaded.

        Args:
            position: the next entry.
        """
        self.poll.stop()
        self.entry = None
        self.replayer.go_back(position)

    # -- jobs in phase -----------------------------------------------------------------------------------------------

    def publish(self, pending: PendingWork) -> None:
        """Send held work before its round is due, and wait for nothing.

        Args:
            pending: the held work.

        Raises:
            ContributionError: the work is not finite, or a parameter has changed its shape.
        """
        self.sender.send(self.current(), pending, self._waited_s)

    def run_round(self, pending: PendingWork | None, n_merged: int | None = None) -> None:
        """Run the round of the open entry, and then apply all entries that are sealed already.

        Args:
            pending: the held work, unless it was sent before.
            n_merged: the number of results that the training thread had merged when it queued the job. If a replica out
                of phase has a newer result by now, the job does nothing, because that result must be merged first.
        """
        if n_merged is not None and n_merged != self.n_results:
            return
        self._members.check_fence()
        with self._result(has_met=True) as reports:
            if pending is not None:
                self.sender.send(self.current(), pending, self._waited_s)
            if (found := self._wait_for_mean()) is not None:
                reports.append(self._apply(*found))
            self._apply_sealed(reports)

    def has_predecessor(self) -> bool:
        """Return True if an earlier attempt of this rank has sent the contribution to the open entry."""
        return self.sender.has_predecessor(self.current())

    @property
    def in_flight(self) -> bool:
        """True if this replica sent work in phase, and the round of that work was not applied yet."""
        entry = self.entry
        if entry is None or entry.index != self.position or entry.pending is None:
            return False
        return entry.published and not entry.pending.is_early and not entry.is_foreign

    # -- jobs out of phase -------------------------------------------------------------------------------------------

    def contribute_early(self, pending: PendingWork) -> None:
        """Send the work of an unfinished phase to the open entry. From then on, look for the seal of that entry.

        Args:
            pending: the held work.
        """
        self.poll.start()
        self.publish(pending)
        self.catch_up()

    def catch_up(self, *, has_met: bool = False, n_merged: int | None = None) -> bool:
        """Apply every entry that has a seal, without waiting for other replicas. Return True if there is a result.

        Args:
            has_met: True if all inner steps of the phase are made. A replica that begins has no steps to make, so it
                passes True.
            n_merged: the number of results that the training thread had merged when it queued the job. If there is a
                newer result by now, the job does nothing. None: the job applies the entries in any case.
        """
        if n_merged is not None and n_merged != self.n_results:
            return False
        with self._result(has_met=has_met) as reports:
            self._apply_sealed(reports)
        return not self.poll.is_on

    def idle(self) -> bool:
        """Look for the seal once while there is no job. Return True if the runner must look again."""
        if self.poll.is_on:
            self._context.wait(self.poll.pause_s, ())
            self.look()
        return self.poll.is_on

    def look(self) -> bool:
        """Look for the seal of the open entry if it is time to do so. Return True if there is a result."""
        entry = self.current()
        found = self.poll.ask(lambda: (self.seals.is_sealed(entry.index), self._members.is_behind()))
        if found is None:
            return False
        if found.is_sealed:
            return self.catch_up()
        self.poll.note(found.began_s, found.at_step)
        self._members.check_abort()
        # Either this replica is in phase again, or it did not send its work because it misread damaged bytes as a seal.
        if not found.is_behind or not entry.published:
            self._prepare_result([], 0, is_out_of_phase=found.is_behind)
            return True
        waited_s = 0.0 if entry.published_s is None else found.asked_s - entry.published_s
        if entry.published_s is not None and waited_s >= self.sealer.unobserved_wait_s:
            sealing = self.sealer.try_seal(entry, self.reducer.takeover_after_s)
            if sealing is SealingResult.OUTVOTED:
                self.replayer.reload()
            if sealing is not SealingResult.OPEN:
                return self.catch_up()
            self.sealer.check_time(entry, None)
        return False

    # -- one entry ---------------------------------------------------------------------------------------------------

    def current(self) -> EntryState:
        """Return the state of the open entry."""
        if self.entry is None or self.entry.index != self.position:
            self.entry = EntryState.begin(self._context, self.position)
        return self.entry

    def _wait_for_mean(self) -> tuple[EntryState, Seal, Sequence[memoryview]] | None:
        """Wait until the open entry is sealed and its mean exists. This replica also creates the seal and its shards of
        the mean when it is its turn.

        Returns:
            The entry, its seal and its mean. None if a newer snapshot was loaded instead, so that the entry was passed.
        """
        context, clock, entry = self._context, self._context.clock, self.current()
        entry.started_s = began = clock()
        entry.began_s = began if entry.began_s is None else entry.began_s
        waited_before, reduced_before = entry.wait_s, entry.reduce_s
        pauses = context.pauses()
        found: tuple[EntryState, Seal, Sequence[memoryview]] | None = None
        while True:
            seal = self.seals.seal(entry.index)
            if seal is None:
                self._members.check_abort()
                sealing = self.sealer.try_seal(entry, self.reducer.takeover_after_s)
                if sealing is SealingResult.OUTVOTED:
                    self.replayer.reload()
                # another replica may have created the seal first, so the stored seal is read
                if sealing is not SealingResult.OPEN:
                    seal = self.seals.seal(entry.index)
            if seal is not None and self.position == entry.index:
                # A small mean is in the seal. The parts of a large one are collected.
                mean: Sequence[memoryview] | None = seal.whole_mean
                if mean is None:
                    mean = self.reducer.collect(entry, seal)
                if mean is not None:
                    self._check_anchor(entry, seal)
                    if self.position == entry.index:
                        waited_s, reduced_s = entry.wait_s - waited_before, entry.reduce_s - reduced_before
                        entry.move_s += clock() - began - waited_s - reduced_s
                        found = entry, seal, mean
                    break
                self._members.check_abort()
            if self.position != entry.index or (
                self.sealer.is_stuck(entry, seal) and self.replayer.reload(above=entry.index)
            ):
                break
            if context.proof.is_signed:
                self.sender.handle_forgeries(entry, seal, self._waited_s)
            self.sealer.check_time(entry, seal)
            paused = clock()
            pause_s = max(next(pauses), min(self._store.answer_s, MOST_PAUSE_S))  # a slow store is asked less often
            if seal is not None:
                awaited = [self._keys.mean(entry.index, 0)]
            else:
                awaited = [self._keys.seal(entry.index)]
                awaited += [self._keys.contribution(entry.index, 0)] if entry.looks else []
            context.wait(pause_s, [watch_prefix(key) for key in awaited])
            entry.wait_s += clock() - paused
        # If an error ends the wait, the report of the standstill stays, so that the outcome of the attempt names it.
        if context.standstill.found is not None:
            context.standstill.end()
        return found

    def _check_anchor(self, entry: EntryState, seal: Seal) -> None:
        """Load the state from the log if the anchor differs from the anchor that a seal names."""
        if self._training.digest(entry.fragment) == seal.anchor:
            self.replayer.n_diverged = 0
        else:
            self.replayer.reload_diverged(entry, seal)

    def _apply_sealed(self, reports: list[RoundReport]) -> None:
        """Apply every entry that is sealed already, and add the report of each."""
        while self.known_open_entry != self.position and self.seals.is_sealed(self.position):
            if (found := self._wait_for_mean()) is not None:
                reports.append(self._apply(*found))
        self.known_open_entry = -1

    def _apply(self, entry: EntryState, seal: Seal, mean: Sequence[memoryview]) -> RoundReport:
        """Step the anchor by the mean of the open entry, and move on to the next entry."""
        context = self._context
        # This call comes before the outer step. It may end the plan at this entry, and the outer step of a last round
        # is a plain average.
        if seal.stops:
            apply_sealed_end(seal, entry.index, context.plan, self._store, self._keys, context.proof)
        verdict, is_partly = self.account.verdict(entry, seal)
        began = context.clock()
        if self._writer.copy is not None or entry.index % context.snapshot_every == 0:
            self._writer.before_step(entry.index, seal)
        applied = self._training.apply(entry.index, mean, verdict, entry.packed, partly=is_partly)
        ended = context.clock()
        self.account.resolve_work(entry, verdict, is_partly=is_partly)
        self._members.seal = seal
        self.replayer.position, self.account.pending = entry.index + 1, None
        self.entry = None
        if entry.published and entry.layout.stores_mean:  # otherwise a replica that is behind computes the mean from it
            self._store.remove(self._keys.contribution(entry.index, self._me.rank))
        self._check_next_seal(entry)
        # The next contribution reports how far apart replicas arrive. So the wait counts only after a phase that all
        # replicas began together, and minus a known head start.
        self._waited_s = 0.0 if self._phase.is_out_of_phase else max(0.0, entry.wait_s - self._phase.head_start_s)
        if not self._phase.is_out_of_phase:
            self.sealer.learn(entry, self._waited_s)
        return self._report(entry, seal, verdict, applied, (began, ended))

    def _check_next_seal(self, entry: EntryState) -> None:
        """Load the state from the log again if the fragment's next seal names a different anchor."""
        following = entry.index + len(self._context.layouts)
        seal = self.seals.seal(following)
        if seal is None and not self.seals.misread(following):
            self.known_open_entry = following
        elif seal is not None and seal.anchor != self._training.digest(entry.fragment):
            self.replayer.reload()

    def _report(
        self, entry: EntryState, seal: Seal, verdict: Verdict, applied: ApplyStats, step: tuple[float, float]
    ) -> RoundReport:
        """Return the report of an entry that was applied.

        Args:
            step: the times at which the outer step began and ended.
        """
        is_counted = self.seals.verdict(seal) is Verdict.COUNTED
        reported, work = self.account.reported_verdict(entry, seal, verdict)
        began, ended = step
        return RoundReport(
            round=entry.index + 1,
            fragment=entry.fragment,
            ranks=tuple(rank for rank in seal.inputs if rank not in entry.left_out),
            counted=is_counted,
            verdict=reported,
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
            clipped=tuple(sorted({*seal.clipped, *entry.clipped})),
        )

    # -- the result --------------------------------------------------------------------------------------------------

    @contextmanager
    def _result(self, *, has_met: bool) -> Iterator[list[RoundReport]]:
        """Prepare a result of the entries that are applied inside the block, even if an error ends the block.

        Args:
            has_met: True if all inner steps of the phase are made.
        """
        before = self.position
        reports: list[RoundReport] = []
        try:
            yield reports
        except BaseException:
            if self.position != before:
                is_out = self._phase.is_out_of_phase
                self._prepare_result(reports, self.position - before, is_out_of_phase=is_out, has_met=has_met)
            raise
        if has_met or self.position != before or self.replayer.is_reloaded:
            is_out = not self._context.plan.is_over(self.position) and self._members.is_behind()
            self._prepare_result(reports, self.position - before, is_out_of_phase=is_out, has_met=has_met)

    def _prepare_result(
        self, reports: list[RoundReport], n_entries: int, *, is_out_of_phase: bool, has_met: bool = False
    ) -> None:
        """Copy the values to merge to the device of the live parameters, and hand the result over."""
        phase, account, replayer = self._phase, self.account, self.replayer
        if has_met:
            phase.head_start_s = 0.0
        elif n_entries:
            phase.head_start_s = max(0.0, self._context.clock() - phase.ahead_from_s)
        phase.is_out_of_phase = is_out_of_phase
        resolved = account.take_resolved()
        is_plain = has_met and n_entries == 1 and len(resolved) == 1
        result = RoundResult(
            reports=tuple(reports),
            resolved=resolved,
            n_entries=n_entries,
            is_out_of_phase=is_out_of_phase,
            has_met=has_met,
            looked_step=phase.looked_step,
            looked_s=phase.looked_s,
            ready_s=self._context.clock(),
            is_urgent=is_out_of_phase or replayer.is_reloaded or not is_plain,
        )
        replayer.is_reloaded = self.poll.is_on = False
        self._training.prepare_merge()
        self.n_results += 1
        self._merge_ready(result)


@dataclass(frozen=True, slots=True)
class SealLook:
    """The answer of the store to one look for the seal of the open entry."""

    began_s: float
    """The time at which the store was asked."""
    at_step: int
    """The number of steps that this process had made then."""
    asked_s: float
    """The time at which the store was last asked."""
    is_sealed: bool
    is_behind: bool
    """True if this replica is out of phase."""


class SealPoll:
    """Looks for the seal of the open entry while a replica is out of phase. At most one look runs at a time.

    Args:
        context: the services of the rendezvous.

    Example:
        poll = SealPoll(context)
        poll.start()
        poll.ask(lambda: (seals.is_sealed(12), True))
    """

    def __init__(self, context: Context) -> None:
        self.is_on = False
        """True if work was sent out of phase, and no result has come since."""
        self._context = context
        self._phase = context.phase
        self._asked: tuple[float, int, Future[tuple[bool, bool]]] | None = None
        """The look that is running: its time, the step at which it began, and its answer."""

    @property
    def pause_s(self) -> float:
        """Seconds between two looks."""
        return min(LOOK_S, ANSWERS_PER_LOOK * self._context.store.answer_s)

    def start(self) -> None:
        """Begin to look."""
        self.note(self._context.clock(), self._phase.n_steps)
        self.is_on = True

    def stop(self) -> None:
        """Stop looking, and forget the look that is running."""
        self.is_on, self._asked = False, None

    def note(self, at_s: float, at_step: int) -> None:
        """Record the time and the step at which the open entry had no seal."""
        self._phase.note_unsealed(at_s, at_step, in_background=self._context.in_background)

    def ask(self, question: Callable[[], tuple[bool, bool]]) -> SealLook | None:
        """Begin a look if one is due, and return the answer of the last look. None: no look is due, or there is no
        answer yet.

        Args:
            question: asks the store whether the entry is sealed, and whether this replica is out of phase.
        """
        now = self._context.clock()
        if self._asked is None:
            if now - self._phase.looked_s < self.pause_s:
                return None
            self._asked = now, self._phase.n_steps, self._context.ask(question)
        began_s, at_step, answer = self._asked
        if not answer.done():
            return None
        self._asked = None
        return SealLook(began_s, at_step, now, *answer.result())
