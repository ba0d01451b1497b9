"""Nodes of Kubernetes: ends that a kubelet reports late, containers that never start, and nodes that do not answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from servers.kubernetes.server import ApiServer
from support.cli import HereInstead
from support.kubernetes_jobs import SLEEP, job, started, state

from executors import attach, launch
from executors.backends.jobs.service import UNKNOWN, JobState
from executors.backends.kubernetes import KubernetesJobs
from executors.backends.kubernetes_pods import CUT_OFF, DELETED_EARLY
from executors.run.run import view_of
from executors.testing import eventually


@pytest.mark.parametrize(
    ("reason", "told"), [("Evicted", "preempted"), ("Preempting", "preempted"), ("NodeShutdown", "preempted")]
)
def test_the_end_of_a_container_is_not_the_end_of_its_pod(k8s: ApiServer, reason: str, told: str) -> None:
    """The kubelet reports later why it ended the container. A reader in between must not see a signal."""
    k8s.cluster.kubelet.grace_s, k8s.cluster.kubelet.reports_ends = 0.1, False
    service = KubernetesJobs()
    (job_id,) = started(service, job(SLEEP))
    pod = k8s.pod(job_id["job"], 0)
    k8s.cluster.evict(pod.name, reason)
    k8s.until(lambda: "terminated" in pod.status["containerStatuses"][0]["state"])
    assert not service.state(job_id).has_ended
    assert not service.states({job().key: job_id})[job().key].has_ended
    with k8s.cluster.changed:
        k8s.cluster.kubelet.reports_ends = True
        k8s.cluster.changed.notify_all()
    assert (state(service, job_id).reason, state(service, job_id).exit_code) == (told, 137)


def test_a_container_that_its_runtime_cannot_start_reports_the_reason_in_the_outcome(
    k8s: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.backends.kubernetes.KubernetesJobs.command", lambda self: ("no-such-program", "x"))
    run = launch("k8s", "job.py:main", 1)
    assert run.wait(60)
    (outcome,) = run.outcomes()
    assert outcome.reason == "start_failed"
    assert 'StartError: failed to create containerd task: exec: "no-such-program"' in str(outcome.error)


def test_a_container_on_a_lost_node_is_lost_and_the_outcome_has_the_nodes_message(k8s: ApiServer) -> None:
    run = launch("k8s", "job.py:hang", 1, args={"deaf": True})
    eventually(lambda: "hanging" in run.logs(0))
    (pod,) = k8s.cluster.pods.values()
    k8s.cluster.kill(pod.name, "ContainerStatusUnknown")
    assert run.wait(60)
    (outcome,) = run.outcomes()
    assert outcome.reason == "lost"
    assert "Kubernetes reports it gone (ContainerStatusUnknown" in str(outcome.error)


def test_a_waiting_pod_that_another_client_deletes_is_lost_and_reports_that(k8s: ApiServer) -> None:
    k8s.cluster.kubelet.room = 0
    run = launch("k8s", "job.py:main", 1)
    k8s.until(lambda: k8s.cluster.pods)
    k8s.cluster.delete_pod(next(iter(k8s.cluster.pods)))
    k8s.until(lambda: not k8s.cluster.pods)
    assert run.wait(60)
    (outcome,) = run.outcomes()
    assert outcome.reason == "lost"
    assert "its pod was deleted" in str(outcome.error)


def test_the_collector_that_removes_a_waiting_pod_fails_it_first_and_that_is_not_a_failed_start(k8s: ApiServer) -> None:
    k8s.cluster.kubelet.room = 0
    service = KubernetesJobs()
    (job_id,) = service.start_jobs([job()])
    k8s.until(lambda: k8s.cluster.pods)
    pod = k8s.pod(job_id["job"], 0)
    with k8s.cluster.changed:  # the state between the two requests of the garbage collector
        pod.wire["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        pod.status["phase"] = "Failed"
    assert service.state(job_id) == JobState(True, "lost", message=DELETED_EARLY)


def test_a_node_that_does_not_answer_is_named_while_its_replica_counts_as_running(k8s: ApiServer) -> None:
    run = launch("k8s", "job.py:hang", 1, args={"deaf": True})
    eventually(lambda: "hanging" in run.logs(0))
    (pod,) = k8s.cluster.pods.values()
    k8s.cluster.lose_node(pod.name)
    (seen,) = attach(run.run_id).status().replicas
    assert (str(seen.status), seen.note) == ("running", CUT_OFF)
    k8s.cluster.kubelet.unreachable.clear()
    run.cancel()


def test_the_standstill_of_a_heartbeat_counts_from_when_its_node_ceased_to_answer(
    k8s: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The taint manager deletes its pods minutes later: then the replica has ended at once."""
    from executors.backends.jobs.job_outcomes import JobOutcomeRecorder, JobReplica
    from executors.backends.jobs.job_state_poller import JobStatePoller

    run = launch("k8s", "job.py:hang", 1, args={"deaf": True})
    eventually(lambda: "hanging" in run.logs(0))
    eventually(lambda: view_of(run).newest_attempt(0).beat() is not None)
    (pod,) = k8s.cluster.pods.values()
    beat = view_of(run).newest_attempt(0).beat()
    # the node is dead, so the replica writes no more heartbeats
    monkeypatch.setattr("executors.attempt.Attempt.beat", lambda self: beat)
    service, now = KubernetesJobs(), [0.0]
    ends = JobOutcomeRecorder(service, JobStatePoller(service), clock=lambda: now[0])
    handle = view_of(run).reader.handles.of(0)
    replica, job_id = JobReplica.of(view_of(run).newest_attempt(0), handle), handle.metadata["job"]
    k8s.cluster.lose_node(pod.name)
    assert ends.may_live(replica, service.state(job_id))
    now[0] = 300.0
    assert ends.may_live(replica, service.state(job_id)), (
        "the replica counts as alive, because no process has recorded its end"
    )
    k8s.cluster.taint(pod.name)
    assert service.state(job_id).is_unconfirmed
    assert not ends.may_live(replica, service.state(job_id))
    fresh = JobOutcomeRecorder(service, JobStatePoller(service), clock=lambda: now[0])
    assert fresh.may_live(replica, service.state(job_id))
    k8s.cluster.kubelet.unreachable.clear()
    run.cancel()


def test_rm_deletes_the_jobs_and_secrets_of_all_attempts_and_of_no_other_run(k8s: ApiServer) -> None:
    other = launch("k8s", "job.py:main", 1, run_id="other")
    run = launch("k8s", "job.py:fail", 1, args={"ranks": [0]}, run_id="otter", env={"MINE": "x"})
    assert run.wait(60)
    from executors.run.resume import resume

    again = resume(attach("otter"), env={"MINE": "x"})
    assert again.wait(60)
    assert other.wait(60)
    assert len(k8s.cluster.jobs) == 3
    again.remove()
    assert [name.startswith("other-") for name in k8s.cluster.jobs] == [True]
    assert [name.startswith("other-") for name in k8s.cluster.secrets] == [True]


def test_logs_of_a_node_that_cannot_be_reached_hide_no_other_rank(
    k8s: ApiServer, here: HereInstead, quick_tries: None
) -> None:
    run = launch("k8s", "job.py:main", 3, run_id="otter")
    assert run.wait(60)
    pod = k8s.pod(next(iter(k8s.cluster.jobs)), 1)
    pods = list(k8s.cluster.pods.values())
    for number, each in enumerate(pods):  # each has a node of its own
        each.wire["spec"]["nodeName"] = f"node-of-{number}"
    k8s.cluster.kubelet.unreachable = {pod.wire["spec"]["nodeName"]}
    shown = here.replicas("logs", "otter")
    assert shown.code == 1, shown
    assert "[0] hello 0 of rank 0" in shown.stdout
    assert "[2] hello 0 of rank 2" in shown.stdout
    assert "The log of rank 1 cannot be read: Kubernetes: " in shown.stderr
    assert "no route to host" in shown.stderr
    as_json = here.replicas("logs", "otter", "--json")
    assert (as_json.code, [row["rank"] for row in as_json.json["replicas"]]) == (1, [0, 2])
    assert here.replicas("logs", "otter", "-r", 1).code == 2, (
        "a log that cannot be read is an error if the user names its rank"
    )
    k8s.cluster.kubelet.unreachable = {each.wire["spec"]["nodeName"] for each in pods}
    assert here.replicas("logs", "otter").code == 2, "no log can be shown, so the command fails"


def test_a_pod_that_is_gone_with_its_job_is_unknown(k8s: ApiServer) -> None:
    service = KubernetesJobs()
    (job_id,) = service.start_jobs([replace(job(), env={})])
    k8s.cluster.delete_job(job_id["job"])
    k8s.until(lambda: not k8s.cluster.pods)
    assert service.state(job_id) == UNKNOWN
