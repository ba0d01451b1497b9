"""The process of an attempt, as its supervisor sees it, and the protocol of the object that starts such processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from executors.attempt import Attempt
from executors.attempt.outcome import describe_cancel
from executors.errors import ReplicasError, StoreError
from executors.process import become_subreaper, kill_descendants
from executors.protocol import Reason
from executors.replica.shared_page import SharedPage
from executors.settings.run_spec import RunSpec
from executors.store import store_at
from executors.supervisor.members import LAST_CALL_S, Member, MemberGroup, find_cause
from executors.supervisor.watchdog import LOOK_S, Watchdog, WatchdogReport
from executors.task.stored import StoredTask, read_task

if TYPE_CHECKING:  # few runs have rules, and each import delays the start of a replica
    from executors.supervisor.rule_watch import RuleWatch

NEVER = float("inf")
ATOMIC_LOOK_S = 0.5
# Functions that are registered at exit get this time: an upload may take a minute, or wait forever for a network.
LEAVE_S = 120.0
MOST_UNKEPT, STACKS_AGAIN_S = 4, 10.0  # unwritten dumps of a rank, and the time between two tries to write them
UNKILLABLE_S = 5.0  # the wait for a process that is stuck in the kernel, before it gets SIGKILL again
STUCK_S = 60.0  # after the first SIGKILL; the kernel needs a while to free a terabyte of memory, or a GPU's memory


class ProcessStarter(Protocol):
    """Starts the attempts of a launch's ranks, the first and the later ones, as processes of this machine."""

    def prepare(self, attempt: Attempt) -> None:
        """Do the work that is shared by all attempts, before the first process starts.

        Args:
            attempt: the attempt that will start.
        """

    def begin(self, attempt: Attempt) -> bool:
        """Begin an attempt. Return False if another process has begun it.

        Args:
            attempt: the attempt. True is returned again for an attempt that this process has begun.
        """

    def count_members(self, attempt: Attempt) -> int:
        """Return the number of processes that an attempt has.

        Args:
            attempt: the attempt.

        Raises:
            OSError: the number of GPUs is needed, and the replica sees no GPU.
        """

    def start(
        self, attempt: Attempt, pages: Sequence[SharedPage], close: Iterable[int], group: MemberGroup | None = None
    ) -> list[int]:
        """Start the processes of an attempt, and return their pids.

        Args:
            attempt: the attempt.
            pages: for each process, the memory that it shares with its supervisor.
            close: descriptors that the processes must not keep.
            group: the port and the end files of several processes. None, the default: there is one process.

        Raises:
            OSError: a process could not be started. The processes that had already started were killed.
        """

    def prepare_same_process(self, attempt: Attempt) -> None:
        """Prepare the output of an attempt that the process of the previous attempt will run.

        Args:
            attempt: the attempt.

        Raises:
            OSError: its log cannot be created.
        """

    def output_file(self, attempt: Attempt) -> Path | None:
        """Return the file with an attempt's output. None: only the pages have the end of it.

        Args:
            attempt: the attempt that was started.
        """

    def output_tail(self, attempt: Attempt) -> str:
        """Return the end of an attempt's output, for its outcome.

        Args:
            attempt: the attempt.
        """

    def note_output(self, attempt: Attempt, *, is_whole: bool = False) -> None:
        """Note the time and the size of an attempt's output, if this starter keeps such times.

        Args:
            attempt: the attempt.
            is_whole: True if the attempt has ended, so that its output is complete. Default False.
        """

    def write_log(self, attempt: Attempt, words: str) -> None:
        """Add lines to an attempt's output.

        Args:
            attempt: the attempt.
            words: the lines.
        """

    def give_up_process(self, attempt: Attempt) -> None:
        """Note that an attempt counts as ended although its process still exists, because no signal ends the
        process.

        Args:
            attempt: the attempt.
        """

    def copy_log(self, asked: Attempt, claimed: Attempt) -> int | None:
        """Start to copy the end of an attempt's output into the run's store, if other machines need the copy there.

        Args:
            asked: the attempt that was started, which has the output.
            claimed: the attempt that its process claimed, which gets the copy.

        Returns: the pid of the process that copies. None: there is nothing to copy.
        """


@dataclass
class RunningAttempt:
    """The process of an attempt, with its limits and the reason for which the supervisor ends it."""

    pid: int
    asked: Attempt
    """The attempt that the process was started for. It may have claimed a later one."""
    page: SharedPage
    watchdog: Watchdog
    started_at: float
    deadline: float
    why_then: Reason = "timeout"
    """The reason of the end, if the process reaches its deadline."""
    stopped_because: str | None = None
    """The reason of the stop that has set the deadline, in words. None: the user stopped the run, or nothing did."""
    ending: Reason | None = None
    """The reason why the supervisor ends the process. None: the supervisor has not asked the process to end."""
    error: str | None = None
    """The reason of the end as a sentence, if only the supervisor knows it."""
    error_line: str | None = None
    """The reason in one line, if the sentence is longer than that line. None: the sentence is the line."""
    stacks: list[str] = field(default_factory=list)
    """Dumps of the process's stacks that are not written to the store yet."""
    stacks_at: float = NEVER
    """The time of the next try to write these dumps."""
    asked_at: float = NEVER
    """The time of the SIGTERM to the process."""
    grace_s: float = 0.0
    """The seconds from SIGTERM to SIGKILL."""
    kill_at: float = NEVER
    """The time of the next SIGKILL to the process."""
    killed_at: float = NEVER
    """The time of the first SIGKILL to the process."""
    is_given_up: bool = False
    """True if the attempt was recorded as ended although no signal has ended the process."""
    began: float = field(default_factory=time.monotonic)
    """The time of the process's start, by `time.monotonic`. `started_at` is Unix time, whose clock may be changed while
    the process runs.
    """
    others: Sequence[Member] = ()
    """The other processes of a replica that has several. `pid`, `page` and `watchdog` are those of member 0."""
    group: MemberGroup | None = None
    """The port and the end files of these processes. None: there is one process."""
    others_at: float = NEVER
    """The time at which the other members are asked to end, because one member has failed."""
    how: str | None = None
    """The name of the start, if the process of the previous attempt runs this attempt. None: `how_started` returns the
    name.
    """
    is_failing: bool = False
    """True if a member has failed, so that the others must end."""
    accused: Member | None = None
    """The member that was found to hang, after the supervisor has killed all members. None: no member was."""
    rules: RuleWatch | None = field(default=None, repr=False)
    """Judges the rules of the run for this attempt. None: the run has no rules."""
    members: list[Member] = field(init=False)
    """All processes of the attempt; most replicas have one."""

    def __post_init__(self) -> None:
        self.members = [Member(0, self.pid, self.page, self.watchdog), *self.others]

    @property
    def living(self) -> list[Member]:
        """The members whose end was not seen yet."""
        return [member for member in self.members if member.exit_code is None]

    def note_member_end(self, pid: int, code: int, now: float) -> bool:
        """Note that a member has ended. Return True if it was the last member that ran.

        Args:
            pid: its pid.
            code: its exit code, or -N if signal N ended it.
            now: the time by `time.monotonic`.
        """
        for member in self.members:
            if member.pid == pid and member.exit_code is None:
                member.exit_code = code if member.left_with is None else member.left_with
                member.ended_at = now
                # If a member was killed, the others have already lost a connection. Otherwise they get a moment to end
                # by themselves.
                if member.has_failed and self.ending is None and not self.is_failing:
                    self.is_failing = True
                    self.others_at = now if member.has_vanished else now + LAST_CALL_S
                break
        return not self.living

    def end_others(self, now: float, grace_s: float) -> None:
        """Ask the members that still run to end, because another member has failed.

        Args:
            now: the time by `time.monotonic`.
            grace_s: the seconds until SIGKILL.
        """
        self.others_at = self.deadline = NEVER
        self._ask(now, grace_s)

    def _ask(self, now: float, grace_s: float) -> None:
        self.asked_at, self.grace_s = now, grace_s
        self.kill_at = now + grace_s
        for member in self.living:
            if not member.was_asked:
                member.was_asked = True
                os.kill(member.pid, signal.SIGTERM)

    def announce(self, at: float, notice: int = 0) -> None:
        """Tell all members the time by which they must have ended; see `SharedPage.announce`.

        Args:
            at: the time by `time.monotonic`.
            notice: the signal that announced the end of the machine. 0, the default: the user stopped the run.
        """
        for member in self.living:
            member.page.announce(at, notice)

    @property
    def exit_code(self) -> int:
        """The exit code of the member that failed first. If no member failed, the exit code of member 0."""
        cause = find_cause(self.members)
        code = (self.members[0] if cause is None else cause).exit_code
        return -signal.SIGKILL if code is None else code

    @property
    def attempt(self) -> Attempt:
        """The attempt that the process has claimed. Before its claim, the attempt that it was started for.

        This may differ from the newest attempt of the rank, which another process may have claimed.
        """
        return self.asked.at(int(self.page.claimed) - 1) if self.page.claimed else self.asked

    @property
    def is_leaving(self) -> bool:
        """True if the process has left the entrypoint by itself, and only runs functions that are registered at exit.

        The supervisor does not shorten the time of these functions.
        """
        return self._are_leaving and self.ending is None

    @property
    def _are_leaving(self) -> bool:
        return all(member.page.left_at > 0 for member in self.living) and bool(self.living)

    @property
    def is_ending(self) -> bool:
        """True if the process will end soon, by itself or because the supervisor asked it to end."""
        return self.ending is not None or self.is_failing or self._are_leaving

    def terminate(self, why: Reason, grace_s: float, because: str | None = None) -> bool:
        """Send SIGTERM to the rank's process, unless it is leaving. Its children get no signal, because the rank may
        need them to end properly.

        Args:
            why: the reason of the end.
            grace_s: the seconds until SIGKILL.
            because: the reason of a cancel, in words. None, the default: the cancel marker has it.

        Returns: True if the signal was sent.
        """
        self.deadline = NEVER
        if self.is_leaving or self.is_failing:
            return False
        self.ending, self.error = why, None if because is None else describe_cancel(self.asked.rank, because)
        self._ask(time.monotonic(), grace_s)
        return True

    def kill_soon(self) -> None:
        """End the grace of a rank that was asked to end, so that the next check kills it."""
        self.grace_s, self.kill_at = 0.0, time.monotonic()

    def may_be_killed(self, now: float) -> bool:
        """Return True if SIGKILL is due. A rank inside `replica.atomic()` gets more time.

        Args:
            now: the time by `time.monotonic`.
        """
        ats = [member.page.kill_at(self.asked_at, self.grace_s) for member in self.living]
        at = max(ats, default=now)
        self.kill_at = min(at, now + ATOMIC_LOOK_S)
        return at <= now

    def kill(self, now: float) -> None:
        """Send SIGKILL to the process and its descendants. The signal is repeated later for a process that is stuck.

        Args:
            now: the time by `time.monotonic`.
        """
        for member in self.living:
            member.was_killed = True
            os.kill(member.pid, signal.SIGKILL)
            kill_descendants(member.pid, limit_s=0.0)
        self.kill_at = now + UNKILLABLE_S
        self.killed_at = min(self.killed_at, now)

    def is_stuck(self, now: float) -> bool:
        """Return True if the process still exists a minute after SIGKILL, because a call of the kernel does not
        return.

        Args:
            now: the time by `time.monotonic`.
        """
        return now >= self.killed_at + STUCK_S

    def watch(self, now: float, ranks: ProcessStarter) -> float:
        """Check the progress of the rank.

        Without progress, record its stacks, and schedule SIGKILL when the limit is reached.

        Args:
            now: the time by `time.monotonic`.
            ranks: the starter of the process, which writes its log.

        Returns: the time of the next check.
        """
        ranks.note_output(self.asked)
        killed: WatchdogReport | None = None
        for member in self.living:
            self._end_slow_exit(member, now, ranks)
            report = None if self.ending is not None or self.is_failing else member.watchdog.look(now)
            if report is None:
                continue
            if report.is_kill:
                if killed is None:
                    killed, self.accused = report, member
                continue
            with contextlib.suppress(OSError):
                ranks.write_log(self.asked, report.stacks or report.sentence)
            if report.stacks is not None:
                self.stacks, self.stacks_at = [*self.stacks, report.stacks][-MOST_UNKEPT:], now
        if now >= self.stacks_at:
            self.keep_stacks()
        if killed is not None:
            self.ending, self.error, self.deadline = "hang", killed.sentence, NEVER
            self.asked_at, self.kill_at = -NEVER, now
        if self.ending is not None or self.is_failing:
            return now + LOOK_S
        return min((member.watchdog.next_look_at for member in self.living), default=now + LOOK_S)

    def _end_slow_exit(self, member: Member, now: float, ranks: ProcessStarter) -> None:
        """Schedule the SIGKILL of a member whose exit functions run for too long."""
        is_leaving = member.page.left_at > 0 and self.ending is None
        if not is_leaving or member.left_with is not None or now < member.page.left_at + LEAVE_S:
            return
        member.left_with = int(member.page.left_with)
        if len(self.living) > 1:  # the time of other exit functions is not shortened
            member.was_killed = True
            os.kill(member.pid, signal.SIGKILL)
        else:
            self.asked_at, self.kill_at = -NEVER, now
        with contextlib.suppress(OSError):
            ranks.write_log(
                self.asked, f"replicas: exit functions of the process ran for {LEAVE_S:g} s, so it was killed"
            )

    def keep_stacks(self) -> None:
        """Write the dumps of stacks into the store. A dump that fails is tried again later."""
        self.stacks_at = NEVER
        try:
            while self.stacks:
                attempt = self.attempt
                attempt.store.put(attempt.key(f"stacks/{self.page.n_stacks:.0f}.txt"), self.stacks[0].encode())
                self.page.n_stacks += 1
                self.stacks = self.stacks[1:]
        except (OSError, StoreError):
            self.stacks_at = time.monotonic() + STACKS_AGAIN_S

    def end_by(self, deadline: float, why: Reason) -> None:
        """Set an earlier deadline for the process.

        Args:
            deadline: the time by `time.monotonic`. A later time than the present deadline changes nothing.
            why: the reason of an end at this deadline.
        """
        if self.ending is None and deadline < self.deadline:
            self.deadline, self.why_then = deadline, why


def how_started(spec: RunSpec, attempt: Attempt) -> str | None:
    """Return how an attempt was started: "fork", or None for the attempt that was launched.

    Args:
        spec: the run, with the launched attempt.
        attempt: the attempt.
    """
    return None if attempt.number == spec.attempt else "fork"


def kill_processes(pids: Iterable[int]) -> None:
    """Kill the processes of an attempt whose start has failed.

    Args:
        pids: their pids.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def keep_page_of_command(task: StoredTask | None, page: SharedPage) -> None:
    """Keep the file of a page open if the replica runs a command, whose processes open the page.

    Args:
        task: the task of the run. None: it could not be read, and the page is not shared.
        page: the page of member 0, before its process is forked.
    """
    if task is not None and task.record.command is not None:
        page.keep_file()


def leave_supervisor(close: Iterable[int]) -> None:
    """Remove the supervisor's state from a process that was just forked: its session, signal handlers and descriptors.

    Args:
        close: the supervisor's descriptors.
    """
    os.setsid()
    with contextlib.suppress(OSError):  # some sandboxes lack it; then orphaned descendants survive the supervisor
        become_subreaper()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor in close:
        os.close(descriptor)


def read_task_ahead(spec: RunSpec) -> StoredTask | None:
    """Read the task of a run once for all attempts.

    Args:
        spec: the run.

    Returns: the task. None: it cannot be read now. Then each attempt reads it by itself, and reports its error.
    """
    try:
        task = read_task(store_at(spec.store_url), spec.run_id, spec.task_digest, spec.task_folder)
        task.prepare()
    except (ReplicasError, ValueError):
        return None
    return task
