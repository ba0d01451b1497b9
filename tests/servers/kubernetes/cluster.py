"""The control plane of the stand-in: Jobs, their pods and Secrets, and the controllers that keep them.

Indexed Jobs with a limit of 0 an index: a pod that failed fails its index. A finished Job goes after its time; what it
owns goes with it.
"""

from __future__ import annotations

import base64
import copy
import itertools
import threading
import uuid
from pathlib import Path
from typing import Any

from servers.kubernetes.pods import Kubelet, Pod, now, random_suffix

Wire = dict[str, Any]
INDEX = "batch.kubernetes.io/job-completion-index"


class Conflict(Exception):
    """An object of that name exists."""


class Cluster:
    """What is in one namespace. `changed` guards it all."""

    def __init__(self, folder: Path) -> None:
        self.changed = threading.Condition()
        self.jobs: dict[str, Wire] = {}
        self.pods: dict[str, Pod] = {}
        self.secrets: dict[str, Wire] = {}
        self.kubelet = Kubelet(folder, self.changed, self.secrets.get, self._pod_ended)
        self.events: list[Wire] = []
        self.refuses_pods = ""
        """Why no pod can be made, as by a quota."""
        self.drops: set[str] = set()
        """Fields of a Job's spec that this server is too old to know."""
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
                raise Conflict(f'jobs.batch "{name}" already exists')
            job = self._born(body)
            spec, uid = job["spec"], job["metadata"]["uid"]
            for field in self.drops & spec.keys():
                del spec[field]
            labels = {"batch.kubernetes.io/controller-uid": uid, "batch.kubernetes.io/job-name": name}
            spec["selector"] = {"matchLabels": {"batch.kubernetes.io/controller-uid": uid}}
            spec["template"].setdefault("metadata", {}).setdefault("labels", {}).update(labels)
            spec.setdefault("suspend", False)
            job["status"] = {}
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
        """Suspend a Job or let it go on, as Kueue does."""
        with self.changed:
            job = self.jobs[name]
            job["spec"]["suspend"] = is_suspended
            for pod in self._pods_of(job):
                if is_suspended and not pod.is_over:
                    self._delete(pod)
            self._sync(job)

    def _sync(self, job: Wire) -> None:
        """Start the pods that a Job lacks, and say how it is."""
        status, spec = job["status"], job["spec"]
        suspended = {
            "type": "Suspended",
            "status": str(bool(spec["suspend"])),
            "reason": "JobSuspended",
            "message": "Job suspended",
        }
        status["conditions"] = [each for each in status.get("conditions", []) if each["type"] != "Suspended"]
        if spec["suspend"]:
            status["conditions"].append(suspended)
        failed, done = _indexes(status, "failedIndexes"), _indexes(status, "completedIndexes")
        pods = self._pods_of(job)
        finished = failed | done
        for index in range(spec["completions"]):
            if not spec["suspend"] and index not in finished | {_index(pod) for pod in pods}:
                self._add_pod(job, index)
        status["active"] = sum(not pod.is_over for pod in self._pods_of(job))
        if len(finished) == spec["completions"] and "completionTime" not in status:
            kind, reason = ("Failed", "FailedIndexes") if failed else ("Complete", "CompletionsReached")
            status["conditions"].append({"type": kind, "status": "True", "reason": reason, "message": ""})
            status["completionTime"] = now()
            if (keep_s := spec.get("ttlSecondsAfterFinished")) is not None:
                timer = threading.Timer(keep_s, self.delete_job, (job["metadata"]["name"],))
                timer.daemon = True
                self._timers.append(timer)
                timer.start()
        self.changed.notify_all()

    def _add_pod(self, job: Wire, index: int) -> None:
        if self.refuses_pods:
            whom = {"kind": "Job", "name": job["metadata"]["name"], "uid": job["metadata"]["uid"]}
            event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": f"event-{len(self.events)}"}}
            told = {"involvedObject": whom, "reason": "FailedCreate", "message": self.refuses_pods}
            self.events.append(self._born({**event, **told}))
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

    def _pod_ended(self, pod: Pod) -> None:
        """Count a pod for its Job, and let it go if it was deleted."""
        owner = pod.wire["metadata"]["ownerReferences"][0]["uid"]
        job = next((job for job in self.jobs.values() if job["metadata"]["uid"] == owner), None)
        if pod.is_deleted:
            self.pods.pop(pod.name, None)
        if job is not None:
            if not job["spec"]["suspend"]:
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

    def evict(self, name: str, reason: str = "Evicted", message: str = "The node was low on resource: memory.") -> None:
        """End a pod as a kubelet does that needs its room: the pod stays, and says so."""
        with self.changed:
            pod = self.pods[name]
            pod.condition("DisruptionTarget", "True", "TerminationByKubelet", message)
            pod.ending = (reason, message)
            self.changed.notify_all()

    def drain(self, name: str) -> None:
        """Delete a pod as `kubectl drain` does."""
        with self.changed:
            self.pods[name].condition("DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting")
            self._delete(self.pods[name])

    def kill(self, name: str, reason: str = "") -> None:
        """Kill a pod's process with SIGKILL."""
        with self.changed:
            pod = self.pods[name]
            pod.killed_for = reason
            assert pod.process is not None
            pod.process.kill()

    def _delete(self, pod: Pod) -> None:
        pod.wire["metadata"]["deletionTimestamp"] = now()
        if pod.is_over:
            self.pods.pop(pod.name, None)
        self.changed.notify_all()

    # Secrets

    def put_secret(self, body: Wire) -> Wire:
        with self.changed:
            name = body["metadata"]["name"]
            if name in self.secrets:
                raise Conflict(f'secrets "{name}" already exists')
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
        """Delete what an owner had that is gone."""
        living = {job["metadata"]["uid"] for job in self.jobs.values()}

        def is_garbage(wire: Wire) -> bool:
            owners = {owner["uid"] for owner in wire["metadata"].get("ownerReferences", ())}
            return bool(owners) and not owners & living

        for pod in [pod for pod in self.pods.values() if is_garbage(pod.wire)]:
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


def _text(indexes: set[int]) -> str:
    """Return indexes as Kubernetes writes them: `1,3-5`."""
    parts = []
    for _, group in itertools.groupby(enumerate(sorted(indexes)), lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        parts.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return ",".join(parts)
