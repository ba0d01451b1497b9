"""The supervisor: the parent process of one or more ranks, which starts and ends them and records their outcomes.

It has one thread and a session of its own. The supervisor and each rank are subreapers. So when a rank ends, its child
processes become children of the supervisor, which ends them, even if they have moved to another session. A system
without subreapers finds them by their session and by a variable of their environment. In an attached run, the
supervisor watches the launcher, and ends the run when the launcher has ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from executors.attempt import Attempt
from executors.attempt.outcome import describe_cancel, describe_end
from executors.errors import LaunchError, StoreError
from executors.patience import BRIEF, GLANCE, SUPERVISOR, OutageTolerance, Waits, retry
from executors.process import children, kill_descendants
from executors.protocol import Outcome, Reason, ReplicaStatus
from executors.replica.shared_page import SharedPage
from executors.restarts.fail_fast import end_others
from executors.restarts.orders import BY_RULE, stop_reason
from executors.restarts.rules import SAME_PROCESS
from executors.restarts.session import RestartSession
from executors.settings.run_spec import LEASE_S, RunSpec
from executors.store.file import FULL
from executors.store.record_names import run_was_deleted
from executors.store.run_key import hold_key
from executors.store.url import impatient_store
from executors.supervisor.exits import ExitClassifier, OutcomeWriter, fields_from_outside, is_fenced, mark_cancelled
from executors.supervisor.members import Member, MemberGroup, find_cause, merge_ends
from executors.supervisor.memory_kills import machine_memory_kills
from executors.supervisor.processes import NEVER, UNKILLABLE_S, ProcessStarter, RunningAttempt, how_started
from executors.supervisor.store_polls import CancelPoller, DeletionWatch
from executors.supervisor.wakeups import Wakeups
from executors.supervisor.watchdog import Watchdog, introduce

if TYPE_CHECKING:  # few runs need these, and each import delays the start of a replica
    from executors.notices.notifier import Notifier
    from executors.supervisor.rule_judge import RuleJudge

WATCH_PAUSE_S = 0.1  # checks within this time are made together, so that many ranks cost one wakeup
STOPPED = "the run was stopped"
NO_LAUNCHER = "the launcher of this attached run ended"
DELETED = "the run was deleted from its store"


# More than 20 methods: one thread handles signals, ends, markers, the log, progress and deadlines, with a method for
# each. All of them use the running attempts. The order of these steps matters, and several classes would hide it.
class Supervisor:
    """Runs the ranks of one launch to their end.

    Args:
        spec: the run, with the ranks of this supervisor.
        starter: starts attempts as processes of this machine.
        max_parallel: the number of ranks that run at the same time. The others wait.
        timeout_s: the time limit of each rank in seconds, from its own start. None: there is none.
        term_grace_s: seconds between SIGTERM and SIGKILL.
        launcher_end: a descriptor that is readable when the launcher has ended, with which an attached run ends. None:
            the run is detached.
        launcher_lives: returns False if the launcher has ended; see `Wakeups`. None, the default: the descriptor is
            enough.
        on_notifier: called with the pid of the process that sends notifications. Default: nothing is called.
    """

    waits_for_notices = True
    """True if the notifying process may live longer than this supervisor. False in a container."""
    count_memory_kills = staticmethod(machine_memory_kills)
    """Returns the counter of processes that the kernel killed because memory ran out."""

    def __init__(
        self,
        spec: RunSpec,
        starter: ProcessStarter,
        *,
        max_parallel: int,
        timeout_s: float | None,
        term_grace_s: float,
        launcher_end: int | None,
        launcher_lives: Callable[[], bool] | None = None,
        on_notifier: Callable[[int], None] = lambda pid: None,
    ) -> None:
        self._starter = starter
        self._spec = spec
        self._n_spare = len(spec.ranks) - (spec.settings.min_replicas or len(spec.ranks))
        self._timeout_s = NEVER if timeout_s is None else timeout_s
        self._memory_kills = self.count_memory_kills()
        self._classifier = ExitClassifier(spec.world_size, timeout_s, self._memory_kills)
        self._term_grace_s = term_grace_s
        self._wakeups = Wakeups(launcher_end, launcher_lives)
        self._store = store = impatient_store(spec.store_url, GLANCE.limit_s)
        hold_key(store.url, spec.run_id, spec.key)
        self._cancel_poller = CancelPoller(spec.store_url)
        self._deletion = DeletionWatch(store, spec.run_id, spec.lease_s or LEASE_S)
        self._waits = Waits(self._write_to_logs)
        self._session = RestartSession(
            spec,
            store,
            self._begin_next,
            self._cancelled,
            self._cancel_poller.every_s,
            lambda: self._tolerance,
            self._waits,
        )
        self._outcomes = OutcomeWriter(self._note_end, lambda: self._tolerance, waits=self._waits)
        self._asked = [Attempt(store, spec.run_id, rank, spec.attempt) for rank in spec.ranks]
        self._waiting: deque[Attempt] = deque()
        self._running: dict[int, RunningAttempt] = {}
        self._copying: dict[int, tuple[RunningAttempt, Attempt, int]] = {}
        """Ended ranks whose logs are being copied, with the attempt and the exit code, by the pid of the copier."""
        self._idle: dict[int, RunningAttempt] = {}
        """The ended attempts whose processes wait for the decision about the next attempt, by rank."""
        self._stuck = set[int]()  # pids of processes that SIGKILL did not end
        self._pages: dict[int, list[SharedPage]] = {}
        """The last pages of each rank, by member. The next attempt's pages take over their learned intervals."""
        self._last: dict[int, Attempt] = {}
        """The last attempt of each rank that was started."""
        self._deadlines: dict[int, float] = {}
        """The time at which the time limit of each rank ends, by the monotonic clock. A restart does not extend it."""
        self._max_parallel = max_parallel
        self._n_noticed = 0
        """The number of entries of the decision log after which the notifier was last asked to look."""
        self._is_undone = False
        """True if the start has failed, and its ranks are being ended."""
        self._watch_at = NEVER
        self._notifier: Notifier | None = None
        """The process that sends notifications. None: the user asked for none."""
        if spec.notify:
            from executors.notices.notifier import Notifier, NotifierSpec
            from executors.supervisor.round_watch import RoundWatch

            its = NotifierSpec.of(spec, waits_for_others=self.waits_for_notices)
            self._notifier = Notifier(its, on_start=on_notifier)
            self._round_watch = RoundWatch()
        self._rules: RuleJudge | None = None
        """Judges the rules of the run. None: no process had rules yet."""
        self._killer = None
        if spec.settings.chaos:
            from executors.worker.chaos import Killer

            self._killer = Killer(spec.settings.chaos, spec.run_id)

    def start(self) -> list[Attempt]:
        """Begin the attempts, and start as many processes as may run at once.

        Returns: the attempts that this supervisor has begun. It leaves out those that another process has begun.

        Raises:
            LaunchError: a rank could not be started. The ranks before it were ended, and their outcomes were written if
                the store took them within 10 s (`executors.patience.BRIEF`).
        """
        self._wakeups.listen()
        attempt, begun = self._asked[0], []
        try:
            # All preparation comes before the first fork. After a fork, the kernel copies each page of memory that this
            # process writes to.
            for attempt in self._asked:
                problem = None
                try:
                    self._starter.prepare(attempt)
                except OSError as error:
                    if self._n_spare < 1:
                        raise
                    problem = error
                if not self._starter.begin(attempt):
                    continue
                begun.append(attempt)
                self._session.note_start(attempt)
                if problem is None:
                    self._waiting.append(attempt)
                else:
                    self._leave_out(attempt, problem)
            while self._waiting and len(self._running) < self._max_parallel:
                attempt = self._waiting[0]
                try:
                    self._start(attempt)
                except OSError as error:
                    self._leave_out(attempt, error)
                self._waiting.popleft()
        except (OSError, StoreError) as error:
            self._undo_start(attempt, error)
            raise LaunchError(str(error), rank=attempt.rank) from error
        return begun

    def run(self) -> None:
        """Supervise until every rank has ended, has its outcome, and gets no further attempt."""
        if self._notifier is not None:
            self._notifier.start()
        while self._is_needed:
            events = (min(each.deadline, each.kill_at, each.others_at) for each in self._running.values())
            kill_at = NEVER if self._killer is None else self._killer.next_at
            rules_at = NEVER if self._rules is None else self._rules.next_at
            due = (
                *(self._cancel_poller.next_at, self._watch_at, self._session.next_at, self._outcomes.next_at),
                *(kill_at, rules_at),
            )
            signals, is_abandoned = self._wakeups.wait(min(*due, *events))
            self._note_signals(signals)
            self._reap()
            self._note_waiting_processes()
            self._memory_kills.look()
            if is_abandoned:
                self._end_abandoned(NO_LAUNCHER)
            if time.monotonic() >= self._cancel_poller.next_at:
                self._check_store()
            self._outcomes.try_again()
            if self._rules is not None:
                self._rules.write()
            self._advance_restarts()
            if self._notifier is not None:
                self._notifier.keep()
            self._dismiss_processes()
            if time.monotonic() >= self._watch_at:
                self._watch()
            self._enforce_deadlines()
            if self._killer is not None:
                leaders = {each.asked.rank: each.members[0] for each in self._running.values()}
                self._killer.strike({rank: leader.pid for rank, leader in leaders.items() if leader.is_alive})
            while self._waiting and len(self._running) + len(self._idle) < self._max_parallel:
                attempt = self._waiting.popleft()
                try:
                    self._start(attempt)
                except OSError as error:
                    self._outcomes.add(attempt, "start_failed", str(error))
        if self._notifier is not None:
            self._notifier.close()

    @property
    def _is_busy(self) -> bool:
        """True if a process of a rank runs or waits for its start, or a log is being copied."""
        return bool(self._running or self._waiting or self._copying or self._idle)

    @property
    def _is_needed(self) -> bool:
        """True if any work is left, or the store has not yet taken an outcome."""
        has_more = self._is_busy or self._session.is_pending
        is_late = self._outcomes.is_pending(is_busy=has_more) or has_more
        return is_late or (self._rules is not None and self._rules.is_pending(is_busy=is_late))

    @property
    def _tolerance(self) -> OutageTolerance:
        """The longest wait for a failing store when there is no other work.

        After a failed start, a launcher waits for the supervisor.
        """
        return BRIEF if self._is_undone else SUPERVISOR

    @property
    def _notifier_descriptors(self) -> tuple[int, ...]:
        return () if self._notifier is None else self._notifier.descriptors

    def _look_for_notices(self) -> None:
        """Let the notifier look at the records of the run, because there are new ones."""
        if self._notifier is not None:
            self._notifier.look()

    def _write_to_logs(self, words: str) -> None:
        """Write a line to the log of each rank that is not running, because a supervisor has no log of its own."""
        running = {running.asked.rank for running in self._running.values()}
        for rank in self._last.keys() - running:
            with contextlib.suppress(OSError):  # the disk of the log may be the one that is full
                self._starter.write_log(self._last[rank], f"replicas: the supervisor: {words}")

    # Starting

    def _start(self, attempt: Attempt) -> None:
        rank, n = attempt.rank, self._starter.count_members(attempt)
        before = self._pages.get(rank, [])
        for page in before:
            page.close_stacks()
        watched = self._begin_rules(rank)
        pages = [SharedPage(before[number] if number < len(before) else None, watched) for number in range(n)]
        self._pages[rank] = pages
        for page in pages:
            page.n_decisions = self._session.n_read
        group = MemberGroup(n) if n > 1 else None
        try:
            kept = [number for each in self._running.values() if each.group for number in each.group.descriptors]
            pids = self._starter.start(
                attempt, pages, [*self._wakeups.descriptors, *kept, *self._notifier_descriptors], group
            )
        except BaseException:
            if group is not None:
                group.close()
            raise
        self._last[rank] = attempt
        deadline = self._deadlines.setdefault(rank, time.monotonic() + self._timeout_s)
        dogs = [self._watchdog(page, pid, rank) for page, pid in zip(pages, pids, strict=True)]
        introduce(dogs)
        others = [Member(number, pids[number], pages[number], dogs[number]) for number in range(1, n)]
        pid = pids[0]
        running = RunningAttempt(pid, attempt, pages[0], dogs[0], time.time(), deadline, others=others, group=group)
        running.rules = None if self._rules is None else self._rules.watch(attempt, pages)
        # The pid is free again while other members of a replica whose member 0 has ended still run.
        self._running[pid if pid not in self._running else -pid] = running
        self._watch_at = 0.0

    def _watchdog(self, page: SharedPage, pid: int, rank: int) -> Watchdog:
        ends, grace_s = self._session.has_policy, self._term_grace_s
        return Watchdog(page, pid, self._session.hang, ends=ends, term_grace_s=grace_s, spec=self._spec, rank=rank)

    def _begin_rules(self, rank: int) -> tuple[str, ...] | None:
        """Note the rules of a new process of a rank, and return the names of the numbers that they are about.

        None: the process has no rules.
        """
        if self._rules is None and self._session.rules:  # a resume may give rules to a run that had none
            from executors.supervisor.rule_judge import RuleJudge

            self._rules = RuleJudge(
                self._spec, self._starter, self._session, self._term_grace_s, on_record=self._look_for_notices
            )
        return None if self._rules is None else self._rules.begin(rank)

    def _continue(self, idle: RunningAttempt, attempt: Attempt) -> None:
        """Let the process of an ended attempt run the next one.

        Raises:
            OSError: the log of the attempt cannot be created.
        """
        rank, page = attempt.rank, idle.page
        self._starter.prepare_same_process(attempt)
        page.renew()
        page.n_decisions = self._session.n_read
        # The old watchdog would still count the time of the attempt before, and kill the process for its hang.
        dog, deadline = self._watchdog(page, idle.pid, rank), self._deadlines[rank]
        running = RunningAttempt(idle.pid, attempt, page, dog, time.time(), deadline, how=SAME_PROCESS)
        running.rules = None if self._rules is None else self._rules.watch(attempt, [page])
        self._running[idle.pid] = running
        self._last[rank] = attempt
        self._watch_at = 0.0
        del self._idle[rank]
        page.go_on = attempt.number  # this comes last, because the process continues at once

    def _note_waiting_processes(self) -> None:
        """Conclude attempts whose processes wait for the next attempt."""
        for running in [each for each in self._running.values() if each.page.waits_for and not each.page.go_on]:
            outcome = None
            if running.ending is None and self._session.may_follow and not self._outcomes.are_late:
                with contextlib.suppress(StoreError):  # the process then ends, and its end is concluded as any other
                    outcome = running.attempt.outcome()
            if outcome is None or not outcome.goes_on or outcome.pid != running.pid:
                self._dismiss(running)
                continue
            running.keep_stacks()
            if self._rules is not None:
                self._rules.look(running, time.monotonic(), is_last=True)
            self._forget(running)
            self._starter.note_output(running.asked, is_whole=True)
            self._idle[running.asked.rank] = running
            self._note_end(running.attempt, outcome)

    def _dismiss_processes(self) -> None:
        """End the processes whose rank gets no next attempt."""
        for rank, idle in list(self._idle.items()):
            if not self._session.may_still_start(rank):
                self._dismiss_idle(rank, idle)

    def _dismiss_idle(self, rank: int, idle: RunningAttempt) -> None:
        del self._idle[rank]
        self._running[idle.pid] = idle  # the process runs until its exit functions have ended
        self._dismiss(idle)

    def _dismiss(self, running: RunningAttempt) -> None:
        page = running.page
        page.left_with, page.left_at = 1, time.monotonic()
        page.go_on = -1
        self._watch_at = 0.0

    def _begin_next(self, attempt: Attempt) -> None:
        """Begin the next attempt of a rank. If the process of the attempt before still runs, end it first."""
        rank = attempt.rank
        for running in self._running.values():
            if running.asked.rank == rank:
                if not running.page.claimed:
                    self._session.retry_soon()  # the process may still claim a later attempt, perhaps this one
                elif running.ending is None and running.attempt.number < attempt.number:
                    running.terminate("fenced", self._term_grace_s)
                return
        if any(copied.rank == rank for _, copied, _ in self._copying.values()):
            return
        idle = self._idle.get(rank)
        if idle is not None and not self._session.stays(attempt):
            self._dismiss_idle(rank, idle)  # the end of the process leads back to this method
            return
        for waiting in [waiting for waiting in self._waiting if waiting.rank == rank]:
            self._waiting.remove(waiting)
            self._outcomes.add(waiting, "fenced", describe_end("fenced", rank, self._spec.world_size))
        try:
            self._starter.prepare(attempt)
            if not self._starter.begin(attempt):
                self._session.leave(rank)
                return
        except OSError as error:
            # The disk with the logs is full. The supervisor waits, because a failed start would use up a restart.
            if error.errno in FULL:
                self._waits.note(rank, f"room on the disk, to start rank {rank} again", time.monotonic(), 0.0, error)
                self._session.retry_soon()
                return
            self._outcomes.add(attempt, "start_failed", f"Rank {rank} could not be started: {error}")
            return
        self._waits.end(rank, is_back=True)
        self._session.note_start(attempt)
        if idle is None:
            self._waiting.append(attempt)
            return
        try:
            self._continue(idle, attempt)
        except OSError as error:
            self._dismiss_idle(rank, idle)
            self._outcomes.add(attempt, "start_failed", f"Rank {rank} could not be started: {error}")

    def _leave_out(self, attempt: Attempt, error: OSError) -> None:
        """Continue without a rank that cannot be started, if at least `min_replicas` others are left."""
        if self._n_spare < 1:
            raise error
        self._n_spare -= 1
        self._outcomes.add(attempt, "start_failed", f"Rank {attempt.rank} could not be started: {error}")

    def _undo_start(self, failed: Attempt, error: Exception) -> None:
        """End the ranks that were started before one rank could not be started."""
        reason = f"Rank {failed.rank} could not be started: {error}"
        for running in self._running.values():
            running.terminate("cancelled", self._term_grace_s, reason)
        self._waiting.clear()
        self._session.close()
        self._is_undone = True
        mine = []
        # Begin all attempts, so that they get an outcome. An attempt is left out if the store does not answer.
        for attempt in self._asked:
            with contextlib.suppress(StoreError):
                if self._starter.begin(attempt):
                    mine.append(attempt)
        mark_cancelled(reason, [attempt for attempt in mine if attempt != failed])
        started = {running.asked.rank for running in self._running.values()}
        for attempt in mine:
            if attempt.rank not in started:
                self._outcomes.add(attempt, "start_failed", reason)
        self.run()

    # Watching

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._notifier is not None and self._notifier.note_end(pid):
                continue
            if pid in self._copying:
                self._record_end(*self._copying.pop(pid))
            self._stuck.discard(pid)
            for rank in [rank for rank, idle in self._idle.items() if idle.pid == pid]:
                del self._idle[rank]  # the next attempt, if there is one, gets a new process
            running = self._find_running(pid)
            if running is None:
                continue  # a process that a rank left behind, which this subreaper inherited
            exit_code = os.waitstatus_to_exitcode(status)
            has_ended = running.note_member_end(pid, exit_code, time.monotonic())
            if exit_code < 0:
                _remove_temp_folders(pid)
            if has_ended:
                self._forget(running)
                self._starter.note_output(running.asked, is_whole=True)
                if self._rules is not None:
                    self._rules.look(running, time.monotonic(), is_last=True)
            living = (member.pid for each in self._running.values() for member in each.living)
            idle = (each.pid for each in self._idle.values())
            spare = {*living, *idle, *self._copying, *self._stuck}
            if self._notifier is not None and self._notifier.pid is not None:
                spare.add(self._notifier.pid)
            if not spare >= set(children(os.getpid())):
                kill_descendants(os.getpid(), spare=spare, limit_s=UNKILLABLE_S, ended=(pid,))
            if has_ended:
                self._conclude(running, running.exit_code)

    def _find_running(self, pid: int) -> RunningAttempt | None:
        """Return the running attempt that a process belongs to. None: no attempt has a living process with this pid."""
        running = self._running.get(pid)
        if running is not None and running.members[0].is_alive and running.pid == pid:
            return running
        several = (each for each in self._running.values() if each.group is not None)
        return next((each for each in several if any(member.pid == pid for member in each.living)), None)

    def _forget(self, running: RunningAttempt) -> None:
        """Remove an attempt from the running attempts."""
        for key in [key for key, each in self._running.items() if each is running]:
            del self._running[key]

    def _note_signals(self, signals: bytes) -> None:
        """Act on signals that arrived.

        Args:
            signals: the number of each signal, as one byte.
        """
        if signal.SIGUSR1 in signals:
            self._cancel_poller.look_soon()
            self._session.read_log_soon()

    def _check_store(self) -> None:
        """Look into the store for cancel markers, and for the deletion of the run."""
        if self._deletion.is_gone():
            self._end_abandoned(DELETED)
            return
        living = {running.attempt: running for running in self._running.values() if not running.is_ending}
        for attempt in self._cancel_poller.cancelled([*living, *self._waiting]):
            if attempt in living:
                living[attempt].terminate("cancelled", self._term_grace_s)
            else:
                self._waiting.remove(attempt)
                self._cancelled(attempt)

    def _advance_restarts(self) -> None:
        """Decide what follows each end. End ranks that an order blocks, or that another process has taken over."""
        has_progress = any(running.page.progress_marks for running in self._running.values())
        for running in self._running.values():
            self._session.note_claim(running.attempt)
        if not self._session.advance(has_progress=has_progress, is_busy=self._is_busy):
            return
        if self._n_noticed != self._session.n_read:
            self._n_noticed = self._session.n_read
            self._look_for_notices()
        blocks = self._session.blocks()
        for rank, entry in blocks.items():
            self._session.cancel_unstarted(rank, stop_reason(entry))
        for running in self._running.values():
            for member in running.members:
                member.watchdog.limits, member.watchdog.ends = self._session.hang, self._session.has_policy
            order = blocks.get(running.asked.rank)
            if running.is_ending:
                continue
            if order is None:
                if is_fenced(running):
                    running.terminate("fenced", self._term_grace_s)
            elif order.within_s is None:
                mark_cancelled(stop_reason(order), [running.attempt])
                running.terminate("cancelled", self._term_grace_s, stop_reason(order))
            elif running.page.ending_at is None:
                end_at = time.monotonic() + order.within_s
                running.announce(end_at)
                running.stopped_because = stop_reason(order) if order.why == BY_RULE else None
                running.end_by(end_at, "cancelled")
        for attempt in self._waiting:
            if attempt.rank in blocks:
                mark_cancelled(stop_reason(blocks[attempt.rank]), [attempt])
                self._cancel_poller.look_soon()

    def _watch(self) -> None:
        """Check the progress of the running ranks."""
        now = time.monotonic()
        looks = [running.watch(now, self._starter) for running in self._running.values()]
        if self._rules is not None:
            looks += [self._rules.look(running, now) for running in self._running.values()]
        self._watch_at = max(min(looks, default=NEVER), now + WATCH_PAUSE_S)
        if self._notifier is not None:
            rounds = [running.page.round for running in self._running.values() if running.ending is None]
            if (notice := self._round_watch.note(rounds, now, time.time())) is not None:
                self._notifier.notice(notice)

    def _enforce_deadlines(self) -> None:
        now, stopped = time.monotonic(), list[Attempt]()
        for running in self._running.values():
            if now >= running.others_at:
                running.end_others(now, self._term_grace_s)
            if now >= running.deadline:
                because = (running.stopped_because or STOPPED) if running.why_then == "cancelled" else None
                if running.terminate(running.why_then, self._term_grace_s, because) and because is not None:
                    stopped.append(running.attempt)
            if now >= running.kill_at and running.may_be_killed(now):
                running.kill(now)
        mark_cancelled(STOPPED, stopped)
        for running in [running for running in self._running.values() if running.is_stuck(now)]:
            self._give_up_process(running)

    def _give_up_process(self, running: RunningAttempt) -> None:
        """Record the end of an attempt whose process no signal ends, so that the run does not wait for it forever."""
        running.is_given_up = True
        self._forget(running)
        self._stuck.update(member.pid for member in running.living)
        self._starter.note_output(running.asked, is_whole=True)
        self._starter.give_up_process(running.asked)
        for member in running.living:
            member.exit_code = -signal.SIGKILL if member.left_with is None else member.left_with
        self._conclude(running, running.exit_code)

    def _end_abandoned(self, why: str) -> None:
        """End all ranks, because no process watches the run. Ranks that were asked to end before get no more time."""
        living = list[RunningAttempt]()
        for running in self._running.values():
            if running.ending is not None:
                running.kill_soon()
            elif running.terminate("cancelled", self._term_grace_s, why):
                living.append(running)
                if why != NO_LAUNCHER:  # the store may be lost, so the reason is in the log, too
                    self._starter.write_log(running.asked, f"replicas: this replica ends: {why}")
        # After the signals, because a store that fails would delay them.
        had_marker = mark_cancelled(why, [running.attempt for running in living])
        for running in living:
            if running.attempt in had_marker:
                running.kill_soon()
        mark_cancelled(why, self._waiting)
        while self._waiting:
            self._cancelled(self._waiting.popleft(), why)
        self._session.close(why)

    # Concluding

    def _conclude(self, running: RunningAttempt, exit_code: int) -> None:
        """Record the outcome of an ended rank unless it has one, and copy its log."""
        attempt = running.attempt
        # While the store fails, do not ask it for the outcome. If there is one, the later write finds it.
        if self._outcomes.are_late:
            self._record_end(running, attempt, exit_code)
            return
        try:
            outcome = attempt.outcome()
            if outcome is None and run_was_deleted(attempt.store, attempt.run_id):
                return  # writing an outcome would create the folder of the deleted run again
            running.keep_stacks()
            if outcome is not None:
                self._note_end(attempt, replace(outcome, goes_on=False))  # the process has ended
                return
        except StoreError as error:
            self._outcomes.put_off(error)
        copier = None
        with contextlib.suppress(OSError):
            copier = self._starter.copy_log(running.asked, attempt)
        if copier is None:
            self._record_end(running, attempt, exit_code)
        else:
            self._copying[copier] = running, attempt, exit_code

    def _record_end(self, running: RunningAttempt, attempt: Attempt, exit_code: int) -> None:
        if running.group is not None:
            self._record_end_of_members(running, attempt)
            return
        reason, error = self._classifier.explain(running, exit_code)
        self._print_reason(running, reason, error)
        tail, how = self._starter.output_tail(running.asked), running.how or how_started(self._spec, running.asked)
        self._outcomes.add(attempt, reason, error, output_tail=tail, how=how, **fields_from_outside(running, exit_code))

    def _record_end_of_members(self, running: RunningAttempt, attempt: Attempt) -> None:
        """Record one outcome for all members of a replica."""
        for member, file in zip(running.members, running.group.end_files if running.group else (), strict=False):
            member.read_end(file, attempt)
        if running.group is not None:
            running.group.close()
        cause = find_cause(running.members)
        have_succeeded = all(member.exit_code == 0 for member in running.members)
        ends: dict[str, Any] = {
            "members": tuple(member.to_record() for member in running.members),
            "output_tail": self._starter.output_tail(running.asked),
            "how": how_started(self._spec, running.asked),
        }
        end = merge_ends(running.members, cause) if running.ending is None or have_succeeded else None
        if end is not None:
            self._outcomes.add_outcome(attempt, replace(end, **ends))
            return
        blamed = running.accused or cause or running.members[0]
        reason, error = self._classifier.explain(running, running.exit_code, blamed)
        if running.accused is not None:
            ends["member"] = running.accused.number
        if running.ending is None and cause is not None:
            error, ends["member"] = f"Member {cause.number} of {len(running.members)}: {error}", cause.number
        self._print_reason(running, reason, error)
        more = {**fields_from_outside(running, running.exit_code, blamed), **ends}
        self._outcomes.add(attempt, reason, error, **more)

    def _cancelled(self, attempt: Attempt, why: str | None = None) -> None:
        self._outcomes.add(attempt, "cancelled", None if why is None else describe_cancel(attempt.rank, why))

    def _print_reason(self, running: RunningAttempt, reason: Reason, error: str | None) -> None:
        """Print the reason of an end without an outcome into the rank's log. This base class prints nothing, because
        the log already has the reason.
        """

    def _note_end(self, attempt: Attempt, outcome: Outcome) -> None:
        """Let the session decide on an end. With `fail_fast`, end the run if no replica has had a round yet."""
        self._session.note_end(outcome)
        self._look_for_notices()
        if self._spec.settings.fail_fast and not self._is_undone and outcome.status is ReplicaStatus.FAILED:
            with contextlib.suppress(StoreError):
                if retry(functools.partial(end_others, attempt, outcome, self._spec.world_size)):
                    self._session.close("the run failed early")
            self._cancel_poller.look_soon()


def _remove_temp_folders(pid: int) -> None:
    """Remove the folders of a worker that a signal has ended, so that it could not remove them itself."""
    from executors.process.temp_folders import remove_temp_folders  # rarely needed, and it imports several modules

    remove_temp_folders(pid)
