"""Tests the calls to Kubernetes with a stand-in made from the client's models: Secrets, errors, queues, and ends of
pods.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from servers.kubernetes.server import ApiServer
from support.fake_jobs import FakeJob, Machines, attached, start, wait_until_hanging
from support.kubernetes_jobs import SLEEP, job, started, state
from support.kubernetes_objects import made_from

from executors import attach, launch
from executors.attempt import Attempt
from executors.backends.jobs.service import UNKNOWN, JobServiceError, JobState
from executors.backends.kubernetes import KubernetesExecutor, KubernetesJobs
from executors.backends.kubernetes_client import _asked, client
from executors.backends.kubernetes_pods import TAKEN_BACK, state_of
from executors.errors import BackendError, LaunchError
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store.records import to_bytes
from executors.testing import eventually


@pytest.fixture
def service(k8s: ApiServer) -> KubernetesJobs:
    k8s.cluster.kubelet.grace_s = 0.1
    return KubernetesJobs()


# Secrets


def test_a_secret_goes_with_its_job_and_the_job_shows_no_value_of_it(k8s: ApiServer, service: KubernetesJobs) -> None:
    (job_id,) = service.start_jobs([job("echo $MINE $KEY", env={"MINE": "x $(KEY) $$"})])
    assert state(service, job_id) == JobState(True, None, 0)
    assert service.logs(job_id, 5) == "x $(KEY) $$ hush\n"
    assert not any(
        "hush" in str(body) or "$(KEY)" in str(body) for route, body in k8s.bodies if route != "create_secret"
    )
    (made,) = k8s.cluster.secrets.values()
    assert made["metadata"]["ownerReferences"][0]["name"] == made["metadata"]["name"] == job_id["job"]
    k8s.cluster.delete_job(job_id["job"])
    assert not k8s.cluster.secrets
    assert service.state(job_id) == UNKNOWN


def test_a_secret_goes_when_its_job_does_after_its_time(k8s: ApiServer) -> None:
    service = KubernetesJobs(keep_s=1)
    (job_id,) = service.start_jobs([job()])
    k8s.until(lambda: not k8s.cluster.jobs and not k8s.cluster.secrets and not k8s.cluster.pods)
    assert service.state(job_id) == UNKNOWN


@pytest.mark.parametrize("after_applying", [False, True])
@pytest.mark.parametrize("status", [500, 0])
@pytest.mark.parametrize("route", ["create_job", "create_secret"])
def test_a_lost_answer_leaves_one_job_that_has_its_secret(
    k8s: ApiServer, service: KubernetesJobs, route: str, status: int, after_applying: bool
) -> None:
    jobs = [job("echo $KEY", rank) for rank in (0, 3)]
    k8s.fail(route, status, after_applying=after_applying)
    with pytest.raises(JobServiceError) as raised:
        service.start_jobs(jobs)
    assert raised.value.kind == "unknown"
    found = [service.find(each.key) for each in jobs]
    if route == "create_job" and not after_applying:
        assert found == [[], []]
        assert not k8s.cluster.secrets
    else:  # the process that finds the Job gives it its Secret
        assert len(k8s.cluster.jobs) == len(k8s.cluster.secrets) == 1
    ids = service.start_jobs(jobs)
    assert [each for each in found if each] in ([], [[ids[0]], [ids[1]]])
    assert [state(service, job_id).exit_code for job_id in ids] == [0, 0]
    assert [service.logs(job_id, 5) for job_id in ids] == ["hush\n", "hush\n"]
    assert len(k8s.cluster.jobs) == len(k8s.cluster.secrets) == 1


def test_a_secret_whose_answer_was_lost_is_left_as_it_is_and_that_of_another_refused(
    k8s: ApiServer, service: KubernetesJobs
) -> None:
    k8s.cluster.kubelet.room = 0
    k8s.fail("create_secret", 500, after_applying=True)
    with pytest.raises(JobServiceError):
        service.start_jobs([job()])
    (job_id,) = service.start_jobs([job()])
    k8s.cluster.secrets[job_id["job"]]["metadata"]["ownerReferences"][0]["uid"] = "another"
    with pytest.raises(JobServiceError, match="HTTP 409"):
        service.start_jobs([job()])


def test_a_connection_cut_in_the_handshake_is_tried_again_and_an_untrusted_certificate_is_not() -> None:
    def kind(reason: str) -> str:
        def refuse(**more: Any) -> None:
            raise client.ApiException(status=0, reason=f"SSLError\n{reason}")

        with pytest.raises(JobServiceError) as raised:
            _asked(refuse)
        return raised.value.kind

    assert kind("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol") == "unavailable"
    assert kind("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: Hostname mismatch") == "rejected"


def test_a_job_whose_secret_is_refused_is_deleted(k8s: ApiServer, service: KubernetesJobs) -> None:
    k8s.fail("create_secret", 403)
    with pytest.raises(JobServiceError, match="as the test asked") as raised:
        service.start_jobs([job()])
    assert raised.value.kind == "rejected"
    assert not k8s.cluster.jobs
    assert not k8s.cluster.secrets


def test_pods_wait_for_a_secret_whose_launcher_died_and_nothing_of_it_is_left(
    k8s: ApiServer, service: KubernetesJobs
) -> None:
    k8s.fail("create_secret", 500)
    with contextlib.suppress(JobServiceError):
        service.start_jobs([job()])
    assert not k8s.cluster.secrets
    other = KubernetesJobs()  # this Secret has no value for the variable
    (job_id,) = other.find(job().key)
    eventually(lambda: "secret" in other.state(job_id).message)
    assert other.state(job_id).message == f'CreateContainerConfigError: secret "{job_id["job"]}" not found'
    other.stop(job_id)
    assert state(other, job_id) == JobState(True, "cancelled")


def test_a_job_of_that_name_that_is_another_is_left_alone(k8s: ApiServer, service: KubernetesJobs) -> None:
    (job_id,) = started(service, job(SLEEP))
    with pytest.raises(JobServiceError, match="already exists"):
        service.start_jobs([job(SLEEP), job(SLEEP, 5)])
    assert not service.state(job_id).has_ended
    assert service.start_jobs([job(SLEEP)]) == [job_id]


# Shown states


def test_a_run_is_found_by_one_list_and_so_are_64_ranks(k8s: ApiServer, service: KubernetesJobs) -> None:
    k8s.cluster.kubelet.room = 0
    jobs = [job(rank=rank) for rank in range(64)]
    ids = service.start_jobs(jobs)
    named = {each.key: job_id for each, job_id in zip(jobs, ids, strict=True)}
    eventually(
        lambda: all("conditions" in pod.status for pod in k8s.cluster.pods.values()),
        "no pod has been assigned to a node",
    )
    before = len(k8s.requests)
    states = KubernetesJobs().states(named)
    assert k8s.requests[before:] == ["list_pods"]
    assert set(states.values()) == {
        JobState(False, message="Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu.")
    }
    assert [service.find(each.key) for each in jobs] == [[job_id] for job_id in ids]
    assert k8s.requests[before:] == ["list_pods", "list_jobs"]


def test_ranks_that_start_together_end_each_by_itself(k8s: ApiServer, service: KubernetesJobs) -> None:
    """The ranks of one Job end in different ways: success, failure, kill for memory, eviction, drained node, limit. One
    rank does not end."""
    scripts = ["true", "exit 7", *[SLEEP] * 5]
    jobs = [job(script, rank) for rank, script in enumerate(scripts)]
    ids = service.start_jobs([replace(each, command=(*each.command[:2], script_of(scripts)), env={}) for each in jobs])
    for job_id in ids[2:]:
        eventually(lambda job_id=job_id: service.logs(job_id, 1) == "hanging\n")  # type: ignore[misc]
    for job_id in ids[:2]:
        state(service, job_id)
    pods = [k8s.pod(job_id["job"], job_id["index"]).name for job_id in ids[2:]]
    k8s.cluster.kill(pods[0], "OOMKilled")
    k8s.cluster.evict(pods[1])
    k8s.cluster.drain(pods[2])
    k8s.cluster.limit_pod(pods[3], 1)
    ends = [state(service, job_id) for job_id in ids[:-1]]
    drained = (ends[4].reason, None)
    assert drained[0] in ("lost", "preempted"), "the state depends on whether a look saw the pod while it ended"
    assert [(each.reason, each.exit_code) for each in ends] == [
        (None, 0),
        (None, 7),
        ("oom", 137),
        ("preempted", 137),
        drained,
        ("timeout", 137),
    ]
    assert not service.state(ids[-1]).has_ended, "the ends of other ranks do not end this rank"
    assert service.states({jobs[-1].key: ids[-1]}) == {jobs[-1].key: JobState(False)}
    service.stop(ids[-1])
    assert state(service, ids[-1]).has_ended
    k8s.until(lambda: k8s.cluster.jobs[ids[0]["job"]]["status"]["conditions"][0]["reason"] == "FailedIndexes")


def test_a_pod_that_was_seen_being_evicted_was_preempted(k8s: ApiServer, service: KubernetesJobs) -> None:
    k8s.cluster.kubelet.grace_s = 30.0
    (job_id,) = started(service, job("trap '' TERM; echo hanging; while :; do sleep 0.1; done"))
    pod = k8s.pod(job_id["job"], 0)
    k8s.cluster.drain(pod.name)
    told = {job().key: job_id}
    preempted = JobState(True, "preempted", None, "EvictionByEvictionAPI: Eviction API: evicting")
    assert service.states(told) == {job().key: replace(preempted, is_unconfirmed=True)}, (
        "the preemption is unconfirmed, because the replica may still save"
    )
    k8s.cluster.kill(pod.name)
    k8s.until(lambda: not k8s.cluster.pods)
    assert service.states(told) == {job().key: preempted}
    assert service.state(job_id) == preempted
    assert KubernetesJobs().state(job_id) == JobState(True, "lost", None, "its pod was deleted")


@pytest.mark.parametrize("gone_by_s", [30.0, -3600.0], ids=["in its grace", "by a clock that is ahead"])
def test_a_pod_that_should_be_gone_has_ended_once_the_heartbeat_of_its_replica_has_stood_still_too(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, gone_by_s: float
) -> None:
    run = start(function="hang", args={"deaf": True})
    wait_until_hanging(run)
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    metadata = {"deletionTimestamp": datetime.now(UTC) + timedelta(seconds=gone_by_s)}
    status = {"phase": "Running", "conditions": [evicted]}
    told = state_of(made_from(client.V1Pod, {"metadata": metadata, "status": status}), None, 0)
    with monkeypatch.context() as patch:
        patch.setattr(FakeJob, "state", lambda job: told)
        for _ in range(2):
            (state,) = attached().status().replicas
            assert (state.status, state.note) == ("running", "DeletionByTaintManager"), "the replica writes heartbeats"
    machines.end(machines.job_of(run, 0))
    view_of(run).store.put("otter/replicas/0000/0/heartbeat.json", to_bytes({"at": time.time() - 3600}))
    with monkeypatch.context() as patch:
        patch.setattr(FakeJob, "state", lambda job: told)
        assert [outcome.reason for outcome in attached().outcomes()] == ["preempted"]


def script_of(scripts: list[str]) -> str:
    return "case $JOB_COMPLETION_INDEX in " + " ".join(f"{n}) {script};;" for n, script in enumerate(scripts)) + " esac"


def test_a_log_is_handed_on_as_it_was_written(k8s: ApiServer, service: KubernetesJobs) -> None:
    (job_id,) = service.start_jobs([job("""echo '{"loss": 1.50}'; echo 12""")])
    state(service, job_id)
    assert service.logs(job_id, 2) == '{"loss": 1.50}\n12\n'
    assert service.logs(job_id, 1) == "12\n"


# Ending


def test_a_pod_that_is_stopped_keeps_its_log_and_one_that_waits_is_deleted(
    k8s: ApiServer, service: KubernetesJobs
) -> None:
    k8s.cluster.kubelet.room = 1
    ids = service.start_jobs([job(SLEEP, rank) for rank in (0, 1)])
    eventually(lambda: "hanging\n" in [service.logs(job_id, 1) for job_id in ids])
    running, pending = sorted(ids, key=lambda job_id: bool(service.state(job_id).message))
    service.stop(pending)
    assert state(service, pending) == JobState(True, "cancelled")
    assert k8s.count("delete_pod") == 1
    service.stop(running)
    assert state(service, running).reason == "timeout", (
        "the service reports a timeout; the cancel marker shows that it was a cancel"
    )
    assert service.logs(running, 1) == "hanging\n"
    for job_id in ids:
        service.stop(job_id)
    assert (k8s.count("delete_pod"), k8s.count("patch_pod"), k8s.count("delete_job")) == (1, 1, 0)


def test_a_job_in_a_queue_is_deleted_once_all_its_ranks_are_stopped(k8s: ApiServer) -> None:
    service = KubernetesJobs(queue="team")
    jobs = [job(SLEEP, rank) for rank in (0, 1)]
    ids = service.start_jobs(jobs)
    assert service.state(ids[0]) == JobState(False, message="suspended, as in a queue")
    service.stop(ids[0])
    assert k8s.cluster.jobs
    service.stop(ids[1])
    assert not k8s.cluster.jobs
    assert not k8s.cluster.secrets
    assert {service.state(job_id) for job_id in ids} == {JobState(True, "cancelled")}
    assert KubernetesJobs().state(ids[0]) == UNKNOWN


def test_a_queue_takes_pods_back_and_lets_them_come_again(k8s: ApiServer) -> None:
    service = KubernetesJobs(queue="team")
    (job_id,) = service.start_jobs([job(SLEEP)])
    assert service.state(job_id) == JobState(False, message="suspended, as in a queue")
    waits = JobState(False, "preempted", message=TAKEN_BACK, holds_place=True)
    for _ in range(2):
        k8s.cluster.suspend(job_id["job"], is_suspended=False)
        eventually(lambda: service.logs(job_id, 1) == "hanging\n")
        k8s.cluster.suspend(job_id["job"], is_suspended=True)
        k8s.until(lambda: not k8s.cluster.pods)
        assert service.state(job_id) == service.states({job().key: job_id})[job().key] == waits
    service.stop(job_id)


# As a run


def test_a_launch_that_the_server_refuses_leaves_nothing(k8s: ApiServer, quick_tries: None) -> None:
    k8s.fail("create_job", 422, times=1)
    with pytest.raises((LaunchError, BackendError), match="as the test asked"):
        launch("k8s", "job.py:main", 2)
    k8s.fail("create_secret", 403)
    with pytest.raises(LaunchError, match="as the test asked"):
        launch("k8s", "job.py:main", 2)
    assert not k8s.cluster.jobs
    assert not k8s.cluster.secrets


def test_ranks_are_resumed_as_one_more_job(k8s: ApiServer) -> None:
    run = launch("k8s", "job.py:fail", 3, args={"ranks": [0, 2]}, env={"MINE": "my-own-value"}, run_id="otter")
    assert run.wait(60)
    (first,) = k8s.cluster.jobs
    again = resume(attach("otter"), env={"MINE": "another-value"})
    assert again.wait(60)
    assert [outcome.attempt for outcome in again.outcomes()] == [1, 0, 1]
    (second,) = k8s.cluster.jobs.keys() - {first}
    assert second == f"{first.removesuffix('-a0-r0')}-a1-r0"
    assert [view_of(again).reader.handles.of(rank).metadata["job"]["index"] for rank in range(3)] == [0, 1, 1]
    k8s.until(lambda: k8s.cluster.jobs[second]["status"].get("failedIndexes") == "0,1")
    assert k8s.cluster.secrets.keys() == {first, second}
    assert "my-own-value" not in str(k8s.cluster.jobs)


def test_a_run_id_that_was_removed_and_launched_again_does_not_get_the_old_runs_jobs(k8s: ApiServer) -> None:
    old = launch("k8s", "job.py:main", 2, run_id="otter")
    assert old.wait(60)
    old.remove()
    new = launch("k8s", "job.py:fail", 2, args={"ranks": [0]}, run_id="otter")
    assert new.wait(60)
    assert [outcome.reason for outcome in new.outcomes()] == ["exception", None]
    again = resume(attach("otter"))
    assert again.wait(60)
    assert [outcome.attempt for outcome in again.outcomes()] == [1, 0]
    assert [name.rpartition("-a")[2] for name in k8s.cluster.jobs] == ["0-r0", "1-r0"], (
        "the Job of the old run is removed"
    )


def test_a_pod_that_never_started_is_ended_with_its_replica(k8s: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.backends.kubernetes_pods.STUCK_S", -1.0)
    k8s.fail("read_secret", 403, times=9)
    run = launch(KubernetesExecutor(secrets=["not-there"]), "job.py:main", 1)
    assert run.wait(60)
    assert run.outcomes()[0].reason == "start_failed"
    k8s.until(lambda: not k8s.cluster.pods)


def test_a_cancellation_is_noted_although_the_service_refuses_to_answer(k8s: ApiServer) -> None:
    k8s.cluster.kubelet.room = 0
    run = launch("k8s", "job.py:main", 1)
    k8s.write_kubeconfig("a-token-that-ran-out")
    with pytest.raises(JobServiceError, match="HTTP 401"):
        KubernetesExecutor().cancel(view_of(run).reader.handles.of(0))
    assert Attempt.of_handle(view_of(run).reader.handles.of(0), "k8s")[0].has("cancel.json")
    k8s.write_kubeconfig(k8s.token)
    run.cancel()
