"""Replicas as Hugging Face Jobs, over `huggingface_hub`. What the generic layer does is in `cloud.py`.

The service keeps no exit code and no name that is unique, so the outcome comes from the store, and a job is found again
by its labels.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from executors.cloud import CloudExecutor
from executors.errors import BackendError, MissingDependencyError
from executors.lines import LinesOfJobs
from executors.vendor import Job, JobId, JobKey, JobState, VendorError, masked, shortened

# Names of GPUs as people say them, and the flavor that has one. The service's list is `hf jobs hardware`.
FLAVORS = {
    "T4": {1: "t4-small"},
    "L4": {1: "l4x1", 4: "l4x4"},
    "L40S": {1: "l40sx1", 4: "l40sx4", 8: "l40sx8"},
    "A10G": {1: "a10g-small", 2: "a10g-largex2", 4: "a10g-largex4"},
    "A100": {1: "a100-large", 4: "a100x4", 8: "a100x8"},
    "H200": {1: "h200", 2: "h200x2", 4: "h200x4", 8: "h200x8"},
    "RTX-PRO-6000": {1: "rtx-pro-6000", 2: "rtx-pro-6000x2", 4: "rtx-pro-6000x4", 8: "rtx-pro-6000x8"},
}
CPU_FLAVOR = "cpu-basic"
ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
TOKEN_ADVICE = "Log in with: hf auth login (or set HF_TOKEN to a token that may write jobs)."


class HFJobsExecutor(CloudExecutor):
    """Runs replicas as Hugging Face Jobs.

    Args:
        namespace: the user or organisation that pays. None: the user of the token.
        image: a Docker image with Python and pip. None: Docker's `python`, in this Python's minor version.
        flavor: the hardware, as in `hf jobs hardware`. None: as `gpu=` asks, or the smallest without a GPU.
        pip: requirements of the replicas. When empty, the workspace's requirements.txt or pyproject.toml.
        labels: more labels for the jobs.
        secrets: names of variables of this environment that every replica gets as a secret.
    """

    backend_name = "hf"
    vendor = "Hugging Face"
    sdk = "huggingface_hub"

    def __init__(
        self,
        *,
        namespace: str | None = None,
        image: str | None = None,
        flavor: str | None = None,
        pip: Sequence[str] = (),
        labels: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
    ) -> None:
        try:
            import huggingface_hub
        except ImportError as error:
            raise MissingDependencyError(
                "Backend 'hf' needs the Hugging Face Hub client. Install it with: pip install 'serverless-replicas[hf]'"
            ) from error
        self.namespace = namespace
        self.image = image or "python:{}.{}".format(*sys.version_info)
        self.flavor = flavor
        self.pip = tuple(pip)
        self.labels = dict(labels or {})
        self.secrets = tuple(secrets)
        self._api = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))  # the SDK reads it at import alone
        self._lines = LinesOfJobs()

    def __repr__(self) -> str:
        return f"HFJobsExecutor(namespace={self.namespace!r}, image={self.image!r}, flavor={self.flavor!r})"

    @property
    def recorded_options(self) -> dict[str, Any]:
        """What `run.json` keeps, so that another process makes the same executor."""
        names = ("namespace", "image", "flavor", "labels")
        return {name: getattr(self, name) for name in names} | {"pip": list(self.pip), "secrets": list(self.secrets)}

    def check_account(self, n: int, gpu: str | None, timeout_s: float, secret_names: Sequence[str]) -> None:
        """See `Vendor.check_account`: a token that is accepted, a flavor for the GPU, secrets that are set."""
        self._flavor_for(gpu)
        self._secrets(secret_names)
        self._namespace()

    def start_job(self, job: Job) -> JobId:
        """See `Vendor.start_job`. The SDK does not repeat this request, so a lost answer is "unclear"."""
        request = self._request(job)
        with _told(may_have_acted=True):
            info = self._api.run_job(**request)
        return {"id": info.id, "namespace": request["namespace"], "url": info.url}

    def find_jobs(self, key: JobKey) -> list[JobId]:
        """See `Vendor.find_jobs`."""
        namespace = self._namespace()
        with _told():
            found = list(self._api.list_jobs(labels=key.labels, namespace=namespace))
        found = [info for info in found if _stage(info) != "DELETED"]
        found.sort(key=lambda info: (info.created_at.timestamp() if info.created_at else 0.0, info.id))
        return [{"id": info.id, "namespace": namespace, "url": info.url} for info in found]

    def job_state(self, job_id: JobId) -> JobState:
        """See `Vendor.job_state`."""
        from huggingface_hub.errors import JobNotFoundError

        with _told():
            try:
                info = self._api.inspect_job(job_id=job_id["id"], namespace=job_id["namespace"])
            except JobNotFoundError:
                return JobState(True, "lost")
        stage, message = _stage(info), info.status.message or ""
        if stage not in ENDED:
            return JobState(False, message=message)
        if stage == "DELETED":
            return JobState(True, "lost", message=message)
        if stage == "CANCELED":
            return JobState(True, "cancelled", message=message)
        if stage == "ERROR" and "timeout" in message.lower():
            return JobState(True, "timeout", message=message)
        return JobState(True, exit_code=0 if stage == "COMPLETED" else _exit_code_in(message), message=message)

    def job_logs(self, job_id: JobId, n_lines: int) -> str:
        """See `Vendor.job_logs`. A running job that is silent holds the SDK for 5 s, which `LinesOfJobs` does not."""

        def fetch() -> Iterator[str]:
            from huggingface_hub.errors import JobNotFoundError

            with _told(), contextlib.suppress(JobNotFoundError):
                yield from self._api.fetch_job_logs(job_id=job_id["id"], namespace=job_id["namespace"], tail=n_lines)

        lines = self._lines.read(job_id["id"], n_lines, fetch)
        return "".join(f"{line}\n" for line in lines)

    def stop_job(self, job_id: JobId) -> None:
        """See `Vendor.stop_job`."""
        from huggingface_hub.errors import JobNotFoundError

        with _told(), contextlib.suppress(JobNotFoundError):
            self._api.cancel_job(job_id=job_id["id"], namespace=job_id["namespace"])

    def describe_job(self, job: Job) -> dict[str, Any]:
        """See `Vendor.describe_job`."""
        request = self._request(job)
        secrets = dict.fromkeys(request["secrets"], "***")
        return {**request, "command": shortened(request["command"]), "env": masked(request["env"]), "secrets": secrets}

    def _request(self, job: Job) -> dict[str, Any]:
        return {
            "image": self.image,
            "command": list(job.command),
            "env": dict(job.env),
            "secrets": {**self._secrets(job.secret_names), **job.credentials},
            "flavor": self._flavor_for(job.gpu),
            "timeout": job.limit_s,
            "name": job.key.name,
            "labels": {**self.labels, **job.key.labels},
            "namespace": self._namespace(),
        }

    def _flavor_for(self, gpu: str | None) -> str:
        if gpu is None:
            return self.flavor or CPU_FLAVOR
        name, _, count = gpu.upper().partition(":")
        counts = FLAVORS.get(name.replace("_", "-").replace(" ", "-"), {})
        number = int(count) if count.isdigit() else 1 if not count else 0
        if self.flavor is not None:
            return self.flavor  # said by hand: a flavor is more than a GPU
        if number not in counts:
            known = ", ".join(
                model if each == 1 else f"{model}:{each}" for model, flavors in FLAVORS.items() for each in flavors
            )
            raise BackendError(
                f"Hugging Face Jobs have no flavor for gpu={gpu!r}. Known: {known}. "
                "Or name one of `hf jobs hardware`: --option flavor=NAME."
            )
        return counts[number]

    def _secrets(self, names: Sequence[str]) -> dict[str, str]:
        found = {}
        for name in (*self.secrets, *names):
            if name not in os.environ:
                raise BackendError(
                    f"The secret {name!r} is not set. Jobs get secrets from this environment: set it before the launch."
                )
            found[name] = os.environ[name]
        return found

    def _namespace(self) -> str:
        if self.namespace is None:
            if self._api.token is None:
                from huggingface_hub import get_token

                if get_token() is None:
                    raise BackendError(f"Backend 'hf' needs a Hugging Face token. {TOKEN_ADVICE}")
            with _told():
                self.namespace = str(self._api.whoami()["name"])
        return self.namespace


@contextlib.contextmanager
def _told(may_have_acted: bool = False) -> Iterator[None]:
    """Turn what the SDK raises into VendorError. Jobs that are not known pass."""
    from huggingface_hub.errors import HfHubHTTPError, JobNotFoundError, LocalTokenNotFoundError

    try:
        yield
    except JobNotFoundError:
        raise
    except LocalTokenNotFoundError as error:
        raise VendorError(f"Backend 'hf' needs a Hugging Face token. {TOKEN_ADVICE}", "refused") from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        said = f"Hugging Face: {error.server_message or error} (HTTP {status})"
        if status in (408, 429):
            raise VendorError(said, "busy") from error
        if status >= 500 or not status:
            raise VendorError(said, "unclear") from error
        advice = f" {TOKEN_ADVICE}" if status in (401, 403) else ""
        raise VendorError(f"{said}.{advice}", "refused") from error
    except OSError as error:
        raise VendorError(
            f"Hugging Face cannot be reached: {error}", "unclear" if may_have_acted else "busy"
        ) from error


def _stage(info: Any) -> str:
    return str(getattr(info.status.stage, "value", info.status.stage))


def _exit_code_in(message: str) -> int | None:
    """Find the exit code in what the service says of a job that failed, where it says one."""
    import re

    found = re.search(r"exit(?:ed)?(?: with)?(?: code| status)?[ :=]+(-?\d+)", message, re.IGNORECASE)
    return int(found[1]) if found else None
