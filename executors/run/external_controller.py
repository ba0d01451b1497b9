"""Decides on restarts in a process that is not on a machine of the run: the launcher or `replicas watch`.

This process also restarts replicas whose supervisors have ended. This file is not in `restarts/`, because it reads a
run through its reader and asks the backends for supervisors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from executors.attempt import SERVICE_REASONS, Attempt
from executors.backend import PendingReplica, SupervisorStatus
from executors.errors import BackendError, StoreError
from executors.protocol import Outcome, ReplicaStatus
from executors.registry.placements import known_supervisors
from executors.restarts.controller import LEAVE_S, RestartContext, RestartController, RunSnapshot, spare_starter
from executors.restarts.decision_log import Decision, DecisionLog, decision_on, is_blocked
from executors.restarts.orders import order_cancel, stop_reason
from executors.restarts.rules import SAME_PROCESS, is_own_failure
from executors.run.launch_starter import LaunchStarter
from executors.settings.policy import ONLY_PREEMPTED, Restarts
from executors.status import ReplicaState
from executors.store.staleness import StalenessTracker
from executors.view.run_state_reader import RunStateReader


class ExternalController:
    """Decides what follows each ended attempt of a run.

    The caller reads the run's state, and then calls `advance` for one pass.

    Args:
        log: the log of decisions of the run.
        reader: reads the states of the replicas.
        starter: starts the attempts that follow.
        may_start: returns True if this process may restart a given rank on the rank's backend.
        end: ends all running replicas. Its argument is the reason.
    """

    def __init__(
        self,
        log: DecisionLog,
        reader: RunStateReader,
        starter: LaunchStarter,
        end: Callable[[str], None],
        may_start: Callable[[int], bool],
    ) -> None:
        self.log = starter.log = log
        self.starter = starter
        self._record = record = reader.records.record
        self._reader = reader
        self._records = reader.records
        self._end = end
        self._may_start = may_start
        policy, groups = Restarts.of(record.settings.restarts), record.ranks_by_placement
        context = RestartContext(policy, record.world_size, record.created_at, record.settings.min_replicas, groups)
        self._controller = RestartController(log, context, starter=starter, spare=self._spare)
        self._gone: dict[tuple[int, int], SupervisorStatus] = {}
        self._known_ends = StalenessTracker()
        """Measures how long this process has known each end, by rank and attempt."""
        self._problem = ""
        self._known_stops = StalenessTracker()
        """Measures how long this process has known each stop, by the nonce of the stop."""
        self._ended_by: set[str] = set()

    @property
    def policy(self) -> Restarts | None:
        """The restart policy, as of the last read of the log."""
        return self._controller.policy

    def advance(self, states: Sequence[ReplicaState]) -> float | None:
        """Make the decisions that are due now.

        Return the seconds until the next call is due, or None if none is due. The same error is reported once.

        Args:
            states: the states of all replicas, from the reader's last look.
        """
        try:
            wait_s = self._pass(states)
        except (StoreError, BackendError) as error:
            if str(error) != self._problem:
                self._problem = str(error)
                self.starter.say(f"the decision after an end cannot be made now, trying again: {error}")
            return 1.0
        self._problem = ""
        return wait_s

    def _pass(self, states: Sequence[ReplicaState]) -> float | None:
        reader, log = self._reader, self.log
        reader.share_log(log)
        if self._record.settings.restarts is None and not log.entries:
            return None  # reading the log, which may have a new policy, costs a request each time
        ends = {rank: end for rank in self._records.ranks if (end := self._records.outcome(rank)) is not None}
        if (
            self._record.settings.restarts == ONLY_PREEMPTED
            and not log.entries
            and not any(map(_may_be_preempted, ends.values()))
        ):
            return None  # no end needs a decision yet, and reading the log costs a request
        log.read()
        if self.policy is None:
            return None
        ends = {rank: end for rank in self._records.ranks if (end := self._records.outcome(rank)) is not None}
        newest = {rank: self._records.attempt(rank).number for rank in self._records.ranks}
        failed = [
            end for end in ends.values() if end.status is ReplicaStatus.FAILED and newest[end.rank] == end.attempt
        ]
        supervisors = self._supervisors(failed)
        ours = [end for end in failed if self._may_start(end.rank)]
        left = {end.rank: self._left_s(end, supervisors[end.rank]) for end in ours}
        self.starter.free = {end.rank: end.attempt for end in ours if left[end.rank] <= 0.0}
        for end in failed:
            ends[end.rank] = self._as_its_service_says(end, supervisors[end.rank])
        wait_s = self._controller.advance(RunSnapshot(newest, ends, self._has_progress(failed, states)))
        self._finish_stop(newest.keys() - ends.keys())
        waits = [math.inf if wait_s is None else wait_s, *(left_s for left_s in left.values() if left_s > 0.0)]
        return min(waits) if min(waits) < math.inf else None

    def _supervisors(self, failed: Sequence[Outcome]) -> Mapping[int, SupervisorStatus]:
        """Return the states of the supervisors of failed ranks.

        After a supervisor has ended, its backend is not asked again.
        """
        asked = [end for end in failed if (end.rank, end.attempt) not in self._gone]
        handles = dict(zip((end.rank for end in asked), self._records.map(self._handle_of, asked), strict=True))
        found = {rank: handle for rank, handle in handles.items() if isinstance(handle, SupervisorStatus)}
        ours = [end for end in asked if handles[end.rank] is not None and end.rank not in found]
        replicas = [PendingReplica(handles[end.rank], end.attempt) for end in ours]
        told = known_supervisors(self.starter.backend, replicas) if ours else []
        found.update({end.rank: supervisor for end, supervisor in zip(ours, told, strict=True)})
        for end in asked:
            supervisor = found.setdefault(end.rank, SupervisorStatus(is_alive=False))
            if not supervisor.is_alive:
                self._gone[end.rank, end.attempt] = supervisor
        return {end.rank: self._gone.get((end.rank, end.attempt)) or found[end.rank] for end in failed}

    def _handle_of(self, end: Outcome) -> Any:
        """Return the handle of a rank.

        None: there is none. SupervisorStatus(is_alive=True): the backend cannot answer now.
        """
        try:
            return self._reader.handles.of(end.rank, insists=True)
        except BackendError:
            return SupervisorStatus(is_alive=True)

    def _left_s(self, end: Outcome, supervisor: SupervisorStatus) -> float:
        """Return the seconds that this process still waits, so that a supervisor or worker of the run can decide
        first.

        The time counts from the moment at which this process saw the end. `finished_at` is not used, because the clock
        of its host may differ.
        """
        if not supervisor.is_alive:
            return 0.0
        answer = decision_on(self.log.entries, end.rank, end.attempt)
        if answer is not None:
            return math.inf if answer.how in (None, "fork", SAME_PROCESS) else 0.0
        if is_blocked(self.log.entries, end.rank):
            return math.inf
        return max(0.0, LEAVE_S - self._known_ends.note((end.rank, end.attempt)))

    def _spare(self, entries: Sequence[Decision]) -> str | None:
        """Return the name of a live spare that no decision has used yet, as the starter of an attempt.

        None: there is none.
        """
        used, log = {entry.how for entry in entries}, self.log
        for number in range(self._record.settings.spares):
            spare, how = Attempt(log.store, log.run_id, number, is_spare=True), spare_starter(number)
            if how in used or not spare.has_started() or spare.has_outcome():
                continue
            handle = spare.handle(self._record.backend)
            backend = self._records.placements.at(0).backend  # spares are on the backend of the launch
            if handle is not None and backend.supervisors([PendingReplica(handle, 0)])[0].is_alive:
                return how
        return None

    def _as_its_service_says(self, end: Outcome, supervisor: SupervisorStatus) -> Outcome:
        """Return an outcome with the reason that the service reports. The container itself receives only a signal."""
        if not end.notice or supervisor.is_alive or supervisor.reason is None:
            return end
        if supervisor.reason == "cancelled" and not is_blocked(self.log.entries, end.rank):
            order_cancel(self.log, [end.rank], f"cancelled at the backend {self._records.backend(end.rank)!r}")
        if supervisor.reason not in SERVICE_REASONS:
            return end
        self._records.attempt(end.rank).at(end.attempt).record_service_reason(supervisor.reason, supervisor.error)
        return replace(end, reason=supervisor.reason)

    def _has_progress(self, failed: Sequence[Outcome], states: Sequence[ReplicaState]) -> bool:
        """Return True if any replica has reported progress. Only failures of the replica itself need this answer."""
        unanswered = [end for end in failed if decision_on(self.log.entries, end.rank, end.attempt) is None]
        if not any(is_own_failure(end) for end in unanswered):
            return True
        return any(end.progress_marks for end in failed) or any(
            state.reported for state in self._reader.with_reports(states)
        )

    def _finish_stop(self, running: set[int]) -> None:
        """End the replicas that still run after a stop order."""
        stop = next(
            (each for each in map(self._controller.blocking_order, running) if each and each.kind == "stop"), None
        )
        if stop is not None and stop.nonce not in self._ended_by and self._is_over(stop):
            self._end(stop_reason(stop))
            self._ended_by.add(stop.nonce)

    def _is_over(self, stop: Decision) -> bool:
        """Return True if supervisors have had the time that a stop order gives them to end running replicas.

        The time counts from the moment at which this process saw the stop. `at` is not used, because the clock of its
        host may differ. With a single pass, no time can pass: the supervisors and the user who ordered the stop do the
        rest.
        """
        if stop.within_s is None:
            return True
        return self._known_stops.note(stop.nonce) > (stop.within_s or 0.0) + LEAVE_S


def _may_be_preempted(end: Outcome) -> bool:
    """Return True if a service took back the machine of an attempt, or may have done so."""
    return end.status is ReplicaStatus.FAILED and (end.reason in ("preempted", "lost") or end.was_told_to_end)
