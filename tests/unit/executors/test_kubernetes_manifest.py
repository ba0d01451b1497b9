"""Tests manifests against the schema, and states as a table, without a server."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from kubernetes import client
from servers.kubernetes.pods import expanded
from servers.kubernetes.rules import violations, wrong_with_job
from servers.kubernetes.schema import problems
from support.kubernetes_objects import made_from

from executors.backends.jobs.service import UNKNOWN, JobKey, JobServiceError, JobSpec, JobState
from executors.backends.kubernetes import KubernetesJobs
from executors.backends.kubernetes_manifest import group_name, secret_data
from executors.backends.kubernetes_pods import DELETED_EARLY, TAKEN_BACK, index_of, indexes, ranks_of, state_of

LONG_AGO = datetime.now(UTC) - timedelta(seconds=3700)
JUST_NOW = datetime.now(UTC) + timedelta(hours=1)  # the time when this module is loaded; its tests may run much later
DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "evicting"}
AWAY = JobState(False, message="its node does not answer", is_unconfirmed=True)
BEING_DELETED = JobState(True, "lost", None, "its pod is being deleted", is_unconfirmed=True)
UNSCHEDULED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "Insufficient cpu"}


def jobs(*ranks: int, **more: Any) -> list[JobSpec]:
    usual = {"gpu": None, "limit_s": 300, **more}
    return [
        JobSpec(
            JobKey("s3://bucket/runs", "brave-otter", rank, 2),
            ("python", "-c", "print('$(HOME) $$')"),
            (),
            {"REPLICA_RANK": str(rank), "REPLICA_RENDEZVOUS": "s3://$bucket", "MINE": "secret"},
            {"AWS_SECRET_ACCESS_KEY": "hush"},
            **usual,
        )
        for rank in ranks
    ]


def manifest(*ranks: int, options: dict[str, Any] | None = None, **more: Any) -> Any:
    made = KubernetesJobs(**(options or {})).job(jobs(*ranks, **more))
    assert list(problems(made, "V1Job")) == list(wrong_with_job(made)) == []
    return made


CUT_OFF = [
    {"type": "Ready", "status": "False"},  # the node controller sets such a condition
    {"type": "ContainersReady", "status": "True"},
]
NOT_READY = [{"type": kind, "status": "False", "reason": "ContainersNotReady"} for kind in ("Ready", "ContainersReady")]


def container(status: dict[str, Any], *sidecars: dict[str, Any]) -> dict[str, Any]:
    row = {"image": "", "imageID": "", "ready": False, "restartCount": 0}
    named = [*(({"name": "sidecar", "state": each}) for each in sidecars), {"name": "replica", "state": status}]
    return {"containerStatuses": [{**row, **each} for each in named]}


def terminated(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "message": message}}


def ended(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return container(terminated(code, reason, message))


def waiting(reason: str, message: str, since: datetime) -> dict[str, Any]:
    status = container({"waiting": {"reason": reason, "message": message}})
    return {"phase": "Pending", "startTime": since, **status}


def pod(*, gone_by: datetime | None = None, **status: Any) -> Any:
    return made_from(client.V1Pod, {"metadata": {"labels": {}, "deletionTimestamp": gone_by}, "status": status})


def job(*, is_deleted: bool = False, suspend: bool = False, generation: int = 1, **status: Any) -> Any:
    metadata = {"generation": generation, **({"deletionTimestamp": JUST_NOW} if is_deleted else {})}
    spec = {"suspend": suspend, "template": {"spec": {"containers": []}}}
    return made_from(client.V1Job, {"metadata": metadata, "spec": spec, "status": status})


PODS: list[tuple[dict[str, Any], JobState]] = [
    ({"phase": "Pending"}, JobState(False)),
    ({"phase": "Pending", "conditions": [UNSCHEDULED]}, JobState(False, message="Unschedulable: Insufficient cpu")),
    (waiting("ContainerCreating", "", LONG_AGO), JobState(False, message="ContainerCreating")),
    (waiting("ErrImagePull", "no such image", JUST_NOW), JobState(False, message="ErrImagePull: no such image")),
    (
        waiting("ErrImagePull", "no such image", LONG_AGO),
        JobState(True, "start_failed", None, "ErrImagePull: no such image", holds_place=True),
    ),
    (
        waiting("ImagePullBackOff", "again", LONG_AGO),
        JobState(True, "start_failed", None, "ImagePullBackOff: again", holds_place=True),
    ),
    (
        waiting("InvalidImageName", "what", LONG_AGO),
        JobState(True, "start_failed", None, "InvalidImageName: what", holds_place=True),
    ),
    (
        waiting("ErrImageNeverPull", "", LONG_AGO),
        JobState(True, "start_failed", None, "ErrImageNeverPull", holds_place=True),
    ),
    ({"phase": "Running", **container({"running": {}}, terminated(0))}, JobState(False)),
    ({"phase": "Running", **container(terminated(3), {"running": {}})}, JobState(True, None, 3, holds_place=True)),
    (
        waiting("CreateContainerConfigError", 'secret "x" not found', LONG_AGO),
        JobState(True, "start_failed", None, 'CreateContainerConfigError: secret "x" not found', holds_place=True),
    ),
    ({"phase": "Running"}, JobState(False)),
    ({"phase": "Running", "conditions": [DISRUPTED]}, JobState(False, message="EvictionByEvictionAPI: evicting")),
    ({"phase": "Running", "gone_by": JUST_NOW}, BEING_DELETED),
    ({"phase": "Running", "gone_by": LONG_AGO}, BEING_DELETED),
    ({"phase": "Unknown", "gone_by": LONG_AGO}, BEING_DELETED),
    ({"phase": "Pending", "gone_by": LONG_AGO}, BEING_DELETED),
    (
        {"phase": "Running", "conditions": [DISRUPTED], "gone_by": LONG_AGO},
        JobState(True, "preempted", None, "EvictionByEvictionAPI: evicting", is_unconfirmed=True),
    ),
    ({"phase": "Running", "gone_by": LONG_AGO, **ended(3)}, BEING_DELETED),
    ({"phase": "Running", **ended(137)}, JobState(False)),  # the kubelet has not reported the reason yet
    ({"phase": "Running", **container({"running": {}}), "conditions": CUT_OFF}, AWAY),
    ({"phase": "Running", **container({"running": {}}), "conditions": NOT_READY}, JobState(False)),
    (
        {"phase": "Failed", **ended(128, "StartError", 'exec: "python": not found in $PATH')},
        JobState(True, "start_failed", 128, 'StartError: exec: "python": not found in $PATH'),
    ),
    (
        {"phase": "Failed", **ended(127, "ContainerCannotRun", "no such file")},
        JobState(True, "start_failed", 127, "ContainerCannotRun: no such file"),
    ),
    (
        {"phase": "Failed", **ended(137, "ContainerStatusUnknown", "The container could not be located")},
        JobState(True, "lost", 137, "ContainerStatusUnknown: The container could not be located"),
    ),
    ({"phase": "Failed", **ended(3, "Error", "the end of its log")}, JobState(True, None, 3)),
    ({"phase": "Failed", "gone_by": LONG_AGO}, JobState(True, "lost", message=DELETED_EARLY)),
    ({"phase": "Succeeded", **ended(0, "Completed")}, JobState(True, None, 0)),
    ({"phase": "Failed", **ended(3)}, JobState(True, None, 3)),
    ({"phase": "Failed", **ended(137)}, JobState(True, None, 137)),
    ({"phase": "Failed", **ended(137, "OOMKilled")}, JobState(True, "oom", 137, "OOMKilled")),
    (
        {"phase": "Failed", "conditions": [DISRUPTED], **ended(143)},
        JobState(True, "preempted", 143, "EvictionByEvictionAPI: evicting"),
    ),
    ({"phase": "Failed", "reason": "Evicted", **ended(137)}, JobState(True, "preempted", 137, "Evicted")),
    ({"phase": "Failed", "reason": "Preempting", **ended(137)}, JobState(True, "preempted", 137, "Preempting")),
    ({"phase": "Failed", "reason": "NodeShutdown"}, JobState(True, "preempted", None, "NodeShutdown")),
    (
        {"phase": "Failed", "reason": "DeadlineExceeded", **ended(143)},
        JobState(True, "timeout", 143, "DeadlineExceeded"),
    ),
    ({"phase": "Failed", "reason": "OutOfcpu"}, JobState(True, "start_failed", None, "OutOfcpu")),
]
WITHOUT_A_POD: list[tuple[Any, JobState]] = [
    (None, UNKNOWN),
    (job(), JobState(False)),
    (job(suspend=True), JobState(False, message="suspended, as in a queue")),
    (job(suspend=True, generation=3), JobState(False, "preempted", message=TAKEN_BACK, holds_place=True)),
    (job(is_deleted=True), UNKNOWN),
    (job(failedIndexes="0,3-5"), JobState(True, "lost", None, "its pod was deleted")),
    (job(failedIndexes="0,2-3"), JobState(False)),
    (job(completedIndexes="4"), JobState(True, None, 0)),
    (
        job(conditions=[{"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "too long"}]),
        JobState(True, "lost", None, "DeadlineExceeded: too long"),
    ),
]


@pytest.mark.parametrize(("status", "expected"), PODS)
def test_each_state_of_a_pod_is_read_as_in_the_table(status: dict[str, Any], expected: JobState) -> None:
    assert state_of(pod(**status), None, 4) == expected


@pytest.mark.parametrize(("of", "expected"), WITHOUT_A_POD)
def test_without_a_pod_the_state_comes_from_its_job(of: Any, expected: JobState) -> None:
    assert state_of(None, of, 4) == expected


def test_the_pod_of_a_job_that_was_taken_back_is_reported_by_its_job() -> None:
    taken = job(suspend=True, generation=3)
    saving = JobState(True, "preempted", message=TAKEN_BACK, holds_place=True, is_unconfirmed=True)
    assert state_of(pod(phase="Running", gone_by=JUST_NOW), taken, 4) == saving
    waits = JobState(False, "preempted", message=TAKEN_BACK, holds_place=True)
    for phase in ("Pending", "Failed"):
        assert state_of(pod(phase=phase, gone_by=JUST_NOW), taken, 4) == waits
    assert state_of(pod(phase="Failed", **ended(3)), taken, 4) == JobState(True, None, 3), (
        "the pod ended by itself before its Job was taken back"
    )
    evicted = pod(phase="Running", gone_by=JUST_NOW, conditions=[DISRUPTED])
    assert state_of(evicted, taken, 4).message == "EvictionByEvictionAPI: evicting"


def test_a_pod_is_stuck_from_when_it_was_seen_to_be() -> None:
    of = pod(**waiting("ImagePullBackOff", "again", datetime.now(UTC) - timedelta(seconds=400)))
    assert not state_of(of, None, 4, 200.0).has_ended, "time before the pod was seen as stuck does not count"
    assert state_of(of, None, 4, 301.0) == JobState(
        True, "start_failed", None, "ImagePullBackOff: again", holds_place=True
    )


def test_the_indexes_that_failed_are_read_as_kubernetes_writes_them() -> None:
    assert indexes("1,3-5,9") == {1, 3, 4, 5, 9}
    assert indexes("") == indexes(None) == set()


def test_ranks_are_pods_of_one_indexed_job_that_fails_none_for_another() -> None:
    made = manifest(3, 1, 8)
    spec, metadata = made["spec"], made["metadata"]
    assert metadata["name"] == group_name(jobs(3, 1, 8))
    assert metadata["name"].endswith("-a2-r1")
    assert [spec[name] for name in ("completionMode", "completions", "parallelism")] == ["Indexed", 3, 3]
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"], spec["podReplacementPolicy"]) == (0, 3, "Failed")
    assert "suspend" not in spec
    assert spec["ttlSecondsAfterFinished"] == 604_800
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["activeDeadlineSeconds"], pod["automountServiceAccountToken"]) == (
        "Never",
        2100,  # with time to pull the image
        False,
    )
    assert pod["volumes"] == [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    assert pod["containers"][0]["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
    assert spec["template"]["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"
    read = made_from(client.V1Job, made)
    assert ranks_of(read) == [3, 1, 8]
    assert [index_of(each.key, read) for each in jobs(3, 1, 8)] == [0, 1, 2]
    assert index_of(jobs(2)[0].key, read) is None
    assert index_of(JobKey("s3://bucket/runs", "brave-otter", 3, 2, is_spare=True), read) is None


def test_nothing_that_kubernetes_would_replace_is_replaced_and_no_value_of_the_user_is_in_the_job() -> None:
    made = manifest(0)
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert [expanded(word, {"HOME": "/root"}) for word in container["command"]] == list(jobs(0)[0].command)
    env = {each["name"]: expanded(each["value"], {"HOME": "/"}) for each in container["env"]}
    assert env == {"REPLICA_RENDEZVOUS": "s3://$bucket", "REPLICA_RANKS": "0"}
    assert container["envFrom"] == [{"secretRef": {"name": made["metadata"]["name"]}}]
    assert secret_data(jobs(0)) == {"MINE": "secret", "AWS_SECRET_ACCESS_KEY": "hush"}
    assert not any(value in str(made) for value in ("secret'", "hush"))
    with pytest.raises(JobServiceError, match=r"takes no variable 'my\.own'"):
        secret_data([JobSpec(jobs(0)[0].key, ("true",), (), {"my.own": "x"}, {})])


def test_pods_have_the_least_rights_that_a_replica_needs_and_root_stays_root() -> None:
    pod = manifest(0)["spec"]["template"]["spec"]
    assert violations(pod) == (
        'runAsNonRoot != true (pod or container "replica" must set securityContext.runAsNonRoot=true)'
    ), "the one violation is that root is allowed, which the image may need"
    assert manifest(0, options={"run_as_user": 0})["spec"]["template"]["spec"]["securityContext"]["runAsUser"] == 0


def test_variables_that_no_secret_can_hold_are_refused_by_size_and_name() -> None:
    large = [JobSpec(jobs(0)[0].key, ("true",), (), {"SMALL": "x", "LARGE": "ä" * (1 << 19)}, {})]
    with pytest.raises(
        JobServiceError, match=r"have 1,048,577 bytes, and the largest is 'LARGE'\. .* has at most 1,048,576"
    ):
        secret_data(large)


def test_options_reach_the_pods() -> None:
    options = {
        "cpu": 1.5,
        "memory_mb": 2000,
        "queue": "team",
        "service_account": "trainer",
        "image_pull_secrets": ["registry"],
        "secrets": ["wandb"],
        "labels": {"project": "diloco", "example.com/kind": "x"},
        "node_selector": {"pool": "gpu"},
        "image": "registry.example/image:1",
        "keep_s": 60,
        "run_as_user": 1000,
    }
    made = manifest(0, 1, options=options, gpu="4", limit_s=None)
    pod = made["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"] == {
        "limits": {"nvidia.com/gpu": "4"},
        "requests": {"cpu": "1.5", "memory": "2000Mi"},
    }
    assert [source["secretRef"]["name"] for source in pod["containers"][0]["envFrom"]][:1] == ["wandb"]
    assert (pod["serviceAccountName"], pod["imagePullSecrets"]) == ("trainer", [{"name": "registry"}])
    assert (pod["nodeSelector"], pod["containers"][0]["image"]) == ({"pool": "gpu"}, "registry.example/image:1")
    assert "activeDeadlineSeconds" not in pod
    assert pod["securityContext"] == {
        "seccompProfile": {"type": "RuntimeDefault"},
        "runAsUser": 1000,
        "runAsNonRoot": True,
    }
    assert {"name": "HOME", "value": "/tmp"} in pod["containers"][0]["env"], (
        "HOME is /tmp, because the home of this user is '/', which is read-only"
    )
    assert violations(pod) == ""
    assert (made["spec"]["suspend"], made["spec"]["ttlSecondsAfterFinished"]) == (True, 60)
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert made["spec"]["template"]["metadata"]["labels"]["project"] == "diloco"


@pytest.mark.parametrize(
    ("gpu", "options", "n", "selector"),
    [
        (None, {}, None, {}),
        ("2", {}, "2", {}),
        (
            "H100",
            {"gpu_products": {"H100": "NVIDIA-H100-80GB-HBM3"}},
            "1",
            {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        ),
        (
            "H100:2",
            {"node_selector": {"nvidia.com/gpu.product": "NVIDIA-H100-PCIe"}},
            "2",
            {"nvidia.com/gpu.product": "NVIDIA-H100-PCIe"},
        ),
        (
            "H100:2",
            {"node_selector": {"cloud.google.com/gke-accelerator": "nvidia-h100"}},
            "2",
            {"cloud.google.com/gke-accelerator": "nvidia-h100"},
        ),
    ],
)
def test_a_gpu_is_a_limit_and_the_label_of_its_nodes(gpu: Any, options: Any, n: Any, selector: Any) -> None:
    pod = manifest(0, gpu=gpu, options=options)["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"].get("limits", {}).get("nvidia.com/gpu") == n
    tainted = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert pod.get("tolerations") == ([tainted] if n else None)
    assert pod.get("nodeSelector", {}) == selector


@pytest.mark.parametrize(
    ("options", "gpu", "problem"),
    [
        ({}, "H100", "No option names the nodes that have a H100"),
        ({"gpu_products": {"A100": "x"}}, "H100:2", r'gpu_products=\{"H100": "…"\}, or a node_selector, .* gpu="2"'),
        ({}, "0", "got gpu='0'"),
        ({}, "H100:x", "got gpu='H100:x'"),
        ({"labels": {"a b": "c"}}, None, "labels: 'a b': 'c' is not a label"),
        ({"node_selector": {"a": "b c"}}, None, "node_selector: 'a': 'b c'"),
        ({"labels": {"replicas-run": "x"}}, None, "'replicas-run' is set by `replicas` itself"),
        ({"labels": {"-a..b/c": "d"}}, None, "labels: '-a..b/c': 'd' is not a label"),
        ({"labels": {"a": "b/c"}}, None, "labels: 'a': 'b/c' is not a label"),
        ({"gpu_resource": "gpu"}, None, "gpu_resource='gpu' is not a resource"),
        ({"gpu_resource": "-x..y/gpu"}, None, "gpu_resource='-x..y/gpu' is not a resource"),
        ({"run_as_user": -1}, None, "run_as_user must be a user id from 0 to .*, got run_as_user=-1"),
    ],
)
def test_an_invalid_option_or_gpu_is_refused_by_name(options: Any, gpu: str | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        KubernetesJobs(**options).job(jobs(0, gpu=gpu))


def test_a_field_that_the_schema_or_a_rule_refuses_is_named_with_its_path() -> None:
    made = manifest(0)
    spec, pod = made["spec"], made["spec"]["template"]["spec"]
    pod["containers"][0] |= {"imagePolicy": "Always", "command": "python"}
    pod["terminationGracePeriodSeconds"] = "30"
    del pod["containers"][0]["name"]
    found = " ".join(sorted(problems(made, "V1Job")))
    for problem in (
        'unknown field "spec.template.spec.containers[0].imagePolicy"',
        "spec.template.spec.containers[0].command: Invalid value: expected list, got str",
        "spec.template.spec.terminationGracePeriodSeconds: Invalid value: expected int, got str",
        "spec.template.spec.containers[0].name: Required value",
    ):
        assert problem in found
    wrong = {"backoffLimitPerIndex": 0, "maxFailedIndexes": 2, "completions": 1, "completionMode": "NonIndexed"}
    made = manifest(0)
    made["spec"] |= wrong
    made["spec"]["template"]["spec"] |= {"restartPolicy": "Always", "activeDeadlineSeconds": 0}
    found = " ".join(wrong_with_job(made))
    for field in ("backoffLimitPerIndex", "maxFailedIndexes", "restartPolicy", "activeDeadlineSeconds"):
        assert field in found
    made = manifest(0)
    made["spec"] |= {"completions": 100_000}
    made["metadata"]["name"] = "x" * 60
    assert "will not able to create pod with index 99999" in " ".join(wrong_with_job(made))
    assert spec["completionMode"] == "Indexed"
