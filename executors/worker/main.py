"""What every replica runs, on every backend: claim the attempt, call the entrypoint, leave one outcome.

`main()` owns its process, which a supervisor has started. `call()` does the same inside a process of a third party, and
so touches neither its descriptors nor its signals.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from executors import replica as environment
from executors.attempt import Attempt
from executors.attempt.outcome import describe_end
from executors.errors import HangError, ReplicasError, ResultError, StoreError
from executors.metrics.recorder import Recorder
from executors.patience import BRIEF, OUTCOME, START, retry, waits
from executors.process import DescriptorReserve, ask_children_to_end, children, flush_c_streams, kill_descendants
from executors.protocol import Outcome, Reason, ReplicaStatus
from executors.replica import Replica
from executors.replica.shared_page import SharedPage
from executors.replica.warning_log import WarningLog
from executors.settings.run_spec import RunSpec
from executors.store import store_at
from executors.store.record_names import run_record_key, run_was_deleted
from executors.store.records import read_record
from executors.store.run_key import hold_key
from executors.store.url import split_address
from executors.task.entrypoint import command_for
from executors.task.record import LaunchedWith, RunRecord
from executors.task.stored import StoredTask, read_task
from executors.worker.claim import CancelledBeforeStart, claim
from executors.worker.failure import describe_failure, fingerprint_of, is_store_failure, last_error
from executors.worker.health_check import LIMIT_S, UnhealthyError, check_health
from executors.worker.heartbeat import Heartbeat
from executors.worker.log_copy import FINAL_BYTES, LogCopy
from executors.worker.result import to_json_value
from executors.worker.sigterm import TERMINATED, handle_sigterm, ignore_sigterm, sigterm_arrived
from executors.worker.surroundings import (
    EARLY_WARNINGS,
    NoGpuError,
    check_gpu,
    fill_in_environment,
    seed_generators,
    set_environment,
)
from executors.worker.trained_alone import has_trained_alone
from executors.worker.warning_hook import heard
from executors.worker.watched import be_watched, end_watch

if TYPE_CHECKING:
    from executors.worker.tracking import Tracking

BAD_OPTIONS = 2  # argparse and click leave so
AFTER_THE_END = "this attempt began after the last round"
AFTER_THE_END_ADVICE = (
    "This attempt began after the last round: the run is complete, and the model holds the anchor. A loop of the "
    "script's own made no pass, so the variables that it sets do not exist. Set them before the loop, or loop over "
    "diloco.steps(), which makes the last pass once more."
)


@dataclass(frozen=True)
class Assignment:
    """What a replica's process is given by its parent, or by the command that started it."""

    spec: RunSpec
    """The run. The replica claims the attempt of the spec, or the next that is free."""
    rank: int
    task: StoredTask | None = None
    """The task, if the parent has read it."""
    supervisor_pid: int | None = None
    """The parent that supervises this process; it ends with it. None: a third party's process."""
    output_tail: Callable[[], str] = str
    """Returns the end of the output, for the outcome."""
    log_file: Path | None = None
    """The output, where its end is to be copied into the rendezvous."""
    term_grace_s: float = 5.0
    torch_threads: int | None = None
    gpu: str | None = None
    """What was asked for, and is here as far as the backend knows."""
    how: str | None = None
    """How the attempt was started; see `Outcome`."""
    page: SharedPage | None = None
    """What the parent sees of this process."""


def main(assignment: Assignment) -> NoReturn:
    """Run one replica in a process of its own, and leave it."""
    faulthandler.enable()  # a segfault leaves its Python stack
    handle_sigterm(assignment.page)
    waits.say = lambda words: _say(f"replicas: rank {assignment.rank}: {words}\n")
    code = 1
    try:
        code = _Worker(assignment).run()
    except (CancelledBeforeStart, SystemExit):
        code = TERMINATED
    except BaseException as error:
        traceback.print_exc()
        if assignment.page is not None:
            assignment.page.store_failed = is_store_failure(error)
    page = assignment.page
    if page is not None:
        page.left_with, page.left_at = code, time.monotonic()
    is_asked = sigterm_arrived() or (page is not None and page.ending_at is not None)
    _leave(code, assignment.term_grace_s if is_asked else 0.0)


def call(run: str, digest: str | None = None) -> Any:
    """Run one replica inside a process of a third-party executor, which has this as its entrypoint.

    Args:
        run: `<store url>/<run id>`. The rank comes from `REPLICA_RANK`.
        digest: of the task that was launched, where a launch can carry it.

    Returns: what the user's entrypoint returned, as a JSON value. Its exceptions are passed on.
    """
    store_url, run_id = split_address(run)
    record = retry(lambda: read_record(store_at(store_url), run_record_key(run_id), RunRecord.parse), START)
    rank = int(os.environ[environment.RANK])
    spec = RunSpec(run_id, store_url, "", record.settings, (rank,), launched_at=record.created_at)
    worker = _Worker(Assignment(spec, rank))
    argv = sys.argv
    set_environment(worker.replica)
    worker.heartbeat.start()
    with heard(worker.warnings):  # this process continues afterwards, and its later warnings are not the replica's
        try:
            outcome = worker.succeeded(
                _called(worker.load(read_task(worker.attempt.store, run_id, digest, patience=START)))
            )
            error: BaseException | None = None
        except BaseException as raised:
            outcome, error = worker.raised(raised), raised
            if isinstance(raised, KeyboardInterrupt):
                with contextlib.suppress(StoreError):
                    worker.attempt.request_cancel()
        finally:
            sys.argv = argv  # it is the caller's process
        worker.stop(outcome)
    if error is not None:
        try:
            worker.attempt.record(worker.with_warnings(outcome), patience=BRIEF)  # its caller waits for the error
        except StoreError as failure:  # nobody has seen yet what was raised, and that counts for more
            _say(f"replicas: rank {rank}: how it ended cannot be recorded: {failure}\n")
        raise error
    recorded = worker.record(outcome)
    if recorded.status is not ReplicaStatus.SUCCEEDED and recorded.error:
        raise ReplicasError(recorded.error)
    return outcome.result


class _Worker:
    """One replica in this process, which has claimed its attempt."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._started_at = time.time()
        spec, rank = assignment.spec, assignment.rank
        store = retry(lambda: store_at(spec.store_url), START)
        if spec.settings.chaos:
            from executors.worker.chaos import inject_faults

            store = inject_faults(store, spec.settings.chaos, rank, spec.attempt)
        began = time.monotonic()
        n_decisions = 0 if assignment.page is None else int(assignment.page.n_decisions)
        hold_key(store.url, spec.run_id, spec.key)
        self.attempt, nonce = claim(Attempt(store, spec.run_id, rank, spec.attempt), n_decisions, spec.key)
        number, url = self.attempt.number, spec.store_url
        self.replica = Replica(rank, spec.world_size, spec.run_id, number, url, claimed_nonce=nonce)
        self.replica.store = store
        self.replica.page = assignment.page
        if assignment.page is not None:
            assignment.page.claimed = number + 1
        self.warnings = self.replica.warnings = WarningLog(self.attempt)
        while EARLY_WARNINGS:
            self.warnings.add(EARLY_WARNINGS.pop(0))
        self.replica.recorder = Recorder(store, spec.run_id, rank, number, began=began)
        self.replica.recorder.on_warning = self.warnings.add
        parent, grace_s = assignment.supervisor_pid, assignment.term_grace_s
        self._log = None if assignment.log_file is None else LogCopy(self.attempt, assignment.log_file)
        self.heartbeat = Heartbeat(self.replica, supervisor_pid=parent, grace_s=grace_s, log=self._log)
        self._tracking: Tracking | None = None
        self._reserve = DescriptorReserve()
        self._raised: BaseException | None = None
        self._task: StoredTask | None = None
        self._entrypoint: str | None = None
        """The entrypoint if it got no options; None while it is not known, or if it got some."""

    def run(self) -> int:
        """Call the entrypoint and leave the outcome; return the process's exit code."""
        with heard(self.warnings):
            return self._run()

    def _run(self) -> int:
        assignment = self._assignment
        try:
            set_environment(self.replica, assignment.torch_threads)
            if assignment.page is not None:
                be_watched(assignment.page)
            self.heartbeat.start()
            spec = assignment.spec
            task = assignment.task or read_task(
                self.attempt.store, spec.run_id, spec.task_digest, spec.task_folder, START
            )
            value = _called(self.load(task))
            self._let_finish()
            outcome = self.succeeded(value)
            if assignment.page is not None:
                assignment.page.has_result = outcome.status is ReplicaStatus.SUCCEEDED
        except BaseException as error:
            self._let_finish()
            if sigterm_arrived() and not self.heartbeat.supervisor_is_gone:
                self.stop(None)
                return TERMINATED  # the supervisor sent SIGTERM, knows why, and writes the outcome
            self._reserve.release()
            outcome = self._orphaned() if sigterm_arrived() else self.raised(error)
            _flush()
            half_a_line = assignment.output_tail().rpartition("\n")[2]
            _say("\n" * bool(half_a_line) + f"{outcome.error}\n")
            self._raised = error  # what it holds would end else, and might take its time, before this is recorded
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
        replica, self._task = self.replica, task
        launched = replica.launched = task.record.launched_with
        if not (task.record.args or {}).get("argv"):  # otherwise the user knows how to give them
            self._entrypoint = task.record.entrypoint
        settings = None if launched is None else launched.settings
        if settings is not None and settings.health_check is not None:
            seed_generators(replica, task.record.seed, but=set())  # the check may import the user's module
            with replica.section("health check", LIMIT_S):
                check_health(settings.health_check, self._end_unhealthy if self._assignment.supervisor_pid else None)
        if settings is None or settings.tracker is None or replica.recorder is None:
            return _load(replica, task, self._assignment)
        from executors.worker.tracking import Tracking, tracked, write_page

        # Loaded before the generators are seeded: what it draws is not the user's. Begun after: it loads more modules.
        page = functools.partial(write_page, replica) if replica.rank == 0 else None
        about = tracked(task, replica, self._assignment.spec.launched_at)
        tracking = Tracking(settings.tracker, about, page, self.warnings.add)
        loaded = _load(replica, task, self._assignment)
        self._tracking, replica.recorder.on_line = tracking, tracking.take
        tracking.start()
        return loaded

    def stop(self, outcome: Outcome | None) -> None:
        """Write what is left of measurements; None: the supervisor ends this process soon, and records how it ended."""
        self.heartbeat.stop()
        if self._tracking is not None:
            has_succeeded = outcome is not None and outcome.status is ReplicaStatus.SUCCEEDED
            self._tracking.finish(has_succeeded=has_succeeded, is_hurried=outcome is None or sigterm_arrived())
            self.warnings.write(is_last=True)  # what the tracker did not finish

    def succeeded(self, value: Any) -> Outcome:
        """Return the outcome of an entrypoint that returned: a success, unless what it returned is not a JSON value."""
        try:
            result = to_json_value(value)
        except ResultError as error:
            return self._failed("result_not_serializable", str(error), 1, fingerprint=fingerprint_of(error))
        if (page := self.replica.page) is not None and page.knows_of_end:
            return self._left(page, result)
        for look in self.replica.at_end:
            look()
        alone = self._task is not None and has_trained_alone(self.replica, self._task.record)
        return self._ended(
            ReplicaStatus.SUCCEEDED, None, exit_code=0, result=result, trained_alone=alone,
            own_models=dict(self.replica.own_models) or None,
        )  # fmt: skip

    def raised(self, error: BaseException) -> Outcome:
        """Return the outcome of an entrypoint that raised, or left by `SystemExit`."""
        if isinstance(error, SystemExit):
            if (page := self.replica.page) is not None and page.ending_at is not None:
                return self._left(page)
            code = _exit_code(error.code)
            said = f" ({error.code})" if isinstance(error.code, str) else ""
            text = f"The entrypoint ended its process with exit code {code}{said} instead of returning a result."
            _flush()
            if not said and (tail := self._assignment.output_tail().strip()):
                text += f" It printed: {last_error(tail)}"
            if code == BAD_OPTIONS and self._entrypoint is not None:
                text += f" The options of a script go behind --: {command_for(self._entrypoint)} -- …"
            return self._failed("no_result", text, code, fingerprint=fingerprint_of(error))
        if isinstance(error, NoGpuError):
            return self._failed("start_failed", str(error), 1, fingerprint=fingerprint_of(error))
        if isinstance(error, UnhealthyError):
            return self._failed("start_failed", str(error), 1)  # perhaps the machine's fault: not `deterministic`
        reason: Any = error.outcome_reason if isinstance(error, ReplicasError | HangError) else "exception"
        told = describe_failure(error)
        if self.replica.began_after_the_end and reason == "exception":
            # Most often it is a variable that a loop sets. The line stands alone in events and in the live table, where
            # `NameError: name 'loss' is not defined` looks like a bug in a script that has run for days.
            told["error_line"] = f"{told['error_line']} ({AFTER_THE_END})"
            told["error"] = f"{told['error']}\n{AFTER_THE_END_ADVICE}"
        return self._failed(reason, exit_code=1, **told)

    def _left(self, page: SharedPage, result: Any = None) -> Outcome:
        """Return the outcome of a replica that left because it was asked to, in its own time."""
        if page.is_stopping:
            text = self._sentence("stopped")
            return self._ended(ReplicaStatus.CANCELLED, "stopped", error=text, exit_code=TERMINATED, result=result)
        text = self._sentence("announced", name=page.notice)
        return self._failed("signal", text, TERMINATED, signal=page.notice, result=result)

    def _orphaned(self) -> Outcome:
        text = self._sentence("orphaned", attempt=self.attempt.number)
        return self._failed("lost", text, TERMINATED, signal="SIGTERM")

    def _failed(self, reason: Reason, error: str | None, exit_code: int, **more: Any) -> Outcome:
        return self._ended(ReplicaStatus.FAILED, reason, error=error, exit_code=exit_code, **more)

    def _ended(self, status: ReplicaStatus, reason: Reason | None, **more: Any) -> Outcome:
        reported, page = dict(self.replica.reported), self.replica.page
        reached = {name: reported[name] for name in ("round", "step") if name in reported} or None
        more = {"reached": reached, **({} if page is None else page.outcome_fields()), **more}
        more |= {"pid": os.getpid(), "started_at": self._started_at, "reported": reported, "how": self._assignment.how}
        return self.attempt.ended(status, reason, **more)

    def _sentence(self, ending: str, **values: Any) -> str:
        return describe_end(ending, self.replica.rank, self.replica.world_size, **values)

    def _record(self, outcome: Outcome) -> None:
        if run_was_deleted(self.attempt.store, self.attempt.run_id):  # it would be all that there is of the run
            return
        outcome = replace(outcome, output_tail=self._assignment.output_tail())
        self.record(outcome)

    def record(self, outcome: Outcome) -> Outcome:
        """Record the outcome and return the one that counts, though the store fails for minutes.

        A result cannot be computed again, and the supervisor knows less of a failure than this process.

        Args:
            outcome: how this attempt ended.

        Raises:
            StoreError: the store did not take it.
        """
        has_warned = False

        def tell(words: str) -> None:
            nonlocal has_warned
            text = f"rank {self.replica.rank}: how it ended cannot be recorded yet: {words}"
            if not has_warned:  # once: the rank ended before the time that its outcome is there
                has_warned = True
                self.warnings.add(text, place="outcome")
            _say(f"replicas: {text}\n")

        with self.heartbeat.left_to_supervisor(), waits.saying(tell):
            return retry(lambda: self._write(outcome), OUTCOME, "the store", is_last=True)

    def with_warnings(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the count of this attempt's warnings."""
        return replace(outcome, warned=self.warnings.count)

    def _write(self, outcome: Outcome) -> Outcome:
        outcome = self.with_warnings(outcome)
        # Before the outcome, so that a reader of the outcome finds all records of the attempt.
        self.warnings.write(is_last=True)
        if self._log is not None:
            self._log.put(FINAL_BYTES)
        recorded = self.attempt.record(outcome)
        # Nothing more, unless the store came back between the two.
        self.warnings.write(is_last=True)
        if self._log is not None:
            self._log.put(FINAL_BYTES)
        return recorded

    def _end_unhealthy(self, words: str) -> None:
        """Leave the outcome and the process, in a thread beside the check."""
        try:
            self._record(self._failed("start_failed", words, 1))
            kill_descendants(os.getpid())
        finally:
            os._exit(1)


def _called(task: Callable[[], Any]) -> Any:
    """Call the entrypoint and return its result; `sys.exit(0)` returns None, unless it answers a SIGTERM.

    A process that it forked ends with it: it is not the replica and leaves no outcome.
    """
    pid, code = os.getpid(), 1
    try:
        value, code = task(), 0
        return value
    except SystemExit as left:
        code = _exit_code(left.code)
        if sigterm_arrived() or code != 0:
            raise
        return None
    except BaseException:
        if os.getpid() != pid:
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != pid:
            _flush()
            os._exit(code)


def _exit_code(given: object) -> int:
    """Return what the system sees of `sys.exit(given)`, where 256 and the like do not look like a success."""
    if isinstance(given, int):  # also a bool, as in sys.exit(not is_fine)
        return given & 0xFF or int(given != 0)
    return int(given is not None)


def _load(replica: Replica, stored: StoredTask, assignment: Assignment) -> Callable[[], Any]:
    """Load the task; seed every generator before the user's module is imported, and those that came with it after."""
    if stored.record.python_version is not None:  # it came from another machine
        from executors.task.stored import difference

        if warning := difference(stored.record.python_version, stored.record.torch):
            print(warning, file=sys.stderr)
            if replica.warnings is not None:
                replica.warnings.add(warning)
    seeded = seed_generators(replica, stored.record.seed, but=set())
    launched = stored.record.launched_with  # not all of what a resume or an addition gives is in it
    given = {*assignment.spec.env, *_recorded_env(replica.rank, launched)}
    own = fill_in_environment(replica, given)
    function, args = stored.load(own)
    if assignment.gpu is not None:
        check_gpu(assignment.gpu)
    seed_generators(replica, stored.record.seed, but=seeded)
    if stored.record.rank_env is not None:
        os.environ[stored.record.rank_env] = str(replica.rank)
    replica.knows_rank = replica.knows_rank or "rank" in own.used or stored.record.rank_env is not None
    return functools.partial(function, **args)


def _recorded_env(rank: int, launched: LaunchedWith | None) -> Collection[str]:
    """Name the variables that the launch gave a rank. An added rank has those of the launch's first placement."""
    if launched is None:
        return ()
    place = next((each for each in launched.placements if rank in each.ranks), launched.placements[0])
    return place.env


def _say(words: str) -> None:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # the user may have closed or unset it
        sys.stderr.write(words)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a full disk; closed or unset by the user
            stream.flush()
    flush_c_streams()


def _leave(code: int, grace_s: float) -> NoReturn:
    """Run what was registered at exit, flush, and go without the half second that tearing torch down takes.

    What the user's code left running ends here: a supervisor that would do it may be gone.

    Args:
        grace_s: seconds for which these processes may continue after a SIGTERM, to save their work. The supervisor may
            end the wait before, as it counts from its own request. 0: they are killed.
    """
    try:
        atexit._run_exitfuncs()
        _flush()
        if grace_s > 0:
            ask_children_to_end(grace_s)
        if children(os.getpid()):
            kill_descendants(os.getpid())
    finally:
        os._exit(code)
