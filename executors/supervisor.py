"""The process that watches over one local run: starts its ranks, ends them, and says how they ended.

One thread, its own session. It is a subreaper, and so is each rank: what a rank leaves behind becomes the
supervisor's child the moment the rank ends, and is ended too, whatever session it moved to. An attached run's
supervisor watches its launcher and ends the run when that is gone.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import sys
import time
import warnings
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from executors.attempt_records import Claim
from executors.errors import ReplicasError, StoreError
from executors.insisting import RETRY_S
from executors.local_launch import LocalLaunch, begin_attempt
from executors.logs import tail_text
from executors.outcome import (
    OUTPUT_TAIL_BYTES,
    Outcome,
    Reason,
    find_outcome,
    insist_on_outcome,
    request_cancel,
)
from executors.process import become_subreaper, children, kill_descendants, oom_kills, start_time
from executors.protocol import ReplicaHandle, ReplicaStatus
from executors.rank_process import adopt_surroundings, assign_all, become_rank
from executors.records import exists, find_record
from executors.replica import replica_key
from executors.store import Store, store_at
from executors.supervisor_lock import hold, open_locks
from executors.worker import Assignment

CANCEL_LOOK_S = 1.0  # a canceller on this machine wakes us; one elsewhere leaves only its marker
UNKILLABLE_S = 5.0  # how long a process stuck in the kernel is waited for


@dataclass
class _Running:
    """A rank's process."""

    rank: int
    slot: int
    started_at: float
    deadline: float
    ending: Reason | None = None
    """Why we told it to end."""
    kill_at: float = field(default=float("inf"))


class Supervisor:
    """Runs the ranks of one launch to their end."""

    def __init__(self, launch: LocalLaunch, launcher_pidfd: int | None, reply: int) -> None:
        self._launch = launch
        self._spec = launch.spec
        self._launcher_pidfd = launcher_pidfd
        self._reply: int | None = reply
        self._lock: int | None = None
        self._store: Store = store_at(self._spec.store_url)
        self._waiting: deque[Assignment] = deque()
        self._running: dict[int, _Running] = {}
        self._free_slots = deque(range(launch.places))
        self._oom_kills = oom_kills()
        self._started = start_time(os.getpid())
        self._look_at = time.monotonic() + CANCEL_LOOK_S
        self._wakeup, self._wakeup_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def start(self) -> None:
        """Begin the attempts, start what may run at once, and answer the launcher.

        An attempt that another process has begun is left to it. If a rank cannot be started, those before it are ended
        and every outcome is written before the answer goes.
        """
        reply = self._reply
        assert reply is not None
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)
        handles: list[str] = []
        begun: list[int] = []
        rank = self._spec.ranks[0]
        try:
            folder = self._launch.log_folder
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = open_locks(folder)
            # Before the first fork, whatever can be: after each, every page that this process touches is copied.
            for rank in self._spec.ranks:
                os.makedirs(self._launch.log_file(rank).parent, exist_ok=True, mode=0o700)
                if self._begin(rank):
                    hold(self._lock, rank, self._spec.attempt)
                    handles.append(self._handle(rank).to_json())
                    begun.append(rank)
            self._waiting.extend(assign_all(replace(self._launch, spec=replace(self._spec, ranks=tuple(begun)))))
            while self._waiting and self._free_slots:
                rank = self._waiting[0].rank
                self._start_rank(self._waiting[0])
                self._waiting.popleft()
        except (OSError, StoreError) as error:
            self._give_up(rank, error)
            answer: dict[str, Any] = {"error": str(error), "rank": rank}
        else:
            answer = {"handles": handles}
        with contextlib.suppress(BrokenPipeError), os.fdopen(reply, "w") as pipe:
            pipe.write(json.dumps(answer))
        self._reply = None

    def run(self) -> None:
        """Watch until every rank has ended and has its outcome."""
        poller = select.poll()
        poller.register(self._wakeup, select.POLLIN)
        if self._launcher_pidfd is not None:
            poller.register(self._launcher_pidfd, select.POLLIN)
        while self._running or self._waiting:
            poller_timeout_ms = max(0.0, self._next_event_at() - time.monotonic()) * 1000
            ready = {descriptor for descriptor, _ in poller.poll(min(poller_timeout_ms, 60_000))}
            if self._wakeup in ready:
                with contextlib.suppress(BlockingIOError):
                    if bytes([signal.SIGUSR1]) in os.read(self._wakeup, 4096):
                        self._look_at = 0.0
            self._reap()
            if self._launcher_pidfd in ready and self._launcher_pidfd is not None:
                poller.unregister(self._launcher_pidfd)
                self._launcher_pidfd = None
                self._end_abandoned()
            self._look_for_cancels()
            self._enforce_deadlines()
            while self._waiting and self._free_slots:
                assignment = self._waiting.popleft()
                try:
                    self._start_rank(assignment)
                except OSError as error:
                    self._record_start_failure(assignment.rank, str(error))

    # Starting

    def _handle(self, rank: int) -> ReplicaHandle:
        return self._launch.handle(rank, os.getpid(), self._started)

    def _begin(self, rank: int) -> bool:
        """Begin a rank's attempt, or find that this process has; False if it is another's."""
        handle = self._handle(rank)
        return begin_attempt(self._store, handle) == handle

    def _is_ours(self, rank: int) -> bool:
        with contextlib.suppress(StoreError):
            return self._begin(rank)
        return False  # what cannot be told is left alone

    def _start_rank(self, assignment: Assignment) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        output = os.open(self._launch.log_file(assignment.rank), flags, 0o600)
        try:
            slot = self._free_slots[0]
            gc.freeze()  # the rank's collector finds nothing of ours to look at, and so to copy
            pid = fork()
            if pid == 0:
                close = [self._wakeup, self._wakeup_writer, self._launcher_pidfd, self._reply, self._lock]
                become_rank(
                    assignment,
                    gpus=None if self._launch.gpu_slots is None else self._launch.gpu_slots[slot],
                    output=output,
                    close=[descriptor for descriptor in close if descriptor is not None],
                )
        finally:
            os.close(output)
        self._free_slots.popleft()
        now = time.monotonic()
        limit_s = self._launch.timeout_s
        deadline = float("inf") if limit_s is None else now + limit_s
        self._running[pid] = _Running(assignment.rank, slot, time.time(), deadline)

    def _give_up(self, failed_rank: int, error: Exception) -> None:
        """Undo a start that failed at one rank."""
        now = time.monotonic()
        for pid, running in self._running.items():
            self._end(pid, running, "cancelled", now)
        self._waiting.clear()
        reason = f"Rank {failed_rank} could not be started: {error}"
        ours = [rank for rank in self._spec.ranks if self._is_ours(rank)]  # those not reached yet, too
        with contextlib.suppress(StoreError):  # the store may be the very thing that failed
            for rank in ours:
                if rank != failed_rank:
                    request_cancel(self._store, self._spec.run_id, rank, self._spec.attempt, reason)
        started = {running.rank for running in self._running.values()}
        while self._running:
            self._reap()
            self._enforce_deadlines()
            time.sleep(0.005)
        for rank in ours:
            if rank not in started:
                self._record_start_failure(rank, reason)

    # Watching

    def _next_event_at(self) -> float:
        events = [self._look_at]
        for running in self._running.values():
            events.append(min(running.deadline if running.ending is None else running.kill_at, running.kill_at))
        return min(events)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            running = self._running.pop(pid, None)
            if running is None:
                continue  # something a rank left behind
            self._free_slots.append(running.slot)
            if not self._running.keys() >= set(children(os.getpid())):
                kill_descendants(os.getpid(), spare=self._running, limit_s=UNKILLABLE_S)
            self._conclude(running, pid, os.waitstatus_to_exitcode(status))

    def _look_for_cancels(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + CANCEL_LOOK_S
        for pid, running in self._running.items():
            if running.ending is None and self._is_cancelled(running.rank, pid):
                self._end(pid, running, "cancelled", now)
        for assignment in [waiting for waiting in self._waiting if self._is_cancelled(waiting.rank)]:
            self._waiting.remove(assignment)
            self._record(Outcome(assignment.rank, self._spec.attempt, ReplicaStatus.CANCELLED, "cancelled"))

    def _is_cancelled(self, rank: int, pid: int | None = None) -> bool:
        try:
            attempt = self._attempt_of(rank, pid)
            return exists(self._store, replica_key(self._spec.run_id, rank, attempt, "cancel.json"))
        except StoreError:
            return False  # asked again in a second

    def _attempt_of(self, rank: int, pid: int | None) -> int:
        """Return the attempt that a child of ours claimed; the one it was asked for when it claimed none.

        Not simply the newest: another process may have claimed that, and live on when ours ends.
        """
        attempt = self._spec.attempt
        while claim := find_record(
            self._store, replica_key(self._spec.run_id, rank, attempt, "started.json"), Claim.parse
        ):
            if claim.pid is not None and claim.pid == pid:
                return attempt
            attempt += 1
        return self._spec.attempt

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        for pid, running in self._running.items():
            if running.ending is None and now >= running.deadline:
                self._end(pid, running, "timeout", now)
            if now >= running.kill_at:
                os.kill(pid, signal.SIGKILL)
                kill_descendants(pid, limit_s=0.0)
                running.kill_at = now + UNKILLABLE_S

    def _end(self, pid: int, running: _Running, why: Reason, now: float) -> None:
        """Ask a rank to end; only the rank: its helpers are part of how it cleans up."""
        running.ending = why
        running.kill_at = now + self._launch.term_grace_s
        os.kill(pid, signal.SIGTERM)

    def _end_abandoned(self) -> None:
        """End the whole run: its launcher is gone. What was told to end before gets no more time."""
        now = time.monotonic()
        for pid, running in self._running.items():
            was_told = running.ending is not None or self._is_cancelled(running.rank, pid)
            self._mark_abandoned(running.rank, pid)
            if running.ending is None:
                self._end(pid, running, "cancelled", now)
            if was_told:
                running.kill_at = now
        for assignment in self._waiting:
            self._mark_abandoned(assignment.rank, None)
        self._look_at = 0.0

    def _mark_abandoned(self, rank: int, pid: int | None) -> None:
        with contextlib.suppress(StoreError):
            attempt = self._attempt_of(rank, pid)
            if find_outcome(self._store, self._spec.run_id, rank, attempt) is None:  # else it is only tidying up
                why = "the launcher of this attached run ended"
                request_cancel(self._store, self._spec.run_id, rank, attempt, why)

    # Concluding

    def _conclude(self, running: _Running, pid: int, exit_code: int) -> None:
        """Write the outcome of a rank that left none."""
        attempt = self._spec.attempt
        with contextlib.suppress(StoreError):
            attempt = self._attempt_of(running.rank, pid)
            if find_outcome(self._store, self._spec.run_id, running.rank, attempt) is not None:
                return
        status, reason, error = self._explain(running, exit_code)
        outcome = Outcome(
            running.rank,
            attempt,
            status,
            reason,
            exit_code,
            signal=signal.Signals(-exit_code).name if exit_code < 0 else None,
            error=error,
            pid=pid,
            started_at=running.started_at,
            output_tail=tail_text(self._launch.log_file(running.rank), OUTPUT_TAIL_BYTES),
        )
        self._record(outcome)

    def _explain(self, running: _Running, exit_code: int) -> tuple[ReplicaStatus, Reason, str | None]:
        who = f"Replica {running.rank} of {self._spec.world_size}"
        if running.ending == "timeout":
            return ReplicaStatus.FAILED, "timeout", f"{who} ran into its time limit of {self._launch.timeout_s:g} s."
        if running.ending == "cancelled":
            return ReplicaStatus.CANCELLED, "cancelled", None  # its marker says why
        if exit_code == -signal.SIGKILL and (now_killed := oom_kills()) > self._oom_kills:
            self._oom_kills = now_killed
            return ReplicaStatus.FAILED, "oom", f"{who} was killed by the kernel (SIGKILL): out of memory."
        if exit_code < 0:
            name = signal.Signals(-exit_code).name
            return ReplicaStatus.FAILED, "signal", f"{who} was ended by signal {-exit_code} ({name})."
        if exit_code == 128 + signal.SIGTERM:
            return ReplicaStatus.FAILED, "signal", f"{who} was told to end (SIGTERM), by nobody of ours."
        text = f"{who} ended by itself with exit code {exit_code}, before its entrypoint returned a result."
        return ReplicaStatus.FAILED, "no_result", text

    def _record_start_failure(self, rank: int, why: str) -> None:
        self._record(Outcome(rank, self._spec.attempt, ReplicaStatus.FAILED, "start_failed", error=why), limit_s=0)

    def _record(self, outcome: Outcome, limit_s: float = RETRY_S) -> None:
        try:
            insist_on_outcome(self._store, self._spec.run_id, outcome, limit_s)
        except StoreError as error:
            # Whoever polls next finds this process gone, and says what the store says.
            import logging  # 2 ms, on the way of every replica otherwise

            logging.getLogger(__name__).error("rank %d: no outcome could be written: %s", outcome.rank, error)


def fork() -> int:
    """Fork, without the warning of Python 3.12 and later."""
    if sys.version_info < (3, 12):
        return os.fork()
    with warnings.catch_warnings():
        # Python warns when a library such as OpenBLAS keeps a thread; the zygote's are idle and survive a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def become_supervisor(launch: LocalLaunch, launcher_pidfd: int | None, reply: int) -> NoReturn:
    """Be the supervisor of a launch, in a process just forked by the zygote. Answers on `reply`, then watches."""
    code = 1
    try:
        os.setsid()
        become_subreaper()
        if launch.spec.detach:
            launcher_pidfd = None
        try:
            adopt_surroundings(launch)  # first: the store may need the launcher's credentials
            supervisor = Supervisor(launch, launcher_pidfd, reply)
        except (OSError, ReplicasError, ValueError) as error:
            os.write(reply, json.dumps({"error": str(error), "rank": None}).encode())
            os._exit(code)
        supervisor.start()
        supervisor.run()
        code = 0
    finally:
        os._exit(code)
