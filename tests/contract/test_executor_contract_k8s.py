"""Kubernetes keeps the contract of an executor: at a stand-in, and with `-m live` at the cluster of KUBECONFIG."""

from __future__ import annotations

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

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        job = handle.metadata["job"]
        self.server.cluster.kill(self.server.pod(job["job"], job["index"]).name)
