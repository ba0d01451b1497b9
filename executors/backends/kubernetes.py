"""KubernetesExecutor: runs replicas as pods of Kubernetes, over the official client. Each group is one Indexed Job.

The Job is created first, and then the Secret that it owns. So no Secret stays if the launcher dies between the two, or
if the Job is deleted. A pod whose Secret is late waits for it.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from executors.attempt import Attempt
from executors.backends.jobs.executor import JobExecutor, options_of
from executors.backends.jobs.service import (
    RUN_LABEL,
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
from executors.backends.kubernetes_client import ADVICE, ALREADY_EXISTS, Cluster, StatusError, client
from executors.backends.kubernetes_manifest import NAME, PodOptions, group_labels, group_name, secret_data, selector_of
from executors.backends.kubernetes_pods import (
    INDEX,
    JOB_NAME,
    JOB_UID,
    TAKEN_BACK,
    index_of,
    indexes,
    is_stuck,
    is_taken_back,
    needs_job,
    place_of,
    ranks_of,
    state_of,
)
from executors.errors import BackendError
from executors.masking import MASK
from executors.store import store_at
from executors.store.staleness import StalenessTracker

ID = ("job", "namespace", "index", "uid", "server")
SERVER = re.compile(r"https?://[A-Za-z0-9.:_/\[\]-]{1,300}")
FRESH_S = 1.0  # for this time a list of Jobs counts, because all ranks of a group ask for the same list
UNMADE_S = 30.0  # after this time without a pod, the events of a Job are read, and again after the same time
CHECK = JobSpec(JobKey("", "check", 0, 0), ("true",), (), {}, {})


# More than 20 methods: it makes every call of a JobService.
@dataclass(eq=False, kw_only=True)
class KubernetesJobs(PodOptions, JobService):
    """The Jobs of one namespace. `KubernetesExecutor` describes the fields.

    The class has more than 20 methods. Each is one call of `JobService`, or a question about a Job, a pod or a Secret
    that several calls share. `Cluster` makes the requests, and `kubernetes_pods` interprets pods.

    Raises:
        MissingDependencyError: the client is not installed.
        ValueError: Kubernetes does not accept an option.

    Example:
        KubernetesJobs(namespace="team").check_account("H100", None, [])
    """

    name = "Kubernetes"
    starts_together = True
    lists_running = True
    namespace: str | None = option(None, NAME)
    context: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        client.ApiClient  # noqa: B018 - raises now if the client is missing, before anything is planned
        self._lock, self._connecting = threading.Lock(), threading.Lock()
        self._connected: Cluster | None = None
        self._listed: dict[str, tuple[float, list[Any]]] = {}
        self._owed: dict[str, dict[str, str]] = {}
        """The data of the Secrets that this process must still create, by Job."""
        self._stopped: dict[str, set[int]] = {}
        """The indexes that this process has stopped, by Job."""
        self._unmade: dict[str, tuple[float, str]] = {}
        """For each Job without a pod, the time of the last question and the reason that it found."""
        self._stuck = StalenessTracker()
        """Measures for how long each pod has been stuck."""
        self._disrupted: dict[tuple[str, int], str] = {}
        """The reason why each pod is being deleted. Kept here, because soon no object has it any more."""
        self._warned: list[str] = []
        """The server's warnings in the last dry run."""
        self._printed_warnings: set[str] = set()

    @property
    def _cluster(self) -> Cluster:
        with self._connecting:
            if self._connected is None or self._connected.is_stale:
                self._connected = Cluster.connected(self.context, self.namespace)
                self.namespace = self._connected.namespace
            return self._connected

    @property
    def python_of_replicas(self) -> str | None:
        return python_of_image(self.image)

    def check_account(self, gpu: str | None, timeout_s: float | None, secret_names: Sequence[str]) -> None:
        cluster, body = self._cluster, self.job([replace(CHECK, gpu=gpu)])
        if missing := ", ".join(cluster.missing_rights()):
            raise BackendError(f"Kubernetes does not let you {missing} in the namespace {self.namespace!r}. {ADVICE}")
        for name in (*self.secrets, *secret_names):
            if not cluster.has_secret(name):
                raise BackendError(f"The namespace {self.namespace!r} has no Secret {name!r}. Create it first.")
        made, self._warned = cluster.create_job(body, is_dry=True)
        if made.spec.backoff_limit_per_index is None:
            raise BackendError(f"Kubernetes at {cluster.server} is too old. Use a cluster with 1.33 or later.")

    def risks(self) -> Iterator[tuple[str, str]]:
        """Yield the warnings of the last dry run, and the checks that this account may not make; see `JobService`."""
        for words in self._warned:
            yield f"Kubernetes warns: {words}", self._advice_on(words)
        for right, missed in self._cluster.missed_rights():
            yield missed, f"You need the right to {right} in the namespace {self.namespace!r} for that."

    def _advice_on(self, warning: str) -> str:
        if "runAsNonRoot" in warning and self.run_as_user is None:
            return "The namespace refuses pods like these. Name a user: --option run_as_user=1000."
        return "Ask the administrators of the namespace which policies it enforces."

    def start_jobs(self, jobs: Sequence[JobSpec]) -> list[JobId]:
        body, name, data = self.job(jobs), group_name(jobs), secret_data(jobs)
        self._cluster.prepare()
        self._withdraw_earlier(jobs)
        with self._lock:
            self._listed.clear()
            self._owed[name] = data
        try:
            made, warnings = self._cluster.create_job(body)
            self._print_warnings(warnings)
        except StatusError as error:
            # An earlier try, whose answer was lost, may have created the Job.
            made = self._cluster.job(name) if error.reason == ALREADY_EXISTS else None
            if made is None or [index_of(job.key, made) for job in jobs] != list(range(len(jobs))):
                raise
        try:
            self._give_secret(made)
        except JobServiceError as error:
            if error.kind == "rejected":
                self._cluster.delete_job(name)
                raise
            raise JobServiceError(str(error), "unknown", retry_after_s=error.retry_after_s) from error
        return [self._job_id(made, index) for index in range(len(jobs))]

    def _print_warnings(self, warnings: Sequence[str]) -> None:
        """Print each warning of the server once. If the pods are refused later, the launch would only wait."""
        for words in warnings:
            if words not in self._printed_warnings:
                self._printed_warnings.add(words)
                print(f"replicas: Kubernetes warns: {words}. {self._advice_on(words)}", file=sys.stderr)

    def _withdraw_earlier(self, jobs: Sequence[JobSpec]) -> None:
        """Delete the Jobs of earlier attempts of these ranks that wait in a queue again.

        The queue would admit such a Job once more. Its pods would take GPUs and then end, because a later attempt runs.
        """
        first, ranks = jobs[0].key, {job.key.rank for job in jobs}
        if first.attempt == 0 or first.is_spare:
            return
        with contextlib.suppress(JobServiceError):  # the next attempt can start without this
            for job in self._cluster.jobs(selector_of(first.run_labels)):
                number = job.metadata.labels.get("replicas-attempt", "")
                is_earlier = number.isdecimal() and int(number) < first.attempt
                if is_earlier and is_taken_back(job) and ranks & {*ranks_of(job)}:
                    self._cluster.delete_job(job.metadata.name)

    def find(self, key: JobKey) -> list[JobId]:
        found = []
        for job in self._jobs(selector_of(group_labels(key))):
            self._give_secret(job)
            if (index := index_of(key, job)) is not None:
                found.append(self._job_id(job, index))
        return found

    def verify(self, job_id: JobId, key: JobKey) -> JobId:
        name, space, index, uid, server = (job_id.get(part) for part in ID)
        is_id = all(isinstance(part, str) and NAME.fullmatch(part) for part in (name, space, uid))
        if not is_id or type(index) is not int or not isinstance(server, str) or not SERVER.fullmatch(server):
            raise ForeignJobError(self.name, key)
        job = self._cluster.job(str(name), str(space))
        if job is None:
            self._check_is_here(job_id)
        elif (index_of(key, job), job.metadata.uid) != (index, uid):
            raise ForeignJobError(self.name, key)
        return dict(zip(ID, (name, space, index, uid, server), strict=True))

    def state(self, job_id: JobId) -> JobState:
        job, pod = None, self._pod(job_id)
        if pod is None or needs_job(pod):
            job = self._job(job_id)
            pod = self._pod(job_id)  # again, because the pod may have come or gone since the first look
        if pod is None and job is None:
            self._check_is_here(job_id)
        return self._state_of_index(pod, job, job_id["job"], job_id["index"])

    def states(self, jobs: Mapping[JobKey, JobId]) -> dict[JobKey, JobState]:
        """Return the states of all pods of the run from one request; see `JobService.states`.

        If a pod is missing, or only its Job shows why the pod is being deleted, Jobs and pods are listed again.
        """
        if not jobs:
            return {}
        selector, found, of_jobs = selector_of(next(iter(jobs)).run_labels), dict[JobKey, JobState](), dict[str, Any]()
        pods = {place_of(pod): pod for pod in self._cluster.pods(selector)}
        asked = [pods.get((str(job_id.get("job")), str(job_id.get("index")))) for job_id in jobs.values()]
        if any(pod is None or needs_job(pod) for pod in asked):
            of_jobs = {job.metadata.name: job for job in self._jobs(selector)}
            # Listed after the Jobs, because a pod may have come and ended since the first list.
            pods = {place_of(pod): pod for pod in self._cluster.pods(selector)}
        for key, job_id in jobs.items():
            name, index = str(job_id.get("job")), job_id.get("index")
            pod = pods.get((name, str(index)))
            owner = pod or of_jobs.get(name)
            if owner is None or index is None or index_of(key, owner) != index:
                continue
            # A process in the cluster knows the server by another name, so the server is not compared.
            if job_id == {**self._job_id(owner, index), "server": job_id.get("server")}:
                job = of_jobs.get(name)
                is_its = job is not None and job.metadata.uid == job_id["uid"]
                found[key] = self._state_of_index(pod, job if is_its else None, name, index)
        return found

    def running_jobs(self, labels: Mapping[str, str]) -> list[RunningJob]:
        found = []
        for job in self._cluster.jobs(selector_of(labels)):
            if not any(each.type in ("Complete", "Failed") for each in job.status.conditions or ()):
                its = {name: value for name, value in (job.metadata.labels or {}).items() if value}
                found += [RunningJob(self._job_id(job, index), its) for index in range(job.spec.completions or 0)]
        return found

    def reports_preemption(self, gpu: str | None) -> bool:
        return True

    def commands_to_end(self, run_id: str, job_ids: Sequence[JobId] = ()) -> str:
        where = "".join(
            f" --{name} {value}" for name, value in (("context", self.context), ("namespace", self.namespace)) if value
        )
        return f"kubectl delete job{where} -l {RUN_LABEL}={run_id}"

    def _state_of_index(self, pod: Any, job: Any, name: str, index: int) -> JobState:
        """Return the state of a replica from its pod and its Job, and from the earlier observations and stops of this
        process.
        """
        stuck_s = 0.0
        if pod is not None and is_stuck(pod):
            stuck_s = self._stuck.note(pod.metadata.uid)
        elif pod is not None:
            self._stuck.forget(pod.metadata.uid)
        state = state_of(pod, job, index, stuck_s)
        if pod is None and not state.has_ended and not state.message:
            return replace(state, message=self._why_no_pod(job))
        is_seen = pod is not None and pod.status.phase == "Running"
        if (
            is_seen
            and state.message
            and (state.reason == "preempted" or (not state.is_unconfirmed and not state.reason))
        ):
            self._disrupted[name, index] = state.message
        never_ran = pod is None or (pod.status.phase != "Running" and pod.spec.node_name is None)
        if never_ran and state.reason == "lost" and index in self._stopped.get(name, ()):
            return JobState(True, "cancelled")
        if pod is None and state.reason == "lost" and (why := self._disrupted.get((name, index))):
            return JobState(True, "preempted", message=why)
        return state

    def _why_no_pod(self, job: Any) -> str:
        """Return the reason why a Job has no pod, such as a quota or a policy. The events are read now and then."""
        uid, made_at = job.metadata.uid, job.metadata.creation_timestamp.timestamp()
        asked_at, why = self._unmade.get(uid, (-UNMADE_S, ""))
        if time.time() - made_at >= UNMADE_S and time.monotonic() - asked_at >= UNMADE_S:
            with contextlib.suppress(JobServiceError):  # the state is known without the reason
                why = self._cluster.why_no_pod(job)
            self._unmade[uid] = (time.monotonic(), why)
        return why

    def logs(self, job_id: JobId, n_lines: int) -> str:
        pod = self._pod(job_id) if n_lines > 0 else None
        return "" if pod is None else self._cluster.log(pod, n_lines)

    def stop(self, job_id: JobId) -> None:
        """End a replica. A pod that runs gets a time limit that has passed, so that its log stays.

        A pod that waits is deleted. If it is created again, or comes late, it finds its cancel marker and ends. If all
        ranks of a Job are stopped before it has a pod, as in a queue, the Job is deleted.
        """
        name, space, pod = job_id["job"], job_id["namespace"], self._pod(job_id)
        stopped = self._stopped.setdefault(name, set())
        stopped.add(job_id["index"])
        if pod is None:
            job = self._job(job_id)
            if job is None:
                return
            # The indexes that have ended count, too: a Job that a queue took back may have some.
            over = {*stopped, *indexes(job.status.completed_indexes), *indexes(job.status.failed_indexes)}
            if len(over) == job.spec.completions and not self._cluster.pods(f"{JOB_NAME}={name}", space):
                self._cluster.delete_job(name, space)
        elif pod.status.phase == "Pending":
            self._cluster.delete_pod(pod)
        elif pod.status.phase not in ("Succeeded", "Failed"):
            self._cluster.end_pod(pod)

    def withdraw(self, job_id: JobId) -> None:
        """Delete the Job of a replica that ended because a queue suspended the Job. Otherwise do the same as `stop`.

        The suspension has ended all replicas of the Job, so the deletion ends none of them.
        """
        job = self._job(job_id)
        if job is None or not is_taken_back(job):
            self.stop(job_id)
            return
        for index in range(job.spec.completions or 0):
            self._disrupted.setdefault((job_id["job"], index), TAKEN_BACK)
        self._cluster.delete_job(job_id["job"], job_id["namespace"])

    def delete_run(self, key: JobKey, *, only_suspended: bool = False) -> int:
        """Delete the Jobs of a run, with their pods and Secrets, and return the number of Jobs.

        Args:
            key: the key of any job of the run.
            only_suspended: True: delete only the Jobs that wait in a queue. Default False.
        """
        found = self._cluster.jobs(selector_of(key.run_labels))
        chosen = [job for job in found if job.spec.suspend or not only_suspended]
        for job in chosen:
            self._cluster.delete_job(job.metadata.name)
        return len(chosen)

    def describe(self, job: JobSpec) -> dict[str, Any]:
        body = self.job([job])
        body["spec"]["template"]["spec"]["containers"][0]["command"] = shortened(job.command)
        return {"name": job.key.name, "job": body, "secret": dict.fromkeys(secret_data([job]), MASK)}

    def _give_secret(self, job: Any) -> None:
        """Create the Secret of a Job that this process has created, if it is still missing."""
        name = job.metadata.name
        with self._lock:
            data = self._owed.pop(name, None)
        if data:
            try:
                self._cluster.give_secret(job, data)
            except JobServiceError:
                self._owed[name] = data
                raise

    def _check_is_here(self, job_id: JobId) -> None:
        """Raise if a Job belongs to another cluster. Otherwise the caller would report it as lost."""
        if job_id["server"] != self._cluster.server:
            raise JobServiceError(
                f"Kubernetes at {self._cluster.server} has no Job {job_id['job']!r}: it was launched at "
                f"{job_id['server']}. Name the context of that cluster (kubectl config get-contexts): "
                "--option context=NAME.",
                "rejected",
            )

    def _jobs(self, selector: str) -> list[Any]:
        """Return the Jobs with some labels. The list may be a second old, because all ranks of a group ask for it."""
        with self._lock:
            asked_at, found = self._listed.get(selector, (-FRESH_S, []))
            if time.monotonic() - asked_at >= FRESH_S:
                found = self._cluster.jobs(selector)
                self._listed[selector] = (time.monotonic(), found)
            return found

    def _pod(self, job_id: JobId) -> Any:
        """Return the newest pod of an index. None if there is no pod."""
        labels = {JOB_NAME: job_id["job"], JOB_UID: job_id["uid"], INDEX: str(job_id["index"])}
        found = self._cluster.pods(selector_of(labels), job_id["namespace"])
        return found[-1] if found else None

    def _job(self, job_id: JobId) -> Any:
        """Return the Job that an id names. None if it is gone. Uids are compared, because names may be used again."""
        found = self._cluster.job(job_id["job"], job_id["namespace"])
        return found if found is not None and found.metadata.uid == job_id["uid"] else None

    def _job_id(self, owner: Any, index: int) -> JobId:
        """Return the id of an index of a Job.

        Args:
            owner: the Job, or a pod of it.
            index: the index.
        """
        labels, cluster = owner.metadata.labels or {}, self._cluster
        name, uid = labels.get(JOB_NAME, owner.metadata.name), labels.get(JOB_UID, owner.metadata.uid)
        return dict(zip(ID, (name, cluster.namespace, index, uid, cluster.server), strict=True))


class KubernetesExecutor(JobExecutor):
    """Runs replicas as pods of Kubernetes 1.33 or later. The ranks that start together are one Indexed Job.

    Args:
        namespace: the namespace of the Jobs. Default: the context's namespace.
        context: the context of the kubeconfig. Default: the cluster that this process runs in, or the current context.
        image: the image, which needs Python and pip. Default: Docker's `python` with the minor version of this
            machine's Python.
        cpu: the cores to request for each replica. Default: no request.
        memory_mb: the memory to request for each replica, in MiB. Default: no request.
        gpu_resource: the name of the GPU resource in the limits of a container. Default "nvidia.com/gpu".
        node_selector: the labels of the nodes to run on. Default: any node.
        queue: a LocalQueue of Kueue. The Job waits there until it is admitted. Default: no queue.
        service_account: the service account of the pods. Its token is not mounted. Default: the namespace's default.
        image_pull_secrets: the names of Secrets for the image's registry. Default: none.
        secrets: the names of Secrets whose keys every replica gets as variables. Default: none.
        pip: the requirements of the replicas. Default: those in the workspace's requirements.txt or pyproject.toml.
        labels: more labels for the Job and its pods. Default: none.
        gpu_products: the value of the nodes' label `nvidia.com/gpu.product` for each name that `gpu=` may have, as in
            {"H100": "NVIDIA-H100-80GB-HBM3"}. Default: none.
        keep_s: for how many seconds Kubernetes keeps a Job that has ended, with the logs of its pods. Default: a week.
        run_as_user: the id of the user that replicas run as, from 0 to 2^31 - 1. Default: the image's own user. A
            namespace that enforces the Pod Security Standard "restricted" needs a user that is not 0.

    Raises:
        MissingDependencyError: the client is not installed.
        ValueError: Kubernetes does not accept a label, `gpu_resource` or `run_as_user`.

    Example:
        launch(KubernetesExecutor(queue="team", run_as_user=1000), "train.py:main", 8, gpu="H100:2")
    """

    backend_name = "k8s"
    recordable_options = KubernetesJobs.recordable_options()
    default_timeout_s = None
    service: KubernetesJobs

    @options_of(KubernetesJobs)
    def __init__(self, service: KubernetesJobs) -> None:
        super().__init__(service)

    def remove_files(self, store_url: str, run_id: str, launched_at: float) -> None:
        """Delete the Jobs of a run, with their pods, logs and Secrets; see `LeavesFiles`."""
        self.service.delete_run(JobKey.of(Attempt(store_at(store_url), run_id, 0), launched_at))

    def withdraw_jobs(self, store_url: str, run_id: str, launched_at: float) -> int:
        """Delete the Jobs of a run that wait in a queue; see `MayBeQueued`."""
        key = JobKey.of(Attempt(store_at(store_url), run_id, 0), launched_at)
        return self.service.delete_run(key, only_suspended=True)
