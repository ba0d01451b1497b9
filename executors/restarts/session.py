"""Makes restart decisions for the ranks of one supervisor, and reads the orders that block these ranks."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from executors.attempt import Attempt
from executors.errors import CorruptObjectError, StoreError
from executors.patience import BRIEF, Outage, OutageTolerance, Waits
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.controller import RestartContext, RestartController, RunSnapshot, leaves_its_supervisor
from executors.restarts.decision_log import Decision, DecisionLog, decision_on, hang_of, policy_of, rules_of
from executors.restarts.orders import order_stop_by_rule
from executors.restarts.rules import SAME_PROCESS
from executors.settings.policy import HangLimits
from executors.settings.run_spec import RunSpec
from executors.store import Store

READ_LOG_S = 10.0  # between two reads of the log
READ_TURN_S = 1.0  # the longest time for reads before the supervisor continues its other work
PAUSE_S = 1.0  # between two tries to read the log or to record an end
NEVER = float("inf")


# More than 20 methods: it has two callers. The supervisor notes starts, claims and ends here, and asks for orders. The
# controller uses it as the starter of attempts. Both sides need the newest attempts and their ends, which this class
# holds.
class RestartSession:
    """Decides what follows each ended attempt of a supervisor's ranks, and starts the next attempts as forks.

    Args:
        spec: the run, with the ranks and the attempt that were launched.
        store: the store of the run.
        begin: begins an attempt of one of the ranks. The attempt may wait until another process may run.
        cancelled: records that an attempt was cancelled, with the reason, and calls `note_end` with the outcome.
        look_s: the seconds between two reads of the log while an attempt waits for its start.
        tolerance: returns how long to wait for a store that fails if the supervisor has nothing else to do.
        waits: prints what the process waits for.
    """

    how = "fork"

    def __init__(
        self,
        spec: RunSpec,
        store: Store,
        begin: Callable[[Attempt], None],
        cancelled: Callable[[Attempt, str], None],
        look_s: float,
        tolerance: Callable[[], OutageTolerance],
        waits: Waits,
    ) -> None:
        self._spec = spec
        self._store = store
        self._begin = begin
        self._cancelled = cancelled
        self._waiting_read_s = look_s
        self._log = DecisionLog(store, spec.run_id, key=spec.key)
        self._newest: dict[int, int] = {}
        """The newest attempt of each rank of this supervisor."""
        self._ends: dict[int, Outcome] = {}
        """The outcomes of the newest attempts that have ended, by rank."""
        self._n_read = self._n_seen = 0
        self._has_progress = False
        self._keep_at = NEVER
        self._read_log_at = time.monotonic() + READ_LOG_S
        self._tolerance = tolerance
        self._stop_words: str | None = None
        """The reason of a stop that must be added to the log. None: no stop waits."""
        self._outage = Outage(BRIEF, "the log of decisions", waits=waits)
        self._is_closed = self._only_reads_orders = False

    @functools.cached_property
    def _controller(self) -> RestartController:
        return RestartController(
            self._log,
            RestartContext.of(self._spec, self._store),
            starter=self,
            has_wider=self._spec.is_watched,  # the launcher watches the run, and can start a new container
        )

    @property
    def n_read(self) -> int:
        """The number of entries of the log that were read when `advance` last succeeded."""
        return self._n_read

    @property
    def hang(self) -> HangLimits:
        """The limits on hanging that are in force."""
        return hang_of(self._log.entries, self._spec.settings.hang_limits)

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules of attempts that start now, according to the part of the log that was read."""
        return rules_of(self._log.entries, self._spec.settings.rules)

    @property
    def has_policy(self) -> bool:
        """True if a restart policy is in force, according to the part of the log that was read."""
        return policy_of(self._log.entries, self._spec.supervised_restarts) is not None

    @property
    def may_follow(self) -> bool:
        """True if another attempt of a rank may follow an attempt that ends now."""
        return self.has_policy and not self._is_closed and not self._only_reads_orders

    @property
    def next_at(self) -> float:
        """The monotonic time at which `advance` is needed next if no attempt ends before."""
        return NEVER if self._is_closed else min(self._keep_at, self._read_log_at)

    @property
    def is_pending(self) -> bool:
        """True if an attempt waits for its start, or an end waits for a decision."""
        return self._keep_at < NEVER and not self._is_closed and not self._only_reads_orders

    def note_start(self, attempt: Attempt) -> None:
        """Note that this supervisor has started an attempt.

        Args:
            attempt: the attempt.
        """
        self._newest[attempt.rank] = attempt.number
        self._ends.pop(attempt.rank, None)

    def note_claim(self, attempt: Attempt) -> None:
        """Note the attempt that a rank's process has claimed.

        This is a later attempt if another process had claimed the planned one.

        Args:
            attempt: the claimed attempt.
        """
        if attempt.number > self._newest.get(attempt.rank, attempt.number):
            self._newest[attempt.rank] = attempt.number

    def note_end(self, outcome: Outcome) -> None:
        """Note the outcome of an attempt.

        Args:
            outcome: the outcome.
        """
        if outcome.rank in self._newest and outcome.attempt >= self._newest[outcome.rank]:
            self._newest[outcome.rank], self._ends[outcome.rank] = outcome.attempt, outcome
        self._has_progress |= outcome.progress_marks > 0
        if outcome.status is not ReplicaStatus.SUCCEEDED:
            self._keep_at = 0.0

    def read_log_soon(self) -> None:
        """Read the log in the next call of `advance`, because another process has reported a new entry."""
        self._read_log_at = 0.0

    def order_stop(self, words: str) -> None:
        """Stop the run with the next call of `advance`, because a rule was broken.

        Args:
            words: the broken rule and its evidence.
        """
        self._stop_words = self._stop_words or words
        self._keep_at = self._read_log_at = 0.0

    def retry_soon(self) -> None:
        """Start due attempts a moment later, because they cannot start now."""
        self._keep_at = time.monotonic() + PAUSE_S

    def advance(self, *, has_progress: bool, is_busy: bool) -> bool:
        """Read the log if a read is due, decide on ended attempts, and begin attempts that are due.

        A long log is read in several calls, so that the supervisor can look after its ranks in between.

        Args:
            has_progress: True if a rank of this supervisor has reported progress.
            is_busy: True if the supervisor has other work. The wait for a failing store is limited by `tolerance` only
                if there is no other work.

        Returns: True if the whole log was read and acted on.
        """
        now, due_at = time.monotonic(), self._keep_at
        if now < self.next_at or self._is_closed:
            return False
        self._read_log_at, self._keep_at = now + READ_LOG_S, NEVER
        self._has_progress |= has_progress
        try:
            snapshot = None if self._only_reads_orders else self._snapshot()
            if not self._log.read_for(READ_TURN_S):  # a decision needs the whole log, so this call decides nothing
                self._read_log_at, self._keep_at = now, due_at
                self._outage.end()
                return False
            if self._stop_words is not None:  # before the decisions, so that no ended rank is started again
                order_stop_by_rule(self._log, self._stop_words)
                self._stop_words = None
            wait_s = None if snapshot is None else self._controller.advance_as_read(snapshot)
            self._n_read = len(self._log.entries)
            self._outage.end()
        except CorruptObjectError:  # no process can decide with a damaged log, and it stays damaged
            return False
        except StoreError as error:
            if is_busy:  # the wait for the store counts only while the supervisor has no other work
                self._outage.restart()
            self._outage.tolerance = self._tolerance()
            if self._outage.tolerates(error):
                self._keep_at = time.monotonic() + PAUSE_S
            return False
        if wait_s is not None:
            self._keep_at = min(self._keep_at, time.monotonic() + wait_s)
            # A waiting attempt has no process and no cancel marker yet. Only the log can show that it was cancelled.
            self._read_log_at = now + self._waiting_read_s
        return True

    def may_still_start(self, rank: int) -> bool:
        """Return True if a restart of a rank that has ended is planned, or may still be decided on.

        Args:
            rank: the rank.
        """
        end = self._ends.get(rank)
        if end is None or not self.may_follow or self._controller.blocking_order(rank) is not None:
            return False
        entry = decision_on(self._log.entries, rank, end.attempt)
        return self.is_pending and (entry is None or entry.start.get(rank, -1) > end.attempt)

    def stays(self, attempt: Attempt) -> bool:
        """Return True if the log has decided that an attempt runs in the process of the previous attempt.

        Args:
            attempt: the attempt that begins.
        """
        entry = decision_on(self._log.entries, attempt.rank, attempt.number - 1)
        return entry is not None and entry.how == SAME_PROCESS

    def blocks(self) -> dict[int, Decision]:
        """Return the stops and cancels that block ranks of this supervisor, by rank."""
        found = {rank: self._controller.blocking_order(rank) for rank in self._newest}
        return {rank: entry for rank, entry in found.items() if entry is not None}

    def cancel_unstarted(self, rank: int, why: str) -> None:
        """Record the next attempt of a rank as cancelled, if the log has decided to start that attempt and it has not
        begun.

        Args:
            rank: the rank.
            why: the reason, for the outcome.
        """
        entry = next((entry for entry in reversed(self._log.entries) if rank in entry.start), None)
        if entry is None or not self.may_start(rank) or entry.start[rank] <= self._newest[rank]:
            return
        attempt = Attempt(self._store, self._spec.run_id, rank, entry.start[rank])
        with contextlib.suppress(StoreError):
            if attempt.has_begun():
                return  # another process has begun the attempt, and will end it
            attempt.request_cancel(why)
        self._cancelled(attempt, why)

    def close(self, why: str | None = None) -> None:
        """Make no decision and begin no attempt from now on, because this supervisor ends.

        Args:
            why: the reason for which attempts that have not begun are cancelled. None: they are left to other
                controllers.
        """
        if why is not None and not self._is_closed and self._ends:
            with contextlib.suppress(StoreError):
                self._controller.give_up(self._snapshot())
        for rank in list(self._newest) if why is not None else ():
            self.cancel_unstarted(rank, why or "")
        self._is_closed = True

    def stop_deciding(self) -> None:
        """Leave all decisions and starts to other controllers from now on. Orders are read as before."""
        self._only_reads_orders, self._read_log_at = True, 0.0

    # The methods that the controller calls

    def may_start(self, rank: int) -> bool:
        """Return True if this supervisor has the rank, and no later entry starts the rank elsewhere."""
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
        """Remove a rank from this supervisor, because another process has begun its next attempt."""
        self._newest.pop(rank, None)
        self._ends.pop(rank, None)

    def _snapshot(self) -> RunSnapshot:
        """Return a snapshot of the run. This supervisor knows its own ranks, and the store has the others."""
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
