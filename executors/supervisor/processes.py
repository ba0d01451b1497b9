"""How attempts become processes: what a supervisor needs from whoever starts them, and what it keeps of each."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from executors.attempt import Attempt
from executors.attempt.outcome import describe_cancel
from executors.errors import ReplicasError, StoreError
from executors.process import become_subreaper, kill_descendants
from executors.protocol import Reason
from executors.replica.shared_page import SharedPage
from executors.settings.run_spec import RunSpec
from executors.store import store_at
from executors.supervisor.watchdog import LOOK_S, Watchdog
from executors.task.stored import StoredTask, read_task

NEVER = float("inf")
ATOMIC_LOOK_S = 0.5
LEAVE_S = 120.0  # what is registered at exit may upload for a minute, and may wait for ever for a network
MOST_UNKEPT, STACKS_AGAIN_S = 4, 10.0  # dumps of a rank, and the time between two tries of what a store does not take
UNKILLABLE_S = 5.0  # how long a process stuck in the kernel is waited for
STUCK_S = 60.0  # from SIGKILL on; memory of a terabyte, or of a GPU, takes a while to be given back


class ProcessStarter(Protocol):
    """How the attempts of one launch's ranks, the first and those after it, become processes of this machine."""

    def prepare(self, attempt: Attempt) -> None:
        """Do what an attempt needs, as far as it can be done before the first process is started."""

    def begin(self, attempt: Attempt) -> bool:
        """Begin an attempt, or find that this process has; False if it is another process's."""

    def start(self, attempt: Attempt, page: SharedPage, close: Iterable[int]) -> int:
        """Start an attempt's process; return its pid.

        Args:
            page: the memory that it shares with its supervisor.
            close: descriptors that it must not keep.
        """

    def output_tail(self, attempt: Attempt) -> str:
        """Return the end of an attempt's output, for its outcome."""

    def note_output(self, attempt: Attempt, *, is_whole: bool = False) -> None:
        """Note how far an attempt's output has come, if its times are kept here.

        Args:
            is_whole: the attempt has ended.
        """

    def write_log(self, attempt: Attempt, words: str) -> None:
        """Add to an attempt's output."""

    def give_up_process(self, attempt: Attempt) -> None:
        """Note that an attempt is over though its process lives on, which nothing ends, with all that it holds."""

    def copy_log(self, asked: Attempt, claimed: Attempt) -> int | None:
        """Begin to copy the end of an attempt's output into the run's store, if it is to be there.

        Args:
            asked: the attempt that was started, which has the output.
            claimed: the attempt that its process claimed, which gets the copy.

        Returns: the pid of the process that does, and ends soon; None: there is nothing to copy.
        """


@dataclass
class RunningAttempt:
    """The process of an attempt."""

    pid: int
    asked: Attempt
    """The attempt asked for; the process may have claimed a later one."""
    page: SharedPage
    watchdog: Watchdog
    started_at: float
    deadline: float
    why_then: Reason = "timeout"
    """Why it is ended at its deadline."""
    ending: Reason | None = None
    """Why the supervisor ended it."""
    error: str | None = None
    """The same as a sentence, where the supervisor alone knows it."""
    left_with: int | None = None
    """The exit code of a process that the supervisor killed because it did not leave."""
    stacks: list[str] = field(default_factory=list)
    """Dumps of its stacks that the store has not taken yet."""
    stacks_at: float = NEVER
    """When they are to be put there."""
    asked_at: float = NEVER
    grace_s: float = 0.0
    kill_at: float = NEVER
    killed_at: float = NEVER
    """When it was first killed."""
    is_given_up: bool = False
    """Whether its attempt is over though no signal has ended it."""
    began: float = field(default_factory=time.monotonic)
    """When it was started, by `time.monotonic`; `started_at` is by a clock that may be set meanwhile."""

    @property
    def attempt(self) -> Attempt:
        """The attempt that the process claimed; the one that it was asked for while it has claimed none.

        Not simply the newest: another process may have claimed that, and live on when this one ends.
        """
        return self.asked.at(int(self.page.claimed) - 1) if self.page.claimed else self.asked

    @property
    def is_leaving(self) -> bool:
        """Whether it ended by itself, and runs what was registered at exit: that has its time, whatever is asked."""
        return self.page.left_at > 0 and self.ending is None

    @property
    def is_ending(self) -> bool:
        """Whether it ends already: asked to, or by itself."""
        return self.ending is not None or self.page.left_at > 0

    def terminate(self, why: Reason, grace_s: float, because: str | None = None) -> bool:
        """Ask the rank to end, if it is not leaving; only the rank: its helpers are part of how it cleans up.

        Args:
            because: why it is cancelled, in words. None: its marker says so.

        Returns: whether it did.
        """
        self.deadline = NEVER
        if self.is_leaving:
            return False
        self.ending, self.error = why, None if because is None else describe_cancel(self.asked.rank, because)
        self.asked_at, self.grace_s = time.monotonic(), grace_s
        self.kill_at = self.asked_at + grace_s
        os.kill(self.pid, signal.SIGTERM)
        return True

    def kill_soon(self) -> None:
        """Give a rank that was asked to end no more time."""
        self.grace_s, self.kill_at = 0.0, time.monotonic()

    def may_be_killed(self, now: float) -> bool:
        """Return whether it is time to: what the rank must not be interrupted in keeps that off for a while."""
        at = self.page.kill_at(self.asked_at, self.grace_s)
        self.kill_at = min(at, now + ATOMIC_LOOK_S)
        return at <= now

    def kill(self, now: float) -> None:
        """Kill it and all that it started; what is stuck in the kernel is killed again."""
        os.kill(self.pid, signal.SIGKILL)
        kill_descendants(self.pid, limit_s=0.0)
        self.kill_at = now + UNKILLABLE_S
        self.killed_at = min(self.killed_at, now)

    def is_stuck(self, now: float) -> bool:
        """Return whether no signal ends it, as long as the call of the kernel takes that it is in: perhaps for ever."""
        return now >= self.killed_at + STUCK_S

    def watch(self, now: float, ranks: ProcessStarter) -> float:
        """Look whether it makes progress; keep its stacks if it does not, and have it killed when it must be.

        Returns: when to look again.
        """
        ranks.note_output(self.asked)
        if self.is_leaving and self.left_with is None and now >= self.page.left_at + LEAVE_S:
            self.left_with = int(self.page.left_with)
            self.asked_at, self.kill_at = -NEVER, now
            with contextlib.suppress(OSError):
                ranks.write_log(
                    self.asked, f"replicas: what runs at the exit of the process took {LEAVE_S:g} s: killed"
                )
        report = self.watchdog.look(now) if self.ending is None else None
        if report is not None and not report.is_kill:
            with contextlib.suppress(OSError):
                ranks.write_log(self.asked, report.stacks or report.sentence)
            if report.stacks is not None:
                self.stacks, self.stacks_at = [*self.stacks, report.stacks][-MOST_UNKEPT:], now
        if now >= self.stacks_at:
            self.keep_stacks()
        if report is not None and report.is_kill:
            self.ending, self.error, self.deadline = "hang", report.sentence, NEVER
            self.asked_at, self.kill_at = -NEVER, now
        return self.watchdog.next_look_at if self.ending is None else now + LOOK_S

    def keep_stacks(self) -> None:
        """Put the dumps into the store that are not there yet; those that it does not take are tried again."""
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
        """Have it asked to end at a time of the monotonic clock, if it is not to end before."""
        if self.ending is None and deadline < self.deadline:
            self.deadline, self.why_then = deadline, why


def how_started(spec: RunSpec, attempt: Attempt) -> str | None:
    """Return how an attempt was started: that of the launch by the launch, those after it by a fork."""
    return None if attempt.number == spec.attempt else "fork"


def leave_supervisor(close: Iterable[int]) -> None:
    """Leave nothing of a supervisor in a process just forked but the watch on it.

    Args:
        close: the supervisor's descriptors.
    """
    os.setsid()
    with contextlib.suppress(OSError):  # a sandbox that does not know it: what is orphaned is then not ended by us
        become_subreaper()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for descriptor in close:
        os.close(descriptor)


def read_task_ahead(spec: RunSpec) -> StoredTask | None:
    """Read a run's task once for all attempts. None when it cannot be read: each tries again, and says why."""
    try:
        task = read_task(store_at(spec.store_url), spec.run_id, spec.task_digest, spec.task_folder)
        task.prepare()
    except (ReplicasError, ValueError):
        return None
    return task
