"""Starting the replicas of a run at a vendor: each at most once, all or none.

An intent is created before the vendor is called and the handle is written after, so that a job whose reply was lost, or
whose launcher died, is found by its name instead of being started again. Of two launches of one attempt the one whose
intent stands goes on; the other leaves that attempt alone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

from executors.attempt_records import Intent
from executors.errors import LaunchError, ReplicasError, StoreError
from executors.outcome import Outcome, Reason, record_outcome, request_cancel
from executors.protocol import ReplicaHandle, ReplicaStatus
from executors.records import exists, read_record, to_bytes
from executors.replica import replica_key
from executors.store import Store
from executors.vendor import CancelledWhileStartingError, Job, JobId, JobKey, Vendor, VendorError
from executors.vendor_patience import patiently

MAX_THREADS = 256  # a vendor's call may block until its job is scheduled, so each rank has its own
SWEEP_S = 1.0
SWEEP_THREADS = 16
LOOKS = 5  # for a job that an unclear answer may have left, before it is asked for again
LOOK_PAUSE_S = 1.0

log = logging.getLogger(__name__)


class CloudLaunch:
    """The start of some ranks of one run.

    Args:
        handle_of: makes a rank's handle from what the vendor said.
        sleep: what pauses between tries wait with.
    """

    def __init__(
        self,
        vendor: Vendor,
        backend: str,
        store: Store,
        jobs: Sequence[Job],
        world_size: int,
        handle_of: Callable[[Job, JobId], ReplicaHandle],
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._vendor = vendor
        self._backend = backend
        self._store = store
        self._jobs = jobs
        self._world_size = world_size
        self._handle_of = handle_of
        self._sleep = sleep
        self._nonce = secrets.token_hex(16)
        self._is_given_up = threading.Event()
        self._ours: dict[JobKey, bool] = {}
        """The jobs whose attempts were begun, and whether by this launch."""
        self._going: set[JobKey] = set()
        """The jobs that a thread is starting, also one that an interrupted `start` does not know of."""
        self._may_stand: set[JobKey] = set()
        """The jobs that the vendor may have: those asked for, unless it refused them without doubt."""
        self._started: dict[JobKey, JobId] = {}

    def start(self) -> list[ReplicaHandle]:
        """Start every job at the same time, and return the handles in the order of the jobs.

        Those of attempts that another process began first are left out.

        Raises:
            LaunchError: a rank could not be started; the others were ended, or never begun.
        """
        with ThreadPoolExecutor(min(MAX_THREADS, len(self._jobs)), thread_name_prefix="replicas-launch") as pool:
            futures: dict[Future[ReplicaHandle | None], Job] = {}
            try:
                futures.update((pool.submit(self._start_one, job), job) for job in self._jobs)
                wait(futures, return_when=FIRST_EXCEPTION)
                ended = [(future, job) for future, job in futures.items() if future.done()]
                failed = [(job, error) for future, job in ended if (error := future.exception())]
            except BaseException:  # Ctrl-C, perhaps before every job was handed to a thread
                self._undo(futures, None, "the launch was interrupted")
                raise
            if not failed:
                return [handle for future in futures if (handle := future.result()) is not None]
            job, error = failed[0]
            left = self._undo(futures, job.key.rank, f"Rank {job.key.rank} could not be started: {error}")
        if not isinstance(error, (ReplicasError, OSError)):
            raise error
        raise LaunchError(
            f"Backend {self._backend!r} could not start replica {job.key.rank} of {self._world_size}: "
            f"{str(error).rstrip('.')}. Those already started were ended.{left}",
            rank=job.key.rank,
            cancelled=isinstance(error, CancelledWhileStartingError),
        ) from error

    # Starting one

    def _start_one(self, job: Job) -> ReplicaHandle | None:
        self._going.add(job.key)
        try:
            self._go_on()
            return self._start(job) if self._begin(job) else None
        finally:
            self._going.discard(job.key)

    def _go_on(self) -> None:
        if self._is_given_up.is_set():
            raise VendorError("the launch was given up", "refused")

    def _begin(self, job: Job) -> bool:
        """Begin a rank's attempt by creating its intent; False if another process has begun it."""
        if job.key not in self._ours:
            key = self._key(job, "intent.json")
            by = f"{socket.gethostname()}:{os.getpid()}"
            intent = {"nonce": self._nonce, "by": by, "job": job.key.name, "at": time.time()}
            # Perhaps ours stands, by a create whose reply was lost: the nonce tells.
            created = self._store.put_if_absent(key, to_bytes(intent))
            self._ours[job.key] = created or read_record(self._store, key, Intent.parse).nonce == self._nonce
        return self._ours[job.key]

    def _start(self, job: Job) -> ReplicaHandle:
        handle = self._handle_of(job, self._ask(job))
        # Not created: somebody who looked may have written one meanwhile, of a job that `_only_one` has ended since.
        self._store.put(self._key(job, "handle.json"), handle.to_json().encode())
        return handle

    def _ask(self, job: Job) -> JobId:
        """Ask for a job until the vendor has it; look for it first whenever an answer left that open."""
        is_unclear = False
        for attempt in patiently(self._sleep):
            with attempt:
                self._go_on()
                if is_unclear and (found := self._look_for(job)):
                    return found
                self._may_stand.add(job.key)
                try:
                    started = self._started[job.key] = self._vendor.start_job(job)
                except VendorError as error:
                    is_unclear = is_unclear or error.kind == "unclear"
                    if not is_unclear:
                        self._may_stand.discard(job.key)
                    if error.kind == "refused" and exists(self._store, self._key(job, "cancel.json")):
                        raise CancelledWhileStartingError from error
                    raise
                return self._only_one(job, started) or started if is_unclear else started
        raise AssertionError("tenacity returns or raises")

    def _look_for(self, job: Job) -> JobId | None:
        """Look for the job that a lost answer may have left, for a while: what was made just now may be listed late."""
        for _ in range(LOOKS - 1):
            if found := self._only_one(job):
                return found
            self._sleep(LOOK_PAUSE_S)
            self._go_on()
        return self._only_one(job)

    def _only_one(self, job: Job, started: JobId | None = None) -> JobId | None:
        """Find the job, and end any beyond the first.

        Args:
            started: the one that was made just now, which a list may lack.
        """
        found = self._vendor.find_jobs(job.key)
        if started is not None and started not in found:
            found.append(started)
        for surplus in found[1:]:
            self._vendor.stop_job(surplus)
        if found:
            self._started[job.key] = found[0]
        return found[0] if found else None

    # Undoing

    def _undo(self, futures: dict[Future[ReplicaHandle | None], Job], failed_rank: int | None, why: str) -> str:
        """End what was started, and what is still being started; return a sentence on what could not be ended."""
        self._is_given_up.set()
        jobs = [job for job in self._jobs if self._is_ours(job)]
        with contextlib.suppress(StoreError):
            for job in jobs:
                if job.key.rank == failed_rank:
                    self._record(job, ReplicaStatus.FAILED, "start_failed", why)
                # A job that comes up late finds this marker, and ends at once.
                request_cancel(self._store, job.key.run_id, job.key.rank, job.key.attempt, why)
        for future in futures:
            future.cancel()
        while True:
            going = bool(self._going)
            problems = self._sweep(jobs)
            if not going:
                break
            wait([future for future in futures if not future.done()], timeout=SWEEP_S)
        with contextlib.suppress(StoreError):
            for job in jobs:
                self._record(job, ReplicaStatus.CANCELLED, "cancelled", why)
        if not problems:
            return ""
        told = "; ".join(f"{', '.join(names)} ({problem.rstrip('.')})" for problem, names in problems.items())
        return f" What could not be ended may still run: {told}."

    def _is_ours(self, job: Job) -> bool:
        """Tell whether this launch has begun a job's attempt, or does so now: none of ours is to wait for ever."""
        with contextlib.suppress(StoreError):
            return self._begin(job)
        return False  # what cannot be told is left alone; the vendor was not asked for it

    def _sweep(self, jobs: Sequence[Job]) -> dict[str, list[str]]:
        """End these jobs; name those that may stand and could not be ended, by what hindered it."""
        problems: dict[str, list[str]] = {}
        with ThreadPoolExecutor(SWEEP_THREADS) as pool:
            for job, problem in zip(jobs, pool.map(self._end_jobs, jobs), strict=True):
                if problem and job.key in self._may_stand:
                    problems.setdefault(problem, []).append(job.key.name)
        return problems

    def _end_jobs(self, job: Job) -> str:
        """End a job, and all that the vendor lists of it; the list may lack the one that was started just now."""
        try:
            for attempt in patiently(self._sleep):
                with attempt:
                    known = self._started.get(job.key)
                    if known is not None:
                        self._vendor.stop_job(known)
                    for found in self._vendor.find_jobs(job.key):
                        if found != known:
                            self._vendor.stop_job(found)
        except Exception as error:  # noqa: BLE001 - whatever hinders this one, the others are to be ended
            return str(error)
        return ""

    def _record(self, job: Job, status: ReplicaStatus, reason: Reason, why: str) -> None:
        record_outcome(self._store, job.key.run_id, Outcome(job.key.rank, job.key.attempt, status, reason, error=why))

    def _key(self, job: Job, name: str) -> str:
        return replica_key(job.key.run_id, job.key.rank, job.key.attempt, name)
