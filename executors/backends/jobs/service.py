"""JobService: the interface to a service that runs jobs, such as a cloud or a cluster.

Each service has a file that uses its SDK, and knows nothing about runs, stores and outcomes. `executor.py` knows these,
and uses no SDK. `executors.testing.JobServiceContract` tests the requirements of this interface.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import logging
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import tenacity

from executors.attempt import Attempt
from executors.backend import Recordable
from executors.errors import BackendError, UnknownHandleError
from executors.logs.log import Log
from executors.logs.readers import TailedLog
from executors.protocol import Reason
from executors.replica import RANK
from executors.store.url import real_url

JobId = dict[str, Any]
"""The data with which the service finds a job again. Plain JSON, which becomes part of the replica's handle."""
TRIES = 6
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0  # six tries have pauses of about 20 s in total
PATIENCE_S = 60.0  # the longest sum of all pauses; a service that asks for more counts as refusing
# For calls whose failure loses a launch or leaves jobs behind. Hugging Face asks for pauses of up to this length.
LONGEST_PATIENCE_S = 300.0
START_LIMIT_S = 180.0
MAX_GROUP = 53  # characters of a group's name
RUN_LABEL, STORE_LABEL = "replicas-run", "replicas-store"
MAX_COMMANDS = 8  # the most jobs that one command in a message names
REPORTED_PAUSE_S = 10.0  # pauses from this length on are reported to the user
OFFICIAL = re.compile(r"(?:docker\.io/)?(?:library/)?python:(3\.\d{1,2})\b")  # an image of Docker's own
# Measured with torch 2.13.0 for CUDA 13, uv 0.13 and a fast mirror: 46 s on two cores that had other work as well.
_INSTALLING = "installs torch{}, which takes a minute with a fast network (2.7 GB to download, 4.8 GB on disk)"
EACH_INSTALLS = f"each container first {_INSTALLING.format('')}, while you pay for it"
INSTALLS_ONCE = f"the service {_INSTALLING.format(' once')}, and keeps it as a layer of the image"
WITH_TORCH = "Choose an image that has torch to avoid that: --option image=NAME."
Kind = Literal["rejected", "unavailable", "unknown"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobKey:
    """The identity of a job: the run, the rank and the attempt that it runs.

    Example:
        JobKey("s3://bucket/runs", "brave-otter-7f3a", rank=3, attempt=0).name
    """

    store_url: str
    """The url of the run's store. Two stores may have runs of the same id. Symbolic links are resolved in it."""
    run_id: str
    rank: int
    """The rank, or the number of a spare."""
    attempt: int
    is_spare: bool = False
    """True if the job is a spare. Default False."""
    launched_at: float = 0.0
    """The time of the run's launch, in seconds since the epoch. A run that was removed may be followed by one of the
    same id."""

    @classmethod
    def of(cls, attempt: Attempt, launched_at: float) -> JobKey:
        """Return the key of the job that runs an attempt.

        Args:
            attempt: the attempt.
            launched_at: the time of the run's launch, in seconds since the epoch.
        """
        identity = real_url(attempt.store.url), attempt.run_id, attempt.rank, attempt.number
        return cls(*identity, attempt.is_spare, launched_at)

    @property
    def name(self) -> str:
        """The name of the job: at most 64 characters of `[a-z0-9-]`, which every service accepts."""
        return f"{self.run_id}-{self.nonce}-{'s' if self.is_spare else 'r'}{self.rank:04d}-a{self.attempt}"

    @property
    def group(self) -> str:
        """The name of a group of jobs: at most 53 characters of `[a-z0-9-]`.

        It is the same for all ranks of one attempt number. Ranks that start later with the same number are another
        group of the same name.
        """
        end = f"-{'s' if self.is_spare else 'a'}{self.attempt}"
        return f"{self.run_id}-{self.nonce}"[: MAX_GROUP - len(end)] + end

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the job. Names and values have only characters of `[A-Za-z0-9_-]`."""
        rank_label = "replicas-spare" if self.is_spare else "replicas-rank"
        return {**self.run_labels, rank_label: str(self.rank), "replicas-attempt": str(self.attempt)}

    @property
    def run_labels(self) -> dict[str, str]:
        """The labels that all jobs of the run have."""
        return {RUN_LABEL: self.run_id, STORE_LABEL: self.nonce}

    @property
    def nonce(self) -> str:
        """Eight hexadecimal digits that distinguish runs with the same id: in several stores, or one after another."""
        # Without the options of the url, because another machine may reach the store with other options.
        where = self.store_url.partition("?")[0]
        return hashlib.sha256(f"{where} {self.launched_at!r}".encode()).hexdigest()[:8]


@dataclass(frozen=True)
class JobSpec:
    """The description of a job that a service should start. Every service gets the same command.

    Example:
        JobSpec(key, ("python", "-c", "print('hello')"), requirements=(), env={}, credentials={}, gpu="H100")
    """

    key: JobKey
    command: tuple[str, ...] = field(repr=False)
    """The program and its arguments. The image must have Python."""
    requirements: tuple[str, ...]
    """The packages that the image should have. The command installs missing packages."""
    pins: tuple[str, ...] = field(default=(), kw_only=True)
    """The requirements of this project. If the image has a later version, it keeps that."""
    env: Mapping[str, str] = field(repr=False)
    """The environment variables of the replica that are not secret."""
    credentials: Mapping[str, str] = field(repr=False)
    """Secret variables. They reach the replica as a secret of the service, and must not be visible elsewhere."""
    secret_names: tuple[str, ...] = ()
    """The names of the user's secrets that the replica gets."""
    gpu: str | None = None
    """The GPU, as in "H100" or "H100:2". None: no GPU."""
    procs: int = field(default=1, kw_only=True)
    """The number of processes of the replica, as far as it is known before the start."""
    limit_s: int | None = 3600
    """The seconds after which the service ends the job. None: the service's own limit, if it has one."""
    margin_s: int = 0
    """The part of `limit_s` for the time before the entrypoint begins. A service that does not accept `limit_s` may
    subtract this part.
    """


@dataclass(frozen=True)
class JobState:
    """The report of a service about a job. If the store has an outcome of the attempt, the outcome counts instead.

    Example:
        JobState(True, "oom", exit_code=137, message="OOMKilled")
    """

    has_ended: bool
    reason: Reason | None = None
    """The reason why the job ended, as far as the service knows it. None: the job ended by itself, with `exit_code`.

    A job that has not ended may have a reason, too. Then the service ended the replica, and the job waits in a queue
    again. Such a job has `holds_place`.
    """
    exit_code: int | None = None
    message: str = ""
    """The service's own text. For a job that has not ended, it is the reason for its wait, as in "scheduling"."""
    holds_place: bool = False
    """True if the replica has ended and its job still has a place at the service. The process that records the end
    calls `JobService.withdraw` to free the place."""

    is_unconfirmed: bool = False
    """True if the service has lost contact with the job.

    The service then does not know whether the process of the replica still runs. The replica counts as ended only
    when its heartbeat has stopped as well. The time since the last heartbeat is measured from this report on.
    """


@dataclass(frozen=True)
class RunningJob:
    """A job that has not ended, as its service lists it.

    Example:
        [each.job for each in service.running_jobs({"replicas-run": "brave-otter-7f3a"})]
    """

    job: JobId
    labels: Mapping[str, str]
    """The labels that the service reports. `replicas-store` is always among them."""


UNKNOWN = JobState(True, "lost", is_unconfirmed=True)
"""The state of a job that the service does not know. The job is gone, or belongs to another account."""


class JobServiceError(BackendError):
    """The service refused a call, or failed.

    Args:
        message: the message of the error.
        kind: "rejected": the service did nothing, and a repetition would not help. "unavailable": the service did
            nothing, and a later repetition may help. "unknown": the service may have acted, because the connection
            broke or the service failed inside.
        retry_after_s: the pause that the service asked for, in seconds. Default 0: none.
        lacks_machines: True if the service found no machine for the job. Default False.

    Example:
        raise JobServiceError("Modal: too many requests.", "unavailable", retry_after_s=5.0)
    """

    def __init__(self, message: str, kind: Kind, *, retry_after_s: float = 0.0, lacks_machines: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.lacks_machines = lacks_machines


class ForeignJobError(JobServiceError, UnknownHandleError):
    """A handle names a job that does not run its replica.

    Args:
        service: the name of the service, for the message.
        key: the attempt that the handle is of.

    Example:
        raise ForeignJobError("Modal", key)
    """

    def __init__(self, service: str, key: JobKey) -> None:
        super().__init__(
            f"The handle of rank {key.rank} of run {key.run_id!r} names a job that {service} does not know as this "
            "replica's. It is neither read nor ended, because another user may have written that handle.",
            "rejected",
        )


class CancelledWhileStartingError(JobServiceError):
    """The replica was cancelled before the service had started it.

    Example:
        raise CancelledWhileStartingError
    """

    def __init__(self) -> None:
        super().__init__("it was cancelled while it was being started.", "rejected")


def option(default: Any, recorded_as: type | re.Pattern[str]) -> Any:
    """Declare an option of a service that is recorded with a run, and may be read from the record.

    Another user may have written the record. So an option that decides where credentials are sent must be an ordinary
    field instead.

    Args:
        default: the default value.
        recorded_as: the type of a legal value, or a pattern that the whole text must match; see `Recordable`.

    Example:
        region: str | None = option(None, OPTION_NAME)
    """
    return field(default=default, metadata={"recorded_as": recorded_as})


# More than 20 methods: these are all questions that an executor may ask a service.
@dataclass(eq=False, kw_only=True)
class JobService(abc.ABC):
    """A service that runs jobs. A subclass makes each call through the SDK of one service.

    A call may come from several threads at the same time. Each call may raise JobServiceError with the service's own
    message. The fields of a subclass are the options of its executor.

    A subclass must write seven methods: check_account, start, find, verify, state, stop and describe, and logs or
    open_log. The others have defaults for a service that has no such ability.

    Args:
        pip: the requirements of the replicas. Default: those in the workspace's requirements.txt or pyproject.toml.

    Example:
        See `CONTRIBUTING.md`, which has a subclass in 20 lines.
    """

    name: ClassVar[str]
    """The service's name in messages, as in "Modal"."""
    log_advice: ClassVar[str] = ""
    """For a service that writes logs into files: how to make these files readable on this machine."""
    starts_together: ClassVar[bool] = False
    """True if `start_jobs` starts the jobs of a group in one call, all of them or none."""
    limits_advice: ClassVar[str] = ""
    """A sentence that names the usual reason why the service has no machine for a job."""
    lists_running: ClassVar[bool] = False
    """True if `running_jobs` lists the jobs of a run that have not ended."""
    keeps_installed: ClassVar[bool] = False
    """True if the service keeps installed packages as a layer of the image. False: each container installs them."""
    states_name_ranks: ClassVar[bool] = True
    """True if `states` knows the rank of each job. False: it only knows that a job belongs to the run."""

    pip: Sequence[str] = ()
    """The requirements of the replicas. If empty, the workspace's files name them."""

    @property
    def options(self) -> dict[str, Any]:
        """The options with which another process makes the same service. Requirements are part of the run's task."""
        return {option.name: getattr(self, option.name) for option in fields(self) if option.name != "pip"}

    @property
    def python_of_replicas(self) -> str | None:
        """The minor version of the replicas' Python, as in "3.12". None if the options do not determine it."""
        return None

    @property
    def image_lacks_torch(self) -> bool:
        """True if the image is known to have no torch, like Docker's `python`. False for an image that is not known."""
        return python_of_image(getattr(self, "image", None)) is not None

    @classmethod
    def recordable_options(cls) -> Recordable:
        """Return the options that are declared by `option`, with the legal values of each."""
        return {each.name: each.metadata["recorded_as"] for each in fields(cls) if "recorded_as" in each.metadata}

    @abc.abstractmethod
    def check_account(self, gpu: str | None, timeout_s: float | None, secret_names: Sequence[str]) -> None:
        """Refuse a launch that this service cannot run, before anything is started.

        Args:
            gpu: the GPU of each replica, as in "H100:2". None: no GPU.
            timeout_s: the time limit of each replica in seconds. None: no limit.
            secret_names: the names of the secrets that each replica gets.

        Raises:
            BackendError: the account cannot be used, or the service has no such GPU or secret.
            ValueError: the service does not accept a value.
        """

    def price_per_hour(self, gpu: str | None) -> float | None:
        """Return the price of one replica in US dollars an hour. None if the service does not publish it.

        Args:
            gpu: the GPU of the replica. None: no GPU.
        """
        return None

    def reports_preemption(self, gpu: str | None) -> bool:
        """Return True if the service may take the machine of a job back, and `state` then reports "preempted".

        Args:
            gpu: the GPU of the job. None: no GPU.
        """
        return False

    def command(self) -> tuple[str, ...]:
        """Return the command that each job runs. It fetches the replica's code and starts the worker."""
        from executors.shipping.package import bootstrap_command  # not at the top: most processes start no job

        return bootstrap_command()

    def start(self, job: JobSpec) -> JobId:
        """Start a job, and return its id. The call may wait until the job has a machine.

        Args:
            job: the job.
        """
        return self.start_jobs([job])[0]

    def start_jobs(self, jobs: Sequence[JobSpec]) -> list[JobId]:
        """Start the jobs of a group in one call, all or none. Return their ids in the order of the jobs.

        It is called only if `starts_together`.

        Args:
            jobs: the jobs. They differ only in their ranks; see `common_env`.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define start(), or with starts_together=True start_jobs()."
        )

    def start_waits(self, job: JobSpec) -> bool:
        """Return True if `start` waits until the job has its GPU. Then each started job has a GPU.

        Args:
            job: the job.
        """
        return False

    def start_limit_s(self, job: JobSpec) -> float:
        """Return the longest time in seconds that a start may take, besides pauses that the service asks for.

        If a start takes longer, other processes assume that the process that started the job has died.

        Args:
            job: the job.
        """
        return START_LIMIT_S

    def interrupt_starts(self) -> None:
        """Make waiting calls of `start` fail soon without leaving a job, because the launch was given up.

        The launch calls it again, because other calls may have begun to wait since.
        """
        return

    @abc.abstractmethod
    def find(self, key: JobKey) -> list[JobId]:
        """Return the jobs that the service knows for an attempt, oldest first. Jobs that have ended are included.

        Args:
            key: the run, the rank and the attempt.
        """

    @abc.abstractmethod
    def verify(self, job_id: JobId, key: JobKey) -> JobId:
        """Return the id of a job that a record names, after checking that the job runs an attempt.

        A job that the service does not know any more passes the check. Without the check, a user who can write to the
        store could make this process show or end any job of the account.

        Args:
            job_id: the id, as the record has it.
            key: the run, the rank and the attempt.

        Raises:
            ForeignJobError: the job runs something else, or the id is not an id of this service.
        """

    @abc.abstractmethod
    def state(self, job_id: JobId) -> JobState:
        """Return the state of a job, without waiting. For a job that the service does not know, return `UNKNOWN`.

        Args:
            job_id: the job.
        """

    def states(self, jobs: Mapping[JobKey, JobId]) -> dict[JobKey, JobState]:
        """Return the states of jobs of one run, as far as one request shows them.

        Override it if the service can list jobs.

        The caller asks for the other jobs one by one. The ids come from records, so check two things for each job: it
        has the labels of the run, and the whole id is the one that `start` returned. With `states_name_ranks`, also
        check that it has the labels of its key. Then the caller need not call `verify`.

        Args:
            jobs: jobs of one run.
        """
        return {}

    def logs(self, job_id: JobId, n_lines: int) -> str:
        """Return the last lines that a job printed, without waiting for more. Empty for an unknown job.

        Override this method or `open_log`. By default each calls the other.

        Args:
            job_id: the job.
            n_lines: the largest number of lines.
        """
        with contextlib.closing(self.open_log(job_id)) as log:
            return log.tail(n_lines)

    def open_log(self, job_id: JobId) -> Log:
        """Return the log of a job, which a reader can follow. The default reads the last lines again and again.

        Args:
            job_id: the job.
        """
        return TailedLog(lambda n_lines: self.logs(job_id, n_lines))

    @abc.abstractmethod
    def stop(self, job_id: JobId) -> None:
        """End a job. A job that has ended, or that the service does not know, is not an error.

        Args:
            job_id: the job.
        """

    def withdraw(self, job_id: JobId) -> None:
        """Free the place of a job whose replica has ended and whose state has `holds_place`. The default is `stop`.

        Args:
            job_id: the job.
        """
        self.stop(job_id)

    def running_jobs(self, labels: Mapping[str, str]) -> list[RunningJob]:
        """Return the jobs that have these labels and have not ended. It is called only if `lists_running`.

        A run whose store does not answer is ended this way. The labels are `replicas-run`, and `replicas-store` if the
        caller knows it. Without it, several runs may have the id.

        Args:
            labels: the labels that a job must have. A service that keeps names instead compares these.

        Example:
            service.running_jobs({"replicas-run": "brave-otter-7f3a"})
        """
        return []

    def commands_to_end(self, run_id: str, job_ids: Sequence[JobId] = ()) -> str:
        """Return the service's own commands that list and end the jobs of a run.

        Args:
            run_id: the run.
            job_ids: the jobs that are left. Empty: they are not known.

        Example:
            service.commands_to_end("brave-otter-7f3a")
        """
        return f"look for the jobs of {run_id} at {self.name}"

    def risks(self) -> Iterator[tuple[str, str]]:
        """Yield the settings of the service that may harm a run. Each is a pair of the problem and an advice."""
        return iter(())

    @abc.abstractmethod
    def describe(self, job: JobSpec) -> dict[str, Any]:
        """Return the request that `start` would make, as plain JSON without the values of secrets and variables.

        Args:
            job: the job.
        """


def python_of_image(image: object) -> str | None:
    """Return the minor version of Python in one of Docker's images `python:3.x`. None for other images.

    Args:
        image: the name of the image.

    Example:
        python_of_image("python:3.12-slim")
    """
    found = OFFICIAL.match(image) if isinstance(image, str) else None
    return None if found is None else found[1]


def common_env(jobs: Sequence[JobSpec]) -> dict[str, str]:
    """Return the variables that the jobs of a group have in common: all except `REPLICA_RANK`.

    Args:
        jobs: the jobs of the group.

    Raises:
        ValueError: the jobs differ in another variable.

    Example:
        common_env(jobs)["REPLICA_WORLD_SIZE"]
    """
    common, *others = [{name: value for name, value in job.env.items() if name != RANK} for job in jobs]
    for other in others:
        if differs := sorted(name for name, _ in common.items() ^ other.items()):
            raise ValueError(
                f"Jobs that start together may only differ in {RANK}, but they differ in {differs[0]!r}. Give that "
                "variable one value."
            )
    return common


def shortened(command: Sequence[str]) -> list[str]:
    """Return a command for messages. Its last word, a script, is replaced by the length of the script.

    Args:
        command: the program and its arguments.

    Example:
        shortened(["python", "-c", "print('hello')"])
    """
    *words, script = command
    return [*words, f"<a script of {len(script)} characters>"]


def stop_others(service: JobService, key: JobKey, job: JobId | None) -> None:
    """End all jobs of an attempt except one. If the answer to a start was lost, the attempt may have two jobs.

    Args:
        service: the service.
        key: the run, the rank and the attempt.
        job: the job that stays. None: no job stays.

    Raises:
        JobServiceError: the service refused or failed.

    Example:
        stop_others(service, key, job_id)
    """
    for found in service.find(key):
        if found != job:
            service.stop(found)


def retrying(sleep: Callable[[float], Any] = time.sleep, *, patience_s: float = PATIENCE_S) -> tenacity.Retrying:
    """Return a policy that repeats a call while the service is unavailable or its answer is lost.

    Use it for calls that may act twice. `GangStart` looks for the job before it repeats a start. When the policy gives
    up, it raises the last error.

    Args:
        sleep: waits for the given number of seconds. Default: `time.sleep`.
        patience_s: the largest sum of all pauses, in seconds. Default 60.

    Example:
        retrying()(service.stop, job_id)
    """
    usual, more = tenacity.wait_exponential(FIRST_PAUSE_S, LONGEST_PAUSE_S), tenacity.wait_random(0, FIRST_PAUSE_S)
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(
            lambda error: isinstance(error, JobServiceError) and error.kind != "rejected"
        ),
        # The pauses grow exponentially, and each is at least as long as the service asked for.
        wait=lambda state: max(usual(state), _asked_s(state)) + more(state),
        stop=lambda state: state.attempt_number >= TRIES or state.idle_for + _asked_s(state) > patience_s,
        before_sleep=_report_long_pause,
        sleep=sleep,
        reraise=True,
    )


def _asked_s(state: tenacity.RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome else None
    return error.retry_after_s if isinstance(error, JobServiceError) else 0.0


_reporting, _reported_until = threading.Lock(), 0.0


def _report_long_pause(state: tenacity.RetryCallState) -> None:
    """Print that the service asks for a long pause: once, and not for each job that waits."""
    global _reported_until
    error, pause_s = state.outcome and state.outcome.exception(), state.upcoming_sleep
    log.info("asking again in %.1f s: %s", pause_s, error)
    with _reporting:
        if pause_s >= REPORTED_PAUSE_S and time.monotonic() >= _reported_until:
            _reported_until = time.monotonic() + pause_s
            print(f"replicas: {error} Asking again in {pause_s:.0f} s.", file=sys.stderr)
