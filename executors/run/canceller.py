"""Ends a run early. A cancel ends its replicas at once. A stop lets them finish, and ends them after some time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from executors.backend import JobsOfRun
from executors.errors import (
    BackendError,
    CorruptObjectError,
    ReplicasError,
    RunNotFoundError,
    StoreError,
)
from executors.protocol import BY_USER, STOPPED, ReplicaStatus
from executors.restarts.decision_log import DecisionLog, is_blocked
from executors.restarts.orders import order_cancel, order_stop
from executors.settings.policy import MAX_S
from executors.status import ReplicaState
from executors.store.parallel import answered_within, in_parallel, in_threads
from executors.store.record_names import run_folder_was_deleted
from executors.view.run_state_reader import RunStateReader

HEAD_START_S = 5.0  # the store gets this time before the service is asked; usually the markers exist then
STORE_S = 20.0  # the longest wait for the store after the service has ended the jobs


class Canceller:
    """Ends the replicas of one run.

    First, the order is written to the decision log. A replica that is restarted in the meantime reads the order when it
    claims its attempt. A store that does not answer must not keep paid jobs running. So the canceller waits some
    seconds for the store, then asks the service to end the jobs, and then waits for the store again.

    Args:
        reader: reads the states of the run's replicas.
        launched_at: returns the Unix time of the run's launch. None: the time is read from the run's record.
        on_progress: called with a sentence if a service takes longer than a minute, or if the store does not answer.
    """

    def __init__(
        self,
        reader: RunStateReader,
        launched_at: Callable[[], float] | None = None,
        on_progress: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._reader = reader
        self._records = reader.records
        self._launched_at = launched_at or (lambda: reader.records.record.created_at)
        self._on_progress = on_progress
        self.is_store_silent = False
        """True if the store did not answer during the last cancel."""
        self.was_ended_without_store = False
        """True if the last cancel ended all jobs at the service although the store did not answer."""
        self.n_withdrawn = 0
        """The number of jobs that the service still had after all ranks had ended. Its queue might start them."""

    def request(self, why: str = BY_USER) -> None:
        """Block all ranks in the log, and write a cancel marker for each live replica. No backend is asked.

        Args:
            why: the reason that the outcomes get.
        """
        self._block(None, why)
        self._mark(None, why)

    def cancel(self, ranks: Sequence[int] | None = None) -> None:
        """Cancel replicas that still run.

        It returns when local replicas have ended, and when each service has accepted to end its jobs.

        Args:
            ranks: the ranks. None: all ranks.

        Raises:
            BackendError: the backend did not end some replicas. The message says how to end them. If the store
                answers, the replicas are still blocked in the log and have cancel markers.
        """
        self._end_at_all(ranks, BY_USER, blocks=True)

    def stop(self, within_s: float, wait: Callable[[float], bool]) -> None:
        """Ask all replicas to end. End the replicas that still run after `within_s` seconds.

        Args:
            within_s: how long the replicas may take to end, in seconds.
            wait: waits for the end of the run, at most the given seconds. It returns False if the run still runs.

        Raises:
            ValueError: `within_s` is out of range.
        """
        if not 0 <= within_s <= MAX_S:
            raise ValueError(f"within_s must be from 0 to {MAX_S:g} seconds, got {within_s!r}.")
        stop = order_stop(DecisionLog(self._records.store, self._records.run_id), within_s)
        # Seconds, and not a time of day, because the clock of the host that wrote the order may be ahead.
        if not wait(stop.within_s or 0.0):
            self.end(STOPPED)

    def end(self, why: str) -> None:
        """End all replicas that still run. The ranks are not blocked, so they may be restarted.

        Args:
            why: the reason that the outcomes get.

        Raises:
            BackendError: the backend did not end some replicas; see `cancel`.
        """
        self._end_at_all(None, why, blocks=False)

    def _end_at_all(self, ranks: Sequence[int] | None, why: str, *, blocks: bool) -> None:
        """End replicas at their services and in the store, even if one of the two does not answer."""
        self.is_store_silent = self.was_ended_without_store = False
        self.n_withdrawn = 0
        placements, url = self._records.placements, self._records.store.url

        def order(marks: bool) -> Sequence[ReplicaState]:
            if blocks:
                self._block(ranks, why)
            seen = self._look(ranks, why)
            if marks:
                living = [state.rank for state in seen if not state.status.is_terminal and not state.is_over]
                self._records.map(lambda rank: self._records.attempt(rank).request_cancel(why), living)
            return seen

        if not placements.ends_jobs:
            self._end(order(marks=False), why)
            return
        (asked,) = in_threads(order, [True], 1)
        seen: Sequence[ReplicaState] | None = None
        with contextlib.suppress(ReplicasError):  # damaged records must not keep paid jobs running
            seen = answered_within(HEAD_START_S, asked, url)
        over = frozenset(state.rank for state in seen or () if state.status.is_terminal)
        asked_for = None if ranks is None else tuple(ranks)
        jobs = JobsOfRun(self._records.run_id, url, self._launched_at(), asked_for, over)
        result = placements.end_jobs(jobs, self._on_progress)
        if seen and all(state.status.is_terminal for state in seen):
            self.n_withdrawn = result.n_ended
        try:
            seen = answered_within(STORE_S, asked, url)
        except StoreError as error:
            self.is_store_silent = True
            if not result.is_complete:
                raise BackendError(f"{result.what_is_left} The store does not answer either: {error}") from error
            self.was_ended_without_store = True
            n = f"{result.n_ended} job{'s' * (result.n_ended != 1)}"
            self._on_progress(
                f"{n} of run {self._records.run_id} ended at the service. The run's records do not say so: {error}"
            )
            return
        self._end(seen, why, result.attempts)
        if not result.is_complete:
            raise BackendError(result.what_is_left)

    def _end(self, seen: Sequence[ReplicaState], why: str, ended: Collection[tuple[int, int]] = ()) -> None:
        """End the replicas that still run.

        Args:
            seen: the states of the replicas.
            why: the reason, for the outcomes.
            ended: rank and number of each attempt whose job has already been ended.
        """
        records, placements = self._records, self._records.placements
        states = [state for state in seen if not state.status.is_terminal and (state.rank, state.attempt) not in ended]
        alive = [state.rank for state in states if not state.is_over]

        def find(rank: int) -> Any:
            try:
                return self._reader.handles.of(rank, insists=True)
            except BackendError as error:  # the store may answer, and the replica reads its marker there
                self._records.attempt(rank).request_cancel(why)
                return error

        found = dict(zip(alive, self._records.map(find, alive), strict=True))
        unclear = {r: handle for r, handle in found.items() if isinstance(handle, BackendError)}
        launched = [r for r, handle in found.items() if handle is not None and r not in unclear]
        for r in (r for r, handle in found.items() if handle is None):
            attempt = self._records.attempt(r)
            if not placements.knows_attempts:
                raise RunNotFoundError(
                    f"Run {records.run_id!r}: backend {records.backend(r)!r} left no handle that another process can "
                    "read. Cancel it in the process that launched it."
                )
            attempt.request_cancel(
                why
            )  # its launcher died or has not started it; a replica that starts later reads the marker
            attempt.record(attempt.new_outcome(ReplicaStatus.CANCELLED, "cancelled"))
        if why != BY_USER:  # the executor's own marker has BY_USER as its reason
            self._records.map(lambda r: self._records.attempt(r).request_cancel(why), launched)

        def end(rank: int) -> ReplicasError | OSError | None:
            try:
                placements.cancel(self._reader.handles.of(rank))
            except (ReplicasError, OSError) as error:
                return error
            return None

        # An ended rank only raises an error if its records are damaged.
        failed = in_parallel(end, [*launched, *(state.rank for state in states if state.is_over)])
        if error := next(filter(None, [*failed, *unclear.values()]), None):
            raise error

    def _block(self, ranks: Sequence[int] | None, why: str) -> None:
        """Add an order to the log that blocks all ranks that have not succeeded. None: all ranks."""
        states = self._reader.recorded(ranks)
        left = [state.rank for state in states if state.status is not ReplicaStatus.SUCCEEDED]
        if run_folder_was_deleted(self._records.store, self._records.run_id) or not left:
            return
        log = DecisionLog(self._records.store, self._records.run_id)
        with contextlib.suppress(
            CorruptObjectError
        ):  # if the log is damaged, no process can read it and restart a replica
            # An order of the user is always added, because another process may have resumed ranks since the last read.
            entries = log.read()  # once: each reading asks the store
            if why == BY_USER or not all(is_blocked(entries, state.rank) for state in states):
                order_cancel(log, None if ranks is None else left, why)

    def _look(self, ranks: Sequence[int] | None, why: str) -> Sequence[ReplicaState]:
        """Return the states of the ranks that this cancel ends. None: all ranks.

        If a backend cannot report the states, it may still end the replicas. So all ranks get cancel markers, which the
        remaining replicas read.
        """
        try:
            return self._reader.look(ranks)
        except BackendError:
            return self._mark(ranks, why)

    def _mark(self, ranks: Sequence[int] | None, why: str) -> Sequence[ReplicaState]:
        """Write the cancel markers of ranks that have not ended, and return the states of all these ranks.

        Args:
            ranks: the ranks. None: all.
            why: the reason that the outcomes get.
        """
        states = self._reader.recorded(ranks)
        alive = [self._records.attempt(state.rank) for state in states if not state.status.is_terminal]
        self._records.map(lambda attempt: attempt.request_cancel(why), alive)
        return states
