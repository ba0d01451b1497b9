"""ModalExecutor: runs replicas as Modal Sandboxes, over the `modal` SDK.

Sandboxes are better than Functions here: they have an exit code, a name and their own output, and they run the same
command as other backends. With a GPU, the SDK uses another server, where the creation of a sandbox waits for a machine.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from executors.backends.jobs.executor import MARGIN_S, JobExecutor, options_of
from executors.backends.jobs.service import (
    MAX_COMMANDS,
    RUN_LABEL,
    STORE_LABEL,
    UNKNOWN,
    ForeignJobError,
    JobId,
    JobKey,
    JobService,
    JobSpec,
    JobState,
    RunningJob,
    option,
    python_of_image,
    shortened,
)
from executors.backends.jobs.timed_log import LogEntry, SharedLog, TimedLog
from executors.backends.modal_client import TOKEN_ADVICE, WaitingCalls, in_thread, modal, translated_modal_errors
from executors.backends.modal_container import Images, check_secret, check_volumes, described, image_of, volume_of
from executors.errors import BackendError
from executors.masking import masked
from executors.task.record import OPTION_NAME

LONGEST_S = 24 * 3600 - MARGIN_S  # Modal ends every sandbox after a day
KILLED = 128 + 9
GPU_START_S = 1500.0  # a start waits up to 21 minutes for a machine
BUILD_S = 900.0  # the longest time to build an image
LEAST_CORES, LEAST_MIB = 0.125, 128  # Modal reserves these by default
GPU_NAMES = {"a100": "a100_40gb", "a10": "a10g"}  # the names of GPUs in the rates, where they differ
MOST_ENTRIES = 20_000  # the most entries of a log that the SDK returns in one call
PYTHON_VERSION = re.compile(r"3\.\d{1,2}")
APP_ID = re.compile(r"ap-\w{1,60}", re.ASCII)


# More than 20 methods: it makes every call of a JobService.
@dataclass(eq=False, kw_only=True)
class ModalJobs(JobService):
    """The sandboxes of one Modal app. `ModalExecutor` describes the fields.

    The class has more than 20 methods. Each is one call of `JobService`, or an answer that is asked for once and kept:
    the app, the rates, the logs and the tags of a sandbox.

    Raises:
        MissingDependencyError: the SDK is not installed.

    Example:
        ModalJobs(region="us-east").check_account("H100", 3600.0, [])
    """

    name = "Modal"
    limits_advice = "The usual cause is the limit on GPUs at the same time, which the plan of your workspace sets."
    lists_running = True
    keeps_installed = True
    states_name_ranks = False  # a list has no tags, and reading them would be a request for each sandbox

    app_name: str = option("replicas", OPTION_NAME)
    image: Any = None
    python_version: str | None = option(None, PYTHON_VERSION)
    secrets: Sequence[str] = ()
    cpu: float | None = option(None, float)
    memory_mb: int | None = option(None, int)
    region: str | None = option(None, OPTION_NAME)
    cloud: str | None = option(None, OPTION_NAME)
    environment: str | None = option(None, OPTION_NAME)
    volumes: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        modal.config  # noqa: B018 - raises now if the SDK is missing, before anything is planned
        self.python_version = self.python_version or "{}.{}".format(*sys.version_info)
        self._lock = threading.Lock()
        self._starts = WaitingCalls()
        self._app: modal.App | None = None
        self._images = Images(self._starts)
        self._keys: dict[str, JobKey] = {}
        """The attempt that each sandbox runs, from its tags."""
        self._logs: dict[str, Any] = {}
        """The SDK's log of each sandbox. It keeps answers that a new one would ask for again."""

    @property
    def python_of_replicas(self) -> str | None:
        return self.python_version if self.image is None else python_of_image(self.image)

    @in_thread
    def check_account(self, gpu: str | None, timeout_s: float | None, secret_names: Sequence[str]) -> None:
        if timeout_s is not None and timeout_s > LONGEST_S:
            raise ValueError(
                f"timeout must be at most {LONGEST_S} seconds on Modal, got timeout={timeout_s:g}. Use a shorter "
                "timeout, and continue with `replicas resume`."
            )
        config = modal.config.config
        if not (config.get("token_id") and config.get("token_secret")) and not config.get("oauth_refresh_token"):
            raise BackendError(f"Backend 'modal' needs a Modal token. {TOKEN_ADVICE}")
        with contextlib.suppress(modal.exception.NotFoundError):  # the launch creates a missing app
            self._look_up(create_if_missing=False)
        for name in (*self.secrets, *secret_names):
            check_secret(name, self.environment)
        check_volumes(self.volumes or {}, self.environment)

    def price_per_hour(self, gpu: str | None) -> float | None:
        """Return the price of a sandbox in US dollars an hour, by the rates of the workspace.

        It counts the GPUs, cores and memory that are reserved. A sandbox that uses more costs more. With a chosen
        region or cloud the price is None: these cost more by a factor that the rates do not have.
        """
        if self.region or self.cloud:
            return None
        cores, memory_gib = self.cpu or LEAST_CORES, (self.memory_mb or LEAST_MIB) / 1024
        parts = [("cpu_hour_cost_sandbox", cores), ("mem_gib_hour_cost_sandbox", memory_gib)]
        if gpu is not None:
            model, _, n = gpu.partition(":")
            model = model.lower().rstrip("!").replace("-", "_")
            parts.append((f"gpu_hour_cost_{GPU_NAMES.get(model, model)}", float(n) if n.isdecimal() else 1.0))
        rates = self._rates
        if any(name not in rates for name, _ in parts):
            return None
        return sum(rates[name] * amount for name, amount in parts)

    @functools.cached_property
    def _rates(self) -> Mapping[str, float]:
        """The workspace's rates by Modal's names, in US dollars for an hour of a GPU, a core or a GiB."""

        @in_thread
        def ask() -> dict[str, float]:
            found: dict[str, float] = {}
            for name, rate in modal.Workspace.from_context().billing.rates().items():
                with contextlib.suppress(ValueError, TypeError, ArithmeticError):  # a rate that is not a number
                    if math.isfinite(value := float(rate)) and value >= 0:
                        found[name] = value
            return found

        return ask()

    def start(self, job: JobSpec) -> JobId:  # not `in_thread`, whose limit is shorter than the wait for a machine
        secrets = [modal.Secret.from_name(name, environment_name=self.environment) for name in self._names(job)]
        if job.credentials:
            secrets.append(modal.Secret.from_dict(dict(job.credentials)))
        with translated_modal_errors():
            app = self._look_up(create_if_missing=True)
            image = image_of(self.image, self.python_version, job.requirements, job.pins)
            inside: dict[str, Any] = {
                "image": self._images.built(job.requirements, image, app),
                "env": dict(job.env),
                "secrets": secrets,
                "volumes": {
                    path: volume_of(source, self.environment, job.credentials)
                    for path, source in (self.volumes or {}).items()
                },
            }
            create = modal.Sandbox.create.aio
            sandbox = self._starts.make(lambda: create(*job.command, app=app, **inside, **self._request(job)))
            self._keys[sandbox.object_id] = job.key
            return self._job_id(sandbox.object_id, app.app_id)

    def start_waits(self, job: JobSpec) -> bool:
        return job.gpu is not None

    def start_limit_s(self, job: JobSpec) -> float:
        return (BUILD_S if job.requirements else 0.0) + (GPU_START_S if job.gpu else super().start_limit_s(job))

    def interrupt_starts(self) -> None:
        self._starts.interrupt()

    @in_thread
    def find(self, key: JobKey) -> list[JobId]:  # at most one, because names of running sandboxes are unique in an app
        where: Any = {"app_name": self.app_name, "name": key.name, "environment_name": self.environment}
        for also_ended in (False, True):
            with contextlib.suppress(modal.exception.NotFoundError):
                found = modal.Sandbox.from_name(**where, include_terminated=also_ended)
                return [self._job_id(found.object_id, self._look_up(create_if_missing=False).app_id)]
        return []

    @in_thread
    def verify(self, job_id: JobId, key: JobKey) -> JobId:
        name = job_id.get("sandbox_id")
        if not isinstance(name, str) or not OPTION_NAME.fullmatch(name):
            raise ForeignJobError(self.name, key)
        with contextlib.suppress(modal.exception.NotFoundError):
            if not self._is_of(modal.Sandbox.from_id(name), key):
                raise ForeignJobError(self.name, key)
        return self._job_id(name, job_id.get("app_id"))

    @in_thread
    def state(self, job_id: JobId) -> JobState:
        try:
            sandbox = modal.Sandbox.from_id(job_id["sandbox_id"])
            code = sandbox.returncode  # `from_id` has read it already
            if code is None:
                return JobState(False)
            sandbox.wait()  # returns at once; its errors show why the sandbox ended, which the exit code does not
        except modal.exception.NotFoundError:
            return UNKNOWN
        except modal.exception.SandboxTimeoutError:
            return JobState(True, "timeout", 124)
        except modal.exception.SandboxTerminatedError:
            # If there is a cancel marker, this project ended the sandbox, and the caller sees the marker first.
            # Otherwise Modal took the machine back.
            return JobState(True, "preempted", KILLED)
        # The process was killed inside the container. The kernel does that if memory runs out.
        return JobState(True, "oom" if code == KILLED else None, code)

    @in_thread
    def states(self, jobs: Mapping[JobKey, JobId]) -> dict[JobKey, JobState]:
        running: set[str] = set()
        with contextlib.suppress(modal.exception.NotFoundError, StopIteration):  # there is no app, or `jobs` is empty
            where: Any = {"tags": next(iter(jobs)).run_labels, "app_id": self._app_id(list(jobs.values()))}
            unseen = {str(job_id.get("sandbox_id")) for job_id in jobs.values()}
            for sandbox in modal.Sandbox.list(**where):
                running.add(sandbox.object_id)
                unseen.discard(sandbox.object_id)
                if not unseen:  # so that the SDK does not ask for the next page
                    break
        return {
            key: JobState(False)
            for key, job_id in jobs.items()
            if (name := str(job_id.get("sandbox_id"))) in running and job_id == self._job_id(name, job_id.get("app_id"))
        }

    @in_thread
    def running_jobs(self, labels: Mapping[str, str]) -> list[RunningJob]:
        found: list[RunningJob] = []
        with contextlib.suppress(modal.exception.NotFoundError):  # without the app, there are no jobs
            app_id = str(self._look_up(create_if_missing=False).app_id)
            for sandbox in modal.Sandbox.list(app_id=app_id, tags=dict(labels)):
                # Reading the tags of a sandbox is a request. It is needed only if the caller does not know the store.
                tags = dict(labels) if STORE_LABEL in labels else sandbox.get_tags()
                if labels.items() <= tags.items():
                    found.append(RunningJob(self._job_id(sandbox.object_id, app_id), tags))
        return found

    def reports_preemption(self, gpu: str | None) -> bool:
        return bool(gpu or self.region or self.cloud)  # without any of these, Modal takes no machine back

    def commands_to_end(self, run_id: str, job_ids: Sequence[JobId] = ()) -> str:
        names = [str(job_id.get("sandbox_id")) for job_id in job_ids[:MAX_COMMANDS]]
        named = ", ".join(f"'{name}'" for name in names)
        sandboxes = f"map(modal.Sandbox.from_id, [{named}])"
        if not names:
            sandboxes = f"modal.Sandbox.list(tags={{'{RUN_LABEL}': '{run_id}'}})"
        environment = f" --env {self.environment}" if self.environment else ""
        every = f"modal app stop {self.app_name}{environment}"
        ends = f'python -c "import modal; [s.terminate() for s in {sandboxes}]"'
        return f"{ends}; or, for every run of the app {self.app_name!r}: {every}"

    def open_log(self, job_id: JobId) -> TimedLog:
        """Return the log of a sandbox. It can be read before the sandbox is scheduled, and after its end."""
        sandbox_id = job_id["sandbox_id"]

        @in_thread
        def fetch(since: datetime | None, n_entries: int) -> list[LogEntry]:
            try:
                logs = self._logs.get(sandbox_id) or modal.Sandbox.from_id(sandbox_id).logs
                # `tail` makes up to four requests, from the last hour to the last month. So `fetch` is used if it can.
                found = list(logs.fetch(since=since) if since else logs.tail(min(MOST_ENTRIES, n_entries)))
            except modal.exception.LogsFetchError:  # there are more entries than `fetch` returns in one call
                found = list(logs.tail(MOST_ENTRIES))
            except (modal.exception.NotFoundError, modal.exception.ExecutionError):
                return []  # the sandbox is unknown, or has a GPU and was never scheduled
            self._logs[sandbox_id] = logs
            return _entries(found)

        return TimedLog(fetch, self._shared_log)

    @in_thread
    def stop(self, job_id: JobId) -> None:
        with contextlib.suppress(modal.exception.NotFoundError):
            modal.Sandbox.from_id(job_id["sandbox_id"]).terminate()

    def describe(self, job: JobSpec) -> dict[str, Any]:
        return {
            "command": shortened(job.command),
            "app": self.app_name,
            "environment": self.environment,
            "image": described(self.image, self.python_version, job.requirements),
            "env": masked(job.env),
            "secrets": [*self._names(job), dict.fromkeys(job.credentials, "***")],
            "volumes": dict(self.volumes or {}),
            **self._request(job),
        }

    @functools.cached_property
    def _shared_log(self) -> SharedLog:
        """The output of all sandboxes of the app, which takes two requests for any number of sandboxes."""

        @in_thread
        def fetch(since: datetime) -> list[LogEntry]:
            return _entries(self._look_up(create_if_missing=False).logs.fetch(since=since))

        return SharedLog(fetch)

    def _request(self, job: JobSpec) -> dict[str, Any]:
        return {
            "name": job.key.name,
            "tags": job.key.labels,
            "timeout": min(job.limit_s or LONGEST_S, LONGEST_S + MARGIN_S),
            "gpu": job.gpu,
            "cpu": self.cpu,
            "memory": self.memory_mb,
            "region": self.region,
            "cloud": self.cloud,
        }

    def _names(self, job: JobSpec) -> list[str]:
        return list(dict.fromkeys((*self.secrets, *job.secret_names)))

    def _job_id(self, sandbox_id: str, app_id: object) -> JobId:
        named = {"app_id": app_id} if isinstance(app_id, str) and APP_ID.fullmatch(app_id) else {}
        # The url is the one that `modal dashboard` opens.
        return {"sandbox_id": sandbox_id, "url": f"https://modal.com/id/{sandbox_id}", **named}

    def _app_id(self, job_ids: Sequence[JobId]) -> str:
        """Return the id of the app. If all handles name the same app, no request is needed.

        Otherwise Modal is asked, because another user may have written a handle.
        """
        app_id, *others = (job_id.get("app_id") for job_id in job_ids)
        if isinstance(app_id, str) and APP_ID.fullmatch(app_id) and all(other == app_id for other in others):
            return app_id
        return str(self._look_up(create_if_missing=False).app_id)

    def _is_of(self, sandbox: modal.Sandbox, key: JobKey) -> bool:
        """Return True if a sandbox runs an attempt, by its tags, which are read once."""
        if self._keys.get(sandbox.object_id) != key:
            if not key.labels.items() <= sandbox.get_tags().items():
                return False
            self._keys[sandbox.object_id] = key
        return True

    def _look_up(self, *, create_if_missing: bool) -> modal.App:
        with self._lock:
            if self._app is None:
                self._app = modal.App.lookup(
                    self.app_name, environment_name=self.environment, create_if_missing=create_if_missing
                )
            return self._app


class ModalExecutor(JobExecutor):
    """Runs replicas as Modal Sandboxes.

    Example:
        launch(ModalExecutor(), train, n=4, gpu="H100", rendezvous="s3://bucket/runs")

    Args:
        app_name: the Modal app that has the sandboxes. It is created if it is missing. Default "replicas".
        image: a `modal.Image`, or the name of an image in a registry. It needs Python and pip. Modal installs missing
            requirements in a layer on top, once for all launches with these requirements. Default: Debian with Python
            and all requirements.
        python_version: the version of Python in the default image, as in "3.12". Default: this Python's minor version.
        pip: the requirements of the replicas. Default: those in the workspace's requirements.txt or pyproject.toml.
        secrets: the names of Modal secrets that every replica gets. Default: none.
        cpu: the cores to reserve for each replica. Default: Modal's default, 0.125.
        memory_mb: the memory to reserve for each replica, in MiB. Default: Modal's default, 128.
        region: the region to run in, as in "us-east". Default: any.
        cloud: the cloud to run on, as in "aws". Default: any.
        environment: the Modal environment. Default: the default of the account.
        volumes: the storage by its path in the replica, as in {"/data": "NAME"} for a Modal Volume. A bucket is
            "s3://BUCKET/PREFIX", and uses the credentials of the rendezvous. Default: none.

    Raises:
        MissingDependencyError: the SDK is not installed.
    """

    backend_name = "modal"
    recordable_options = ModalJobs.recordable_options()

    @options_of(ModalJobs)
    def __init__(self, service: ModalJobs) -> None:
        super().__init__(service)


def _entries(found: Iterable[Any]) -> list[LogEntry]:
    """Return entries of the SDK as entries of a log. The last id of an entry's context is the container."""
    return [LogEntry(each.timestamp, each.source, each.message, ["", *each.context_ids][-1]) for each in found]
