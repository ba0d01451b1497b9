"""Ends jobs at their service. Every process that ends jobs calls `end_jobs`, for whatever reason.

It asks the service and never a store. All jobs are ended at the same time, so a request that hangs delays no other. A
failing call is repeated for as long as the service may ask to wait. After a minute the caller learns which jobs still
run and how to end them. So no user pays for two minutes without a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from executors.backend import EndedJobs
from executors.backends.jobs.service import LONGEST_PATIENCE_S, JobId, JobKey, JobService, retrying
from executors.store.parallel import in_threads

REPORT_S = 60.0  # after this time the caller learns which jobs still run
END_S = LONGEST_PATIENCE_S + 30.0  # after this time a call that hangs is given up
THREADS = 32  # some clusters need a process for each request
MAX_NAMED = 8  # jobs in one message; the others are counted


@dataclass(frozen=True, eq=False)
class _Task:
    """One call to the service that ends a job, or all jobs that the service lists."""

    name: str
    """The name of the job at the service. Empty: the task ends all jobs that the service lists."""
    attempt: tuple[int, int] | None
    """The rank and the attempt of the job. None: a spare's job, or a list."""
    job_ids: tuple[JobId, ...]
    act: Callable[[], int]
    """Ends the jobs, and returns their number."""


def end_jobs(
    service: JobService,
    jobs: Sequence[tuple[JobKey, JobId | None]],
    *,
    run_labels: Mapping[str, str] | None = None,
    on_progress: Callable[[str], None] = lambda words: None,
) -> EndedJobs:
    """End jobs at their service, and other jobs that the service lists for the same attempts or run.

    If an answer of the service was lost, an attempt may have a second job. So the service is also asked for other jobs.

    Args:
        service: the service.
        jobs: the jobs, each with its id. With None as an id, the service is asked for the job.
        run_labels: the labels of a run. All jobs that have them and have not ended are ended, too. Default: the service
            is asked for other jobs of each key in `jobs`.
        on_progress: gets a sentence after a minute if the service has not ended everything by then. Default: nothing is
            reported.

    Returns:
        The jobs that the service has accepted to end, and those that may still run. A job that cannot be ended raises
        no error.

    Example:
        end_jobs(service, [(key, job_id)]).what_is_left
    """
    found_left: list[JobId] = []  # jobs that the service listed and did not end
    stopped = set[str]()  # the jobs that a task ends already, so that no other task ends them again

    def stop(job_id: JobId) -> int:
        for one_try in retrying(patience_s=LONGEST_PATIENCE_S):
            with one_try:
                service.stop(job_id)
        return 1

    def stop_all(found: Iterable[JobId]) -> int:
        others = []
        for job_id in found:
            if repr(job_id) not in stopped:
                stopped.add(repr(job_id))
                others.append(job_id)
        futures = in_threads(stop, others, THREADS)
        wait(futures)
        found_left.extend(job for job, future in zip(others, futures, strict=True) if future.exception() is not None)
        return sum(future.result() for future in futures)

    def stop_listed(ask: Callable[[], list[JobId]]) -> int:
        return stop_all(retrying(patience_s=LONGEST_PATIENCE_S)(ask))

    def stop_listed_of_run() -> int:
        assert run_labels is not None
        return stop_listed(lambda: [each.job for each in service.running_jobs(run_labels) or ()])

    stopped.update(repr(job_id) for _, job_id in jobs if job_id is not None)
    tasks = [_stop_of(key, job_id, stop) for key, job_id in jobs if job_id is not None]
    if run_labels is not None and service.lists_running:
        tasks.append(_Task("", None, (), stop_listed_of_run))
    else:
        tasks += [
            _Task("", None, (), lambda key=key: stop_listed(lambda: service.find(key)))  # type: ignore[misc]
            for key in dict.fromkeys(key for key, _ in jobs)
        ]
    labels = run_labels or (jobs[0][0].run_labels if jobs else {})
    asked = dict(zip(tasks, in_threads(lambda task: task.act(), tasks, THREADS), strict=True))
    wait(asked.values(), REPORT_S)
    if not all(future.done() for future in asked.values()):
        so_far = _report(service, asked, labels, found_left)
        on_progress(f"{service.name} has not ended everything yet; trying again. {so_far.what_is_left}")
        wait(asked.values(), END_S - REPORT_S)
    return _report(service, asked, labels, found_left)


def _stop_of(key: JobKey, job_id: JobId, stop: Callable[[JobId], int]) -> _Task:
    attempt = None if key.is_spare else (key.rank, key.attempt)
    return _Task(key.name, attempt, (job_id,), lambda: stop(job_id))


def _report(
    service: JobService, asked: Mapping[_Task, Future[int]], run_labels: Mapping[str, str], found_left: Sequence[JobId]
) -> EndedJobs:
    """Return what the service has ended so far, and what may still run."""
    n_ended, attempts = 0, set[tuple[int, int]]()
    failed: dict[str, list[_Task]] = {}
    for task, future in asked.items():
        attempts |= {task.attempt} if task.attempt is not None else set()
        if not future.done():
            failed.setdefault(f"{service.name} has not answered yet", []).append(task)
        elif (error := future.exception()) is not None:
            failed.setdefault(str(error).rstrip("."), []).append(task)
        else:
            n_ended += future.result()
    problems = []
    for problem, tasks in failed.items():
        if names := [task.name for task in tasks if task.name]:
            problems.append(f"{_names(names)} ({problem})")
        elif tasks:  # skipped if the message about a named job already reports the same problem
            problems.append(f"any other job of this run that {service.name} has ({problem})")
    left = [*found_left]
    left += [job_id for tasks in failed.values() for task in tasks for job_id in task.job_ids]
    run_id = run_labels.get("replicas-run", "")
    return EndedJobs(n_ended, frozenset(attempts), tuple(problems), service.commands_to_end(run_id, left))


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
