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
STILL_S = 90.0  # of a heartbeat that comes every 10 s
CLOCKS_DIFFER_S = 1800.0  # at most, between two that use one bucket: S3 refuses who is 15 min off its own clock
SPARE = nullable(integer(0, MAX_WORLD_SIZE))
SIGNALS = {137: "SIGKILL", 143: "SIGTERM", 139: "SIGSEGV", 134: "SIGABRT", 130: "SIGINT"}  # by exit code


@dataclass(frozen=True)
class JobReplica:
    """A replica whose handle was found and checked."""

    attempt: Attempt  # the newest
    key: JobKey  # of the job that runs it: an earlier attempt's where a second copy was started since
    job: JobId | None  # as a record names it, to be verified, or None if the service never had it
    timeout_s: float | None

    @classmethod
    def of(cls, attempt: Attempt, handle: ReplicaHandle) -> JobReplica:
        where = f"the handle of rank {attempt.rank} of run {attempt.run_id!r}"
        fields = Fields(handle.metadata, where, attempt.store.url)
        timeout_s = fields.take("timeout_s", nullable(number(0.0, FAR_AHEAD)))
        spare = fields.take("spare", SPARE, None)
        launched_at = fields.take("launched_at", number(LONG_AGO, FAR_AHEAD), 0.0)
        job, number_of_it = fields.take("job", nullable(json_object)), fields.take("attempt", integer(0, MAX_ATTEMPTS))
        runs_it = attempt.at(number_of_it) if spare is None else replace(attempt, rank=spare, number=0, is_spare=True)
        return cls(attempt, JobKey.of(runs_it, launched_at), job, timeout_s)


def is_stale(records: StalenessTracker, place: str, written_at: float | None, limit_s: float) -> bool:
    """Note a look at a record, and return True if the record has not changed for `limit_s` seconds.

    The first look, which may be the only one, goes by the time in the record. Its margin is what clocks may differ by.

    Args:
        records: measures the records of a service.
        place: the place of the attempt that the record is of.
        written_at: when the record was written, by its writer's clock. None: it was never written.
        limit_s: the limit, in seconds.
    """
    is_first_look = place not in records
    unchanged_s = records.note(place, written_at)
    if is_first_look and written_at is not None and time.time() - written_at > limit_s + CLOCKS_DIFFER_S:
        return True
    return unchanged_s >= limit_s


class JobOutcomeRecorder:
    """Concludes from the states of jobs how their replicas ended."""

    def __init__(
        self, service: JobService, states: JobStatePoller, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service = service
        self._states = states
        self._heartbeats = StalenessTracker(clock)

    def may_live(self, replica: JobReplica, state: JobState) -> bool:
        """Whether a replica may live on: its job runs, or its end is unconfirmed and heartbeats continue.

        The answer that a job is unknown may be stale, or come from a proxy, or belong to another account. A node that
        is only cut off still runs jobs that its cluster has removed. So such a replica has ended once its last sign of
        life has stood still. It is read once in that time.
        """
        attempt = replica.attempt
        if state.holds_place and not state.has_ended:  # a queue took it back: it has ended if it ran
            return not attempt.has_started()
        if not state.is_unconfirmed:
            self._heartbeats.forget(attempt.place)
            return not state.has_ended
        if attempt.place in self._heartbeats and self._heartbeats.unchanged_s(attempt.place) < STILL_S:
            return True
        is_over = is_stale(self._heartbeats, attempt.place, _last_sign_of(attempt), STILL_S)
        return not state.has_ended or (not is_over and not attempt.has_cancel_marker())

    def expire(self, replica: JobReplica) -> None:
        """Let the next look read whether a replica whose end is unconfirmed was cancelled."""
        self._heartbeats.forget(replica.attempt.place)

    def expire_all(self, prefix: str) -> None:
        """Let the next look read whether replicas were cancelled whose records are below a prefix of their store."""
        for place in [each for each in self._heartbeats if f" {prefix}" in each]:
            self._heartbeats.forget(place)

    def conclude(self, replica: JobReplica, state: JobState) -> Outcome:
        """Record how a replica ended whose job is gone, unless it left an outcome."""
        attempt = replica.attempt
        outcome = attempt.outcome() or self._ended_without_outcome(replica, state)  # perhaps written just before
        if outcome.was_told_to_end:
            supervisor = self.supervisor_of(replica, state)
            attempt.record_service_reason(supervisor.reason, supervisor.error)
            outcome = attempt.outcome() or outcome
        if state.holds_place and replica.job is not None:
            self.withdraw(replica)
        with contextlib.suppress(JobServiceError):
            stop_others(self._service, replica.key, replica.job)
        self._states.forget(replica.key)
        self._heartbeats.forget(replica.attempt.place)
        return outcome

    def withdraw(self, replica: JobReplica) -> None:
        """Free the place that the job of an ended replica holds at the service, where the service answers."""
        if replica.job is not None:
            with contextlib.suppress(JobServiceError):
                retrying()(self._service.withdraw, self._states.verified(replica.key, replica.job))

    def supervisor_of(self, replica: JobReplica, state: JobState | None) -> SupervisorStatus:
        """Return what is known of the job of a replica that ended. None if the job is gone for an unknown reason."""
        if state is None or state.reason is None:
            return SupervisorStatus(is_alive=False)
        _, error = explain(replica.attempt.title(), self._service.name, state, replica.timeout_s, True, "")
        return SupervisorStatus(is_alive=False, reason=state.reason, error=error)

    def _ended_without_outcome(self, replica: JobReplica, state: JobState) -> Outcome:
        attempt, service = replica.attempt, self._service
        if state.reason == "lost" and not attempt.has_cancel_marker():
            said = f" ({state.message.rstrip('.')})" if state.message else ""
            return attempt.record_lost(f"{service.name} reports it gone{said}")
        output = ""
        with contextlib.suppress(JobServiceError):
            if replica.job is not None:
                job_id = self._states.verified(replica.key, replica.job)
                output = service.logs(job_id, LOG_LINES)[-OUTPUT_TAIL_BYTES:]
        reason: Reason = "cancelled"
        error_text = None  # the marker of a cancellation has the reason
        if not attempt.has_cancel_marker():
            who, has_started = attempt.title(), attempt.has_started()
            reason, error_text = explain(who, service.name, state, replica.timeout_s, has_started, output)
        return attempt.record(
            attempt.ended(
                ReplicaStatus.CANCELLED if reason == "cancelled" else ReplicaStatus.FAILED,
                reason,
                exit_code=state.exit_code,
                signal=SIGNALS.get(state.exit_code or 0) if reason in ("signal", "oom") else None,
                error=error_text,
                output_tail=output,
            )
        )


def _last_sign_of(attempt: Attempt) -> float | None:
    """Return when a replica gave its last sign of life: its heartbeat, else its claim, else its launcher's intent."""
    if (beat := attempt.beat()) is not None:
        return beat.at
    claim = attempt.find(CLAIM, Claim.parse)
    if claim is not None and claim.at is not None:
        return claim.at
    intent = attempt.find(INTENT, Intent.parse)
    return None if intent is None else intent.at


def explain(
    who: str, service: str, state: JobState, timeout_s: float | None, has_started: bool, output: str
) -> tuple[Reason, str]:
    """Name the reason of an end without an outcome, and put it into a sentence.

    Args:
        who: `Replica 3 of 8 (attempt 1)`.
        service: its name for people.
        has_started: whether the replica claimed its attempt.
        output: the end of its log.
    """
    said = f" {service} says: {state.message.rstrip('.')}." if state.message else ""

    def sentence(ending: str, **values: Any) -> str:
        return f"{who} {ENDINGS[ending].format(service=service, **values)}{'' if ending == 'timeout' else said}"

    if state.reason == "oom":
        cause = "out of memory" if said else f"most likely out of memory (SIGKILL, and not by {service})"
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
        why = f" Its log ends: {lines[-1].rstrip('.')}." if lines else ""  # first: a table shows the beginning alone
        return "start_failed", sentence("not_reached", code=code, why=why)
    return "no_result", sentence("no_result", code=code)
