"""How an attempt ended whose process left no outcome: explained, and recorded in its place."""

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
from executors.patience import Patience, Waits
from executors.process import signal_name
from executors.protocol import Outcome, Reason, ReplicaStatus
from executors.replica import SERVICE
from executors.store.record_names import run_exists, run_was_deleted
from executors.supervisor.memory_kills import MemoryKills
from executors.supervisor.processes import NEVER, RunningAttempt

MARKS_S = 3.0  # the ranks are to be killed in time
SILENT_S = 5.0  # less than an idle supervisor waits for the store
SOONEST_S, LATEST_S = 1.0, 10.0  # between two tries of what a store does not take


class ExitClassifier:
    """Explains how processes ended.

    Args:
        timeout_s: the time limit of each.
        memory_kills: what the kernel has killed because memory ran out.
    """

    def __init__(self, world_size: int, timeout_s: float | None, memory_kills: MemoryKills) -> None:
        self._world_size = world_size
        self._timeout_s = timeout_s
        self._memory_kills = memory_kills

    def explain(self, running: RunningAttempt, exit_code: int) -> tuple[Reason, str | None]:
        """Name the reason of an end without an outcome, and put it into a sentence."""
        reason, error = self._explain(running, exit_code)
        if running.is_given_up and error is not None:
            error += " Its process cannot be killed: it is stuck in the kernel."
        return reason, error

    def _explain(self, running: RunningAttempt, exit_code: int) -> tuple[Reason, str | None]:
        def because(reason: Reason, ending: str = "", **values: Any) -> tuple[Reason, str]:
            return reason, describe_end(ending or reason, running.asked.rank, self._world_size, **values)

        if running.ending in ("cancelled", "hang"):
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
            is_for_memory = self._memory_kills.include(running.pid, running.began)
            if is_for_memory is None:
                return because("signal", "perhaps_oom")
            if is_for_memory:
                return because("oom")
        if exit_code < 0:
            return because("signal", number=-exit_code, name=signal_name(-exit_code))
        if exit_code == 128 + signal.SIGTERM:
            return because("signal", terminated, name="SIGTERM", service=service)
        page = running.page
        ending = "unrecorded" if page.has_result else "storeless" if page.store_failed else "no_result"
        return because("no_result", ending, code=f"exit code {exit_code}")


class OutcomeWriter:
    """Records how attempts ended. What the store does not take is tried again: nobody else would record that end.

    Args:
        recorded: is told of each end that is recorded, with the outcome that counts.
        patience: returns how long a store that fails is waited for where there is nothing else to do.
        clock: returns seconds of a monotonic clock.
        waits: says what is waited for. None: nothing is said.
    """

    def __init__(
        self,
        recorded: Callable[[Attempt, Outcome], None],
        patience: Callable[[], Patience],
        clock: Callable[[], float] = time.monotonic,
        waits: Waits | None = None,
    ) -> None:
        self._recorded = recorded
        self._patience = patience
        self._clock = clock
        self._waits = waits or Waits(lambda words: None, clock)
        self._late: dict[tuple[int, int], tuple[Attempt, Outcome]] = {}
        """What is to be tried again, by rank and attempt; what was tried last is last."""
        self._failing_since = 0.0
        self._failure: StoreError | None = None
        """Why the last try failed."""
        self._silent_until = 0.0
        """Until when the store is asked nothing: it failed just now."""
        self._idle_since: float | None = None
        self.next_at = NEVER
        """When `try_again` has something to do."""

    @property
    def are_late(self) -> bool:
        """Whether there are ends that the store has not taken yet, or would not now."""
        return bool(self._late) or self._clock() < self._silent_until

    def put_off(self, failure: StoreError) -> None:
        """Try to record nothing for some seconds, if the store failed to answer something else about an end."""
        if not isinstance(failure, CorruptObjectError):
            self._silent_until = self._clock() + SILENT_S

    def add(self, attempt: Attempt, reason: Reason, error: str | None, **more: Any) -> None:
        """Record an end, now or as soon as the store takes it."""
        is_first = not self._late
        self._late.setdefault((attempt.rank, attempt.number), (attempt, end_of(attempt, reason, error, **more)))
        if not is_first:
            return  # it is tried in its turn: many ends at once do not wait for the same store one after the other
        self._failing_since = now = self._clock()
        if now < self._silent_until:
            self.next_at = self._silent_until
            return
        failure = self._try(attempt.rank, attempt.number)
        if failure is not None:
            import logging  # 2 ms, on the way of every replica otherwise

            logging.getLogger(__name__).error("rank %d: its outcome cannot be written: %s", attempt.rank, failure)

    def try_again(self) -> None:
        """Record what is late, until the store fails: the supervisor has more to do than to wait for it."""
        if self._clock() >= self.next_at:
            for place in list(self._late):
                if self._try(*place) is not None:
                    return

    def is_pending(self, *, is_busy: bool) -> bool:
        """Return whether an end is still to be recorded.

        Args:
            is_busy: whether the supervisor has something else to do.
        """
        now = self._clock()
        if is_busy:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        limit_s = self._patience().limit_for(self._failure)
        is_pending = bool(self._late) and (self._idle_since is None or now - self._idle_since < limit_s)
        if not is_pending:
            self._waits.over(self, is_back=not self._late)
        elif self._failure is not None:
            what = "the store to record how a rank ended"
            self._waits.note(self, what, self._failing_since, limit_s, self._failure)
        return is_pending

    def _try(self, rank: int, number: int) -> StoreError | None:
        """Record an end that is late, or return why that cannot be done now."""
        attempt, end = self._late.pop((rank, number))
        failure: StoreError | None = None
        outcome: Outcome | None = None
        try:
            outcome = record_end(attempt, end)
        except CorruptObjectError as error:  # asking again does not mend a record
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


def seen_from_outside(running: RunningAttempt, exit_code: int) -> dict[str, Any]:
    """Return what an outcome says beside the reason, where its supervisor writes it."""
    killed_by, page = signal_name(-exit_code) if exit_code < 0 else None, running.page
    is_by_its_code = not (page.store_failed or page.has_result)
    return {
        **page.told(),
        "exit_code": exit_code,
        "signal": killed_by or page.notice,
        "fingerprint": killed_by or (f"exit code {exit_code}" if is_by_its_code else None),
        "pid": running.pid,
        "started_at": running.started_at,
    }


def is_fenced(running: RunningAttempt) -> bool:
    """Return whether a living process has lost its attempt: to an outcome of somebody else, or to a later claim.

    Before its own claim it has none to lose: it takes the next that is free.
    """
    if not running.page.claimed:
        return False
    with contextlib.suppress(StoreError):
        attempt = running.attempt
        outcome = attempt.outcome()
        return attempt.at(attempt.number + 1).has_started() or (outcome is not None and outcome.pid != running.pid)
    return False


def mark_cancelled(why: str, attempts: Iterable[Attempt]) -> list[Attempt]:
    """Leave the cancel markers of attempts that have no outcome, as far as the store takes them in a few seconds.

    Returns: those that had one.
    """
    had_marker, until = [], time.monotonic() + MARKS_S
    for attempt in attempts:
        if time.monotonic() >= until:
            break
        with contextlib.suppress(StoreError):
            if attempt.has_cancel_marker():
                had_marker.append(attempt)
            elif attempt.outcome() is None:  # else it is only tidying up
                attempt.request_cancel(why)
    return had_marker


def record_end(attempt: Attempt, outcome: Outcome) -> Outcome | None:
    """Record how an attempt ended; return the outcome that counts. None: its run was deleted.

    Raises:
        StoreError: the store did not take it.
    """
    store, run_id = attempt.store, attempt.run_id
    if not run_exists(store, run_id) and run_was_deleted(store, run_id):  # the outcome would bring its folder back
        return None
    if outcome.reason == "cancelled" and attempt.has_cancel_marker():
        outcome = replace(outcome, error=None)  # somebody else may have cancelled it before: its marker says why
    return attempt.record(outcome)


def end_of(attempt: Attempt, reason: Reason, error: str | None, **more: Any) -> Outcome:
    """Return the outcome of an attempt that ended now and left none."""
    status = ReplicaStatus.CANCELLED if reason == "cancelled" else ReplicaStatus.FAILED
    return attempt.ended(status, reason, error=error, finished_at=time.time(), **more)
