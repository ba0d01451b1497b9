"""Replicas as Hugging Face Jobs, over `huggingface_hub`. What the generic layer does is in `cloud.py`.

The service keeps no exit code and no name that is unique, so the outcome comes from the store, and a job is found again
by its labels.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from executors.bounded import within
from executors.cloud import CloudExecutor
from executors.errors import BackendError, MissingDependencyError
from executors.lines import LinesOfJobs
from executors.outcome import Reason
from executors.run_record import OPTION_NAME, Recordable
from executors.vendor import ForeignJobError, Job, JobId, JobKey, JobState, VendorError, masked, shortened

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
WORDS: dict[str, Reason] = {"timeout": "timeout", "oomkilled": "oom", "evicted": "preempted", "preempt": "preempted"}
"""What a message on a failed job says, and what it means."""
ANSWER_S = 60.0  # the SDK itself waits for an answer without end
PYTHON_IMAGE = re.compile(r"python:3\.\d{1,2}")  # Docker's own; any other one from a record would get our secrets
LABEL = re.compile(r"[A-Za-z0-9_-]{1,100}")
OUR_LABELS = "replicas-"
TOKEN_ADVICE = "Log in with: hf auth login (or set HF_TOKEN to a token that may write jobs)."

T = TypeVar("T")


class HFJobsExecutor(CloudExecutor):
    """Runs replicas as Hugging Face Jobs.

    Args:
        namespace: the user or organisation that pays. None: the user of the token.
        image: a Docker image with Python and pip. None: Docker's `python`, in this Python's minor version.
        flavor: the hardware, as in `hf jobs hardware`. None: as `gpu=` asks, or the smallest without a GPU.
        pip: requirements of the replicas. When empty, the workspace's requirements.txt or pyproject.toml.
        labels: more labels for the jobs: of letters, digits, "-" and "_", at most 100.
        secrets: names of variables of this environment that every replica gets as a secret. What a replica prints of
            them is in its log, and in its outcome.

    Raises:
        MissingDependencyError: huggingface_hub is not installed.
        ValueError: a label that the service does not take.
    """

    backend_name = "hf"
    vendor = "Hugging Face"
    sdk = "huggingface_hub"
    recordable_options: ClassVar[Recordable] = {
        "namespace": OPTION_NAME,
        "image": PYTHON_IMAGE,
        "flavor": OPTION_NAME,
        "labels": dict,
    }

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
        self.labels = _checked_labels(labels or {})
        self.secrets = tuple(secrets)
        self._api = huggingface_hub.HfApi(endpoint=os.environ.get("HF_ENDPOINT"))  # the SDK reads it at import alone
        self._lines = LinesOfJobs()
        self._user: str | None = None
        self._asking_for_user = threading.Lock()

    def __repr__(self) -> str:
        return f"HFJobsExecutor(namespace={self.namespace!r}, image={self.image!r}, flavor={self.flavor!r})"

    @property
    def options_to_keep(self) -> dict[str, Any]:
        """What another process here makes the same executor with; what is installed travels with the task."""
        names = ("namespace", "image", "flavor", "labels")
        return {name: getattr(self, name) for name in names} | {"secrets": list(self.secrets)}

    def check_account(self, n: int, gpu: str | None, timeout_s: float, secret_names: Sequence[str]) -> None:
        """See `Vendor.check_account`: a token that is accepted, a flavor for the GPU, secrets that are set."""
        self._flavor_for(gpu)
        self._secrets(secret_names)
        self._whoami()

    def start_job(self, job: Job) -> JobId:
        """See `Vendor.start_job`. The SDK does not repeat this request, so a lost answer is "unclear"."""
        request = self._request(job)
        info = _ask(lambda: self._api.run_job(**request), may_have_acted=True)
        return self._job_id(info.id, request["namespace"])

    def find_jobs(self, key: JobKey) -> list[JobId]:
        """See `Vendor.find_jobs`."""
        namespace = self._namespace()
        found = _ask(lambda: list(self._api.list_jobs(labels=key.labels, namespace=namespace)))
        # What is found may be ended: labels that are shown are compared, whatever the service makes of its filter.
        found = [info for info in found if info.labels is None or key.labels.items() <= info.labels.items()]
        found = [info for info in found if _stage(info) != "DELETED"]
        found.sort(key=lambda info: (info.created_at.timestamp() if info.created_at else 0.0, info.id))
        return [self._job_id(info.id, namespace) for info in found]

    def check_job(self, job_id: JobId, key: JobKey) -> JobId:
        """See `Vendor.check_job`: by the labels of the job."""
        parts = [job_id.get(name) for name in ("id", "namespace")]
        if not all(isinstance(part, str) and OPTION_NAME.fullmatch(part) for part in parts):  # they become a path
            raise ForeignJobError(self.vendor, key)
        found = self._job_id(str(parts[0]), str(parts[1]))
        info = _ask_of_job(lambda: self._api.inspect_job(job_id=found["id"], namespace=found["namespace"]))
        if info is not None and not key.labels.items() <= (info.labels or {}).items():
            raise ForeignJobError(self.vendor, key)
        return found

    def job_state(self, job_id: JobId) -> JobState:
        """See `Vendor.job_state`."""
        info = _ask_of_job(lambda: self._api.inspect_job(job_id=job_id["id"], namespace=job_id["namespace"]))
        if info is None:
            return JobState(True, "lost")
        stage, message = _stage(info), info.status.message or ""
        if stage not in ENDED:
            return JobState(False, message=message)
        if stage == "DELETED":
            return JobState(True, "lost", message=message)
        if stage == "CANCELED":
            return JobState(True, "cancelled", message=message)
        if stage == "COMPLETED":
            return JobState(True, exit_code=0, message=message)
        reasons = [reason for word, reason in WORDS.items() if word in message.lower()]
        return JobState(True, reasons[0] if reasons else None, _exit_code_in(message), message)

    def job_logs(self, job_id: JobId, n_lines: int) -> str:
        """See `Vendor.job_logs`. A running job that is silent holds the SDK for 5 s, which `LinesOfJobs` does not."""

        def fetch() -> Iterator[str]:
            where = {"job_id": job_id["id"], "namespace": job_id["namespace"]}
            lines = iter(self._api.fetch_job_logs(**where, tail=n_lines))
            while (line := _told_of_job(lambda: next(lines, None))) is not None:
                yield line

        lines = self._lines.read(job_id["id"], n_lines, fetch)
        return "".join(f"{line}\n" for line in lines)

    def stop_job(self, job_id: JobId) -> None:
        """See `Vendor.stop_job`."""
        try:
            _ask_of_job(lambda: self._api.cancel_job(job_id=job_id["id"], namespace=job_id["namespace"]))
        except VendorError as error:
            if error.kind != "refused" or not self._has_ended(job_id):  # it may have ended in between
                raise

    def _has_ended(self, job_id: JobId) -> bool:
        try:
            return self.job_state(job_id).has_ended
        except VendorError:
            return False

    def describe_job(self, job: Job) -> dict[str, Any]:
        """See `Vendor.describe_job`."""
        request = self._request(job)
        secrets = dict.fromkeys(request["secrets"], "***")
        return {**request, "command": shortened(request["command"]), "env": masked(request["env"]), "secrets": secrets}

    def _job_id(self, job: str, namespace: str) -> JobId:
        return {"id": job, "namespace": namespace, "url": f"{self._api.endpoint}/jobs/{namespace}/{job}"}

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
        return self.namespace or self._whoami()

    def _whoami(self) -> str:
        """Return the user of the token, asked for once: the service counts this request strictly."""
        with self._asking_for_user:
            if self._user is None:
                self._user = str(_ask(self._api.whoami)["name"])
            self.namespace = self.namespace or self._user
            return self._user


def _ask(call: Callable[[], T], *, may_have_acted: bool = False) -> T:
    """Make a request, and turn what the SDK raises into VendorError. Jobs that are not known pass."""
    return _told(lambda: within(ANSWER_S, call), may_have_acted)


def _ask_of_job(call: Callable[[], T]) -> T | None:
    """Make a request about a job; None when it is not known."""
    return _told_of_job(lambda: within(ANSWER_S, call))


def _told_of_job(call: Callable[[], T]) -> T | None:
    from huggingface_hub.errors import JobNotFoundError

    try:
        return _told(call)
    except JobNotFoundError:
        return None


def _told(call: Callable[[], T], may_have_acted: bool = False) -> T:
    import httpx2  # what the SDK asks with, and whose errors it lets through
    from huggingface_hub.errors import HfHubHTTPError, JobNotFoundError, LocalTokenNotFoundError

    try:
        return call()
    except JobNotFoundError:
        raise
    except LocalTokenNotFoundError as error:
        raise VendorError(f"Backend 'hf' needs a Hugging Face token. {TOKEN_ADVICE}", "refused") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = str(error.server_message or str(error).strip().partition("\n")[0]).rstrip(".")
        text = f"Hugging Face: {said} (HTTP {status})."
        if status in (408, 429):
            told = error.response.headers.get("Retry-After", "")  # seconds, or a date, which is not looked at
            raise VendorError(text, "busy", retry_after_s=float(told) if told.isdecimal() else 0.0) from error
        if status >= 500:
            raise VendorError(text, "unclear" if may_have_acted else "busy") from error
        advice = f" {TOKEN_ADVICE}" if status in (401, 403) else ""
        raise VendorError(f"{text}{advice}", "refused") from error
    except (httpx2.InvalidURL, httpx2.UnsupportedProtocol) as error:
        why = str(error).rstrip(".")
        raise VendorError(f"Hugging Face cannot be reached: {why}. Look at HF_ENDPOINT.", "refused") from error
    except (OSError, httpx2.HTTPError) as error:
        is_unclear = may_have_acted and not isinstance(error, (httpx2.ConnectError, httpx2.ConnectTimeout))
        text = f"Hugging Face cannot be reached: {error or type(error).__name__}"
        raise VendorError(text, "unclear" if is_unclear else "busy") from error
    except UnicodeEncodeError:  # of a header; what it holds is not to be shown
        raise VendorError(
            f"The Hugging Face token holds a letter that no token has. {TOKEN_ADVICE}", "refused"
        ) from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:  # the SDK reads an answer that is none
        text = f"Hugging Face sent what is no answer of its jobs ({type(error).__name__}: {error}): is a proxy between?"
        raise VendorError(text, "unclear" if may_have_acted else "busy") from error


def _checked_labels(labels: Mapping[str, str]) -> dict[str, str]:
    for name, value in labels.items():
        if not LABEL.fullmatch(name) or (value and not LABEL.fullmatch(str(value))):
            raise ValueError(
                f"Label {name!r}: {value!r} is none that Hugging Face takes: letters, digits, '-' and '_', at most 100."
            )
        if name == "name" or name.startswith(OUR_LABELS):
            raise ValueError(f"The label {name!r} is set by `replicas` itself. Choose another name.")
    return dict(labels)


def _stage(info: Any) -> str:
    return str(getattr(info.status.stage, "value", info.status.stage))


def _exit_code_in(message: str) -> int | None:
    """Find the exit code in what the service says of a job that failed, where it says one."""
    found = re.search(r"exit(?:ed)?(?: with)?(?: code| status)?[ :=]+(-?\d+)", message, re.IGNORECASE)
    return int(found[1]) if found else None
