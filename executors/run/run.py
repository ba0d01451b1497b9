"""A run: follow it, read its logs, cancel it and collect its results."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

from executors.attempt import Attempt
from executors.errors import (
    CorruptObjectError,
    RunExistsError,
    RunNotFoundError,
    UnknownHandleError,
)
from executors.metrics.metrics import Metrics, read_metrics
from executors.native import NativeExecutor
from executors.protocol import Outcome, ReplicaStatus, ServerlessExecutor
from executors.registry import executor_of_record
from executors.report.root_cause import raise_root_cause
from executors.run.canceller import Canceller
from executors.run.launch_hands import LaunchHands, Recipe
from executors.run.notebook import Display, in_notebook
from executors.run.observer import RECENT_S, Observer
from executors.run.outside_keeper import OutsideKeeper
from executors.run.progress import View, open_view
from executors.run.removal import remove_run
from executors.run.run_logs import Note as LogNote
from executors.run.run_logs import Ranks, RunLogs, Which
from executors.run.waiter import Waiter
from executors.run_index import Note, noted_at_launch
from executors.status import ReplicaState, RunStatus
from executors.store import Store
from executors.store.artifacts import Artifact, find_artifacts
from executors.store.url import address_of
from executors.supervision.decisions import Decision, DecisionLog
from executors.supervision.lease import LeaseHolder
from executors.task.record import RunRecord, find_run_record

log = logging.getLogger(__name__)


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
        self._launched = handles
        self.is_awaited = False
        """Whether this process has waited for the run's end, or ended it."""
        self.shows_progress = False
        """Whether waiting for it draws how far it is."""
        self._lease: LeaseHolder | None = None
        self._keeper: OutsideKeeper | None = None

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
        return self._observer.handles()

    def handle(self, rank: int) -> Any:
        """The handle of one replica; None while it has left none that this process can read."""
        return self._observer.handle(rank)

    def __repr__(self) -> str:
        return f"<Run {self.run_id!r}: {self.world_size} replicas on {self.backend!r}, {self.store.url}>"

    def _repr_html_(self) -> str:
        return self.status().to_html()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def wait(self, timeout: float | None = None, *, n: int | None = None) -> bool:
        """Wait until every replica has ended, or `n` of them; False if `timeout` seconds were over first.

        Ctrl-C leaves the run alone.
        """
        if n is not None and not 1 <= n <= self.world_size:
            raise ValueError(f"Run {self.run_id!r} has {self.world_size} replicas, got n={n}.")
        is_over = self._waiter.wait(n or self.world_size, timeout, self._view())
        if is_over and n in (None, self.world_size):
            self._settle()
        return is_over

    def as_completed(self) -> Iterator[Outcome]:
        """Yield how each replica ended as soon as it has, whose `rank` it says; ends with the run.

        A rank that is resumed meanwhile comes once more when its new attempt ends.
        """
        yield from self._waiter.as_completed(self._view())
        self._settle()

    def end_early(self, now: RunStatus, option: str) -> str | None:
        """End the run at a failure before anybody's first round, if it was launched so; return what to say, once.

        Args:
            option: what would have ended it, as the caller's users write it.
        """
        return self._waiter.end_early(now, option)

    def show(self) -> None:
        """Show the run in a cell of a notebook: status, progress and loss, renewed every second until it has ended.

        Returns at once. Any number of cells may show it.
        """
        if in_notebook():
            self._display.show()
        else:
            print(
                "replicas: Run.show() draws in a notebook. Elsewhere use launch(…, progress=True), or the command "
                f"`replicas wait {self.run_id}`.",
                file=sys.stderr,
            )

    def results(self) -> list[Any]:
        """Wait, and return what each replica's entrypoint returned, in rank order.

        When as many as `min_replicas` gave a result, it is None for the others.

        Raises:
            ReplicaError: a replica gave no result. The error is the earliest failure, with the remote traceback as its
                message; the other failures are its notes.
        """
        self.wait()
        outcomes = self.outcomes()
        n_done = sum(outcome.status is ReplicaStatus.SUCCEEDED for outcome in outcomes)
        if n_done < (self.record.min_replicas or self.world_size):
            raise_root_cause(outcomes)
        return [outcome.result for outcome in outcomes]

    def outcomes(self) -> list[Outcome]:
        """Return how each replica ended, in rank order, without waiting; those that have not are pending or running."""
        states = self._observer.look(self._observer.ranks)
        if all(state.is_over for state in states):
            self._observer.collect_missing(self._observer.ranks)
        return list(map(self._observer.ending, states))

    def status(self, *, reports: bool = True) -> RunStatus:
        """Return the state of every replica: status, and what it reported last.

        Args:
            reports: False leaves out what they reported: at a bucket that saves a request for each.
        """
        states = self._observer.look(self._observer.ranks)
        replicas = self._observer.with_reports(states) if reports else states
        return self._observer.status(replicas)

    @property
    def decisions(self) -> Sequence[Decision]:
        """What was decided on the run, as far as a look at it needed to know, oldest first."""
        return self._observer.decisions

    @property
    def is_hopeless(self) -> bool:
        """Whether, as of the last look, it was stopped or a rank given up for what comes again if nothing changes."""
        return self._observer.is_hopeless

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait between one look at the run and the next: at a bucket, requests cost."""
        return self._observer.pauses()

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
        pieces = self.log_pieces(rank, tail, follow, attempt)
        return pieces if follow else "".join(pieces)

    def log_pieces(
        self, rank: Ranks, tail: int, follow: bool, attempt: Which = None, note: LogNote = log.warning
    ) -> Iterator[str]:
        """Yield what `logs` returns, rank after rank; followed, line after line.

        Args:
            note: is given a line about each log that is not read where its replica writes to.
        """
        logs = RunLogs(self._observer, self.executor, attempt, note)
        is_one = isinstance(rank, int)
        chosen = range(self.world_size) if rank is None else [rank] if isinstance(rank, int) else rank
        ranks = [self._check_rank(r) for r in chosen]
        return logs.followed(ranks, tail, is_one=is_one) if follow else logs.tails(ranks, tail, is_one=is_one)

    def metrics(self) -> Metrics:
        """Return what the replicas measured over time, on one time line, and what became of their work."""
        return read_metrics(self.store, self.run_id, self.record)

    def artifacts(self, rank: int) -> list[Artifact]:
        """List the files that a replica kept with `save_artifact`.

        Those whose names are not relative paths, or cannot be shown, are left out; `replicas collect` names them.
        """
        return [artifact for artifact in self.all_artifacts(rank) if artifact.problem is None]

    def all_artifacts(self, rank: int) -> list[Artifact]:
        """List all objects where a replica keeps its files, also those whose names cannot be written to."""
        return find_artifacts(self.store, rank, self.newest_attempt(self._check_rank(rank)).key("artifacts/"))

    def report(self, path: str | Path) -> Path:
        """Write the run, as it is now, as one self-contained HTML page; return its path.

        Raises:
            OSError: there is no such folder, or it cannot be written to.
        """
        from executors.report.page import write_page

        return write_page(self.report_document(), Path(path))

    def report_document(self) -> dict[str, Any]:
        """Return all that the page of the run shows as one JSON document, whose floats are finite."""
        from executors.report.document import document
        from executors.run.report_subject import subject_of

        return document(subject_of(self.store, self.record, self.status(), self.metrics(), self.handles))

    def request_cancel(self) -> None:
        """Leave the cancel marker of every replica that has not ended; `cancel` also waits for their end."""
        self._canceller.request()

    def cancel(self, rank: int | None = None) -> None:
        """Cancel one replica, or all that still run; returns when they are gone. Nothing changes for the others."""
        self._canceller.cancel(None if rank is None else self._check_rank(rank))
        if rank is None:
            self._settle()

    def stop(self, within_s: float = 600.0, wait: Callable[[float], bool] | None = None) -> None:
        """End the run well; returns when its replicas are gone.

        Each ends at the next round that is adopted, or when its entrypoint looks at `replica.ending_s`. What has not
        after `within_s` seconds is ended as by a cancel. `resume` goes on from there.

        Args:
            wait: waits meanwhile, so many seconds at most; False if the run is not over then. None: as `wait` does.
        """
        self._canceller.stop(within_s, wait or self.wait)
        self._settle()

    def keep_here(
        self, recipe: Recipe, lease: LeaseHolder | None, say: Callable[[str], None] | None = None
    ) -> OutsideKeeper:
        """Let this process answer ends whose supervisors are gone, whenever it looks at the run while it waits.

        Args:
            lease: where its replicas end unless somebody renews it; it ends with the run.
            say: gets a sentence on each start that failed. None: they go to stderr.
        """
        executor = self.executor
        assert isinstance(executor, NativeExecutor)
        hands = LaunchHands(executor, recipe, say or (lambda words: print(f"replicas: {words}", file=sys.stderr)))
        log = DecisionLog(self.store, self.run_id)
        self._keeper = OutsideKeeper(log, self.record, self._observer, hands, self._canceller.end)
        self._lease = lease
        return self._keeper

    def keep(self, states: Sequence[ReplicaState]) -> float | None:
        """Answer the ends among these states, if this process keeps the run; return when to do so again, in seconds."""
        return None if self._keeper is None else self._keeper.keep(states)

    def remove(self) -> None:
        """Delete everything the run left, here and in its store.

        Raises:
            RunExistsError: a replica still runs.
        """
        with contextlib.suppress(CorruptObjectError, UnknownHandleError):  # what cannot be read can be removed
            if not self.status(reports=False).is_terminal:
                raise RunExistsError(
                    f"Run {self.run_id!r} still runs. Cancel it first: `replicas cancel {self.run_id}`."
                )
        remove_run(self.store, self.run_id)

    def newest_attempt(self, rank: int) -> Attempt:
        """Return a rank's newest attempt: its number is 0 until it was resumed, or its process started twice."""
        self._observer.update(RECENT_S)
        return self._observer.attempt(rank)

    def launched(self, rank: int) -> list[Attempt]:
        """Return a rank's attempts that were launched, oldest first: each has a log of its own."""
        self._observer.update(RECENT_S)
        return self._observer.launched(rank)

    @cached_property
    def _observer(self) -> Observer:
        return Observer(self.store, self.run_id, self.record, lambda: self.executor, self._launched)

    @cached_property
    def _waiter(self) -> Waiter:
        return Waiter(self.run_id, self.record, self._observer, self.cancel, self.keep)

    @cached_property
    def _canceller(self) -> Canceller:
        return Canceller(self.store, self.run_id, self._observer, self.backend, lambda: self.executor)

    @cached_property
    def _display(self) -> Display:
        return Display(self.status, self.pauses, self.metrics, self.report_document)

    def _settle(self) -> None:
        """The run has ended: whoever goes on finds that the cells say so."""
        self.is_awaited = True
        if self._lease is not None:
            self._lease.end()
        if "_display" in self.__dict__:
            self._display.settle()

    def _view(self) -> View | None:
        return open_view(self.run_id) if self.shows_progress else None

    def _check_rank(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"Run {self.run_id!r} has the ranks 0 to {self.world_size - 1}, got rank={rank}.")
        return rank
