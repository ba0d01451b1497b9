"""What pods and their Job say of replicas: whose they are, and how."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from executors.backends.jobs.service import UNKNOWN, JobKey, JobState
from executors.backends.kubernetes_manifest import CONTAINER, RANKS, SPARE, group_labels

JOB_NAME = "batch.kubernetes.io/job-name"
JOB_UID = "batch.kubernetes.io/controller-uid"
INDEX = "batch.kubernetes.io/job-completion-index"
STUCK = (
    "ErrImagePull",
    "ErrImageNeverPull",
    "ImagePullBackOff",
    "InvalidImageName",
    "CreateContainerConfigError",  # as where a Secret is missing
    "CreateContainerError",
)
STUCK_S = 300.0  # for which one process saw it: a registry or a Secret may be late
STUCK_AT_AGE_S = 3600.0  # of the pod, for processes that look once: its clock is another, and a first pull takes long
DISRUPTED = ("Evicted", "Preempting", "NodeShutdown", "Terminated")


def ranks_of(owner: Any) -> list[int]:
    """Return the ranks of a Job, or of a pod of it, in the order of their indexes."""
    spec = owner.spec.template.spec if hasattr(owner.spec, "template") else owner.spec
    env = [each for one in spec.containers if one.name == CONTAINER for each in one.env or ()]
    texts = [each.value for each in env if each.name == RANKS]
    return [int(rank) for text in texts for rank in text.split(",")]


def index_of(key: JobKey, owner: Any) -> int | None:
    """Return the index under which a Job runs an attempt; None where it does not. A pod of it says the same."""
    labels, ranks = owner.metadata.labels or {}, ranks_of(owner)
    has_labels = group_labels(key).items() <= labels.items() and (SPARE in labels) == key.is_spare
    return ranks.index(key.rank) if has_labels and key.rank in ranks else None


def place_of(pod: Any) -> tuple[str, str]:
    """Return the name of a pod's Job, and the pod's index."""
    return pod.metadata.labels[JOB_NAME], pod.metadata.labels[INDEX]


def is_stuck(pod: Any) -> bool:
    """Return whether a pod waits for what may never come."""
    waiting = _container(pod.status, "waiting")
    return pod.status.phase == "Pending" and waiting is not None and waiting.reason in STUCK


def state_of(pod: Any, job: Any, index: int, stuck_s: float = 0.0) -> JobState:
    """Return how a replica is.

    Args:
        pod: the newest of its index; None where there is none.
        job: its Job; None where it is gone. It is looked at only where there is no pod.
        stuck_s: how long this process has seen that it `is_stuck`.
    """
    if pod is None:
        return _without_a_pod(job, index)
    status = pod.status
    disrupted = _condition(status, "DisruptionTarget")
    if status.phase == "Succeeded":
        return JobState(True, exit_code=0)
    ended = _container(status, "terminated")
    if status.phase != "Failed" and ended is None and pod.metadata.deletion_timestamp is not None:
        # It is in its grace, or its node is cut off or dead: then it stays for ever.
        words = _said(disrupted) or "its pod is being deleted"
        return JobState(True, "preempted" if disrupted else "lost", message=words, is_hearsay=True)
    if status.phase == "Pending":
        return _pending(pod, stuck_s)
    if status.phase != "Failed" and ended is None:
        return JobState(False, message=_said(disrupted))
    return replace(_end(status, ended, disrupted), holds=status.phase != "Failed")  # as beside a sidecar


def _end(status: Any, ended: Any, disrupted: Any) -> JobState:
    code = ended and ended.exit_code
    if disrupted or status.reason in DISRUPTED:
        return JobState(True, "preempted", code, _said(disrupted) or _said(status))
    if status.reason == "DeadlineExceeded":
        return JobState(True, "timeout", code, _said(status))
    if ended is None:  # as of a node that took it, and found no room
        return JobState(True, "start_failed", message=_said(status))
    is_oom = ended.reason == "OOMKilled"
    return JobState(True, "oom" if is_oom else None, code, "OOMKilled" if is_oom else "")


def indexes(text: str | None) -> set[int]:
    """Return the numbers of a text as in `1,3-5`."""
    found: set[int] = set()
    for part in (text or "").split(",") if text else ():
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _without_a_pod(job: Any, index: int) -> JobState:
    if job is None or job.metadata.deletion_timestamp is not None:
        return UNKNOWN
    if index in indexes(job.status.completed_indexes):
        return JobState(True, exit_code=0)
    if index in indexes(job.status.failed_indexes):
        return JobState(True, "lost", message="its pod was deleted")
    if failed := _condition(job.status, "Failed") or _condition(job.status, "FailureTarget"):
        return JobState(True, "lost", message=_said(failed))
    return JobState(False, message="suspended, as in a queue" if job.spec.suspend else "")


def _pending(pod: Any, stuck_s: float) -> JobState:
    waiting, since = _container(pod.status, "waiting"), pod.status.start_time
    unscheduled = next((each for each in pod.status.conditions or () if each.type == "PodScheduled"), None)
    if waiting is None:
        is_told = unscheduled is not None and unscheduled.status == "False"
        return JobState(False, message=_said(unscheduled) if is_told else "")
    is_old = since is not None and time.time() - since.timestamp() > STUCK_AT_AGE_S
    if is_stuck(pod) and (is_old or stuck_s > STUCK_S):
        return JobState(True, "start_failed", message=_said(waiting), holds=True)
    return JobState(False, message=_said(waiting))


def _condition(status: Any, kind: str) -> Any:
    return next((each for each in status.conditions or () if each.type == kind and each.status == "True"), None)


def _container(status: Any, state: str) -> Any:
    """Return the state of this name of the replica's container, if it is in it."""
    for each in status.container_statuses or ():
        if each.name == CONTAINER and each.state is not None and (found := getattr(each.state, state)) is not None:
            return found
    return None


def _said(source: Any) -> str:
    """Return reason and message of a condition, or of a status."""
    return ": ".join(part for part in (source and source.reason, source and source.message) if part)
