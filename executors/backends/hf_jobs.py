"""HFJobsExecutor: runs replicas as Hugging Face Jobs, over `huggingface_hub`.

The service keeps no exit codes, so outcomes come from the store. Names of jobs are not unique there, so a job is found
by its labels.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors.backends.hf_client import (
    check_version,
    constants,
    hub,
    hub_errors,
    hub_volume,
    list_hub_jobs,
    log_stream,
    request_hub,
)
from executors.backends.jobs.executor import JobExecutor, options_of
from executors.backends.jobs.job_logs import StreamedLog
from executors.backends.jobs.service import (
    MAX_COMMANDS,
    RUN_LABEL,
    UNKNOWN,
    ForeignJobError,
    JobId,
    JobKey,
    JobService,
    JobServiceError,
    JobSpec,
    JobState,
    RunningJob,
    option,
    python_of_image,
    shortened,
)
from executors.errors import BackendError
from executors.masking import masked
from executors.protocol import Reason
from executors.task.record import OPTION_NAME

ENDED: dict[str, Reason | None] = {"COMPLETED": None, "CANCELED": "cancelled", "ERROR": None, "DELETED": "lost"}
TIMEOUT = "Job timeout"  # the whole message; in longer messages the word is about a connection
WORDS: dict[str, Reason] = {"oomkilled": "oom", "evicted": "preempted", "preempt": "preempted"}
"""Parts of the message on a failed job, each with its meaning."""
EXIT_CODE = re.compile(r"exit(?:ed)?(?: with)?(?: code| status)?[ :=]+(-?\d+)", re.IGNORECASE)
# A record may only name an image of Docker itself. Other users may write the record, and the image would get our
# secrets.
PYTHON_IMAGE = re.compile(r"python:3\.\d{1,2}")
LABEL = re.compile(r"[A-Za-z0-9_-]{1,100}")
OUR_LABELS = "replicas-"
CPU_FLAVOR = "cpu-basic"
UNITS_PER_HOUR = {"second": 3600, "minute": 60, "hour": 1}


# More than 20 methods: it implements every call of a JobService.
@dataclass(eq=False, kw_only=True)
class HFJobs(JobService):
    """The jobs of one namespace. `HFJobsExecutor` describes the fields.

    The class has more than 20 methods. Each is one call of `JobService`, or a question about the account whose answer
    is kept: the user, the hardware and the client.

    Raises:
        MissingDependencyError: huggingface_hub is not installed, or too old.
        ValueError: the service does not accept a label or a volume.

    Example:
        HFJobs(namespace="my-team").check_account("A100", 3600.0, [])
    """

    name = "Hugging Face"
    lists_running = True

    namespace: str | None = option(None, OPTION_NAME)
    image: str | None = option(None, PYTHON_IMAGE)
    flavor: str | None = option(None, OPTION_NAME)
    labels: Mapping[str, str] | None = option(None, dict)
    secrets: Sequence[str] = ()
    volumes: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_version()
        self.image = self.image or "python:{}.{}".format(*sys.version_info)
        self.labels = dict(self.labels or {})
        self._user: str | None = None
        self._asking_for_user = threading.Lock()
        self.endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT  # the SDK reads it only when imported
        for name, value in self.labels.items():
            if not LABEL.fullmatch(name) or (value and not LABEL.fullmatch(str(value))):
                raise ValueError(
                    f"Hugging Face does not accept the label {name!r}: {value!r}. Use at most 100 letters, digits, "
                    "'-' and '_'."
                )
            if name == "name" or name.startswith(OUR_LABELS):
                raise ValueError(f"The label {name!r} is set by `replicas` itself. Choose another name.")
        for path, source in (self.volumes or {}).items():
            hub_volume(source, path)

    @functools.cached_property
    def api(self) -> hub.HfApi:
        """The SDK's client. It is made when it is first used, because its import is slow."""
        return hub.HfApi(endpoint=self.endpoint)

    @property
    def python_of_replicas(self) -> str | None:
        return python_of_image(self.image)

    def check_account(self, gpu: str | None, timeout_s: float | None, secret_names: Sequence[str]) -> None:
        self._secrets(secret_names)
        self._whoami()
        self._flavor_of(gpu)

    def price_per_hour(self, gpu: str | None) -> float | None:
        flavor = self._flavor_of(gpu)
        found = next((each for each in self._hardware if each.name == flavor), None)
        units = None if found is None else UNITS_PER_HOUR.get(found.unit_label)
        return None if found is None or units is None else found.unit_cost_usd * units

    def start(self, job: JobSpec) -> JobId:  # the SDK does not repeat this request, so a lost answer is seen here
        request = self._request(job)
        info = request_hub(lambda: self.api.run_job(**request), may_have_acted=True)
        return self._job_id(info.id, request["namespace"])

    def find(self, key: JobKey) -> list[JobId]:
        namespace = self.namespace or self._whoami()
        found = request_hub(lambda: list_hub_jobs(self.endpoint, namespace, key.labels))
        # The caller may end a found job. So the labels are compared here, in case the service ignores the filter.
        found = [info for info in found if key.labels.items() <= (info.labels or {}).items()]
        found = [info for info in found if _stage(info) != "DELETED"]
        found.sort(key=lambda info: (info.created_at.timestamp() if info.created_at else 0.0, info.id))
        return [self._job_id(info.id, namespace) for info in found]

    def verify(self, job_id: JobId, key: JobKey) -> JobId:
        parts = [job_id.get(name) for name in ("id", "namespace")]
        if not all(isinstance(part, str) and OPTION_NAME.fullmatch(part) for part in parts):  # parts of a url's path
            raise ForeignJobError(self.name, key)
        found = self._job_id(str(parts[0]), str(parts[1]))
        info = self._inspect(found)
        if info is not None and not key.labels.items() <= (info.labels or {}).items():
            raise ForeignJobError(self.name, key)
        if info is None and job_id != found:
            raise JobServiceError(
                f"{self.endpoint} does not know the job {found['id']!r}, which was started at "
                f"{str(job_id.get('url'))[:200]!r}. Set HF_ENDPOINT to the Hub that runs it.",
                "rejected",
            )
        return found

    def state(self, job_id: JobId) -> JobState:
        return _state_of(self._inspect(job_id))

    def states(self, jobs: Mapping[JobKey, JobId]) -> dict[JobKey, JobState]:
        if not jobs:
            return {}
        namespace, labels = self.namespace or self._whoami(), next(iter(jobs)).run_labels
        listed = {info.id: info for info in request_hub(lambda: list_hub_jobs(self.endpoint, namespace, labels))}
        return {
            key: _state_of(info)
            for key, job_id in jobs.items()
            if (info := listed.get(str(job_id.get("id"))))
            and key.labels.items() <= (info.labels or {}).items()
            and job_id == self._job_id(info.id, namespace)
        }

    def running_jobs(self, labels: Mapping[str, str]) -> list[RunningJob]:
        namespace = self.namespace or self._whoami()
        found = request_hub(lambda: list_hub_jobs(self.endpoint, namespace, labels))
        # The caller ends these jobs. So the labels are compared here, in case the service ignores the filter.
        found = [info for info in found if labels.items() <= (info.labels or {}).items() and _stage(info) not in ENDED]
        return [RunningJob(self._job_id(info.id, namespace), dict(info.labels or {})) for info in found]

    def reports_preemption(self, gpu: str | None) -> bool:
        return True

    def commands_to_end(self, run_id: str, job_ids: Sequence[JobId] = ()) -> str:
        where = f" --namespace {self.namespace}" if self.namespace else ""
        ends = [f"hf jobs cancel {each.get('namespace')}/{each.get('id')}" for each in job_ids[:MAX_COMMANDS]]
        listed = f"hf jobs ls{where} --label {RUN_LABEL}={run_id}"
        return "; ".join([listed, *(ends or [f"hf jobs cancel{where} ID"])])

    def open_log(self, job_id: JobId) -> StreamedLog:
        connect = functools.partial(log_stream, self.endpoint, job_id["namespace"], job_id["id"])
        return StreamedLog(connect, lambda: self.state(job_id).has_ended)

    def stop(self, job_id: JobId) -> None:
        try:
            with contextlib.suppress(hub_errors.JobNotFoundError):
                request_hub(lambda: self.api.cancel_job(job_id=job_id["id"], namespace=job_id["namespace"]))
        except JobServiceError as error:
            with contextlib.suppress(JobServiceError):
                if error.kind == "rejected" and self.state(job_id).has_ended:  # the job ended before the request
                    return
            raise

    def describe(self, job: JobSpec) -> dict[str, Any]:
        request = self._request(job)
        secrets = dict.fromkeys(request["secrets"], "***")
        shown = {"command": shortened(request["command"]), "env": masked(request["env"]), "secrets": secrets}
        return {**request, **shown, "volumes": dict(self.volumes or {})}

    def _job_id(self, job: str, namespace: str) -> JobId:
        return {"id": job, "namespace": namespace, "url": f"{self.endpoint}/jobs/{namespace}/{job}"}

    def _inspect(self, job_id: JobId) -> hub.JobInfo | None:
        """Return the service's answer about a job. None if it does not know the job."""
        with contextlib.suppress(hub_errors.JobNotFoundError):
            return request_hub(lambda: self.api.inspect_job(job_id=job_id["id"], namespace=job_id["namespace"]))
        return None

    def _request(self, job: JobSpec) -> dict[str, Any]:
        return {
            "image": self.image,
            "command": list(job.command),
            "env": dict(job.env),
            "secrets": {**self._secrets(job.secret_names), **job.credentials},
            "flavor": self._flavor_of(job.gpu),
            "timeout": job.limit_s,
            "labels": {**(self.labels or {}), **job.key.labels, "name": job.key.name},
            "namespace": self.namespace or self._whoami(),
            "volumes": [hub_volume(source, path) for path, source in (self.volumes or {}).items()],
        }

    def _flavor_of(self, gpu: str | None) -> str:
        if gpu is None or self.flavor is not None:
            return self.flavor or CPU_FLAVOR  # the user's choice counts, because a flavor is more than a GPU
        return _cheapest_flavor(self._hardware, gpu)

    @functools.cached_property
    def _hardware(self) -> list[hub.JobHardwareInfo]:
        return request_hub(self.api.list_jobs_hardware)

    def _secrets(self, names: Sequence[str]) -> dict[str, str]:
        names = (*self.secrets, *names)
        here = dict(os.environ)
        if "HF_TOKEN" in names and (token := hub.get_token()):
            here.setdefault("HF_TOKEN", token)  # from the file of `hf auth login`, as in `hf jobs run --secrets`
        if missing := [name for name in names if name not in here]:
            raise BackendError(
                f"The secret {missing[0]!r} is not set. Jobs get secrets from this environment: set it before the "
                "launch."
            )
        return {name: here[name] for name in names}

    def _whoami(self) -> str:
        """Return the user of the token. The service limits this request strictly, so it is made once."""
        with self._asking_for_user:
            if self._user is None:
                self._user = str(request_hub(self.api.whoami)["name"])
                self.namespace = self.namespace or self._user
            return self._user


class HFJobsExecutor(JobExecutor):
    """Runs replicas as Hugging Face Jobs.

    Example:
        launch(HFJobsExecutor(), train, n=4, gpu="A100", rendezvous="s3://bucket/runs")

    Args:
        namespace: the user or organization that pays. Default: the user of the token.
        image: a Docker image with Python and pip. Default: Docker's `python` with the minor version of this machine's
            Python.
        flavor: the hardware, as `hf jobs hardware` lists it. Default: the cheapest with the GPU of `gpu=`, or the
            smallest without a GPU.
        pip: the requirements of the replicas. Default: those in the workspace's requirements.txt or pyproject.toml.
        labels: more labels for the jobs. Names and values have at most 100 letters, digits, "-" and "_". Default: none.
        secrets: the names of variables of this environment that every replica gets as a secret. If a replica prints
            a secret, its log and its outcome have it. HF_TOKEN may also come from `hf auth login`. Default: none.
        volumes: the storage by its path in the replica, as in {"/data": "hf://datasets/NAMESPACE/NAME"}. Replicas may
            write to a bucket. Default: none.

    Raises:
        MissingDependencyError: huggingface_hub is not installed, or too old.
        ValueError: the service does not accept a label or a volume.
    """

    backend_name = "hf"
    recordable_options = HFJobs.recordable_options()

    @options_of(HFJobs)
    def __init__(self, service: HFJobs) -> None:
        super().__init__(service)


def _cheapest_flavor(hardware: Sequence[Any], gpu: str) -> str:
    """Return the cheapest flavor with a GPU.

    Args:
        hardware: the hardware that the service lists.
        gpu: the GPU, as in "A100" or "A100:4".

    Raises:
        BackendError: no flavor has this GPU.
    """
    cheapest = {}
    for each in sorted(hardware, key=lambda each: each.unit_cost_usd, reverse=True):
        if each.accelerator:
            cheapest[_model(each.accelerator.model), str(each.accelerator.quantity)] = each.name
    model, _, count = gpu.partition(":")
    if (found := cheapest.get((_model(model), count or "1"))) is None:
        known = ", ".join(name if n == "1" else f"{name}:{n}" for name, n in sorted(cheapest))
        raise BackendError(
            f"Hugging Face Jobs have no flavor for gpu={gpu!r}. Known: {known}. "
            "Use one of these, or name one of `hf jobs hardware`: --option flavor=NAME."
        )
    return str(found)


def _model(name: str) -> str:
    """Return the name of a GPU in a common spelling: `rtx pro 6000` becomes `RTX-PRO-6000`."""
    return name.upper().replace("_", "-").replace(" ", "-").removeprefix("NVIDIA-")


def _state_of(info: hub.JobInfo | None) -> JobState:
    if info is None:
        return UNKNOWN
    stage, message = _stage(info), info.status.message or ""
    if stage not in ENDED:
        return JobState(False, message=message or ("scheduling" if stage == "SCHEDULING" else ""))
    reason, code = ENDED[stage], EXIT_CODE.search(message)
    if stage == "ERROR":
        reason = next((reason for word, reason in WORDS.items() if word in message.lower()), None)
        reason = "timeout" if message == TIMEOUT else reason
    return JobState(True, reason, 0 if stage == "COMPLETED" else int(code[1]) if code else None, message)


def _stage(info: Any) -> str:
    return str(getattr(info.status.stage, "value", info.status.stage))
