"""Deletes a run from its store and from this machine (`replicas rm`). Refuses a run that still runs.

A removal may be killed at any moment, and a later one completes it. `executors.task.removal_record` has the record that
makes this possible.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

from executors.backend import Backend, JobsLeft, JobsOfRun
from executors.errors import (
    BackendError,
    CorruptObjectError,
    ReplicasError,
    RunBeingRemovedError,
    RunExistsError,
    StoreError,
    UnknownHandleError,
    UnwritableStoreError,
)
from executors.patience import GLANCE
from executors.registry.run_index import folder_of_run, forget, is_state_dir, local_store, reference
from executors.run.job_notes import noted_jobs
from executors.run.without_store import backends_of
from executors.store import Store
from executors.store.parallel import at_store
from executors.store.record_names import removal_key, run_exists, run_record_key
from executors.store.run_key import drop_key
from executors.store.url import impatient_store
from executors.task.removal_record import (
    Removal,
    check_not_removed,
    find_removal,
    sweep_behind_removal,
    write_removal,
)
from executors.view.run_view import RunView

ENDS = ("replicas", "decisions", "added", "handles")  # folders of the records that show that a run has ended
MANY = 4096  # the number of objects in one batch of deletions
P = ParamSpec("P")
T = TypeVar("T")
R = TypeVar("R")
# the most passes over the list: a list may be older than a deletion, or a process may continue to write
MAX_PASSES = 20


def remove(run: RunView, on_progress: Callable[[str], None]) -> None:
    """Delete a run that has ended, or finish a removal that was interrupted.

    Args:
        run: the run.
        on_progress: called with a short text on the progress.

    Raises:
        RunExistsError: a replica still runs, or is about to be started.
        RunNotFoundError: the run does not exist.
        StoreError: some objects could not be deleted, or the store does not answer.
    """
    if _is_deleting(run):
        remove_files(run, backends_here(run))
        remove_run(run.store, run.run_id, on_progress)
        return
    removal = Removal.new()
    # The record is written before the replicas are checked. A resume that this check misses will then see the record.
    has_mark = _write(run.store, run.run_id, removal)
    try:
        has_ended, backends = _check_ended(run), backends_here(run)
        end_jobs_left(run, backends, may_end=has_ended)
    except BaseException:
        _withdraw(run.store, run.run_id, removal)
        raise
    removal = replace(removal, is_deleting=True)
    if has_mark:
        _mark_everywhere(run.store, run.run_id, removal)

    def mark_late() -> None:
        """Write the record after the first deletions, if a full disk had no space for it before."""
        if not has_mark:
            _mark_everywhere(run.store, run.run_id, removal)
            _check_ended(run)

    remove_files(run, backends)
    remove_run(run.store, run.run_id, on_progress, before_ends=mark_late)


def names_removal(
    view_in: Callable[[R], RunView],
) -> Callable[[Callable[Concatenate[R, P], T]], Callable[Concatenate[R, P], T]]:
    """Decorate a function of a run. If it fails because the run was deleted, its error names the removal.

    Args:
        view_in: returns the view of the run from the first argument of the function.
    """

    def decorate(act: Callable[Concatenate[R, P], T]) -> Callable[Concatenate[R, P], T]:
        @functools.wraps(act)
        def act_and_explain(run: R, /, *args: P.args, **more: P.kwargs) -> T:
            try:
                return act(run, *args, **more)
            except (ReplicasError, ValueError) as error:
                view = view_in(run)
                removed = error if isinstance(error, RunBeingRemovedError) else _removal_behind(view)
                if removed is None:
                    raise
                # The removal may have listed the run before the function wrote something.
                with contextlib.suppress(StoreError):
                    if sweep_behind_removal(view.store, view.run_id):
                        forget(folder_of_run(view.run_id, view.store.url))
                raise removed from (None if removed is error else error)

        return act_and_explain

    return decorate


def _removal_behind(run: RunView) -> RunBeingRemovedError | None:
    """Return the error for a run that is being removed or was removed.

    None if the run was not removed, or its store does not answer.
    """
    try:
        # The function may have failed because of the store. Its error must not be delayed by minutes because of this
        # question.
        store = impatient_store(run.store.url, GLANCE.limit_s)
        check_not_removed(store, run.run_id, reference(run.run_id, run.store.url))
    except RunBeingRemovedError as error:
        return error
    except StoreError:
        pass
    return None


def _is_deleting(run: RunView) -> bool:
    """Return True if a removal of the run has deleted something, or may have.

    Raises:
        RunNotFoundError: the run does not exist.
    """
    with contextlib.suppress(CorruptObjectError):  # if the removal's record is damaged, the run's own records decide
        removal = find_removal(run.store, run.run_id)
        if removal is not None and removal.is_deleting:
            return True
    if not run_exists(run.store, run.run_id):  # another removal may have ended since the record was read
        run.__dict__.pop("record", None)
    try:
        _ = run.record
    except RunBeingRemovedError:  # only the folder on this machine is left
        return True
    except CorruptObjectError:
        pass
    return False


def _check_ended(run: RunView) -> bool:
    """Check that every replica has ended.

    Return False if some states are not known, because records are damaged or missing.

    Raises:
        RunExistsError: a replica still runs, or is about to be started.
    """
    try:
        now = run.status(reports=False)
        starting = run.reader.about_to_start()
    except (CorruptObjectError, UnknownHandleError, RunBeingRemovedError):
        return False  # the user must be able to remove a damaged run
    name = reference(run.run_id, run.store.url)
    if not now.is_terminal and not run.reader.records.inventory.records:
        raise RunExistsError(
            f"Run {run.run_id!r} has started no replica yet, and only the machine of its launcher "
            f"({run.record.created_by}, process {run.record.launcher_pid}) can tell whether the launch continues. "
            f"If it does not, cancel the run first: `replicas cancel {name}`."
        )
    if not now.is_terminal:
        raise RunExistsError(f"Run {run.run_id!r} still runs. Cancel it first: `replicas cancel {name}`.")
    if starting is not None:
        raise RunExistsError(f"Run {run.run_id!r} still runs: {starting}. Cancel it first: `replicas cancel {name}`.")
    return all(replica.is_readable for replica in now.replicas)


def _write(store: Store, run_id: str, removal: Removal) -> bool:
    """Write the record.

    Return False if a full disk has no space for the record. The removal continues, because it frees space.
    """
    try:
        write_removal(store, run_id, removal)
    except UnwritableStoreError:
        return False
    return True


def _mark_everywhere(store: Store, run_id: str, removal: Removal) -> None:
    """Write the record into the run's store, and also into this machine's folder of the run if the store is
    elsewhere.
    """
    _write(store, run_id, removal)
    if folder_of_run(run_id, store.url) is not None and not is_state_dir(store.url):
        _write(local_store(), run_id, removal)


def _withdraw(store: Store, run_id: str, removal: Removal) -> None:
    """Delete the record of this removal, but not the record of another removal."""
    with contextlib.suppress(StoreError):
        found = find_removal(store, run_id)
        if found is not None and found.nonce == removal.nonce:
            store.delete(removal_key(run_id))


def end_jobs_left(run: RunView, backends: Sequence[Backend], *, may_end: bool) -> None:
    """End the jobs of an ended run that their service still lists. After the removal, no record would name them.

    Args:
        run: the run.
        backends: the backends to ask.
        may_end: True if every replica is known to have ended. False: a listed job is an error, and is not ended.

    Raises:
        RunExistsError: jobs of the run still run, and the records that would show their end cannot be read.
        BackendError: a service did not end some jobs. The message says how to end them.

    Example:
        end_jobs_left(run, backends_here(run), may_end=True)
    """
    for backend, left in _jobs_left(run, backends):
        jobs = f"{left.n} job{'s' * (left.n != 1)}"
        if not may_end:
            raise RunExistsError(
                f"The records of run {run.run_id!r} cannot be read, and {jobs} of it still run at {left.service}. End "
                f"them first: `replicas cancel {reference(run.run_id, run.store.url)}`, or {left.commands}"
            )
        _say(f"{jobs} of run {run.run_id} had not ended at {left.service}: ending them")
        told = backend.end_jobs(_jobs_of(run), _say)
        if not told.is_complete:
            raise BackendError(told.what_is_left)


def _jobs_left(run: RunView, backends: Sequence[Backend]) -> Iterator[tuple[Backend, JobsLeft]]:
    """Yield each backend whose service still lists jobs of the run.

    A service that cannot be asked is named on stderr.
    """
    for backend in backends:
        try:
            left = backend.jobs_left(_jobs_of(run))
        except BackendError as error:
            # The removal continues, because a closed account would otherwise prevent it for ever. The message names the
            # jobs: their notes are deleted, so no later command can name them.
            commands = backend.commands_to_end(run.run_id)
            look = f" Look for them yourself: {commands}" if commands else ""
            where = f"jobs of run {run.run_id} still run on {backend.backend_name!r}"
            _say(f"it is not known whether {where}: {error}{look}")
        else:
            if left.n:
                yield backend, left


def backends_here(run: RunView) -> list[Backend]:
    """Return the backends of a run that are installed on this machine.

    They come from the run's records, or from this machine's notes.

    Args:
        run: the run.

    Example:
        backends_here(view_of(attach("brave-otter-7f3a")))
    """
    found: list[Backend] = []
    try:
        run.placements.read_added()
        places = run.placements.placed
    # The records cannot be read: take the user's backend, or the backends in this machine's notes of jobs.
    except ReplicasError:
        with contextlib.suppress(BackendError, ValueError):
            return list(run.placements.given) or backends_of(noted_jobs(run.run_id, run.store.url))
        return []
    for placed in places:
        try:
            found.append(placed.backend)
        except BackendError as error:
            _say(f"jobs and files of run {run.run_id} on {placed.placement.backend!r} are not looked for: {error}")
    return list(dict.fromkeys(found))


def _jobs_of(run: RunView) -> JobsOfRun:
    """Return the names under which a service finds the jobs of a run."""
    return JobsOfRun(run.run_id, run.store.url, _launched_at(run))


def _launched_at(run: RunView) -> float | None:
    """Return the launch time of a run from its record, or from this machine's notes of jobs.

    None if it is not known.
    """
    with contextlib.suppress(ReplicasError):
        return run.record.created_at
    return max((job.launched_at for job in noted_jobs(run.run_id, run.store.url)), default=None)


def _say(words: str) -> None:
    print(f"replicas: {words}", file=sys.stderr)


def remove_files(run: RunView, backends: Sequence[Backend]) -> None:
    """Delete the files and jobs that replicas left at their backends.

    A service that cannot be asked is named on stderr.

    Args:
        run: the run.
        backends: the backends to ask.

    Example:
        remove_files(run, backends_here(run))
    """
    if (launched_at := _launched_at(run)) is None:
        return
    for backend in backends:
        try:
            backend.remove_files(run.store.url, run.run_id, launched_at)
        except BackendError as error:
            _say(f"jobs and files of run {run.run_id} on {backend.backend_name!r} were not deleted: {error}")


def withdraw_jobs(run: RunView) -> int:
    """Delete the jobs of an ended run that still wait in a queue, on all its backends. Return their number.

    Args:
        run: the run.

    Raises:
        BackendError: a service refuses the request, or does not answer.
    """
    asked = run.store.url, run.run_id, run.record.created_at
    return sum(placed.backend.withdraw_jobs(*asked) for placed in run.placements.placed)


def remove_run(
    store: Store,
    run_id: str,
    on_progress: Callable[[str], None] = lambda words: None,
    *,
    before_ends: Callable[[], None] = lambda: None,
) -> None:
    """Delete the objects of a run, and the folder that this machine has for it.

    The records that show the end of the run are deleted after the others. `run.json` is deleted when nothing else is
    left, and the record of the removal last.

    Args:
        store: the store of the run.
        run_id: the run.
        on_progress: called with a short text on the progress.
        before_ends: called before the first record that shows the end of the run is deleted.

    Raises:
        StoreError: some objects could not be deleted, or the store does not answer.
    """
    folder, record, mark = folder_of_run(run_id, store.url), run_record_key(run_id), removal_key(run_id)
    left = set[str]()
    _delete_all(store, run_id, {record, mark}, left, on_progress, before_ends)
    # A resume may find run.json and write once more. The list after the deletion of run.json finds that object.
    _delete_all(store, run_id, {mark}, left, on_progress)
    if folder is None or not is_state_dir(store.url):  # otherwise the record is the last file of the folder
        store.delete(mark)
    forget(folder)
    drop_key(store.url, run_id)  # a new run with this id may be unsigned
    if left:
        raise StoreError(
            f"Run {run_id!r} is removed, except for {len(left)} objects under names that no run has, such as "
            f"{min(left)[:200]!r}. Delete these with the tools of the rendezvous.",
            url=store.url,
        )


def _delete_all(
    store: Store,
    run_id: str,
    keep: Collection[str],
    left: set[str],
    on_progress: Callable[[str], None],
    before_ends: Callable[[], None] = lambda: None,
) -> None:
    """Delete the objects of a run except `keep`. List and delete again until nothing else is left.

    Args:
        store: the store of the run.
        run_id: the run.
        keep: the keys that are not deleted.
        left: a set that receives the names that cannot be deleted.
        on_progress: called with a short text on the progress.
        before_ends: called once, before the first record that shows the end of the run is deleted.
    """

    def delete(key: str) -> str | None:
        try:
            store.delete(key)
        except ValueError:  # the name is not a valid key, so another program created the object
            return key
        return None

    ends = tuple(f"{run_id}/{name}/" for name in ENDS)
    for number in range(MAX_PASSES):
        found = [entry.key for entry in store.list(f"{run_id}/") if entry.key not in keep and entry.key not in left]
        stages = [[key for key in found if key.startswith(ends) is is_end] for is_end in (False, True)]
        n_done = 0
        for is_end, keys in enumerate(stages):
            if is_end and number == 0:
                before_ends()
            for start in range(0, len(keys), MANY):
                on_progress(f"{n_done:,} of {len(found):,} objects")
                batch = keys[start : start + MANY]
                left.update(key for key in at_store(store, delete, batch) if key is not None)
                n_done += len(batch)
        if not found:
            return
