"""RayExecutor: runs replicas as jobs of a Ray cluster.

The name of a job comes from its attempt. So a job is found by its name, and a repeated start starts no second job. Ray
has no secrets, no time limits and no groups. A job waits until the cluster has room for it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from executors.backends.jobs.executor import JobExecutor, options_of
from executors.backends.jobs.service import (
    MAX_COMMANDS,
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
)
from executors.backends.ray_client import NAME, SCRIPT, RayClient, RayJob, package_of
from executors.errors import BackendError
from executors.logs import last_of
from executors.logs.readers import OffsetLog
from executors.masking import masked
from executors.replica import NOTICE_S
from executors.settings.run_spec import NOTIFY
from executors.store.run_key import RUN_KEY

ADDRESS = re.compile(r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~-]+)*")
GPU = re.compile(r"([A-Za-z][A-Za-z0-9_.-]*)(?::(\d{1,3}))?|(\d{1,3})")
REMOVED = re.compile(r"\$\{[A-Z0-9_]+\}")  # Ray removes or replaces each of these in the value of a variable
STOP_GRACE_S = 3  # Ray's time between SIGTERM and SIGKILL
LOG_PAUSE_S, LOG_BYTES_PER_S = 2.0, 1 << 20
OURS = ("working_dir", "env_vars")


@dataclass(eq=False, kw_only=True)
class RayJobs(JobService):
    """The jobs of one Ray cluster. `RayExecutor` describes the fields.

    Raises:
        ValueError: an option has a wrong value.

    Example:
        RayJobs(address="http://head:8265").check_account("A100", None, [])
    """

    name = "Ray"
    lists_running = True

    # These two are not read from records: another user could write an address there, and get the token.
    address: str | None = None
    token_file: str | None = None
    cpus: float | None = option(None, float)
    memory_mb: int | None = option(None, int)
    resources: Mapping[str, float] | None = None
    python: str = option("python", re.compile("python3?"))
    runtime_env: Mapping[str, Any] | None = field(default=None, repr=False)
    credentials: Literal["nodes", "env"] = option("nodes", re.compile("nodes"))
    shared_disk: bool = option(False, bool)

    def __post_init__(self) -> None:
        rays = os.environ.get("RAY_ADDRESS", "")
        found = os.environ.get("RAY_API_SERVER_ADDRESS") or (rays if rays.startswith(("http", "ray://")) else None)
        address = (self.address or found or "http://127.0.0.1:8265").rstrip("/")
        if not ADDRESS.fullmatch(address):
            shown = address.rpartition("@")[2]
            raise ValueError(
                f"address={shown!r} is not the url of a Ray dashboard. Set RAY_API_SERVER_ADDRESS, or --option "
                "address=…, to one such as 'http://127.0.0.1:8265'."
            )
        if file := self.token_file or os.environ.get("RAY_AUTH_TOKEN_PATH"):
            self.token_file = str(Path(file).expanduser().absolute())
        if self.credentials not in ("nodes", "env"):
            raise ValueError(f"credentials must be 'nodes' or 'env', got {self.credentials!r}.")
        if taken := [name for name in OURS if name in (self.runtime_env or {})]:
            raise ValueError(
                f"runtime_env has {taken[0]!r}, which `replicas` sets itself. Remove it, and give variables as env=."
            )
        self.address = address
        self._client = RayClient(address, self.token_file)
        self._stopped: set[str] = set()
        """The jobs that this process has ended. Ray still reports a job that waits for room as pending."""
        self._warned_about: set[str] = set()
        """The variables about which the user was warned, because other users see them."""

    def command(self) -> tuple[str, ...]:
        return (self.python, *super().command()[1:])

    def check_account(self, gpu: str | None, timeout_s: float | None, secret_names: Sequence[str]) -> None:
        if secret_names:
            raise BackendError(
                f"Ray has no secrets, so its jobs cannot have {secret_names[0]!r}. Set it on the nodes, or pass it as "
                "env= (every user who may list the cluster's jobs sees it)."
            )
        _gpus(gpu)
        self._client.check()

    def start(self, job: JobSpec) -> JobId:
        request = self._request(job)
        if visible := {name for name in job.env if not name.startswith("REPLICA_")} - self._warned_about:
            self._warned_about |= visible
            users = f"every user who may list the jobs of {self.address}"
            print(f"replicas: {users} sees the values of {', '.join(sorted(visible))}", file=sys.stderr)
        self._client.provide(job.command[-1])
        try:
            self._client.submit(request)
        except JobServiceError as error:
            if "already exists" not in str(error) or not self.find(job.key):
                raise
        return self._id(job.key.name)

    def find(self, key: JobKey) -> list[JobId]:
        job = self._client.job(key.name)
        return [self._id(key.name)] if job is not None and job.is_of(key) else []

    def verify(self, job_id: JobId, key: JobKey) -> JobId:
        name = job_id.get("id")
        if not isinstance(name, str) or not NAME.fullmatch(name):  # it becomes a part of a url's path
            raise ForeignJobError(self.name, key)
        job, found = self._client.job(name), self._id(name)
        if job is not None and not job.is_of(key):
            raise ForeignJobError(self.name, key)
        if job is None and job_id != found:
            raise JobServiceError(
                f"The Ray cluster at {self.address} does not know the job {name!r}, which was started at "
                f"{str(job_id.get('url'))[:200]!r}. Give the address of its cluster: --backend ray --option address=…",
                "rejected",
            )
        return found

    def state(self, job_id: JobId) -> JobState:
        job = self._client.job(job_id["id"])
        return UNKNOWN if job is None else self._state_of(job)

    def states(self, jobs: Mapping[JobKey, JobId]) -> dict[JobKey, JobState]:
        ours = {key.name: key for key, job_id in jobs.items() if job_id == self._id(key.name)}
        listed = self._client.jobs(ours) if ours else {}
        return {ours[name]: self._state_of(job) for name, job in listed.items() if job.is_of(ours[name])}

    def running_jobs(self, labels: Mapping[str, str]) -> list[RunningJob]:
        found = self._client.jobs_with(labels)
        alive = [job for job in found if not job.state.has_ended]
        its = [{name: str(value) for name, value in (job.metadata or {}).items()} for job in alive]
        return [RunningJob(self._id(job.submission_id), has) for job, has in zip(alive, its, strict=True)]

    def commands_to_end(self, run_id: str, job_ids: Sequence[JobId] = ()) -> str:
        ends = [f"ray job stop --address {self.address} {each.get('id')}" for each in job_ids[:MAX_COMMANDS]]
        listed = f"ray job list --address {self.address}"
        return "; ".join(ends or [listed, f"ray job stop --address {self.address} ID for each that has {run_id!r}"])

    def open_log(self, job_id: JobId) -> _RayLog:
        return _RayLog(lambda: self._client.log(job_id["id"]))

    def stop(self, job_id: JobId) -> None:
        self._client.stop(job_id["id"])
        self._stopped.add(job_id["id"])

    def describe(self, job: JobSpec) -> dict[str, Any]:
        request = self._request(job)
        runtime_env = request["runtime_env"]
        return {**request, "runtime_env": {**runtime_env, "env_vars": masked(runtime_env["env_vars"])}}

    def _id(self, name: str) -> JobId:
        return {"id": name, "url": f"{self.address}/#/jobs/{name}"}

    def _state_of(self, job: RayJob) -> JobState:
        if job.status == "PENDING" and job.submission_id in self._stopped:
            return JobState(True, "cancelled")  # if it gets room, it starts, finds its cancel marker, and ends
        return job.state

    def _request(self, job: JobSpec) -> dict[str, Any]:
        n_gpus, resources = _gpus(job.gpu)
        words = [word for word in job.command[:-1] if word != "-c"]
        place = {"env_vars": self._env_vars(job), "working_dir": f"gcs://{package_of(job.command[-1])[0]}"}
        return {
            "submission_id": job.key.name,
            "entrypoint": f"exec {shlex.join([*words, SCRIPT])}",
            "entrypoint_num_cpus": job.procs if self.cpus is None else self.cpus,
            "entrypoint_num_gpus": n_gpus,
            "entrypoint_memory": self.memory_mb and self.memory_mb << 20,
            "entrypoint_resources": {**resources, **(self.resources or {})},
            "metadata": job.key.labels,
            "runtime_env": {**(self.runtime_env or {}), **place},
        }

    def _env_vars(self, job: JobSpec) -> dict[str, str]:
        """Return the environment for Ray, which replaces `${NAME}` in the values. So each `$` is escaped."""
        if self.credentials == "nodes" and RUN_KEY in job.credentials:
            raise JobServiceError(
                "every user who may list the cluster's jobs would see the key of a signed run. Launch without signed= "
                "(--signed), or accept that with --option credentials=env",
                "rejected",
            )
        if self.credentials == "nodes" and NOTIFY in job.credentials and NOTIFY not in self._warned_about:
            self._warned_about.add(NOTIFY)
            print(
                "replicas: the jobs of Ray send no notifications, because every user who may list them would see the "
                "URLs. This command sends them while it watches the run. Or accept that: --option credentials=env",
                file=sys.stderr,
            )
        hidden = job.credentials if self.credentials == "env" else {}
        values = {NOTICE_S: str(STOP_GRACE_S), **job.env, **hidden}
        for name, value in values.items():
            if found := REMOVED.search(value):
                raise JobServiceError(
                    f"Ray would remove {found[0]!r} from the value of {name}. Choose a value without it.", "rejected"
                )
        dollar = {"$": "$"} if any("$" in value for value in values.values()) else {}
        return {**dollar, **{name: value.replace("$", "${$}") for name, value in values.items()}}


class RayExecutor(JobExecutor):
    """Runs replicas as jobs of a Ray cluster.

    Example:
        launch(RayExecutor(address="http://head:8265"), train, n=4, rendezvous="s3://bucket/runs")

    Args:
        address: the url of the cluster's dashboard. Default: $RAY_API_SERVER_ADDRESS, $RAY_ADDRESS if it begins with
            http, or http://127.0.0.1:8265.
        token_file: a file with the cluster's token. Default: $RAY_AUTH_TOKEN_PATH. If $RAY_AUTH_TOKEN has a token, that
            is used instead.
        cpus: the cores of each replica. Default: one for each process of a replica (`procs`). Replicas wait for free
            cores, and Ray gives them up after 15 minutes.
        memory_mb: the memory of each replica, in MiB. Default: no request for memory.
        resources: more of Ray's resources, as in {"accelerator_type:A100": 0.001}. `gpu="A100"` requests this one.
            Default: none.
        python: the command of Python on the nodes. Default "python".
        pip: the requirements of the replicas. Default: those in the workspace's requirements.txt or pyproject.toml.
        runtime_env: more of Ray's runtime environment, as in {"image_uri": "…"}. Default: none.
        credentials: "nodes", the default, lets replicas open the rendezvous with the credentials of their nodes. "env"
            gives them the credentials of this machine, which every user who may list the cluster's jobs sees.
        shared_disk: True if every node sees this machine's folders, so that the rendezvous may be a directory. Default
            False.

    Raises:
        ValueError: an option has a wrong value.
    """

    backend_name = "ray"
    recordable_options = RayJobs.recordable_options()
    supports_inter_replica_network = True  # Ray itself needs it
    default_timeout_s = None

    @options_of(RayJobs)
    def __init__(self, service: RayJobs) -> None:
        super().__init__(service)
        self.needs_shared_rendezvous = not service.shared_disk


class _RayLog(OffsetLog):
    """The log of a job. Each look reads all of it, so looks at a long log are rarer, to spare the cluster's head."""

    reads_all = True
    pause_s = LOG_PAUSE_S

    def __init__(self, whole: Callable[[], str]) -> None:
        super().__init__(self._new)
        self._whole = whole

    def _new(self, offset: int | None, n_lines: int) -> tuple[bytes, int]:
        text = self._whole()
        data = text.encode()
        self.pause_s = max(LOG_PAUSE_S, len(data) / LOG_BYTES_PER_S)
        if offset is None:
            return last_of(text, n_lines).encode(), len(data)
        return data[offset:], max(offset, len(data))


def _gpus(gpu: str | None) -> tuple[int, dict[str, float]]:
    """Return the number of GPUs, and the resource that names their type.

    Raises:
        ValueError: the text is not a GPU.
    """
    found = GPU.fullmatch("0" if gpu is None else gpu)
    if found is None:
        raise ValueError(f"gpu={gpu!r} is not a GPU that Ray knows: use 'H100', 'H100:2', or '2' for any type.")
    kind, n, of_any = found.groups()
    return int(of_any or n or 1), {f"accelerator_type:{kind}": 0.001} if kind else {}
