"""The controller: it decides what follows each ended attempt, and starts the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from executors.attempt import Attempt
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import MAX_ATTEMPT, Decision, DecisionLog, blocking_order, decision_on, policy_of
from executors.restarts.rules import LAST_CALL_S, SAME_PROCESS, RunFacts, decide, is_own_failure, too_few_left
from executors.settings.policy import Restarts
from executors.settings.run_spec import RunSpec
from executors.store import Store
from executors.store.inventory import Inventory
from executors.store.staleness import StalenessTracker
from executors.task.record import find_run_record

LEAVE_S = 15.0  # the time that a controller outside the run's machines gives the rank's live supervisor to decide first
CARRY_S = 60.0  # the time that the deciding controller gets to begin a start; then any other controller begins it
# Only a launch begins a new time limit, or a new machine.
NEEDS_LAUNCH = ("start_failed", "lost", "preempted", "timeout")
MOST_FORK_STRIKES = 2  # after this many strikes of a rank, a controller that can start containers takes a new machine
LOOK_AGAIN_S = 1.0


class AttemptStarter(Protocol):
    """The interface of an object that starts attempts for a controller."""

    how: str
    """ "fork", "launch" or "spare:0"."""

    def may_start(self, rank: int) -> bool:
        """Return True if this process can start the rank now: it is the supervisor of the rank, or that supervisor has
        ended.
        """

    def start(self, attempts: Mapping[int, int]) -> None:
        """Start attempts that no other process has begun. The starter "fork" first ends the rank's current process.

        Args:
            attempts: the number of the attempt to start, by rank.
        """


@dataclass(frozen=True)
class RunSnapshot:
    """The newest attempt of each rank of a run, and the outcomes of the attempts that have ended."""

    newest: Mapping[int, int] = field(default_factory=dict)
    """The number of the newest attempt, by rank."""
    ends: Mapping[int, Outcome] = field(default_factory=dict)
    """The outcome of the newest attempt, by rank. Ranks whose newest attempt has not ended are left out."""
    has_progress: bool = False
    """True if any attempt of the run has reported a round, a step or other progress."""

    @classmethod
    def of(cls, store: Store, run_id: str, world_size: int) -> RunSnapshot:
        """Read a snapshot from the run's store: all ranks that were launched, and added ranks that have begun.

        This takes one listing of the store and one read per outcome. Heartbeats are read only until one shows progress.

        Args:
            store: the store of the run.
            run_id: the run.
            world_size: the number of ranks of the launch.

        Raises:
            StoreError: the store does not answer, or holds a record that cannot be parsed.
        """
        found = Inventory.of(store, run_id)
        newest = {rank: found.newest(rank) for rank in found.ranks(world_size)}
        attempts = [Attempt(store, run_id, rank, number) for rank, number in newest.items()]
        outcomes = [each.outcome() for each in attempts if found.has(each.rank, each.number, "outcome")]
        ends = {end.rank: end for end in outcomes if end is not None}
        beating = (each.beat() for each in attempts if found.has(each.rank, each.number, "heartbeat"))
        has_progress = any(end.progress_marks for end in ends.values()) or any(
            beat and beat.reported for beat in beating
        )
        return cls(newest, ends, has_progress)

    def without_added(self, world_size: int) -> RunSnapshot:
        """Return the snapshot without added ranks, which may be on other backends.

        Args:
            world_size: the number of ranks of the launch.
        """
        newest = {rank: number for rank, number in self.newest.items() if rank < world_size}
        ends = {rank: end for rank, end in self.ends.items() if rank < world_size}
        return replace(self, newest=newest, ends=ends)


@dataclass(frozen=True)
class RestartContext:
    """The settings of a launch that its controllers need."""

    policy: Restarts | None
    """The restart policy of the launch. None: nothing restarts unless an entry of kind `policy` in the log asks for it.
    """
    world_size: int
    launched_at: float
    min_replicas: int | None = None
    rank_groups: tuple[frozenset[int], ...] = ()
    """The ranks of each placement of the launch."""

    @classmethod
    def of(cls, spec: RunSpec, store: Store) -> RestartContext:
        """Return the context that a supervisor needs, for its run.

        Args:
            spec: the run.
            store: the store of the run.

        Raises:
            StoreError: the store does not answer.
        """
        record = find_run_record(store, spec.run_id)
        least, rank_groups = (None, ()) if record is None else (record.settings.min_replicas, record.ranks_by_placement)
        return cls(spec.supervised_restarts, spec.world_size, spec.launched_at, least, rank_groups)


class RestartController:
    """Decides what follows each ended attempt of a run, and starts the next attempts.

    Several controllers may work on one run. The log of decisions makes sure that each end is decided on once.

    Args:
        log: the log of decisions of the run.
        context: the settings of the launch.
        starter: starts the next attempts. None: the controller decides nothing and starts nothing.
        has_wider: True if another controller watches the run and can start new containers. Default False.
        spare: returns the starter name of a spare that can take the next attempt, given the log. It returns None if no
            spare is free, which is the default.
        clock: returns Unix time in seconds. Default: the system's clock.
        monotonic: returns the seconds of a monotonic clock. Default: the system's clock.
    """

    def __init__(
        self,
        log: DecisionLog,
        context: RestartContext,
        *,
        starter: AttemptStarter | None = None,
        has_wider: bool = False,
        spare: Callable[[Sequence[Decision]], str | None] = lambda entries: None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.log = log
        self.starter = starter
        self._context = context
        self._policy = context.policy
        self._has_wider = has_wider
        self._spare = spare
        self._clock = clock
        self._monotonic = monotonic
        self._decided: dict[int, int] = {}
        """The last attempt of each rank whose end is known to have a decision."""
        self._known_ends = StalenessTracker(monotonic)
        """Measures for how long this controller has known each end."""
        self._starts: dict[int, Decision] = {}
        """The last entry that starts an attempt of each rank, among the entries that were applied."""
        self._n_applied = 0
        """The number of entries of the log that `_starts`, `_policy` and `_decided` include."""
        self._ready_at: dict[str, float] = {}
        """The time, by the monotonic clock, from which the attempts of an entry may begin. The key is its nonce."""

    @property
    def policy(self) -> Restarts | None:
        """The restart policy in force, as of the last read of the log."""
        self._apply_new_entries()
        return self._policy

    def blocking_order(self, rank: int) -> Decision | None:
        """Return the stop or cancel that blocks a rank, as of the last read of the log.

        None: the rank is not blocked.
        """
        return blocking_order(self.log.entries, rank)

    def advance(self, snapshot: RunSnapshot) -> float | None:
        """Read the log, decide on ended attempts, stop a run that cannot succeed, and start attempts that are due.

        Args:
            snapshot: the newest attempts of the run and their outcomes.

        Returns: the seconds until the next call is needed if no attempt ends before. None: no call is needed.

        Raises:
            StoreError: the store does not answer. The same call may be repeated.
        """
        self.log.read()
        return self.advance_as_read(snapshot)

    def advance_as_read(self, snapshot: RunSnapshot) -> float | None:
        """Do the work of `advance` for a caller that has just read the log."""
        n_read = len(self.log.entries)
        self._apply_new_entries()
        waits = [self._decide_if_due(end, snapshot) for end in snapshot.ends.values()]
        self.stop_if_too_few(snapshot)
        due = self.due(snapshot)
        # A cancel or stop may have been added since the caller read the log. An append above has read it again already.
        if due and len(self.log.entries) == n_read:
            self.log.read()
            due = self.due(snapshot)
        if due and self.starter is not None:
            ready = {rank: to for rank, to in due.items() if self._close_skipped(rank, to, snapshot)}
            waits += [LOOK_AGAIN_S] * (len(due) - len(ready))
            if ready:
                self.starter.start(ready)
        waits += [self._ready_in(entry) for rank, entry in self._pending(snapshot).items() if rank not in due]
        return min((wait for wait in waits if wait is not None), default=None)

    def give_up(self, snapshot: RunSnapshot) -> None:
        """Record the ends after which no restart is allowed, and start nothing. This controller's process is ending.

        Args:
            snapshot: the newest attempts of the run and their outcomes.

        Raises:
            StoreError: the store does not answer.
        """
        for end in snapshot.ends.values():
            if end.status is ReplicaStatus.FAILED:
                self.decide_on(end, snapshot, restarts=False)

    def decide_on(self, end: Outcome, snapshot: RunSnapshot, *, restarts: bool = True) -> Decision | None:
        """Append the decision on an ended attempt to the log.

        Args:
            end: the outcome of the attempt.
            snapshot: the newest attempts of the run and their outcomes.
            restarts: False if this call may not decide to restart the rank. Default True.

        Returns: the entry. None: nothing follows, or the decision is left to another process.
        """
        starter = self.starter
        facts = RunFacts(
            run_id=self.log.run_id,
            world_size=self._context.world_size,
            launched_at=self._context.launched_at,
            newest=snapshot.newest,
            has_progress=snapshot.has_progress,
            rank_groups=self._context.rank_groups,
        )
        others = [other for other in snapshot.ends.values() if other.rank != end.rank]

        def compute(entries: Sequence[Decision]) -> Decision | None:
            policy = self.policy
            if policy is None or starter is None:
                return None
            answer = decide(entries, end, others, policy, facts, self._clock())
            if answer is None or answer.kind != "restart":
                return answer
            if not restarts:
                return None
            # A failed start counts double: the machine itself may have a fault, so a new machine is tried earlier.
            most = MOST_FORK_STRIKES - (answer.reason == "start_failed")
            needs_new_machine = self._has_wider and answer.strikes > most
            if starter.how == "fork" and (policy.how != "fork" or _needs_launch(end) or needs_new_machine):
                return None  # a controller that starts containers decides on this end
            # Spares belong to the launch. Added ranks may be on other backends, where a spare cannot replace them.
            spare = self._spare(entries) if end.rank < self._context.world_size else None
            stays = answer.how == SAME_PROCESS and starter.how == "fork"
            return replace(answer, how=spare or (SAME_PROCESS if stays else starter.how))

        entry = self._append(compute)
        if entry is not None:
            self._decided[end.rank] = end.attempt
            carry_s = CARRY_S if starter is not None and entry.how not in (None, SAME_PROCESS, starter.how) else 0.0
            self._ready_at[entry.nonce] = self._monotonic() + max(self._wait_s(entry), carry_s)
        return entry

    def due(self, snapshot: RunSnapshot) -> dict[int, int]:
        """Return the attempts that this controller may begin now, by rank, as of the last read of the log."""
        pending = self._pending(snapshot)
        return {rank: entry.start[rank] for rank, entry in pending.items() if self._ready_in(entry) == 0.0}

    def stop_if_too_few(self, snapshot: RunSnapshot) -> Decision | None:
        """Append a stop if fewer ranks than `min_replicas` can still succeed. Return the entry, or None."""

        def compute(entries: Sequence[Decision]) -> Decision | None:
            n = max(self._context.world_size, len(snapshot.newest))
            is_so = too_few_left(entries, snapshot.ends.values(), n, self._context.min_replicas)
            return Decision(kind="stop", why="min_replicas") if is_so else None

        return None if self.starter is None or self.policy is None else self._append(compute)

    def _append(self, compute: Callable[[Sequence[Decision]], Decision | None]) -> Decision | None:
        """Add the computed entry to the log.

        The store is only asked if the part of the log that was read leads to an entry.
        """
        return None if compute(self.log.entries) is None else self.log.append(compute)

    def _decide_if_due(self, end: Outcome, snapshot: RunSnapshot) -> float | None:
        """Decide on an ended attempt. If it is too early for that, return the seconds to wait."""
        if end.status is not ReplicaStatus.FAILED or self._decided.get(end.rank, -1) >= end.attempt:
            return None
        if self.starter is None or self.policy is None or not self.starter.may_start(end.rank):
            return None
        if decision_on(self.log.entries, end.rank, end.attempt) is not None:
            self._decided[end.rank] = end.attempt
            return None
        if self.blocking_order(end.rank) is not None:
            return None
        # A mistake in the script ends all ranks within a second. Waiting for the others shows that no restart helps.
        has_others = snapshot.newest.keys() != {end.rank}
        if has_others and is_own_failure(end) and not snapshot.has_progress and not end.progress_marks:
            wait_s = LAST_CALL_S - self._known_ends.note((end.rank, end.attempt))
            if wait_s > 0:
                return wait_s
        self.decide_on(end, snapshot)
        return None

    def _pending(self, snapshot: RunSnapshot) -> dict[int, Decision]:
        """Return the entries whose attempts have not begun, by rank.

        Only ranks that this controller can start are included.
        """
        if self.starter is None:
            return {}
        self._apply_new_entries()
        pending = {}
        for rank, entry in self._starts.items():
            if entry.start[rank] <= snapshot.newest.get(rank, MAX_ATTEMPT) or not self.starter.may_start(rank):
                continue
            is_for_others = self.starter.how == "fork" and leaves_its_supervisor(entry, rank)
            if not is_for_others and not self.blocking_order(rank):
                pending[rank] = entry
        return pending

    def _ready_in(self, entry: Decision) -> float:
        """Return the seconds until the attempts of an entry may begin, by this process's own monotonic clock."""
        assert self.starter is not None
        if entry.nonce not in self._ready_at:
            # Another process added the entry. That process gets CARRY_S to begin the start. The Unix time of the entry
            # counts here, because a controller that makes a single pass has not seen the entry before.
            is_ours = self.starter.how in ("fork", entry.how) and self.starter.how != "launch"
            carry_s = 0.0 if is_ours else min(CARRY_S, max(0.0, entry.at + CARRY_S - self._clock()))
            self._ready_at[entry.nonce] = self._monotonic() + max(self._wait_s(entry), carry_s)
        return max(0.0, self._ready_at[entry.nonce] - self._monotonic())

    def _wait_s(self, entry: Decision) -> float:
        """Return the seconds until `not_before`, at most the policy's longest wait, because clocks may be wrong."""
        longest_s = 0.0 if self.policy is None else self.policy.backoff_s[1]
        return min(max(0.0, entry.not_before - self._clock()), max(longest_s, entry.wait_s))

    def _apply_new_entries(self) -> None:
        """Apply the entries that were read since the last call to the policy and to the planned starts."""
        entries = self.log.entries
        for entry in entries[self._n_applied :]:
            self._starts.update(dict.fromkeys(entry.start, entry))
            self._policy = policy_of([entry], self._policy)
            for rank in entry.start if entry.kind == "resume" else ():
                self._decided.pop(rank, None)
        self._n_applied = len(entries)

    def _close_skipped(self, rank: int, number: int, snapshot: RunSnapshot) -> bool:
        """Record an end for attempts that the log has decided to start and that never began, because attempt numbers
        must have no gaps.

        Returns: False if nothing was recorded, because the attempt before them has left no record yet. The process of
            that attempt may still claim it, or the next attempt if another process has claimed it.
        """
        numbers = range(snapshot.newest[rank], number)
        before, *skipped = [Attempt(self.log.store, self.log.run_id, rank, each) for each in numbers]
        if skipped and rank not in snapshot.ends and not before.has_begun():
            return False
        for attempt in skipped:
            attempt.record(
                attempt.new_outcome(ReplicaStatus.FAILED, "fenced", error=f"Attempt {number} came before it.")
            )
        return True


def _needs_launch(end: Outcome) -> bool:
    """Return True if the next attempt needs a new container, because a new process of the same supervisor would not
    help.

    A process that reported its own failed start was running, so its machine works and a new process may help.
    """
    return end.reason in NEEDS_LAUNCH and not (end.reason == "start_failed" and end.pid is not None)


def leaves_its_supervisor(entry: Decision, rank: int) -> bool:
    """Return True if an entry starts the next attempt of a rank outside the rank's current supervisor.

    Args:
        entry: the entry of the log.
        rank: a rank that the entry starts.
    """
    return entry.kind == "resume" or (entry.how not in ("fork", SAME_PROCESS) and entry.rank == rank)


def spare_starter(number: int) -> str:
    """Return the name of a spare as a starter: `spare:0`.

    Args:
        number: the number of the spare.
    """
    return f"spare:{number}"
