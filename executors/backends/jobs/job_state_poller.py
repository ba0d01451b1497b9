"""Asks a service for the states of jobs, at a rate that every account may have."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from executors.backends.jobs.sdk import PollThrottle, TokenBucket, call_each
from executors.backends.jobs.service import ForeignJobError, JobId, JobKey, JobService, JobServiceError, JobState

MAX_THREADS = 16
BESIDE_LISTS = (0.4, 16)  # with a list every 5 s: less than 60 requests in any minute
ONE_BY_ONE = (1.6, 60)  # 540 requests in the first five minutes; Hugging Face allows a free account 1,000

log = logging.getLogger(__name__)
Place = tuple[str, str, float]
"""The store and the id of a run, and when it was launched."""


class JobStatePoller:
    """Asks a service about jobs: about all of a run in one request where the service lists jobs, else one by one.

    A job that is not asked for in a look keeps its last answer. Safe for threads.
    """

    def __init__(self, service: JobService, clock: Callable[[], float] = time.monotonic) -> None:
        self._service = service
        self._lists_jobs = type(service).states is not JobService.states
        self._runs = PollThrottle[Place](clock)
        self._one_by_one = PollThrottle[JobKey](clock)
        self._searches = PollThrottle[str](clock)
        self._budget = TokenBucket(*(BESIDE_LISTS if self._lists_jobs else ONE_BY_ONE), clock)
        self._lock = threading.Lock()
        self._jobs: dict[JobKey, JobId] = {}
        """Those that were asked for and have not ended, as records name them."""
        self._known: dict[JobKey, JobState] = {}
        self._unlisted: set[JobKey] = set()
        """Those that the last list lacked: they are asked for one by one."""
        self._verified: dict[JobKey, JobId] = {}
        """The jobs that this process started, or whose owner the service has confirmed."""

    def of(self, jobs: Mapping[JobKey, JobId]) -> dict[JobKey, JobState]:
        """Return the states of jobs that records name, as far as they are known.

        Raises:
            JobServiceError: the service refuses to answer. It is a ForeignJobError if a job is another replica's.
        """
        with self._lock:
            for key, job in jobs.items():
                if self._jobs.get(key) != job:  # new, or another one than was asked for
                    self._forget(key)
                    self._jobs[key] = job
                    self._runs.forget(_place(key))
        if self._lists_jobs:
            for place in self._runs.due({_place(key) for key in jobs}):
                self._ask_for_all(place)
        one_by_one = [key for key in jobs if not self._lists_jobs or key in self._unlisted]
        if due := self._one_by_one.due(one_by_one, self._can_pay):
            told = call_each(lambda key: self._ask(key, jobs[key]), due, MAX_THREADS)  # all, whatever is wrong with one
            for error in sorted(filter(None, told), key=lambda error: isinstance(error, ForeignJobError)):
                raise error
        with self._lock:
            return {key: self._known[key] for key in jobs if key in self._known}

    def verified(self, key: JobKey, named: JobId) -> JobId:
        """Return the job that a record names, after the service has confirmed that it runs this attempt."""
        if self._verified.get(key) != named:
            self._verified[key] = named = self._service.verify(named, key)
        return named

    def started(self, key: JobKey, job: JobId) -> None:
        """Note a job that this process started or found, so that its owner is known."""
        with self._lock:
            self._jobs[key] = self._verified[key] = job

    def forget(self, key: JobKey) -> None:
        """Leave out a job from now on: it has ended."""
        with self._lock:
            self._forget(key)

    def expire(self, key: JobKey) -> None:
        """Ask for a job at the next look: something was done to it."""
        self.forget(key)
        self._runs.forget(_place(key))

    def may_search(self, place: str) -> bool:
        """Whether to ask now for the jobs of an attempt whose launcher left no handle. A caller that gets True asks."""
        return bool(self._searches.due([place], lambda _: self._budget.take()))

    def warn(self, error: JobServiceError, of: str) -> None:
        """Raise what asking again would not mend; the rest is asked for again at a later look."""
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

    def _ask_for_all(self, place: Place) -> None:
        with self._lock:
            asked = {key: job for key, job in self._jobs.items() if _place(key) == place}
        try:
            told = self._service.states(asked)
        except JobServiceError as error:
            self.warn(error, f"run {place[1]}")
            return
        with self._lock:
            for key, job in asked.items():
                if key in told:
                    self._known[key] = told[key]
                    if self._service.states_name_ranks:
                        self._verified[key] = job
                    self._unlisted.discard(key)
                else:
                    self._unlisted.add(key)

    def _ask(self, key: JobKey, named: JobId) -> JobServiceError | None:
        """Ask for a job; return what asking again would not mend."""
        try:
            state = self._service.state(self.verified(key, named))
        except JobServiceError as error:
            if isinstance(error, ForeignJobError):
                self._one_by_one.forget(key)  # a caller that asked for several learns the owners by single requests
            if error.kind == "rejected":
                return error
            self.warn(error, f"rank {key.rank}")
            return None
        with self._lock:
            self._known[key] = state
        return None


def _place(key: JobKey) -> Place:
    return key.store_url, key.run_id, key.launched_at
