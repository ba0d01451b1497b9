"""Kubernetes keeps the contract of an executor: at a stand-in, and with `-m live` at the cluster of KUBECONFIG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LIVE
from servers.kubernetes.server import ApiServer

from executors import KubernetesExecutor, ReplicaHandle, ServerlessExecutor
from executors.testing import ExecutorContract

pytestmark = pytest.mark.slow

PATIENCE_AT_A_CLUSTER_S = 900.0  # its queue and the image come first


class TestKubernetes(ExecutorContract):
    reaches_local_store = False

    @pytest.fixture
    def executor(self, k8s: ApiServer) -> ServerlessExecutor:
        k8s.cluster.kubelet.grace_s = 1.0
        self.server = k8s
        return KubernetesExecutor()

    def lose_reply(self, executor: ServerlessExecutor) -> Callable[[], int]:
        self.server.fail("create_job", 0, after_applying=True)
        return lambda: sum(job["spec"]["completions"] for job in self.server.cluster.jobs.values())

    def evict(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        job = handle.metadata["job"]
        self.server.cluster.kubelet.grace_s = 20.0
        pod = self.server.pod(job["job"], job["index"])
        self.server.cluster.evict(pod.name)
        self.server.until(lambda: pod.is_over)

    def requests(self, executor: ServerlessExecutor) -> tuple[int, int]:
        self.server.cluster.kubelet.room = 0
        looks = ("list_jobs", "read_job", "list_pods")
        return self.server.count("create_job"), sum(map(self.server.count, looks))

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        job = handle.metadata["job"]
        self.server.cluster.kill(self.server.pod(job["job"], job["index"]).name)


@pytest.mark.live
@pytest.mark.timeout(2 * PATIENCE_AT_A_CLUSTER_S)
class TestKubernetesLive(ExecutorContract):
    """The same at the cluster of KUBECONFIG's current context, meeting at the S3 url REPLICAS_LIVE_RENDEZVOUS."""

    reaches_local_store = False
    patience_s = PATIENCE_AT_A_CLUSTER_S

    @pytest.fixture
    def executor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerlessExecutor:
        for name in ("KUBECONFIG", "REPLICAS_LIVE_RENDEZVOUS"):
            if name not in LIVE:
                pytest.skip(f"{name} is not set: no cluster is asked")
            monkeypatch.setenv(name, LIVE[name])
        monkeypatch.setenv("REPLICAS_RENDEZVOUS", LIVE["REPLICAS_LIVE_RENDEZVOUS"])
        monkeypatch.chdir(tmp_path)
        return KubernetesExecutor()

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        from kubernetes import client, config

        config.load_kube_config(LIVE["KUBECONFIG"])
        job = handle.metadata["job"]
        labels = f"batch.kubernetes.io/job-name={job['job']},batch.kubernetes.io/job-completion-index={job['index']}"
        client.CoreV1Api().delete_collection_namespaced_pod(
            job["namespace"], label_selector=labels, grace_period_seconds=0
        )
