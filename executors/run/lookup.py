"""Finds existing runs: one by its id or address, or all runs of this machine or of a store."""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from executors.errors import (
    CorruptObjectError,
    ReplicasError,
    RunBeingRemovedError,
    RunNotFoundError,
    StoreError,
    did_you_mean,
)
from executors.patience import GLANCE
from executors.protocol import ServerlessExecutor
from executors.registry import check_backend_of, check_executor, executor_class
from executors.registry.run_index import (
    check_is_located,
    find_preparation,
    find_removal_here,
    known_run_ids,
    locate,
    noted_at,
)
from executors.registry.run_placements import executors_in
from executors.run.run import Run, view_of
from executors.store import Store
from executors.store.parallel import at_store, in_parallel
from executors.store.protocol import FolderStore
from executors.store.record_names import REMOVAL, RUN_RECORD
from executors.store.state_folder import state_path
from executors.store.url import (
    RUN_ID,
    check_run_id,
    directory_of,
    existing_store,
    impatient_store,
    is_near,
    split_address,
)
from executors.task.record import Placement, find_run_record
from executors.task.removal_record import find_removal


def attach(
    run: str,
    *,
    rendezvous: str | Path | None = None,
    executor: str | ServerlessExecutor | Sequence[ServerlessExecutor] | None = None,
) -> Run:
    """Find a run again, from any process.

    Args:
        run: the id of a run that this machine knows, or `<rendezvous url>/<run id>`.
        rendezvous: the url of the run's store, if `run` is an id. None: the store that this machine has noted.
        executor: the executor of the launch, or the name or class of its backend, as "modal" or "pkg.mod:Class". An
            executor made from a name gets the options that this machine noted, else the record's options. A run on
            several backends takes several executors. None: the backend in the run's record, which must be installed on
            this machine.

    Raises:
        TypeError: the run is not a string, or an object is not an executor.
        ValueError: two executors are of one backend.
        RunNotFoundError: there is no such run.
        BackendError: the executor is of another backend than the run.

    Example:
        attach("s3://bucket/runs/brave-otter-7f3a").results()
    """
    if not isinstance(run, str):
        raise TypeError(f"A run must be given by its id, or as '<rendezvous url>/<run id>', in a string, got {run!r}.")
    url: str | None
    run = run.rstrip("/")  # a shell that completes the name of a folder adds this slash
    if rendezvous is None and "/" in run:
        url, run_id = split_address(run)
        check_run_id(run_id)
    else:
        run_id = check_run_id(run)
        url = str(rendezvous) if rendezvous is not None else locate(run_id)
    if url is None:
        if preparation := find_preparation(run_id):
            raise RunNotFoundError(preparation.describe(run_id))
        raise RunNotFoundError(
            f"No run {run_id!r} is known on this machine.{did_you_mean(run_id, known_run_ids())} For a run that was "
            f"launched elsewhere give its address, as in 's3://BUCKET/PREFIX/{run_id}'."
        )
    if isinstance(executor, list | tuple):
        given = [check_executor(each) for each in executor]
        (backend, n), *_ = Counter(each.backend_name for each in given).most_common(1) or [("", 0)]
        if n > 1:
            raise ValueError(
                f"{n} of these executors are of backend {backend!r}, and the ranks of each are not known. Give one."
            )
    elif executor is not None and not isinstance(executor, str):
        check_executor(executor)
    found = Run(existing_store(url), run_id, executor=executor)
    # The run can be used without its record, at least for a removal. A caller that needs the record gets the error
    # later.
    with contextlib.suppress(CorruptObjectError, RunBeingRemovedError):
        for each in [None] if executor is None else executors_in(executor):
            placement = _placement_for(found, each)
            if each is not None:
                check_backend_of(placement, executor_class(each) if isinstance(each, str) else each)
    return found


def _placement_for(run: Run, named: str | ServerlessExecutor | None) -> Placement:
    """Return the placement of a run that fits an executor: one of the executor's backend, otherwise the first."""
    view = view_of(run)
    launched = view.record.placements
    if named is None:
        return launched[0]
    backend = getattr(executor_class(named) if isinstance(named, str) else named, "backend_name", None)
    if all(place.backend != backend for place in launched):
        view.placements.read_added()
    places = (placed.placement for placed in view.placements.placed)
    return next((place for place in places if place.backend == backend), launched[0])


def list_runs(rendezvous: str | Path | None = None) -> list[Run]:
    """List the runs that this machine knows, or all runs in a store, the oldest first.

    A known run may be in a bucket that does not answer within 5 s, or that needs a package that is not installed. Such
    a run is listed with the time of this machine's note, and its methods raise the reason. Call `attach` to try again.

    Args:
        rendezvous: the url of a store, whose runs are listed. None, the default: the runs that this machine knows.

    Raises:
        StoreError: the store cannot be listed.

    Example:
        for run in list_runs():
            print(run)
    """
    if rendezvous is not None:
        store = existing_store(rendezvous)
        there = at_store(store, functools.partial(_find_run, store), [*run_ids_in(store)])
        return sorted((run for run in there if run is not None), key=_created_at)
    run_ids: dict[str, list[str]] = {}
    found: list[Run] = []
    for run_id in known_run_ids():
        try:
            if (url := locate(run_id)) is not None:
                run_ids.setdefault(url, []).append(run_id)
        except StoreError as error:  # the folder belongs to another user, or the disk fails
            found.append(Run(cast(Store, UnreachableStore(state_path().as_uri(), error)), run_id))
    for runs in in_parallel(lambda url: _runs_at(url, run_ids[url]), [*run_ids]):
        found += runs
    return sorted(found, key=_created_at)


def _runs_at(url: str, run_ids: Sequence[str]) -> list[Run]:
    """Return the runs in a store that were not removed. If a bucket does not answer, it is not asked again."""
    try:
        store, quick = existing_store(url), impatient_store(url, GLANCE.limit_s)
    except (RunNotFoundError, ValueError):
        return []
    except StoreError as error:
        store = quick = cast(Store, UnreachableStore(url, error))

    def find(run_id: str) -> Run | None:
        run = Run(store, run_id)
        try:
            record = find_run_record(quick, run_id)
            if record is None:
                if find_removal(quick, run_id) or find_removal_here(run_id, url):
                    return run  # the run is listed, because another removal must complete it
                check_is_located(run_id, url)
                return None
            view_of(run).record = record
        except CorruptObjectError:  # the run can still be shown and removed
            pass
        except ReplicasError as error:
            return run if is_near(url) else Run(cast(Store, UnreachableStore(url, error)), run_id)
        return run

    first = find(run_ids[0])
    if first is not None and isinstance(away := view_of(first).store, UnreachableStore):
        store = quick = away
    return [run for run in (first, *at_store(store, find, run_ids[1:])) if run is not None]


def _find_run(store: Store, run_id: str) -> Run | None:
    """Return a run if it exists. If its record cannot be read, its methods raise the reason."""
    run = Run(store, run_id)
    with contextlib.suppress(StoreError):
        record = find_run_record(store, run_id)
        if record is None:
            return None if find_removal(store, run_id) is None else run
        view_of(run).record = record
    return run


class UnreachableStore:
    """Replaces a store that does not answer. Each method raises the reason."""

    def __init__(self, url: str, problem: ReplicasError) -> None:
        self.url = url
        self._problem = problem

    def __getattr__(self, name: str) -> Any:
        raise self._problem


def run_ids_in(store: Store) -> Iterator[str]:
    """Yield the ids of the runs in a store. In a directory, folders that this user may not read are included.

    A bucket may also have folders that are not runs.

    Args:
        store: the store.

    Raises:
        StoreError: the store cannot be listed.

    Example:
        [*run_ids_in(open_store("s3://bucket/runs"))]
    """
    directory = directory_of(store.url)
    if directory is None:
        if isinstance(store, FolderStore):  # a bucket without folders lists all objects of all runs
            yield from filter(RUN_ID.fullmatch, store.folders(""))
            return
        keys = (entry.key.split("/") for entry in store.list(""))
        found_ids = (key[0] for key in keys if key[1:] in ([RUN_RECORD], [REMOVAL]) and RUN_ID.fullmatch(key[0]))
        yield from dict.fromkeys(found_ids)
        return
    try:
        with os.scandir(directory) as found:
            names = sorted(each.name for each in found if each.is_dir(follow_symlinks=False))
    except OSError as error:
        raise StoreError(f"Cannot list {store.url}: {error.strerror}.", url=store.url) from error
    for name in filter(RUN_ID.fullmatch, names):
        if any(_may_exist(directory / name / record) for record in (RUN_RECORD, REMOVAL)):
            yield name


def _may_exist(path: Path) -> bool:
    """Return True if a file exists, or this user has no permission to check."""
    try:
        os.lstat(path)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _created_at(run: Run) -> float:
    with contextlib.suppress(ReplicasError):  # the record is damaged or cannot be reached
        return view_of(run).record.created_at
    return noted_at(run.run_id)
