"""Ending a run before its time: by a cancel, at once, or by a stop, which lets it come to a good place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from executors.errors import BackendError, CorruptObjectError, ReplicasError, RunNotFoundError
from executors.native import NativeExecutor
from executors.protocol import BY_USER, STOPPED, ReplicaStatus
from executors.run.observer import Observer
from executors.status import ReplicaState
from executors.store.parallel import in_parallel
from executors.store.url import was_deleted
from executors.supervision.decisions import DecisionLog, is_barred
from executors.supervision.orders import order_cancel, order_stop
from executors.task.policy import MAX_S


class Canceller:
    """Ends the replicas of one run.

    The log of decisions says it first: what starts meanwhile, by a resume or a restart, finds it there when it claims
    its attempt.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def request(self, why: str = BY_USER) -> None:
        """Bar all ranks, and leave the cancel marker of every replica that has not ended. Asks the store alone."""
        self._bar(None, why)
        self._mark(None, why)

    def cancel(self, ranks: Sequence[int] | None = None) -> None:
        """Cancel some replicas, None: all that still run; returns when they are gone.

        Raises:
            BackendError: the backend did not end some. They are barred and marked in the store all the same.
        """
        self._bar(ranks, BY_USER)
        self._end(self._look(ranks, BY_USER), BY_USER)

    def stop(self, within_s: float, wait: Callable[[float], bool]) -> None:
        """Ask all replicas to end at the next good place, and end what has not within some seconds.

        Args:
            wait: waits until the run is over, for so many seconds at most; False if it is not.

        Raises:
            ValueError: that is no time.
        """
        if not 0 <= within_s <= MAX_S:
            raise ValueError(f"within_s is from 0 to {MAX_S:g} seconds, got {within_s!r}.")
        stop = order_stop(DecisionLog(self._observer.store, self._observer.run_id), within_s)
        if not wait(stop.within_s or 0.0):  # not until a time of the log's, which may be by a clock that is ahead
            self.end(STOPPED)

    def end(self, why: str) -> None:
        """End all that still run, which nobody bars; returns when they are gone."""
        self._end(self._look(None, why), why)

    def _end(self, seen: Sequence[ReplicaState], why: str) -> None:
        observer, executor = self._observer, self._observer.executor
        states = [state for state in seen if not state.status.is_terminal]
        alive = [state.rank for state in states if not state.is_over]

        def find(rank: int) -> Any:
            try:
                return observer.handle(rank, insists=True)
            except BackendError as error:  # the store can be reached all the same, and the replica looks there
                observer.attempt(rank).request_cancel(why)
                return error

        found = dict(zip(alive, observer.map(find, alive), strict=True))
        unclear = {r: handle for r, handle in found.items() if isinstance(handle, BackendError)}
        launched = [r for r, handle in found.items() if handle is not None and r not in unclear]
        for r in (r for r, handle in found.items() if handle is None):
            attempt = observer.attempt(r)
            if not isinstance(executor(), NativeExecutor):
                raise RunNotFoundError(
                    f"Run {observer.run_id!r}: backend {observer.backend(r)!r} left no handle that another process can "
                    "read. Cancel it in the process that launched it."
                )
            attempt.request_cancel(why)  # its launcher died, or has not come to it; one that comes up late ends, too
            attempt.record(attempt.ended(ReplicaStatus.CANCELLED, "cancelled"))
        if why != BY_USER:  # the executor's own marker would say that
            observer.map(lambda r: observer.attempt(r).request_cancel(why), launched)

        def end(rank: int) -> ReplicasError | OSError | None:
            try:
                executor().cancel(observer.handle(rank))
            except (ReplicasError, OSError) as error:
                return error
            return None

        # What is over raises what is wrong with its records.
        ended = in_parallel(end, [*launched, *(state.rank for state in states if state.is_over)])
        if error := next(filter(None, [*ended, *unclear.values()]), None):
            raise error

    def _bar(self, ranks: Sequence[int] | None, why: str) -> None:
        """Bar ranks, None: all, unless they have succeeded."""
        states = self._observer.recorded(ranks)
        left = [state.rank for state in states if state.status is not ReplicaStatus.SUCCEEDED]
        if was_deleted(self._observer.store, self._observer.run_id) or not left:
            return
        log = DecisionLog(self._observer.store, self._observer.run_id)
        with contextlib.suppress(CorruptObjectError):  # then nobody can read it, so nothing is started
            # A person's order is always added: a resume may have come since that this process has not seen.
            entries = log.read()  # once: each reading asks the store
            if why == BY_USER or not all(is_barred(entries, state.rank) for state in states):
                order_cancel(log, None if ranks is None else left, why)

    def _look(self, ranks: Sequence[int] | None, why: str) -> Sequence[ReplicaState]:
        """Look at ranks that are about to be ended, None: all.

        A backend that does not tell how they are may end them all the same, and what it leaves finds its marker.
        """
        try:
            return self._observer.look(ranks)
        except BackendError:
            return self._mark(ranks, why)

    def _mark(self, ranks: Sequence[int] | None, why: str) -> Sequence[ReplicaState]:
        """Leave the cancel markers of ranks that have not ended, None: all; return the states of these ranks."""
        states = self._observer.recorded(ranks)
        alive = [self._observer.attempt(state.rank) for state in states if not state.status.is_terminal]
        self._observer.map(lambda attempt: attempt.request_cancel(why), alive)
        return states
