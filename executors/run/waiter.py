"""Waits for the replicas of a run, and ends the run early if a replica fails before the first round."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from executors.attempt.pauses import wait_until
from executors.errors import BackendError, CorruptObjectError, RunNotFoundError, StoreError, UnwritableStoreError
from executors.patience import FOLLOWER, Outage, OutageTolerance, Waits
from executors.patience import waits as process_waits
from executors.protocol import Outcome, ReplicaStatus
from executors.status import FAILED_EARLY, ReplicaState, RunStatus, describe_early_failure, name_ranks
from executors.view.progress import View
from executors.view.run_state_reader import RunStateReader

OTHERS_FAIL_S = 2.0  # if the script has an error, all replicas fail within this time, and the run ends anyway
# Without a look for this long, an earlier failure is forgotten; it is longer than any pause between two looks.
UNSEEN_S = 60.0


class ReadTolerance:
    """Lets a wait continue when a look at the run fails, until the outage tolerance of this process is used up.

    Args:
        tolerance: returns the current tolerance. It changes if the process begins to renew leases.
        waits: reports once a minute that this process waits for the store or backend. None: the waits of this process.

    Example:
        tolerance = ReadTolerance(lambda: FOLLOWER)
        is_over = tolerance.tolerant(lambda: run.status().is_terminal)
    """

    def __init__(self, tolerance: Callable[[], OutageTolerance], waits: Waits | None = None) -> None:
        self._tolerance = tolerance
        self._clock = (waits or process_waits).clock
        self._has_seen = False
        self._outages = {what: Outage(FOLLOWER, f"the {what}", waits=waits) for what in ("rendezvous", "backend")}
        self._failed_at = self._looked_at = -math.inf

    def tolerant(self, look: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that looks at the run, and returns False after a failure that is tolerated.

        Without this, an error would end the wait, and with it an attached run.

        Args:
            look: looks at the run, and returns True if the wait has ended.

        Raises:
            StoreError, BackendError: the look failed for longer than the tolerance, or its error is one that waiting
                cannot solve.
        """

        def tolerates() -> bool:
            # After a long pause, an earlier failure does not mean that the store failed all the time.
            if self._clock() - self._looked_at > UNSEEN_S:
                for outage in self._outages.values():
                    outage.drop()
            try:
                found = look()
            except (StoreError, BackendError) as error:
                self._bear(error)
                return False
            self._has_seen = True
            self._looked_at = self._clock()
            self._outages["rendezvous"].end()
            # Most looks ask only the store, so one success does not show that the backend answers.
            if self._looked_at - self._failed_at > UNSEEN_S:
                self._outages["backend"].end()
            else:
                self._outages["backend"].quiet()
            return found

        return tolerates

    def rest(self) -> None:
        """Note that a wait has ended. Outages are reported again from the next wait on."""
        for outage in self._outages.values():
            outage.quiet()

    def _bear(self, error: StoreError | BackendError) -> None:
        what = "rendezvous" if isinstance(error, StoreError) else "backend"
        if not self._has_seen and (what == "backend" or isinstance(error, CorruptObjectError)):
            raise error  # a missing SDK, a missing account or damaged records: waiting does not help
        self._outages[what].tolerance = self._tolerance()
        if not self._outages[what].tolerates(error):
            raise error
        self._failed_at = self._looked_at = self._clock()


class Waiter:
    """Waits for the replicas of one run.

    Args:
        reader: reads the state of the run.
        cancel: ends all replicas that still run.
        advance: called with the states after each look. It restarts replicas, and returns True if another look is due.
        tolerance: returns the current tolerance for a store or a backend that fails.
    """

    def __init__(
        self,
        reader: RunStateReader,
        cancel: Callable[[], None],
        advance: Callable[[Sequence[ReplicaState]], bool],
        tolerance: Callable[[], OutageTolerance] = lambda: FOLLOWER,
    ) -> None:
        self._reader = reader
        self._records = reader.records
        self._cancel = cancel
        self._advance = advance
        self._watches_for_failures = True
        self._failing_since: float | None = None
        self._tolerance = ReadTolerance(tolerance)

    def wait(self, n: int | None, timeout_s: float | None, view: View | None) -> bool:
        """Wait until replicas have ended. Return False if the timeout ended the wait.

        Args:
            n: the number of replicas that must have ended. None: all.
            timeout_s: the longest wait, in seconds. None: no limit.
            view: shows the run during the wait. None: nothing is shown.
        """

        def is_over() -> bool:
            n_ended = len(self._ended(view))
            return n_ended >= (len(self._records.ranks) if n is None else n)

        with showing(view):
            try:
                return wait_until(self._tolerance.tolerant(is_over), timeout_s, self._reader.pauses())
            finally:
                self._tolerance.rest()

    def as_completed(self, view: View | None) -> Iterator[Outcome]:
        """Yield the outcome of each replica when it has ended. A resumed replica is yielded once more."""
        reader, told = self._reader, set[tuple[int, int]]()
        # One sequence for the whole wait, because short pauses after each end would cost requests.
        pauses = reader.pauses()
        new: list[Outcome] = []
        is_over = False

        def has_news() -> bool:
            nonlocal is_over
            ended = self._ended(view)
            is_over = len(ended) == len(self._records.ranks)
            reader.reports.collect_missing([state.rank for state in ended])
            outcomes = list(map(reader.ending, ended))
            new[:] = [outcome for outcome in outcomes if (outcome.rank, outcome.attempt) not in told]
            told.update((outcome.rank, outcome.attempt) for outcome in new)
            return is_over or bool(new)

        while not is_over:
            with showing(view):
                try:
                    wait_until(self._tolerance.tolerant(has_news), None, pauses)
                finally:
                    self._tolerance.rest()
            yield from sorted(new, key=lambda outcome: outcome.finished_at)

    def end_early(self, now: RunStatus, option: str) -> str | None:
        """End the run after a failure before the first round, if the launch has `fail_fast`.

        The call returns a sentence only the first time that the run is ended.

        Supervisors and workers have the same check. But replicas of an executor outside this project, and killed
        replicas, cannot make it.
        """
        if not now.failed_early or not self._watches_for_failures:
            return None
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        if not self._records.record.settings.fail_fast and time.monotonic() - self._failing_since < OTHERS_FAIL_S:
            return None
        if not self._records.record.settings.fail_fast:
            self._watches_for_failures = False
            them = "them" if len(now.failed_early) > 1 else "it"
            ranks = f"{name_ranks(now.failed_early)} {FAILED_EARLY}"
            return f"{ranks}; the others continue without {them}. {option} ends the run instead."
        first = f"rank {now.failed_early[0]} {FAILED_EARLY}"
        failed = next(state.outcome for state in now.replicas if state.rank == now.failed_early[0])
        alive = [state.rank for state in now.replicas if not state.status.is_terminal]
        why = describe_early_failure(now.failed_early[0], failed)
        told = f"{first}, which ends the run."
        try:
            self._records.map(lambda rank: self._records.attempt(rank).request_cancel(why), alive)
            self._cancel()
        except RunNotFoundError:
            pass  # only the process that launched the run has these handles
        except UnwritableStoreError as error:
            told = f"{first}; this process cannot end the run: {error}"
        except (BackendError, CorruptObjectError) as error:
            told = f"{first}, which ends the run as soon as each replica sees it: {error}"
        # Set only after a successful look: after an error of the store, the next look ends the run.
        self._watches_for_failures = False
        return told

    def _ended(self, view: View | None) -> list[ReplicaState]:
        """Look at the run once, show it, and return the ended replicas."""
        reader = self._reader
        states = reader.look()
        while self._advance(states):  # after new decisions, another look may find more ends
            states = reader.look()
        has_failed = self._watches_for_failures and any(state.status is ReplicaStatus.FAILED for state in states)
        if view is not None or has_failed:
            reported = reader.with_reports(states)
            now = reader.status(reported)
            if view is not None:
                view.update(now)
            if has_failed and (told := self.end_early(now, "fail_fast=True")):
                print(f"replicas: {self._records.run_id}: {told}", file=sys.stderr)
            if has_failed:
                self._watches_for_failures = self._watches_for_failures and bool(now.failed_early)
        return [
            state
            for state in states
            if state.is_over and not reader.reasons.is_awaited(self._records.outcome(state.rank))
        ]


@contextlib.contextmanager
def showing(view: View | None) -> Iterator[None]:
    """Close the view after the block, so that other output can use the screen."""
    try:
        yield
    finally:
        if view is not None:
            view.close()
