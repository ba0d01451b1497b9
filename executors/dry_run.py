"""What a launch would do, without doing it: every check, nothing written, nothing started."""

from __future__ import annotations

import contextlib
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from executors.errors import RunExistsError, StoreError
from executors.launching import LaunchPlan
from executors.records import exists
from executors.registry import import_path
from executors.state import NOTE, state_path
from executors.store import open_store
from executors.store.opening import address_of, directory_of
from executors.task import MASK, plan_run


def rehearse(plan: LaunchPlan) -> dict[str, Any]:
    """Check what `plan.start()` would still check, and return as JSON what it would write and ask for.

    Values of environment variables are masked.

    Raises:
        RunExistsError: the chosen run id is taken.
        StoreError: the rendezvous cannot be used.
        EntrypointError: the task cannot travel.
    """
    url = _check_store(plan)
    new = plan_run(url, plan.run_id, plan.entrypoint, plan.args, plan.n, **plan.run_options)
    if not plan.knows_runs:
        request = plan.strangers_call(url)
    elif hasattr(plan.executor, "describe_launch"):
        package = plan.run_options.get("package")
        more = {} if package is None else {"requirements": package.requirements}
        request = plan.executor.describe_launch(new.spec, gpu=plan.gpu, timeout=plan.timeout, **more)
    else:
        spec = {**asdict(new.spec), "env": dict.fromkeys(new.spec.env, MASK)}
        request = {"n_replicas": plan.n, "gpu": plan.gpu, "timeout": plan.timeout, "run": spec}
    return {
        "dry_run": True,
        "run_id": plan.run_id,
        "url": address_of(url, plan.run_id),
        "executor": import_path(plan.executor),
        "timeout_s": plan.timeout,
        "run.json": new.record,
        "task/task.json": json.loads(new.task),
        "request": request,
    }


def _check_store(plan: LaunchPlan) -> str:
    """Check the rendezvous and the run id, leaving a directory as it is; return the url."""
    known_here = state_path() / plan.run_id
    if (known_here / "run.json").is_file() or (known_here / NOTE).is_file():
        raise RunExistsError(f"Run {plan.run_id!r} exists. Choose another run id, or `replicas rm {plan.run_id}`.")
    directory = state_path() if plan.rendezvous is None else directory_of(plan.rendezvous)
    if directory is None:
        assert plan.rendezvous is not None
        store = open_store(plan.rendezvous)
        taken, url = exists(store, f"{plan.run_id}/run.json"), store.url
    else:
        _check_directory(directory.absolute())
        taken, url = (directory / plan.run_id / "run.json").is_file(), directory.absolute().as_uri()
    if taken:
        raise RunExistsError(f"Run {plan.run_id!r} exists at {url}. Choose another run id.")
    return url


def _check_directory(directory: Path) -> None:
    """Prove in a folder beside, gone afterwards, that a store could be made here and creates exclusively."""
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=nearest, prefix=".replicas-dry-run-"))
        except OSError as error:
            raise StoreError(f"Cannot use {directory.as_uri()}: {error.strerror}.", url=directory.as_uri()) from error
        open_store(Path(folder))
