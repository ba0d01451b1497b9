"""Reads a run's task from its store, checks its digest, and loads its entrypoint."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from executors.errors import CorruptObjectError, EntrypointError, StoreError
from executors.patience import BRIEF, START, OutageTolerance, retry
from executors.store import Store
from executors.store.records import get_at_most
from executors.task.arguments import annotations_of, check_call, from_texts
from executors.task.command import Command
from executors.task.entrypoint import argv_of, load_entrypoint, loading, prepare_entrypoint
from executors.task.placeholders import fill
from executors.task.record import LaunchedWith, TaskRecord
from executors.task.sources import show_sources

READ_TRIES = 3
MAX_TASK_BYTES = 1 << 30  # the largest size of each object of a task, in bytes
PYTHON = "{}.{}".format(*sys.version_info)


def installed_version(distribution: str) -> str | None:
    """Return the installed version of a package without its local part, as in `2.13.0` for `2.13.0+cpu`.

    Args:
        distribution: the name of the package.

    Returns: the version. None: the package is not installed.
    """
    from importlib import metadata

    try:
        return metadata.version(distribution).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def versions_here() -> dict[str, str | None]:
    """Return the versions of Python and torch in this process, as a task records those versions for its launcher."""
    return {"python_version": sys.version.split()[0], "torch": installed_version("torch")}


def version_warning(python_version: str, torch: str | None) -> str | None:
    """Return a warning if this replica's versions differ from its launcher's, or else None.

    Args:
        python_version: the version of the launcher's Python.
        torch: the version of the launcher's torch. None: it has none.
    """
    here = _in_words(versions_here())
    there = _in_words({"python_version": python_version, "torch": torch})
    return None if here == there else f"replicas: this replica runs {here}, the launcher {there}."


def _in_words(versions: Mapping[str, str | None]) -> str:
    minor = ".".join(str(versions["python_version"]).split(".")[:2])
    return f"Python {minor} and {'torch ' + versions['torch'] if versions['torch'] else 'no torch'}"


@dataclass(frozen=True)
class StoredTask:
    """A task that was read from the store. No user code was imported or unpickled yet."""

    store: Store
    run_id: str
    record: TaskRecord
    digest: str
    """The sha256 of task.json."""
    folder: str = "task"
    """The folder of the task, below the run."""

    @property
    def launched_with(self) -> LaunchedWith:
        """The launch of the run. `run.json` has the same, but here the digest of the task proves it.

        Raises:
            CorruptObjectError: the task has no description of the launch.
        """
        if self.record.launched_with is None:
            key = f"{self.run_id}/{self.folder}/task.json"
            raise CorruptObjectError(
                f"{key!r} in {self.store.url} does not describe the launch of the run.", key=key, url=self.store.url
            )
        return self.record.launched_with

    @property
    def given_entrypoint(self) -> str | Command:
        """The entrypoint as the launch named it, or the command.

        Raises:
            CorruptObjectError: the task does not describe its launch.
        """
        return Command(self.record.command) if self.record.command else self.launched_with.entrypoint

    def read(self, name: str, digest: str | None, tolerance: OutageTolerance = BRIEF) -> memoryview:
        """Read one of the task's objects, which must have the given sha256.

        Args:
            name: the name of the object in the task's folder.
            digest: the sha256 of the object. None: the object is not checked.
            tolerance: how long to wait for a store that fails. Default: 10 s.

        Raises:
            StoreError: the object is not the one that was launched, or the store does not answer.
        """
        return _get_checked(self.store, f"{self.run_id}/{self.folder}/{name}", digest, tolerance)

    def prepare(self) -> None:
        """Compile the entrypoint's file, if it has one, for this process and the processes that it forks."""
        if self.record.entrypoint is not None:
            prepare_entrypoint(self.record.entrypoint)

    def load(self, replica: Mapping[str, object]) -> tuple[Callable[..., Any], Mapping[str, Any]]:
        """Import or unpickle the entrypoint, and return it with its arguments. `sys.argv` is set for the entrypoint.

        Exceptions of the user's module are passed on.

        Args:
            replica: the value of each placeholder in the arguments; see `fill`.

        Raises:
            StoreError: the pickle is not the one that was launched.
            EntrypointError: the entrypoint cannot be loaded in this process.
        """
        if self.record.entrypoint is not None:
            function = load_entrypoint(self.record.entrypoint)
            texts = {name: fill(str(text), replica) for name, text in self.record.arg_texts.items()}
            name = getattr(function, "__name__", self.record.entrypoint)
            given = from_texts(texts, annotations_of(function), name) if texts else {}
            args = {**fill(dict(self.record.args or {}), replica), **given}
            check_call(function, args, f"Entrypoint {self.record.entrypoint!r}")
            return function, args
        if self.record.python != PYTHON:
            raise EntrypointError(
                f"The callable was pickled by Python {self.record.python}, this replica runs {PYTHON}. "
                "Use the same version, or an importable entrypoint."
            )
        import cloudpickle

        pickled = self.read("callable.pkl", self.record.callable_sha256, START)
        with loading("the module of a callable"):
            function, args = cloudpickle.loads(pickled)
        sys.argv = argv_of(function)
        show_sources(self.record.sources)
        return function, fill(args, replica)


def read_task(
    store: Store, run_id: str, digest: str | None = None, folder: str = "task", tolerance: OutageTolerance = BRIEF
) -> StoredTask:
    """Read a run's task, and check that it is the one that was launched.

    Args:
        store: the store of the run.
        run_id: the run.
        digest: the sha256 of task.json that came with the launch. None, the default: the launch could not pass one on,
            and the task is not checked.
        folder: the folder of the task, below the run. Default: the folder of the launch.
        tolerance: how long to wait for a store that fails. Default: 10 s.

    Raises:
        StoreError: the task in the store is not the one that was launched, or the store does not answer.
    """
    key = f"{run_id}/{folder}/task.json"
    data = _get_checked(store, key, digest, tolerance)
    record = TaskRecord.parse(data, key, store.url)
    return StoredTask(store, run_id, record, hashlib.sha256(data).hexdigest(), folder)


def task_folder_of(own_task: str) -> str:
    """Return the folder of a task with its own code, below the run.

    Args:
        own_task: the sha256 of its task.json.
    """
    return f"task-{own_task[:16]}"


def _get_checked(store: Store, key: str, digest: str | None, tolerance: OutageTolerance) -> memoryview:
    """Read an object, and check its digest. After an error or a wrong digest, try again."""
    for _ in range(READ_TRIES):
        data = retry(lambda: get_at_most(store, key, MAX_TASK_BYTES), tolerance, "the task of this run")
        found = hashlib.sha256(data).hexdigest()
        if digest in (None, found):
            return data
    raise StoreError(
        f"{key!r} in {store.url} is not what was launched: its sha256 is {found}, the launch's {digest}.",
        key=key,
        url=store.url,
    )
