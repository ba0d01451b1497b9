"""What every replica runs, on every backend: claim the attempt, call the entrypoint, leave one outcome.

`main()` owns its process: a forked child locally, `python -m executors.worker` elsewhere. `call()` does the same inside
a process of a third party, and so touches neither its descriptors nor its signals.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import itertools
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from executors import replica as environment
from executors.attempt import Attempt, Claim
from executors.attempt.outcome import describe_end
from executors.errors import HangError, ReplicasError, ResultError, StoreError
from executors.metrics.recorder import Recorder
from executors.native import RunSpec
from executors.process import children, flush_c_streams, kill_descendants, start_time
from executors.protocol import Outcome, Reason, ReplicaStatus
from executors.replica import Replica
from executors.shared_page import SharedPage
from executors.store import store_at
from executors.store.records import RETRY_S, is_gone, read_record, retry, to_bytes
from executors.store.url import split_address
from executors.supervision.decisions import DecisionLog, barred_by
from executors.supervision.orders import words_of_bar
from executors.task.record import RunRecord
from executors.task.stored import StoredTask, read_task
from executors.worker.fail_fast import end_others
from executors.worker.failure import describe_failure, fingerprint_of
from executors.worker.health_check import LIMIT_S, UnhealthyError, check_health
from executors.worker.heartbeat import Deadline, Heartbeat
from executors.worker.log_copy import FINAL_BYTES, LogCopy
from executors.worker.result import to_json_value
from executors.worker.sigterm import TERMINATED, handle_sigterm, ignore_sigterm, sigterm_arrived
from executors.worker.surroundings import NoGpuError, load_task, seed_generators, set_environment
from executors.worker.watched import be_watched, end_watch

if TYPE_CHECKING:
    from executors.worker.tracking import Tracking

MAX_LAST_LINE = 300
TIMED_OUT = 124  # as the command `timeout` leaves
LAST_WRITE_S = 5.0  # how long a store that hangs holds up the end of a replica that does not react


@dataclass(frozen=True)
class Assignment:
    """What a replica's process is given by its parent, or by the command that started it."""

    spec: RunSpec
    """The run. The replica claims the attempt of the spec, or the next that is free."""
    rank: int
    task: StoredTask | None = None
    """The task, if the parent has read it."""
    supervisor_pid: int | None = None
    """The parent that supervises this process; it ends with it. None: no supervisor."""
    output_tail: Callable[[], str] = str
    """Returns the end of the output, for the outcome."""
    log_file: Path | None = None
    """The output, where its end is to be copied into the rendezvous."""
    term_grace_s: float = 5.0
    torch_threads: int | None = None
    timeout_s: float | None = None
    """The time limit of the entrypoint, where this process has to end itself."""
    gpu: str | None = None
    """What was asked for, and is here as far as the backend knows."""
    how: str | None = None
    """How the attempt was started; see `Outcome`."""
    page: SharedPage | None = None
    """What the parent sees of this process."""


class CancelledBeforeStart(ReplicasError):
    """The attempt was cancelled before its process came up."""


def main(assignment: Assignment) -> NoReturn:
    """Run one replica in a process of its own, and leave it."""
    faulthandler.enable()  # a segfault leaves its Python stack
    handle_sigterm(assignment.page, is_supervised=assignment.supervisor_pid is not None)
    code = 1
    try:
        code = _Worker(assignment, owns_process=True).run()
    except (CancelledBeforeStart, SystemExit):
        code = TERMINATED
    except BaseException:
        traceback.print_exc()
    _leave(code)


def call(run: str, digest: str | None = None) -> Any:
    """Run one replica inside a process of a third-party executor, which has this as its entrypoint.

    Args:
        run: `<store url>/<run id>`. The rank comes from `REPLICA_RANK`.
        digest: of the task that was launched, where a launch can carry it.

    Returns: what the user's entrypoint returned, as a JSON value. Its exceptions are passed on.
    """
    store_url, run_id = split_address(run)
    world_size = read_record(store_at(store_url), f"{run_id}/run.json", RunRecord.parse).world_size
    rank = int(os.environ[environment.RANK])
    worker = _Worker(Assignment(RunSpec(run_id, store_url, "", world_size, (rank,)), rank), owns_process=False)
    set_environment(worker.replica)
    worker.heartbeat.start()
    try:
        outcome = worker.succeeded(_called(worker.load(read_task(worker.attempt.store, run_id, digest))))
        error: BaseException | None = None
    except BaseException as raised:
        outcome, error = worker.raised(raised), raised
        if isinstance(raised, KeyboardInterrupt):
            worker.attempt.request_cancel()
    worker.stop(outcome)
    recorded = worker.attempt.record(outcome, retry_s=RETRY_S)
    if error is not None:
        raise error
    if recorded.status is not ReplicaStatus.SUCCEEDED and recorded.error:
        raise ReplicasError(recorded.error)
    return outcome.result


def claim(asked: Attempt) -> tuple[Attempt, str]:
    """Claim the attempt asked for, or the next free one: a service may start the same input twice.

    Returns: the attempt, and the nonce of its claim.

    Raises:
        CancelledBeforeStart: an attempt on the way, from the one asked for on, was cancelled; or the log of decisions
            bars the rank, by a cancel or a stop that came before it.
    """
    nonce, pid, now = os.urandom(16).hex(), os.getpid(), time.time()
    claim = {"nonce": nonce, "pid": pid, "pid_started": start_time(pid), "host": socket.gethostname(), "at": now}
    for attempt in map(asked.at, itertools.count(asked.number)):
        if retry(functools.partial(attempt.has, "cancel.json")):
            _end_before_start(attempt)
        if retry(functools.partial(_nonce_that_counts, attempt, to_bytes(claim))) == nonce:
            # Behind the claim: who cancels looks for claims behind the entry, so one of the two sees the other.
            log = retry(DecisionLog(attempt.store, attempt.run_id).read)
            if (entry := barred_by(log, attempt.rank)) is not None:
                attempt.request_cancel(words_of_bar(entry))
                _end_before_start(attempt)
            return attempt, nonce
    raise AssertionError("unreachable")


def _end_before_start(attempt: Attempt) -> NoReturn:
    cancelled = attempt.ended(ReplicaStatus.CANCELLED, "cancelled", pid=os.getpid(), started_at=time.time())
    attempt.record(cancelled, retry_s=RETRY_S)
    raise CancelledBeforeStart(f"Attempt {attempt.number} of rank {attempt.rank} was cancelled before it started.")


def _nonce_that_counts(attempt: Attempt, claim: bytes) -> str:
    """Create a claim and return the nonce of the one that exists; safe to do again when a reply was lost."""
    # Whether the create succeeded is not the question: only what exists decides.
    attempt.store.put_if_absent(attempt.key("started.json"), claim)
    return read_record(attempt.store, attempt.key("started.json"), Claim.parse).nonce


class _Worker:
    """One replica in this process, which has claimed its attempt."""

    def __init__(self, assignment: Assignment, *, owns_process: bool) -> None:
        self._assignment = assignment
        self._owns_process = owns_process
        self._started_at = time.time()
        spec, rank = assignment.spec, assignment.rank
        store = store_at(spec.store_url)
        if spec.chaos:
            from executors.chaos import inject_faults

            store = inject_faults(store, spec.chaos, rank, spec.attempt)
        began = time.monotonic()
        self.attempt, nonce = claim(Attempt(store, spec.run_id, rank, spec.attempt))
        number, url = self.attempt.number, spec.store_url
        self.replica = Replica(rank, spec.world_size, spec.run_id, number, url, claimed_nonce=nonce)
        self.replica.store = store
        self.replica.page = assignment.page
        self.replica.recorder = Recorder(store, spec.run_id, rank, number, began=began)
        parent, grace_s = assignment.supervisor_pid, assignment.term_grace_s
        self._log = None if assignment.log_file is None else LogCopy(self.attempt, assignment.log_file)
        at_cancel = self._end_cancelled if owns_process and parent is None else None
        self.heartbeat = Heartbeat(
            self.replica, supervisor_pid=parent, grace_s=grace_s, log=self._log, at_cancel=at_cancel
        )
        self._tracking: Tracking | None = None
        self._deadline: Deadline | None = None
        if assignment.timeout_s is not None:
            self._deadline = Deadline(assignment.timeout_s, grace_s, self._end_out_of_time)

    def run(self) -> int:
        """Call the entrypoint and leave the outcome; return the process's exit code."""
        assignment, deadline = self._assignment, self._deadline
        try:
            set_environment(self.replica, assignment.torch_threads)
            if assignment.page is not None:
                be_watched(assignment.page)
            self.heartbeat.start()
            spec = assignment.spec
            task = assignment.task or read_task(self.attempt.store, spec.run_id, spec.task_digest)
            if deadline is not None:
                deadline.start()
            value = _called(self.load(task))
            self._let_finish()
            outcome = self.succeeded(value)
        except BaseException as error:
            self._let_finish()
            if sigterm_arrived() and assignment.supervisor_pid is not None and not self.heartbeat.supervisor_is_gone:
                self.stop(None)
                return TERMINATED  # the supervisor sent SIGTERM, knows why, and writes the outcome
            if deadline is not None and deadline.has_passed:
                outcome = self._out_of_time(TERMINATED)
            else:
                outcome = self._terminated_from_outside() if sigterm_arrived() else self.raised(error)
            _flush()
            half_a_line = assignment.output_tail().rpartition("\n")[2]
            with contextlib.suppress(OSError, ValueError, AttributeError):  # the user may have closed or unset it
                sys.stderr.write("\n" * bool(half_a_line) + f"{outcome.error}\n")
        if deadline is not None:
            deadline.stop()
        self.stop(outcome)
        _flush()
        self._record(outcome)
        return outcome.exit_code if outcome.exit_code is not None else 1

    def _let_finish(self) -> None:
        """Let nothing interrupt what is left to do: what the entrypoint did is worth writing down."""
        ignore_sigterm()
        if self._assignment.page is not None:
            end_watch(self._assignment.page)

    def load(self, task: StoredTask) -> Callable[[], Any]:
        """Return the task to call, having checked this process's health and begun to hand its numbers to a tracker."""
        launched, replica = task.record.launched_with, self.replica
        if launched is not None and launched.health_check is not None:
            seed_generators(replica, task.record.seed, but=set())  # the check may import the user's module
            with replica.section("health check", LIMIT_S):
                check_health(launched.health_check, self._end_unhealthy if self._owns_process else None)
        if launched is None or launched.tracker is None or replica.recorder is None:
            return load_task(replica, task, self._assignment.gpu)
        from executors.worker.tracking import Tracking, tracked

        # Loaded before the generators are seeded: what it draws is not the user's. Begun after: it loads more modules.
        tracking = Tracking(launched.tracker, tracked(task, replica))
        loaded = load_task(replica, task, self._assignment.gpu)
        self._tracking, replica.recorder.on_line = tracking, tracking.take
        tracking.start()
        return loaded

    def stop(self, outcome: Outcome | None) -> None:
        """Write what is left of measurements; None: the supervisor ends this process soon, and records how it ended."""
        self.heartbeat.stop()
        if self._tracking is not None:
            has_succeeded = outcome is not None and outcome.status is ReplicaStatus.SUCCEEDED
            self._tracking.finish(has_succeeded=has_succeeded, is_hurried=outcome is None or sigterm_arrived())

    def succeeded(self, value: Any) -> Outcome:
        """Return the outcome of an entrypoint that returned: a success, unless what it returned is not a JSON value."""
        try:
            result = to_json_value(value)
        except ResultError as error:
            return self._failed("result_not_serializable", str(error), 1, fingerprint=fingerprint_of(error))
        if (page := self.replica.page) is not None and page.knows_of_end:
            return self._left(page, result)
        return self._ended(ReplicaStatus.SUCCEEDED, None, exit_code=0, result=result)

    def raised(self, error: BaseException) -> Outcome:
        """Return the outcome of an entrypoint that raised, or left by `SystemExit`."""
        if isinstance(error, SystemExit):
            if (page := self.replica.page) is not None and page.ending_at is not None:
                return self._left(page)
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            said = f" ({error.code})" if isinstance(error.code, str) else ""
            text = f"The entrypoint ended its process with exit code {code}{said} instead of returning a result."
            _flush()
            if not said and (last := self._assignment.output_tail().strip().rpartition("\n")[2]):
                text += f" Its last line was: {last[:MAX_LAST_LINE]}"  # argparse says there what is wrong
            return self._failed("no_result", text, code, fingerprint=fingerprint_of(error))
        if isinstance(error, NoGpuError):
            return self._failed("start_failed", str(error), 1, fingerprint=fingerprint_of(error))
        if isinstance(error, UnhealthyError):
            return self._failed("start_failed", str(error), 1)  # perhaps the machine's fault: not `deterministic`
        reason: Any = error.outcome_reason if isinstance(error, ReplicasError | HangError) else "exception"
        return self._failed(reason, exit_code=1, **describe_failure(error))

    def _left(self, page: SharedPage, result: Any = None) -> Outcome:
        """Return the outcome of a replica that left because it was asked to, in its own time."""
        if page.is_stopping:
            text = self._sentence("stopped")
            return self._ended(ReplicaStatus.CANCELLED, "cancelled", error=text, exit_code=TERMINATED, result=result)
        text = self._sentence("announced", name=page.notice)
        return self._failed("signal", text, TERMINATED, signal=page.notice, result=result)

    def _out_of_time(self, exit_code: int) -> Outcome:
        return self._failed("timeout", self._sentence("timeout", limit_s=self._assignment.timeout_s), exit_code)

    def _terminated_from_outside(self) -> Outcome:
        """Return the outcome after a SIGTERM that no supervisor sent."""
        if self._assignment.supervisor_pid is not None:
            text = self._sentence("orphaned", attempt=self.attempt.number)
            return self._failed("lost", text, TERMINATED, signal="SIGTERM")
        is_cancelled = False
        with contextlib.suppress(StoreError):
            is_cancelled = self.attempt.has("cancel.json")
        text = self._sentence("cancelled" if is_cancelled else "terminated")
        return self._failed("signal", text, TERMINATED, signal="SIGTERM")

    def _failed(self, reason: Reason, error: str | None, exit_code: int, **more: Any) -> Outcome:
        return self._ended(ReplicaStatus.FAILED, reason, error=error, exit_code=exit_code, **more)

    def _ended(self, status: ReplicaStatus, reason: Reason | None, **more: Any) -> Outcome:
        reported, page = dict(self.replica.reported), self.replica.page
        reached = {name: reported[name] for name in ("round", "step") if name in reported} or None
        more = {"reached": reached, **({} if page is None else page.told()), **more}
        more |= {"pid": os.getpid(), "started_at": self._started_at, "reported": reported, "how": self._assignment.how}
        return self.attempt.ended(status, reason, **more)

    def _sentence(self, ending: str, **values: Any) -> str:
        return describe_end(ending, self.replica.rank, self.replica.world_size, **values)

    def _record(self, outcome: Outcome) -> None:
        if is_gone(self.attempt.store, f"{self.attempt.run_id}/run.json"):  # it would be all that there is of the run
            return
        if self._log is not None:
            self._log.put(FINAL_BYTES)  # before the outcome: who finds that finds the whole
        outcome = replace(outcome, output_tail=self._assignment.output_tail())
        recorded = self.attempt.record(outcome, retry_s=RETRY_S)
        spec = self._assignment.spec
        if spec.fail_fast and self._assignment.supervisor_pid is None:
            with contextlib.suppress(StoreError):
                end_others(self.attempt, recorded, spec.world_size)

    def _end_out_of_time(self) -> None:
        self._end_at_once(self._out_of_time(TIMED_OUT), TIMED_OUT)

    def _end_unhealthy(self, words: str) -> None:
        self._end_at_once(self._failed("start_failed", words, 1), 1)

    def _end_cancelled(self) -> None:
        self._end_at_once(self._terminated_from_outside(), TERMINATED)

    def _end_at_once(self, outcome: Outcome, exit_code: int) -> None:
        """Leave the outcome and the process, in a thread beside the entrypoint's."""
        try:
            self._record(outcome)
            self.heartbeat.stop_behind_outcome(LAST_WRITE_S)
            kill_descendants(os.getpid())
        finally:
            os._exit(exit_code)


def _called(task: Callable[[], Any]) -> Any:
    """Call the entrypoint and return its result; `sys.exit(0)` returns None, unless it answers a SIGTERM."""
    try:
        return task()
    except SystemExit as left:
        if sigterm_arrived() or (left.code is not None and not (isinstance(left.code, int) and left.code == 0)):
            raise
        return None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a full disk; closed or unset by the user
            stream.flush()
    flush_c_streams()


def _leave(code: int) -> NoReturn:
    """Run what was registered at exit, flush, and go without the half second that tearing torch down takes.

    What the user's code left running ends here: a supervisor that would do it may be gone.
    """
    try:
        atexit._run_exitfuncs()
        _flush()
        if children(os.getpid()):
            kill_descendants(os.getpid())
    finally:
        os._exit(code)
