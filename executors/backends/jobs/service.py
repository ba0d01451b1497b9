"""JobService: the calls to a service that runs jobs.

A service's own file knows one SDK and nothing of runs, stores or outcomes; `executor.py` knows these and no SDK.
`executors.testing.job_service_contract` is the executable form of this file.
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
from executors.task.create import MASK

JobId = dict[str, Any]
"""The data with which the service finds a job again. Plain JSON, which becomes part of the replica's handle."""
TRIES = 6
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 8.0  # so about 20 s in all, besides what the requests take
PATIENCE_S = 60.0  # of all pauses together: a service that asks for longer ones has refused
LONGEST_PATIENCE_S = (
    300.0  # where giving up costs a launch, or leaves jobs behind; the longest pause that the Hub asks for
)
START_LIMIT_S = 180.0
MAX_GROUP = 53
RUN_LABEL, STORE_LABEL = "replicas-run", "replicas-store"
MAX_COMMANDS = 8  # that one message names
REPORTED_PAUSE_S = 10.0  # a pause of this length is reported
OFFICIAL = re.compile(r"(?:docker\.io/)?(?:library/)?python:(3\.\d{1,2})\b")  # Docker's own
# Measured with torch 2.13.0 for CUDA 13, uv 0.13 and a fast mirror: 46 s on two cores that had other work as well.
_INSTALLING = "installs torch{}, which takes a minute with a fast network (2.7 GB to download, 4.8 GB on disk)"
EACH_INSTALLS = f"each container first {_INSTALLING.format('')}, while you pay for it"
INSTALLS_ONCE = f"the service {_INSTALLING.format(' once')}, and keeps it as a layer of the image"
WITH_TORCH = "An image that has torch avoids that: --option image=NAME."
Kind = Literal["rejected", "unavailable", "unknown"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobKey:
    """The identity of a job: which attempt of which rank it runs."""

    store_url: str
    """Two stores may both hold a run of one id; a directory is one store, by whichever link it was named."""
    run_id: str
    rank: int
    attempt: int
    is_spare: bool = False
    """Whether `rank` numbers a spare."""
    launched_at: float = 0.0
    """When its run was: one store may hold runs of one id, each after the one before was removed."""

    @classmethod
    def of(cls, attempt: Attempt, launched_at: float) -> JobKey:
        place = real_url(attempt.store.url), attempt.run_id, attempt.rank, attempt.number
        return cls(*place, attempt.is_spare, launched_at)

    @property
    def name(self) -> str:
        """At most 64 of `[a-z0-9-]`: what every service takes as a name."""
        return f"{self.run_id}-{self.nonce}-{'s' if self.is_spare else 'r'}{self.rank:04d}-a{self.attempt}"

    @property
    def group(self) -> str:
        """At most 53 of `[a-z0-9-]`, the same for all ranks of one attempt number. Several groups may have one name."""
        end = f"-{'s' if self.is_spare else 'a'}{self.attempt}"
        return f"{self.run_id}-{self.nonce}"[: MAX_GROUP - len(end)] + end

    @property
    def labels(self) -> dict[str, str]:
        """The same as labels: names and values of `[A-Za-z0-9_-]`."""
        what = "replicas-spare" if self.is_spare else "replicas-rank"
        return {**self.run_labels, what: str(self.rank), "replicas-attempt": str(self.attempt)}

    @property
    def run_labels(self) -> dict[str, str]:
        """Those that all jobs of the run have."""
        return {RUN_LABEL: self.run_id, STORE_LABEL: self.nonce}

    @property
    def nonce(self) -> str:
        """Eight hex digits that tell apart the runs of one id, in several stores, or in one after each other."""
        # Without the options behind the "?": the launcher's and another machine's may differ.
        where = self.store_url.partition("?")[0]
        return hashlib.sha256(f"{where} {self.launched_at!r}".encode()).hexdigest()[:8]


@dataclass(frozen=True)
class JobSpec:
    """One replica as a job: the same command at every service, in an image with Python."""

    key: JobKey
    command: tuple[str, ...] = field(repr=False)
    requirements: tuple[str, ...]
    """The packages that the image should have. The command installs missing ones."""
    pins: tuple[str, ...] = field(default=(), kw_only=True)
    """The requirements of this project. An image that has a later version keeps it."""
    env: Mapping[str, str] = field(repr=False)
    credentials: Mapping[str, str] = field(repr=False)
    """Variables that reach the replica through a secret object of the service, and are seen nowhere else."""
    secret_names: tuple[str, ...] = ()
    """Secrets of the user, by name."""
    gpu: str | None = None
    limit_s: int | None = 3600
    """Seconds after which the service itself ends the job. None: its own limit, if it has one."""
    margin_s: int = 0
    """How many of them are for what comes before the entrypoint: a service that has no room for them may drop them."""


@dataclass(frozen=True)
class JobState:
    """The report of a service about a job. Advisory: an outcome in the store wins."""

    has_ended: bool
    reason: Reason | None = None
    """Why the job ended, as far as the service knows. None: by itself, with `exit_code`.

    If the job has not ended, it is why the service ended its replica, as when a queue took the job back. Such a job
    `holds_place` in the queue, and its replica has ended if it ran.
    """
    exit_code: int | None = None
    message: str = ""
    """The service's own words. For a job that has not ended, the reason of its wait, as in "scheduling"."""
    holds_place: bool = False
    """Whether a replica that has ended still holds its place at the service: who concludes the end withdraws it."""

    is_unconfirmed: bool = False
    """Whether no process saw the job end. The replica has ended once its heartbeat has stood still as well.

    If the job has not ended, it is whether the service has lost contact with the job's machine. The standstill of the
    heartbeat is measured from then on.
    """


@dataclass(frozen=True)
class RunningJob:
    """A job that has not ended, as its service lists it."""

    job: JobId
    labels: Mapping[str, str]
    """Its labels, as far as the service tells them; `replicas-store` is always among them."""


UNKNOWN = JobState(True, "lost", is_unconfirmed=True)
"""The state of a job that the service does not know: gone, or another account's."""


class JobServiceError(BackendError):
    """The service refused or failed.

    Args:
        message: the message of the error.
        kind: "rejected" means that nothing was done, and that a repetition would not help. "unavailable" means that
            nothing was done, and that a later repetition may help. "unknown" means that it may have been done, because
            the connection broke, or the service failed inside.
        retry_after_s: the pause that the service asked for. 0 means none.
        lacks_machines: whether the start waited for a machine until the service gave up.
    """

    def __init__(self, message: str, kind: Kind, *, retry_after_s: float = 0.0, lacks_machines: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.retry_after_s = retry_after_s
        self.lacks_machines = lacks_machines


class ForeignJobError(JobServiceError, UnknownHandleError):
    """A record names a job that does not run its replica."""

    def __init__(self, service: str, key: JobKey) -> None:
        super().__init__(
            f"The handle of rank {key.rank} of run {key.run_id!r} names a job that {service} does not know as this "
            "replica's. It is neither read nor ended, because another user may have written that handle.",
            "rejected",
        )


class CancelledWhileStartingError(JobServiceError):
    """The replica was cancelled before the service had started it."""

    def __init__(self) -> None:
        super().__init__("it was cancelled while it was being started.", "rejected")


def option(default: Any, recorded_as: type | re.Pattern[str]) -> Any:
    """Declare an option of a service that readers take from a run's record; see `protocol.Recordable`."""
    return field(default=default, metadata={"recorded_as": recorded_as})


@dataclass(eq=False, kw_only=True)
class JobService(abc.ABC):
    """A service that runs jobs, through its SDK. Every call may come from several threads at once.

    Every call raises JobServiceError, with the words of the service. The fields are the options of its executor.
    """

    name: ClassVar[str]
    """The service's name for people, as in "Modal"."""
    log_advice: ClassVar[str] = ""
    """What to do where logs are files, and the one of a replica that ran is not here."""
    starts_together: ClassVar[bool] = False
    """Whether one call starts jobs of one group, all of them or none: `start_jobs`."""
    limits_advice: ClassVar[str] = ""
    """A sentence on why the service usually has no machine for a job."""
    lists_running: ClassVar[bool] = False
    """Whether `running_jobs` lists the jobs of a run that have not ended."""
    keeps_installed: ClassVar[bool] = False
    """Whether what replicas need is installed once, in a layer that the service keeps, and not by each container."""
    states_name_ranks: ClassVar[bool] = True
    """Whether `states` knows of which rank each job is; else only that it is one of the run's."""

    pip: Sequence[str] = ()
    """Requirements of the replicas. When empty, the workspace's files name them."""

    @property
    def options(self) -> dict[str, Any]:
        """The options that make the same service in another process. Requirements travel with the task."""
        return {option.name: getattr(self, option.name) for option in fields(self) if option.name != "pip"}

    @property
    def python_of_replicas(self) -> str | None:
        """The minor version of Python that replicas run, as in "3.12", as far as the options say it; see
        `python_of_image`."""
        return None

    @property
    def image_lacks_torch(self) -> bool:
        """Whether the image is known to have no torch. Docker's `python` has none. Other images are not known."""
        return python_of_image(getattr(self, "image", None)) is not None

    @classmethod
    def recordable_options(cls) -> Recordable:
        """Its options that are declared by `option`."""
        return {each.name: each.metadata["recorded_as"] for each in fields(cls) if "recorded_as" in each.metadata}

    @abc.abstractmethod
    def check_account(self, gpu: str | None, timeout_s: float | None, secret_names: Sequence[str]) -> None:
        """Refuse what this service cannot do, and an account that cannot be used, before anything is started.

        Raises:
            BackendError: no credentials, an unknown GPU or secret.
            ValueError: a value that the service does not take.
        """

    def price_per_hour(self, gpu: str | None) -> float | None:
        """Return the price of an hour of one replica in US dollars. None if the service does not publish it."""
        return None

    def reports_preemption(self, gpu: str | None) -> bool:
        """Return whether jobs with such a GPU may lose their machine, and `state` then reports "preempted"."""
        return False

    def command(self) -> tuple[str, ...]:
        """Return what each job runs: it fetches the replica's code, and becomes the worker."""
        from executors.shipping.package import bootstrap_command  # a look at a run packs nothing

        return bootstrap_command()

    def start(self, job: JobSpec) -> JobId:
        """Start a job, and return its id; may block until the job is scheduled."""
        return self.start_jobs([job])[0]

    def start_jobs(self, jobs: Sequence[JobSpec]) -> list[JobId]:
        """Start jobs of one group in one call, all or none; return their ids in the order given.

        Called where `starts_together`. The jobs differ in their ranks alone; see `common_env`.
        """
        raise NotImplementedError(f"{type(self).__name__} needs start(), or start_jobs() where it starts_together.")

    def start_waits(self, job: JobSpec) -> bool:
        """Return whether `start` waits until the job has its GPU: what has started then has one."""
        return False

    def start_limit_s(self, job: JobSpec) -> float:
        """Return how long a start may take, waits of the service aside. A starter that needs longer counts as dead."""
        return START_LIMIT_S

    def interrupt_starts(self) -> None:
        """Let the calls of `start` that still wait fail soon, and leave no job: the launch was given up.

        It is called again for those that have begun to wait since.
        """
        return

    @abc.abstractmethod
    def find(self, key: JobKey) -> list[JobId]:
        """Return the jobs of one attempt of one rank that the service knows, oldest first, also those that ended."""

    @abc.abstractmethod
    def verify(self, job_id: JobId, key: JobKey) -> JobId:
        """Return the id of a job that a record names, if it runs this attempt; one that is gone passes.

        Without this, a user who can write to a store could let us show or end any job of this account.

        Raises:
            ForeignJobError: it is another job, or not an id of this service.
        """

    @abc.abstractmethod
    def state(self, job_id: JobId) -> JobState:
        """Return the job's state without waiting; of a job that the service does not know `UNKNOWN`."""

    def states(self, jobs: Mapping[JobKey, JobId]) -> dict[JobKey, JobState]:
        """Return the states of the jobs that one request shows, out of these jobs of one run.

        Jobs that are left out are asked for one by one. Override it if the service lists jobs. The ids are as records
        name them: a job is shown only if it has the labels of the run, and if the whole id is the one that `start`
        returned. With `states_name_ranks` it is shown only under the key whose labels it has, so that no verification
        is needed.
        """
        return {}

    def logs(self, job_id: JobId, n_lines: int) -> str:
        """Return the last lines that a job wrote, without waiting for more. Empty for a job that is unknown.

        Override this, or `open_log`: each is made of the other.
        """
        with contextlib.closing(self.open_log(job_id)) as log:
            return log.tail(n_lines)

    def open_log(self, job_id: JobId) -> Log:
        """Return a job's log, to be followed; where the service has no better way, by its last lines."""
        return TailedLog(lambda n_lines: self.logs(job_id, n_lines))

    @abc.abstractmethod
    def stop(self, job_id: JobId) -> None:
        """End a job. One that has ended, or is unknown, is not an error."""

    def withdraw(self, job_id: JobId) -> None:
        """Free the place of a job whose replica has ended, where its state `holds_place`. By default this is `stop`.

        Args:
            job_id: the job.
        """
        self.stop(job_id)

    def running_jobs(self, labels: Mapping[str, str]) -> list[RunningJob]:
        """Return the jobs that have these labels and have not ended; called where `lists_running`.

        This is how a run is ended whose store does not answer. The labels are `replicas-run`, and `replicas-store` if
        the caller knows it: of one id there may be several runs.

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
        """Yield what users should know of the service's settings, each with what may be done about it."""
        return iter(())

    @abc.abstractmethod
    def describe(self, job: JobSpec) -> dict[str, Any]:
        """Return the request that `start` would make as plain JSON, values of secrets and environment masked."""


def python_of_image(image: object) -> str | None:
    """Return the minor version of Python in one of Docker's images `python:3.x`. None for other images."""
    found = OFFICIAL.match(image) if isinstance(image, str) else None
    return None if found is None else found[1]


def common_env(jobs: Sequence[JobSpec]) -> dict[str, str]:
    """Return the variables that jobs of one group have in common: all of them but `REPLICA_RANK`.

    Raises:
        ValueError: another variable differs.
    """
    common, *others = [{name: value for name, value in job.env.items() if name != RANK} for job in jobs]
    for other in others:
        if differs := sorted(name for name, _ in common.items() ^ other.items()):
            raise ValueError(f"Jobs that start together differ in the variable {differs[0]!r}.")
    return common


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with its values masked, but for our own variables, which are not secret."""
    return {name: value if name.startswith("REPLICA_") else MASK for name, value in env.items()}


def shortened(command: Sequence[str]) -> list[str]:
    """Return a command as people see it: only the length of its last word, a script."""
    *words, script = command
    return [*words, f"<a script of {len(script)} characters>"]


def stop_others(service: JobService, key: JobKey, job: JobId | None) -> None:
    """End whatever the service lists under a key beside its job: an answer that was lost may have left it."""
    for found in service.find(key):
        if found != job:
            service.stop(found)


def retrying(sleep: Callable[[float], Any] = time.sleep, *, patience_s: float = PATIENCE_S) -> tenacity.Retrying:
    """Return a retry policy: a call is repeated while the service is unavailable, or its answer is lost.

    For what may be done twice; `GangStart` looks for the job first. The last error is raised.
    """
    usual, more = tenacity.wait_exponential(FIRST_PAUSE_S, LONGEST_PAUSE_S), tenacity.wait_random(0, FIRST_PAUSE_S)
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(
            lambda error: isinstance(error, JobServiceError) and error.kind != "rejected"
        ),
        # Exponential pauses, each at least as long as the service asked for.
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
    """Print once, and not for each job, that the service asks for a pause."""
    global _reported_until
    error, pause_s = state.outcome and state.outcome.exception(), state.upcoming_sleep
    log.info("asking again in %.1f s: %s", pause_s, error)
    with _reporting:
        if pause_s >= REPORTED_PAUSE_S and time.monotonic() >= _reported_until:
            _reported_until = time.monotonic() + pause_s
            print(f"replicas: {error} Asking again in {pause_s:.0f} s.", file=sys.stderr)
