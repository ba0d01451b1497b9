"""Replicas as Modal Sandboxes, over the `modal` SDK.

Sandboxes rather than Functions: they have an exit code, a name, their own output, and the same command as every other
backend. With a GPU the SDK takes another of its back ends, where creating one waits until it is scheduled.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from executors.backends.jobs.executor import MARGIN_S, JobExecutor, options_of
from executors.backends.jobs.sdk import LazyModule, call_with_timeout
from executors.backends.jobs.service import (
    ForeignJobError,
    Job,
    JobId,
    JobKey,
    JobService,
    JobServiceError,
    JobState,
    Kind,
    masked,
    option,
    shortened,
)
from executors.errors import BackendError
from executors.shipping.requirements import name_of
from executors.task.record import OPTION_NAME

if TYPE_CHECKING:
    import modal
else:
    NEEDED = "Backend 'modal' needs the Modal SDK. Install it with: pip install 'serverless-replicas[modal]'"
    modal = LazyModule("modal", NEEDED)

LONGEST_S = 24 * 3600 - MARGIN_S  # Modal ends every sandbox after a day
KILLED = 128 + 9
CALL_LIMIT_S = 90.0  # the SDK itself gives up on a server that it cannot reach after 56 s
MOST_LOG_ENTRIES = 20_000  # as many as the SDK returns at once
PYTHON_VERSION = re.compile(r"3\.\d{1,2}")
TOKEN_ADVICE = "Run: modal token new (or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET)."

P = ParamSpec("P")
T = TypeVar("T")


@contextlib.contextmanager
def translated_errors() -> Iterator[None]:
    """Turn what the SDK raises into JobServiceError. The SDK itself repeats what failed on the way, three times."""
    import grpclib.exceptions
    import modal.exception as raised

    may_be_done = raised.ServiceError, raised.InternalError, raised.ConnectionError, raised.TimeoutError
    try:
        yield
    except raised.Error as error:
        kind: Kind = "rejected"
        if isinstance(error, (*may_be_done, raised.AlreadyExistsError)):  # an earlier try, whose answer was lost
            kind = "unknown"
        elif isinstance(error, raised.ResourceExhaustedError) and "insufficient capacity" not in str(error).lower():
            kind = "unavailable"  # too many requests; the other one has waited for a machine already
        advice = f" {TOKEN_ADVICE}" if isinstance(error, raised.AuthError) else ""
        raise JobServiceError(f"Modal: {_text(error)}.{advice}", kind) from error
    except (grpclib.GRPCError, grpclib.exceptions.StreamTerminatedError, OSError, TimeoutError) as error:
        raise JobServiceError(f"Modal cannot be reached: {_text(error)}.", "unknown") from error


def in_thread(call: Callable[P, T]) -> Callable[P, T]:
    """Make a call of the SDK in a thread of its own, with a limit, its errors translated.

    In a notebook an event loop runs in the caller's thread, and the SDK's blocking calls complain of it.
    """

    @functools.wraps(call)
    def made_in_thread(*args: P.args, **kwargs: P.kwargs) -> T:
        with translated_errors():
            return call_with_timeout(CALL_LIMIT_S, lambda: call(*args, **kwargs))

    return made_in_thread


@dataclass(eq=False, kw_only=True)
class ModalJobs(JobService):
    """Sandboxes of one Modal app. `ModalExecutor` says what the fields mean."""

    name = "Modal"

    app_name: str = option("replicas", OPTION_NAME)
    image: Any = None
    python_version: str | None = option(None, PYTHON_VERSION)
    secrets: Sequence[str] = ()
    cpu: float | None = option(None, float)
    memory_mb: int | None = option(None, int)
    region: str | None = option(None, OPTION_NAME)
    cloud: str | None = option(None, OPTION_NAME)
    environment: str | None = option(None, OPTION_NAME)

    def __post_init__(self) -> None:
        modal.config  # noqa: B018 - a missing SDK is found out now, before anything is planned
        self.python_version = self.python_version or "{}.{}".format(*sys.version_info)
        self._lock = threading.Lock()
        self._app: Any = None
        self._images: dict[tuple[str, ...], Any] = {}
        self._logs: dict[str, Any] = {}  # by sandbox; each remembers what the SDK would else ask for every time

    @in_thread
    def check_account(self, gpu: str | None, timeout_s: float, secret_names: Sequence[str]) -> None:
        if timeout_s > LONGEST_S:
            raise ValueError(
                f"timeout must be at most {LONGEST_S} seconds on Modal, got timeout={timeout_s:g}. Launch with a "
                "shorter one, and go on with `replicas resume`."
            )
        config = modal.config.config
        if not (config.get("token_id") and config.get("token_secret")) and not config.get("oauth_refresh_token"):
            raise BackendError(f"Backend 'modal' needs a Modal token. {TOKEN_ADVICE}")
        with contextlib.suppress(modal.exception.NotFoundError):  # then the launch makes it
            modal.App.lookup(self.app_name, environment_name=self.environment, create_if_missing=False)
        for name in (*self.secrets, *secret_names):
            try:
                modal.Secret.from_name(name, environment_name=self.environment).hydrate()
            except modal.exception.NotFoundError as error:
                raise BackendError(
                    f"Modal has no secret {name!r}. Make it with: modal secret create {name} KEY=VALUE"
                ) from error

    def start(self, job: Job) -> JobId:  # not `in_thread`: with a GPU this waits for a machine, up to 21 minutes
        secrets = [modal.Secret.from_name(name, environment_name=self.environment) for name in self._names(job)]
        if job.credentials:
            secrets.append(modal.Secret.from_dict(dict(job.credentials)))
        with translated_errors():
            here = self.environment
            with self._lock:
                self._app = self._app or modal.App.lookup(self.app_name, environment_name=here, create_if_missing=True)
                image = self._images.get(job.requirements) or self._image(job.requirements)
                self._images[job.requirements] = image
            sandbox = modal.Sandbox.create(
                *job.command,
                app=self._app,
                image=image,
                env=dict(job.env),
                secrets=secrets,
                **self._request(job),
            )
            return self._job_id(sandbox, job.key)

    @in_thread
    def find(self, key: JobKey) -> list[JobId]:  # at most one: a name is unique among the running ones of an app
        where: Any = {"app_name": self.app_name, "name": key.name, "environment_name": self.environment}
        for also_ended in (False, True):
            with contextlib.suppress(modal.exception.NotFoundError):
                return [self._job_id(modal.Sandbox.from_name(**where, include_terminated=also_ended), key)]
        return []

    @in_thread
    def verify(self, job_id: JobId, key: JobKey) -> JobId:
        name = job_id.get("sandbox_id")
        if not isinstance(name, str) or not OPTION_NAME.fullmatch(name):
            raise ForeignJobError(self.name, key)
        with contextlib.suppress(modal.exception.NotFoundError):
            if not key.labels.items() <= modal.Sandbox.from_id(name).get_tags().items():
                raise ForeignJobError(self.name, key)
        return {**job_id, "sandbox_id": name}

    @in_thread
    def state(self, job_id: JobId) -> JobState:
        try:
            sandbox = modal.Sandbox.from_id(job_id["sandbox_id"])
            code = sandbox.returncode  # which came with it
            if code is None:
                return JobState(False)
            sandbox.wait()  # the exit code alone does not say why it ended; what `wait` raises does
        except modal.exception.NotFoundError:
            return JobState(True, "lost")
        except modal.exception.SandboxTimeoutError:
            return JobState(True, "timeout", 124)
        except modal.exception.SandboxTerminatedError:
            # By us, and then the cancel marker says so; else Modal took the machine back.
            return JobState(True, "preempted", KILLED)
        # From inside the container, where the kernel does that for want of memory.
        return JobState(True, "oom" if code == KILLED else None, code)

    @in_thread
    def logs(self, job_id: JobId, n_lines: int) -> str:
        if n_lines <= 0:
            return ""
        name = job_id["sandbox_id"]
        try:
            logs = self._logs.get(name) or modal.Sandbox.from_id(name).logs
            entries = list(logs.tail(min(MOST_LOG_ENTRIES, 2 * n_lines + 50)))  # an entry may be a part of a line
        except (modal.exception.NotFoundError, modal.exception.ExecutionError):
            return ""  # unknown, or with a GPU: it waits to be scheduled, or never was
        self._logs[name] = logs
        lines = "".join(entry.message for entry in entries).splitlines(keepends=True)
        return "".join(lines[-n_lines:])

    @in_thread
    def stop(self, job_id: JobId) -> None:
        with contextlib.suppress(modal.exception.NotFoundError):
            modal.Sandbox.from_id(job_id["sandbox_id"]).terminate()

    def describe(self, job: Job) -> dict[str, Any]:
        image = self.image if isinstance(self.image, str) else None if self.image is None else repr(self.image)
        return {
            "command": shortened(job.command),
            "app": self.app_name,
            "environment": self.environment,
            "image": image or {"debian_slim": self.python_version, "uv_pip_install": _not_paths(job.requirements)},
            "env": masked(job.env),
            "secrets": [*self._names(job), dict.fromkeys(job.credentials, "***")],
            **self._request(job),
        }

    def _request(self, job: Job) -> dict[str, Any]:
        return {
            "name": job.key.name,
            "tags": job.key.labels,
            "timeout": min(job.limit_s, LONGEST_S + MARGIN_S),
            "gpu": job.gpu,
            "cpu": self.cpu,
            "memory": self.memory_mb,
            "region": self.region,
            "cloud": self.cloud,
        }

    def _names(self, job: Job) -> list[str]:
        return list(dict.fromkeys((*self.secrets, *job.secret_names)))

    def _job_id(self, sandbox: Any, key: JobKey) -> JobId:
        name = {"app": self.app_name, "name": key.name, "environment": self.environment}
        return {"sandbox_id": sandbox.object_id, **name}

    def _image(self, requirements: Sequence[str]) -> Any:
        if self.image is None:
            return modal.Image.debian_slim(self.python_version).uv_pip_install(*_not_paths(requirements))
        return modal.Image.from_registry(self.image) if isinstance(self.image, str) else self.image


class ModalExecutor(JobExecutor):
    """Runs replicas as Modal Sandboxes.

    Args:
        app_name: the Modal app that the sandboxes belong to; made when missing.
        image: a `modal.Image`, or the name of one in a registry; it needs Python and pip. None: Debian with Python and
            all requirements installed.
        python_version: of the default image, as in "3.12". None: this Python's minor version.
        pip: requirements of the replicas. When empty, the workspace's requirements.txt or pyproject.toml.
        secrets: names of Modal secrets that every replica gets.
        cpu: cores to reserve for each replica.
        memory_mb: memory to reserve for each replica, in MiB.
        region: where to run, as in "us-east".
        cloud: on whose machines, as in "aws".
        environment: the Modal environment. None: the default of the account.
    """

    backend_name = "modal"
    recordable_options = ModalJobs.recordable_options()

    @options_of(ModalJobs)
    def __init__(self, service: ModalJobs) -> None:
        super().__init__(service)


def _not_paths(requirements: Sequence[str]) -> list[str]:
    """Leave out requirements that are folders of the workspace: these come with the code, when the image is built."""
    return [requirement for requirement in requirements if name_of(requirement) or "://" in requirement]


def _text(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
