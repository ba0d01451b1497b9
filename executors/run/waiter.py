"""Waiting for the replicas of a run, and ending it early when one fails before anybody's first round."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from executors.errors import BackendError, RunNotFoundError
from executors.protocol import Outcome, ReplicaStatus
from executors.run.observer import Observer
from executors.status import FAILED_EARLY, ReplicaState, RunStatus, wait_until
from executors.task.record import RunRecord

MAX_WHY = 2000  # characters


class Waiter:
    """Waits for the replicas of one run.

    Args:
        cancel: ends all replicas that still run.
    """

    def __init__(self, run_id: str, record: RunRecord, observer: Observer, cancel: Callable[[], None]) -> None:
        self._run_id = run_id
        self._record = record
        self._observer = observer
        self._cancel = cancel
        self._watches_for_failures = True

    def wait(self, n: int, timeout_s: float | None) -> bool:
        """Wait until `n` replicas have ended; False if the time was over first."""
        return wait_until(lambda: len(self._ended()) >= n, timeout_s, self._observer.pauses())

    def as_completed(self) -> Iterator[Outcome]:
        """Yield how each replica ended when it has, until all have; once more where one was resumed meanwhile."""
        observer, told = self._observer, set[tuple[int, int]]()
        for pause_s in observer.pauses():
            ended = self._ended()
            observer.collect_missing([state.rank for state in ended])
            outcomes = list(map(observer.ending, ended))
            new = [outcome for outcome in outcomes if (outcome.rank, outcome.attempt) not in told]
            told.update((outcome.rank, outcome.attempt) for outcome in new)
            yield from sorted(new, key=lambda outcome: outcome.finished_at)
            if len(ended) == self._record.world_size:
                return
            time.sleep(pause_s)

    def end_early(self, now: RunStatus, option: str) -> str | None:
        """End the run at a failure before anybody's first round, if it was launched so; return what to say, once.

        Supervisors and workers do so as well; not those of a third party's executor, or of a replica that was killed.
        """
        if not now.failed_early or not self._watches_for_failures:
            return None
        self._watches_for_failures = False
        first = f"rank {now.failed_early[0]} {FAILED_EARLY}"
        if not self._record.fail_fast:
            return f"{first}; the others train on without it. {option} ends the run instead."
        failed = now.replicas[now.failed_early[0]].outcome
        alive = [state.rank for state in now.replicas if not state.status.is_terminal]
        why = f"{first}: {failed.headline[:MAX_WHY]}" if failed else first
        self._observer.map(lambda rank: self._observer.attempt(rank).request_cancel(why), alive)
        with contextlib.suppress(RunNotFoundError):  # only the process that launched it has its handles
            try:
                self._cancel()
            except BackendError as error:
                return f"{first}, which ends the run as soon as each replica sees it: {error}"
        return f"{first}, which ends the run."

    def _ended(self) -> list[ReplicaState]:
        """Look at the run once, and return the replicas that have ended."""
        states = self._observer.look(self._observer.ranks)
        if self._watches_for_failures and any(state.status is ReplicaStatus.FAILED for state in states):
            reported = self._observer.with_reports(states)
            now = RunStatus(self._run_id, self._record.backend, reported, min_replicas=self._record.min_replicas)
            if told := self.end_early(now, "fail_fast=True"):
                print(f"replicas: {self._run_id}: {told}", file=sys.stderr)
            self._watches_for_failures = False
        return [state for state in states if state.is_over]
