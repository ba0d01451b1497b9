"""Asks the backend about replicas without an outcome, and records the ends that it reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from executors.attempt import Attempt
from executors.backend import Observation, PendingReplica
from executors.errors import CorruptObjectError, UnknownHandleError, UnwritableStoreError
from executors.protocol import REASONS, Outcome, ReplicaStatus, as_status
from executors.view.replica_handles import ReplicaHandles
from executors.view.replica_records import ReplicaRecords


class BackendReports:
    """Asks the backend about replicas without an outcome, and records ends for the other processes of the run.

    Args:
        records: the records of the replicas.
        handles: the handles of the replicas.

    Example:
        BackendReports(reader.records, reader.handles).collect_missing([0, 1])
    """

    def __init__(self, records: ReplicaRecords, handles: ReplicaHandles) -> None:
        self._records = records
        self._handles = handles

    def ask(
        self, newest: Mapping[int, Attempt], handles: Mapping[int, Any]
    ) -> dict[int, tuple[ReplicaStatus | None, str]]:
        """Return for each replica the status that the backend reports, and a text on the thing for which the replica
        waits.
        """
        replicas = [PendingReplica(handles[rank], attempt.number) for rank, attempt in newest.items()]
        try:
            found = self._records.placements.observe(replicas)
        except (CorruptObjectError, UnknownHandleError, UnwritableStoreError) as error:
            if len(newest) > 1:  # asking for each replica alone shows which one has the bad record
                each_alone = (self.ask({rank: attempt}, handles) for rank, attempt in newest.items())
                return {rank: seen for alone in each_alone for rank, seen in alone.items()}
            (rank,) = newest
            if isinstance(error, UnwritableStoreError):
                return {rank: (self._records.keep_unrecorded(rank, error).status, "")}
            self._records.keep_problem(newest[rank], error)
            return {}
        return {rank: self._note(rank, each) for rank, each in zip(newest, found, strict=True)}

    def _note(self, rank: int, observation: Observation) -> tuple[ReplicaStatus | None, str]:
        if observation.outcome is None:
            return observation.status, observation.doing
        self._records.keep(observation.outcome)
        return observation.outcome.status, ""

    def record_end(self, rank: int, reported: ReplicaStatus | None) -> None:
        """Record the end of a replica that its backend reports, because the other replicas must know of it."""
        if self._records.outcome(rank) is not None:
            return
        attempt = self._records.attempt(rank)
        # A replica writes its outcome before its process ends, so the outcome may be in the store by now.
        if not self._records.read_outcome(attempt) and reported is not ReplicaStatus.SUCCEEDED:
            try:
                self._records.keep(self._record_for(attempt, reported))
            except UnwritableStoreError as error:
                self._records.keep_unrecorded(rank, error)

    def collect_missing(self, ranks: Sequence[int]) -> None:
        """Ask the backend for the outcomes of ended replicas that could not write an outcome themselves.

        Args:
            ranks: the ranks that have ended.
        """
        missing = [
            rank for rank in ranks if self._records.outcome(rank) is None and self._records.problem(rank) is None
        ]
        # A rank that was never started has no handle, and no backend can report on it.
        handles = {rank: handle for rank in missing if (handle := self._handles.of(rank)) is not None}
        rows = self._records.placements.collect([*handles.values()]) if handles else []
        for rank, row in zip(handles, rows, strict=True):
            if as_status(row.get("status")).is_terminal:
                self._records.keep(self._of_row(self._records.attempt(rank), row))

    def _record_for(self, attempt: Attempt, reported: ReplicaStatus | None) -> Outcome:
        """Write an outcome from the backend's report. Such a backend does not write outcomes itself."""
        (row,) = self._records.placements.collect([self._handles.of(attempt.rank)], timeout=0)
        if reported is not ReplicaStatus.CANCELLED and row.get("reason") not in REASONS:
            return attempt.record_lost(f"{self._records.backend(attempt.rank)} reports it {reported}")
        return attempt.record(self._of_row(attempt, {**row, "status": reported}))

    def _of_row(self, attempt: Attempt, row: Mapping[str, Any]) -> Outcome:
        """Return the outcome that an executor reports for a replica without an outcome.

        In a signed run such an outcome counts as unproven.
        """
        return replace(Outcome.of_row(attempt.rank, attempt.number, row), unproven=self._records.record.settings.signed)
