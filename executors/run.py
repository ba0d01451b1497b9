"""A run: what follows it, reads its logs, cancels it, and collects its results.

Everything here is written once, over the five verbs of any executor and the keys of any store.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

from executors.artifacts import Artifact, find_artifacts
from executors.attempt_records import Beat
from executors.errors import CorruptObjectError, RunExistsError, RunNotFoundError, StoreError, UnknownHandleError
from executors.following import follow_logs, last_lines
from executors.found import read_handle
from executors.outcome import (
    REASONS,
    Outcome,
    count_joined,
    find_outcome,
    newest_attempt,
    record_loss,
    record_outcome,
    request_cancel,
)
from executors.protocol import ReplicaHandle, ReplicaStatus, ServerlessExecutor
from executors.records import exists, find_record
from executors.registry import executor_of_record
from executors.replica import replica_key
from executors.root_cause import raise_root_cause
from executors.run_record import RunRecord, find_run_record
from executors.state import Note, folder_of_run, forget, kept_digest, noted_at_launch
from executors.status import ReplicaState, RunStatus
from executors.store import Store
from executors.store.opening import address_of, directory_of
from executors.waiting import as_status, wait_until_terminal

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
            BackendError: that is no backend that is installed here. Nothing is imported because a record names it:
                give the executor to `attach`.
        """
        if self._executor is None:
            noted = self.noted
            options = None if noted is None else noted.executor_options
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
        return kept_digest(self.run_id, self.store.url)

    @property
    def handles(self) -> list[Any]:
        """The replicas' handles in rank order; None for one that left no handle that this process can read."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every replica has ended; False if `timeout` seconds were over first.

        Ctrl-C leaves the run alone.
        """
        return wait_until_terminal(self._poll, range(self.world_size), timeout, each=self._ask_all)

    def results(self) -> list[Any]:
        """Wait, and return what each replica's entrypoint returned, in rank order.

        Raises:
            ReplicaError: a replica gave no result. It tells of the earliest failure, with the remote traceback as its
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
            self._outcomes.get(rank) or Outcome(rank, self.newest_attempt(rank), status)
            for rank, status in enumerate(statuses)
        ]

    def status(self) -> RunStatus:
        """Return the state of every replica: status, and what it reported last."""
        replicas = self._ask_all(self._state, range(self.world_size))
        return RunStatus(self.run_id, self.backend, replicas, count_joined(self.store, self.run_id, self.world_size))

    @overload
    def logs(self, rank: int | Sequence[int] | None = None, tail: int = 200, follow: Literal[False] = False) -> str: ...
    @overload
    def logs(
        self, rank: int | Sequence[int] | None = None, tail: int = 200, *, follow: Literal[True]
    ) -> Iterator[str]: ...
    def logs(
        self, rank: int | Sequence[int] | None = None, tail: int = 200, follow: bool = False
    ) -> str | Iterator[str]:
        """Return the last lines of one replica's output, or of several or all, each line then led by `[rank]`.

        Args:
            rank: one, some, or None: all.
            tail: how many lines of each replica.
            follow: return an iterator over these and all later lines instead, which ends with the run.
        """
        is_one = isinstance(rank, int)
        chosen = range(self.world_size) if rank is None else [rank] if isinstance(rank, int) else rank
        ranks = [self._check_rank(r) for r in chosen]
        if follow:
            handles = {r: self.handle(r) for r in ranks}
            return follow_logs(self.executor, self._poll, handles, tail, prefix=not is_one, kept=self._kept)
        texts = self._in_parallel(lambda r: self._tail(r, tail), ranks)
        if is_one:
            return str(texts[0])
        told = zip(ranks, texts, strict=True)
        return "".join(f"[{r}] {line}\n" for r, text in told for line in text.split("\n") if line)

    def artifacts(self, rank: int) -> list[Artifact]:
        """List the files that a replica kept with `save_artifact`.

        Those whose names are no relative paths, or cannot be shown, are left out; `replicas collect` names them.
        """
        return [artifact for artifact in self.all_artifacts(rank) if artifact.problem is None]

    def all_artifacts(self, rank: int) -> list[Artifact]:
        """List what stands where a replica keeps its files, also under names that nothing may be written to."""
        return find_artifacts(self.store, self.run_id, self._check_rank(rank), self.newest_attempt(rank))

    def ask_to_end(self) -> None:
        """Leave the cancel marker of every replica that has not ended, and return: `cancel` also sees to their end."""
        for rank, status in enumerate(self._ask_all(self._poll, range(self.world_size))):
            if not status.is_terminal:
                request_cancel(self.store, self.run_id, rank, self.newest_attempt(rank))

    def cancel(self, rank: int | None = None) -> None:
        """Cancel one replica, or all that still run; returns when they are gone. Nothing changes for the others."""
        ranks = range(self.world_size) if rank is None else [self._check_rank(rank)]
        alive = [r for r, status in zip(ranks, self._ask_all(self._poll, ranks), strict=True) if not status.is_terminal]
        for r in [r for r in alive if self.handle(r) is None]:
            if not self._cancel_intent(r):
                raise RunNotFoundError(
                    f"Run {self.run_id!r}: backend {self.backend!r} left no handle that another process can read. "
                    "Cancel it in the process that launched it."
                )
        self._in_parallel(lambda r: self.executor.cancel(self.handle(r)), [r for r in alive if self.handle(r)])

    def _cancel_intent(self, rank: int) -> bool:
        """Cancel a replica whose launcher died before its vendor had it; False if there is no such intent."""
        attempt = self.newest_attempt(rank)
        if not exists(self.store, replica_key(self.run_id, rank, attempt, "intent.json")):
            return False
        request_cancel(self.store, self.run_id, rank, attempt)  # also ends one that comes up late
        record_outcome(self.store, self.run_id, Outcome(rank, attempt, ReplicaStatus.CANCELLED, "cancelled"))
        return True

    def remove(self) -> None:
        """Delete everything the run left, here and in its store.

        Raises:
            RunExistsError: a replica still runs.
        """
        folder = folder_of_run(self.run_id, self.store.url)
        is_over = True
        with contextlib.suppress(CorruptObjectError, UnknownHandleError):  # what cannot be read can be removed
            is_over = self.status().is_terminal
        if not is_over:
            raise RunExistsError(f"Run {self.run_id!r} still runs. Cancel it first: `replicas cancel {self.run_id}`.")
        left = []
        for entry in list(self.store.list(f"{self.run_id}/")):
            try:
                self.store.delete(entry.key)
            except ValueError:  # no key of ours: somebody else put it there, by other means
                left.append(entry.key)
        forget(folder)
        if left:
            raise StoreError(
                f"Run {self.run_id!r} is removed, but for {len(left)} objects under names that no store takes, such as "
                f"{left[0][:200]!r}. Delete these with the tools of the store.",
                url=self.store.url,
            )

    # How one replica fares

    def _poll(self, rank: int) -> ReplicaStatus:
        """Ask the executor, unless the replica is known to have ended, and was not brought back since."""
        known = self._outcomes.get(rank)
        if known is not None:
            if known.status is ReplicaStatus.SUCCEEDED or self.newest_attempt(rank) == known.attempt:
                return known.status
            self._outcomes.pop(rank, None)
        handle, attempt = self.handle(rank), self.newest_attempt(rank)
        told = None if handle is None else as_status(self.executor.poll(handle))
        # After the poll: an outcome is written before its process ends.
        outcome = find_outcome(self.store, self.run_id, rank, attempt)
        if outcome is None and told in (ReplicaStatus.FAILED, ReplicaStatus.CANCELLED):
            if self.newest_attempt(rank) != attempt:
                return self._poll(rank)  # the answer was of an attempt that was begun meanwhile
            outcome = self._record_for(rank, attempt, told)
        if outcome is not None:
            self._outcomes[rank] = outcome
            return outcome.status
        if told is not None:
            return told
        started = exists(self.store, replica_key(self.run_id, rank, attempt, "started.json"))
        return ReplicaStatus.RUNNING if started else ReplicaStatus.PENDING

    def _record_for(self, rank: int, attempt: int, told: ReplicaStatus) -> Outcome:
        """Write the outcome that a stranger's replica could not: its peers need to know that it is gone."""
        (row,) = self.executor.collect([self.handle(rank)], timeout=0)
        if told is not ReplicaStatus.CANCELLED and row.get("reason") not in REASONS:
            who_says = f"{self.backend} reports it {told}"
            return record_loss(self.store, self.run_id, rank, attempt, self.world_size, who_says)
        return record_outcome(self.store, self.run_id, Outcome.of_row(rank, attempt, {**row, "status": told}))

    def _collect_missing(self) -> None:
        """Take from `collect` what the store does not have: replicas that succeeded without reaching the store."""
        missing = [rank for rank in range(self.world_size) if rank not in self._outcomes]
        if not missing:
            return
        for rank, row in zip(missing, self.executor.collect([self.handle(r) for r in missing]), strict=True):
            if as_status(row.get("status")).is_terminal:
                self._outcomes[rank] = Outcome.of_row(rank, self.newest_attempt(rank), row)

    def _state(self, rank: int) -> ReplicaState:
        status = self._poll(rank)
        outcome = self._outcomes.get(rank)
        attempt = self.newest_attempt(rank) if outcome is None else outcome.attempt  # of the same look
        beat = find_record(self.store, replica_key(self.run_id, rank, attempt, "heartbeat.json"), Beat.parse)
        age_s = None if beat is None else max(0.0, time.time() - beat.at)
        reported = {} if beat is None else dict(beat.reported)
        return ReplicaState(rank, attempt, status, outcome, age_s, reported)

    def newest_attempt(self, rank: int) -> int:
        """Return the number of a rank's newest attempt: 0 until it was resumed, or its process started twice."""
        return newest_attempt(self.store, self.run_id, rank)

    def _read_handle(self, rank: int) -> ReplicaHandle | None:
        """Read the handle of the newest attempt that has one."""
        for attempt in range(self.newest_attempt(rank), -1, -1):
            handle = read_handle(self.store, self.run_id, rank, attempt, self.backend)
            if handle is not None:
                return handle
            if exists(self.store, replica_key(self.run_id, rank, attempt, "intent.json")):
                find_handle: Any = getattr(self.executor, "find_handle", None)
                return find_handle(self.store, self.run_id, rank, attempt) if find_handle else None
        return None

    def _tail(self, rank: int, n_lines: int) -> str:
        text = last_lines(self.executor, self.handle(rank), n_lines, lambda: self._kept(rank))
        if text or not self._poll(rank).is_terminal:
            return text
        kept = self._kept(rank) or getattr(self._outcomes.get(rank), "error", None) or ""  # the backend has nothing
        return "".join(kept.splitlines(keepends=True)[-n_lines:])

    def _kept(self, rank: int) -> str:
        found = self._outcomes.get(rank) or find_outcome(self.store, self.run_id, rank, self.newest_attempt(rank))
        return found.output_tail if found else ""

    def _check_rank(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"Run {self.run_id!r} has the ranks 0 to {self.world_size - 1}, got rank={rank}.")
        return rank

    def _ask_all(self, ask: Callable[[int], T], ranks: Iterable[int]) -> list[T]:
        """Ask about several ranks: at once where each answer takes round trips, and in turn of a directory."""
        if directory_of(self.store.url) is not None:
            return [ask(rank) for rank in ranks]
        return self._in_parallel(ask, list(ranks))

    def _in_parallel(self, act: Callable[[int], T], ranks: Sequence[int]) -> list[T]:
        if len(ranks) <= 1:
            return [act(rank) for rank in ranks]
        with ThreadPoolExecutor(min(MAX_THREADS, len(ranks))) as pool:
            return list(pool.map(act, ranks))
