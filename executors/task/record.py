"""`run.json`: who launched what, when, and on which backend.

It names a backend, and never code: see `registry.executor_of_record`.
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
CLASS_PATH = re.compile(r"[\w.]{1,200}:[\w.<>]{1,200}")  # <locals> is part of a name, too
OPTION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class Placement(Record):
    """Where some ranks of a run are, and what an attempt is started with there."""

    backend: str = checked(text(64, BACKEND_NAME))
    ranks: tuple[int, ...] = checked(RANKS, ())
    executor: str | None = checked(nullable(text(400, CLASS_PATH)), None)
    """The class of an executor that no installed package registers, as `module:Class`: for people, never imported."""
    executor_options: Mapping[str, Any] = checked(json_object, {})
    """What its executor was made with, as far as a reader takes it from a record."""
    unrecorded_options: tuple[str, ...] = checked(NAMES, ())
    """The names of its other options: who resumes the run on another machine gives their values again."""
    env: tuple[str, ...] = checked(NAMES, ())
    secrets: tuple[str, ...] = checked(NAMES, ())
    gpu: str | None = checked(nullable(text(100)), None)
    timeout_s: float | None = checked(nullable(number(0.0, FAR_AHEAD)), None)
    own_task: str | None = checked(nullable(text(64, SHA256)), None)
    """The sha256 of the task with the code of these ranks. None: they run that of the launch."""

    @property
    def name(self) -> str:
        """What this machine notes it under."""
        return self.backend


@dataclass(frozen=True, kw_only=True)
class LaunchedWith(Record):
    """What decides what runs where. `task.json` holds it, too, so that the task's digest proves it."""

    entrypoint: str = checked(text())
    settings: Settings = checked(nested(Settings))
    placements: tuple[Placement, ...] = checked(list_of(nested(Placement)))
    """Where the ranks of the launch are: each rank is at one of them."""
    key_id: str | None = checked(nullable(text(8, KEY_ID)), None)
    """Which key a signed run has."""
    continues: str | None = checked(nullable(text(40, RUN_ID)), None)
    """The run, in the same store, from whose newest snapshot this one continues."""

    @classmethod
    def parse(cls, data: Any, key: str = RUN_RECORD, url: str = "") -> Self:
        """Parse what the store holds under the key. Each rank of the launch is at one placement.

        Raises:
            CorruptObjectError: it is not such a record; the message names what of it does not fit.
        """
        found = super().parse(data, key, url)
        ranks = [rank for place in found.placements for rank in place.ranks]
        if sorted(ranks) != list(range(found.settings.n)) or not all(place.ranks for place in found.placements):
            raise Fields({}, key, url).refusal("'placements' have a rank twice, or not all, or too many")
        return found

    @property
    def world_size(self) -> int:
        """How many replicas were launched."""
        return self.settings.n

    @property
    def backend(self) -> str:
        """The backend of the launch; the first of several."""
        return self.placements[0].backend

    @property
    def ranks_by_placement(self) -> tuple[frozenset[int], ...]:
        """The ranks of each placement of the launch."""
        return tuple(frozenset(place.ranks) for place in self.placements)


@dataclass(frozen=True, kw_only=True)
class RunRecord(LaunchedWith):
    """What `run.json` holds: how a run was launched, by whom, and when."""

    task_digest: str = checked(text(64, SHA256))
    created_at: float = checked(number(LONG_AGO, FAR_AHEAD))
    created_by: str = checked(text(), "")
    launcher_pid: int | None = checked(nullable(integer(0, 2**31)), None)
    launcher: str | None = checked(nullable(text(600, IDENTITY)), None)
    """The process that launched the run, as `identify_process` names it."""
    cwd: str = checked(text(), "")
    """For people. The folder from which replicas get their code is in the task."""
    python: str = checked(text(100), "")
    code: Mapping[str, Any] | None = checked(nullable(json_object), None)
    origins: Mapping[str, Any] = checked(json_object, {})
    """Where each setting comes from, by its name: a flag, a variable of the environment, a file."""


@dataclass(frozen=True, kw_only=True)
class TaskRecord(Record):
    """What `task.json` says: what to call, and with what."""

    python: str = checked(text(100))
    """The minor version that a pickle is of."""
    entrypoint: str | None = checked(nullable(text()), None)
    """None: the pickled callable."""
    args: Mapping[str, Any] | None = checked(nullable(json_object), None)
    arg_texts: Mapping[str, Any] = checked(json_object, {})
    """Those of the arguments that a command line gave, as it gave them: the function's annotations say what they are.
    """
    callable_sha256: str | None = checked(nullable(text(64, SHA256)), None)
    modules: tuple[str, ...] | None = checked(nullable(NAMES), None)
    """Those that the pickled callable imports, without Python's own. None: nobody noted them."""
    sources: Mapping[str, Any] = checked(json_object, {})
    """The text of the files that the callable was defined in, for tracebacks."""
    cwd: str = checked(text(), "")
    """The folder of the launch; empty: nobody noted it."""
    rank_env: str | None = checked(nullable(text(1000)), None)
    """The name of one more environment variable for the rank."""
    code_sha256: str | None = checked(nullable(text(64, SHA256)), None)
    """Of the code that replicas on other machines get. None: there are none."""
    requirements: tuple[str, ...] = checked(list_of(text()), ())
    pins: tuple[str, ...] = checked(list_of(text()), ())
    """Those of the requirements that are ours: an image that has a later version keeps it."""
    python_version: str | None = checked(nullable(text(100)), None)
    """The launcher's; None: the replicas have the launcher's Python."""
    torch: str | None = checked(nullable(text(100)), None)
    launched_with: LaunchedWith | None = checked(nullable(nested(LaunchedWith)), None)
    """What else decides what runs where. None: a task of no launch, which is not resumed."""

    @property
    def seed(self) -> int | None:
        """What the replicas' generators are seeded from. None: the run id."""
        return None if self.launched_with is None else self.launched_with.settings.seed

    @classmethod
    def parse(cls, data: Any, key: str = "task.json", url: str = "") -> TaskRecord:
        """Parse what the store holds under the key; it has to name an entrypoint, or a callable."""
        task = super().parse(data, key, url)
        if task.entrypoint is None and task.callable_sha256 is None:
            raise Fields({}, key, url).refusal("it names neither an entrypoint nor a callable")
        return task


def find_run_record(store: Store, run_id: str) -> RunRecord | None:
    """Read the record of a run; None when there is none.

    Raises:
        CorruptObjectError: it is not a record of a run.
    """
    return find_record(store, run_record_key(run_id), RunRecord.parse)
