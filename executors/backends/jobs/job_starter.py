"""JobStarter asks a service for jobs, and starts each of them at most once.

An intent is written before the service is called, and the handle after the call. If an answer is lost, or the launcher
dies, the job is found by its name, and no second job is started.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from executors.attempt import STALE_INTENT_S, Attempt
from executors.backends.jobs.sdk import call_each
from executors.backends.jobs.service import (
    LONGEST_PATIENCE_S,
    CancelledWhileStartingError,
    JobId,
    JobKey,
    JobService,
    JobServiceError,
    JobSpec,
    retrying,
)
from executors.errors import StoreError
from executors.protocol import ReplicaHandle
from executors.settings.run_spec import RunSpec
from executors.store.parallel import answered_within, in_threads, within
from executors.store.record_names import CANCEL, HANDLE, OUTCOME

ASKING_THREADS = 64
# The longest wait of a start for its store, during which started jobs cost money. Three waits together are less than
# two minutes: this one, `gang_start.HEAD_START_S`, and the minute after which `ending.end_jobs` names the running jobs.
STORE_S = 50.0
HEAD_START_S = 5.0  # how long the store is asked for the reason why a service has refused a job
LOOKS = 5  # the number of searches for a job after a lost answer, before the service is asked for the job again
LOOK_PAUSE_S = 1.0


@dataclass(eq=False)
class JobStart:
    """The start of the job of one rank.

    Example:
        JobStart(attempt, job).has_come
    """

    attempt: Attempt
    job: JobSpec
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set once the launch does not want this job any more."""
    is_begun: bool | None = None
    """True if this launch has begun the attempt, False if another launch has. None if this is not known yet."""
    is_asking: bool = False
    """True while a thread waits for the service to start the job, also after the launch was interrupted."""
    is_unclear: bool = False
    """True if an answer was lost, so that there may be two jobs."""
    may_exist: bool = False
    """True if the service may have the job: it was asked for it, and did not clearly reject it."""
    job_id: JobId | None = None
    handle: ReplicaHandle | None = None
    error: BaseException | None = None

    @property
    def has_come(self) -> bool:
        """True if the rank has started, by this launch or another."""
        return self.handle is not None or self.is_begun is False

    @property
    def has_to_end(self) -> bool:
        """True if this launch may have a job for the rank, which costs money."""
        return self.is_begun is not False and (self.may_exist or self.job_id is not None)

    @property
    def problem(self) -> str:
        """The reason why the rank could not be started, as a sentence."""
        kind = "Spare" if self.attempt.is_spare else "Rank"
        return f"{kind} {self.attempt.rank} could not be started: {self.error}"

    def check_not_given_up(self) -> None:
        """Stop a thread that still starts the job.

        Raises:
            JobServiceError: the launch was given up.

        Example:
            start.check_not_given_up()
        """
        if self.given_up.is_set():
            raise JobServiceError("the launch was given up", "rejected")


class JobStarter:
    """Starts the jobs of some ranks of one run, each at most once.

    Args:
        service: the service.
        run: the run, and which of its ranks.
        handle_of: makes the handle of an attempt from the id of its job.
        started: called with the jobs that the service has started and the url of the run's store, before anything else
            is done with them.
        starting: the full names of the attempts that this process is starting. A name is removed when its start has
            ended.

    Example:
        JobStarter(service, spec, handle_of=handle_of, started=keep, starting=set()).start(batch)
    """

    def __init__(
        self,
        service: JobService,
        run: RunSpec,
        *,
        handle_of: Callable[[Attempt, JobId], ReplicaHandle],
        started: Callable[[Sequence[tuple[JobKey, JobId]], str], None],
        starting: set[str],
    ) -> None:
        self._service = service
        self._run = run
        self._n = len(run.ranks)
        self._handle_of = handle_of
        self._started = started
        self._starting = starting
        self._nonce = secrets.token_hex(16)
        self._asking = threading.Lock()
        """Protects the marks `given_up` and `is_asking`. A thread holds this lock while it gives up starts. A thread
        that requests a job also holds it, from the check of `given_up` until `is_asking` is set. So no job is requested
        after its start was given up without a mark that shows the request.
        """

    def forbid(self, starts: Sequence[JobStart]) -> None:
        """Request no more jobs for these starts. Calls that already wait for the service continue.

        Args:
            starts: the starts that are given up.

        Example:
            starter.forbid(starts)
        """
        with self._asking:
            for start in starts:
                start.given_up.set()

    def wait_for(self, starts: Sequence[JobStart], limit_s: float) -> None:
        """Wait until the service has answered for all these starts, or the time has passed.

        Args:
            starts: starts that were given up.
            limit_s: how long to wait, in seconds.

        Example:
            starter.wait_for(starts, 5.0)
        """
        deadline = time.monotonic() + limit_s
        while any(start.is_asking for start in starts) and time.monotonic() < deadline:
            time.sleep(0.02)

    def start(self, batch: Sequence[JobStart]) -> None:
        """Start one rank, or all ranks of a group. An error is kept in the `error` of each start.

        Args:
            batch: one rank, or all ranks of a group that the service starts in one call.

        Example:
            starter.start([JobStart(attempt, job)])
        """
        try:
            batch[0].check_not_given_up()
            within(STORE_S, lambda: call_each(self.begin, batch, ASKING_THREADS), self._run.store_url)
            if begun := [start for start in batch if start.is_begun]:
                self._find_jobs(begun)
                within(STORE_S, lambda: call_each(self._write_handle, begun, ASKING_THREADS), self._run.store_url)
        except BaseException as error:  # noqa: BLE001 - raised where the launch waits
            for start in batch:
                if not start.has_come:
                    start.error = start.error or error
        finally:
            for start in batch:
                self._starting.discard(start.attempt.full_name)

    def begin(self, start: JobStart) -> bool:
        """Begin an attempt by creating its intent. Return False if another launcher has begun it.

        Args:
            start: the rank.

        Raises:
            StoreError: the store does not answer.

        Example:
            starter.begin(start)
        """
        if start.is_begun is None:
            takes_s = self._service.start_limit_s(start.job) + LONGEST_PATIENCE_S + self._n
            takes_s = takes_s if start.attempt.number else max(takes_s, STALE_INTENT_S)
            start.is_begun = start.attempt.create_intent(self._nonce, job=start.job.key.name, takes_s=takes_s)
        return start.is_begun

    def _write_handle(self, start: JobStart) -> None:
        assert start.job_id is not None
        handle = self._handle_of(start.attempt, start.job_id)
        # A reader may have written a handle of a second job, which `_only_one` has ended. So the handle is overwritten.
        start.attempt.create(HANDLE, handle.to_json().encode(), replaces=True)
        start.handle = handle

    def _find_jobs(self, batch: Sequence[JobStart]) -> None:
        """Ask the service for jobs until it has started them. After a lost answer, search for the jobs first."""
        for one_try in retrying(batch[0].given_up.wait, patience_s=LONGEST_PATIENCE_S):
            with one_try:
                batch[0].check_not_given_up()
                if not (missing := self._look_for(batch) if batch[0].is_unclear else batch):
                    return
                # After a lost answer, `_ask_for` does not read outcomes: a job that was not found may have written one.
                self._ask_for(missing, is_again=one_try.retry_state.attempt_number > 1 and not batch[0].is_unclear)
                if batch[0].is_unclear:
                    call_each(self._only_one, missing, ASKING_THREADS)

    def _ask_for(self, batch: Sequence[JobStart], *, is_again: bool) -> None:
        if is_again and self._have_all(batch, OUTCOME):
            if self._have_all(batch, CANCEL):
                raise CancelledWhileStartingError
            raise JobServiceError("another process recorded its end before it was started.", "rejected")
        with self._asking:  # once `is_asking` is set, a caller that gives up the start waits for the service's answer
            batch[0].check_not_given_up()
            for start in batch:
                start.may_exist = start.is_asking = True
        try:
            jobs = [start.job for start in batch]
            found = self._service.start_jobs(jobs) if self._service.starts_together else [self._service.start(*jobs)]
            for start, job_id in zip(batch, found, strict=True):
                start.job_id = job_id
            self._started(
                [(start.job.key, job_id) for start, job_id in zip(batch, found, strict=True)], self._run.store_url
            )
        except JobServiceError as error:
            for start in batch:
                start.is_unclear = start.is_unclear or error.kind == "unknown"
                start.may_exist = start.is_unclear
            if error.kind == "rejected" and self._have_all(batch, CANCEL):
                raise CancelledWhileStartingError from error
            raise
        finally:
            for start in batch:
                start.is_asking = False

    def _have_all(self, batch: Sequence[JobStart], name: str) -> bool:
        """Return True if every attempt has the record. False if the store does not answer within a few seconds."""
        with contextlib.suppress(StoreError):
            found = in_threads(lambda start: start.attempt.has(name), batch, ASKING_THREADS)
            return all(answered_within(HEAD_START_S, each, self._run.store_url) for each in found)
        return False

    def _look_for(self, batch: Sequence[JobStart]) -> Sequence[JobStart]:
        """Search several times for the jobs after an answer was lost, because the service may list a new job late.

        Returns:
            The starts for which no job was found.
        """
        for look in range(LOOKS):
            if look:
                batch[0].given_up.wait(LOOK_PAUSE_S)
                batch[0].check_not_given_up()
            found = call_each(self._only_one, batch, ASKING_THREADS)
            batch = [start for start, job_id in zip(batch, found, strict=True) if job_id is None]
            if not batch:
                break
        return batch

    def _only_one(self, start: JobStart) -> JobId | None:
        """Find the job of a rank, and end all its other jobs."""
        found = self._service.find(start.job.key)  # the list may not have the newest job yet
        if start.job_id is not None and start.job_id not in found:
            found.append(start.job_id)
        for surplus in found[1:]:
            self._service.stop(surplus)
        if found:
            start.job_id = found[0]
        return start.job_id
