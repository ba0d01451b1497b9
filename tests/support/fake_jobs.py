"""FakeExecutor and FakeJobs: a service that runs jobs as local processes, with faults that a test plans."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from executors import Run, attach, launch
from executors.backend import Recordable
from executors.backends.jobs.executor import JobExecutor
from executors.backends.jobs.service import (
    UNKNOWN,
    ForeignJobError,
    JobId,
    JobKey,
    JobService,
    JobServiceError,
    JobSpec,
    JobState,
    Kind,
    common_env,
    shortened,
)
from executors.errors import BackendError
from executors.masking import masked
from executors.protocol import Reason
from executors.replica import RANK
from executors.run.run import view_of
from executors.task.record import OPTION_NAME
from executors.testing import eventually
from support.processes import MARK

T = TypeVar("T")
CALLS = ("check_account", "start", "find", "verify", "state", "states", "logs", "stop")
TERM_GRACE_S = 0.5


@dataclass(eq=False)
class FakeJob:
    """A job of the fake service."""

    id: str
    job: JobSpec
    log: Path
    process: subprocess.Popen[bytes] | None = None
    """The process of the job. None: the job waits for a machine."""
    has_ended: bool = False
    reason: Reason | None = None
    """The reason why the job ended. None: it ended by itself."""
    message: str = ""
    is_forgotten: bool = False

    def state(self) -> JobState:
        code = None if self.process is None else self.process.poll()
        self.has_ended = self.has_ended or code is not None
        if not self.has_ended:
            return JobState(False, message="scheduling" if self.process is None else "")
        return JobState(True, self.reason, 128 - code if code is not None and code < 0 else code, self.message)


@dataclass
class Fault:
    kind: Kind
    times: int | None
    after_applying: bool
    rank: int | None
    when: Callable[[], object] | None


@dataclass
class Machines:
    """The state that all `FakeJobs` of one account share: its jobs and the planned faults."""

    folder: Path
    jobs: list[FakeJob] = field(default_factory=list)
    calls: list[tuple[str, int | None]] = field(default_factory=list)
    """The name and the rank of each call so far."""
    is_held: bool = False
    """True if jobs wait for a machine until `release`."""
    lists_jobs: bool = False
    """True if one answer has all jobs of a run."""
    starts_together: bool = False
    """True if one answer has all jobs of a run, and one call starts all jobs of a group."""
    hides: Callable[[JobKey], int] = lambda key: 0
    """Returns the number of the newest jobs of a key that lists do not show yet."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    _faults: dict[str, list[Fault]] = field(default_factory=dict)

    def fail(
        self,
        call: str,
        kind: Kind = "unknown",
        *,
        times: int | None = 1,
        after_applying: bool = False,
        rank: int | None = None,
        when: Callable[[], object] | None = None,
    ) -> None:
        """Let the next calls of a name fail: all of them, or the calls about one rank.

        Args:
            call: the name of the call.
            kind: the kind of the error.
            times: how many calls fail. None: all calls until `forgive`.
            after_applying: True: act first, so that only the answer is lost.
            rank: the rank. None: any rank.
            when: a condition; only calls for which it returns True fail. It may wait while other calls continue.
        """
        assert call in CALLS
        self._faults.setdefault(call, []).append(Fault(kind, times, after_applying, rank, when))

    def hold(self, *ranks: int) -> threading.Event:
        """Let the calls that start some ranks wait until the event is set."""
        decides = threading.Event()
        for rank in ranks:
            self.fail("start", when=lambda: not decides.wait(60), rank=rank, times=None)
        return decides

    def forgive(self) -> None:
        self._faults.clear()

    def count(self, call: str) -> int:
        return sum(name == call for name, _ in self.calls)

    def living(self) -> list[tuple[int, int]]:
        """Return the rank and the attempt of each job that has not ended."""
        return sorted((each.job.key.rank, each.job.key.attempt) for each in self.jobs if not each.state().has_ended)

    def job_of(self, run: Run, rank: int) -> FakeJob:
        """Return the job that a handle of a run names."""
        (found,) = [each for each in self.jobs if each.id == view_of(run).reader.handles.of(rank).metadata["job"]["id"]]
        return found

    def release(self) -> None:
        with self.lock:
            self.is_held = False
            for each in self.jobs:
                if each.process is None and not each.has_ended:
                    self._run(each)

    def take(self, call: str, rank: int | None) -> Fault | None:
        """Count a call, and return the fault that hits it."""
        with self.lock:
            self.calls.append((call, rank))
            faults = [fault for fault in self._faults.get(call, []) if fault.rank in (None, rank)]
        fault = next((fault for fault in faults if fault.when is None or fault.when()), None)
        if fault is not None and fault.times is not None:
            fault.times -= 1
            if fault.times == 0:
                self._faults[call].remove(fault)
        return fault

    def add(self, job: JobSpec) -> FakeJob:
        with self.lock:
            self.folder.mkdir(exist_ok=True)
            made = FakeJob(f"job-{len(self.jobs)}", job, self.folder / f"log-{len(self.jobs)}")
            made.log.touch()
            self.jobs.append(made)
            if not self.is_held:
                self._run(made)
            return made

    def _run(self, made: FakeJob) -> None:
        folder = self.folder / made.id
        folder.mkdir(exist_ok=True)
        ours = {"PATH": os.environ["PATH"], MARK: os.environ[MARK]}
        with open(made.log, "ab") as log:
            made.process = subprocess.Popen(
                [sys.executable if word == "python" else word for word in made.job.command],
                cwd=folder,
                env={**ours, **made.job.env, **made.job.credentials},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        threading.Thread(target=self._keep_limit, args=(made, made.process), daemon=True).start()

    def _keep_limit(self, made: FakeJob, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(made.job.limit_s)
        except subprocess.TimeoutExpired:
            self.end(made, "timeout")

    def start_again(self, made: FakeJob) -> None:
        """Start an ended job again, as Slurm requeues a job. The reason of the first end is then lost."""
        with self.lock:
            made.has_ended, made.reason, made.message = False, None, ""
            self._run(made)

    def end(self, made: FakeJob, reason: Reason | None = None, message: str = "", *, gently: bool = False) -> None:
        """End a job and all its processes from outside."""
        with self.lock:
            if made.state().has_ended:
                return
            made.reason, made.message = reason, message
            made.has_ended = made.process is None
        if made.process is not None:
            if gently:
                made.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    made.process.wait(TERM_GRACE_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(made.process.pid, signal.SIGKILL)
            made.process.wait()

    def close(self) -> None:
        for each in self.jobs:
            self.end(each)


def _job_id(name: str) -> JobId:
    return {"id": name, "url": f"https://fake.example/{name}"}


class FakeJobs(JobService):
    """A service over `Machines` that does not list its jobs."""

    name = "Fake"

    def __init__(self, machines: Machines) -> None:
        self.machines = machines

    @property
    def options(self) -> dict[str, Any]:
        return {}

    def check_account(self, gpu: str | None, timeout_s: float | None, secret_names: Sequence[str]) -> None:
        def check() -> None:
            if secret_names:
                raise BackendError(f"Fake has no secret {secret_names[0]!r}.")

        self._call("check_account", None, check)

    def start(self, job: JobSpec) -> JobId:
        return self._call("start", job.key.rank, lambda: _job_id(self.machines.add(job).id))

    def find(self, key: JobKey) -> list[JobId]:
        def find() -> list[JobId]:
            found = [_job_id(each.id) for each in self.machines.jobs if each.job.key == key and not each.is_forgotten]
            return found[: max(0, len(found) - self.machines.hides(key))]

        return self._call("find", key.rank, find)

    def verify(self, job_id: JobId, key: JobKey) -> JobId:
        def verify() -> JobId:
            made, name = self._job(job_id), job_id.get("id")
            is_ours = made is None or made.job.key == key
            if not isinstance(name, str) or not OPTION_NAME.fullmatch(name) or not is_ours:
                raise ForeignJobError(self.name, key)
            return _job_id(name)

        return self._call("verify", key.rank, verify)

    def state(self, job_id: JobId) -> JobState:
        def look() -> JobState:
            made = self._job(job_id)
            return UNKNOWN if made is None else made.state()

        return self._call("state", self._rank(job_id), look)

    def logs(self, job_id: JobId, n_lines: int) -> str:
        def read() -> str:
            made = self._job(job_id)
            lines = [] if made is None else made.log.read_text(errors="replace").splitlines(keepends=True)
            return "".join(lines[-n_lines:]) if n_lines > 0 else ""

        return self._call("logs", self._rank(job_id), read)

    def stop(self, job_id: JobId) -> None:
        def stop() -> None:
            if made := self._job(job_id):
                self.machines.end(made, "cancelled", gently=True)

        self._call("stop", self._rank(job_id), stop)

    def describe(self, job: JobSpec) -> dict[str, Any]:
        names = [*job.secret_names, *job.credentials]
        more = {"name": job.key.name, "timeout": job.limit_s, "secrets": names}
        return {"command": shortened(job.command), "env": masked(job.env), **more}

    def _call(self, call: str, rank: int | None, act: Callable[[], T]) -> T:
        """Execute a call, unless a fault hits it."""
        fault = self.machines.take(call, rank)
        if fault is None:
            return act()
        if fault.after_applying:
            act()
        raise JobServiceError(f"Fake: {fault.kind}, as the test asked.", fault.kind)

    def _job(self, job_id: JobId) -> FakeJob | None:
        jobs = self.machines.jobs
        return next((each for each in jobs if each.id == job_id.get("id") and not each.is_forgotten), None)

    def _rank(self, job_id: JobId) -> int | None:
        made = self._job(job_id)
        return None if made is None else made.job.key.rank


class ListingFakeJobs(FakeJobs):
    """A service that can list those jobs of a run that have not ended."""

    lists_ended: ClassVar[bool] = False

    def states(self, jobs: Mapping[JobKey, JobId]) -> dict[JobKey, JobState]:
        def look() -> dict[JobKey, JobState]:
            known = [each for each in self.machines.jobs if not each.is_forgotten]
            shown = [each for each in known if self.lists_ended or not each.state().has_ended]
            return {each.job.key: each.state() for each in shown if jobs.get(each.job.key) == _job_id(each.id)}

        return self._call("states", None, look)


class GroupingFakeJobs(ListingFakeJobs):
    """A service that starts the jobs of a group in one call, and lists also jobs that have ended, like a cluster."""

    lists_ended: ClassVar[bool] = True

    starts_together: ClassVar[bool] = True

    def start(self, job: JobSpec) -> JobId:
        return self.start_jobs([job])[0]

    def start_jobs(self, jobs: Sequence[JobSpec]) -> list[JobId]:
        assert len({job.key.group for job in jobs}) == 1

        def start() -> list[JobId]:
            env = common_env(jobs)
            complete = [replace(job, env={**env, RANK: str(job.key.rank)}) for job in jobs]
            return [_job_id(self.machines.add(job).id) for job in complete]

        return self._call("start", None, start)


class FakeExecutor(JobExecutor):
    """An executor over `FakeJobs`. Its jobs are local processes, so the rendezvous may be a directory."""

    backend_name = "fake"
    needs_shared_rendezvous = False
    recordable_options: ClassVar[Recordable] = {}
    machines: ClassVar[Machines]
    """The machines of the current test."""

    def __init__(self) -> None:
        listing = ListingFakeJobs if self.machines.lists_jobs else FakeJobs
        super().__init__((GroupingFakeJobs if self.machines.starts_together else listing)(self.machines))


def start(n: int = 1, function: str = "main", **more: Any) -> Run:
    """Launch a function of `job.py`."""
    return launch(FakeExecutor(), f"job.py:{function}", n, run_id="otter", **more)


def launched(machines: Machines, n: int, run_id: str = "otter") -> Run:
    """Launch, and check that each rank has one job, which its handle names."""
    run = launch(FakeExecutor(), "job.py:main", n, run_id=run_id)
    assert machines.living() == [(rank, 0) for rank in range(n)]
    assert [machines.job_of(run, rank).job.key.rank for rank in range(n)] == list(range(n))
    assert not any(machines.job_of(run, rank).state().has_ended for rank in range(n))
    return run


def attached() -> Run:
    """Return the run as another process would find it."""
    return attach("otter", executor=FakeExecutor())


def wait_until_hanging(run: Run) -> None:
    for rank in range(view_of(run).world_size):
        eventually(lambda rank=rank: "hanging" in run.logs(rank=rank), f"rank {rank} hangs")  # type: ignore[misc]


def ends(run: Run) -> list[tuple[str, str | None]]:
    """Wait for the end of a run, and return the status and the reason of each replica."""
    assert run.wait(60)
    return [(str(outcome.status), outcome.reason) for outcome in run.outcomes()]
