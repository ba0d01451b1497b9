"""The main function of every replica on every backend: claims the attempt, calls the entrypoint, and records the
outcome.

`main()` has the process for itself, and a supervisor has started it. `call_replica()` does the same inside a process of
another executor, so it does not change the descriptors and signal handlers of that process.
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
from executors.attempt.outcome import describe_end, encode_outcome
from executors.errors import HangError, ReplicasError, ResultError, StoreError
from executors.metrics.recorder import Recorder
from executors.patience import BRIEF, OUTCOME, START, retry, waits
from executors.process import (
    DescriptorReserve,
    ask_children_to_end,
    children,
    flush_c_streams,
    kill_descendants,
)
from executors.protocol import Outcome, Reason, ReplicaStatus
from executors.replica import Replica
from executors.replica.restartable import RestartHooks, hooks_of
from executors.replica.shared_page import SharedPage
from executors.replica.warning_log import WarningLog
from executors.settings.health_checks import limit_of
from executors.settings.run_spec import RunSpec
from executors.store import store_at
from executors.store.record_names import run_record_key, run_was_deleted
from executors.store.records import read_record
from executors.store.run_key import hold_key
from executors.store.url import split_address
from executors.task.entrypoint import command_for
from executors.task.placeholders import fill
from executors.task.record import LaunchedWith, RunRecord
from executors.task.stored import StoredTask, read_task
from executors.worker.claim import CancelledBeforeStart, claim_attempt
from executors.worker.failure import describe_failure, fingerprint_of, is_store_failure, last_error
from executors.worker.health_check import LIMIT_S, UnhealthyError, check_health
from executors.worker.heartbeat import Heartbeat
from executors.worker.log_copy import FINAL_BYTES, LogCopy
from executors.worker.process_group import MemberPlace
from executors.worker.result import to_json_value
from executors.worker.same_process import await_decision, clean_up, dismiss, running_threads
from executors.worker.sigterm import (
    TERMINATED,
    handle_sigterm,
    handle_sigterm_again,
    ignore_sigterm,
    sigterm_arrived,
)
from executors.worker.surroundings import (
    EARLY_WARNINGS,
    NoGpuError,
    check_gpu,
    fill_in_environment,
    seed_generators,
    set_environment,
)
from executors.worker.trained_alone import has_trained_alone
from executors.worker.warning_hook import collect_warnings
from executors.worker.watched import end_watch, start_watch

if TYPE_CHECKING:
    from executors.worker.tracking import Tracking

BAD_OPTIONS = 2  # the exit code of argparse and click after a wrong option
REPEATED_ERROR_S = 1.0
"""By how much an error is dated later that another process of the replica has raised first. It is more than the time in
which the other processes of a failed replica may report their own errors."""
END_OF_INPUT = "EOF when reading a line"  # the text of Python's `input`
NO_INPUT = "a replica has no standard input, so give the value as an argument"
AFTER_THE_END = "this attempt began after the last round"
AFTER_THE_END_ADVICE = (
    "This attempt began after the last round: the run is complete, and the model holds the anchor. A loop of the "
    "script's own made no pass, so the variables that it sets do not exist. Set them before the loop, or loop over "
    "diloco.steps(), which makes the last pass once more."
)


@dataclass(frozen=True)
class Assignment:
    """The data that a replica's process gets from its parent, or from the command that started it."""

    spec: RunSpec
    """The run. The replica claims the attempt of the spec, or the next free one."""
    rank: int
    task: StoredTask | None = None
    """The task, if the parent has read it."""
    supervisor_pid: int | None = None
    """The parent that supervises this process. This process ends with its parent. None: an executor outside this
    project started the process.
    """
    output_tail: Callable[[], str] = str
    """Returns the end of the output, for the outcome."""
    log_file: Path | None = None
    """The file of the output, if its end must be copied into the store."""
    term_grace_s: float = 5.0
    """Seconds between SIGTERM and SIGKILL."""
    torch_threads: int | None = None
    """The number of threads of torch and OpenMP. None: the defaults of torch and OpenMP."""
    gpu: str | None = None
    """The GPU that the launch requests. None: no GPU, and torch is not checked."""
    how: str | None = None
    """How the attempt was started; see `Outcome`."""
    page: SharedPage | None = None
    """The memory that this process shares with its supervisor. None: there is none."""
    has_log_in_page: bool = False
    """True if the end of the output is only in the page, so that the output of a command must be copied into it."""
    member: MemberPlace | None = None
    """The number and the shared objects of this process in a replica of several processes. None: the replica has one
    process.
    """
    continue_as: Callable[[int], Assignment] | None = None
    """A function that prepares this process for its next attempt, given the number of that attempt. None: the process
    runs one attempt only.
    """


def main(assignment: Assignment) -> NoReturn:
    """Run one replica in a process of its own, and exit with its exit code.

    Args:
        assignment: the replica.
    """
    faulthandler.enable()  # so that a segfault prints its Python stack
    handle_sigterm(assignment.page)
    waits.report = lambda words: _print(f"replicas: rank {assignment.rank}: {words}\n")
    code = 1
    try:
        code = _run_attempts(assignment)
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


def _run_attempts(assignment: Assignment) -> int:
    """Run an attempt, and the further attempts of a restartable entrypoint. Return the exit code of the last one."""
    following: Assignment | None = assignment
    while following is not None:
        worker = _Worker(following)
        code = worker.run()
        following = worker.await_next()
        del worker  # the object holds the replica, and with it the objects that the user has attached
    return code


def call_replica(run: str, digest: str | None = None) -> Any:
    """Run one replica inside a process of an executor outside this project.

    The executor has this function as its entrypoint.

    Exceptions of the user's entrypoint are passed on.

    Args:
        run: `<store url>/<run id>`. The rank comes from `REPLICA_RANK`.
        digest: the digest of the task that was launched, for a launch that can pass it on. None, the default: the task
            is not checked.

    Returns: the result of the user's entrypoint as a JSON value.

    Raises:
        ReplicasError: another process has already recorded a different end of this attempt.
    """
    store_url, run_id = split_address(run)
    record = retry(lambda: read_record(store_at(store_url), run_record_key(run_id), RunRecord.parse), START)
    rank = int(os.environ[environment.RANK])
    spec = RunSpec(run_id, store_url, "", record.settings, (rank,), launched_at=record.created_at)
    worker = _Worker(Assignment(spec, rank))
    argv = sys.argv
    set_environment(worker.replica)
    worker.heartbeat.start()
    # Warnings are collected only within the block, because this process continues afterwards, and its later warnings do
    # not belong to the replica.
    with collect_warnings(worker.warnings):
        try:
            outcome = worker.succeeded(
                _call_entrypoint(worker.load(read_task(worker.attempt.store, run_id, digest, tolerance=START)))
            )
            error: BaseException | None = None
        except BaseException as raised:
            outcome, error = worker.raised(raised), raised
            if isinstance(raised, KeyboardInterrupt):
                with contextlib.suppress(StoreError):
                    worker.attempt.request_cancel()
        finally:
            sys.argv = argv  # the process belongs to the caller, who may read this variable later
        worker.stop(outcome)
    if error is not None:
        try:
            # The store is tried only briefly, because the caller waits for the error.
            worker.attempt.record(worker.with_warnings(outcome), tolerance=BRIEF)
        except StoreError as failure:  # the user's own error matters more, so it is raised below
            _print(f"replicas: rank {rank}: its outcome cannot be recorded: {failure}\n")
        raise error
    recorded = worker.record(outcome)
    if recorded.status is not ReplicaStatus.SUCCEEDED and recorded.error:
        raise ReplicasError(recorded.error)
    return outcome.result


# More than 20 methods: the order of claim, call, outcome and clean-up matters, and each step uses the replica, the
# heartbeat and the task of the attempt. Several classes would hide the order.
class _Worker:
    """One replica in this process, which has claimed its attempt."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._started_at = time.time()
        spec, rank = assignment.spec, assignment.rank
        self._place = place = assignment.member
        self._leads = place is None or place.is_leader
        store = retry(lambda: store_at(spec.store_url), START)
        if chaos := spec.settings.chaos:
            from executors.worker.chaos import await_strikes, inject_faults

            if place is None or place.is_leader:
                procs = 1 if place is None else place.of
                store = inject_faults(store, chaos, rank, spec.attempt, assignment.page, procs)
            else:
                await_strikes(chaos, rank, spec.attempt, place.number, place.leader_page)
        began = time.monotonic()
        n_decisions = 0 if assignment.page is None else int(assignment.page.n_decisions)
        hold_key(store.url, spec.run_id, spec.key)
        asked, nonce = Attempt(store, spec.run_id, rank, spec.attempt), None
        if place is None or place.is_leader:
            self.attempt, nonce = claim_attempt(asked, n_decisions, spec.key)
        else:
            self.attempt = asked.at(place.await_claim(assignment.supervisor_pid))
        number, url = self.attempt.number, spec.store_url
        self.replica = Replica(rank, spec.world_size, spec.run_id, number, url, claimed_nonce=nonce)
        self.replica.store = store
        self.replica.page = assignment.page
        if assignment.page is not None:
            assignment.page.began, assignment.page.claimed = began, number + 1
        self.warnings = WarningLog(self.attempt)
        while EARLY_WARNINGS:
            self.warnings.add(EARLY_WARNINGS.pop(0))
        parent, grace_s, log_file = assignment.supervisor_pid, assignment.term_grace_s, assignment.log_file
        self._log = None
        if self._leads:  # the records of an attempt have one writer
            self.replica.warnings = self.warnings
            self.replica.recorder = Recorder(store, spec.run_id, rank, number, began=began)
            self.replica.recorder.on_warning = self.warnings.add
            if assignment.page is not None and assignment.page.reports is not None:
                self.replica.recorder.on_gpu = assignment.page.reports.note_gpu
            self._log = None if log_file is None else LogCopy(self.attempt, log_file)
        self.heartbeat = Heartbeat(
            self.replica, supervisor_pid=parent, grace_s=grace_s, log=self._log, is_silent=not self._leads
        )
        self._tracking: Tracking | None = None
        self._reserve = DescriptorReserve()
        self._raised: BaseException | None = None
        self._task: StoredTask | None = None
        self._hooks: RestartHooks | None = None
        """The hooks of a restartable entrypoint, after it was loaded. None: the entrypoint is called once."""
        self._threads: set[int] = set()
        """The threads before the call of the entrypoint."""
        self._folder: str | None = None
        """The working directory before the call of the entrypoint."""
        self._goes_on = False
        self._entrypoint: str | None = None
        """The name of the entrypoint, if the user gave it no options. None: the user gave options, or the entrypoint is
        not known yet.
        """

    def run(self) -> int:
        """Call the entrypoint, record the outcome, and return the exit code of the process."""
        with collect_warnings(self.warnings):
            return self._run()

    def _run(self) -> int:
        assignment = self._assignment
        try:
            self._set_environment()
            if assignment.page is not None:
                start_watch(assignment.page)
            self.heartbeat.start()
            spec = assignment.spec
            task = assignment.task or read_task(
                self.attempt.store, spec.run_id, spec.task_digest, spec.task_folder, START
            )
            function = self.load(task)
            self._note_surroundings()
            value = _call_entrypoint(function)
            self._let_finish()
            outcome = self.succeeded(value)
            if assignment.page is not None:
                assignment.page.has_result = outcome.status is ReplicaStatus.SUCCEEDED
        except BaseException as error:
            self._let_finish()
            if assignment.page is not None and not sigterm_arrived():
                # An error that another member has raised, too, is dated later. So the outcome names that member.
                is_repeated = getattr(error, "of_another_member", False)
                assignment.page.raised_at = time.monotonic() + REPEATED_ERROR_S * is_repeated
            if sigterm_arrived() and not self.heartbeat.supervisor_is_gone:
                self.stop(None)
                return TERMINATED  # the supervisor sent SIGTERM for a reason that it knows, so it writes the outcome
            self._reserve.release()
            outcome = self._orphaned() if sigterm_arrived() else self.raised(error)
            self._goes_on = self._may_go_on(error)
            outcome = replace(outcome, goes_on=self._goes_on)
            _flush()
            half_a_line = assignment.output_tail().rpartition("\n")[2]
            _print("\n" * bool(half_a_line) + f"{outcome.error}\n")
            # Keep the error alive. Otherwise Python would now delete the objects in its frames, which may take long and
            # would delay the outcome.
            self._raised = error
        self.stop(outcome)
        _flush()
        self._record(outcome)
        code = 1 if outcome.exit_code is None else outcome.exit_code
        # the exit code of a command that signal N ended, as a shell reports it
        return code if code >= 0 else 128 - code

    def _note_surroundings(self) -> None:
        """Note the state that a further call of the entrypoint in this process must find again."""
        if self._hooks is not None:
            self._threads = running_threads()
            with contextlib.suppress(OSError):  # the working directory may be deleted
                self._folder = os.getcwd()

    def _may_go_on(self, error: BaseException) -> bool:
        """Return True if this process may run the next attempt after an exception of the entrypoint."""
        assignment = self._assignment
        is_able = self._hooks is not None and assignment.continue_as is not None and assignment.page is not None
        is_alone = self._place is None and not self.heartbeat.supervisor_is_gone
        if not is_able or not is_alone or sigterm_arrived() or not isinstance(error, Exception | HangError):
            return False
        return assignment.page is not None and assignment.page.ending_at is None

    def await_next(self) -> Assignment | None:
        """Clean up this process for a further call of the entrypoint, and wait for the decision of the supervisor.

        Returns: the next attempt. None: this process must end.
        """
        page, hooks, continue_as = self._assignment.page, self._hooks, self._assignment.continue_as
        supervisor_pid, error = self._assignment.supervisor_pid, self._raised
        if not self._goes_on or page is None or hooks is None or continue_as is None or supervisor_pid is None:
            return None
        # From now on the supervisor gives this process the time of exit functions, and ends it after that.
        page.left_with, page.left_at = 1, time.monotonic()
        self._raised = None
        problem = None if error is None else clean_up(self.replica, hooks, error, self._threads)
        del error
        _flush()
        if problem is not None:
            _print(f"replicas: this process ends, and a new one runs the next attempt: {problem}.\n")
            dismiss(self.replica)
            return None
        on_long_wait = functools.partial(dismiss, self.replica)
        number = await_decision(page, supervisor_pid, self.attempt.number + 1, on_long_wait)
        if number is None:
            dismiss(self.replica)
            return None
        handle_sigterm_again()
        page.follow_renewal()
        if self._folder is not None:
            with contextlib.suppress(OSError):
                os.chdir(self._folder)
        return continue_as(number)

    def _set_environment(self) -> None:
        """Set the variables of the replica. If it has several processes, set also torchrun's variables."""
        replica, place = self.replica, self._place
        set_environment(replica, self._assignment.torch_threads)
        if place is not None:
            os.environ |= place.environment(replica.run_id, replica.rank, replica.attempt)

    def _let_finish(self) -> None:
        """Ignore SIGTERM and hang limits from now on, so that the outcome is recorded."""
        ignore_sigterm()
        if self._assignment.page is not None:
            end_watch(self._assignment.page)

    def load(self, task: StoredTask) -> Callable[[], Any]:
        """Run the health check, start the tracker, and return the function to call.

        Args:
            task: the task of the run.
        """
        replica, self._task = self.replica, task
        launched = replica.launched = task.record.launched_with
        # If the user gave options, the message needs no advice on how to give them.
        if not (task.record.args or {}).get("argv"):
            self._entrypoint = task.record.entrypoint
        settings = None if launched is None else launched.settings
        if settings is not None and settings.health_check is not None:
            # The seeds are set here for the first time, because the check may import user modules.
            seed_generators(replica, task.record.seed, but=set())
            end = self._end_unhealthy if self._assignment.supervisor_pid else None
            with replica.section("health check", limit_of(settings.health_check, LIMIT_S)):
                is_command = task.record.command is not None
                check_health(settings.health_check, end, gpu=self._assignment.gpu, in_child=is_command)
        if settings is None or settings.tracker is None or replica.recorder is None or not self._leads:
            return self._with_hooks(_load(replica, task, self._assignment))
        from executors.worker.tracking import Tracking, tracked, write_run_page

        # The tracker is loaded before the generators are seeded, because it may draw random numbers. It is started
        # after that, because its thread loads more modules.
        page = functools.partial(write_run_page, replica) if replica.rank == 0 else None
        about = tracked(task, replica, self._assignment.spec.launched_at)
        tracking = Tracking(settings.tracker, about, page, self.warnings.add)
        loaded = _load(replica, task, self._assignment)
        self._tracking, replica.recorder.on_line = tracking, tracking.take
        tracking.start()
        return self._with_hooks(loaded)

    def _with_hooks(self, loaded: functools.partial[Any]) -> Callable[[], Any]:
        """Note the hooks of a restartable entrypoint. Return a function that calls it after its first hook."""
        self._hooks = hooks = hooks_of(loaded.func)
        self.replica.may_stay = None if hooks is None else self._may_go_on
        if hooks is None or hooks.initialize is None:
            return loaded
        initialize, replica = hooks.initialize, self.replica

        def call() -> Any:
            initialize(replica)
            return loaded()

        return call

    def stop(self, outcome: Outcome | None) -> None:
        """Write the last measurements.

        Args:
            outcome: the outcome of this attempt. None: the supervisor ends this process soon, and records the outcome.
        """
        self.heartbeat.stop()
        if self._tracking is not None:
            has_succeeded = outcome is not None and outcome.status is ReplicaStatus.SUCCEEDED
            self._tracking.finish(has_succeeded=has_succeeded, is_hurried=outcome is None or sigterm_arrived())
            self.warnings.write(is_last=True)  # the count includes the warning of a tracker that did not finish

    def succeeded(self, value: Any) -> Outcome:
        """Return the outcome of an entrypoint that returned: a success if the result is a JSON value.

        Args:
            value: the result.
        """
        try:
            result = to_json_value(value) if self._leads else None  # the result of the replica is that of member 0
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
        """Return the outcome of an entrypoint that raised an exception or `SystemExit`.

        Args:
            error: the exception.
        """
        if isinstance(error, SystemExit):
            if (page := self.replica.page) is not None and page.ending_at is not None:
                return self._left(page)
            code = _exit_code(error.code)
            message = f" ({error.code})" if isinstance(error.code, str) else ""
            text = f"The entrypoint ended its process with exit code {code}{message} instead of returning a result."
            _flush()
            if not message and (tail := self._assignment.output_tail().strip()):
                text += f" It printed: {last_error(tail)}"
            if code == BAD_OPTIONS and self._entrypoint is not None:
                text += f" The options of a script go after --: {command_for(self._entrypoint)} -- …"
            return self._failed("no_result", text, code, fingerprint=fingerprint_of(error))
        commands = sys.modules.get("executors.worker.run_command")
        if commands is not None and isinstance(error, commands.CommandFailedError):
            if (page := self.replica.page) is not None and page.ending_at is not None:
                return self._left(page)  # one of the command's processes has read that it must end
            if page is not None and page.hang_raised_at and page.diagnosis:  # one of its processes hung
                text = "\n".join(filter(None, (page.diagnosis, error.noted)))
                return self._failed("hang", text, error.exit_code or 1, error_line=page.diagnosis)
            return self._failed(**commands.outcome_fields(error, self._assignment.output_tail))
        if isinstance(error, NoGpuError):
            return self._failed("start_failed", str(error), 1, fingerprint=fingerprint_of(error))
        if isinstance(error, UnhealthyError):
            # The outcome has no fingerprint, because the machine may be the cause. So equal failures do not give up the
            # rank.
            return self._failed("start_failed", str(error), 1)
        reason: Any = error.outcome_reason if isinstance(error, ReplicasError | HangError) else "exception"
        fields = describe_failure(error)
        if isinstance(error, EOFError) and str(error) == END_OF_INPUT:
            fields["error_line"] = f"{fields['error_line']} ({NO_INPUT})"
        if self.replica.began_after_the_end and reason == "exception":
            # The usual cause is a variable that only the loop sets. Events and the live table have this line alone, and
            # `NameError: name 'loss' is not defined` looks like a bug in a script that has run for days.
            fields["error_line"] = f"{fields['error_line']} ({AFTER_THE_END})"
            fields["error"] = f"{fields['error']}\n{AFTER_THE_END_ADVICE}"
        return self._failed(reason, exit_code=1, **fields)

    def _left(self, page: SharedPage, result: Any = None) -> Outcome:
        """Return the outcome of a replica that ended by itself after a stop, or after a notice that its machine will
        be taken away.
        """
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
        self.heartbeat.take_reports()
        reported, page = dict(self.replica.reported), self.replica.page
        reached = {name: reported[name] for name in ("round", "step") if name in reported} or None
        more = {"reached": reached, **({} if page is None else page.outcome_fields()), **more}
        more |= {"pid": os.getpid(), "started_at": self._started_at, "reported": reported, "how": self._assignment.how}
        return self.attempt.new_outcome(status, reason, **more)

    def _sentence(self, ending: str, **values: Any) -> str:
        return describe_end(ending, self.replica.rank, self.replica.world_size, **values)

    def _record(self, outcome: Outcome) -> None:
        # writing an outcome would create the folder of the deleted run again
        if run_was_deleted(self.attempt.store, self.attempt.run_id):
            return
        if self._place is not None and not self.heartbeat.supervisor_is_gone:
            self._leave_end(self._place, outcome)
        elif self._leads:
            self.record(replace(outcome, output_tail=self._assignment.output_tail()))

    def _leave_end(self, place: MemberPlace, outcome: Outcome) -> None:
        """Write the outcome of this member into its file for the supervisor, which records one outcome for all
        members.
        """
        if self._leads:
            outcome = self.with_warnings(outcome)
            self.warnings.write(is_last=True)
        place.leave_end(encode_outcome(outcome))

    def record(self, outcome: Outcome) -> Outcome:
        """Record the outcome, and return the outcome that counts. Retry for minutes if the store fails.

        A result cannot be computed again, and the supervisor knows less about a failure than this process.

        Args:
            outcome: the outcome of this attempt.

        Raises:
            StoreError: the store did not take it.
        """
        has_warned = False

        def warn(words: str) -> None:
            nonlocal has_warned
            text = f"rank {self.replica.rank}: its outcome cannot be recorded yet: {words}"
            if not has_warned:  # one warning is enough to show why the outcome is recorded later than the rank ended
                has_warned = True
                self.warnings.add(text, place="outcome")
            _print(f"replicas: {text}\n")

        with self.heartbeat.left_to_supervisor(), waits.reporting_to(warn):
            return retry(lambda: self._write(outcome), OUTCOME, "the store", is_last=True)

    def with_warnings(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the count of this attempt's warnings.

        Args:
            outcome: the outcome.
        """
        return replace(outcome, warned=self.warnings.count)

    def _write(self, outcome: Outcome) -> Outcome:
        outcome = self.with_warnings(outcome)
        # Written before the outcome, so that a reader of the outcome finds all records of the attempt.
        self.warnings.write(is_last=True)
        if self._log is not None:
            self._log.put(FINAL_BYTES)
        recorded = self.attempt.record(outcome)
        # Written again, because the first write may have failed in an outage that has ended since.
        self.warnings.write(is_last=True)
        if self._log is not None:
            self._log.put(FINAL_BYTES)
        return recorded

    def _end_unhealthy(self, words: str) -> None:
        """Record the outcome and exit, from the timer's thread, because the health check does not return."""
        try:
            self._record(self._failed("start_failed", words, 1))
            kill_descendants(os.getpid())
        finally:
            os._exit(1)


def _call_entrypoint(task: Callable[[], Any]) -> Any:
    """Call the entrypoint and return its result. After `sys.exit(0)` the result is None, unless a SIGTERM caused it.

    If a process that the entrypoint forked returns here, it exits, because it is not the replica.
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
    """Return the exit code of `sys.exit(given)`. A multiple of 256 gives 1, because it must not look like a success."""
    if isinstance(given, int):  # a bool is an exit code as well, as in sys.exit(not is_fine)
        return given & 0xFF or int(given != 0)
    return int(given is not None)


def _load(replica: Replica, stored: StoredTask, assignment: Assignment) -> functools.partial[Any]:
    """Load the task. Seed all random generators before the import of the user's module, and the generators of newly
    loaded libraries after it.
    """
    if stored.record.python_version is not None:  # the task came from another machine
        from executors.task.stored import version_warning

        if warning := version_warning(stored.record.python_version, stored.record.torch):
            print(warning, file=sys.stderr)
            if replica.warnings is not None:
                replica.warnings.add(warning)
    seeded = seed_generators(replica, stored.record.seed, but=set())
    launched = stored.record.launched_with  # the record lacks some variables that a resume or an addition gives
    given = {*assignment.spec.env, *_recorded_env(replica.rank, launched)}
    own = fill_in_environment(replica, given)
    if (command := stored.record.command) is not None:
        # imported only here, because the module imports `subprocess`
        from executors.worker.run_command import run_command

        replica.recorder = None  # a process of the command records the measurements

        # The GPU is not checked: the program may use another framework, or a torch of another environment.
        words = fill(list(command), own)
        replica.knows_rank = replica.knows_rank or "rank" in own.used
        copy = assignment.page.write_tail if assignment.page is not None and assignment.has_log_in_page else None
        return functools.partial(run_command, words, replica, copy)
    function, args = stored.load(own)
    if assignment.gpu is not None:
        check_gpu(assignment.gpu)
    seed_generators(replica, stored.record.seed, but=seeded)
    if stored.record.rank_env is not None:
        os.environ[stored.record.rank_env] = str(replica.rank)
    replica.knows_rank = replica.knows_rank or "rank" in own.used or stored.record.rank_env is not None
    return functools.partial(function, **args)


def _recorded_env(rank: int, launched: LaunchedWith | None) -> Collection[str]:
    """Return the names of the variables that a rank got from its launch.

    An added rank gets the variables of the first placement.
    """
    if launched is None:
        return ()
    place = next((each for each in launched.placements if rank in each.ranks), launched.placements[0])
    return place.env


def _print(words: str) -> None:
    # the user's code may have closed or replaced the stream
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(words)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The disk may be full, or the user's code may have closed or replaced the stream.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    flush_c_streams()


def _leave(code: int, grace_s: float) -> NoReturn:
    """Run the functions registered at exit, flush, and exit without the half second that torch needs to shut down.

    Processes that the user's code left running end here, because the supervisor may have ended.

    Args:
        code: the exit code.
        grace_s: seconds for which processes that the user's code left running may continue after a SIGTERM, to save
            their work. The supervisor may end the wait earlier, because it counts from its own request. 0: these
            processes are killed at once.
    """
    try:
        atexit._run_exitfuncs()
        _flush()
        if grace_s > 0:
            commands = sys.modules.get("executors.worker.run_command")
            ask_children_to_end(grace_s, None if commands is None else commands.asked_group())
        if children(os.getpid()):
            kill_descendants(os.getpid())
    finally:
        os._exit(code)
