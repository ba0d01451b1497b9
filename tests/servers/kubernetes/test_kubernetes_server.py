"""Tests the stand-in against the table of a real server's answers. With `-m live`, tests a real server, too."""

from __future__ import annotations

import copy
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import urllib3
from conftest import LIVE
from support.kubernetes_jobs import SLEEP, job, started
from support.kubernetes_live import LiveCluster

from executors.backends.kubernetes import KubernetesJobs
from executors.backends.kubernetes_client import client
from executors.backends.kubernetes_pods import indexes
from servers.kubernetes.cluster import _text as text_of_indexes
from servers.kubernetes.pods import Pod
from servers.kubernetes.server import QUOTA_CONFLICT, ApiServer

TABLE: dict[str, Any] = json.loads((Path(__file__).parent / "answers.json").read_text())
HANDLES = "trap 'exit 7' TERM; echo hanging; while :; do sleep 0.1; done"
Row = dict[str, Any]


class Asker:
    """Sends the requests of table rows to one server, and deletes the objects that they create."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.api = api
        self.token = ""
        """The credentials to send. Empty: the credentials of the kubeconfig."""
        self.name = f"table-{secrets.token_hex(4)}"
        self._namespace = namespace

    def fill(self, text: str) -> str:
        """Replace the placeholders in a text by this asker's names."""
        return text.replace("{name}", self.name).replace("{ns}", self._namespace)

    def ask(self, method: str, path: str, body: str | None = None, changes: Mapping[str, Any] | None = None) -> Any:
        """Send one request, and return the status, the headers, and the answer as JSON."""
        made = copy.deepcopy(TABLE["bodies"][body]) if body else {}
        for place, value in (changes or {}).items():
            *folders, last = place.split(".")
            inside: Any = made
            for folder in folders:
                inside = inside[folder]
            inside[last] = value
        text = self.fill(json.dumps(made)).replace("{a MiB and one byte}", "x" * ((1 << 20) + 1))
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        pools = self.api.rest_client.pool_manager
        if self.token:  # a pool without the client's certificate, which would authenticate the request, too
            headers["Authorization"] = f"Bearer {self.token}"
            pools = urllib3.PoolManager(ca_certs=self.api.configuration.ssl_ca_cert)
        else:
            self.api.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)
        answer = pools.request(
            method,
            self.api.configuration.host + self.fill(path),
            headers=headers,
            body=text if body else None,
            retries=False,
            timeout=30.0,
        )
        return answer.status, answer.headers, json.loads(answer.data or b"null")

    def clean(self) -> None:
        """Delete the Job and the Secret of this asker's name."""
        self.token = ""
        self.ask("DELETE", "/apis/batch/v1/namespaces/{ns}/jobs/{name}?propagationPolicy=Background")
        self.ask("DELETE", "/api/v1/namespaces/{ns}/secrets/{name}")


def check(row: Row, asker: Asker) -> None:
    """Send the request of a row, and compare the answer with the row."""
    for earlier in row.get("before", ()):
        asker.ask(*earlier)
    asker.token = row.get("token", "")
    status, headers, answer = asker.ask(*row["ask"])
    assert (status, answer.get("reason")) == (row["status"], row.get("reason")), answer
    if "message" in row:
        said, wanted = answer["message"], asker.fill(row["message"])
        if "{user}" in wanted:
            before, _, after = wanted.partition("{user}")
            assert said.startswith(before), said
            assert said.endswith(after), said
        else:
            assert said.startswith(wanted.removesuffix("…")), said
            assert wanted.endswith("…") or said == wanted
    for place, value in row.get("has", {}).items():
        inside = answer
        for name in place.split("."):
            inside = inside[name]
        assert inside == value, place
    if "warning" in row:
        assert headers["Warning"] == f"299 - {json.dumps(row['warning'])}"


@pytest.mark.parametrize("row", TABLE["requests"], ids=lambda row: row["name"])
def test_the_stand_in_answers_as_a_real_server_does(k8s: ApiServer, row: Row) -> None:
    needs = row.get("needs", {})
    if "denied" in needs:
        k8s.denied.add(tuple(needs["denied"]))
    if "conflict" in needs:
        k8s.fail(needs["conflict"], 409, message=QUOTA_CONFLICT)
    k8s.cluster.pod_security = needs.get("pod_security", "")
    cluster = KubernetesJobs()._cluster
    check(row, Asker(cluster.api, cluster.namespace))


def test_indexes_are_written_as_a_real_server_writes_them_and_read_as_it_does() -> None:
    for row in TABLE["indexes"]:
        assert text_of_indexes({*row["of"]}) == row["text"]
        assert indexes(row["text"]) == {*row["of"]}


@pytest.mark.parametrize("row", TABLE["ends"], ids=lambda row: row["how"])
def test_a_container_ends_first_and_its_pod_in_a_later_update(k8s: ApiServer, row: Row) -> None:
    """A kubelet ends process 1 by SIGTERM only if that process has a handler for it."""
    k8s.cluster.kubelet.grace_s = 0.2
    k8s.cluster.kubelet.reports_ends = False
    ways: dict[str, tuple[str, Callable[[str], object]]] = {
        "exit 0": ("echo hanging; exit 0", lambda name: None),
        "exit 3": ("echo hanging; exit 3", lambda name: None),
        "out of memory": (SLEEP, lambda name: k8s.cluster.kill(name, "OOMKilled")),
        "node pressure, without a handler for SIGTERM": (SLEEP, k8s.cluster.evict),
        "node pressure, with a handler for SIGTERM": (HANDLES, k8s.cluster.evict),
        "its own limit": (SLEEP, lambda name: k8s.cluster.limit_pod(name, 1)),
    }
    service = KubernetesJobs()
    if row["how"] == "no such program":
        (job_id,) = service.start_jobs([replace(job(), command=("no-such-program",))])
        k8s.until(lambda: k8s.cluster.pods)
        pod = k8s.pod(job_id["job"], 0)
    else:
        script, act = ways[row["how"]]
        (job_id,) = started(service, job(script))
        pod = k8s.pod(job_id["job"], 0)
        act(pod.name)
    seen = []
    for update in row["updates"]:
        k8s.until(partial(has_ended, pod))
        if update["phase"] != "Running":
            with k8s.cluster.changed:
                k8s.cluster.kubelet.reports_ends = True
                k8s.cluster.changed.notify_all()
            k8s.until(partial(getattr, pod, "is_over"))
        seen.append(shown(pod))
    assert seen == row["updates"]


def has_ended(pod: Pod) -> bool:
    return "terminated" in pod.status.get("containerStatuses", [{}])[0].get("state", ())


def shown(pod: Pod) -> Row:
    """Return the pod of a row."""
    status = pod.status
    ended = status["containerStatuses"][0]["state"]["terminated"]
    found = {"phase": status["phase"], "container": ["terminated", ended["exitCode"], ended["reason"]]}
    disrupted = [each["reason"] for each in status["conditions"] if each["type"] == "DisruptionTarget"]
    more = {"reason": status.get("reason"), "disruption": disrupted[0] if disrupted else None}
    return {**found, **{name: value for name, value in more.items() if value}}


def conditions(k8s: ApiServer, name: str) -> list[list[str]]:
    return [[each["type"], each["reason"]] for each in k8s.cluster.jobs[name]["status"].get("conditions", [])]


@pytest.mark.parametrize(("kind", "script"), [("failed", "exit 1"), ("complete", "true")])
def test_the_reason_for_the_end_of_a_job_is_reported_before_the_end(k8s: ApiServer, kind: str, script: str) -> None:
    row = TABLE["jobs"][kind]
    (job_id,) = KubernetesJobs().start_jobs([job(script)])
    k8s.until(lambda: conditions(k8s, job_id["job"]))
    assert conditions(k8s, job_id["job"]) == row["conditions"][:1]
    k8s.until(lambda: conditions(k8s, job_id["job"]) == row["conditions"])
    assert ("completionTime" in k8s.cluster.jobs[job_id["job"]]["status"]) == row["has_completion_time"]


def test_a_job_that_a_queue_takes_back_has_been_changed_twice(k8s: ApiServer) -> None:
    (job_id,) = KubernetesJobs(queue="team").start_jobs([job(SLEEP)])
    name = job_id["job"]
    for kind in ("suspended", "admitted", "taken back"):
        if kind != "suspended":
            k8s.cluster.suspend(name, is_suspended=kind == "taken back")
        row = TABLE["jobs"][kind]
        assert conditions(k8s, name) == row["conditions"]
        assert k8s.cluster.jobs[name]["metadata"]["generation"] == row["generation"]


@pytest.mark.parametrize("row", TABLE["deletions"], ids=lambda row: row["of"])
def test_a_deleted_pod_stays_after_its_grace_until_it_is_removed(k8s: ApiServer, row: Row) -> None:
    runs = row["of"] == "a pod that runs"
    k8s.cluster.kubelet.grace_s, k8s.cluster.podgc_s = 60.0, 3600.0
    k8s.cluster.kubelet.room = None if runs else 0
    service = KubernetesJobs()
    (job_id,) = started(service, job(SLEEP)) if runs else service.start_jobs([job()])
    pod = k8s.pod(job_id["job"], 0)
    k8s.cluster.delete_pod(pod.name)
    due = datetime.fromisoformat(pod.wire["metadata"]["deletionTimestamp"])
    left_s = (due - datetime.now(UTC)).total_seconds()
    assert row["deleted_in_s"] - 20 < left_s <= row["deleted_in_s"]
    assert (pod.status["phase"], pod.name in k8s.cluster.pods) == (row["phase"], True)
    assert "failedIndexes" not in k8s.cluster.jobs[job_id["job"]]["status"]
    k8s.cluster.kill(pod.name) if runs else k8s.cluster._collect(pod)
    k8s.until(lambda: not k8s.cluster.pods)
    assert k8s.cluster.jobs[job_id["job"]]["status"]["failedIndexes"] == "0"


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Asker]:
    """The cluster of KUBECONFIG's current context."""
    if "KUBECONFIG" not in LIVE:
        pytest.skip("KUBECONFIG is not set: no cluster is asked")
    monkeypatch.setenv("KUBECONFIG", LIVE["KUBECONFIG"])
    cluster = KubernetesJobs()._cluster
    asker = Asker(cluster.api, cluster.namespace)
    yield asker
    asker.clean()


@pytest.mark.live
@pytest.mark.k8s
@pytest.mark.parametrize("row", [row for row in TABLE["requests"] if "needs" not in row], ids=lambda row: row["name"])
def test_a_real_server_answers_as_the_table_says(live: Asker, row: Row) -> None:
    leaves_secret = any("secret" in earlier for earlier in row.get("before", ()))
    if leaves_secret and not LiveCluster(KubernetesJobs()).may("delete", "secrets"):
        pytest.skip("this account may not delete secrets, so the row would leave a secret")
    check(row, live)
