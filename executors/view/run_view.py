"""Reads a run from its records and its backend. `RunView` has the parts of `Run` that change nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from executors.attempt import Attempt, replica_prefix
from executors.errors import RunBeingRemovedError, RunNotFoundError
from executors.protocol import Outcome, ReplicaStatus, ServerlessExecutor
from executors.registry.run_index import (
    Note,
    check_is_located,
    find_removal_here,
    hold_key_of,
    noted_at_launch,
    noted_options,
    reference,
)
from executors.registry.run_placements import GivenExecutor, RunPlacements
from executors.restarts.lease import was_start_abandoned
from executors.settings.procs import gpus_asked
from executors.status import ReplicaState, RunStatus, name_ranks
from executors.store import Store
from executors.store.artifacts import Artifact, kept_artifacts
from executors.store.url import address_of
from executors.task.record import RunRecord, find_run_record
from executors.task.removal_record import find_removal
from executors.view.replica_records import RECENT_S
from executors.view.run_state_reader import RunStateReader

START_LOOK_S = 30.0  # between two checks whether the start of a run was abandoned
ABANDONED = "its launcher ended before all replicas were started"


class RunView:
    """Reads a run: its record, its placements, and the state of its replicas.

    `Run` contains a view, and `executors.run.run.view_of` returns it. A replica that writes the page makes its own
    view.

    Args:
        store: the store of the run.
        run_id: the id of the run.
        executor: the run's executor, a list of executors, or the name of a backend. None: the backends in the run's
            record.
        handles: the handles in rank order, if this process launched the run. None: they are read from the store.

    Example:
        view = RunView(open_store("s3://bucket/runs"), "brave-otter-7f3a")
        print(view.status().counts)
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        executor: GivenExecutor = None,
        handles: Sequence[Any] | None = None,
    ) -> None:
        self.store = store
        self.run_id = run_id
        self._launched = handles
        self._start_looked_at = -math.inf
        self._start_was_abandoned = False
        self.placements = RunPlacements(store, run_id, lambda: self.record, executor, self._noted_options)
        """The backends of the run, each with its ranks."""

    @cached_property
    def record(self) -> RunRecord:
        """The run's record `run.json`: who launched it and when, its entrypoint, backends and options.

        Raises:
            RunBeingRemovedError: `replicas rm` has begun to delete the run.
            RunNotFoundError: the store has no such run.
            StoreError: the store does not answer, or the record is damaged.
        """
        record = find_run_record(self.store, self.run_id)
        if record is None:
            self.check_not_removed()
            if (removal := find_removal_here(self.run_id, self.store.url)) is not None:
                raise RunBeingRemovedError(removal.describe(self.run_id, reference(self.run_id, self.store.url)))
            check_is_located(self.run_id, self.store.url)
            raise RunNotFoundError(f"No run {self.run_id!r} at {self.store.url}.")
        # Before any record of a replica is read, because the key proves them.
        hold_key_of(self.run_id, self.store.url, record.key_id)
        return record

    def check_not_removed(self) -> None:
        """Check that no process is deleting the run.

        Raises:
            RunBeingRemovedError: `replicas rm` has begun to delete it. The message names the command that completes the
                removal.
            StoreError: the store does not answer.

        Example:
            view_of(attach("first-try")).check_not_removed()
        """
        if (removal := find_removal(self.store, self.run_id)) is not None:
            raise RunBeingRemovedError(removal.describe(self.run_id, reference(self.run_id, self.store.url)))

    @property
    def url(self) -> str:
        """The run's address, which `attach` takes on any machine that reaches the store."""
        return address_of(self.store.url, self.run_id)

    @property
    def backend(self) -> str:
        """The name of the run's backend.

        Several backends are named with their numbers of replicas, as in `slurm:4,modal:4`.
        """
        return self.placements.backend_name

    @property
    def world_size(self) -> int:
        """The number of replicas that were launched. It stays the same if replicas are added."""
        return self.record.world_size

    @property
    def ranks(self) -> list[int]:
        """The ranks that were launched, and the ranks that were added since."""
        self.reader.records.update(RECENT_S)
        return list(self.reader.records.ranks)

    @property
    def executor(self) -> ServerlessExecutor:
        """The executor that the user gave, or one of the backend that the record names.

        For a run on several backends, it is one executor over all of them.

        Raises:
            BackendError: the backend is not installed on this machine. A record cannot make this process import
                a module, so the user has to give the executor to `attach`.
        """
        return self.placements.executor

    @property
    def noted(self) -> Note | None:
        """The note on this machine about the launch of the run's task. None on machines that did not launch it."""
        note = noted_at_launch(self.run_id, self.store.url)
        return note if note is not None and note.task_digest == self.record.task_digest else None

    def _noted_options(self, name: str) -> Mapping[str, Any] | None:
        if self.noted is not None and name == self.record.backend:
            return self.noted.executor_options
        return noted_options(self.run_id, self.store.url, name)

    @property
    def task_digest(self) -> str | None:
        """The sha256 of the run's task, which another machine needs for a resume.

        None if another machine launched the run.
        """
        note = noted_at_launch(self.run_id, self.store.url)
        return None if note is None else note.task_digest

    @property
    def handles(self) -> list[Any]:
        """The handles of the replicas in rank order. None stands for a handle that this process cannot read."""
        return self.reader.handles.all()

    def outcomes(self) -> list[Outcome]:
        """Return the outcomes in rank order at once. A replica without an outcome has the status pending or running."""
        states = self.reader.look()
        if all(state.is_over for state in states):
            self.reader.reports.collect_missing(self.reader.records.ranks)
        return list(map(self.reader.ending, states))

    def status(self, *, reports: bool = True) -> RunStatus:
        """Return the state of every replica, with its last report.

        Args:
            reports: True, the default, adds the last report of each replica. The reports cost one request per replica
                at a bucket.
        """
        states = self._with_abandoned(self.reader.look())
        replicas = self.reader.with_reports(states) if reports else states
        return self.reader.status(replicas)

    def recorded_status(self) -> RunStatus:
        """Return the state of every replica from the store alone: the backend is not asked.

        If a job has died without an outcome, the replica still has its last known state.

        Raises:
            StoreError: the store cannot be read.

        Example:
            try:
                now = view.status()
            except BackendError:
                now = view.recorded_status()
        """
        return self.reader.status(self.reader.with_reports(self.reader.recorded()))

    def _with_abandoned(self, states: Sequence[ReplicaState]) -> Sequence[ReplicaState]:
        """Return the states. Each replica that waits for a launcher that has died gets a note."""
        inventory = self.reader.records.inventory
        waiting = {
            state.rank
            for state in states
            if state.status is ReplicaStatus.PENDING
            and not state.restart.is_awaited
            and not inventory.has(state.rank, state.attempt, "handle")
        }
        if not waiting:
            return states
        now = time.monotonic()
        if now >= self._start_looked_at + START_LOOK_S:  # the check costs requests, and a start takes minutes
            self._start_looked_at = now
            self._start_was_abandoned = was_start_abandoned(self.store, self.run_id, time.time())
        if not self._start_was_abandoned:
            return states
        return [replace(state, doing=ABANDONED) if state.rank in waiting else state for state in states]

    def newest_attempt(self, rank: int) -> Attempt:
        """Return the newest attempt of a rank. Attempt 0 is the launch; each resume or restart adds one.

        Args:
            rank: the rank.
        """
        self.reader.records.update(RECENT_S)
        return self.reader.records.attempt(rank)

    def launched(self, rank: int) -> list[Attempt]:
        """Return the attempts of a rank that were launched, oldest first. Each has a log of its own.

        Args:
            rank: the rank.
        """
        self.reader.records.update(RECENT_S)
        return self.reader.records.launched(rank)

    @cached_property
    def reader(self) -> RunStateReader:
        """Reads the state of the replicas, and keeps what it has read."""
        return RunStateReader(self.store, self.run_id, self.record, self.placements, self._launched)

    def check_rank(self, rank: int) -> int:
        """Return the rank if the run has it.

        Args:
            rank: the rank that the user gave.

        Raises:
            ValueError: the run has no such rank.
        """
        if not 0 <= rank < self.world_size and rank not in self.ranks:
            raise ValueError(f"Run {self.run_id!r} has no rank {rank}, but {name_ranks(self.ranks)}.")
        return rank


def known_members(view: RunView, rank: int) -> int | None:
    """Return the number of processes of a replica. None: it is counted where the replica starts, and is not known.

    Args:
        view: the run.
        rank: the rank.

    Example:
        known_members(view_of(attach("first-try")), rank=0)  # 8, after a launch with `--procs 8`
    """
    records = view.reader.records
    records.update(RECENT_S)
    procs = view.record.settings.procs
    if procs is None or procs.isdecimal():
        return int(procs or 1)
    outcome = records.outcome(rank)
    if outcome is not None and outcome.members:
        return len(outcome.members)
    # An added rank may have another GPU than the launch.
    return gpus_asked(view.record.settings.gpu) if rank < view.world_size else None


def all_artifacts(view: RunView, rank: int) -> list[Artifact]:
    """List all objects in the artifact folder of a rank. Some of their names are not valid file names.

    Args:
        view: the run.
        rank: the rank.

    Raises:
        ValueError: the run has no such rank.

    Example:
        all_artifacts(view_of(attach("first-try")), rank=0)
    """
    return kept_artifacts(view.store, rank, replica_prefix(view.run_id, view.check_rank(rank)))
