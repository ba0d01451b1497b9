"""Reads the states of the replicas of a run.

Each look needs one list request to the store and one question to the backend.

`replica_records.py` keeps the records, `replica_handles.py` finds the handles, `backend_reports.py` asks the backend,
and `supervisor_states.py` asks whether a supervisor is alive. ADR 0019 gives the reasons.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from executors.attempt.pauses import pauses
from executors.errors import BackendError
from executors.process import has_ended
from executors.protocol import Outcome, ReplicaStatus
from executors.registry.run_index import reference
from executors.registry.run_placements import RunPlacements
from executors.restarts.decision_log import Decision, DecisionLog
from executors.restarts.restart_view import RestartView
from executors.status import INSTALLING, ReplicaState, RunStatus, name_ranks
from executors.store import Store
from executors.store.run_key import lacks_key
from executors.task.record import RunRecord
from executors.view.backend_reports import BackendReports
from executors.view.forged_records import ForgedRecords
from executors.view.heartbeats import Heartbeats
from executors.view.installations import Installations
from executors.view.replica_handles import ReplicaHandles
from executors.view.replica_records import ReplicaRecords
from executors.view.rule_findings import RuleFindings
from executors.view.service_reasons import ServiceReasons
from executors.view.supervisor_states import SupervisorStates

FAR_PAUSES_S = (0.25, 4.0)  # without pauses, watching 64 replicas for an hour takes 60,000 requests
ADDING_S = 60.0  # the longest time from the record of added ranks to the first record of their attempts


class RunStateReader:
    """Reads the states of a run's replicas, and remembers everything that it has read.

    An ended replica stays ended until a newer attempt is found.

    Args:
        store: the store of the run.
        run_id: the id of the run.
        record: the record of the run.
        placements: the backends of the ranks.
        handles: the handles of the launch, in rank order. None: they are read from the store.

    Example:
        reader = view_of(attach("first-try")).reader
        print([state.status for state in reader.look()])
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        record: RunRecord,
        placements: RunPlacements,
        handles: Sequence[Any] | None = None,
    ) -> None:
        self.records = ReplicaRecords(store, run_id, record, placements)
        self.handles = ReplicaHandles(self.records, handles)
        self.reports = BackendReports(self.records, self.handles)
        self.supervisors = SupervisorStates(self.records, self.handles)
        self.reasons = ServiceReasons()
        self._forged = ForgedRecords(self.records)
        self._rules = RuleFindings(self.records)
        self._heartbeats = Heartbeats()
        self._installations = Installations()
        self._restarts = RestartView(
            store, run_id, record, self.supervisors.is_alive, self.supervisors.ended_with_launcher, reference
        )
        self._permanent: set[int] = set()

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait between two looks. They are longer for a remote store, to save requests."""
        return pauses() if self.records.is_near else pauses(*FAR_PAUSES_S)

    def look(self, ranks: Sequence[int] | None = None) -> list[ReplicaState]:
        """Return the states of replicas, without the numbers that they report.

        A replica that waits for a restart is pending.

        Each call makes one list request, reads new outcomes and handles, and asks the backend once about all replicas
        without an outcome. If a replica has failed, it also reads the new entries of the decision log.

        Args:
            ranks: the ranks. None: all ranks.
        """
        self.records.forget_unrecorded()
        seen = [replace(state, backend=self.records.backend(state.rank)) for state in self._look(ranks)]
        states = self._restarts.with_restarts(seen, self.records.ends)
        permanent = {state.rank for state in states if state.restart.is_permanent}
        self._permanent = permanent | self._permanent - {state.rank for state in states}
        return [self._never_started(state) for state in states] if self._has_no_launcher() else states

    def _has_no_launcher(self) -> bool:
        """Return True if the launching process is known to have died before it started any replica."""
        launcher = self.records.record.launcher
        if self.records.inventory.records or launcher is None or not has_ended(launcher):
            return False
        # On other backends, a replica may run before it has a record.
        with contextlib.suppress(BackendError):
            return self.records.placements.knows_attempts
        return False

    def _never_started(self, state: ReplicaState) -> ReplicaState:
        """Return a pending replica as failed, because its launcher died. No outcome is written to the store."""
        if state.status is not ReplicaStatus.PENDING:
            return state
        who = f"the process {self.records.record.launcher_pid} of {self.records.record.created_by}"
        error = f"Replica {state.rank} was never started: {who}, which launched the run, has ended."
        outcome = self.records.attempt(state.rank).new_outcome(
            ReplicaStatus.FAILED, "start_failed", error=error, finished_at=self.records.record.created_at
        )
        return replace(state, status=outcome.status, outcome=outcome)

    def status(self, states: Sequence[ReplicaState]) -> RunStatus:
        """Return the state of the run.

        Args:
            states: the states of all its replicas.
        """
        record, restarts = self.records.record, self._restarts
        rules = self._rules.read()
        return RunStatus(
            self.records.run_id,
            self.records.placements.backend_name,
            states,
            self.records.count_joined(),
            record.settings.min_replicas,
            self._rules.lines(restarts.describe_decisions(self.records.ends)),
            restarts.restarts_by_reason,
            self._forged.outcomes(),
            self._forged.starts(),
            lacks_key(self.records.store.url, self.records.run_id),
            store_url=self.records.store.url,
            rules=rules,
        )

    def about_to_start(self) -> str | None:
        """Return a text about replicas that another process will start soon. None if no process will.

        Other methods only see replicas that already have a record.
        """
        self.records.update()
        if resumed := self._restarts.about_to_start(
            {rank: self.records.inventory.newest(rank) for rank in self.records.ranks}
        ):
            return f"{name_ranks(resumed)} being resumed"
        now = time.time()
        for added in self.records.placements.additions():
            is_begun = {*added.ranks} & {rank for rank, _, _ in self.records.inventory.records}
            if not is_begun and -ADDING_S <= now - added.added_at <= ADDING_S and not added.is_orphaned:
                return f"{name_ranks(added.ranks)} being added"
        return None

    @property
    def decisions(self) -> Sequence[Decision]:
        """The entries of the decision log that this process has read."""
        return self._restarts.decisions

    def share_log(self, log: DecisionLog) -> None:
        """Share the decision log with another reader of the same run, so that each entry is read once."""
        self._restarts.share_log(log)

    @property
    def is_permanent(self) -> bool:
        """True if, as of the last look, a rank would fail again in the same way if it were restarted."""
        return bool(self._permanent)

    def recorded(self, ranks: Sequence[int] | None = None) -> list[ReplicaState]:
        """Return the states of ranks from the store alone; no backend is asked.

        Args:
            ranks: the ranks. None: all ranks.
        """
        return [self._state(rank, None, "") for rank in self.records.read_new_outcomes(ranks)]

    def _look(self, asked: Sequence[int] | None) -> list[ReplicaState]:
        ranks = self.records.read_new_outcomes(asked)
        ends = [end for rank in ranks if (end := self.records.outcome(rank)) is not None]
        for end in self.reasons.ask(ends, self.records.placements, self.handles.of):
            self.records.read_outcome(self.records.attempt(end.rank).at(end.attempt))
        waiting = [rank for rank in ranks if self.records.outcome(rank) is None]
        handles = dict(zip(waiting, self.handles.newest(waiting), strict=True))
        known = (rank for rank, handle in handles.items() if handle is not None and self.records.problem(rank) is None)
        newest = {rank: self.records.attempt(rank) for rank in known}
        seen = self.reports.ask(newest, handles) if newest else {}
        ended = [rank for rank, (status, _) in seen.items() if status is not None and status.is_terminal]
        if ended:
            self.records.update()
            restarted = [rank for rank in ended if self.records.attempt(rank) != newest[rank]]
            self.records.map(lambda rank: self.reports.record_end(rank, seen[rank][0]), sorted({*ended} - {*restarted}))
            # A newer attempt was started during the call, so the backend's answer is about the older attempt.
            if restarted:
                others = [rank for rank in ranks if rank not in restarted]
                found = [self._state(rank, *seen.get(rank, (None, ""))) for rank in others]  # the look may find newer
                return sorted([*found, *self._look(restarted)], key=lambda state: ranks.index(state.rank))
        return [self._state(rank, *seen.get(rank, (None, ""))) for rank in ranks]

    def with_reports(self, states: Sequence[ReplicaState]) -> list[ReplicaState]:
        """Return the states with the last heartbeat of each replica, or with the progress of its installation."""

        def with_report(state: ReplicaState) -> ReplicaState:
            has_beat = self.records.inventory.has(state.rank, state.attempt, "heartbeat")
            attempt = self.records.attempt(state.rank).at(state.attempt)
            state = self._installations.over(state, attempt, launched_at=self.records.record.created_at)
            return self._heartbeats.over(state, attempt, has_beat=has_beat)

        return self.records.map(with_report, states)

    def ending(self, state: ReplicaState) -> Outcome:
        """Return the outcome of a replica. If there is none, return a new one with the replica's status."""
        known = None if state.restart.is_awaited else state.outcome or self.records.outcome(state.rank)
        return known or self.records.attempt(state.rank).new_outcome(state.status)

    def _state(self, rank: int, reported: ReplicaStatus | None, doing: str) -> ReplicaState:
        outcome = self.records.outcome(rank)
        if outcome is not None:
            return ReplicaState(rank, outcome.attempt, outcome.status, outcome)
        number = self.records.inventory.newest(rank)
        has_started = self.records.inventory.has(rank, number, "started")
        status = reported or (ReplicaStatus.RUNNING if has_started else ReplicaStatus.PENDING)
        if not has_started and self.records.inventory.has(rank, number, "boot"):
            doing = INSTALLING
        if (problem := self.records.problem(rank)) is not None:
            status = ReplicaStatus.FAILED if self.records.inventory.has(rank, number, "outcome") else status
            return ReplicaState(rank, number, status, problem, is_readable=False)
        return ReplicaState(rank, number, status, doing=doing)
