"""The records `run.json` and `task.json`: the launch of a run with its settings, and the entrypoint with its arguments.

`run.json` names a backend, and never code that would be imported; see `registry.executor_of_record`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from executors.process import IDENTITY
from executors.settings import Settings
from executors.settings.settings import NAMES
from executors.store import Store
from executors.store.added_ranks import RANKS
from executors.store.record_names import RUN_RECORD, run_record_key
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    SHA256,
    Fields,
    Record,
    checked,
    find_record,
    integer,
    json_object,
    list_of,
    nested,
    nullable,
    number,
    text,
)
from executors.store.run_key import KEY_ID
from executors.store.url import RUN_ID

BACKEND_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CLASS_PATH = re.compile(r"[\w.]{1,200}:[\w.<>]{1,200}")  # the name of a local function contains <locals>
OPTION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class Placement(Record):
    """The ranks of a run that are on one backend, with the options and variables of their attempts."""

    backend: str = checked(text(64, BACKEND_NAME))
    ranks: tuple[int, ...] = checked(RANKS, ())
    executor: str | None = checked(nullable(text(400, CLASS_PATH)), None)
    """The class of an executor that no installed package registers, as `module:Class`. It is shown, and never imported.
    """
    executor_options: Mapping[str, Any] = checked(json_object, {})
    """The options of the placement's executor that a reader may take from a record."""
    unrecorded_options: tuple[str, ...] = checked(NAMES, ())
    """The names of the executor's other options. A user who resumes the run on another machine gives the values of
    these options again.
    """
    env: tuple[str, ...] = checked(NAMES, ())
    """The names of the environment variables. Their values are not recorded."""
    secrets: tuple[str, ...] = checked(NAMES, ())
    """The names of the secrets. Their values are not recorded."""
    gpu: str | None = checked(nullable(text(100)), None)
    timeout_s: float | None = checked(nullable(number(0.0, FAR_AHEAD)), None)
    own_task: str | None = checked(nullable(text(64, SHA256)), None)
    """The sha256 of the task with the code of these ranks. None: they run the task of the launch."""

    @property
    def name(self) -> str:
        """The name of the placement in this machine's notes on the run."""
        return self.backend


@dataclass(frozen=True, kw_only=True)
class LaunchedWith(Record):
    """The part of a launch that decides which code runs where. `task.json` has it as well, so its digest proves it."""

    entrypoint: str = checked(text())
    settings: Settings = checked(nested(Settings))
    placements: tuple[Placement, ...] = checked(list_of(nested(Placement)))
    """The placements of the launch. Each rank is in exactly one of them."""
    key_id: str | None = checked(nullable(text(8, KEY_ID)), None)
    """The id of the key of a signed run. None: the run is not signed."""
    continues: str | None = checked(nullable(text(40, RUN_ID)), None)
    """The run, in the same store, from whose newest snapshot this run continues. None: there is none."""

    @classmethod
    def parse(cls, data: Any, key: str = RUN_RECORD, url: str = "") -> Self:
        """Parse the bytes of a record. Each rank of the launch must be in exactly one placement.

        Args:
            data: the bytes.
            key: the key of the object, for the error. Default: the record of a run.
            url: the url of the store, for the error. Default: not named.

        Raises:
            CorruptObjectError: the bytes are not such a record. The message names the field.
        """
        found = super().parse(data, key, url)
        ranks = [rank for place in found.placements for rank in place.ranks]
        if sorted(ranks) != list(range(found.settings.n)) or not all(place.ranks for place in found.placements):
            raise Fields({}, key, url).refusal("'placements' have a rank twice, or not all, or too many")
        return found

    @property
    def world_size(self) -> int:
        """The number of replicas that were launched."""
        return self.settings.n

    @property
    def backend(self) -> str:
        """The backend of the launch, or the first one of several."""
        return self.placements[0].backend

    @property
    def ranks_by_placement(self) -> tuple[frozenset[int], ...]:
        """The ranks of each placement of the launch."""
        return tuple(frozenset(place.ranks) for place in self.placements)


@dataclass(frozen=True, kw_only=True)
class RunRecord(LaunchedWith):
    """The content of `run.json`: the launch of a run, with its process and time."""

    task_digest: str = checked(text(64, SHA256))
    created_at: float = checked(number(LONG_AGO, FAR_AHEAD))
    created_by: str = checked(text(), "")
    launcher_pid: int | None = checked(nullable(integer(0, 2**31)), None)
    launcher: str | None = checked(nullable(text(600, IDENTITY)), None)
    """The process that launched the run, as `identify_process` names it."""
    cwd: str = checked(text(), "")
    """The folder of the launch, for the user. The folder from which replicas get their code is in the task."""
    python: str = checked(text(100), "")
    code: Mapping[str, Any] | None = checked(nullable(json_object), None)
    origins: Mapping[str, Any] = checked(json_object, {})
    """The origin of each setting, by its name: a flag, a variable of the environment, or a file."""


@dataclass(frozen=True, kw_only=True)
class TaskRecord(Record):
    """The content of `task.json`: the entrypoint and its arguments."""

    python: str = checked(text(100))
    """The minor version of the Python that made the pickle, as in "3.11"."""
    entrypoint: str | None = checked(nullable(text()), None)
    """The name of the entrypoint. None: the entrypoint is the pickled callable, or the command."""
    command: tuple[str, ...] | None = checked(nullable(list_of(text())), None)
    """The program that each replica runs, with its arguments. None: the entrypoint is a function or a script."""
    args: Mapping[str, Any] | None = checked(nullable(json_object), None)
    arg_texts: Mapping[str, Any] = checked(json_object, {})
    """Arguments from the command line, as texts. The replica converts them by the function's annotations."""
    callable_sha256: str | None = checked(nullable(text(64, SHA256)), None)
    modules: tuple[str, ...] | None = checked(nullable(NAMES), None)
    """The modules that the pickled callable imports, without the standard library. None: not known."""
    sources: Mapping[str, Any] = checked(json_object, {})
    """The texts of the files that define the callable, for tracebacks."""
    cwd: str = checked(text(), "")
    """The folder of the launch. Empty: not known."""
    rank_env: str | None = checked(nullable(text(1000)), None)
    """The name of an additional environment variable that has the rank. None: there is none."""
    code_sha256: str | None = checked(nullable(text(64, SHA256)), None)
    """The digest of the code that replicas on other machines get. None: there is no such code."""
    requirements: tuple[str, ...] = checked(list_of(text()), ())
    pins: tuple[str, ...] = checked(list_of(text()), ())
    """The requirements of this package itself. An image that has a later version keeps it."""
    python_version: str | None = checked(nullable(text(100)), None)
    """The version of the launcher's Python. None: the replicas run the launcher's own Python."""
    torch: str | None = checked(nullable(text(100)), None)
    """The version of the launcher's torch. None: it has none, or the replicas run the launcher's own Python."""
    launched_with: LaunchedWith | None = checked(nullable(nested(LaunchedWith)), None)
    """The other values of the launch that decide which code runs where. None: the task belongs to no launch."""

    @property
    def seed(self) -> int | None:
        """The seed of the replicas' random generators. None: the id of the run is the seed."""
        return None if self.launched_with is None else self.launched_with.settings.seed

    @classmethod
    def parse(cls, data: Any, key: str = "task.json", url: str = "") -> TaskRecord:
        """Parse the bytes of a task, which must name an entrypoint, a callable or a command.

        Args:
            data: the bytes.
            key: the key of the object, for the error. Default: the file's name.
            url: the url of the store, for the error. Default: not named.

        Raises:
            CorruptObjectError: the bytes are not a task. The message names the field.
        """
        task = super().parse(data, key, url)
        if task.entrypoint is None and task.callable_sha256 is None and not task.command:
            raise Fields({}, key, url).refusal("it names neither an entrypoint nor a callable nor a command")
        return task


def find_run_record(store: Store, run_id: str) -> RunRecord | None:
    """Read the record of a run. Return None if there is none.

    Args:
        store: the store of the run.
        run_id: the run.

    Raises:
        CorruptObjectError: the object is not a record of a run.
        StoreError: the store does not answer.
    """
    return find_record(store, run_record_key(run_id), RunRecord.parse)
