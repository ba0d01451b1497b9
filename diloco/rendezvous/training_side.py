"""The training thread's part of the rendezvous: it counts steps, hands work to the round runner, and merges results.

One log serves all fragments: entry k = 0, 1, 2, … belongs to fragment k % P. Entries are applied in order, so one
integer is the whole position of a replica. In phase, a replica waits for the others when its steps are made. Out of
phase, it contributes early, continues to train, and looks for the seal.

This side owns the live parameters and calls no store. It copies the work to send, hands it to the round runner
(`round_runner.py`), and merges the result. A `Scheduler` decides in which thread the runner works: `Inline` runs each
job at once, and `diloco.round_thread.RoundThread` runs the jobs while training continues. Both sides are plain blocking
code, so the tests run them under a simulated scheduler.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

from diloco.rendezvous.contribution import WorkScale
from diloco.rendezvous.restore import RestoredWork
from diloco.rendezvous.round import Context, PendingWork, RoundReport, RoundResult, Wait
from diloco.rendezvous.round_runner import RoundRunner

EARLY_CONTRIBUTIONS = 3
"""The number of contributions that a replica out of phase sends in a row before it continues to train."""
RoundJob: TypeAlias = Callable[[], object]
T = TypeVar("T")


class Scheduler(Protocol):
    """Runs the jobs of the round runner. The training thread calls all methods except `pause` and `notify`."""

    wait: Wait
    """The function that waits during a pause."""

    in_background: bool
    """True if training continues while a job runs."""

    def begin(self, idle: Callable[[], bool]) -> None:
        """Set the function that runs in the round thread while there is no job.

        Args:
            idle: does a little work, and returns True if there is more work.
        """

    def submit(self, job: RoundJob, /) -> object:
        """Queue a job. Raise the first error of an earlier job.

        Args:
            job: the job. Jobs run one after another, in the order in which they were queued.
        """

    def check(self) -> bool:
        """Return True if no job has failed. If a job has failed, the first call raises its error, and later calls
        return False.
        """

    def until(self, done: Callable[[], bool]) -> None:
        """Wait until a condition is true. Raise the first error of a job.

        Args:
            done: returns True when the wait has ended. It is called after each `notify`.
        """

    def notify(self) -> None:
        """Wake the training thread, which waits in `until`."""

    def pause(self, seconds: float, prefixes: Sequence[str]) -> None:
        """Wait between two looks at the store. End the current job if the training thread has left.

        Args:
            seconds: the longest wait.
            prefixes: key prefixes. The wait may end earlier if an object below one of them changes.
        """

    def leave(self) -> None:
        """Let the running job end at its next pause or call of the store. A second call does nothing."""


class Inline:
    """Runs each job at once, in the thread that submits it.

    Args:
        wait: the function that waits during a pause.

    Example:
        TrainingSide(context, Inline(watch.wait))
    """

    in_background = False

    def __init__(self, wait: Wait) -> None:
        self.wait = self.pause = wait
        self.submit: Callable[[RoundJob], object] = operator.call

    def begin(self, idle: Callable[[], bool]) -> None:
        """Do nothing, because there is no thread that could be idle between two jobs."""

    def check(self) -> bool:
        """Return True, because `submit` has already raised the error of a failed job."""
        return True

    def until(self, done: Callable[[], bool]) -> None:
        """Return at once, because every job has ended."""
        assert done()

    def notify(self) -> None:
        """Do nothing, because no other thread waits."""

    def leave(self) -> None:
        """Do nothing, because no job is running."""


# More than 20 methods: each call of the training and each hand-over between the threads has one, and all change the
# same count and the same result.
class TrainingSide:
    """Counts the steps of one replica, and exchanges work and results with its round runner.

    Args:
        context: the services of the rendezvous.
        scheduler: runs the jobs of the round runner.

    Example:
        side = TrainingSide(context, Inline(watch.wait))
        side.start()
        reports = side.step()
    """

    def __init__(self, context: Context, scheduler: Scheduler) -> None:
        self.phase = context.phase
        self.position = 0
        """The next entry to merge."""
        self.is_out_of_phase = False
        """True if this replica is out of phase, as of the last merged result."""
        self.runner = RoundRunner(context, self.merge_ready)
        self.scale = WorkScale(context)
        self._context = context
        self._training = context.training
        self._members = context.members
        self._plan = context.plan
        self._n_fragments = len(context.layouts)
        self._scheduler = scheduler
        self._scheduler.begin(self.runner.idle)
        self._result: RoundResult | None = None
        """The result that is ready and not merged yet. None: there is none."""
        self._n_merged = 0
        """The number of merged results."""
        self._pending: PendingWork | None = None
        """The work that is held for the open entry. None: no work is held."""
        self._is_awaited = False
        """True if the round of the open entry runs while training continues."""

    # -- beginning and leaving ---------------------------------------------------------------------------------------

    def start(self, restored: RestoredWork | None = None) -> None:
        """Load the state from the log, or agree on the first anchor, and catch up.

        Args:
            restored: the work of an earlier attempt of this rank. Work that no seal has counted since is kept. None:
                there is no such work.
        """
        self.runner.replayer.begin(restored)
        if restored is not None:
            self.phase.has_restored_work = [True] * self._n_fragments
        self.position = self.runner.position
        self.phase.begin(self._plan.step_before(self.position), position=self.position)
        try:
            self._join()
        except BaseException:
            self._scheduler.leave()
            raise

    def go_back(self, point: Mapping[str, Any], load: Callable[[], None]) -> list[RoundReport]:
        """Go back to the state of a checkpoint, and catch up with the run. Return the reports of the entries in flight.

        Args:
            point: the position of the checkpoint, as `Phase.resume_point` returned it.
            load: loads the training state of the checkpoint.
        """
        position, base, since = point["rounds"], point["base"], point["since"]

        def act() -> None:
            load()
            self.runner.go_back(position)

        reports = self.at_rest(act)
        self.position, self._pending = position, None
        self.phase.uncounted_steps = [0] * self._n_fragments
        self.phase.has_restored_work = [True] * self._n_fragments
        self.phase.begin(base, since, position=position)
        self._join()
        return reports

    def _join(self) -> None:
        """Catch up with the run. Continue in phase, or out of phase if the others are in the middle of a phase."""
        since = self.phase.steps_since
        self.run_in_round_thread(partial(self.runner.catch_up, has_met=True))
        self.deliver()
        self.phase.set_steps_since(since)
        self._take_the_place_of_earlier_call()
        may_be_sent = (
            not self.is_out_of_phase and bool(self._context.me.attempt) and not self._plan.is_over(self.position)
        )
        if may_be_sent and self.run_in_round_thread(self.runner.has_predecessor):
            # An earlier attempt has sent a contribution, which may still count. So this attempt sends none, and holds
            # its work as if it had sent it. The runner has no job at this time, so this thread may change the runner's
            # entry.
            self.runner.current().pending = self._hold(is_early=True)
        self.phase.start_training_clock()

    def _take_the_place_of_earlier_call(self) -> None:
        """Count the steps of an attempt that has failed in this process, unless no other replica waits for this one."""
        earlier, members = self._members.earlier, self._members
        if earlier is None or self.is_out_of_phase or self.phase.n_steps or self._plan.is_over(self.position):
            return
        if not (members.names_me and self.run_in_round_thread(members.has_live_peer)):
            return  # nothing is gained, and the steps can be made again
        plan = self._plan
        # One step is left, because a contribution needs work.
        most = 1.0 if plan.entry_s is not None else float(plan.steps_per_entry - 1)
        since = earlier.steps_at(self.position, self._context.clock(), most)
        self.phase.begin_short(since if plan.entry_s is not None else float(int(since)))

    def leave(self, *, in_order: bool = True, says_bye: bool = True) -> list[RoundReport]:
        """Merge the last results, and record that this replica sends no more work.

        Args:
            in_order: True: wait for the round in flight. A replica out of phase does not wait, and its work may be
                counted after it has left. False: leave at once.
            says_bye: False: do not record it, because the next attempt of this process continues at once.
        """
        try:
            if in_order:
                self._finish()
            reports = self.stop()
            if in_order:
                self._scheduler.check()  # raises the error of a job that failed after the last result
            return reports
        finally:
            if says_bye:
                self.say_bye()
            else:
                self._scheduler.leave()

    def _finish(self) -> None:
        """Wait for the result of the round in flight."""
        if not self._scheduler.check():
            return
        if self.is_out_of_phase:
            self.run_in_round_thread(partial(self.runner.catch_up, n_merged=self._n_merged))
        elif self._is_awaited:
            self._scheduler.until(self._has_result)
        elif not self._has_result() and self.runner.in_flight:
            self.run_in_round_thread(partial(self.runner.run_round, None))

    def say_bye(self) -> None:
        """Record that this replica sends no more work, unless the run was deleted."""
        context, pauses = self._context, self._context.pauses()
        self._scheduler.leave()
        while not self._members.is_deleted and not context.store.write(
            context.keys.bye(context.me.rank, context.me.attempt), b""
        ):
            self._scheduler.wait(next(pauses), ())

    # -- steps and rounds --------------------------------------------------------------------------------------------

    def step(self) -> list[RoundReport]:
        """Count an inner step, send and merge work if it is due, and return the reports of the merged entries.

        Raises:
            QuorumTimeoutError, ContributionError, DivergenceError, FencedError, AbortedError: see `DiLoCo.step`.
        """
        phase, plan = self.phase, self._plan
        phase.count_step()
        self._scheduler.check()
        reports: list[RoundReport] = []
        if (result := self._result) is not None and (result.is_urgent or plan.overlap_steps is None):
            reports += self.deliver()
        in_background = self._scheduler.in_background
        if not in_background and self._members.missing_looks:
            self._members.check_run()
        if plan.is_over(self.position):
            phase.is_over = True
            return reports
        if self.is_out_of_phase and not phase.is_at_the_end and not in_background and self.runner.look():
            reports += self.deliver()
        if not self.is_out_of_phase:
            # With overlap_steps="auto", training may continue until the round after the next one is due, except before
            # a last round.
            is_auto = plan.overlap_steps is None
            has_room = is_auto and not plan.is_final(self.position)
            is_due = self._is_awaited and phase.is_next_due if has_room else phase.is_due
            if is_due:
                reports += self._meet()
            if is_auto or not is_due:
                reports += self._send_if_due()
        while phase.is_at_the_end and not plan.is_over(self.position):
            reports += self._meet()  # all planned steps are made, and only rounds without steps are left
        phase.start_training_clock()
        return reports

    def _send_if_due(self) -> list[RoundReport]:
        """Send work if the time to send it has come, before its round is due. Return the reports of merged entries."""
        is_auto = self._plan.overlap_steps is None
        has_sent = self._is_awaited or self.is_out_of_phase if is_auto else self._pending is not None
        if has_sent or not self.phase.is_time_to_send(self.position):
            return []
        pending = self._pending or self._hold(is_early=False)
        in_background = self._scheduler.in_background
        if in_background or is_auto:
            self._is_awaited = in_background
            self._scheduler.submit(partial(self.runner.run_round, pending, self._n_merged))
        else:
            self._scheduler.submit(partial(self.runner.publish, pending))
        return [] if self._is_awaited or not is_auto else self.deliver()

    def sync(self) -> list[RoundReport]:
        """Run a round of every fragment now, and return the reports."""
        self._scheduler.check()
        self.phase.stop_training_clock()
        reports: list[RoundReport] = []
        plan, step, before = self._plan, self.phase.run_step, self.position
        for _ in range(self._n_fragments):
            reports += self._meet()
        # first apply the rounds that the others ran without this replica
        missed = max(0, self.position - before - self._n_fragments)
        step += missed * plan.steps_per_entry
        if plan.entry_s is not None:
            step = plan.step_before(self.position)
        self.phase.advance_after_sync(step, step if plan.total_steps is None else plan.step_before(self.position))
        self.phase.start_training_clock()
        return reports

    def _meet(self) -> list[RoundReport]:
        """Run the round of the open entry, and all sealed rounds after it. Merge them, and return their reports."""
        reports: list[RoundReport] = []
        before = self.position
        while self.position == before and not self._plan.is_over(before):
            began = self._context.clock()
            if not self._is_awaited and not self._has_result():
                pending = self._pending or self._hold(is_early=False)
                self._is_awaited = self._scheduler.in_background
                self._scheduler.submit(partial(self.runner.run_round, pending, self._n_merged))
            self._scheduler.until(self._has_result)
            reports += self.deliver(late_s=self._context.clock() - began)
        return reports

    # -- between the threads -----------------------------------------------------------------------------------------

    def run_in_round_thread(self, act: Callable[[], T]) -> T:
        """Run a function after all queued jobs, while the training thread waits. Return the function's result.

        Args:
            act: the function.
        """
        answers: list[T] = []

        def answer() -> None:
            answers.append(act())
            self._scheduler.notify()

        self._scheduler.submit(answer)
        self._scheduler.until(lambda: bool(answers))
        return answers[0]

    def drain(self) -> list[RoundReport]:
        """Wait for the round in flight, and merge its result."""
        if self._is_awaited:
            self._scheduler.until(self._has_result)
        return self.deliver()

    def at_rest(self, act: Callable[[], None]) -> list[RoundReport]:
        """Run a function in the round thread once all results are merged. Return the reports of merged entries.

        Args:
            act: the function.
        """
        reports: list[RoundReport] = []
        is_done = False

        def act_at_rest() -> None:  # a runner out of phase may have found another seal since the last merge
            nonlocal is_done
            if not self._has_result():
                act()
                is_done = True

        while not is_done:
            reports += self.drain()
            self.run_in_round_thread(act_at_rest)
        return reports

    def stop(self) -> list[RoundReport]:
        """End the round in flight, merge the result that is ready, and return the reports."""
        self._scheduler.leave()
        self._is_awaited = False
        return self._merge()

    def merge_ready(self, result: RoundResult) -> None:
        """Receive a result from the runner. The runner then changes nothing until the result is merged.

        Args:
            result: the result.
        """
        assert self._result is None
        self._result = result
        self._scheduler.notify()

    def _has_result(self) -> bool:
        return self._result is not None

    def deliver(self, late_s: float = 0.0) -> list[RoundReport]:
        """Merge the results that are ready, and return their reports. Out of phase, contribute early after each one.

        Args:
            late_s: seconds that the training thread has waited for the result.
        """
        reports: list[RoundReport] = []
        for contributed in range(EARLY_CONTRIBUTIONS + 1):
            if self._result is None:
                break
            reports += self._merge(0.0 if contributed else late_s)
            in_background, is_last = self._scheduler.in_background, contributed == EARLY_CONTRIBUTIONS
            if self._plan.is_over(self.position) or not self.is_out_of_phase or (is_last and not in_background):
                break  # without a round thread, the next call of `step` looks again
            pending = self._pending or self._hold(is_early=True)
            self._scheduler.submit(partial(self.runner.contribute_early, pending))
            if in_background and (is_last or not self.phase.has_one_step):
                break
            # If a phase has a single step, the others create the next seal before this replica's next step, so
            # contribute now.
            self.run_in_round_thread(lambda: None)
        return reports

    def _hold(self, *, is_early: bool) -> PendingWork:
        """Copy the live work of the open entry's fragment, so that it can be sent while training continues.

        Args:
            is_early: True if the phase has steps left. The weight then follows from the steps that were made.
        """
        self._scheduler.check()  # a failed runner never returns the memory of held work, so no more work is held
        pending = self.scale.weigh(self.position, is_early=is_early)
        self._training.hold(self.position % self._n_fragments, is_early=is_early)
        self.phase.note_held()
        self._pending = pending
        return pending

    def _merge(self, late_s: float = 0.0) -> list[RoundReport]:
        """Merge the result into the live parameters and the count of steps, and return its reports.

        Args:
            late_s: seconds that the training thread has waited for the result.
        """
        result, self._result = self._result, None
        if result is None:
            return []
        self._n_merged += 1
        self._is_awaited = False
        self._training.merge()
        phase, pending = self.phase, self._pending
        made, is_restored, is_short = list(phase.uncounted_steps), list(phase.has_restored_work), list(phase.is_short)
        for each in result.resolved:
            made[each.fragment] = 0 if each.steps is None else made[each.fragment] - each.steps
            is_restored[each.fragment] = is_short[each.fragment] = False
        phase.uncounted_steps, phase.has_restored_work, phase.is_short = made, is_restored, is_short
        if result.n_entries:
            self.position += result.n_entries
            self._pending = None
            if result.has_met:
                phase.advance_in_phase(result.n_entries, result.ready_s)
            else:
                phase.advance_after_catch_up(result.n_entries, result.looked_step, result.looked_s)
        self.is_out_of_phase = result.is_out_of_phase
        trained_s = phase.take_trained_s() if result.reports else 0.0
        reports = []
        for report in result.reports:
            is_mine = pending is not None and report.round == pending.entry + 1
            stale = phase.n_steps - pending.at_step if pending is not None and is_mine else 0
            reports.append(replace(report, train_s=trained_s, late_s=late_s, stale_steps=stale))
            trained_s = late_s = 0.0
        return reports
