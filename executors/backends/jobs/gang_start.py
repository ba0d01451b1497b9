"""GangStart starts the replicas of a run as jobs of a service: all of them, or at least `min_replicas`.

`JobStarter` starts each job at most once. This file waits until enough jobs have started. If too few start, it ends all
of them.

A launch skips attempts that another launcher has begun. If it failed instead, it would end the jobs that it has
started. So two processes that resume a run at the same time could each end the jobs of the other.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import replace

from executors.attempt import Attempt
from executors.backend import EndedJobs
from executors.backends.jobs.ending import end_jobs
from executors.backends.jobs.job_starter import JobStart, JobStarter
from executors.backends.jobs.service import (
    CancelledWhileStartingError,
    JobId,
    JobKey,
    JobService,
    JobServiceError,
    JobSpec,
    stop_others,
)
from executors.errors import LaunchError, ReplicasError, StoreError
from executors.protocol import ReplicaHandle, ReplicaStatus
from executors.settings.run_spec import RunSpec
from executors.store.parallel import answered_within, at_store, in_threads, within
from executors.store.url import impatient_store

MAX_THREADS = 256  # a call may wait until its job is scheduled, so each rank has its own thread
SWEEP_S, LONGEST_SWEEP_S = 1.0, 10.0
HEAD_START_S = 5.0  # how long the store may take to write cancel markers before the jobs are ended
LAST_STORE_S = 20.0  # how long the store may take to write them after all jobs have ended
CLOSE_S = 5.0  # how long the end of the process waits for calls that were interrupted
TEND_S = 5.0  # between two looks at a run that late replicas may still join


class GangStart:
    """Starts some ranks of one run as jobs.

    Args:
        service: the service that runs the jobs.
        backend: the name of the backend, for messages.
        run: the run, with the ranks to start.
        jobs: the attempt and the job of each rank.
        handle_of: returns the handle of an attempt, given the id of its job.
        started: is called with the jobs that the service has started and the url of the run's store, before anything
            else is done with the jobs.
        starting: a set to which this adds the place of each attempt, while this launch may be starting it.
        on_progress: is called with a few words whenever one more job has started.

    Example:
        handles = GangStart(service, "modal", run, jobs, handle_of=handle_of, started=keep, starting=set(),
                            on_progress=print).run()
    """

    def __init__(
        self,
        service: JobService,
        backend: str,
        run: RunSpec,
        jobs: Sequence[tuple[Attempt, JobSpec]],
        *,
        handle_of: Callable[[Attempt, JobId], ReplicaHandle],
        started: Callable[[Sequence[tuple[JobKey, JobId]], str], None],
        starting: set[str],
        on_progress: Callable[[str], None],
    ) -> None:
        self._service = service
        self._backend = backend
        self._run = run
        self._starts = [JobStart(attempt, job) for attempt, job in jobs]
        self._batches = [self._starts] if service.starts_together else [[start] for start in self._starts]
        self._needed = min(run.settings.min_replicas or len(jobs), len(jobs))
        self._starter = JobStarter(service, run, handle_of=handle_of, started=started, starting=starting)
        self._starting = starting
        self._on_progress = on_progress

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self._run.run_id

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks that this starts."""
        return self._run.ranks

    def give_up(self) -> None:
        """Start no more jobs, and interrupt the calls that wait. Then `run` ends the started jobs, and raises.

        Example:
            gang.give_up()
        """
        self._starter.forbid(self._starts)
        self._interrupt()

    def run(self) -> list[ReplicaHandle]:
        """Start all jobs at the same time, and return the handles in the order of the jobs.

        Handles of attempts that another launcher has claimed are not included. With `min_replicas`, handles of late
        jobs are not included either. Late jobs join the run later, unless the launch is detached.

        Raises:
            LaunchError: too few jobs could be started. The others were ended, or never begun.
        """
        self._starting.update(start.attempt.full_name for start in self._starts)
        try:
            futures = in_threads(self._starter.start, self._batches, MAX_THREADS)
            self._wait_for_enough(dict(zip(futures, self._batches, strict=True)))
            failed = [start for start in self._starts if start.error]
            late = [start for start in self._starts if not start.has_come and not start.error]
            if len(self._starts) - len(failed) - len(late) < self._needed:
                self._refuse(failed, len(late))
            self._end_doubles()
            self._go_on_without(failed, late)
        except LaunchError:
            raise
        except BaseException:  # such as Ctrl-C, perhaps before each job had a thread
            self._starting.difference_update(start.attempt.full_name for start in self._starts)
            try:
                if left := self._give_up(self._starts, "the launch was interrupted"):
                    _print(left.strip())
            except KeyboardInterrupt:  # a second Ctrl-C
                known = [start.job_id for start in self._starts if start.job_id is not None]
                commands = self._service.commands_to_end(self.run_id, known)
                _print(f"jobs of {self.run_id} may still run. End them yourself: {commands}")
                raise
            raise
        return [start.handle for start in self._starts if start.handle is not None]

    def _wait_for_enough(self, batches: Mapping[Future[None], Sequence[JobStart]]) -> None:
        """Wait until all jobs have started, too many have failed, or the time has passed."""
        n, n_came, n_failed = len(self._starts), 0, 0
        self._on_progress(self._progress(0))
        within_s = (
            None if self._run.settings.min_replicas is None else min(self._run.settings.gather_s, threading.TIMEOUT_MAX)
        )
        with contextlib.suppress(TimeoutError):
            for future in as_completed(batches, within_s):
                errors = [start.error for start in batches[future] if start.error]
                n_came, n_failed = n_came + len(batches[future]) - len(errors), n_failed + len(errors)
                if not errors:
                    self._on_progress(self._progress(n_came))
                elif n - n_failed < self._needed or not isinstance(errors[0], (ReplicasError, OSError)):
                    return

    def _progress(self, n_came: int) -> str:
        """Return a few words on the progress. They count GPUs if a start waits for one, because each costs money."""
        n, waits = len(self._starts), self._service.start_waits(self._starts[0].job)
        if not waits:
            return f"{n_came} of {n} started"
        rest = f"; waiting for {n - n_came}" if n_came < n else ""
        return f"{n_came} of {n} have a GPU{rest}"

    def _refuse(self, failed: Sequence[JobStart], n_late: int) -> None:
        """End all jobs, and raise the reason."""
        n, cause = len(self._starts), failed[0] if failed else None
        if cause is None:
            problem = f"started {n - n_late} of {n} replicas within {self._run.settings.gather_s:g} s"
        else:
            number, run = cause.attempt.rank, self._run
            of = f"spare {number}" if run.is_of_spares else f"replica {number} of {run.world_size}"
            if self._service.starts_together and len(failed) == n > 1:
                of = f"any of {n} {'spares' if run.is_of_spares else 'replicas'}, which start together"
            problem = f"could not start {of}: {str(cause.error).rstrip('.')}"
        if self._needed < n:
            problem += f"; at least {self._needed} of {n} were asked for"
        if cause is not None and getattr(cause.error, "lacks_machines", False) and not self._run.is_of_spares:
            problem += f". {self._advice_on_machines()}".rstrip(".")
        left = self._give_up(self._starts, f"the backend {problem}" if cause is None else cause.problem)
        error = None if cause is None else cause.error
        if error is not None and not isinstance(error, (ReplicasError, OSError)):
            raise error
        raise LaunchError(
            f"Backend {self._backend!r} {problem}. Those already started were ended.{left}",
            rank=None if cause is None else cause.attempt.rank,
            cancelled=isinstance(error, CancelledWhileStartingError),
        ) from error

    def _advice_on_machines(self) -> str:
        """Return how many ranks had a machine, why the others usually have none, and how to start with fewer."""
        n, n_had = len(self._starts), sum(start.handle is not None for start in self._starts)
        fewer = f"Start with those that get one: --min-replicas {max(1, n_had)}, or min_replicas=."
        return f"{n_had} of {n} had a machine. {self._service.limits_advice} {fewer}".replace("  ", " ")

    def _end_doubles(self) -> None:
        """End the second job of each rank that has two jobs. An earlier search may have missed the second job."""
        for start in self._starts:
            if start.is_unclear and start.job_id is not None:
                with contextlib.suppress(JobServiceError):  # the second job then ends together with the replica
                    stop_others(self._service, start.job.key, start.job_id)

    # --- starting with fewer replicas than the run has ranks

    def _go_on_without(self, failed: Sequence[JobStart], late: Sequence[JobStart]) -> None:
        """Give up the ranks whose start failed. Late ranks may join as long as this process runs."""
        n, n_came = len(self._starts), len(self._starts) - len(failed) - len(late)
        for start in failed:
            _print(start.problem)
        self._give_up(failed, "it could not be started")
        if not late:
            return
        if self._run.settings.detach:
            when = f"within {self._run.settings.gather_s:g} s"
            end = "A detached launch does not wait for late replicas"
            _print(f"started with {n_came} of {n} replicas; {len(late)} did not start {when}. {end}.")
            self._give_up_late(late, f"it did not start {when}. {end}")
            return
        _print(f"started with {n_came} of {n} replicas; {len(late)} may still join.")
        atexit.register(self._close, late)
        threading.Thread(target=self._tend, args=(late,), name="replicas-join", daemon=True).start()

    def _tend(self, late: Sequence[JobStart]) -> None:
        """Give up the late ranks that fail, and all of them once the others have ended."""
        while late := [start for start in late if not start.has_come]:
            if failed := [start for start in late if start.error]:
                self._give_up(failed, "it could not be started")
                late = [start for start in late if not start.error]
            with contextlib.suppress(StoreError):
                if late and self._others_have_ended(late):
                    self._give_up_late(late, "the other replicas ended before it started")
                    break
            time.sleep(TEND_S)
        atexit.unregister(self._close)

    def _others_have_ended(self, late: Sequence[JobStart]) -> bool:
        store, run, missing = late[0].attempt.store, self._run, {start.attempt.rank for start in late}
        ranks = (rank for rank in range(run.world_size) if rank not in missing)
        return all(Attempt(store, run.run_id, rank).newest().outcome() is not None for rank in ranks)

    def _give_up_late(self, late: Sequence[JobStart], why: str) -> None:
        for start in late:
            start.error = start.error or JobServiceError(why, "rejected")
        self._give_up(late, why)

    def _close(self, late: Sequence[JobStart]) -> None:
        """Record that late ranks are given up, because this process ends. A job that starts later ends itself."""
        self._starter.forbid(late)
        with contextlib.suppress(Exception):
            for start in late:
                if not start.has_come:
                    attempt = replace(start.attempt, store=impatient_store(self._run.store_url, CLOSE_S))
                    attempt.abandon(JobServiceError("its launcher ended before it started", "rejected"))
        # This is the last step, so that a job that starts after all finds its cancel marker.
        with contextlib.suppress(Exception):
            self._service.interrupt_starts()
        self._starter.wait_for(late, CLOSE_S)

    # --- undoing a start

    def _give_up(self, starts: Sequence[JobStart], why: str) -> str:
        """End jobs, also those that are still being started. Return a sentence that names the jobs that may still run.

        First cancel markers are written into the store, so that a job that starts late ends at once. If the store does
        not answer within a few seconds, the service is asked to end the jobs all the same. Then the store has more
        time.
        """
        # computed before `forbid`, because each start that is given up then fails as well
        failed = [start for start in starts if start.error]
        self._starter.forbid(starts)
        self._interrupt()
        (marked,) = in_threads(lambda _: self._mark(starts, failed, why), [None], 1)
        with contextlib.suppress(StoreError):
            answered_within(HEAD_START_S, marked, self._run.store_url)
        left = self._sweep([start for start in starts if start.has_to_end])
        with contextlib.suppress(StoreError):
            answered_within(LAST_STORE_S, marked, self._run.store_url)
            within(LAST_STORE_S, lambda: self._record_cancelled(starts, why), self._run.store_url)
        return "" if left.is_complete else f" {left.what_is_left}"

    def _mark(self, starts: Sequence[JobStart], failed: Sequence[JobStart], why: str) -> None:
        """Record why starts have failed, and write cancel markers for all of them."""

        def mark(start: JobStart) -> None:
            # The attempt is claimed here if it is not claimed yet. Otherwise other processes would wait for it for
            # ever.
            if not self._starter.begin(start):
                return
            if start in failed:
                refused = start.job_id is None and not start.attempt.has_started()
                failure = start.attempt.new_outcome(ReplicaStatus.FAILED, "start_failed", error=start.problem)
                start.attempt.record(replace(failure, was_refused=refused))
            start.attempt.request_cancel(why)

        if starts:
            at_store(starts[0].attempt.store, mark, starts)

    def _record_cancelled(self, starts: Sequence[JobStart], why: str) -> None:
        begun = [start.attempt for start in starts if start.is_begun]
        if begun:
            at_store(
                begun[0].store,
                lambda each: each.record(each.new_outcome(ReplicaStatus.CANCELLED, "cancelled", error=why)),
                begun,
            )

    def _interrupt(self) -> None:
        """Interrupt the calls that wait, unless one of them may still start a rank that is needed."""
        if all(start.given_up.is_set() or start.has_come for start in self._starts):
            with contextlib.suppress(JobServiceError):
                self._service.interrupt_starts()

    def _sweep(self, starts: Sequence[JobStart]) -> EndedJobs:
        """End jobs repeatedly while some are still being started. Return the jobs that may still run."""
        swept, pause_s = EndedJobs(), SWEEP_S
        while starts:
            # This list is made before jobs are ended, so that the next pass ends a job that starts meanwhile.
            if asking := [start for start in starts if start.is_asking]:
                self._interrupt()  # interrupts calls that have begun to wait since the last interrupt
            ended = end_jobs(
                self._service,
                [(start.job.key, start.job_id) for start in starts if start not in asking],
                on_progress=_print,
            )
            swept = swept if ended.is_complete else swept + ended
            self._starter.wait_for(asking, pause_s)
            pause_s = min(2 * pause_s, LONGEST_SWEEP_S)
            starts = [start for start in asking if start.has_to_end]
        return swept


def _print(text: str) -> None:
    print(f"replicas: {text}", file=sys.stderr)
