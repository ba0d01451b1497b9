"""GangStart: starts the replicas of a run as jobs of a service, all or none, each at most once.

An intent is created before the service is called and the handle is written after, so that a job whose answer was lost,
or whose launcher died, is found by its name instead of being started again. A launch leaves attempts alone that another
launcher began: were it refused as a whole, two that resume a run at once could each end what the other has begun.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from executors.attempt import Attempt, Intent
from executors.backends.jobs.service import (
    CancelledWhileStartingError,
    Job,
    JobId,
    JobService,
    JobServiceError,
    retrying,
)
from executors.errors import LaunchError, ReplicasError, StoreError
from executors.protocol import ReplicaHandle, ReplicaStatus
from executors.store.records import read_record, to_bytes

MAX_THREADS = 256  # a call may block until its job is scheduled, so each rank has its own
SWEEP_S = 1.0
SWEEP_THREADS = 16
LOOKS = 5  # for a job that an unknown answer may have left, before the service is asked for it again
LOOK_PAUSE_S = 1.0


@dataclass(eq=False)
class _Start:
    """One rank on its way."""

    attempt: Attempt
    job: Job
    is_begun: bool | None = None
    """Whether this launch began the attempt; False: another one did. None: not known yet."""
    is_going: bool = False
    """Whether a thread is starting it, also one that an interrupted `run` does not know of."""
    may_exist: bool = False
    """Whether the service may have the job: it was asked for it, and did not reject it without doubt."""
    job_id: JobId | None = None


class GangStart:
    """The start of some ranks of one run.

    Args:
        handle_of: makes the handle of an attempt from the id of its job.
    """

    def __init__(
        self,
        service: JobService,
        backend: str,
        world_size: int,
        jobs: Sequence[tuple[Attempt, Job]],
        handle_of: Callable[[Attempt, JobId], ReplicaHandle],
    ) -> None:
        self._service = service
        self._backend = backend
        self._world_size = world_size
        self._starts = [_Start(attempt, job) for attempt, job in jobs]
        self._handle_of = handle_of
        self._nonce = secrets.token_hex(16)
        self._is_given_up = threading.Event()

    def run(self) -> list[ReplicaHandle]:
        """Start every job at the same time, and return the handles in the order of the jobs.

        Those of attempts that another launcher began are left out.

        Raises:
            LaunchError: a rank could not be started; the others were ended, or never begun.
        """
        with ThreadPoolExecutor(min(MAX_THREADS, len(self._starts)), thread_name_prefix="replicas-launch") as pool:
            futures: dict[Future[ReplicaHandle | None], _Start] = {}
            try:
                futures.update((pool.submit(self._start, start), start) for start in self._starts)
                wait(futures, return_when=FIRST_EXCEPTION)
                failed = [(futures[f], error) for f in futures if f.done() and (error := f.exception())]
            except BaseException:  # Ctrl-C, perhaps before every job was handed to a thread
                self._undo(futures, None, "the launch was interrupted")
                raise
            if not failed:
                return [handle for future in futures if (handle := future.result())]
            start, error = failed[0]
            rank = start.attempt.rank
            left = self._undo(futures, rank, f"Rank {rank} could not be started: {error}")
        if not isinstance(error, (ReplicasError, OSError)):
            raise error
        raise LaunchError(
            f"Backend {self._backend!r} could not start replica {rank} of {self._world_size}: "
            f"{str(error).rstrip('.')}. Those already started were ended.{left}",
            rank=rank,
            cancelled=isinstance(error, CancelledWhileStartingError),
        ) from error

    # Starting one

    def _start(self, start: _Start) -> ReplicaHandle | None:
        start.is_going = True
        try:
            self._check_not_given_up()
            if not self._begin(start):
                return None
            handle = self._handle_of(start.attempt, self._job_of(start))
            # Overwritten: a reader may have written a handle meanwhile, of a job that `_only_one` has ended since.
            start.attempt.store.put(start.attempt.key("handle.json"), handle.to_json().encode())
            return handle
        finally:
            start.is_going = False

    def _check_not_given_up(self) -> None:
        if self._is_given_up.is_set():
            raise JobServiceError("the launch was given up", "rejected")

    def _begin(self, start: _Start) -> bool:
        """Begin an attempt by creating its intent; False if another launcher has begun it."""
        if start.is_begun is None:
            store, key = start.attempt.store, start.attempt.key("intent.json")
            by = f"{socket.gethostname()}:{os.getpid()}"
            intent = {"nonce": self._nonce, "by": by, "job": start.job.key.name, "at": time.time()}
            created = store.put_if_absent(key, to_bytes(intent))
            # Perhaps the one that exists is ours, by a create whose answer was lost: the nonce says it.
            start.is_begun = created or read_record(store, key, Intent.parse).nonce == self._nonce
        return start.is_begun

    def _job_of(self, start: _Start) -> JobId:
        """Ask for a job until the service has it; look for it first whenever an answer left that unknown."""
        is_unknown = False
        for one_try in retrying():
            with one_try:
                self._check_not_given_up()
                if is_unknown and (found := self._look_for(start)):
                    return found
                start.may_exist = True
                try:
                    started = start.job_id = self._service.start(start.job)
                except JobServiceError as error:
                    is_unknown = is_unknown or error.kind == "unknown"
                    start.may_exist = is_unknown
                    if error.kind == "rejected" and start.attempt.has("cancel.json"):
                        raise CancelledWhileStartingError from error
                    raise
                return self._only_one(start, started) or started if is_unknown else started
        raise AssertionError("tenacity returns or raises")

    def _look_for(self, start: _Start) -> JobId | None:
        """Look for the job that a lost answer may have left, for a while: what was made just now may be listed late."""
        for _ in range(LOOKS - 1):
            if found := self._only_one(start):
                return found
            time.sleep(LOOK_PAUSE_S)
            self._check_not_given_up()
        return self._only_one(start)

    def _only_one(self, start: _Start, started: JobId | None = None) -> JobId | None:
        """Find the job, and end any beyond the first.

        Args:
            started: the one that was made just now, which a list may lack.
        """
        found = self._service.find(start.job.key)
        if started is not None and started not in found:
            found.append(started)
        for surplus in found[1:]:
            self._service.stop(surplus)
        if found:
            start.job_id = found[0]
        return found[0] if found else None

    # Undoing

    def _undo(self, futures: dict[Future[ReplicaHandle | None], _Start], failed_rank: int | None, why: str) -> str:
        """End what was started, and what is still being started; return a sentence on what could not be ended."""
        self._is_given_up.set()
        for start in self._starts:
            with contextlib.suppress(StoreError):  # then it is left alone: the service was not asked for it
                self._begin(start)  # no rank of this launch is to wait for ever
        begun = [start for start in self._starts if start.is_begun]
        with contextlib.suppress(StoreError):
            for start in begun:
                if start.attempt.rank == failed_rank:
                    start.attempt.record(start.attempt.ended(ReplicaStatus.FAILED, "start_failed", error=why))
                start.attempt.request_cancel(why)  # a job that comes up late finds this marker, and ends at once
        for future in futures:
            future.cancel()
        while True:
            is_going = any(start.is_going for start in self._starts)
            problems = self._sweep(begun)
            if not is_going:
                break
            wait([future for future in futures if not future.done()], timeout=SWEEP_S)
        with contextlib.suppress(StoreError):
            for start in begun:
                start.attempt.record(start.attempt.ended(ReplicaStatus.CANCELLED, "cancelled", error=why))
        if not problems:
            return ""
        listed = "; ".join(f"{', '.join(names)} ({problem.rstrip('.')})" for problem, names in problems.items())
        return f" What could not be ended may still run: {listed}."

    def _sweep(self, starts: Sequence[_Start]) -> dict[str, list[str]]:
        """End these jobs; name those that may exist and could not be ended, by what hindered it."""
        problems: dict[str, list[str]] = {}
        with ThreadPoolExecutor(SWEEP_THREADS) as pool:
            for start, problem in zip(starts, pool.map(self._end, starts), strict=True):
                if problem and start.may_exist:
                    problems.setdefault(problem, []).append(start.job.key.name)
        return problems

    def _end(self, start: _Start) -> str:
        """End a job, and all that the service lists of it; the list may lack the one that was started just now."""
        try:
            for one_try in retrying():
                with one_try:
                    known = start.job_id
                    if known is not None:
                        self._service.stop(known)
                    for found in self._service.find(start.job.key):
                        if found != known:
                            self._service.stop(found)
        except Exception as error:  # noqa: BLE001 - whatever hinders this one, the others are to be ended
            return str(error)
        return ""
