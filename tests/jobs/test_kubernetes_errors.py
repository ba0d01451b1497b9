"""What Kubernetes refuses or does not answer: before a launch, at each call, and where a Job is not the one named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers.kubernetes.server import ApiServer
from support.kubernetes_jobs import SLEEP, job, started

from executors.backends.jobs.service import ForeignJobError, JobServiceError, JobState, retrying
from executors.backends.kubernetes import KubernetesJobs
from executors.errors import BackendError


@pytest.fixture
def service(k8s: ApiServer) -> KubernetesJobs:
    k8s.cluster.kubelet.grace_s = 0.1
    return KubernetesJobs()


# Before a launch


def test_an_account_that_may_not_do_what_is_needed_is_refused_by_name(k8s: ApiServer, service: KubernetesJobs) -> None:
    service.check_account(None, None, ())
    assert k8s.count("dry_run") == 1
    assert not k8s.cluster.jobs
    k8s.denied = {("create", "secrets"), ("get", "pods/log")}
    with pytest.raises(BackendError, match="does not let you create secrets, get pods/log in the namespace 'team'"):
        service.check_account(None, None, ())


def test_what_cannot_run_is_refused_before_a_launch(k8s: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="has no Secret 'NOT_THERE'"):
        KubernetesJobs(secrets=["NOT_THERE"]).check_account(None, None, ())
    k8s.fail("read_secret", 403)
    KubernetesJobs(secrets=["unreadable"]).check_account(None, None, ())
    with pytest.raises(JobServiceError, match=r"resources\.requests\[cpu\]: Invalid value"):
        KubernetesJobs(cpu=-1).check_account(None, None, ())
    with pytest.raises(ValueError, match="which nodes have a H100"):
        KubernetesJobs().check_account("H100:2", None, ())
    k8s.cluster.drops = {"backoffLimitPerIndex"}
    with pytest.raises(BackendError, match=r"is too old: 1\.33 or later"):
        KubernetesJobs().check_account(None, None, ())
    k8s.write_kubeconfig("another-token")
    with pytest.raises(JobServiceError, match=r"Unauthorized \(HTTP 401\)\. .*kubectl auth can-i"):
        KubernetesJobs().check_account(None, None, ())
    with pytest.raises(BackendError, match=r"finds no cluster: .*no-such-context.*--option context=NAME"):
        KubernetesJobs(context="no-such-context").check_account(None, None, ())
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    with pytest.raises(BackendError, match=r"finds no cluster: .*Set KUBECONFIG"):
        KubernetesJobs().check_account(None, None, ())


# Errors

READS: list[Callable[[KubernetesJobs, dict[str, Any]], Any]] = [
    lambda service, job_id: service.state(job_id),
    lambda service, job_id: service.states({job().key: job_id}),
    lambda service, job_id: service.logs(job_id, 5),
    lambda service, job_id: service.stop(job_id),
]


@pytest.mark.parametrize(
    ("status", "of_reads", "of_a_create"),
    [
        (400, "rejected", "rejected"),
        (403, "rejected", "rejected"),
        (422, "rejected", "rejected"),
        (429, "unavailable", "unavailable"),
        (500, "unavailable", "unknown"),
        (503, "unavailable", "unknown"),
        (0, "unavailable", "unknown"),
    ],
)
def test_each_error_is_of_its_kind(
    k8s: ApiServer, service: KubernetesJobs, status: int, of_reads: str, of_a_create: str
) -> None:
    (job_id,) = service.start_jobs([job()])
    for read in READS:
        k8s.fail("list_pods", status, retry_after="7")
        with pytest.raises(JobServiceError) as raised:
            read(service, job_id)
        assert raised.value.kind == of_reads
        assert raised.value.retry_after_s == (7.0 if status else 0.0)
    k8s.fail("create_job", status)
    with pytest.raises(JobServiceError) as raised:
        service.start_jobs([job(rank=1)])
    assert raised.value.kind == of_a_create


def test_a_server_that_cannot_be_reached_is_unavailable_and_nothing_is_asked_twice(k8s: ApiServer) -> None:
    service = KubernetesJobs(context="nowhere")
    calls: list[Callable[[], Any]] = [lambda: service.start_jobs([job()]), lambda: service.find(job().key)]
    for call in calls:
        with pytest.raises(JobServiceError, match="Kubernetes cannot be reached") as raised:
            call()
        assert raised.value.kind == "unavailable"
    assert k8s.requests == []
    k8s.fail("list_jobs", 0, times=2)
    with pytest.raises(JobServiceError):
        KubernetesJobs().find(job().key)
    assert k8s.requests == ["list_jobs"]


def test_credentials_that_were_renewed_are_read_again_and_wrong_ones_are_refused(
    k8s: ApiServer, service: KubernetesJobs
) -> None:
    (job_id,) = service.start_jobs([job()])
    k8s.token = "renewed"
    k8s.write_kubeconfig("renewed")
    assert retrying()(service.states, {job().key: job_id}).keys() == {job().key}
    k8s.token = "known to nobody here"
    with pytest.raises(JobServiceError, match="HTTP 401") as raised:
        retrying()(service.state, job_id)
    assert raised.value.kind == "rejected"


def test_a_job_that_took_the_name_of_another_is_another(k8s: ApiServer, service: KubernetesJobs) -> None:
    (job_id,) = started(service, job(SLEEP))
    forged = {**job_id, "uid": "0f0f0f0f-0000-4000-8000-000000000000"}
    with pytest.raises(ForeignJobError):
        service.verify(forged, job().key)
    assert service.states({job().key: forged}) == {}
    assert service.state(forged).reason == "lost"
    assert service.logs(forged, 5) == ""
    service.stop(forged)
    assert not service.state(job_id).has_ended


def test_a_job_whose_pods_are_refused_says_why_where_events_may_be_read(
    k8s: ApiServer, service: KubernetesJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.backends.kubernetes.UNMADE_S", 0.0)
    k8s.cluster.refuses_pods = 'pods "otter" is forbidden: exceeded quota: gpus'
    (job_id,) = service.start_jobs([job()])
    told = JobState(False, message='FailedCreate: pods "otter" is forbidden: exceeded quota: gpus')
    assert service.state(job_id) == service.states({job().key: job_id})[job().key] == told
    for status in (403, 500):
        k8s.fail("list_events", status)
        assert KubernetesJobs().state(job_id) == JobState(False)


def test_a_context_is_found_by_its_name_where_none_is_current(k8s: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(os.environ["KUBECONFIG"])
    settings = json.loads(path.read_text())
    name = settings.pop("current-context")
    path.write_text(json.dumps(settings))
    assert KubernetesJobs(context=name).find(job().key) == []
    path.write_text("{not: [yaml")
    with pytest.raises(BackendError, match="finds no cluster"):
        KubernetesJobs(context=name).find(job().key)


def test_a_job_of_another_cluster_is_not_called_lost(k8s: ApiServer, service: KubernetesJobs) -> None:
    elsewhere = {"job": "otter-a0-r0", "namespace": "team", "index": 0, "uid": "u", "server": "https://10.0.0.1:6443"}
    for call in (lambda: service.state(elsewhere), lambda: service.verify(elsewhere, job().key)):
        with pytest.raises(
            JobServiceError, match=r"it was launched at https://10\.0\.0\.1:6443\. .*context=NAME"
        ) as raised:
            call()
        assert raised.value.kind == "rejected"
        assert not isinstance(raised.value, ForeignJobError)
    (job_id,) = service.start_jobs([job()])
    by_another_name = {**job_id, "server": "https://10.96.0.1:443"}  # as a pod knows it
    assert service.verify(by_another_name, job().key) == by_another_name
    assert service.states({job().key: by_another_name}).keys() == {job().key}
