"""Kubernetes keeps the contract of an executor: at a stand-in, and with `-m live` at the cluster of KUBECONFIG."""

from __future__ import annotations

from collections.abc import Callable

import pytest
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
        self.server.cluster.evict(self.server.pod(job["job"], job["index"]).name)

    def requests(self, executor: ServerlessExecutor) -> tuple[int, int]:
        self.server.cluster.kubelet.room = 0
        looks = ("list_jobs", "read_job", "list_pods")
        return self.server.count("create_job"), sum(map(self.server.count, looks))

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        job = handle.metadata["job"]
        self.server.cluster.kill(self.server.pod(job["job"], job["index"]).name)
