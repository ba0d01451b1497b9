"""Runs that are written into a store, and not started."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from executors.native import Package, RunSpec
from executors.store import Store
from executors.task import create
from executors.task.launch_request import LaunchRequest


def create_run(
    store: Store,
    run_id: str,
    entrypoint: str | Callable[..., Any],
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
    request = LaunchRequest(entrypoint=entrypoint, n=n, args=args, env=env, secrets=secret_names, seed=seed)
    return create.create_run(request, run_id, store, {"backend": backend}, package)
