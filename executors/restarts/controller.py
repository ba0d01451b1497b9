"""The controller: it decides what follows each ended attempt, and starts the next one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from executors.attempt import Attempt
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.decision_log import MAX_ATTEMPT, Decision, DecisionLog, blocking_order, decision_on, policy_of
from executors.restarts.rules import LAST_CALL_S, RunFacts, decide, is_own_failure, too_few_left
from executors.settings.policy import Restarts
from executors.settings.run_spec import RunSpec
from executors.store import Store
from executors.store.inventory import Inventory
from executors.store.staleness import StalenessTracker
from executors.task.record import find_run_record

LEAVE_S = 15.0  # how long an end is left to a supervisor that lives
CARRY_S = 60.0  # what another controller decided, and has not begun for this long, is carried out
NEEDS_LAUNCH = ("start_failed", "lost", "preempted", "timeout")  # a time limit begins anew with a launch alone
MOST_FORK_STRIKES = 2  # of a rank; then a controller that can start containers leaves the machine
LOOK_AGAIN_S = 1.0


class AttemptStarter(Protocol):
    """Starts attempts for a controller."""

    how: str
    """ "fork", "launch" or "spare:0"."""

    def may_start(self, rank: int) -> bool:
        """Return whether this process can start that rank now: it is its supervisor, or its supervisor is gone."""

    def start(self, attempts: Mapping[int, int]) -> None:
        """Start attempts, by rank, but those that somebody else has begun; a fork ends the rank's process before."""


@dataclass(frozen=True)
class RunSnapshot:
    """The newest attempts of a run's ranks, and how those ended that have."""

    newest: Mapping[int, int] = field(default_factory=dict)
    ends: Mapping[int, Outcome] = field(default_factory=dict)
    """By rank; of newest attempts alone."""
    has_progress: bool = False
    """Whether any attempt of the run has reported anything."""

    @classmethod
    def of(cls, store: Store, run_id: str, world_size: int) -> RunSnapshot:
        """Look at a run's records: one list, and what it has of ends and, until one shows progress, of heartbeats.

        Of all ranks that were launched, or added and begun.

        Raises:
            StoreError: the store does not answer, or a record is none.
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
        """Return it without ranks that were added: these may be on other backends."""
        newest = {rank: number for rank, number in self.newest.items() if rank < world_size}
        ends = {rank: end for rank, end in self.ends.items() if rank < world_size}
        return replace(self, newest=newest, ends=ends)


@dataclass(frozen=True)
class RestartContext:
    """What a launch asked of the controllers of its run."""

    policy: Restarts | None
    """None: nothing is answered unless a `policy` in the log says so."""
    world_size: int
    launched_at: float
    min_replicas: int | None = None
    rank_groups: tuple[frozenset[int], ...] = ()
    """The ranks of each placement of the launch."""

    @classmethod
    def of(cls, spec: RunSpec, store: Store) -> RestartContext:
        """Return the context of the run that a worker is part of.

        Raises:
            StoreError: the store does not answer.
        """
        record = find_run_record(store, spec.run_id)
        least, rank_groups = (None, ()) if record is None else (record.settings.min_replicas, record.ranks_by_placement)
        return cls(spec.supervised_restarts, spec.world_size, spec.launched_at, least, rank_groups)


class RestartController:
    """Decides what follows the ends of a run, and starts it.

    Args:
        log: the log of decisions of the run.
        context: what the launch asked for.
        starter: starts the attempts that follow. None: the controller only looks.
        has_wider: True if another controller, which can start a container again, watches the run.
        spare: returns the starter name of a spare that can begin what follows an end, given the log. None: there is
            none.
        clock: returns Unix time in seconds.
        monotonic: returns seconds of a monotonic clock.
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
        self._answered: dict[int, int] = {}
        """The last attempt of each rank whose end is known to be answered."""
        self._known_ends = StalenessTracker(monotonic)
        """For how long this controller has known of each end."""
        self._starts: dict[int, Decision] = {}
        """The last entry that starts an attempt of each rank, of those folded in."""
        self._n_folded = 0
        self._ready_at: dict[str, float] = {}
        """When what an entry starts may be begun, by its nonce."""

    @property
    def policy(self) -> Restarts | None:
        """Return the policy that counts now, as far as the log was read."""
        self._fold()
        return self._policy

    def blocking_order(self, rank: int) -> Decision | None:
        """Return the stop or cancel that stands against a rank, as far as the log was read."""
        return blocking_order(self.log.entries, rank)

    def advance(self, snapshot: RunSnapshot) -> float | None:
        """Answer what has ended, stop a run that cannot succeed, and start what is due.

        Returns: in how many seconds there is something to do again, if nothing ends until then. None: nothing.

        Raises:
            StoreError: the store does not answer; call it again.
        """
        self.log.read()
        return self.advance_as_read(snapshot)

    def advance_as_read(self, snapshot: RunSnapshot) -> float | None:
        """Do the same by the log as it was read just now."""
        n_read = len(self.log.entries)
        self._fold()
        waits = [self._answer(end, snapshot) for end in snapshot.ends.values()]
        self.stop_if_too_few(snapshot)
        due = self.due(snapshot)
        if due and len(self.log.entries) == n_read:  # else it was read just now
            self.log.read()
            due = self.due(snapshot)
        if due and self.starter is not None:
            ready = {rank: to for rank, to in due.items() if self._close_holes(rank, to, snapshot)}
            waits += [LOOK_AGAIN_S] * (len(due) - len(ready))
            if ready:
                self.starter.start(ready)
        waits += [self._ready_in(entry) for rank, entry in self._pending(snapshot).items() if rank not in due]
        return min((wait for wait in waits if wait is not None), default=None)

    def give_up(self, snapshot: RunSnapshot) -> None:
        """Add which ends nothing is to follow, and start nothing: this controller ends.

        Raises:
            StoreError: the store does not answer.
        """
        for end in snapshot.ends.values():
            if end.status is ReplicaStatus.FAILED:
                self.decide_on(end, snapshot, restarts=False)

    def decide_on(self, end: Outcome, snapshot: RunSnapshot, *, restarts: bool = True) -> Decision | None:
        """Add what answers an end to the log; return None where nothing does, or something has.

        Args:
            restarts: whether that may be a restart.
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
            most = MOST_FORK_STRIKES - (answer.reason == "start_failed")  # twice unwell: another machine
            is_to_leave = self._has_wider and answer.strikes > most
            if starter.how == "fork" and (policy.how != "fork" or _needs_launch(end) or is_to_leave):
                return None
            spare = self._spare(entries) if end.rank < self._context.world_size else None  # others may be elsewhere
            return replace(answer, how=spare or starter.how)

        entry = self._append(compute)
        if entry is not None:
            self._answered[end.rank] = end.attempt
            carry_s = CARRY_S if starter is not None and entry.how not in (None, starter.how) else 0.0
            self._ready_at[entry.nonce] = self._monotonic() + max(self._wait_s(entry), carry_s)
        return entry

    def due(self, snapshot: RunSnapshot) -> dict[int, int]:
        """Return which attempts this controller may begin now, by rank, as far as the log was read."""
        pending = self._pending(snapshot)
        return {rank: entry.start[rank] for rank, entry in pending.items() if self._ready_in(entry) == 0.0}

    def stop_if_too_few(self, snapshot: RunSnapshot) -> Decision | None:
        """Stop the run when fewer ranks than `min_replicas` can still succeed."""

        def compute(entries: Sequence[Decision]) -> Decision | None:
            n = max(self._context.world_size, len(snapshot.newest))
            is_so = too_few_left(entries, snapshot.ends.values(), n, self._context.min_replicas)
            return Decision(kind="stop", why="min_replicas") if is_so else None

        return None if self.starter is None or self.policy is None else self._append(compute)

    def _append(self, compute: Callable[[Sequence[Decision]], Decision | None]) -> Decision | None:
        """Add what follows from the log, if anything follows from what was read of it already."""
        return None if compute(self.log.entries) is None else self.log.append(compute)

    def _answer(self, end: Outcome, snapshot: RunSnapshot) -> float | None:
        """Answer an end, unless it is too early: then return how long to wait."""
        if end.status is not ReplicaStatus.FAILED or self._answered.get(end.rank, -1) >= end.attempt:
            return None
        if self.starter is None or self.policy is None or not self.starter.may_start(end.rank):
            return None
        if decision_on(self.log.entries, end.rank, end.attempt) is not None:
            self._answered[end.rank] = end.attempt
            return None
        if self.blocking_order(end.rank) is not None:
            return None
        if is_own_failure(end) and not snapshot.has_progress and not end.progress_marks:
            wait_s = LAST_CALL_S - self._known_ends.note((end.rank, end.attempt))
            if wait_s > 0:
                return wait_s
        self.decide_on(end, snapshot)
        return None

    def _pending(self, snapshot: RunSnapshot) -> dict[int, Decision]:
        """Return what the log starts and nobody has begun, of the ranks that this controller can start."""
        if self.starter is None:
            return {}
        self._fold()
        pending = {}
        for rank, entry in self._starts.items():
            if entry.start[rank] <= snapshot.newest.get(rank, MAX_ATTEMPT) or not self.starter.may_start(rank):
                continue
            is_anothers = self.starter.how == "fork" and leaves_its_supervisor(entry, rank)
            if not is_anothers and not self.blocking_order(rank):
                pending[rank] = entry
        return pending

    def _ready_in(self, entry: Decision) -> float:
        """Return how long an entry's attempts are still to wait, by this process's own clock since it saw the entry."""
        assert self.starter is not None
        if entry.nonce not in self._ready_at:
            # It is somebody else's. By the clock: a controller that makes a single pass has not seen it before.
            is_ours = self.starter.how in ("fork", entry.how) and self.starter.how != "launch"
            carry_s = 0.0 if is_ours else min(CARRY_S, max(0.0, entry.at + CARRY_S - self._clock()))
            self._ready_at[entry.nonce] = self._monotonic() + max(self._wait_s(entry), carry_s)
        return max(0.0, self._ready_at[entry.nonce] - self._monotonic())

    def _wait_s(self, entry: Decision) -> float:
        """Return how long an entry wants to be waited for: no longer than its policy's longest, whatever clocks do."""
        longest_s = 0.0 if self.policy is None else self.policy.backoff_s[1]
        return min(max(0.0, entry.not_before - self._clock()), max(longest_s, entry.wait_s))

    def _fold(self) -> None:
        """Take note of what was added to the log."""
        entries = self.log.entries
        for entry in entries[self._n_folded :]:
            self._starts.update(dict.fromkeys(entry.start, entry))
            self._policy = policy_of([entry], self._policy)
            for rank in entry.start if entry.kind == "resume" else ():
                self._answered.pop(rank, None)
        self._n_folded = len(entries)

    def _close_holes(self, rank: int, number: int, snapshot: RunSnapshot) -> bool:
        """Close attempts that were decided and never begun, since attempts are dense.

        Returns: False, and nothing was closed, while the attempt before them has left no record: its process may yet
            claim it, or where somebody else has, one of these.
        """
        numbers = range(snapshot.newest[rank], number)
        before, *skipped = [Attempt(self.log.store, self.log.run_id, rank, each) for each in numbers]
        if skipped and rank not in snapshot.ends and not before.has_begun():
            return False
        for attempt in skipped:
            attempt.record(attempt.ended(ReplicaStatus.FAILED, "fenced", error=f"Attempt {number} came before it."))
        return True


def _needs_launch(end: Outcome) -> bool:
    """Return whether a new process of the same supervisor would not do: one that says itself why it fails was there."""
    return end.reason in NEEDS_LAUNCH and not (end.reason == "start_failed" and end.pid is not None)


def leaves_its_supervisor(entry: Decision, rank: int) -> bool:
    """Return whether the attempt of a rank that an entry starts is begun by another process than its supervisor."""
    return entry.kind == "resume" or (entry.how != "fork" and entry.rank == rank)


def spare_starter(number: int) -> str:
    """Return the name of a spare as a starter: `spare:0`.

    Args:
        number: the number of the spare.
    """
    return f"spare:{number}"
