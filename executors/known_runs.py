"""Runs that were launched before: `attach()` finds one from any process, `list_runs()` all of them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from executors.errors import RunNotFoundError, StoreError
from executors.protocol import ServerlessExecutor
from executors.records import exists
from executors.registry import check_backend_of, check_executor, executor_class
from executors.run import Run
from executors.state import known_run_ids, locate
from executors.store import Store, store_at
from executors.store.opening import directory_of, split_address
from executors.task import RUN_ID, check_run_id


def attach(run: str, *, rendezvous: str | Path | None = None, executor: str | ServerlessExecutor | None = None) -> Run:
    """Find a run again, from any process.

    Args:
        run: the id of a run that this machine knows, or `<rendezvous url>/<run id>`.
        rendezvous: the url of its store, when `run` is an id.
        executor: what it was launched with: an executor, or a backend's name or class as `pkg.mod:Class`, which is then
            made with the options that this machine noted, else those of the record. None: the backend that its record
            names, which has to be one that is installed here.

    Raises:
        RunNotFoundError: there is no such run.
        BackendError: the executor is of another backend than the run.
    """
    url: str | None
    if rendezvous is None and ("://" in run or "/" in run):
        url, run_id = split_address(run)
    else:
        run_id = run
        url = str(rendezvous) if rendezvous is not None else locate(check_run_id(run))
    if url is None:
        import difflib

        near = difflib.get_close_matches(run_id, known_run_ids(), n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise RunNotFoundError(
            f"No run {run_id!r} is known on this machine. {hint}For a run that was launched elsewhere give its "
            f"address, as in 's3://BUCKET/PREFIX/{run_id}'."
        )
    store = _existing_store(url)
    if not exists(store, f"{check_run_id(run_id)}/run.json"):
        raise RunNotFoundError(f"No run {run_id!r} at {store.url}.")
    if executor is None:
        return Run(store, run_id)
    found = Run(store, run_id, executor=executor if isinstance(executor, str) else check_executor(executor))
    if isinstance(executor, str):
        check_backend_of(found.record, executor_class(executor))
    else:
        check_backend_of(found.record, executor)
    return found


def list_runs(rendezvous: str | Path | None = None) -> list[Run]:
    """List the runs that this machine knows of, or all in a store; oldest first."""
    if rendezvous is not None:
        store = _existing_store(rendezvous)
        keys = (entry.key.split("/") for entry in store.list(""))
        runs = [Run(store, key[0]) for key in keys if key[1:] == ["run.json"] and RUN_ID.fullmatch(key[0])]
    else:
        runs = []
        for run_id in known_run_ids():
            with contextlib.suppress(
                RunNotFoundError, StoreError, ValueError
            ):  # removed by another machine, or unreachable
                runs.append(attach(run_id))
    return sorted(runs, key=_created_at)


def _created_at(run: Run) -> float:
    try:
        return run.record.created_at
    except (RunNotFoundError, StoreError):
        return 0.0  # a power cut left a record that cannot be read, or somebody wrote one by hand


def _existing_store(url: str | Path) -> Store:
    """Open a store to look into it: a directory that is not there is not made."""
    directory = directory_of(url)
    if directory is not None and not directory.is_dir():
        raise RunNotFoundError(f"No runs at {directory.absolute()}: there is no such directory.")
    return store_at(url)
