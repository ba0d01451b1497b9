"""Ends the jobs of a run whose store does not answer or has lost the run. Jobs are found by notes or by labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from executors.backend import Backend, EndedJobs, JobsOfRun, as_backend
from executors.errors import BackendError, CorruptObjectError, ReplicasError, RunNotFoundError, StoreError
from executors.protocol import ServerlessExecutor
from executors.registry import get_executor
from executors.registry.run_index import locate
from executors.run.job_notes import NotedJob, noted_jobs
from executors.store.url import check_run_id, split_address


def where_is(run: str, rendezvous: str | Path | None = None) -> str:
    """Return the url of a run's store, as far as this machine knows. Otherwise return the name that was given.

    Args:
        run: the id of a run, or its address.
        rendezvous: the url of its store, if `run` is an id.

    Example:
        where_is("s3://bucket/runs/brave-otter-7f3a")  # "s3://bucket/runs"
    """
    run = run.rstrip("/")
    if rendezvous is not None:
        return str(rendezvous)
    return split_address(run)[0] if "/" in run else locate(run) or run


def end_without_store(
    run: str,
    rendezvous: str | Path | None,
    executor: ServerlessExecutor | None,
    ranks: Sequence[int] | None,
    problem: StoreError | RunNotFoundError,
    on_progress: Callable[[str], None],
) -> str:
    """End the jobs of a run at its services. Return a sentence about the ended jobs.

    The launching machine has noted the jobs and the backends. On another machine the user names the backend, which
    finds the jobs by the label `replicas-run`.

    Args:
        run: the id of the run, or its address.
        rendezvous: the url of its store, if `run` is an id.
        executor: the executor that the user names. None: the backend in this machine's notes.
        ranks: the ranks. None: all ranks.
        problem: the error of the store.
        on_progress: called with a sentence if a service takes longer than a minute.

    Raises:
        StoreError, RunNotFoundError: this machine knows no job of the run, and the user names no backend. If `problem`
            is a CorruptObjectError, this error itself is raised.
        BackendError: a service did not end some jobs. The message says which, and how to end them.

    Example:
        end_without_store("brave-otter-7f3a", None, None, None, error, print)
    """
    run = run.rstrip("/")
    store_url: str | None
    if "/" in run and rendezvous is None:
        store_url, run_id = split_address(run)
    else:
        run_id, store_url = run, str(rendezvous) if rendezvous is not None else locate(run)
    check_run_id(run_id)
    noted = noted_jobs(run_id, store_url)
    backends = [as_backend(executor)] if executor is not None else backends_of(noted)
    asked = [each for each in backends if each.ends_jobs]
    if not asked:
        raise problem if isinstance(problem, CorruptObjectError) else _unknown(run_id, problem, executor)
    launched_at = max((job.launched_at for job in noted), default=None)
    told = EndedJobs()
    for each in asked:
        told += each.end_jobs(
            JobsOfRun(run_id, store_url, launched_at, None if ranks is None else tuple(ranks)), on_progress
        )
    if not told.is_complete:
        raise BackendError(f"{told.what_is_left} The store does not tell either: {problem}") from problem
    if not told.n_ended and isinstance(problem, RunNotFoundError):
        raise problem
    jobs = f"{told.n_ended} job{'s' * (told.n_ended != 1)}"
    why = "they cannot be read" if isinstance(problem, CorruptObjectError) else "its store does not answer"
    return f"Ended {jobs} of {run_id} at the service. The run's records do not say so, because {why}."


def backends_of(noted: Sequence[NotedJob]) -> list[Backend]:
    """Return the backends in this machine's notes of jobs. Other users cannot write these notes.

    Args:
        noted: the noted jobs.

    Raises:
        BackendError: a backend is not installed on this machine.

    Example:
        backends_of(noted_jobs("brave-otter-7f3a"))
    """
    found: dict[str, Backend] = {}
    for job in noted:
        name = job.executor or job.backend
        place = f"{name} {sorted(job.options.items())}"
        if place not in found:
            found[place] = as_backend(get_executor(name, job.options))
    return list(found.values())


def _unknown(run_id: str, problem: ReplicasError, executor: ServerlessExecutor | None) -> ReplicasError:
    """Return the error for a run for which this machine knows no job."""
    if executor is not None:
        how = f"Backend {executor.backend_name!r} has no jobs that it could end without the store."
    else:
        how = (
            "This machine has noted no job of the run. If the run is at a service, name it to find the jobs by their "
            f"label: replicas cancel {run_id} --backend NAME"
        )
    if isinstance(problem, RunNotFoundError):
        return problem if executor is None else RunNotFoundError(f"{problem} {how}")
    return StoreError(f"{problem} {how}", url=getattr(problem, "url", None))
