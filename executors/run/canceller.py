"""Ending a run before its time: by a cancel, at once, or by a stop, which lets it come to a good place."""

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

HEAD_START_S = 5.0  # the store's, before the service is asked: so the markers are usually there before
STORE_S = 20.0  # how long the store is waited for once the service has ended the jobs


class Canceller:
    """Ends the replicas of one run.

    The log of decisions gets the order first. A replica that a resume or a restart starts meanwhile finds it there when
    it claims its attempt. But a store that does not answer must not keep paid jobs running. So the store gets a few
    seconds, then the service is asked to end the jobs, and then the store gets some more time.

    Args:
        reader: looks at the run.
        launched_at: returns the Unix time of the run's launch. None: what the run's record says.
        on_progress: gets a sentence if a service takes longer than a minute, and one if the store does not answer.
    """

    def __init__(
        self,
        reader: RunStateReader,
        launched_at: Callable[[], float] | None = None,
        on_progress: Callable[[str], None] = lambda words: None,
    ) -> None:
        self._reader = reader
        self._launched_at = launched_at or (lambda: reader.record.created_at)
        self._tell = on_progress
        self.is_store_silent = False
        """Whether the store did not answer the last cancel."""
        self.was_ended_without_store = False
        """Whether that cancel ended everything at the service all the same."""
        self.n_withdrawn = 0
        """Jobs that the service still had although every rank had ended, as a queue that would start them again."""

    def request(self, why: str = BY_USER) -> None:
        """Bar all ranks, and leave the cancel marker of every replica that has not ended. Asks the store alone."""
        self._bar(None, why)
        self._mark(None, why)

    def cancel(self, ranks: Sequence[int] | None = None) -> None:
        """Cancel some replicas, None: all that still run.

        Returns when local replicas are gone, and when each service has accepted to end its jobs.

        Raises:
            BackendError: the backend did not end some; the message says how to end them. They are barred and marked in
                the store all the same, if that answers.
        """
        self._end_at_all(ranks, BY_USER, blocks=True)

    def stop(self, within_s: float, wait: Callable[[float], bool]) -> None:
        """Ask all replicas to end at the next good place, and end what has not within some seconds.

        Args:
            within_s: how long the replicas may take to end, in seconds.
            wait: waits until the run has ended, at most for the given seconds. It returns False if the run still runs.

        Raises:
            ValueError: `within_s` is out of range.
        """
        if not 0 <= within_s <= MAX_S:
            raise ValueError(f"within_s is from 0 to {MAX_S:g} seconds, got {within_s!r}.")
        stop = order_stop(DecisionLog(self._reader.store, self._reader.run_id), within_s)
        if not wait(stop.within_s or 0.0):  # not until a time of the log's, which may be by a clock that is ahead
            self.end(STOPPED)

    def end(self, why: str) -> None:
        """End all replicas that still run, and block no rank.

        Args:
            why: the reason, for the outcomes.

        Raises:
            BackendError: the backend did not end some; see `cancel`.
        """
        self._end_at_all(None, why, blocks=False)

    def _end_at_all(self, ranks: Sequence[int] | None, why: str, *, blocks: bool) -> None:
        """End replicas at their services, and in the store."""
        self.is_store_silent = self.was_ended_without_store = False
        self.n_withdrawn = 0
        placements, url = self._reader.placements, self._reader.store.url

        def order(marks: bool) -> Sequence[ReplicaState]:
            if blocks:
                self._bar(ranks, why)
            seen = self._look(ranks, why)
            if marks:
                living = [state.rank for state in seen if not state.status.is_terminal and not state.is_over]
                self._reader.map(lambda rank: self._reader.attempt(rank).request_cancel(why), living)
            return seen

        if not placements.ends_jobs:
            self._end(order(marks=False), why)
            return
        (asked,) = in_threads(order, [True], 1)
        seen: Sequence[ReplicaState] | None = None
        with contextlib.suppress(ReplicasError):  # whatever is wrong with its records, what is paid for ends
            seen = answered_within(HEAD_START_S, asked, url)
        over = frozenset(state.rank for state in seen or () if state.status.is_terminal)
        asked_for = None if ranks is None else tuple(ranks)
        jobs = JobsOfRun(self._reader.run_id, url, self._launched_at(), asked_for, over)
        told = placements.end_jobs(jobs, self._tell)
        if seen and all(state.status.is_terminal for state in seen):
            self.n_withdrawn = told.n_ended
        try:
            seen = answered_within(STORE_S, asked, url)
        except StoreError as error:
            self.is_store_silent = True
            if not told.is_complete:
                raise BackendError(f"{told.what_is_left} The store does not answer either: {error}") from error
            self.was_ended_without_store = True
            n = f"{told.n_ended} job{'s' * (told.n_ended != 1)}"
            self._tell(
                f"{n} of run {self._reader.run_id} ended at the service. The run's records do not say so: {error}"
            )
            return
        self._end(seen, why, told.attempts)
        if not told.is_complete:
            raise BackendError(told.what_is_left)

    def _end(self, seen: Sequence[ReplicaState], why: str, ended: Collection[tuple[int, int]] = ()) -> None:
        """End what still runs, but for attempts (a rank and a number each) whose jobs have been ended already."""
        reader, placements = self._reader, self._reader.placements
        states = [state for state in seen if not state.status.is_terminal and (state.rank, state.attempt) not in ended]
        alive = [state.rank for state in states if not state.is_over]

        def find(rank: int) -> Any:
            try:
                return reader.handle(rank, insists=True)
            except BackendError as error:  # the store can be reached all the same, and the replica looks there
                reader.attempt(rank).request_cancel(why)
                return error

        found = dict(zip(alive, reader.map(find, alive), strict=True))
        unclear = {r: handle for r, handle in found.items() if isinstance(handle, BackendError)}
        launched = [r for r, handle in found.items() if handle is not None and r not in unclear]
        for r in (r for r, handle in found.items() if handle is None):
            attempt = reader.attempt(r)
            if not placements.knows_attempts:
                raise RunNotFoundError(
                    f"Run {reader.run_id!r}: backend {reader.backend(r)!r} left no handle that another process can "
                    "read. Cancel it in the process that launched it."
                )
            attempt.request_cancel(why)  # its launcher died, or has not come to it; one that comes up late ends, too
            attempt.record(attempt.new_outcome(ReplicaStatus.CANCELLED, "cancelled"))
        if why != BY_USER:  # the executor's own marker would say that
            reader.map(lambda r: reader.attempt(r).request_cancel(why), launched)

        def end(rank: int) -> ReplicasError | OSError | None:
            try:
                placements.cancel(reader.handle(rank))
            except (ReplicasError, OSError) as error:
                return error
            return None

        # A rank that has ended raises an error if its records are damaged.
        failed = in_parallel(end, [*launched, *(state.rank for state in states if state.is_over)])
        if error := next(filter(None, [*failed, *unclear.values()]), None):
            raise error

    def _bar(self, ranks: Sequence[int] | None, why: str) -> None:
        """Bar ranks, None: all, unless they have succeeded."""
        states = self._reader.recorded(ranks)
        left = [state.rank for state in states if state.status is not ReplicaStatus.SUCCEEDED]
        if run_folder_was_deleted(self._reader.store, self._reader.run_id) or not left:
            return
        log = DecisionLog(self._reader.store, self._reader.run_id)
        with contextlib.suppress(CorruptObjectError):  # no process can read the log then, so nothing is started
            # An order of the user is always added, because this process may not have seen a resume that came since.
            entries = log.read()  # once: each reading asks the store
            if why == BY_USER or not all(is_blocked(entries, state.rank) for state in states):
                order_cancel(log, None if ranks is None else left, why)

    def _look(self, ranks: Sequence[int] | None, why: str) -> Sequence[ReplicaState]:
        """Look at ranks that are about to be ended, None: all.

        A backend that does not tell how they are may end them all the same, and what it leaves finds its marker.
        """
        try:
            return self._reader.look(ranks)
        except BackendError:
            return self._mark(ranks, why)

    def _mark(self, ranks: Sequence[int] | None, why: str) -> Sequence[ReplicaState]:
        """Write the cancel markers of ranks that have not ended, and return the states of all these ranks.

        Args:
            ranks: the ranks. None: all.
            why: the reason, for the outcomes.
        """
        states = self._reader.recorded(ranks)
        alive = [self._reader.attempt(state.rank) for state in states if not state.status.is_terminal]
        self._reader.map(lambda attempt: attempt.request_cancel(why), alive)
        return states
