"""Restart decisions for the ranks of one supervisor, and the orders that block these ranks."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from executors.attempt import Attempt
from executors.errors import CorruptObjectError, StoreError
from executors.patience import BRIEF, Outage, Patience, Waits
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.controller import RestartContext, RestartController, RunSnapshot, leaves_its_supervisor
from executors.restarts.decision_log import Decision, DecisionLog, hang_of, policy_of
from executors.settings.policy import HangLimits
from executors.settings.run_spec import RunSpec
from executors.store import Store

LOG_LOOK_S = 10.0
TURN_S = 1.0  # how long looks may take together, before the ranks are looked after again
TRY_AGAIN_S = 1.0
NEVER = float("inf")


# More than 20 methods: the supervisor notes ends and claims here and asks what is due, and the controller of this
# session has it as its starter. Both sides need the newest attempts and their ends, which are this object's only data.
class RestartSession:
    """Decides what follows each end of a supervisor's ranks, and starts it: the starter "fork" of a controller.

    Args:
        spec: the run, and the ranks and attempt that were launched.
        begin: begins an attempt of one of the ranks, and starts it when another process may run.
        cancelled: records that an attempt was cancelled, and why, and calls `ended` with that.
        look_s: seconds between two reads of the log while an attempt waits for its start.
        patience: returns how long to wait for a store that fails when there is nothing else to do.
        waits: prints the thing that is waited for.
    """

    how = "fork"

    def __init__(
        self,
        spec: RunSpec,
        store: Store,
        begin: Callable[[Attempt], None],
        cancelled: Callable[[Attempt, str], None],
        look_s: float,
        patience: Callable[[], Patience],
        waits: Waits,
    ) -> None:
        self._spec = spec
        self._store = store
        self._begin = begin
        self._cancelled = cancelled
        self._look_s = look_s
        self._log = DecisionLog(store, spec.run_id, key=spec.key)
        self._newest: dict[int, int] = {}
        """The newest attempt of each rank that is this supervisor's."""
        self._ends: dict[int, Outcome] = {}
        """How those ended that have."""
        self._n_read = self._n_seen = 0
        self._has_progress = False
        self._keep_at = NEVER
        self._look_at = time.monotonic() + LOG_LOOK_S
        self._patience = patience
        self._outage = Outage(BRIEF, "the log of decisions", waits=waits)
        self._is_closed = self._only_looks = False

    @functools.cached_property
    def _controller(self) -> RestartController:
        return RestartController(
            self._log,
            RestartContext.of(self._spec, self._store),
            starter=self,
            has_wider=self._spec.is_watched,  # its launcher watches, and can start a container anew
        )

    @property
    def n_read(self) -> int:
        """The number of entries of the log at the last look at the ranks that they block."""
        return self._n_read

    @property
    def hang(self) -> HangLimits:
        """The limits on making no progress that count now."""
        return hang_of(self._log.entries, self._spec.settings.hang_limits)

    @property
    def has_policy(self) -> bool:
        """Whether ends are answered now, as far as the log was read."""
        return policy_of(self._log.entries, self._spec.supervised_restarts) is not None

    @property
    def may_follow(self) -> bool:
        """Whether another attempt of a rank may follow one that ends now."""
        return self.has_policy and not self._is_closed and not self._only_looks

    @property
    def next_at(self) -> float:
        """When `keep` has something to do, if nothing ends before."""
        return NEVER if self._is_closed else min(self._keep_at, self._look_at)

    @property
    def is_pending(self) -> bool:
        """Whether an attempt is to be started later, or an end to be answered."""
        return self._keep_at < NEVER and not self._is_closed and not self._only_looks

    def begun(self, attempt: Attempt) -> None:
        """Note that an attempt is this supervisor's."""
        self._newest[attempt.rank] = attempt.number
        self._ends.pop(attempt.rank, None)

    def claimed(self, attempt: Attempt) -> None:
        """Note which attempt a rank's process is: one later than it was asked for, where that was taken."""
        if attempt.number > self._newest.get(attempt.rank, attempt.number):
            self._newest[attempt.rank] = attempt.number

    def ended(self, outcome: Outcome) -> None:
        """Note how an attempt ended."""
        if outcome.rank in self._newest and outcome.attempt >= self._newest[outcome.rank]:
            self._newest[outcome.rank], self._ends[outcome.rank] = outcome.attempt, outcome
        self._has_progress |= outcome.progress_marks > 0
        if outcome.status is not ReplicaStatus.SUCCEEDED:
            self._keep_at = 0.0

    def look_soon(self) -> None:
        """Have the log looked at: somebody says that there is news."""
        self._look_at = 0.0

    def try_again(self) -> None:
        """Have what is due begun in a moment: it could not be now."""
        self._keep_at = time.monotonic() + TRY_AGAIN_S

    def advance(self, *, has_progress: bool, is_busy: bool) -> bool:
        """Look at the log when it is time to, answer what ended, and begin what is due; return whether it did.

        A long log is read in several turns, between which the ranks are looked after.

        Args:
            has_progress: whether a rank that runs here has reported anything.
            is_busy: whether the supervisor has something else to do; else it waits for a store that fails only so long.
        """
        now, due_at = time.monotonic(), self._keep_at
        if now < self.next_at or self._is_closed:
            return False
        self._look_at, self._keep_at = now + LOG_LOOK_S, NEVER
        self._has_progress |= has_progress
        try:
            snapshot = None if self._only_looks else self._snapshot()
            if not self._log.read_for(TURN_S):  # by a part of it nothing is decided
                self._look_at, self._keep_at = now, due_at
                self._outage.end()
                return False
            wait_s = None if snapshot is None else self._controller.advance_as_read(snapshot)
            self._n_read = len(self._log.entries)
            self._outage.end()
        except CorruptObjectError:  # nobody can decide by such records, and asking again does not mend them
            return False
        except StoreError as error:
            if is_busy:  # time in which there is something else to do is not spent on waiting
                self._outage.restart()
            self._outage.patience = self._patience()
            if self._outage.bears(error):
                self._keep_at = time.monotonic() + TRY_AGAIN_S
            return False
        if wait_s is not None:
            self._keep_at = min(self._keep_at, time.monotonic() + wait_s)
            self._look_at = now + self._look_s  # an attempt that waits has nothing else that could be cancelled
        return True

    def blocks(self) -> dict[int, Decision]:
        """Return the stop or cancel that blocks ranks of this supervisor, by rank."""
        found = {rank: self._controller.blocking_order(rank) for rank in self._newest}
        return {rank: entry for rank, entry in found.items() if entry is not None}

    def take_back(self, rank: int, why: str) -> None:
        """Record a rank's attempt as cancelled that was decided and is not begun."""
        entry = next((entry for entry in reversed(self._log.entries) if rank in entry.start), None)
        if entry is None or not self.may_start(rank) or entry.start[rank] <= self._newest[rank]:
            return
        attempt = Attempt(self._store, self._spec.run_id, rank, entry.start[rank])
        with contextlib.suppress(StoreError):
            if attempt.has_begun():
                return  # whoever has begun it ends it
            attempt.request_cancel(why)
        self._cancelled(attempt, why)

    def close(self, why: str | None = None) -> None:
        """Answer nothing and begin nothing any more.

        Args:
            why: what was to be begun is cancelled for this reason. None: it is left to others.
        """
        if why is not None and not self._is_closed and self._ends:
            with contextlib.suppress(StoreError):
                self._controller.give_up(self._snapshot())
        for rank in list(self._newest) if why is not None else ():
            self.take_back(rank, why or "")
        self._is_closed = True

    def leave_all(self) -> None:
        """Decide nothing and begin nothing any more: other processes do. Orders are read as before."""
        self._only_looks, self._look_at = True, 0.0

    # The starter of the controller

    def may_start(self, rank: int) -> bool:
        """Return True if a rank is this supervisor's, and no entry since starts it elsewhere."""
        for entry in self._log.entries[self._n_seen :]:
            for started, number in entry.start.items():
                if leaves_its_supervisor(entry, started) and number > self._newest.get(started, number):
                    self.leave(started)
        self._n_seen = len(self._log.entries)
        return rank in self._newest

    def start(self, attempts: Mapping[int, int]) -> None:
        """Begin attempts of this supervisor's ranks."""
        for rank, number in attempts.items():
            end = self._ends.get(rank)
            if end is None or end.status is not ReplicaStatus.SUCCEEDED:
                self._begin(Attempt(self._store, self._spec.run_id, rank, number))

    def leave(self, rank: int) -> None:
        """Leave a rank to another process, which has begun its next attempt."""
        self._newest.pop(rank, None)
        self._ends.pop(rank, None)

    def _snapshot(self) -> RunSnapshot:
        """Return how the run's ranks ended: this supervisor's own from memory, others from the store."""
        if not self._ends or self._newest.keys() >= {*range(self._spec.world_size)}:
            return RunSnapshot(dict(self._newest), dict(self._ends), self._has_progress)
        snapshot = RunSnapshot.of(self._store, self._spec.run_id, self._spec.world_size)
        newest = {rank: max(number, self._newest.get(rank, 0)) for rank, number in snapshot.newest.items()}
        ends = {rank: end for rank, end in snapshot.ends.items() if rank not in self._newest}
        return replace(
            snapshot,
            newest=newest,
            ends={**ends, **self._ends},
            has_progress=self._has_progress or snapshot.has_progress,
        )
