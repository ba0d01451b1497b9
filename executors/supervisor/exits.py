"""Explains and records the end of an attempt whose process left no outcome, as after SIGKILL."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from executors.attempt import Attempt
from executors.attempt.outcome import describe_end
from executors.errors import CorruptObjectError, StoreError
from executors.patience import OutageTolerance, Waits
from executors.process import signal_name
from executors.protocol import Outcome, Reason, ReplicaStatus
from executors.replica import SERVICE
from executors.store.record_names import run_exists, run_was_deleted
from executors.supervisor.members import Member
from executors.supervisor.memory_kills import MemoryKills
from executors.supervisor.processes import NEVER, RunningAttempt

MARKERS_S = 3.0  # the longest time to write cancel markers, because the supervisor must kill its ranks in time
SILENT_S = 5.0  # the pause after a failed request, which is shorter than the longest wait for the store
SOONEST_S, LATEST_S = 1.0, 10.0  # between two tries to write an outcome


class ExitClassifier:
    """Finds the reason of a process's end: a signal, an exit code, a time limit, memory, or the supervisor itself.

    Args:
        world_size: the number of ranks of the launch, for the sentences.
        timeout_s: the time limit of each rank. None: there is none.
        memory_kills: counts the processes that the kernel killed because memory ran out.
    """

    def __init__(self, world_size: int, timeout_s: float | None, memory_kills: MemoryKills) -> None:
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._memory_kills = memory_kills

    def explain(
        self, running: RunningAttempt, exit_code: int, member: Member | None = None
    ) -> tuple[Reason, str | None]:
        """Return the reason of an end without an outcome, and a sentence that describes it.

        Args:
            running: the attempt that ended.
            exit_code: its exit code, or -N if signal N ended it.
            member: the process that failed first, in a replica of several processes. None, the default: the replica has
                one process.
        """
        reason, error = self._explain(running, exit_code, member or running.members[0])
        if running.is_given_up and error is not None:
            error += " Its process cannot be killed: it is stuck in the kernel."
        return reason, error

    def _explain(self, running: RunningAttempt, exit_code: int, member: Member) -> tuple[Reason, str | None]:
        def because(reason: Reason, ending: str = "", **values: Any) -> tuple[Reason, str]:
            return reason, describe_end(ending or reason, running.asked.rank, self._world_size, **values)

        if running.ending in ("cancelled", "hang", "rule"):
            return running.ending, running.error
        if running.ending == "timeout":
            return because("timeout", limit_s=self._timeout_s)
        if running.ending == "fenced":
            return because("fenced")
        service = os.environ.get(SERVICE) if running.page.notice else None
        terminated = "terminated" if service is None else "told_to_end"
        if running.ending == "signal":
            return because("signal", terminated, name=running.page.notice, service=service)
        if exit_code == -signal.SIGKILL:
            is_for_memory = self._memory_kills.include(member.pid, running.began)
            if is_for_memory is None:
                return because("signal", "perhaps_oom")
            if is_for_memory:
                return because("oom")
        if exit_code < 0:
            return because("signal", number=-exit_code, name=signal_name(-exit_code))
        if exit_code == 128 + signal.SIGTERM:
            return because("signal", terminated, name="SIGTERM", service=service)
        page = member.page
        ending = "unrecorded" if page.has_result else "storeless" if page.store_failed else "no_result"
        return because("no_result", ending, code=f"exit code {exit_code}")


class OutcomeWriter:
    """Writes the outcomes of attempts into the store, and tries again if the store fails.

    Other processes do not know about these ends, so no other process would record them.

    Args:
        recorded: is called for each end that was recorded, with the outcome that counts.
        tolerance: returns how long to wait for a store that fails if there is nothing else to do.
        clock: returns the seconds of a monotonic clock. Default: the system's clock.
        waits: prints what the process waits for. None: nothing is printed.
    """

    def __init__(
        self,
        recorded: Callable[[Attempt, Outcome], None],
        tolerance: Callable[[], OutageTolerance],
        clock: Callable[[], float] = time.monotonic,
        waits: Waits | None = None,
    ) -> None:
        self._recorded = recorded
        self._tolerance = tolerance
        self._clock = clock
        self._waits = waits or Waits(lambda words: None, clock)
        self._late: dict[tuple[int, int], tuple[Attempt, Outcome]] = {}
        """The outcomes that are not written yet, by rank and attempt. The outcome that was tried last comes last."""
        self._failing_since = 0.0
        self._failure: StoreError | None = None
        """The error of the last try."""
        self._silent_until = 0.0
        """The time until which no request is made, because the store has just failed."""
        self._idle_since: float | None = None
        self.next_at = NEVER
        """The time from which `try_again` has an outcome to write."""

    @property
    def are_late(self) -> bool:
        """True if outcomes wait to be written, or the store has failed within the last seconds."""
        return bool(self._late) or self._clock() < self._silent_until

    def put_off(self, failure: StoreError) -> None:
        """Write no outcomes for some seconds, because another request to the store has failed.

        Args:
            failure: the error. After a damaged record there is no pause.
        """
        if not isinstance(failure, CorruptObjectError):
            self._silent_until = self._clock() + SILENT_S

    def add(self, attempt: Attempt, reason: Reason, error: str | None, **more: Any) -> None:
        """Record an end now, or as soon as the store takes it.

        Args:
            attempt: the attempt that ended.
            reason: the reason.
            error: a sentence about the end. None: the cancel marker has it.
            more: further fields of the outcome.
        """
        self.add_outcome(attempt, end_of(attempt, reason, error, **more))

    def add_outcome(self, attempt: Attempt, outcome: Outcome) -> None:
        """Record an outcome now, or as soon as the store takes it.

        Args:
            attempt: the attempt that ended.
            outcome: its outcome.
        """
        is_first = not self._late
        self._late.setdefault((attempt.rank, attempt.number), (attempt, outcome))
        if not is_first:
            return  # `try_again` writes it: if many attempts end during an outage, only one try waits for the store
        self._failing_since = now = self._clock()
        if now < self._silent_until:
            self.next_at = self._silent_until
            return
        failure = self._try(attempt.rank, attempt.number)
        if failure is not None:
            import logging  # imported only here, because the import costs each start of a replica 2 ms

            logging.getLogger(__name__).error("rank %d: its outcome cannot be written: %s", attempt.rank, failure)

    def try_again(self) -> None:
        """Write late outcomes if a try is due. Stop at the first error, because the supervisor has other work."""
        if self._clock() >= self.next_at:
            for place in list(self._late):
                if self._try(*place) is not None:
                    return

    def is_pending(self, *, is_busy: bool) -> bool:
        """Return True if outcomes wait to be written, and the longest wait for the store has not passed.

        Args:
            is_busy: True if the supervisor has other work. Time with other work does not count as waiting.
        """
        now = self._clock()
        if is_busy:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        limit_s = self._tolerance().limit_for(self._failure)
        is_pending = bool(self._late) and (self._idle_since is None or now - self._idle_since < limit_s)
        if not is_pending:
            self._waits.end(self, is_back=not self._late)
        elif self._failure is not None:
            what = "the store to record how a rank ended"
            self._waits.note(self, what, self._failing_since, limit_s, self._failure)
        return is_pending

    def _try(self, rank: int, number: int) -> StoreError | None:
        """Write a late outcome. Return the error if that fails."""
        attempt, end = self._late.pop((rank, number))
        failure: StoreError | None = None
        outcome: Outcome | None = None
        try:
            outcome = record_end(attempt, end)
        except CorruptObjectError as error:  # the record stays damaged, so it is not read again
            failure = error
        except StoreError as error:
            failure = error
            self._late[rank, number] = attempt, end
        self._failure = failure
        now = self._clock()
        if failure is None:
            self._failing_since = now
        pause_s = min(max(SOONEST_S, (now - self._failing_since) / 2), LATEST_S)
        self.next_at = NEVER if not self._late else now if failure is None else now + pause_s
        if outcome is not None:
            self._recorded(attempt, outcome)
        return failure


def fields_from_outside(running: RunningAttempt, exit_code: int, member: Member | None = None) -> dict[str, Any]:
    """Return further fields of the outcome that a supervisor writes for a process.

    Args:
        running: the attempt that ended.
        exit_code: its exit code, or -N if signal N ended it.
        member: the process that failed first, in a replica of several processes. None, the default: the replica has one
            process.
    """
    killed_by, page = signal_name(-exit_code) if exit_code < 0 else None, running.page
    blamed = page if member is None else member.page
    is_by_its_code = not (blamed.store_failed or blamed.has_result)
    return {
        **page.outcome_fields(),
        "error_line": running.error_line,
        "exit_code": exit_code,
        "signal": killed_by or page.notice,
        "fingerprint": killed_by or (f"exit code {exit_code}" if is_by_its_code else None),
        "pid": running.pid,
        "started_at": running.started_at,
    }


def is_fenced(running: RunningAttempt) -> bool:
    """Return True if a live process has lost its attempt, because another process has ended it or claimed a later
    one.

    Before its own claim the answer is False, because the process will claim the next attempt that is free.

    Args:
        running: the attempt.
    """
    if not running.page.claimed:
        return False
    with contextlib.suppress(StoreError):
        attempt = running.attempt
        outcome = attempt.outcome()
        return attempt.at(attempt.number + 1).has_started() or (outcome is not None and outcome.pid != running.pid)
    return False


def mark_cancelled(why: str, attempts: Iterable[Attempt]) -> list[Attempt]:
    """Write the cancel markers of attempts that have no outcome, for at most a few seconds.

    Args:
        why: the reason of the cancel.
        attempts: the attempts.

    Returns: the attempts that had a marker before.
    """
    had_marker, until = [], time.monotonic() + MARKERS_S
    for attempt in attempts:
        if time.monotonic() >= until:
            break
        with contextlib.suppress(StoreError):
            if attempt.has_cancel_marker():
                had_marker.append(attempt)
            elif attempt.outcome() is None:  # a process whose outcome is recorded is about to exit by itself
                attempt.request_cancel(why)
    return had_marker


def record_end(attempt: Attempt, outcome: Outcome) -> Outcome | None:
    """Write the outcome of an attempt.

    Args:
        attempt: the attempt.
        outcome: its outcome.

    Returns: the outcome that counts, which another process may have written. None: the run was deleted.

    Raises:
        StoreError: the store did not take it.
    """
    store, run_id = attempt.store, attempt.run_id
    # An outcome would create the folder of a deleted run again.
    if not run_exists(store, run_id) and run_was_deleted(store, run_id):
        return None
    if outcome.reason == "cancelled" and attempt.has_cancel_marker():
        # the reason is read from the marker, because another process may have cancelled the attempt first
        outcome = replace(outcome, error=None)
    return attempt.record(outcome)


def end_of(attempt: Attempt, reason: Reason, error: str | None, **more: Any) -> Outcome:
    """Return the outcome of an attempt that has just ended and left none.

    Args:
        attempt: the attempt.
        reason: the reason of the end.
        error: a sentence about the end. None: there is none.
        more: further fields of the outcome.
    """
    status = ReplicaStatus.CANCELLED if reason == "cancelled" else ReplicaStatus.FAILED
    return attempt.new_outcome(status, reason, error=error, finished_at=time.time(), **more)
