"""`run.json`: who launched what, when, and on which backend.

It names a backend, and never code: see `registry.executor_of_record`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from executors.records import (
    FAR_AHEAD,
    LONG_AGO,
    Fields,
    find_record,
    flag,
    integer,
    is_plain_number,
    json_object,
    list_of,
    nullable,
    number,
    text,
)
from executors.store import Store

MAX_WORLD_SIZE = 10_000
BACKEND_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SHA256 = re.compile(r"[0-9a-f]{64}")
CLASS_PATH = re.compile(r"[\w.]{1,200}:[\w.<>]{1,200}")  # <locals> is part of a name, too
OPTION_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
Recordable = Mapping[str, type | re.Pattern[str]]
"""The options of a backend that readers take from a record, each with its type, or the pattern of its string.

They say where replicas are and how large. What decides what runs, and what it gets to know, is not among them.
"""
ANY_SEED = 10**100  # more than anybody's generator takes


@dataclass(frozen=True, kw_only=True)
class LaunchedWith:
    """What decides what runs where. `task.json` says it, too, so that the task's digest vouches for it."""

    backend: str
    world_size: int
    entrypoint: str
    executor: str | None = None
    """The class of an executor that no installed package registers, as `module:Class`: for people, never imported."""
    executor_options: Mapping[str, Any] = field(default_factory=dict)
    """What its executor was made with, as far as a reader takes it from a record."""
    unrecorded_options: tuple[str, ...] = ()
    """The names of its other options: who resumes the run on another machine gives their values again."""
    env: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    chaos: tuple[str, ...] = ()
    gpu: str | None = None
    timeout_s: float | None = None

    @classmethod
    def parse(cls, data: Any, key: str = "task.json", url: str = "") -> LaunchedWith:
        """Read what stands under the key.

        Raises:
            CorruptObjectError: it does not say how a run was launched; the message names what of it does not fit.
        """
        fields = Fields(data, key, url)
        names = list_of(text(1000))
        return cls(
            backend=fields.take("backend", text(64, BACKEND_NAME)),
            world_size=fields.take("world_size", integer(1, MAX_WORLD_SIZE)),
            entrypoint=fields.take("entrypoint", text()),
            executor=fields.take("executor", nullable(text(400, CLASS_PATH)), None),
            executor_options=fields.take("executor_options", json_object, {}),
            unrecorded_options=fields.take("unrecorded_options", names, ()),
            env=fields.take("env", names, ()),
            secrets=fields.take("secrets", names, ()),
            chaos=fields.take("chaos", names, ()),
            gpu=fields.take("gpu", nullable(text(100)), None),
            timeout_s=fields.take("timeout_s", nullable(number(0.0, FAR_AHEAD)), None),
        )


@dataclass(frozen=True, kw_only=True)
class RunRecord(LaunchedWith):
    """What `run.json` says of a run."""

    task_digest: str
    created_at: float
    created_by: str = ""
    launcher_pid: int | None = None
    cwd: str = ""
    python: str = ""
    detach: bool = False
    seed: int | None = None
    code: Mapping[str, Any] | None = None

    @classmethod
    def parse(cls, data: Any, key: str = "run.json", url: str = "") -> RunRecord:
        """Read what stands under the key.

        Raises:
            CorruptObjectError: it is no record of a run; the message names what of it does not fit.
        """
        fields = Fields(data, key, url)
        return cls(
            **vars(LaunchedWith.parse(fields.values, key, url)),
            task_digest=fields.take("task_digest", text(64, SHA256)),
            created_at=fields.take("created_at", number(LONG_AGO, FAR_AHEAD)),
            created_by=fields.take("created_by", text(), ""),
            launcher_pid=fields.take("launcher_pid", nullable(integer(0, 2**31)), None),
            cwd=fields.take("cwd", text(), ""),
            python=fields.take("python", text(100), ""),
            detach=fields.take("detach", flag, False),
            seed=fields.take("seed", nullable(integer(-ANY_SEED, ANY_SEED)), None),
            code=fields.take("code", nullable(json_object), None),
        )


def find_run_record(store: Store, run_id: str) -> RunRecord | None:
    """Read the record of a run; None when there is none.

    Raises:
        CorruptObjectError: what stands there is no record of a run.
    """
    return find_record(store, f"{run_id}/run.json", RunRecord.parse)


def is_recordable(value: Any, expected: type | re.Pattern[str]) -> bool:
    """Tell whether an option's value may be recorded, and be taken from a record; None always may."""
    if value is None:
        return True
    if isinstance(expected, re.Pattern):
        return isinstance(value, str) and expected.fullmatch(value) is not None
    if expected is float:
        return is_plain_number(value) and value == value  # which NaN is not
    if expected is dict:
        return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())
    return isinstance(value, expected) and (expected is bool or not isinstance(value, bool))
