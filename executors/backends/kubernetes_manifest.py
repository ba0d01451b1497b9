"""Makes the manifests of a group of replicas: an Indexed Job, and the Secret with its environment."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from executors.backends.jobs.service import JobKey, JobServiceError, JobSpec, common_env, option
from executors.task.record import OPTION_NAME

CONTAINER = "replica"  # the name of the replica's container; a cluster may add sidecars to the pod
RANKS = "REPLICA_RANKS"  # the variable from which the bootstrap reads the ranks of the group
QUEUE = "kueue.x-k8s.io/queue-name"
GPU_PRODUCT = "nvidia.com/gpu.product"
OUR_LABELS = "replicas-"
SPARE = "replicas-spare"
WEEK_S = 604_800
GRACE_S = 30
PULL_S = 1800  # added to a pod's limit, which includes the pull of its image; the worker keeps the exact limit
STAY = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
MAX_SECRET_BYTES = 1 << 20
MAX_UID = 2**31 - 1
HOME = "/tmp"  # for a user that is not in the image, whose home would be "/", which it cannot write to
NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
# Only Docker's own images are read from a record. Another image, which a stranger wrote there, would get our secrets.
PYTHON_IMAGE = re.compile(r"python:3\.\d{1,2}")
GPU = re.compile(r"(?:(?P<product>[A-Za-z][A-Za-z0-9._-]*)(?::(?P<n>[1-9]\d*))?|(?P<any>[1-9]\d*))")
PART = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
LABEL = re.compile(rf"(?=.{{1,317}}\Z)({PART}(\.{PART})*/)?[A-Za-z0-9]([A-Za-z0-9._-]{{0,61}}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(eq=False, kw_only=True)
class PodOptions:
    """The options of the pods, and the manifests that follow from them. `KubernetesExecutor` describes the fields.

    Raises:
        ValueError: Kubernetes does not accept an option.

    Example:
        PodOptions(queue="team").job(jobs)
    """

    image: str | None = option(None, PYTHON_IMAGE)
    cpu: float | None = option(None, float)
    memory_mb: int | None = option(None, int)
    gpu_resource: str = option("nvidia.com/gpu", LABEL)
    node_selector: Mapping[str, str] | None = option(None, dict)
    queue: str | None = option(None, OPTION_NAME)
    service_account: str | None = None
    image_pull_secrets: Sequence[str] = ()
    secrets: Sequence[str] = ()
    labels: Mapping[str, str] | None = option(None, dict)
    gpu_products: Mapping[str, str] | None = option(None, dict)
    keep_s: int = option(WEEK_S, int)
    run_as_user: int | None = option(None, int)

    def __post_init__(self) -> None:
        self.image = self.image or "python:{}.{}".format(*sys.version_info)
        for option_name in ("node_selector", "labels", "gpu_products"):
            named = {str(name): str(value) for name, value in (getattr(self, option_name) or {}).items()}
            setattr(self, option_name, named)
            for name, value in named.items():
                if not LABEL.fullmatch(name) or not LABEL_VALUE.fullmatch(value):
                    raise ValueError(
                        f"{option_name}: {name!r}: {value!r} is not a label that Kubernetes takes. Use a name as in "
                        "'example.com/name', and at most 63 letters, digits, '-', '_' and '.' for each part."
                    )
        if not LABEL.fullmatch(self.gpu_resource) or "/" not in self.gpu_resource:
            raise ValueError(
                f"gpu_resource={self.gpu_resource!r} is not a resource that Kubernetes takes. Use the name that "
                "`kubectl describe node` shows for the GPUs, as in 'nvidia.com/gpu'."
            )
        if self.run_as_user is not None and not 0 <= self.run_as_user <= MAX_UID:
            raise ValueError(f"run_as_user must be a user id from 0 to {MAX_UID}, got run_as_user={self.run_as_user}.")
        if ours := [name for name in self.labels or {} if name.startswith(OUR_LABELS) or name == QUEUE]:
            raise ValueError(f"The label {ours[0]!r} is set by `replicas` itself. Choose another name, or queue=.")

    def job(self, jobs: Sequence[JobSpec]) -> dict[str, Any]:
        """Return the manifest of the Job that runs the jobs of a group.

        Args:
            jobs: the jobs. The pod with index i runs the job with index i.

        Raises:
            ValueError: the nodes with the GPU are not known.
            JobServiceError: the variables cannot be in a Secret.
        """
        first, n, name = jobs[0], len(jobs), group_name(jobs)
        labels = {**(self.labels or {}), **group_labels(first.key)}
        env = {**common_env(jobs), RANKS: ",".join(str(job.key.rank) for job in jobs)}
        plain = [{"name": name, "value": literal(value)} for name, value in env.items() if name.startswith("REPLICA_")]
        if self.run_as_user and "HOME" not in env:
            plain.append({"name": "HOME", "value": HOME})
        secrets = [*dict.fromkeys((*self.secrets, *first.secret_names)), *([name] if secret_data(jobs) else [])]
        requests = {"cpu": self.cpu, "memory": self.memory_mb and f"{self.memory_mb}Mi"}
        gpu, selector = self.gpu(first.gpu)
        container = {
            "name": CONTAINER,
            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
            "image": self.image,
            "command": [literal(word) for word in first.command],
            "env": plain,
            "envFrom": [{"secretRef": {"name": each}} for each in secrets],
            "resources": {
                "limits": {self.gpu_resource: str(gpu)} if gpu else {},
                "requests": {what: str(amount) for what, amount in requests.items() if amount},
            },
            "terminationMessagePolicy": "FallbackToLogsOnError",
            # Namespaces that enforce the Pod Security Standard "restricted" require this.
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        user = {} if self.run_as_user is None else {"runAsUser": self.run_as_user, "runAsNonRoot": self.run_as_user > 0}
        pod = {
            "restartPolicy": "Never",
            # The limit is the pod's, because a limit of the Job would include the wait in a queue.
            "activeDeadlineSeconds": first.limit_s and first.limit_s + PULL_S,
            "terminationGracePeriodSeconds": GRACE_S,
            "automountServiceAccountToken": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}, **user},
            "serviceAccountName": self.service_account,
            "imagePullSecrets": [{"name": each} for each in self.image_pull_secrets],
            "nodeSelector": {**(self.node_selector or {}), **selector},
            "tolerations": [{"key": self.gpu_resource, "operator": "Exists", "effect": "NoSchedule"}] if gpu else [],
            "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],  # the default /dev/shm has 64 MiB
            "containers": [container],
        }
        spec = {
            "completionMode": "Indexed",
            "completions": n,
            "parallelism": n,
            "backoffLimitPerIndex": 0,
            "maxFailedIndexes": n,  # so that a failed index ends neither the others nor the Job
            "podReplacementPolicy": "Failed",  # so that there are never two pods of one index
            "suspend": True if self.queue else None,  # until Kueue admits the Job
            "ttlSecondsAfterFinished": self.keep_s,
            "template": {"metadata": {"labels": labels, "annotations": STAY}, "spec": pod},
        }
        metadata = {"name": name, "labels": {**labels, **({QUEUE: self.queue} if self.queue else {})}}
        made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
        return {name: _without_nulls(each) for name, each in made.items()}

    def gpu(self, gpu: str | None) -> tuple[int, dict[str, str]]:
        """Return the number of GPUs of a pod, and the label of the nodes that have such GPUs.

        Args:
            gpu: the GPU, as in "H100:2", or a number. None: no GPU.

        Raises:
            ValueError: the text is not a GPU, or no option names the nodes that have it.
        """
        if gpu is None:
            return 0, {}
        if (parts := GPU.fullmatch(gpu)) is None:
            raise ValueError(
                f"gpu must be a name such as 'H100' or 'H100:2', or a number such as '2', got gpu={gpu!r}."
            )
        n, product = int(parts["n"] or parts["any"] or 1), parts["product"]
        if product is None or GPU_PRODUCT in (self.node_selector or {}):
            return n, {}
        if label := (self.gpu_products or {}).get(product):
            return n, {GPU_PRODUCT: label}
        if self.node_selector:  # some clouds use other labels for GPUs, so any selector of the user counts
            return n, {}
        example = f'gpu_products={{"{product}": "…"}}'
        raise ValueError(
            f"No option names the nodes that have a {product}. Give the value of their label {GPU_PRODUCT} (kubectl "
            f'get nodes -L {GPU_PRODUCT}) as {example}, or a node_selector, or use any GPU: gpu="{n}".'
        )


def group_name(jobs: Sequence[JobSpec]) -> str:
    """Return the name of a group's Job and of its Secret.

    The lowest rank makes the name unique, because a rank is in only one group of each attempt number.

    Args:
        jobs: the jobs of the group.

    Example:
        group_name(jobs)
    """
    return f"{jobs[0].key.group}-r{min(job.key.rank for job in jobs)}"


def group_labels(key: JobKey) -> dict[str, str]:
    """Return the labels that all pods of a group have.

    Args:
        key: the key of any job of the group.

    Example:
        group_labels(jobs[0].key)
    """
    spare = {SPARE: "true"} if key.is_spare else {}
    return {**key.run_labels, "replicas-attempt": str(key.attempt), **spare}


def selector_of(labels: Mapping[str, str]) -> str:
    """Return labels as the API takes them in a selector.

    Args:
        labels: the labels.

    Example:
        selector_of({"replicas-run": "brave-otter-7f3a"})  # "replicas-run=brave-otter-7f3a"
    """
    return ",".join(f"{name}={value}" for name, value in labels.items())


def secret_data(jobs: Sequence[JobSpec]) -> dict[str, str]:
    """Return the variables that only the pods may see: the variables of `env=`, and credentials.

    Args:
        jobs: the jobs of the group.

    Raises:
        JobServiceError: Kubernetes would ignore the name of a variable, or the variables are too large for a Secret.

    Example:
        secret_data(jobs).keys()
    """
    env = {name: value for name, value in common_env(jobs).items() if not name.startswith("REPLICA_")}
    found = {**env, **jobs[0].credentials}
    if unfit := [name for name in found if not VARIABLE.fullmatch(name)]:
        raise JobServiceError(
            f"Kubernetes takes no variable {unfit[0]!r}. Use only letters, digits and '_' in its name.", "rejected"
        )
    if (size := sum(len(value.encode()) for value in found.values())) > MAX_SECRET_BYTES:
        largest = max(found, key=lambda name: len(found[name].encode()))
        raise JobServiceError(
            f"The variables of the replicas have {size:,} bytes, and the largest is {largest!r}. A Secret of "
            f"Kubernetes has at most {MAX_SECRET_BYTES:,} bytes: put large values into a file of the workspace.",
            "rejected",
        )
    return found


def literal(text: str) -> str:
    """Return a text with each `$` escaped, because Kubernetes replaces `$(NAME)` and makes `$` of `$$`.

    Args:
        text: the text that the container should get.

    Example:
        literal("$HOME")  # "$$HOME"
    """
    return text.replace("$", "$$")


def _without_nulls(value: Any) -> Any:
    """Return a value without the fields that are None or empty, at any depth."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None and each not in ({}, [])}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
