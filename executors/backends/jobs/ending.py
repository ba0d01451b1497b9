"""`end_jobs` is the one way in which jobs are ended, by any process and for any reason.

It asks the service and never a store. All jobs are ended at the same time, so one request that hangs holds up no other.
Failing calls are repeated for as long as the service may ask to wait. After a minute the caller learns which jobs still
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
END_S = LONGEST_PATIENCE_S + 30.0  # after which a call that hangs is not waited for any more
THREADS = 32  # a cluster's head node is asked by one process for each
MAX_NAMED = 8  # jobs in one message; the others are counted


@dataclass(frozen=True, eq=False)
class _Task:
    """One question to the service."""

    name: str
    """The job that it ends, as people find it at the service. Empty: it ends what the service lists."""
    attempt: tuple[int, int] | None
    """Rank and attempt of the job that it ends. None: a spare's job, or a list."""
    job_ids: tuple[JobId, ...]
    act: Callable[[], int]
    """Returns how many jobs it ended."""


def end_jobs(
    service: JobService,
    jobs: Sequence[tuple[JobKey, JobId | None]],
    *,
    run_labels: Mapping[str, str] | None = None,
    on_progress: Callable[[str], None] = lambda words: None,
) -> EndedJobs:
    """End jobs at their service, and whatever else the service lists of them.

    Args:
        service: asks the service.
        jobs: the jobs, each with its id. None as an id: the service finds the job by its labels.
        run_labels: labels of a run. All jobs that have them and have not ended are ended, too. None: of each key in
            `jobs` the service is asked whether it has other jobs, which an answer that was lost may have left.
        on_progress: gets a sentence after a minute, if the service has not ended everything by then.

    Returns: what the service has accepted to end, and what may still run. Nothing is raised for a job that fails.

    Example:
        end_jobs(service, [(key, job_id)]).what_is_left
    """
    found_left: list[JobId] = []  # jobs that the service listed and did not end
    stopped = set[str]()  # whatever else finds the same job does not end it again

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
        told = _told(service, asked, labels, found_left)
        on_progress(f"{service.name} has not ended everything yet; trying again. {told.what_is_left}")
        wait(asked.values(), END_S - REPORT_S)
    return _told(service, asked, labels, found_left)


def _stop_of(key: JobKey, job_id: JobId, stop: Callable[[JobId], int]) -> _Task:
    attempt = None if key.is_spare else (key.rank, key.attempt)
    return _Task(key.name, attempt, (job_id,), lambda: stop(job_id))


def _told(
    service: JobService, asked: Mapping[_Task, Future[int]], run_labels: Mapping[str, str], found_left: Sequence[JobId]
) -> EndedJobs:
    """Say how far the service has come."""
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
        elif tasks:  # if a job could not be ended either, its message is enough
            problems.append(f"what {service.name} lists of this run, or would list ({problem})")
    left = [*found_left]
    left += [job_id for tasks in failed.values() for task in tasks for job_id in task.job_ids]
    run_id = run_labels.get("replicas-run", "")
    return EndedJobs(n_ended, frozenset(attempts), tuple(problems), service.commands_to_end(run_id, left))


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
