"""Records the outcome of a replica whose job ended without one, from what its service reports."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from executors.attempt import Attempt, Claim, Intent
from executors.attempt.outcome import ENDINGS, MAX_ATTEMPTS, OUTPUT_TAIL_BYTES, OUTPUT_TAIL_LINES
from executors.backend import SupervisorStatus
from executors.backends.jobs.job_state_poller import JobStatePoller
from executors.backends.jobs.service import JobId, JobKey, JobService, JobServiceError, JobState, retrying, stop_others
from executors.protocol import Outcome, Reason, ReplicaHandle, ReplicaStatus
from executors.settings.settings import MAX_WORLD_SIZE
from executors.store.record_names import CLAIM, INTENT
from executors.store.records import FAR_AHEAD, LONG_AGO, Fields, integer, json_object, nullable, number
from executors.store.staleness import StalenessTracker

LOG_LINES = OUTPUT_TAIL_LINES
STILL_S = 90.0  # a replica without a heartbeat for this time has ended; it sends one every 10 s
# The largest difference between two clocks that use one bucket. S3 refuses requests from a clock that is 15 min wrong.
CLOCKS_DIFFER_S = 1800.0
SPARE = nullable(integer(0, MAX_WORLD_SIZE))
SIGNALS = {137: "SIGKILL", 143: "SIGTERM", 139: "SIGSEGV", 134: "SIGABRT", 130: "SIGINT"}  # by exit code


@dataclass(frozen=True)
class JobReplica:
    """A replica whose handle was found and checked.

    Example:
        JobReplica.of(attempt, handle).job
    """

    attempt: Attempt
    """The newest attempt of the rank."""
    key: JobKey
    """The key of the job that runs the attempt. Its attempt is an earlier one if the job restarted in place since."""
    job: JobId | None
    """The id of the job, as a record has it. It is not verified yet. None: the service never had a job."""
    timeout_s: float | None
    """The time limit of the replica in seconds. None: no limit."""

    @classmethod
    def of(cls, attempt: Attempt, handle: ReplicaHandle) -> JobReplica:
        """Return the replica that a handle describes.

        Args:
            attempt: the newest attempt of the rank.
            handle: the handle, which another user may have written.

        Raises:
            CorruptObjectError: a field of the handle is wrong.
        """
        where = f"the handle of rank {attempt.rank} of run {attempt.run_id!r}"
        fields = Fields(handle.metadata, where, attempt.store.url)
        timeout_s = fields.take("timeout_s", nullable(number(0.0, FAR_AHEAD)))
        spare = fields.take("spare", SPARE, None)
        launched_at = fields.take("launched_at", number(LONG_AGO, FAR_AHEAD), 0.0)
        job, number_of_it = fields.take("job", nullable(json_object)), fields.take("attempt", integer(0, MAX_ATTEMPTS))
        runs_it = attempt.at(number_of_it) if spare is None else replace(attempt, rank=spare, number=0, is_spare=True)
        return cls(attempt, JobKey.of(runs_it, launched_at), job, timeout_s)


def is_stale(records: StalenessTracker, full_name: str, written_at: float | None, limit_s: float) -> bool:
    """Note a look at a record, and return True if the record has not changed for `limit_s` seconds.

    There may be no second look, so the first one uses the time in the record. That time comes from another clock. So
    the limit is then extended by the largest possible difference between clocks.

    Args:
        records: measures the records of a service.
        full_name: the name of the attempt that has the record; see `Attempt.full_name`.
        written_at: the time in the record, by its writer's clock. None: there is no record.
        limit_s: the limit, in seconds.

    Example:
        is_stale(intents, attempt.full_name, intent.at, intent.takes_s)
    """
    is_first_look = full_name not in records
    unchanged_s = records.note(full_name, written_at)
    if is_first_look and written_at is not None and time.time() - written_at > limit_s + CLOCKS_DIFFER_S:
        return True
    return unchanged_s >= limit_s


class JobOutcomeRecorder:
    """Decides from the state of a job whether its replica has ended, and records the outcome if the replica left none.

    The first process that finds the end records it.

    Args:
        service: the service.
        states: asks the service for states.
        clock: returns seconds of a monotonic clock.

    Example:
        if not recorder.may_live(replica, state):
            outcome = recorder.conclude(replica, state)
    """

    def __init__(
        self, service: JobService, states: JobStatePoller, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service = service
        self._states = states
        self._heartbeats = StalenessTracker(clock)

    def may_live(self, replica: JobReplica, state: JobState) -> bool:
        """Return True if a replica may still run: its job runs, or the end of the job is not confirmed and
        heartbeats continue.

        If a service does not know a job, its answer may be outdated, or come from a proxy or another account. Also, a
        node without a connection still runs jobs that its cluster has removed. So such a replica counts as ended only
        after its last heartbeat is old enough. The heartbeat is read once in that time.

        Args:
            replica: the replica.
            state: the state of its job.
        """
        attempt = replica.attempt
        # The service has put the job back into its queue, which has ended the replica.
        if state.holds_place and not state.has_ended:
            return not attempt.has_started()
        if not state.is_unconfirmed:
            self._heartbeats.forget(attempt.full_name)
            return not state.has_ended
        if attempt.full_name in self._heartbeats and self._heartbeats.unchanged_s(attempt.full_name) < STILL_S:
            return True
        is_over = is_stale(self._heartbeats, attempt.full_name, _last_sign_of(attempt), STILL_S)
        return not state.has_ended or (not is_over and not attempt.has_cancel_marker())

    def expire(self, replica: JobReplica) -> None:
        """Make the next look read the cancel marker of the replica again, although the end of the replica is not
        confirmed.

        Args:
            replica: the replica.
        """
        self._heartbeats.forget(replica.attempt.full_name)

    def expire_all(self, prefix: str) -> None:
        """Make the next look read the cancel markers of a run's replicas again.

        Args:
            prefix: the run id, followed by a slash.
        """
        for place in [each for each in self._heartbeats if f" {prefix}" in each]:
            self._heartbeats.forget(place)

    def conclude(self, replica: JobReplica, state: JobState) -> Outcome:
        """Return the outcome of a replica that has ended. Record one if the replica left none.

        Args:
            replica: the replica.
            state: the state of its job.
        """
        attempt = replica.attempt
        # The outcome is read again: the replica may have written it just before its job ended.
        outcome = attempt.outcome() or self._ended_without_outcome(replica, state)
        if outcome.was_told_to_end:
            supervisor = self.supervisor_of(replica, state)
            attempt.record_service_reason(supervisor.reason, supervisor.error)
            outcome = attempt.outcome() or outcome
        if state.holds_place and replica.job is not None:
            self.withdraw(replica)
        with contextlib.suppress(JobServiceError):
            stop_others(self._service, replica.key, replica.job)
        self._states.forget(replica.key)
        self._heartbeats.forget(replica.attempt.full_name)
        return outcome

    def withdraw(self, replica: JobReplica) -> None:
        """Free the place that the job of an ended replica has at the service. Errors are ignored.

        Args:
            replica: the replica.
        """
        if replica.job is not None:
            with contextlib.suppress(JobServiceError):
                retrying()(self._service.withdraw, self._states.verified(replica.key, replica.job))

    def supervisor_of(self, replica: JobReplica, state: JobState | None) -> SupervisorStatus:
        """Return the status of the job of a replica that ended, with the service's reason if it gave one.

        Args:
            replica: the replica.
            state: the state of its job. None: it is not known.
        """
        if state is None or state.reason is None:
            return SupervisorStatus(is_alive=False)
        _, error = explain_end(replica.attempt.title(), self._service.name, state, replica.timeout_s, True, "")
        return SupervisorStatus(is_alive=False, reason=state.reason, error=error)

    def _ended_without_outcome(self, replica: JobReplica, state: JobState) -> Outcome:
        attempt, service = replica.attempt, self._service
        if state.reason == "lost" and not attempt.has_cancel_marker():
            detail = f" ({state.message.rstrip('.')})" if state.message else ""
            return attempt.record_lost(f"{service.name} reports it gone{detail}")
        output = ""
        with contextlib.suppress(JobServiceError):
            if replica.job is not None:
                job_id = self._states.verified(replica.key, replica.job)
                output = service.logs(job_id, LOG_LINES)[-OUTPUT_TAIL_BYTES:]
        reason: Reason = "cancelled"
        error_text = None  # for a cancelled replica, the cancel marker has the reason
        if not attempt.has_cancel_marker():
            who, has_started = attempt.title(), attempt.has_started()
            reason, error_text = explain_end(who, service.name, state, replica.timeout_s, has_started, output)
        return attempt.record(
            attempt.new_outcome(
                ReplicaStatus.CANCELLED if reason == "cancelled" else ReplicaStatus.FAILED,
                reason,
                exit_code=state.exit_code,
                signal=SIGNALS.get(state.exit_code or 0) if reason in ("signal", "oom") else None,
                error=error_text,
                output_tail=output,
            )
        )


def _last_sign_of(attempt: Attempt) -> float | None:
    """Return the time of a replica's last known activity: its heartbeat, otherwise its claim, otherwise its
    launcher's intent.
    """
    if (beat := attempt.beat()) is not None:
        return beat.at
    claim = attempt.find(CLAIM, Claim.parse)
    if claim is not None and claim.at is not None:
        return claim.at
    intent = attempt.find(INTENT, Intent.parse)
    return None if intent is None else intent.at


def explain_end(
    who: str, service: str, state: JobState, timeout_s: float | None, has_started: bool, output: str
) -> tuple[Reason, str]:
    """Return the reason why a replica ended without an outcome, and a sentence that explains it.

    Args:
        who: the replica, as in "Replica 3 of 8 (attempt 1)".
        service: the name of the service.
        state: the state of the job.
        timeout_s: the time limit of the replica in seconds. None: no limit.
        has_started: True if the replica had claimed its attempt.
        output: the end of the replica's log.

    Example:
        explain_end("Replica 3 of 8", "Modal", JobState(True, "oom"), None, True, "")
    """
    service_text = f" {service} says: {state.message.rstrip('.')}." if state.message else ""

    def sentence(ending: str, **values: Any) -> str:
        return f"{who} {ENDINGS[ending].format(service=service, **values)}{'' if ending == 'timeout' else service_text}"

    if state.reason == "oom":
        cause = "out of memory" if service_text else f"most likely out of memory (SIGKILL, and not by {service})"
        return "oom", sentence("killed", cause=cause)
    if state.reason is not None:
        by_itself = "timeout" if timeout_s is not None else "timeout_there"
        endings = {"timeout": by_itself, "preempted": "preempted", "cancelled": "cancelled_there"}
        return state.reason, sentence(endings.get(state.reason, "not_run"), limit_s=timeout_s)
    code = "an unknown exit code" if state.exit_code is None else f"exit code {state.exit_code}"
    if state.exit_code in SIGNALS:
        return "signal", sentence("by_exit_code", name=SIGNALS[state.exit_code], code=code)
    if not has_started:
        lines = output.strip().splitlines()
        # The line of the log comes before the service's text, because a table shows only the beginning.
        why = f" Its log ends: {lines[-1].rstrip('.')}." if lines else ""
        return "start_failed", sentence("not_reached", code=code, why=why)
    return "no_result", sentence("no_result", code=code)
