"""A run: `attach` finds it from any process; `Run` follows it, reads its logs, cancels it and collects its results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from executors.attempt import Attempt, count_joined
from executors.errors import (
    CorruptObjectError,
    RunExistsError,
    RunNotFoundError,
    StoreError,
    UnknownHandleError,
    did_you_mean,
)
from executors.logs.follower import Sight
from executors.protocol import REASONS, NativeExecutor, Outcome, ReplicaStatus, ServerlessExecutor, as_status
from executors.registry import check_backend_of, check_executor, executor_class, executor_of_record
from executors.run_index import Note, folder_of_run, forget, known_run_ids, locate, noted_at_launch
from executors.run_logs import Ranks, RunLogs, Which, check_rank
from executors.status import ReplicaState, RunStatus, raise_root_cause, wait_until_terminal
from executors.store import Store
from executors.store.artifacts import Artifact, find_artifacts
from executors.store.records import exists
from executors.store.url import RUN_ID, address_of, check_run_id, directory_of, existing_store, split_address
from executors.task.record import RunRecord, find_run_record

MAX_THREADS = 16
T = TypeVar("T")


class Run:
    """One run: follow it, read its logs, cancel it, collect its results.

    A context manager: leaving it cancels what still runs.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        executor: ServerlessExecutor | str | None = None,
        handles: Sequence[Any] | None = None,
    ) -> None:
        self.store = store
        self.run_id = run_id
        self._named_executor = executor if isinstance(executor, str) else None
        self._executor = None if isinstance(executor, str) else executor
        self.has_given_options = self._executor is not None
        """Whether a person made the executor, and so gave its options, too."""
        self._handles: list[Any] | None = None if handles is None else list(handles)
        self._outcomes: dict[int, Outcome] = {}

    @cached_property
    def record(self) -> RunRecord:
        """What `run.json` says: who, what, when, backend, options."""
        record = find_run_record(self.store, self.run_id)
        if record is None:
            raise RunNotFoundError(f"No run {self.run_id!r} at {self.store.url}.")
        return record

    @property
    def url(self) -> str:
        """The run's address: `attach(url)` finds it from any machine that reaches its store."""
        return address_of(self.store.url, self.run_id)

    @property
    def backend(self) -> str:
        """The backend's name."""
        return self.record.backend

    @property
    def world_size(self) -> int:
        """How many replicas were launched."""
        return self.record.world_size

    @property
    def executor(self) -> ServerlessExecutor:
        """The executor; for an attached run one of the backend that its record names.

        Raises:
            BackendError: that backend is not installed here. Nothing is imported because a record names it: give the
                executor to `attach`.
        """
        if self._executor is None:
            options = None if self.noted is None else self.noted.executor_options
            self._executor = executor_of_record(self.record, named=self._named_executor, options=options)
        return self._executor

    @property
    def noted(self) -> Note | None:
        """What this machine noted when it launched the task that the record names. None on other machines."""
        note = noted_at_launch(self.run_id, self.store.url)
        return note if note is not None and note.task_digest == self.record.task_digest else None

    @property
    def task_digest(self) -> str | None:
        """The sha256 of the run's task, if this machine launched it: what another one needs to resume the run."""
        note = noted_at_launch(self.run_id, self.store.url)
        return None if note is None else note.task_digest

    @property
    def handles(self) -> list[Any]:
        """The replicas' handles in rank order; None for one that left none that this process can read."""
        return [self.handle(rank) for rank in range(self.world_size)]

    def handle(self, rank: int) -> Any:
        """The handle of one replica; None while it has left none that this process can read."""
        if self._handles is None:
            self._handles = [None] * self.world_size
        if self._handles[rank] is None:  # it may still come: its launcher may be at work
            self._handles[rank] = self._read_handle(rank)
        return self._handles[rank]

    def __repr__(self) -> str:
        return f"<Run {self.run_id!r}: {self.world_size} replicas on {self.backend!r}, {self.store.url}>"

    def _repr_html_(self) -> str:
        return self.status().to_html()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every replica has ended; False if `timeout` seconds were over first.

        Ctrl-C leaves the run alone.
        """
        return wait_until_terminal(self._poll, range(self.world_size), timeout, each=self._ask_all)

    def results(self) -> list[Any]:
        """Wait, and return what each replica's entrypoint returned, in rank order.

        Raises:
            ReplicaError: a replica gave no result. The error is the earliest failure, with the remote traceback as its
                message; the other failures are its notes.
        """
        self.wait()
        outcomes = self.outcomes()
        raise_root_cause(outcomes)
        return [outcome.result for outcome in outcomes]

    def outcomes(self) -> list[Outcome]:
        """Return how each replica ended, in rank order, without waiting; those that have not are pending or running."""
        statuses = self._ask_all(self._poll, range(self.world_size))
        if all(status.is_terminal for status in statuses):
            self._collect_missing()
        return [
            self._outcomes.get(rank) or self.newest_attempt(rank).ended(status) for rank, status in enumerate(statuses)
        ]

    def status(self) -> RunStatus:
        """Return the state of every replica: status, and what it reported last."""
        replicas = self._ask_all(self._state, range(self.world_size))
        return RunStatus(self.run_id, self.backend, replicas, count_joined(self.store, self.run_id, self.world_size))

    @overload
    def logs(
        self, rank: Ranks = None, tail: int = 200, follow: Literal[False] = False, *, attempt: Which = None
    ) -> str: ...
    @overload
    def logs(
        self, rank: Ranks = None, tail: int = 200, *, follow: Literal[True], attempt: Which = None
    ) -> Iterator[str]: ...
    def logs(
        self, rank: Ranks = None, tail: int = 200, follow: bool = False, *, attempt: Which = None
    ) -> str | Iterator[str]:
        """Return the last lines of one replica's output, or of several or all, each line then led by `[rank]`.

        Args:
            rank: one, some, or None: all.
            tail: how many lines of each replica; with "all" of each attempt.
            follow: return an iterator over these and all later lines instead, which ends with the run. Where a rank is
                resumed meanwhile, it goes on with the new attempt.
            attempt: the number of one, "all", or None: the newest of each rank.
        """
        pieces = RunLogs(self, attempt).pieces(rank, tail, follow=follow)
        return pieces if follow else "".join(pieces)

    def artifacts(self, rank: int) -> list[Artifact]:
        """List the files that a replica kept with `save_artifact`.

        Those whose names are not relative paths, or cannot be shown, are left out; `replicas collect` names them.
        """
        return [artifact for artifact in self.all_artifacts(rank) if artifact.problem is None]

    def all_artifacts(self, rank: int) -> list[Artifact]:
        """List all objects where a replica keeps its files, also those whose names cannot be written to."""
        return find_artifacts(self.store, rank, self.newest_attempt(check_rank(self, rank)).key("artifacts/"))

    def request_cancel(self) -> None:
        """Leave the cancel marker of every replica that has not ended; `cancel` also waits for their end."""
        for rank, status in enumerate(self._ask_all(self._poll, range(self.world_size))):
            if not status.is_terminal:
                self.newest_attempt(rank).request_cancel()

    def cancel(self, rank: int | None = None) -> None:
        """Cancel one replica, or all that still run; returns when they are gone. Nothing changes for the others."""
        ranks = range(self.world_size) if rank is None else [check_rank(self, rank)]
        alive = [r for r, status in zip(ranks, self._ask_all(self._poll, ranks), strict=True) if not status.is_terminal]
        launched = [r for r in alive if self.handle(r) is not None]
        for r in set(alive) - set(launched):
            attempt = self.newest_attempt(r)
            if not attempt.has("intent.json"):
                raise RunNotFoundError(
                    f"Run {self.run_id!r}: backend {self.backend!r} left no handle that another process can read. "
                    "Cancel it in the process that launched it."
                )
            attempt.request_cancel()  # its launcher died before its service had it; one that comes up late ends, too
            attempt.record(attempt.ended(ReplicaStatus.CANCELLED, "cancelled"))
        self._in_parallel(lambda r: self.executor.cancel(self.handle(r)), launched)

    def remove(self) -> None:
        """Delete everything the run left, here and in its store.

        Raises:
            RunExistsError: a replica still runs.
        """
        folder = folder_of_run(self.run_id, self.store.url)
        with contextlib.suppress(CorruptObjectError, UnknownHandleError):  # what cannot be read can be removed
            if not self.status().is_terminal:
                raise RunExistsError(
                    f"Run {self.run_id!r} still runs. Cancel it first: `replicas cancel {self.run_id}`."
                )
        left = []
        for entry in list(self.store.list(f"{self.run_id}/")):
            try:
                self.store.delete(entry.key)
            except ValueError:  # not a key that a store takes: somebody put it there by other means
                left.append(entry.key)
        forget(folder)
        if left:
            raise StoreError(
                f"Run {self.run_id!r} is removed, but for {len(left)} objects under names that no store takes, such as "
                f"{left[0][:200]!r}. Delete these with the tools of the store.",
                url=self.store.url,
            )

    def newest_attempt(self, rank: int) -> Attempt:
        """Return a rank's newest attempt: its number is 0 until it was resumed, or its process started twice."""
        return Attempt(self.store, self.run_id, rank).newest()

    def _poll(self, rank: int) -> ReplicaStatus:
        """Return a replica's status. Asks the executor, unless the replica is known to have ended for good."""
        known = self._outcomes.get(rank)
        if known is not None:
            if known.status is ReplicaStatus.SUCCEEDED or self.newest_attempt(rank).number == known.attempt:
                return known.status
            self._outcomes.pop(rank, None)
        handle, attempt = self.handle(rank), self.newest_attempt(rank)
        reported = None if handle is None else as_status(self.executor.poll(handle))
        # After the poll: an outcome is written before its process ends.
        outcome = attempt.outcome()
        if outcome is None and reported in (ReplicaStatus.FAILED, ReplicaStatus.CANCELLED):
            if attempt.newest() != attempt:
                return self._poll(rank)  # the answer was of an attempt that was begun meanwhile
            outcome = self._record_for(attempt, reported)
        if outcome is not None:
            self._outcomes[rank] = outcome
            return outcome.status
        if reported is not None:
            return reported
        return ReplicaStatus.RUNNING if attempt.has("started.json") else ReplicaStatus.PENDING

    def _record_for(self, attempt: Attempt, reported: ReplicaStatus) -> Outcome:
        """Write the outcome that a third-party executor's replica could not: its peers need to know that it is gone."""
        (row,) = self.executor.collect([self.handle(attempt.rank)], timeout=0)
        if reported is not ReplicaStatus.CANCELLED and row.get("reason") not in REASONS:
            return attempt.record_lost(f"{self.backend} reports it {reported}")
        return attempt.record(Outcome.of_row(attempt.rank, attempt.number, {**row, "status": reported}))

    def _collect_missing(self) -> None:
        """Take from `collect` what the store does not have: replicas that succeeded without reaching the store."""
        missing = [rank for rank in range(self.world_size) if rank not in self._outcomes]
        rows = self.executor.collect([self.handle(rank) for rank in missing]) if missing else []
        for rank, row in zip(missing, rows, strict=True):
            if as_status(row.get("status")).is_terminal:
                self._outcomes[rank] = Outcome.of_row(rank, self.newest_attempt(rank).number, row)

    def _state(self, rank: int) -> ReplicaState:
        status = self._poll(rank)
        outcome = self._outcomes.get(rank)
        # Of the same look; and the attempt of an outcome needs no more requests.
        number = None if outcome is None else outcome.attempt
        attempt = self.newest_attempt(rank) if number is None else Attempt(self.store, self.run_id, rank, number)
        beat = attempt.beat()
        age_s = None if beat is None else max(0.0, time.time() - beat.at)
        reported = {} if beat is None else dict(beat.reported)
        return ReplicaState(rank, attempt.number, status, outcome, age_s, reported)

    def _read_handle(self, rank: int) -> Any:
        """Read the handle of the newest attempt that has one."""
        newest = self.newest_attempt(rank)
        for attempt in map(newest.at, range(newest.number, -1, -1)):
            if (handle := self.handle_at(attempt)) is not None or attempt.has("intent.json"):
                return handle
        return None

    def handle_at(self, attempt: Attempt) -> Any:
        """Return the handle of one attempt; None where it left none of its own that this process can read."""
        handle = attempt.handle(self.backend)
        if handle is None and self._handles and attempt.number == 0:
            handle = self._handles[attempt.rank]  # of an executor with the five verbs alone
        if handle is None and isinstance(self.executor, NativeExecutor) and attempt.has("intent.json"):
            handle = self.executor.find_handle(attempt.announced(self.backend))
        return handle

    def look(self, ranks: Sequence[int]) -> dict[int, Sight]:
        """Return the newest attempt of each of some ranks, and whether it has ended."""
        statuses = self._ask_all(self._poll, ranks)
        known = [self._outcomes.get(rank) for rank in ranks]
        newest = [each.attempt if each else self.newest_attempt(r).number for r, each in zip(ranks, known, strict=True)]
        return {r: Sight(n, s.is_terminal) for r, n, s in zip(ranks, newest, statuses, strict=True)}

    def outcome_of(self, attempt: Attempt) -> Outcome | None:
        """Return how an attempt ended; None while it has not."""
        known = self._outcomes.get(attempt.rank)
        return known if known is not None and known.attempt == attempt.number else attempt.outcome()

    def _ask_all(self, ask: Callable[[int], T], ranks: Iterable[int]) -> list[T]:
        """Ask about several ranks: at once where each answer takes round trips, and in turn of a directory."""
        return list(map(ask, ranks)) if directory_of(self.store.url) else self._in_parallel(ask, list(ranks))

    def _in_parallel(self, act: Callable[[int], T], ranks: Sequence[int]) -> list[T]:
        if len(ranks) <= 1:
            return list(map(act, ranks))
        with ThreadPoolExecutor(min(MAX_THREADS, len(ranks))) as pool:
            return list(pool.map(act, ranks))


def attach(run: str, *, rendezvous: str | Path | None = None, executor: str | ServerlessExecutor | None = None) -> Run:
    """Find a run again, from any process.

    Args:
        run: the id of a run that this machine knows, or `<rendezvous url>/<run id>`.
        rendezvous: the url of its store, when `run` is an id.
        executor: what it was launched with: an executor, or a backend's name or class as `pkg.mod:Class`, which is then
            made with the options that this machine noted, else those of the record. None: the backend that its record
            names, which has to be one that is installed here.

    Raises:
        RunNotFoundError: there is no such run.
        BackendError: the executor is of another backend than the run.
    """
    url: str | None
    if rendezvous is None and ("://" in run or "/" in run):
        url, run_id = split_address(run)
    else:
        run_id = run
        url = str(rendezvous) if rendezvous is not None else locate(check_run_id(run))
    if url is None:
        raise RunNotFoundError(
            f"No run {run_id!r} is known on this machine.{did_you_mean(run_id, known_run_ids())} For a run that was "
            f"launched elsewhere give its address, as in 's3://BUCKET/PREFIX/{run_id}'."
        )
    store = existing_store(url)
    if not exists(store, f"{check_run_id(run_id)}/run.json"):
        raise RunNotFoundError(f"No run {run_id!r} at {store.url}.")
    if executor is None:
        return Run(store, run_id)
    named = executor if isinstance(executor, str) else check_executor(executor)
    found = Run(store, run_id, executor=named)
    check_backend_of(found.record, executor_class(named) if isinstance(named, str) else named)
    return found


def list_runs(rendezvous: str | Path | None = None) -> list[Run]:
    """List the runs that this machine knows of, or all in a store; oldest first."""
    if rendezvous is not None:
        store = existing_store(rendezvous)
        keys = (entry.key.split("/") for entry in store.list(""))
        runs = [Run(store, key[0]) for key in keys if key[1:] == ["run.json"] and RUN_ID.fullmatch(key[0])]
    else:
        runs = []
        for run_id in known_run_ids():
            # It may be removed by another machine, or unreachable.
            with contextlib.suppress(RunNotFoundError, StoreError, ValueError):
                runs.append(attach(run_id))
    return sorted(runs, key=_created_at)


def _created_at(run: Run) -> float:
    with contextlib.suppress(RunNotFoundError, StoreError):  # left half by a power cut, or written by hand
        return run.record.created_at
    return 0.0
