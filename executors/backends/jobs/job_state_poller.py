"""Asks a service for the states of jobs, at a rate that every account of the service allows."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from executors.backends.jobs.sdk import PollThrottle, TokenBucket, call_each
from executors.backends.jobs.service import ForeignJobError, JobId, JobKey, JobService, JobServiceError, JobState

MAX_THREADS = 16
# Budgets of requests for single jobs: requests per second, and requests at the same time. The first is for a service
# that also lists all jobs every 5 s. It gives less than 60 requests in any minute. The second is for a service
# without lists. It gives 540 requests in the first five minutes. Hugging Face allows a free account 1,000.
BESIDE_LISTS = (0.4, 16)
ONE_BY_ONE = (1.6, 60)

log = logging.getLogger(__name__)
RunIdentity = tuple[str, str, float]
"""The store of a run, its id, and the time of its launch."""


class JobStatePoller:
    """Asks a service for the states of jobs, and keeps the answers between requests.

    If the service lists jobs, one request asks for all jobs of a run. Otherwise each job is a request. The rate of the
    requests is limited, so a look may return an earlier answer. It is safe for threads.

    Args:
        service: the service.
        clock: returns seconds of a monotonic clock.

    Example:
        JobStatePoller(service).of({key: job_id})
    """

    def __init__(self, service: JobService, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._lists_jobs = type(service).states is not JobService.states
        self._runs = PollThrottle[RunIdentity](clock)
        self._one_by_one = PollThrottle[JobKey](clock)
        self._searches = PollThrottle[str](clock)
        self._budget = TokenBucket(*(BESIDE_LISTS if self._lists_jobs else ONE_BY_ONE), clock)
        self._lock = threading.Lock()
        self._jobs: dict[JobKey, JobId] = {}
        """The jobs that callers have asked for and that have not ended, as records name them."""
        self._known: dict[JobKey, JobState] = {}
        """The last answer about each job."""
        self._unlisted: set[JobKey] = set()
        """The jobs that the last list did not have. Each of them is a request."""
        self._verified: dict[JobKey, JobId] = {}
        """The jobs that this process started, or whose owner the service has confirmed."""

    def of(self, jobs: Mapping[JobKey, JobId]) -> dict[JobKey, JobState]:
        """Return the states of jobs, as far as they are known.

        Args:
            jobs: the jobs, with their ids as records have them.

        Raises:
            JobServiceError: the service refuses to answer. It is a ForeignJobError if a job belongs to another replica.
        """
        with self._lock:
            for key, job in jobs.items():
                if self._jobs.get(key) != job:  # a new job, or a new id for this attempt
                    self._forget(key)
                    self._jobs[key] = job
                    self._runs.forget(_run_of(key))
        if self._lists_jobs:
            for run in self._runs.due({_run_of(key) for key in jobs}):
                self._ask_for_all(run)
        one_by_one = [key for key in jobs if not self._lists_jobs or key in self._unlisted]
        if due := self._one_by_one.due(one_by_one, self._can_pay):
            # `_ask` returns errors, so that one bad job does not hide the answers about the others.
            errors = call_each(lambda key: self._ask(key, jobs[key]), due, MAX_THREADS)
            for error in sorted(filter(None, errors), key=lambda error: isinstance(error, ForeignJobError)):
                raise error
        with self._lock:
            return {key: self._known[key] for key in jobs if key in self._known}

    def verified(self, key: JobKey, named: JobId) -> JobId:
        """Return the id of a job in a record, after the service has confirmed that this job runs the attempt.

        Args:
            key: the run, the rank and the attempt.
            named: the id, as the record has it.

        Raises:
            JobServiceError: the job runs something else (ForeignJobError), or the service does not answer.
        """
        if self._verified.get(key) != named:
            self._verified[key] = named = self._service.verify(named, key)
        return named

    def started(self, key: JobKey, job: JobId) -> None:
        """Note a job that this process has started or found. It need not be verified.

        Args:
            key: the run, the rank and the attempt that the job runs.
            job: the job.
        """
        with self._lock:
            self._jobs[key] = self._verified[key] = job

    def forget(self, key: JobKey) -> None:
        """Remove an ended job from the memory of this object.

        Args:
            key: the run, the rank and the attempt of the job.
        """
        with self._lock:
            self._forget(key)

    def expire(self, key: JobKey) -> None:
        """Make the next look ask the service about a job, because the job was ended.

        Args:
            key: the run, the rank and the attempt of the job.
        """
        self.forget(key)
        self._runs.forget(_run_of(key))

    def may_search(self, full_name: str) -> bool:
        """Return True if the caller may search now for the jobs of an attempt without a handle.

        The caller must then do so.

        Args:
            full_name: the name of the attempt among all runs; see `Attempt.full_name`.
        """
        return bool(self._searches.due([full_name], lambda _: self._budget.take()))

    def warn(self, error: JobServiceError, of: str) -> None:
        """Raise an error that is permanent, and log any other error. A later look repeats the request.

        Args:
            error: the error.
            of: the run or rank that the request was about, for the log.

        Raises:
            JobServiceError: the error is permanent.
        """
        if error.kind == "rejected":
            raise error
        log.warning("%s: %s cannot report the state of its job: %s", of, self._service.name, error)

    def _forget(self, key: JobKey) -> None:
        self._jobs.pop(key, None)
        self._known.pop(key, None)
        self._unlisted.discard(key)
        self._one_by_one.forget(key)

    def _can_pay(self, key: JobKey) -> bool:
        return self._budget.take(1 if key in self._verified else 2)

    def _ask_for_all(self, run: RunIdentity) -> None:
        with self._lock:
            asked = {key: job for key, job in self._jobs.items() if _run_of(key) == run}
        try:
            states = self._service.states(asked)
        except JobServiceError as error:
            self.warn(error, f"run {run[1]}")
            return
        with self._lock:
            for key, job in asked.items():
                if key in states:
                    self._known[key] = states[key]
                    if self._service.states_name_ranks:
                        self._verified[key] = job
                    self._unlisted.discard(key)
                else:
                    self._unlisted.add(key)

    def _ask(self, key: JobKey, named: JobId) -> JobServiceError | None:
        """Ask for the state of a job. Return the error if it is permanent."""
        try:
            state = self._service.state(self.verified(key, named))
        except JobServiceError as error:
            if isinstance(error, ForeignJobError):
                # The caller asks again for each job alone, which finds the job of another run.
                self._one_by_one.forget(key)
            if error.kind == "rejected":
                return error
            self.warn(error, f"rank {key.rank}")
            return None
        with self._lock:
            self._known[key] = state
        return None


def _run_of(key: JobKey) -> RunIdentity:
    return key.store_url, key.run_id, key.launched_at
