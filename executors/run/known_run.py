"""What is known of a run without looking at its replicas: its record, its address, its executor."""

from __future__ import annotations

from functools import cached_property

from executors.errors import RunNotFoundError
from executors.protocol import ServerlessExecutor
from executors.registry import executor_of_record
from executors.run_index import Note, noted_at_launch
from executors.store import Store
from executors.store.url import address_of
from executors.task.record import RunRecord, find_run_record


class KnownRun:
    """A run in its store.

    Args:
        executor: a person's, or the name of its backend. None: as the record says.
    """

    def __init__(self, store: Store, run_id: str, executor: ServerlessExecutor | str | None = None) -> None:
        self.store = store
        self.run_id = run_id
        self._named_executor = executor if isinstance(executor, str) else None
        self._executor = None if isinstance(executor, str) else executor
        self.has_given_options = self._executor is not None
        """Whether a person made the executor, and so gave its options, too."""

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
