"""Tests a queue that suspends Jobs, as Kueue does: the ends of replicas, and the Jobs that stay in the queue."""

from __future__ import annotations

from typing import Any

import pytest
from servers.kubernetes.server import ApiServer
from support.cli import HereInstead
from support.kubernetes_jobs import SLEEP, job

from executors import Run, attach, launch
from executors.backends.kubernetes import KubernetesExecutor, KubernetesJobs
from executors.backends.kubernetes_pods import TAKEN_BACK
from executors.testing import eventually

HURRIED = {"REPLICA_NOTICE_S": "0.1"}  # otherwise a replica gets nearly all of the time that its cluster allows


@pytest.fixture(autouse=True)
def _patient_kubelet(k8s: ApiServer) -> None:
    k8s.cluster.kubelet.grace_s = 20.0


def admitted(k8s: ApiServer, n: int = 2, **more: object) -> tuple[Run, str]:
    """Launch replicas that hang, through a queue that admits them. Return the run, and the name of its Job."""
    options: dict[str, Any] = {"restarts": "none", **more}
    run = launch(KubernetesExecutor(queue="team"), "job.py:hang", n, env=HURRIED, run_id="otter", **options)
    (name,) = k8s.cluster.jobs
    k8s.cluster.suspend(name, is_suspended=False)
    eventually(lambda: all("hanging" in run.logs(rank) for rank in range(n)))
    return run, name


def test_a_replica_whose_job_a_queue_takes_back_was_preempted_and_its_job_leaves_the_queue(k8s: ApiServer) -> None:
    run, name = admitted(k8s)
    k8s.cluster.suspend(name, is_suspended=True)
    assert run.wait(60)
    assert [outcome.reason for outcome in run.outcomes()] == ["preempted", "preempted"]
    assert "Kubernetes" in str(run.outcomes()[0].error)
    eventually(lambda: run.status() and not k8s.cluster.jobs, "the suspended Job is deleted")
    assert not k8s.cluster.secrets


def test_replicas_that_are_killed_by_a_suspension_were_preempted_too(k8s: ApiServer) -> None:
    run, name = admitted(k8s, args={"deaf": True})
    k8s.cluster.suspend(name, is_suspended=True)
    for pod in list(k8s.cluster.pods):
        k8s.cluster.kill(pod)
    assert run.wait(60)
    assert [outcome.reason for outcome in run.outcomes()] == ["preempted", "preempted"]
    assert TAKEN_BACK in str(run.outcomes()[0].error)
    assert not k8s.cluster.jobs


def test_a_preempted_replica_restarts_for_free_in_a_job_that_is_alone_in_the_queue(k8s: ApiServer) -> None:
    run, name = admitted(k8s, 1, restarts="0,backoff=0s")
    k8s.cluster.suspend(name, is_suspended=True)
    eventually(lambda: run.wait(0.1) or run.status().replicas[0].attempt == 1)
    assert run.status().restarts_by_reason == {"preempted": 1}
    eventually(
        lambda: [job.rpartition("-a")[2] for job in k8s.cluster.jobs] == ["1-r0"],
        "only the Job of the next attempt is in the queue",
    )
    run.cancel()


def test_the_next_attempt_deletes_the_suspended_jobs_of_its_ranks_and_no_other(k8s: ApiServer) -> None:
    service = KubernetesJobs(queue="team")
    (first,), (waits,), (other,) = (service.start_jobs([job(SLEEP, rank)]) for rank in (0, 1, 2))
    for each in (first, other):
        k8s.cluster.suspend(each["job"], is_suspended=False)
        k8s.cluster.suspend(each["job"], is_suspended=True)
    from dataclasses import replace

    again = [replace(job(SLEEP, rank), key=replace(job(SLEEP, rank).key, attempt=2)) for rank in (0, 1)]
    (second, _) = KubernetesJobs(queue="team").start_jobs(again)
    assert k8s.cluster.jobs.keys() == {waits["job"], other["job"], second["job"]}, (
        "the Job of a rank that never ran stays in the queue"
    )


def test_a_job_that_never_ran_stays_in_the_queue_that_took_it_back(k8s: ApiServer) -> None:
    """A queue also takes back a Job if some of its pods were not ready in time."""
    k8s.cluster.kubelet.room = 0
    run = launch(KubernetesExecutor(queue="team"), "job.py:main", 1)
    (name,) = k8s.cluster.jobs
    k8s.cluster.suspend(name, is_suspended=False)
    k8s.cluster.suspend(name, is_suspended=True)
    k8s.until(lambda: not k8s.cluster.pods)
    (state,) = attach(run.run_id).status().replicas
    assert (str(state.status), state.note) == ("pending", TAKEN_BACK)
    k8s.cluster.kubelet.room = None
    k8s.cluster.suspend(name, is_suspended=False)
    assert run.wait(60)
    assert run.results() == [{"rank": 0}]


def test_cancel_of_a_run_that_has_ended_deletes_its_suspended_jobs_and_reports_that(
    k8s: ApiServer, here: HereInstead
) -> None:
    run, name = admitted(k8s, 1)
    k8s.fail("delete_job", 403, times=99)
    k8s.cluster.suspend(name, is_suspended=True)
    assert run.wait(60)
    k8s.forgive()
    assert name in k8s.cluster.jobs
    shown = here.replicas("cancel", "otter")
    assert "Deleted 1 job of otter that a queue would have started again." in shown.stdout, shown
    assert not k8s.cluster.jobs
    assert "Nothing to cancel in otter" in here.replicas("cancel", "otter").stdout


def test_cancelling_the_last_ranks_of_a_job_in_a_queue_deletes_it_although_others_ended_before(k8s: ApiServer) -> None:
    service = KubernetesJobs(queue="team")
    done, hangs = (job("true", 0), job(SLEEP, 1))
    script = "if [ $JOB_COMPLETION_INDEX = 0 ]; then exit 0; fi; echo hanging; exec sleep 600"
    from dataclasses import replace

    ids = service.start_jobs([replace(each, command=("sh", "-c", script)) for each in (done, hangs)])
    k8s.cluster.suspend(ids[0]["job"], is_suspended=False)
    eventually(lambda: service.logs(ids[1], 1) == "hanging\n" and service.state(ids[0]).exit_code == 0)
    k8s.cluster.suspend(ids[0]["job"], is_suspended=True)
    for pod in [pod for pod in k8s.cluster.pods.values() if not pod.is_over]:
        k8s.cluster.kill(pod.name)
    k8s.until(lambda: len(k8s.cluster.pods) == 1)
    k8s.cluster.delete_pod(next(iter(k8s.cluster.pods)))
    service.stop(ids[1])
    assert not k8s.cluster.jobs
