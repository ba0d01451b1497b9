"""The control plane of the stand-in: Jobs, their pods and Secrets, and the controllers that keep them.

It has Indexed Jobs whose indexes are not retried: a pod that failed fails its index. A finished Job is deleted after
its time, and the garbage collector deletes what the Job owned. `answers.json` describes a real control plane.
"""

from __future__ import annotations

import base64
import copy
import itertools
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from servers.kubernetes.pods import EVICTED, Kubelet, Pod, now, random_suffix
from servers.kubernetes.rules import violations

Wire = dict[str, Any]
INDEX = "batch.kubernetes.io/job-completion-index"
ENDS = {
    "Failed": ("FailureTarget", "FailedIndexes", "Job has failed indexes"),
    "Complete": ("SuccessCriteriaMet", "CompletionsReached", "Reached expected number of succeeded pods"),
}
"""For each final condition of a Job: the condition that comes before it, and the reason and message of both."""


class AlreadyExists(Exception):
    """An object of that name exists."""


class Cluster:
    """The objects of one namespace. The lock `changed` guards all of them."""

    def __init__(self, folder: Path) -> None:
        self.changed = threading.Condition()
        self.jobs: dict[str, Wire] = {}
        self.pods: dict[str, Pod] = {}
        self.secrets: dict[str, Wire] = {}
        self.kubelet = Kubelet(folder, self.changed, self.secrets.get, self._pod_ended)
        self.events: list[Wire] = []
        self.refuses_pods = ""
        """The reason why no pod can be created, such as a quota. Empty: pods can be created."""
        self.pod_security = ""
        """The Pod Security Standard that the namespace enforces, as in "restricted"."""
        self.podgc_s = 0.05
        """Seconds until a deleted pod that has no node is removed; a real collector comes every 20 s."""
        self.drops: set[str] = set()
        """Fields of a Job's spec that this server ignores, like an older server."""
        self._versions = itertools.count(1)
        self._timers: list[threading.Timer] = []

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self.kubelet.close()

    # Jobs

    def create_job(self, body: Wire, *, is_dry: bool) -> Wire:
        with self.changed:
            name = body["metadata"]["name"]
            if name in self.jobs:
                raise AlreadyExists(f'jobs.batch "{name}" already exists')
            job = self._born(body)
            job["metadata"]["generation"] = 1
            spec, uid = job["spec"], job["metadata"]["uid"]
            for field in self.drops & spec.keys():
                del spec[field]
            labels = {"batch.kubernetes.io/controller-uid": uid, "batch.kubernetes.io/job-name": name}
            spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
            spec["template"].setdefault("metadata", {}).setdefault("labels", {}).update(labels)
            spec.setdefault("suspend", False)
            job["status"] = {"ready": 0, "terminating": 0, "uncountedTerminatedPods": {}}
            if not is_dry:
                self.jobs[name] = job
                self._sync(job)
            return copy.deepcopy(job)

    def delete_job(self, name: str) -> bool:
        with self.changed:
            job = self.jobs.pop(name, None)
            if job is not None:
                self._collect_garbage()
            return job is not None

    def suspend(self, name: str, *, is_suspended: bool) -> None:
        """Suspend a Job or let it continue, as Kueue does."""
        with self.changed:
            job = self.jobs[name]
            job["spec"]["suspend"] = is_suspended
            job["metadata"]["generation"] += 1
            for pod in self._pods_of(job):
                if is_suspended and not pod.is_over:
                    # The Job controller removes its finalizer from these pods first, so it never counts them.
                    pod.is_tracked = False
                    self._delete(pod)
            self._sync(job)

    def _sync(self, job: Wire) -> None:
        """Start the pods that a Job lacks, and bring its status up to date."""
        status, spec = job["status"], job["spec"]
        was_suspended = any(each["type"] == "Suspended" for each in status.get("conditions", ()))
        if spec["suspend"]:
            _condition(status, "Suspended", "JobSuspended", "Job suspended")
            status.pop("startTime", None)
        else:
            if was_suspended:
                _condition(status, "Suspended", "JobResumed", "Job resumed", is_true=False)
            status.setdefault("startTime", now())
        failed, done = _indexes(status, "failedIndexes"), _indexes(status, "completedIndexes")
        finished = failed | done
        for index in range(spec["completions"]):
            if not spec["suspend"] and index not in finished | {_index(pod) for pod in self._pods_of(job)}:
                self._add_pod(job, index)
        living = [pod for pod in self._pods_of(job) if not pod.is_over]
        status["active"] = sum(not pod.is_deleted for pod in living)
        status["terminating"] = sum(pod.is_deleted for pod in living)
        if len(finished) == spec["completions"]:
            self._finish(job, "Failed" if failed else "Complete")
        self.changed.notify_all()

    def _finish(self, job: Wire, kind: str) -> None:
        """Report the end of a Job: first the condition that leads to the end, and the end itself in a later update."""
        status, (before, reason, message) = job["status"], ENDS[kind]
        if any(each["type"] == before for each in status.get("conditions", ())):
            return
        _condition(status, before, reason, message)

        def end() -> None:
            with self.changed:
                _condition(status, kind, reason, message)
                if kind == "Complete":
                    status["completionTime"] = now()
                self.changed.notify_all()
            if (keep_s := job["spec"].get("ttlSecondsAfterFinished")) is not None:
                self._later(keep_s, lambda: self.delete_job(job["metadata"]["name"]))

        self._later(0.05, end)

    def _later(self, after_s: float, act: Callable[[], object]) -> None:
        timer = threading.Timer(after_s, act)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    def _add_pod(self, job: Wire, index: int) -> None:
        prefix = f"{job['metadata']['name']}-{index}-"
        refusal = self.refuses_pods or self._refused_by_pod_security(job)
        if refusal:
            message = f'Error creating: pods "{prefix}" is forbidden: {refusal}'
            whom = {"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
            event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": f"event-{len(self.events)}"}}
            about = {"involvedObject": whom, "type": "Warning", "reason": "FailedCreate", "message": message}
            self.events.append(self._born({**event, **about, "lastTimestamp": now(), "count": 1}))
            return
        name, uid, template = job["metadata"]["name"], job["metadata"]["uid"], copy.deepcopy(job["spec"]["template"])
        metadata = template["metadata"]
        metadata["name"] = f"{name}-{index}-{random_suffix()}"
        metadata["labels"][INDEX] = str(index)
        metadata["ownerReferences"] = [{"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid}]
        for container in template["spec"]["containers"]:
            container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "value": str(index)})
        pod = Pod(self._born({"apiVersion": "v1", "kind": "Pod", **template}))
        self.pods[pod.name] = pod
        self.kubelet.start(pod)

    def _refused_by_pod_security(self, job: Wire) -> str:
        found = violations(job["spec"]["template"]["spec"]) if self.pod_security == "restricted" else ""
        return f'violates PodSecurity "restricted:latest": {found}' if found else ""

    def warnings(self, job: Wire) -> list[str]:
        """Return the server's warnings when a Job is created, in the format of the header `Warning`."""
        found = violations(job["spec"]["template"]["spec"]) if self.pod_security == "restricted" else ""
        return [f'would violate PodSecurity "restricted:latest": {found}'] if found else []

    def _pod_ended(self, pod: Pod) -> None:
        """Count a pod for its Job, and remove it if it was deleted."""
        owner = pod.wire["metadata"]["ownerReferences"][0]["uid"]
        job = next((job for job in self.jobs.values() if job["metadata"]["uid"] == owner), None)
        if pod.is_deleted:
            self.pods.pop(pod.name, None)
        if job is not None:
            if pod.is_tracked:
                field = "completedIndexes" if pod.status["phase"] == "Succeeded" else "failedIndexes"
                job["status"][field] = _text(_indexes(job["status"], field) | {_index(pod)})
            self._sync(job)

    def _pods_of(self, job: Wire) -> list[Pod]:
        uid = job["metadata"]["uid"]
        return [pod for pod in self.pods.values() if pod.wire["metadata"]["ownerReferences"][0]["uid"] == uid]

    # Pods

    def delete_pod(self, name: str) -> bool:
        with self.changed:
            pod = self.pods.get(name)
            if pod is not None:
                self._delete(pod)
            return pod is not None

    def limit_pod(self, name: str, limit_s: int) -> None:
        with self.changed:
            self.pods[name].wire["spec"]["activeDeadlineSeconds"] = limit_s
            self.changed.notify_all()

    def evict(self, name: str, reason: str = "Evicted", message: str = EVICTED) -> None:
        """End a pod like a kubelet that is short of memory. The pod object stays."""
        with self.changed:
            pod = self.pods[name]
            pod.ending, pod.disruption = (reason, message), ("TerminationByKubelet", message)
            self.changed.notify_all()

    def drain(self, name: str) -> None:
        """Delete a pod as `kubectl drain` does: the eviction API sets the condition before it deletes."""
        with self.changed:
            self.pods[name].condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")
            self._delete(self.pods[name])

    def lose_node(self, name: str) -> None:
        """Cut off the node of a pod. The node controller sets the pod's condition Ready, and nothing else."""
        with self.changed:
            pod = self.pods[name]
            self.kubelet.unreachable.add(pod.wire["spec"]["nodeName"])
            pod.condition("Ready", "False")
            self.changed.notify_all()

    def taint(self, name: str) -> None:
        """Delete the pod of a node that was cut off, as the taint manager does after its toleration."""
        with self.changed:
            message = "Taint manager: deleting due to NoExecute taint"
            self.pods[name].condition("DisruptionTarget", "True", "DeletionByTaintManager", message)
            self._delete(self.pods[name])

    def kill(self, name: str, reason: str = "") -> None:
        """Kill a pod's process with SIGKILL."""
        with self.changed:
            pod = self.pods[name]
            pod.killed_for = reason
            assert pod.process is not None
            pod.process.kill()

    def _delete(self, pod: Pod) -> None:
        """Mark a pod as deleted. A running pod has its grace. Without a node, it waits for the garbage collector."""
        metadata = pod.wire["metadata"]
        grace_s = pod.grace_s if pod.is_scheduled and not pod.is_over else 0
        metadata.setdefault("deletionTimestamp", now(grace_s))
        metadata.setdefault("deletionGracePeriodSeconds", grace_s)
        if pod.is_over or not (pod.is_scheduled or pod.is_tracked):
            self.pods.pop(pod.name, None)
        elif not pod.is_scheduled:
            self._later(self.podgc_s, lambda: self._collect(pod))
        self.changed.notify_all()

    def _collect(self, pod: Pod) -> None:
        """Remove a deleted pod that has no node: it fails first, so that its Job counts it."""
        with self.changed:
            if self.pods.get(pod.name) is pod:
                pod.status["phase"] = "Failed"
                self._pod_ended(pod)
                self.changed.notify_all()

    # Secrets

    def put_secret(self, body: Wire) -> Wire:
        with self.changed:
            name = body["metadata"]["name"]
            if name in self.secrets:
                raise AlreadyExists(f'secrets "{name}" already exists')
            secret = self._born(body)
            text = secret.pop("stringData", {})
            secret["data"] = secret.get("data", {}) | {
                k: base64.b64encode(v.encode()).decode() for k, v in text.items()
            }
            self.secrets[name] = secret
            made = copy.deepcopy(secret)
            self._collect_garbage()
            self.changed.notify_all()
            return made

    def _collect_garbage(self) -> None:
        """Delete the objects whose owner no longer exists."""
        living = {job["metadata"]["uid"] for job in self.jobs.values()}

        def is_garbage(wire: Wire) -> bool:
            owners = {owner["uid"] for owner in wire["metadata"].get("ownerReferences", ())}
            return bool(owners) and not owners & living

        for pod in [pod for pod in self.pods.values() if is_garbage(pod.wire)]:
            pod.is_tracked = False  # if a Job no longer exists, the Job controller removes its finalizer from the pods
            self._delete(pod)
        for name in [name for name, secret in self.secrets.items() if is_garbage(secret)]:
            del self.secrets[name]

    def _born(self, body: Wire) -> Wire:
        found = copy.deepcopy(body)
        found["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": now(), "namespace": "team"}
        found["metadata"]["resourceVersion"] = str(next(self._versions))
        return found


def _index(pod: Pod) -> int:
    return int(pod.wire["metadata"]["labels"][INDEX])


def _indexes(status: Wire, field: str) -> set[int]:
    found: set[int] = set()
    for part in filter(None, status.get(field, "").split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _condition(status: Wire, kind: str, reason: str, message: str, *, is_true: bool = True) -> None:
    others = [each for each in status.get("conditions", []) if each["type"] != kind]
    row = {"type": kind, "status": str(is_true), "reason": reason, "message": message, "lastTransitionTime": now()}
    status["conditions"] = [*others, row]


def _text(indexes: set[int]) -> str:
    """Return indexes as Kubernetes writes them: a range has three or more, as in `1,2,4-6`."""
    parts = []
    for _, group in itertools.groupby(enumerate(sorted(indexes)), lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        parts.append(",".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)
