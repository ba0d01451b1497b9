"""What a run left, to read: status, outcomes, logs, events, measurements, files, and its page."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

from executors.attempt import Attempt, replica_prefix
from executors.attempt.handles import page_of_job
from executors.errors import (
    BackendError,
    CorruptObjectError,
    ReplicasError,
    RunBeingRemovedError,
    RunNotFoundError,
    StoreError,
)
from executors.logs.follower import WHOLE
from executors.metrics.metrics import Metrics, read_metrics
from executors.patience import BRIEF, FOLLOWER, retry
from executors.protocol import Outcome, ReplicaStatus, ServerlessExecutor
from executors.report.events import Event, EventReader, read_warnings
from executors.restarts.decision_log import Decision, DecisionLog
from executors.restarts.lease import was_start_abandoned
from executors.run.run_index import (
    Note,
    check_is_located,
    find_removal_here,
    hold_key_of,
    noted_at_launch,
    noted_options,
    reference,
)
from executors.run.run_logs import EVERYTHING, Lines, OnUnread, Ranks, RunLogs, Which
from executors.run.run_logs import Note as LogNote
from executors.run.run_placements import GivenExecutor, RunPlacements
from executors.run.run_state_reader import RECENT_S, RunStateReader
from executors.status import FoundWarning, ReplicaState, RunStatus, name_ranks
from executors.store import Store
from executors.store.artifacts import Artifact, kept_artifacts
from executors.store.inventory import Inventory
from executors.store.run_key import find_key
from executors.store.url import address_of
from executors.task.record import RunRecord, find_run_record
from executors.task.removal_record import find_removal

START_LOOK_S = 30.0
ABANDONED = "its launcher ended before all replicas were started"
log = logging.getLogger(__name__)


class RunView:
    """A run as its records and its backend show it."""

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
        """Which backend has which rank."""

    @cached_property
    def record(self) -> RunRecord:
        """What `run.json` says: who, what, when, backend, options."""
        record = find_run_record(self.store, self.run_id)
        if record is None:
            self.check_not_removed()
            if (removal := find_removal_here(self.run_id, self.store.url)) is not None:
                raise RunBeingRemovedError(removal.describe(self.run_id, reference(self.run_id, self.store.url)))
            check_is_located(self.run_id, self.store.url)
            raise RunNotFoundError(f"No run {self.run_id!r} at {self.store.url}.")
        hold_key_of(self.run_id, self.store.url, record.key_id)  # before any record of a replica is read
        return record

    def check_not_removed(self) -> None:
        """Check that nobody has begun to delete the run.

        Raises:
            RunBeingRemovedError: `replicas rm` has begun to delete it. The message names the command that finishes.
            StoreError: the store does not answer.

        Example:
            attach("first-try").check_not_removed()
        """
        if (removal := find_removal(self.store, self.run_id)) is not None:
            raise RunBeingRemovedError(removal.describe(self.run_id, reference(self.run_id, self.store.url)))

    def about_to_start(self) -> str | None:
        """Return in a few words which replicas another process is about to start; None: no process is."""
        return self._reader.about_to_start()

    @property
    def url(self) -> str:
        """The run's address: `attach(url)` finds it from any machine that reaches its store."""
        return address_of(self.store.url, self.run_id)

    @property
    def backend(self) -> str:
        """The backend's name; of a run on several each with its replicas, as in `slurm:4,modal:4`."""
        return self.placements.backend_name

    @property
    def world_size(self) -> int:
        """How many replicas were launched; this stays the same when some are added."""
        return self.record.world_size

    @property
    def ranks(self) -> list[int]:
        """The ranks that were launched, and those that were added since."""
        self._reader.update(RECENT_S)
        return list(self._reader.ranks)

    @property
    def executor(self) -> ServerlessExecutor:
        """The executor as it was given; for an attached run, one of the backend that its record names.

        For a run on several backends, it is one executor over all of them.

        Raises:
            BackendError: that backend is not installed here. Nothing is imported because a record names it: give the
                executor to `attach`.
        """
        return self.placements.executor

    @property
    def noted(self) -> Note | None:
        """What this machine noted when it launched the task that the record names. None on other machines."""
        note = noted_at_launch(self.run_id, self.store.url)
        return note if note is not None and note.task_digest == self.record.task_digest else None

    def _noted_options(self, name: str) -> Mapping[str, Any] | None:
        if self.noted is not None and name == self.record.backend:
            return self.noted.executor_options
        return noted_options(self.run_id, self.store.url, name)

    @property
    def task_digest(self) -> str | None:
        """The sha256 of the run's task, if this machine launched it: what another one needs to resume the run."""
        note = noted_at_launch(self.run_id, self.store.url)
        return None if note is None else note.task_digest

    @property
    def handles(self) -> list[Any]:
        """The replicas' handles in rank order; None for one that left none that this process can read."""
        return self._reader.handles()

    def handle(self, rank: int) -> Any:
        """The handle of one replica; None while it has left none that this process can read."""
        return self._reader.handle(rank)

    def __repr__(self) -> str:
        try:
            about = f"{len(self.placements.ranks)} replicas on {self.backend!r}"
        except ReplicasError:  # one that cannot be read hides no other of a list that is printed
            about = "cannot be read"
        return f"<Run {self.run_id!r}: {about}, {self.store.url}>"

    def _repr_html_(self) -> str:
        return self.status().to_html()

    def outcomes(self) -> list[Outcome]:
        """Return how each replica ended, in rank order, without waiting; those that have not are pending or running."""
        states = self._reader.look()
        if all(state.is_over for state in states):
            self._reader.collect_missing(self._reader.ranks)
        return list(map(self._reader.ending, states))

    def status(self, *, reports: bool = True) -> RunStatus:
        """Return the state of every replica: status, and what it reported last.

        Args:
            reports: False leaves out what they reported: at a bucket that saves a request for each.
        """
        states = self._with_abandoned(self._reader.look())
        replicas = self._reader.with_reports(states) if reports else states
        return self._reader.status(replicas)

    def recorded_status(self) -> RunStatus:
        """Return the state of every replica from the store alone: the backend is not asked.

        A replica whose job has died without an outcome is shown as it was last.

        Raises:
            StoreError: the store cannot be read.

        Example:
            try:
                now = run.status()
            except BackendError:
                now = run.recorded_status()
        """
        return self._reader.status(self._reader.with_reports(self._reader.recorded()))

    def _with_abandoned(self, states: Sequence[ReplicaState]) -> Sequence[ReplicaState]:
        """Say of replicas that nobody starts any more that their launcher is gone; asked for once in half a minute."""
        inventory = self._reader.inventory
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
        if now >= self._start_looked_at + START_LOOK_S:
            self._start_looked_at = now
            self._start_was_abandoned = was_start_abandoned(self.store, self.run_id, time.time())
        if not self._start_was_abandoned:
            return states
        return [replace(state, doing=ABANDONED) if state.rank in waiting else state for state in states]

    @property
    def decisions(self) -> Sequence[Decision]:
        """What was decided on the run, as far as a look at it needed to know, oldest first."""
        return self._reader.decisions

    @property
    def is_permanent(self) -> bool:
        """Whether, as of the last look, it was stopped or a rank given up for what comes again if nothing changes."""
        return self._reader.is_permanent

    def pauses(self) -> Iterator[float]:
        """Yield the seconds to wait between one look at the run and the next: at a bucket, requests cost."""
        return self._reader.pauses()

    @overload
    def logs(
        self,
        rank: Ranks = None,
        tail: int = 200,
        follow: Literal[False] = False,
        *,
        attempt: Which = None,
        grep: str | None = None,
        since: float | None = None,
    ) -> str: ...

    @overload
    def logs(
        self, rank: Ranks = None, tail: int = 200, *, follow: Literal[True], attempt: Which = None,
        grep: str | None = None,
    ) -> Iterator[str]: ...  # fmt: skip

    def logs(
        self,
        rank: Ranks = None,
        tail: int = 200,
        follow: bool = False,
        *,
        attempt: Which = None,
        grep: str | None = None,
        since: float | None = None,
    ) -> str | Iterator[str]:
        """Return the last lines of one replica's output, or of several or all, each line then led by `[rank]`.

        Args:
            rank: one, some, or None: all.
            tail: how many lines of each replica; with "all" of each attempt.
            follow: return an iterator over these and all later lines instead, which ends with the run. Where a rank is
                resumed meanwhile, it goes on with the new attempt.
            attempt: the number of one, "all", or None: the newest of each rank.
            grep: only the lines in which this regular expression is found.
            since: only the lines of the last so many seconds; not for `follow`.
        """
        lines = Lines(grep=re.compile(grep) if grep else None, since=None if since is None else time.time() - since)
        pieces = self.log_pieces(rank, tail, follow, attempt, lines)
        return pieces if follow else "".join(pieces)

    def log_pieces(
        self,
        rank: Ranks,
        tail: int | None,
        follow: bool,
        attempt: Which = None,
        lines: Lines = EVERYTHING,
        note: LogNote = log.warning,
        on_unread: OnUnread | None = None,
    ) -> Iterator[str]:
        """Yield what `logs` returns, rank after rank; followed, line after line.

        Args:
            on_unread: gets each rank whose log its backend does not give while it gives others. None: `note` does.
            tail: None: all lines; of logs that are followed the last 20,000.
            lines: which ones, and how they are shown.
            note: is given a line about each log that is not read where its replica writes to.
        """
        logs = RunLogs(self._reader, attempt, lines, note, is_one=isinstance(rank, int))
        chosen = self.ranks if rank is None else [rank] if isinstance(rank, int) else rank
        ranks = [self.check_rank(r) for r in chosen]
        if follow:
            return logs.followed(ranks, WHOLE if tail is None else tail, grows=rank is None)
        return (text for _, text in logs.tails(ranks, tail, on_unread))

    def logs_by_rank(
        self,
        ranks: Sequence[int],
        tail: int | None,
        attempt: Which,
        lines: Lines,
        note: LogNote,
        on_unread: OnUnread | None = None,
    ) -> dict[int, str]:
        """Return the lines of each rank that has the attempt, led by nothing; see `log_pieces`."""
        logs = RunLogs(self._reader, attempt, lines, note, is_one=True)
        texts: dict[int, list[str]] = {}
        for rank, text in logs.tails([self.check_rank(rank) for rank in ranks], tail, on_unread):
            texts.setdefault(rank, []).append(text)
        return {rank: "".join(pieces) for rank, pieces in texts.items()}

    def whole_log(self, attempt: Attempt, on_progress: LogNote) -> Iterator[bytes]:
        """Yield all that can be had of what an attempt printed, as it was written, in pieces.

        Args:
            tell: is told why, if that is not all.
        """
        logs = RunLogs(self._reader, attempt.number, EVERYTHING, lambda words: None, is_one=True)
        return logs.whole(attempt, on_progress)

    def events(self, follow: bool = False, note: LogNote = log.warning) -> Iterator[Event]:
        """Yield what happened in the run so far, in the order of time: launches, ends, hangs, decisions.

        Args:
            follow: go on with what happens, until the run has ended.
            note: is told of each record that cannot be read.
        """
        key = self.record.key_id and find_key(self.run_id, self.record.key_id)
        decisions = DecisionLog(self.store, self.run_id, key=key)
        reader = EventReader(decisions, self.record, map_over=self._reader.map, note=note)
        for pause_s in self.pauses():
            now = retry(lambda: self.status(reports=False), FOLLOWER if follow else BRIEF, "the rendezvous")
            self._reader.share_log(decisions)
            yield from reader.new(self._reader.inventory, now)
            if not follow or now.is_terminal:
                return
            time.sleep(pause_s)

    def warnings(self, note: LogNote = log.warning) -> list[FoundWarning]:
        """Return the warnings of all attempts so far, and the warning of the run as a whole, the oldest first.

        Each text of an attempt is listed once, with its number of occurrences. The call makes one read for each attempt
        that has a warning.

        Args:
            note: called with a message for each record that cannot be read. Default: the module's log.

        Raises:
            StoreError: the store cannot be read.

        Example:
            for warning in run.warnings():
                print(warning.rank, warning.text)
        """
        now = self.status(reports=False)
        attempts = [Attempt(self.store, self.run_id, *key) for key in sorted(self.inventory.warnings)]

        def read(attempt: Attempt) -> list[FoundWarning]:
            try:
                return read_warnings(attempt)
            except CorruptObjectError as error:
                note(str(error))
                return []

        found = [each for some in self._reader.map(read, attempts) for each in some]
        found += [each for each in now.warnings if each.rank is None]
        return sorted(found, key=lambda each: each.at)

    @property
    def inventory(self) -> Inventory:
        """What the replicas have left, as of the last look."""
        return self._reader.inventory

    def metrics(self) -> Metrics:
        """Return what the replicas measured over time, on one time line, and what became of their work."""
        return read_metrics(self.store, self.run_id, self.record)

    def artifacts(self, rank: int) -> list[Artifact]:
        """List the files that a rank kept with `save_artifact`, in whichever attempt.

        Of one name it is the newest attempt's, and the newest attempt's come first. Those whose names are not relative
        paths, or cannot be shown, are left out; `replicas collect` names them.
        """
        return [artifact for artifact in self.all_artifacts(rank) if artifact.problem is None]

    def all_artifacts(self, rank: int) -> list[Artifact]:
        """List all objects where a rank keeps its files, also those whose names cannot be written to."""
        return kept_artifacts(self.store, rank, replica_prefix(self.run_id, self.check_rank(rank)))

    def model(self, *, step: int | None = None, name: str = "main", **more: Any) -> dict[str, Any]:
        """Return the model that the run has trained, after its newest round, as tensors by name.

        The model is read from the run's store alone, also while replicas train. Digests prove each object that is read.
        The trained parameters and float buffers are averages; `save_model` describes the other tensors.

            model.load_state_dict(attach("first-try").model())

        Args:
            step: take the newest round at or before this step of the run. None: the newest. Rounds older than the
                second newest snapshot are deleted.
            name: the name of the DiLoCo, as given to `DiLoCo(name=…)`. Default "main".
            more: any of three. `rounds` selects the newest round up to this number. `dtype` is "live", the default, for
                the dtypes of the model, or "float32" for the averaged values. `outer_optimizer` is the run's own outer
                optimizer, if the run has one: without it only snapshots are available.

        Raises:
            RunNotFoundError: the run has no DiLoCo of this name.
            DiLoCoError: the store no longer has this round. The message names the rounds that it has.
            ValueError: the run is signed, and this machine does not have its key.
            MissingDependencyError: torch is not installed here.
        """
        from executors.run.model_of_run import load_reader, source_of

        source = source_of(self.store, self.run_id, self.record.key_id, name)
        return dict(load_reader().read_model(source, step=step, **more).tensors)

    def save_model(self, path: str | Path, *, step: int | None = None, name: str = "main", **more: Any) -> Any:
        """Write the model that the run has trained to a safetensors file. An existing file is replaced.

            run.save_model("model.safetensors")
            model.load_state_dict(safetensors.torch.load_file("model.safetensors"))

        Frozen parameters, and buffers that are not averaged, come from one replica. The file contains them if they are
        small: at most 256 MiB at the beginning of the run, and 64 MiB of buffers later.

        Args:
            path: of the file.
            step, name, more: as for `model`.

        Returns: the content of the file, as `rounds`, `step`, `tensors`, `missing` (names of the model that the file
            does not have) and `notes`.

        Raises:
            OSError: the file cannot be written.
            RunNotFoundError, DiLoCoError, ValueError, MissingDependencyError: as `model`.
        """
        from executors.run.model_of_run import load_reader, source_of

        reader, source = load_reader(), source_of(self.store, self.run_id, self.record.key_id, name)
        found = reader.read_model(source, step=step, **more)
        reader.save_model(found, Path(path))
        return found

    def report(self, path: str | Path) -> Path:
        """Write the run, as it is now, as one self-contained HTML page; return its path.

        Raises:
            OSError: there is no such folder, or it cannot be written to.
        """
        from executors.report.page import write_page

        return write_page(self.report_document(), Path(path))

    def report_document(self) -> dict[str, Any]:
        """Return all that the page of the run shows as one JSON document, whose floats are finite."""
        from executors.report.document import Subject, document
        from executors.task.stored import read_task

        now, metrics, handles = self.status(), self.metrics(), self.handles
        task, pages, problems = None, list[str | None](), list[str]()
        events = list(self.events(note=problems.append))
        try:
            task = read_task(self.store, self.run_id).record
        except StoreError as error:
            problems.append(str(error))
        with contextlib.suppress(BackendError):  # of a backend that is not installed here, which may have no pages
            pages = list(map(page_of_job, handles))
        subject = Subject(
            url=self.url, record=self.record, task=task, now=now, metrics=metrics, events=events, pages=pages,
            problems=list(dict.fromkeys(problems)),
        )  # fmt: skip
        return document(subject)

    def newest_attempt(self, rank: int) -> Attempt:
        """Return a rank's newest attempt: its number is 0 until it was resumed, or its process started twice."""
        self._reader.update(RECENT_S)
        return self._reader.attempt(rank)

    def launched(self, rank: int) -> list[Attempt]:
        """Return a rank's attempts that were launched, oldest first: each has a log of its own."""
        self._reader.update(RECENT_S)
        return self._reader.launched(rank)

    @cached_property
    def _reader(self) -> RunStateReader:
        return RunStateReader(self.store, self.run_id, self.record, self.placements, self._launched)

    def check_rank(self, rank: int) -> int:
        """Return a rank.

        Raises:
            ValueError: the run has no such rank.
        """
        if not 0 <= rank < self.world_size and rank not in self.ranks:
            raise ValueError(f"Run {self.run_id!r} has the {name_ranks(self.ranks)}, got rank={rank}.")
        return rank
