"""Interprets pods and their Job: finds which replica a pod runs, and the state of that replica."""

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
    "CreateContainerConfigError",  # for example if a Secret is missing
    "CreateContainerError",
)
STUCK_S = 300.0  # a pod that one process has seen stuck for this time has failed; a registry or a Secret may be late
# A process that looks once only has the pod's age, by another clock. A first pull of an image may take long.
STUCK_AT_AGE_S = 3600.0
DISRUPTED = ("Evicted", "Preempting", "NodeShutdown", "Terminated")
NO_START = ("StartError", "ContainerCannotRun")  # the runtime could not start the process
NO_STATUS = "ContainerStatusUnknown"  # the node lost the container, for example because the node was restarted
QUEUED = "suspended, as in a queue"
TAKEN_BACK = "suspended: its queue took its place back"
DELETED_EARLY = "its pod was deleted before it ran, and not by this process"
CUT_OFF = "its node does not answer"


def ranks_of(owner: Any) -> list[int]:
    """Return the ranks of a Job in the order of their indexes.

    Args:
        owner: the Job, or a pod of it.

    Example:
        ranks_of(job)[2]
    """
    spec = owner.spec.template.spec if hasattr(owner.spec, "template") else owner.spec
    env = [each for one in spec.containers if one.name == CONTAINER for each in one.env or ()]
    texts = [each.value for each in env if each.name == RANKS]
    return [int(rank) for text in texts for rank in text.split(",")]


def index_of(key: JobKey, owner: Any) -> int | None:
    """Return the index under which a Job runs an attempt. None if the Job does not run it.

    Args:
        key: the run, the rank and the attempt.
        owner: the Job, or a pod of it.

    Example:
        index_of(key, job)
    """
    labels, ranks = owner.metadata.labels or {}, ranks_of(owner)
    has_labels = group_labels(key).items() <= labels.items() and (SPARE in labels) == key.is_spare
    return ranks.index(key.rank) if has_labels and key.rank in ranks else None


def place_of(pod: Any) -> tuple[str, str]:
    """Return the name of a pod's Job, and the pod's index as text.

    Args:
        pod: the pod.

    Example:
        name, index = place_of(pod)
    """
    return pod.metadata.labels[JOB_NAME], pod.metadata.labels[INDEX]


def is_stuck(pod: Any) -> bool:
    """Return True if a pod waits for something that may never come, such as an image that does not exist.

    Args:
        pod: the pod.

    Example:
        is_stuck(pod)
    """
    waiting = _container(pod.status, "waiting")
    return pod.status.phase == "Pending" and waiting is not None and waiting.reason in STUCK


def is_taken_back(job: Any) -> bool:
    """Return True if a queue has admitted a Job and has suspended it again.

    A Job that is created suspended has generation 1, and each change of its spec adds one. The admission makes it at
    least 2, and a suspension after that at least 3. So a suspended Job with a generation above 1 was admitted before.

    Args:
        job: the Job.

    Example:
        is_taken_back(job)
    """
    return bool(job.spec.suspend) and (job.metadata.generation or 0) > 1


def needs_job(pod: Any) -> bool:
    """Return True if only the Job shows why a pod is being deleted.

    If a queue suspends a Job, its pods are deleted and get no condition.

    Args:
        pod: the pod.

    Example:
        needs_job(pod)
    """
    return pod.metadata.deletion_timestamp is not None and _condition(pod.status, "DisruptionTarget") is None


def state_of(pod: Any, job: Any, index: int, stuck_s: float = 0.0) -> JobState:
    """Return the state of the replica's pod as a JobState.

    Args:
        pod: the newest pod of the index. None if there is no pod.
        job: the Job of the pod. None if it is gone, or was not asked for. It is only used if there is no pod, or if
            the pod `needs_job`.
        index: the pod's index in its Job.
        stuck_s: for how many seconds this process has seen that the pod `is_stuck`. Default 0.

    Example:
        state_of(pod, None, 2).has_ended
    """
    if pod is None:
        return _without_a_pod(job, index)
    status = pod.status
    disrupted = _condition(status, "DisruptionTarget")
    if status.phase == "Succeeded":
        return JobState(True, exit_code=0)
    is_deleted = pod.metadata.deletion_timestamp is not None
    if is_deleted and not disrupted and job is not None and is_taken_back(job):
        if status.phase == "Running":  # the pod is ending, and the replica may still save its state
            return JobState(True, "preempted", message=TAKEN_BACK, holds_place=True, is_unconfirmed=True)
        return _without_a_pod(job, index)
    ended = _container(status, "terminated")
    if status.phase == "Failed":
        return _end(status, ended, disrupted, is_deleted=is_deleted)
    if ended is not None and _container_beside_runs(status):  # a sidecar, which may run for ever, keeps the pod
        return replace(_end(status, ended, disrupted, is_deleted=is_deleted), holds_place=True)
    if is_deleted:
        # The pod is ending. If its node is dead or has no connection, the pod stays in this state for ever.
        words = _reason_text(disrupted) or "its pod is being deleted"
        return JobState(True, "preempted" if disrupted else "lost", message=words, is_unconfirmed=True)
    if status.phase == "Pending":
        return _pending(pod, stuck_s)
    # If only the container has ended, its kubelet reports the reason later. So the pod counts as running until then.
    if ended is None and _is_cut_off(status):
        return JobState(False, message=CUT_OFF, is_unconfirmed=True)
    return JobState(False, message=_reason_text(disrupted))


def _end(status: Any, ended: Any, disrupted: Any, *, is_deleted: bool) -> JobState:
    code = ended and ended.exit_code
    if disrupted or status.reason in DISRUPTED:
        return JobState(True, "preempted", code, _reason_text(disrupted) or _reason_text(status))
    if status.reason == "DeadlineExceeded":
        return JobState(True, "timeout", code, _reason_text(status))
    if ended is None and is_deleted and not status.reason:  # no node ever had the pod, and a collector removes it
        return JobState(True, "lost", message=DELETED_EARLY)
    if ended is None:  # for example, a node accepted the pod and had no room
        return JobState(True, "start_failed", message=_reason_text(status))
    if ended.reason in NO_START:
        return JobState(True, "start_failed", code, _reason_text(ended))
    if ended.reason == NO_STATUS:
        return JobState(True, "lost", code, _reason_text(ended))
    is_oom = ended.reason == "OOMKilled"
    return JobState(True, "oom" if is_oom else None, code, "OOMKilled" if is_oom else "")


def indexes(text: str | None) -> set[int]:
    """Return the numbers in a text of ranges.

    Args:
        text: the ranges, as in "1,2,4-6". None: no numbers.

    Example:
        indexes("1,2,4-6")
    """
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
        return JobState(True, "lost", message=_reason_text(failed))
    if is_taken_back(job):
        # A queue also takes a Job back whose pods never ran, for example if they were not ready in time. So the caller
        # must know that the replica ran before it reports a preemption.
        return JobState(False, "preempted", message=TAKEN_BACK, holds_place=True)
    return JobState(False, message=QUEUED if job.spec.suspend else "")


def _pending(pod: Any, stuck_s: float) -> JobState:
    waiting, since = _container(pod.status, "waiting"), pod.status.start_time
    unscheduled = next((each for each in pod.status.conditions or () if each.type == "PodScheduled"), None)
    if waiting is None:
        has_no_node = unscheduled is not None and unscheduled.status == "False"
        return JobState(False, message=_reason_text(unscheduled) if has_no_node else "")
    is_old = since is not None and time.time() - since.timestamp() > STUCK_AT_AGE_S
    if is_stuck(pod) and (is_old or stuck_s > STUCK_S):
        return JobState(True, "start_failed", message=_reason_text(waiting), holds_place=True)
    return JobState(False, message=_reason_text(waiting))


def _condition(status: Any, kind: str) -> Any:
    return next((each for each in status.conditions or () if each.type == kind and each.status == "True"), None)


def _is_cut_off(status: Any) -> bool:
    """Return True if the control plane has had no sign of a pod's node for a while.

    The node controller then sets the pod's condition Ready to False. A kubelet does so as well where a container is not
    ready, and reports that in ContainersReady, which the node controller leaves as it is.
    """
    found = {each.type: each.status for each in status.conditions or ()}
    return found.get("Ready") == "False" and found.get("ContainersReady") != "False" and status.phase == "Running"


def _container(status: Any, state: str) -> Any:
    """Return the replica's container's state of this name. None if the container is in another state."""
    for each in status.container_statuses or ():
        if each.name == CONTAINER and each.state is not None and (found := getattr(each.state, state)) is not None:
            return found
    return None


def _container_beside_runs(status: Any) -> bool:
    """Return True if a container other than the replica's runs."""
    others = (each.state for each in status.container_statuses or () if each.name != CONTAINER)
    return any(state is not None and state.running is not None for state in others)


def _reason_text(source: Any) -> str:
    """Return reason and message of a condition, of a container's state, or of a pod's status."""
    return ": ".join(part.strip() for part in (source and source.reason, source and source.message) if part)
