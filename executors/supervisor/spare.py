"""A spare: a container that waits, and takes over a rank whose container was lost.

It has the code and the packages, has imported torch, and reads the decision log. It begins the attempts that the log
assigns to it. If no process watches the run, the spare itself finds lost ranks and decides to restart them.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from executors.attempt import Attempt, parse_handle
from executors.errors import StoreError
from executors.patience import BRIEF, GLANCE
from executors.protocol import Outcome, ReplicaHandle, ReplicaStatus
from executors.restarts.controller import (
    CARRY_S,
    LEAVE_S,
    RestartContext,
    RestartController,
    RunSnapshot,
    spare_starter,
)
from executors.restarts.decision_log import DecisionLog, blocking_order, decision_on
from executors.restarts.lease import LeaseWatch
from executors.settings.run_spec import RunSpec
from executors.store import Store
from executors.store.record_names import HANDLE, HEARTBEAT, run_was_deleted
from executors.store.records import to_bytes
from executors.store.run_key import hold_key
from executors.store.staleness import StalenessTracker
from executors.store.url import impatient_store
from executors.supervisor.container import NOTICES, preload
from executors.supervisor.processes import read_task_ahead
from executors.worker.claim import claim_alone

FOLLOW_S = 2.0
LOOK_S = 10.0
LOST_AFTER_S = 60.0


class Spare:
    """Waits until a rank needs it, or the run has ended. It is the starter of its own controller.

    Args:
        spec: the run. Its only rank is the number of the spare.
        lost_after_s: the seconds without a new heartbeat, by this process's clock, after which a rank is lost. None: a
            minute.
        store: the store of the run. Default: the store that the spec names.
        clock: returns the seconds of a monotonic clock. Default: the system's clock.
    """

    def __init__(
        self,
        spec: RunSpec,
        lost_after_s: float | None = None,
        store: Store | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._store = store or impatient_store(spec.store_url, GLANCE.limit_s)
        self._lost_after_s = lost_after_s or LOST_AFTER_S
        self._look_s = min(LOOK_S, self._lost_after_s / 3)
        self._clock = clock
        hold_key(self._store.url, spec.run_id, spec.key)
        self._me = Attempt(self._store, spec.run_id, spec.ranks[0], is_spare=True)
        self.how = spare_starter(self._me.rank)
        self.taken: Attempt | None = None
        """The attempt that this container has taken over."""
        self._log = DecisionLog(self._store, spec.run_id, key=spec.key)
        self._lease = (
            None
            if spec.lease_s is None
            else LeaseWatch(self._store, spec.run_id, spec.lease_s, clock, name=spec.lease_name)
        )
        self._controller: RestartController | None = None
        self._handle: ReplicaHandle | None = None
        self._rank: int | None = None
        """The rank that this spare may start now."""
        self._asked: Attempt | None = None
        """The attempt that this spare is taking over. After a failed request, the spare may or may not have it."""
        self._look_at = 0.0
        # During an outage the ranks cannot send heartbeats either, so the time of an outage counts as one interval.
        self._beats = StalenessTracker(clock, longest_gap_s=self._look_s + FOLLOW_S)
        """The time since the last change of each rank's heartbeat."""
        self._lost: set[tuple[int, int]] = set()
        """The ranks and attempts that this spare has recorded as lost."""
        self._free_at: dict[tuple[int, int, str], float] = {}
        """The time from which the spare may act on an end, by rank, attempt and the nonce of the decision on it."""

    def stand_by(self) -> Attempt | None:
        """Wait until a rank needs this container, and take over the rank.

        Returns: the attempt, whose handle now names this container. None: the run no longer needs a spare. The outcome
            of the spare is recorded in both cases.
        """
        for number in NOTICES:
            signal.signal(number, lambda *_: sys.exit())
        try:
            if (task := read_task_ahead(self._spec)) is not None:
                preload(task)
            if not claim_alone(self._me):
                print(f"replicas: another process is spare {self._me.rank}", flush=True)
                return None
            why = self._follow()
        except SystemExit:
            why = "its container got the signal to end"
        if self.taken is not None:
            became = f"rank {self.taken.rank}, attempt {self.taken.number}"
            outcome = self._me.new_outcome(ReplicaStatus.SUCCEEDED, result=became)
            print(f"replicas: spare {self._me.rank} becomes {became}", flush=True)
        else:
            outcome = self._me.new_outcome(ReplicaStatus.CANCELLED, "cancelled", error=f"The spare ended: {why}.")
            print(f"replicas: spare {self._me.rank} ends: {why}", flush=True)
        try:
            if not run_was_deleted(self._store, self._spec.run_id):
                self._me.record(outcome, tolerance=BRIEF)
        except StoreError as error:
            print(f"replicas: the spare leaves no outcome: {error}", file=sys.stderr, flush=True)
        return self.taken

    def _follow(self) -> str:
        """Watch the run until this spare has taken over a rank. Otherwise return the reason why the spare ends."""
        while True:
            try:
                if why := self.look():
                    return why
            except StoreError as error:
                print(f"replicas: trying again: {error}", file=sys.stderr, flush=True)
            if self.taken is not None:
                return ""
            time.sleep(FOLLOW_S)

    def look(self) -> str | None:
        """Read the state of the run once, and take over a rank if one needs this container.

        Returns: the reason why the spare must end. None: the spare continues to wait, or has taken over a rank.

        Raises:
            StoreError: the store does not answer. The same call may be repeated.
        """
        if self._asked is not None:
            self._take(self._asked)
            return None
        if (
            self._lease is not None and self._lease.has_expired()
        ):  # checked first, because all later requests fail at a store that refuses this process
            return self._lease.why
        n_known, entries, now = len(self._log.entries), self._log.read(), self._clock()
        if len(entries) == n_known and self._rank is None and now < self._look_at:
            return None
        self._look_at = now + self._look_s
        if run_was_deleted(self._store, self._spec.run_id):
            return "the run was deleted"
        self._store.put(self._me.key(HEARTBEAT), to_bytes({"at": time.time()}))
        snapshot = RunSnapshot.of(self._store, self._spec.run_id, self._spec.world_size).without_added(
            self._spec.world_size
        )
        if all(self._is_over(rank, snapshot.ends.get(rank)) for rank in snapshot.newest):
            return "the run has ended"
        self._handle = self._handle or self._me.find(HANDLE, parse_handle)
        if self._handle is None:  # its launcher will write the handle soon
            return None
        if not self._is_watched:
            snapshot = replace(snapshot, ends={**snapshot.ends, **self._find_lost(snapshot)})
        self._rank = self._choose(snapshot, now)
        if self._rank is not None:
            self._controller_of_run().advance(snapshot)
        return None

    # The methods that its controller calls

    def may_start(self, rank: int) -> bool:
        """Return True if this spare has chosen the rank."""
        return rank == self._rank and self._asked is None

    def start(self, attempts: Mapping[int, int]) -> None:
        """Take over the attempt, unless another process has begun it."""
        ((rank, number),) = attempts.items()
        attempt = Attempt(self._store, self._spec.run_id, rank, number)
        if not attempt.has_intent():
            self._asked = attempt
            self._take(attempt)

    def _take(self, attempt: Attempt) -> None:
        assert self._handle is not None
        place = attempt.bare_handle(self._handle.backend_name).metadata
        mine = replace(self._handle, rank=attempt.rank, metadata={**self._handle.metadata, **place})
        attempt.create(HANDLE, mine.to_json().encode())
        found = attempt.find(HANDLE, parse_handle)  # the reply may have been lost, or another process was first
        if found == mine:
            self.taken = attempt
        self._asked = None

    # Judging

    @property
    def _is_watched(self) -> bool:
        """True if a process outside the run's machines watches the run and decides on restarts."""
        return self._lease is not None and self._lease.is_held

    def _controller_of_run(self) -> RestartController:
        if self._controller is None:
            self._controller = RestartController(
                self._log, RestartContext.of(self._spec, self._store), starter=self, monotonic=self._clock
            )
        return self._controller

    def _is_over(self, rank: int, end: Outcome | None) -> bool:
        """Return True if no further attempt of a rank will start."""
        if blocking_order(self._log.entries, rank) is not None:
            return True
        if end is None or end.status is not ReplicaStatus.FAILED:
            return end is not None
        answer = decision_on(self._log.entries, rank, end.attempt)
        return answer is not None and not answer.start

    def _find_lost(self, snapshot: RunSnapshot) -> dict[int, Outcome]:
        """Record ranks as lost whose heartbeats have not changed for too long. Return their outcomes by rank."""
        lost: dict[int, Outcome] = {}
        for rank in snapshot.newest.keys() - snapshot.ends.keys():
            attempt = Attempt(self._store, self._spec.run_id, rank, snapshot.newest[rank])
            beat = attempt.beat()
            if beat is None:
                self._beats.forget(rank)
            elif self._beats.note(rank, (attempt.number, beat)) >= self._lost_after_s:
                lost[rank] = attempt.record_lost(f"its heartbeat has not changed for {self._lost_after_s:g} s")
                self._lost.add((rank, attempt.number))
        return lost

    def _choose(self, snapshot: RunSnapshot, now: float) -> int | None:
        """Return the rank to take over: a rank that the log assigns to this spare, otherwise a rank that no process
        restarts.
        """
        awaited = [end for end in snapshot.ends.values() if not self._is_over(end.rank, end)]
        free = [end.rank for end in awaited if self._is_free(end, now)]
        named = [entry.rank for entry in self._log.entries if entry.how == self.how]
        return min(free, key=lambda rank: rank not in named, default=None)

    def _is_free(self, end: Outcome, now: float) -> bool:
        """Return True if this spare may act on an end, because no other process decides on it or starts the next
        attempt.
        """
        answer = decision_on(self._log.entries, end.rank, end.attempt)
        if answer is not None and answer.how == self.how:
            return True
        if self._is_watched:
            return False
        if answer is None and (end.rank, end.attempt) in self._lost:
            return True
        left_s = LEAVE_S if answer is None else answer.left_s(time.time()) + CARRY_S
        return now >= self._free_at.setdefault((end.rank, end.attempt, answer.nonce if answer else ""), now + left_s)
