"""GangStart: starts the replicas of a run as jobs of a service, each at most once: all of them, or as many as it needs.

An intent is created before the service is called and the handle is written after, so that a job whose answer was lost,
or whose launcher died, is found by its name instead of being started again. A launch leaves attempts alone that another
launcher began: were it refused as a whole, two that resume a run at once could each end what the other has begun.
"""

from __future__ import annotations

import atexit
import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass, field, replace

from executors.attempt import STALE_INTENT_S, Attempt
from executors.backends.jobs.sdk import call_each
from executors.backends.jobs.service import (
    LONGEST_PATIENCE_S,
    CancelledWhileStartingError,
    Job,
    JobId,
    JobService,
    JobServiceError,
    retrying,
    stop_others,
)
from executors.errors import LaunchError, ReplicasError, StoreError
from executors.native import RunSpec
from executors.protocol import ReplicaHandle, ReplicaStatus
from executors.store.parallel import in_threads
from executors.store.url import impatient_store

MAX_THREADS = 256  # a call may block until its job is scheduled, so each rank has its own
SWEEP_S, LONGEST_SWEEP_S = 1.0, 10.0
SWEEP_THREADS, ASKING_THREADS = 16, 64
LOOKS = 5  # for a job that an unknown answer may have left, before the service is asked for it again
LOOK_PAUSE_S = 1.0
CLOSE_S = 5.0  # how long the end of the process waits for calls that were interrupted
TEND_S = 5.0  # between two looks at a run that replicas may still join


@dataclass(eq=False)
class _Start:
    """One rank on its way."""

    attempt: Attempt
    job: Job
    given_up: threading.Event = field(default_factory=threading.Event)
    is_begun: bool | None = None
    """Whether this launch began the attempt; False: another one did. None: not known yet."""
    is_going: bool = False
    """Whether a thread is starting it, also one that an interrupted `run` does not know of."""
    is_unclear: bool = False
    """Whether an answer was lost, so that there may be two jobs."""
    may_exist: bool = False
    """Whether the service may have the job: it was asked for it, and did not reject it without doubt."""
    job_id: JobId | None = None
    handle: ReplicaHandle | None = None
    error: BaseException | None = None

    @property
    def has_come(self) -> bool:
        """Whether the rank is started, by this launch or another."""
        return self.handle is not None or self.is_begun is False

    @property
    def problem(self) -> str:
        what = "Spare" if self.attempt.is_spare else "Rank"
        return f"{what} {self.attempt.rank} could not be started: {self.error}"

    def check_not_given_up(self) -> None:
        if self.given_up.is_set():
            raise JobServiceError("the launch was given up", "rejected")


class GangStart:
    """The start of some ranks of one run.

    Args:
        handle_of: makes the handle of an attempt from the id of its job.
        starting: gets the places of these attempts, each for as long as this launch may be starting it.
        tell: gets a few words whenever one more is started.
    """

    def __init__(
        self,
        service: JobService,
        backend: str,
        run: RunSpec,
        jobs: Sequence[tuple[Attempt, Job]],
        *,
        handle_of: Callable[[Attempt, JobId], ReplicaHandle],
        starting: set[str],
        tell: Callable[[str], None],
    ) -> None:
        self._service = service
        self._backend = backend
        self._run = run
        self._starts = [_Start(attempt, job) for attempt, job in jobs]
        self._batches = [self._starts] if service.starts_together else [[start] for start in self._starts]
        self._needed = min(run.min_replicas or len(jobs), len(jobs))
        self._handle_of = handle_of
        self._starting = starting
        self._tell = tell
        self._nonce = secrets.token_hex(16)

    def run(self) -> list[ReplicaHandle]:
        """Start every job at the same time, and return the handles in the order of the jobs.

        Those of attempts that another launcher began are left out; and with `min_replicas` those that do not come in
        time, which join later unless the launch is detached.

        Raises:
            LaunchError: too few could be started; the others were ended, or never begun.
        """
        self._starting.update(start.attempt.place for start in self._starts)
        try:
            futures = in_threads(self._start, self._batches, MAX_THREADS)
            self._wait_for_enough(dict(zip(futures, self._batches, strict=True)))
            failed = [start for start in self._starts if start.error]
            late = [start for start in self._starts if not start.has_come and not start.error]
            if len(self._starts) - len(failed) - len(late) < self._needed:
                self._refuse(failed, len(late))
            self._end_doubles()
            self._go_on_without(failed, late)
        except LaunchError:
            raise
        except BaseException:  # Ctrl-C, perhaps before every job was handed to a thread
            self._starting.difference_update(start.attempt.place for start in self._starts)
            self._give_up(self._starts, "the launch was interrupted")
            raise
        return [start.handle for start in self._starts if start.handle is not None]

    def _wait_for_enough(self, batches: Mapping[Future[None], Sequence[_Start]]) -> None:
        """Wait until all have come, or as many have failed as makes it useless to wait, or the time is over."""
        n, n_came, n_failed = len(self._starts), 0, 0
        self._tell(f"0 of {n} started")
        within_s = None if self._run.min_replicas is None else min(self._run.gather_s, threading.TIMEOUT_MAX)
        with contextlib.suppress(TimeoutError):
            for future in as_completed(batches, within_s):
                errors = [start.error for start in batches[future] if start.error]
                n_came, n_failed = n_came + len(batches[future]) - len(errors), n_failed + len(errors)
                if not errors:
                    self._tell(f"{n_came} of {n} started")
                elif n - n_failed < self._needed or not isinstance(errors[0], (ReplicasError, OSError)):
                    return

    def _refuse(self, failed: Sequence[_Start], n_late: int) -> None:
        """End everything, and raise why."""
        n, cause = len(self._starts), failed[0] if failed else None
        if cause is None:
            what = f"started {n - n_late} of {n} replicas within {self._run.gather_s:g} s"
        else:
            number, run = cause.attempt.rank, self._run
            of = f"spare {number}" if run.is_of_spares else f"replica {number} of {run.world_size}"
            if self._service.starts_together and len(failed) == n > 1:
                of = f"any of {n} {'spares' if run.is_of_spares else 'replicas'}, which start together"
            what = f"could not start {of}: {str(cause.error).rstrip('.')}"
        if self._needed < n:
            what += f"; at least {self._needed} of {n} were asked for"
        left = self._give_up(self._starts, f"the backend {what}" if cause is None else cause.problem)
        error = None if cause is None else cause.error
        if error is not None and not isinstance(error, (ReplicasError, OSError)):
            raise error
        raise LaunchError(
            f"Backend {self._backend!r} {what}. Those already started were ended.{left}",
            rank=None if cause is None else cause.attempt.rank,
            cancelled=isinstance(error, CancelledWhileStartingError),
        ) from error

    def _end_doubles(self) -> None:
        """End the second job of each rank that has two: its list was late when it was looked at."""
        for start in self._starts:
            if start.is_unclear and start.job_id is not None:
                with contextlib.suppress(JobServiceError):  # then it is ended with the replica
                    stop_others(self._service, start.job.key, start.job_id)

    # With fewer than all

    def _go_on_without(self, failed: Sequence[_Start], late: Sequence[_Start]) -> None:
        """Give up the ranks that failed; those that have not come may join, as long as this process lives."""
        n, n_came = len(self._starts), len(self._starts) - len(failed) - len(late)
        for start in failed:
            _say(start.problem)
        self._give_up(failed, "it could not be started")
        if not late:
            return
        if self._run.detach:
            when = f"within {self._run.gather_s:g} s, and nobody waits for them after a detached launch"
            _say(f"started with {n_came} of {n} replicas; {len(late)} did not come {when}.")
            self._give_up_late(late, f"it did not come {when}")
            return
        _say(f"started with {n_came} of {n} replicas; {len(late)} may still join.")
        atexit.register(self._close, late)
        threading.Thread(target=self._tend, args=(late,), name="replicas-join", daemon=True).start()

    def _tend(self, late: Sequence[_Start]) -> None:
        """Give up the late ranks that fail, and all of them once the others have ended."""
        while late := [start for start in late if not start.has_come]:
            if failed := [start for start in late if start.error]:
                self._give_up(failed, "it could not be started")
                late = [start for start in late if not start.error]
            with contextlib.suppress(StoreError):
                if late and self._others_have_ended(late):
                    self._give_up_late(late, "the others have ended before it came")
                    break
            time.sleep(TEND_S)
        atexit.unregister(self._close)

    def _others_have_ended(self, late: Sequence[_Start]) -> bool:
        store, run, missing = late[0].attempt.store, self._run, {start.attempt.rank for start in late}
        ranks = (rank for rank in range(run.world_size) if rank not in missing)
        return all(Attempt(store, run.run_id, rank).newest().outcome() is not None for rank in ranks)

    def _give_up_late(self, late: Sequence[_Start], why: str) -> None:
        for start in late:
            start.error = start.error or JobServiceError(why, "rejected")
        self._give_up(late, why)

    def _close(self, late: Sequence[_Start]) -> None:
        """Leave word that nobody starts these any more; one that comes up all the same ends."""
        for start in late:
            start.given_up.set()
        with contextlib.suppress(Exception):
            for start in late:
                if not start.has_come:
                    attempt = replace(start.attempt, store=impatient_store(self._run.store_url, CLOSE_S))
                    attempt.abandon(JobServiceError("its launcher has ended before it came", "rejected"))
        with contextlib.suppress(Exception):  # after it: a start that succeeds all the same finds the marker
            self._service.interrupt_starts()
        self._wait_for(late, CLOSE_S)

    # Starting

    def _start(self, batch: Sequence[_Start]) -> None:
        """Start one rank, or all of a group."""
        for start in batch:
            start.is_going = True
        try:
            batch[0].check_not_given_up()
            call_each(self._begin, batch, ASKING_THREADS)
            if begun := [start for start in batch if start.is_begun]:
                self._find_jobs(begun)
                call_each(self._write_handle, begun, ASKING_THREADS)
        except BaseException as error:  # noqa: BLE001 - raised where the launch waits
            for start in batch:
                if not start.has_come:
                    start.error = start.error or error
        finally:
            for start in batch:
                start.is_going = False
                self._starting.discard(start.attempt.place)

    def _begin(self, start: _Start) -> bool:
        """Begin an attempt by creating its intent; False if another launcher has begun it."""
        if start.is_begun is None:
            takes_s = self._service.start_limit_s(start.job) + LONGEST_PATIENCE_S + len(self._starts)
            takes_s = takes_s if start.attempt.number else max(takes_s, STALE_INTENT_S)
            start.is_begun = start.attempt.begin(self._nonce, job=start.job.key.name, takes_s=takes_s)
        return start.is_begun

    def _write_handle(self, start: _Start) -> None:
        assert start.job_id is not None
        handle = self._handle_of(start.attempt, start.job_id)
        # Overwritten: a reader may have written a handle meanwhile, of a job that `_only_one` has ended since.
        start.attempt.store.put(start.attempt.key("handle.json"), handle.to_json().encode())
        start.handle = handle

    def _find_jobs(self, batch: Sequence[_Start]) -> None:
        """Ask for jobs until the service has them; look for them first whenever an answer left that unknown."""
        for one_try in retrying(batch[0].given_up.wait, patience_s=LONGEST_PATIENCE_S):
            with one_try:
                batch[0].check_not_given_up()
                if not (missing := self._look_for(batch) if batch[0].is_unclear else batch):
                    return
                # Where an answer was lost, an outcome may be that of the job which is not found yet.
                self._ask_for(missing, is_again=one_try.retry_state.attempt_number > 1 and not batch[0].is_unclear)
                if batch[0].is_unclear:
                    call_each(self._only_one, missing, ASKING_THREADS)

    def _ask_for(self, batch: Sequence[_Start], *, is_again: bool) -> None:
        for start in batch:
            start.may_exist = True
        try:
            if is_again and all(call_each(lambda start: start.attempt.has("outcome.json"), batch, ASKING_THREADS)):
                raise JobServiceError("somebody recorded its end before it was started.", "rejected")
            jobs = [start.job for start in batch]
            found = self._service.start_jobs(jobs) if self._service.starts_together else [self._service.start(*jobs)]
        except JobServiceError as error:
            for start in batch:
                start.is_unclear = start.is_unclear or error.kind == "unknown"
                start.may_exist = start.is_unclear
            if error.kind == "rejected" and all(start.attempt.has("cancel.json") for start in batch):
                raise CancelledWhileStartingError from error
            raise
        for start, job_id in zip(batch, found, strict=True):
            start.job_id = job_id

    def _look_for(self, batch: Sequence[_Start]) -> Sequence[_Start]:
        """Look for jobs that a lost answer may have left, for a while: what was made just now may be listed late.

        Returns: those that have none.
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

    def _only_one(self, start: _Start) -> JobId | None:
        """Find the job of a rank, and end any beyond the first; a list may lack the one that was made just now."""
        found = self._service.find(start.job.key)
        if start.job_id is not None and start.job_id not in found:
            found.append(start.job_id)
        for surplus in found[1:]:
            self._service.stop(surplus)
        if found:
            start.job_id = found[0]
        return start.job_id

    # Undoing

    def _give_up(self, starts: Sequence[_Start], why: str) -> str:
        """End these jobs, also what is still being started; return a sentence on what could not be ended."""
        failed = [start for start in starts if start.error]  # before: what is given up fails, too
        for start in starts:
            start.given_up.set()
        self._interrupt()
        for start in starts:
            with contextlib.suppress(StoreError):  # then it is left alone: the service was not asked for it
                self._begin(start)  # no rank of this launch is to wait for ever
        begun = [start for start in starts if start.is_begun]
        with contextlib.suppress(StoreError):
            for start in begun:
                if start in failed:
                    refused = start.job_id is None and not start.attempt.has("started.json")
                    failure = start.attempt.ended(ReplicaStatus.FAILED, "start_failed", error=start.problem)
                    start.attempt.record(replace(failure, was_refused=refused))
                start.attempt.request_cancel(why)  # a job that comes up late finds this marker, and ends at once
        problems = self._sweep(begun)
        with contextlib.suppress(StoreError):
            for start in begun:
                start.attempt.record(start.attempt.ended(ReplicaStatus.CANCELLED, "cancelled", error=why))
        if not problems:
            return ""
        listed = "; ".join(f"{', '.join(names)} ({problem.rstrip('.')})" for problem, names in problems.items())
        return f" What could not be ended may still run: {listed}."

    def _interrupt(self) -> None:
        """Interrupt the calls that wait, unless one may still bring a rank."""
        if all(start.given_up.is_set() or start.has_come for start in self._starts):
            with contextlib.suppress(JobServiceError):
                self._service.interrupt_starts()

    def _sweep(self, starts: Sequence[_Start]) -> dict[str, list[str]]:
        """End these jobs, again while they are being started; name those that may still exist, by what hindered it."""
        problems: dict[str, list[str]] = {}
        pause_s = SWEEP_S
        while starts:
            if going := [start for start in starts if start.is_going]:  # before: these are swept once more
                self._interrupt()  # what has begun to wait since the last time
            for start, problem in zip(starts, call_each(self._end, starts, SWEEP_THREADS), strict=True):
                if problem and start.may_exist and start not in going:
                    problems.setdefault(problem, []).append(start.job.key.name)
            self._wait_for(going, pause_s)
            pause_s = min(2 * pause_s, LONGEST_SWEEP_S)
            starts = going
        return problems

    def _wait_for(self, starts: Sequence[_Start], limit_s: float) -> None:
        """Wait until no thread starts any of these, or the time is over."""
        deadline = time.monotonic() + limit_s
        while any(start.is_going for start in starts) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _end(self, start: _Start) -> str:
        """End a job, and all that the service lists of it; the list may lack the one that was started just now."""
        try:
            for one_try in retrying(patience_s=LONGEST_PATIENCE_S):
                with one_try:
                    if start.job_id is not None:
                        self._service.stop(start.job_id)
                    stop_others(self._service, start.job.key, start.job_id)
        except Exception as error:  # noqa: BLE001 - whatever hinders this one, the others are to be ended
            return str(error)
        return ""


def _say(text: str) -> None:
    print(f"replicas: {text}", file=sys.stderr)
