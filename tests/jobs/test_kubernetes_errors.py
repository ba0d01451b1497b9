"""Tests refusals and missing answers of Kubernetes: before a launch, at each call, and for a Job that is not the named
one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from servers.kubernetes.pods import now
from servers.kubernetes.server import QUOTA_CONFLICT, ApiServer
from support.cli import HereInstead
from support.kubernetes_jobs import SLEEP, job, started

from executors import launch
from executors.backends.jobs.service import ForeignJobError, JobServiceError, JobState, retrying
from executors.backends.kubernetes import KubernetesJobs
from executors.errors import BackendError
from executors.testing import eventually
from executors.testing.helpers import environment


@pytest.fixture
def service(k8s: ApiServer) -> KubernetesJobs:
    k8s.cluster.kubelet.grace_s = 0.1
    return KubernetesJobs()


# Before a launch


def test_an_account_that_lacks_a_needed_right_is_refused_with_the_name_of_the_right(
    k8s: ApiServer, service: KubernetesJobs
) -> None:
    service.check_account(None, None, ())
    assert k8s.count("dry_run") == 1
    assert not k8s.cluster.jobs
    k8s.denied = {("create", "secrets"), ("get", "pods/log")}
    with pytest.raises(BackendError, match="does not let you create secrets, get pods/log in the namespace 'team'"):
        service.check_account(None, None, ())


def test_a_launch_that_cannot_run_is_refused(k8s: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match="has no Secret 'NOT_THERE'"):
        KubernetesJobs(secrets=["NOT_THERE"]).check_account(None, None, ())
    k8s.fail("read_secret", 403)
    KubernetesJobs(secrets=["unreadable"]).check_account(None, None, ())
    with pytest.raises(JobServiceError, match=r"resources\.requests\[cpu\]: Invalid value"):
        KubernetesJobs(cpu=-1).check_account(None, None, ())
    with pytest.raises(ValueError, match="names the nodes that have a H100"):
        KubernetesJobs().check_account("H100:2", None, ())
    k8s.cluster.drops = {"backoffLimitPerIndex"}
    with pytest.raises(BackendError, match=r"is too old\. Use a cluster with 1\.33 or later"):
        KubernetesJobs().check_account(None, None, ())
    k8s.write_kubeconfig("another-token")
    with pytest.raises(JobServiceError, match=r"Unauthorized \(HTTP 401\)\. .*log in again"):
        KubernetesJobs().check_account(None, None, ())
    with pytest.raises(BackendError, match=r"finds no cluster: .*no-such-context.*--option context=NAME"):
        KubernetesJobs(context="no-such-context").check_account(None, None, ())
    monkeypatch.setenv("KUBECONFIG", "/nonexistent")
    with pytest.raises(BackendError, match=r"finds no cluster: .*Set KUBECONFIG"):
        KubernetesJobs().check_account(None, None, ())


def test_warnings_of_the_dry_run_and_rights_that_are_missed_are_notes_of_doctor(
    k8s: ApiServer, here: HereInstead
) -> None:
    k8s.cluster.pod_security = "restricted"
    k8s.denied = {("get", "secrets"), ("list", "events")}
    shown = here.replicas("doctor", "--backend", "k8s")
    found = " ".join(shown.stdout.split())
    assert 'note service Kubernetes warns: would violate PodSecurity "restricted:latest": runAsNonRoot != true' in found
    assert "--option run_as_user=1000" in found
    assert "Secrets are not checked: a misspelled --secret is found out when its pods cannot start." in found
    assert "You need the right to get secrets in the namespace 'team' for that." in found
    assert "You need the right to list events" in found
    k8s.denied = set()
    assert "note service" not in " ".join(
        here.replicas("doctor", "--backend", "k8s", "--option", "run_as_user=1000").stdout.split()
    )


def test_a_launch_prints_a_warning_of_the_server_once_and_runs_where_its_pods_are_allowed(
    k8s: ApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    k8s.cluster.pod_security = "restricted"
    service = KubernetesJobs()
    for rank in (0, 1):
        service.start_jobs([job(rank=rank)])
    assert capsys.readouterr().err.count("replicas: Kubernetes warns: would violate PodSecurity") == 1
    assert not k8s.cluster.pods
    allowed = KubernetesJobs(run_as_user=1000)
    (job_id,) = allowed.start_jobs([job("echo $HOME", rank=2)])
    k8s.until(lambda: k8s.cluster.pods and k8s.pod(job_id["job"], 0).is_over)
    assert allowed.logs(job_id, 1) == "/tmp\n"
    assert capsys.readouterr().err == ""


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
        (409, "unavailable", "unavailable"),
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


@pytest.mark.parametrize("route", ["create_job", "create_secret"])
def test_a_conflict_with_a_quota_is_tried_again_and_leaves_no_job_without_its_secret(
    k8s: ApiServer, quick_tries: None, route: str
) -> None:
    """The server answers 409 there, too, and nothing of that name exists."""
    k8s.fail(route, 409, message=QUOTA_CONFLICT)
    run = launch("k8s", "job.py:variable", 2, args={"name": "MINE"}, env={"MINE": "x"})
    assert run.wait(60)
    assert run.results() == ["x", "x"]
    assert len(k8s.cluster.jobs) == len(k8s.cluster.secrets) == 1


def test_the_advice_on_a_refusal_fits_the_refused_request(k8s: ApiServer, service: KubernetesJobs) -> None:
    def refusal() -> str:
        with pytest.raises(JobServiceError) as raised:
            service.start_jobs([job()])
        return str(raised.value)

    k8s.denied = {("create", "jobs")}
    assert "cannot create resource" in refusal()
    assert refusal().endswith("(HTTP 403). To see your rights there: kubectl auth can-i --list.")
    k8s.denied = set()
    k8s.fail("create_job", 403, message='jobs.batch "x" is forbidden: exceeded quota: jobs, used: 9, limited: 9')
    assert refusal().endswith("The namespace has used up its quota. To see it: kubectl describe resourcequota.")
    k8s.fail("create_job", 403, message='admission webhook "images" denied the request: not from our registry')
    assert refusal().endswith("not from our registry (HTTP 403).")
    k8s.token = "another"
    assert "have expired: log in again" in refusal()


@pytest.mark.parametrize("right", [("list", "pods"), ("list", "jobs")])
def test_status_shows_the_states_in_the_store_if_the_service_refuses(
    k8s: ApiServer, here: HereInstead, right: tuple[str, str]
) -> None:
    run = launch("k8s", "job.py:hang", 2, run_id="otter", args={"ranks": [1]})
    eventually(lambda: "hanging" in run.logs(1) and run.status().replicas[0].status.is_terminal)
    k8s.cluster.suspend(next(iter(k8s.cluster.jobs)), is_suspended=False)
    k8s.denied = {("list", "pods"), right}
    shown = here.replicas("status", "otter")
    assert shown.code == 0, shown
    assert "those in the store: Kubernetes: pods is forbidden" in " ".join(shown.stdout.split())
    assert "1 running, 1 succeeded" in " ".join(shown.stdout.split()), shown
    document = here.replicas("status", "otter", "--json").json
    assert "pods is forbidden" in document["backend_problem"]
    assert [row["status"] for row in document["replicas"]] == ["succeeded", "running"]
    k8s.denied = set()
    assert here.replicas("status", "otter", "--json").json["backend_problem"] is None
    run.cancel()


def test_a_request_with_a_value_of_a_wrong_type_is_rejected_by_its_field_and_shows_no_value(
    k8s: ApiServer, service: KubernetesJobs
) -> None:
    # Only a newer client checks types. With an older one, the server refuses the request.
    checks = hasattr(client.V1Job, "from_dict")
    options: dict[str, Any] = {"image": 5}
    with pytest.raises(JobServiceError, match=r"spec\.template\.spec\.containers\[0\]\.image") as raised:
        KubernetesJobs(**options).check_account(None, None, ())
    assert raised.value.kind == "rejected"
    if checks:
        assert "Kubernetes does not take this request: spec.template.spec.containers[0].image is an int." in str(
            raised.value
        )
    secret: dict[str, Any] = {"KEY": 12345678}
    made, _ = service._cluster.create_job(service.job([job()]))
    with pytest.raises(
        JobServiceError, match=r"stringData\.KEY is an int" if checks else r"stringData\W+KEY"
    ) as raised:
        service._cluster.give_secret(made, secret)
    assert raised.value.kind == "rejected"
    assert "12345678" not in str(raised.value)


def test_the_newest_event_is_reported_although_the_server_counts_an_older_one_again(
    k8s: ApiServer, service: KubernetesJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.backends.kubernetes.UNMADE_S", 0.0)
    k8s.cluster.refuses_pods = "first"
    (job_id,) = service.start_jobs([job()])
    (first,) = k8s.cluster.events
    later = {"creationTimestamp": now(60.0)}
    between = {"message": "second", "lastTimestamp": now(60.0), "metadata": {**first["metadata"], **later}}
    k8s.cluster.events.append({**first, **between})
    first["lastTimestamp"] = now(120.0)  # the request was repeated and counted
    assert service.state(job_id).message.endswith("forbidden: first")


def test_nothing_is_imported_between_a_job_and_its_secret(k8s: ApiServer, tmp_path: Path) -> None:
    """If a kubelet finds no Secret, it looks again only 10 to 15 s later."""
    script = tmp_path / "starts.py"
    script.write_text(STARTS)
    done = subprocess.run([sys.executable, script], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done


STARTS = """
import sys
from executors.backends.jobs.service import JobSpec, JobKey
from executors.backends.kubernetes import KubernetesJobs
from executors.backends.kubernetes_client import Cluster

def create_job(self, *args, **more):
    global before
    made = create(self, *args, **more)
    before = set(sys.modules)
    return made

create, Cluster.create_job = Cluster.create_job, create_job
job = JobSpec(JobKey("s3://bucket/runs", "otter", 0, 0), ("true",), (), {"MINE": "x"}, {})
KubernetesJobs().start_jobs([job])
print(sorted(name for name in set(sys.modules) - before if name.startswith("kubernetes")))
"""


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
    k8s.cluster.refuses_pods = "exceeded quota: gpus"
    (job_id,) = service.start_jobs([job()])
    why = f'Error creating: pods "{job_id["job"]}-0-" is forbidden: exceeded quota: gpus'
    told = JobState(False, message=f"FailedCreate: {why}")
    assert service.state(job_id) == service.states({job().key: job_id})[job().key] == told
    for status in (403, 500):
        k8s.fail("list_events", status)
        assert KubernetesJobs().state(job_id) == JobState(False)


def test_a_context_is_found_by_its_name_if_no_context_is_current(
    k8s: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    by_another_name = {**job_id, "server": "https://10.96.0.1:443"}  # the name as a pod sees it
    assert service.verify(by_another_name, job().key) == by_another_name
    assert service.states({job().key: by_another_name}).keys() == {job().key}
