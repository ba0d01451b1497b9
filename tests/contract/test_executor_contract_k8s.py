"""Kubernetes keeps the contract of an executor: at a stand-in, and with `-m live` at the cluster of KUBECONFIG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import LIVE
from servers.kubernetes.server import ApiServer
from support.kubernetes_live import PATIENCE_S, LiveCluster

from executors import KubernetesExecutor, ReplicaHandle, ServerlessExecutor
from executors.testing import ExecutorContract

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)  # 64 replicas are started, watched and cancelled
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
@pytest.mark.k8s
@pytest.mark.timeout(2 * PATIENCE_S)
class TestKubernetesLive(ExecutorContract):
    """The contract at the cluster of KUBECONFIG's current context, with the rendezvous REPLICAS_LIVE_RENDEZVOUS, an S3
    url.
    """

    reaches_local_store = False
    patience_s = PATIENCE_S

    @pytest.fixture
    def executor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerlessExecutor:
        for name in ("KUBECONFIG", "REPLICAS_LIVE_RENDEZVOUS"):
            if name not in LIVE:
                pytest.skip(f"{name} is not set, so no cluster is tested")
            monkeypatch.setenv(name, LIVE[name])
        monkeypatch.setenv("REPLICAS_RENDEZVOUS", LIVE["REPLICAS_LIVE_RENDEZVOUS"])
        monkeypatch.chdir(tmp_path)
        made = KubernetesExecutor()
        self.cluster = LiveCluster(made.service)
        return made

    def lose_reply(self, executor: ServerlessExecutor) -> Callable[[], int]:
        return self.cluster.lose_reply()

    def evict(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        self.cluster.evict(handle.metadata["job"])

    def requests(self, executor: ServerlessExecutor) -> tuple[int, int]:
        return self.cluster.requests()

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        self.cluster.kill(handle.metadata["job"])
