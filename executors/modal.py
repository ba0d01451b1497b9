"""Replicas as Modal Sandboxes, over the `modal` SDK. What the generic layer does is in `cloud.py`.

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
from typing import Any, ClassVar, ParamSpec, TypeVar

from executors.bounded import within
from executors.cloud import MARGIN_S, CloudExecutor
from executors.errors import BackendError, MissingDependencyError
from executors.requirements import name_of
from executors.run_record import OPTION_NAME, Recordable
from executors.vendor import ForeignJobError, Job, JobId, JobKey, JobState, VendorError, masked, shortened

LONGEST_S = 24 * 3600 - MARGIN_S  # Modal ends every sandbox after a day
KILLED = 128 + 9
CALL_LIMIT_S = 90.0  # the SDK itself gives up on a server that it cannot reach after 56 s
MOST_LOG_ENTRIES = 20_000  # as many as the SDK returns at once
PYTHON_VERSION = re.compile(r"3\.\d{1,2}")
TOKEN_ADVICE = "Run: modal token new (or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET)."


P = ParamSpec("P")
T = TypeVar("T")


def _aside(call: Callable[P, T]) -> Callable[P, T]:
    """Let a thread of its own make a call of the SDK, with a limit.

    In a notebook an event loop runs in the caller's thread, and the SDK's blocking calls complain of it.
    """

    @functools.wraps(call)
    def made_aside(*args: P.args, **kwargs: P.kwargs) -> T:
        with _told():
            return within(CALL_LIMIT_S, lambda: call(*args, **kwargs))

    return made_aside


class ModalExecutor(CloudExecutor):
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
    vendor = "Modal"
    sdk = "modal"
    recordable_options: ClassVar[Recordable] = {
        "app_name": OPTION_NAME,
        "python_version": PYTHON_VERSION,
        "cpu": float,
        "memory_mb": int,
        "region": OPTION_NAME,
        "cloud": OPTION_NAME,
        "environment": OPTION_NAME,
    }

    def __init__(
        self,
        *,
        app_name: str = "replicas",
        image: Any = None,
        python_version: str | None = None,
        pip: Sequence[str] = (),
        secrets: Sequence[str] = (),
        cpu: float | None = None,
        memory_mb: int | None = None,
        region: str | None = None,
        cloud: str | None = None,
        environment: str | None = None,
    ) -> None:
        try:
            import modal  # noqa: F401 - found out now, before anything is planned
        except ImportError as error:
            raise MissingDependencyError(
                "Backend 'modal' needs the Modal SDK. Install it with: pip install 'serverless-replicas[modal]'"
            ) from error
        self.app_name = app_name
        self.image = image
        self.python_version = python_version or "{}.{}".format(*sys.version_info)
        self.pip = tuple(pip)
        self.secrets = tuple(secrets)
        self.cpu = cpu
        self.memory_mb = memory_mb
        self.region = region
        self.cloud = cloud
        self.environment = environment
        self._lock = threading.Lock()
        self._app: Any = None
        self._images: dict[tuple[str, ...], Any] = {}
        self._logs: dict[str, Any] = {}  # by sandbox; each knows what it would else ask for every time

    def __repr__(self) -> str:
        return f"ModalExecutor(app_name={self.app_name!r}, environment={self.environment!r})"

    @property
    def options_to_keep(self) -> dict[str, Any]:
        """What another process here makes the same executor with; what is installed travels with the task.

        An image object cannot be kept.
        """
        names = ("app_name", "python_version", "cpu", "memory_mb", "region", "cloud", "environment")
        image = {"image": self.image} if isinstance(self.image, str) else {}
        return {name: getattr(self, name) for name in names} | {"secrets": list(self.secrets)} | image

    @_aside
    def check_account(self, n: int, gpu: str | None, timeout_s: float, secret_names: Sequence[str]) -> None:
        """See `Vendor.check_account`: a token that is accepted, secrets that exist, a limit that Modal allows."""
        import modal

        if timeout_s > LONGEST_S:
            raise ValueError(
                f"timeout must be at most {LONGEST_S} seconds on Modal, got timeout={timeout_s:g}. Launch with a "
                "shorter one, and go on with `replicas resume`."
            )
        config = modal.config.config
        if not (config.get("token_id") and config.get("token_secret")) and not config.get("oauth_refresh_token"):
            raise BackendError(f"Backend 'modal' needs a Modal token. {TOKEN_ADVICE}")
        with _told():
            with contextlib.suppress(modal.exception.NotFoundError):  # then the launch makes it
                modal.App.lookup(self.app_name, environment_name=self.environment, create_if_missing=False)
            for name in (*self.secrets, *secret_names):
                try:
                    modal.Secret.from_name(name, environment_name=self.environment).hydrate()
                except modal.exception.NotFoundError as error:
                    raise BackendError(
                        f"Modal has no secret {name!r}. Make it with: modal secret create {name} KEY=VALUE"
                    ) from error

    def start_job(self, job: Job) -> JobId:
        """See `Vendor.start_job`. With a GPU this waits until the sandbox is scheduled, up to 21 minutes."""
        import modal

        secrets = [modal.Secret.from_name(name, environment_name=self.environment) for name in self._names(job)]
        if job.credentials:
            secrets.append(modal.Secret.from_dict(dict(job.credentials)))
        with _told():
            try:
                sandbox = modal.Sandbox.create(
                    *job.command,
                    app=self._lookup_app(),
                    image=self._image(job.requirements),
                    env=dict(job.env),
                    secrets=secrets,
                    **self._request(job),
                )
            except modal.exception.AlreadyExistsError as error:  # an earlier try of ours, whose answer was lost
                raise VendorError(f"Modal: {_said(error)}.", "unclear") from error
            return self._job_id(sandbox, job.key)

    @_aside
    def find_jobs(self, key: JobKey) -> list[JobId]:
        """See `Vendor.find_jobs`: a name is unique among the running sandboxes of an app."""
        import modal

        with _told():
            for also_ended in (False, True):
                with contextlib.suppress(modal.exception.NotFoundError):
                    sandbox = modal.Sandbox.from_name(
                        self.app_name, key.name, environment_name=self.environment, include_terminated=also_ended
                    )
                    return [self._job_id(sandbox, key)]
        return []

    @_aside
    def check_job(self, job_id: JobId, key: JobKey) -> JobId:
        """See `Vendor.check_job`: by the tags of the sandbox."""
        import modal

        name = job_id.get("sandbox_id")
        if not isinstance(name, str) or not OPTION_NAME.fullmatch(name):
            raise ForeignJobError(self.vendor, key)
        with _told(), contextlib.suppress(modal.exception.NotFoundError):
            if not key.labels.items() <= modal.Sandbox.from_id(name).get_tags().items():
                raise ForeignJobError(self.vendor, key)
        return {**job_id, "sandbox_id": name}

    @_aside
    def job_state(self, job_id: JobId) -> JobState:
        """See `Vendor.job_state`. The exit code alone does not tell; what `wait` raises does."""
        import modal

        with _told():
            try:
                sandbox = modal.Sandbox.from_id(job_id["sandbox_id"])
                code = sandbox.returncode  # which came with it
                if code is None:
                    return JobState(False)
                sandbox.wait()
            except modal.exception.NotFoundError:
                return JobState(True, "lost")
            except modal.exception.SandboxTimeoutError:
                return JobState(True, "timeout", 124)
            except modal.exception.SandboxTerminatedError:
                # By us, and then the cancel marker says so; else Modal took the machine back.
                return JobState(True, "preempted", KILLED)
        if code == KILLED:  # from inside the container, where that is what the kernel does for want of memory
            return JobState(True, "oom", code)
        return JobState(True, exit_code=code)

    @_aside
    def job_logs(self, job_id: JobId, n_lines: int) -> str:
        """See `Vendor.job_logs`."""
        import modal

        if n_lines <= 0:
            return ""
        with _told():
            try:
                logs = self._logs.get(job_id["sandbox_id"]) or modal.Sandbox.from_id(job_id["sandbox_id"]).logs
                # An entry may be a part of a line.
                entries = list(logs.tail(min(MOST_LOG_ENTRIES, 2 * n_lines + 50)))
            except modal.exception.NotFoundError:
                return ""
            except modal.exception.ExecutionError:  # with a GPU: it waits to be scheduled, or never was
                return ""
        self._logs[job_id["sandbox_id"]] = logs
        lines = "".join(entry.message for entry in entries).splitlines(keepends=True)
        return "".join(lines[-n_lines:])

    @_aside
    def stop_job(self, job_id: JobId) -> None:
        """See `Vendor.stop_job`."""
        import modal

        with _told(), contextlib.suppress(modal.exception.NotFoundError):
            modal.Sandbox.from_id(job_id["sandbox_id"]).terminate()

    def describe_job(self, job: Job) -> dict[str, Any]:
        """See `Vendor.describe_job`."""
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
            "timeout": job.limit_s,
            "gpu": job.gpu,
            "cpu": self.cpu,
            "memory": self.memory_mb,
            "region": self.region,
            "cloud": self.cloud,
        }

    def _names(self, job: Job) -> list[str]:
        return list(dict.fromkeys((*self.secrets, *job.secret_names)))

    def _job_id(self, sandbox: Any, key: JobKey) -> JobId:
        return {
            "sandbox_id": sandbox.object_id,
            "app": self.app_name,
            "name": key.name,
            "environment": self.environment,
        }

    def _lookup_app(self) -> Any:
        import modal

        with self._lock:
            if self._app is None:
                self._app = modal.App.lookup(self.app_name, environment_name=self.environment, create_if_missing=True)
            return self._app

    def _image(self, requirements: tuple[str, ...]) -> Any:
        import modal

        with self._lock:
            if requirements not in self._images:
                image = self.image
                if image is None:
                    image = modal.Image.debian_slim(self.python_version).uv_pip_install(*_not_paths(requirements))
                elif isinstance(image, str):
                    image = modal.Image.from_registry(image)
                self._images[requirements] = image
            return self._images[requirements]


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Turn what the SDK raises into VendorError. The SDK itself repeats what failed on the way, three times."""
    import grpclib.exceptions
    import modal.exception as raised

    try:
        yield
    except raised.AuthError as error:
        raise VendorError(f"Modal: {_said(error)}. {TOKEN_ADVICE}", "refused") from error
    except raised.ResourceExhaustedError as error:
        has_no_room = "insufficient capacity" in str(error).lower()  # after waiting for it; else too many requests
        raise VendorError(f"Modal: {_said(error)}.", "refused" if has_no_room else "busy") from error
    except (raised.ServiceError, raised.InternalError, raised.ConnectionError, raised.TimeoutError) as error:
        raise VendorError(f"Modal: {_said(error)}.", "unclear") from error
    except raised.Error as error:
        raise VendorError(f"Modal: {_said(error)}.", "refused") from error
    except (grpclib.GRPCError, grpclib.exceptions.StreamTerminatedError, OSError, TimeoutError) as error:
        raise VendorError(f"Modal cannot be reached: {_said(error)}.", "unclear") from error


def _not_paths(requirements: Sequence[str]) -> list[str]:
    """Leave out requirements that are folders of the workspace: these come with the code, when the image stands."""
    return [requirement for requirement in requirements if name_of(requirement) or "://" in requirement]


def _said(error: BaseException) -> str:
    return (str(error) or type(error).__name__).rstrip(".")
