"""Runs that are written into a store and not started, with their specs and records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from executors.settings import Settings
from executors.settings.run_spec import RunSpec
from executors.settings.settings import DEFAULTS
from executors.store import Store
from executors.task import create
from executors.task.code_package import Package
from executors.task.command import Command
from executors.task.launch_request import LaunchRequest
from executors.task.record import Placement


def create_run(
    store: Store,
    run_id: str,
    entrypoint: str | Command | Callable[..., Any],
    args: Mapping[str, Any],
    n: int,
    *,
    backend: str,
    package: Package | None = None,
    env: Mapping[str, str] | None = None,
    secret_names: Sequence[str] = (),
    seed: int | None = None,
) -> RunSpec:
    """Write a new run."""
    request = LaunchRequest.of(entrypoint, n=n, args=args, env=env, secrets=secret_names, seed=seed)
    return create.create_run(request, run_id, store, {"backend": backend}, package)


def run_spec(
    run_id: str, store_url: str, task_digest: str, world_size: int, ranks: tuple[int, ...], **more: Any
) -> RunSpec:
    """Return the `RunSpec` with which a backend starts ranks of a run.

    Args:
        more: fields of `RunSpec`, and settings by name.
    """
    settings = {name: more.pop(name) for name in DEFAULTS if name in more}
    return RunSpec(run_id, store_url, task_digest, Settings.of(n=world_size, **settings), ranks, **more)


def run_json(**changes: Any) -> dict[str, Any]:
    """Return the record of a run of two replicas on one backend, with changes.

    Args:
        changes: fields of the record, of its settings, and of its placement, each by its name; `world_size` is `n`.
    """
    n = changes.pop("world_size", changes.get("n", 2))  # in a hostile record, it may be any value
    settings = {"n": n, **{name: changes.pop(name) for name in DEFAULTS if name in changes}}
    known = {each.name for each in dataclasses.fields(Placement)} - {"ranks"}
    ranks = list(range(n)) if type(n) is int and 0 < n < 100_000 else [0, 1]
    if "placements" in changes:
        return {**run_json(n=n, **{name: settings[name] for name in settings if name != "n"}), **changes}
    place = {"backend": "local", "ranks": ranks, **{name: changes.pop(name) for name in known if name in changes}}
    whole = {
        "entrypoint": "train.py:main",
        "task_digest": "0" * 64,
        "created_at": 1.7e9,
        "created_by": "mallory@evil",
        "settings": settings,
        "placements": [place],
    }
    return {**whole, **changes}
