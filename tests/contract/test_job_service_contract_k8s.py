"""Kubernetes keeps the contract of a job service: at a stand-in, and with `-m live` at the cluster of KUBECONFIG."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import LIVE
from servers.kubernetes.server import ApiServer
from support.kubernetes_live import PATIENCE_S, LiveCluster

from executors import KubernetesExecutor
from executors.backends.jobs.service import JobId, JobService, JobSpec
from executors.testing import JobServiceContract


class TestKubernetesJobs(JobServiceContract):
    @pytest.fixture
    def service(self, k8s: ApiServer, monkeypatch: pytest.MonkeyPatch) -> JobService:
        monkeypatch.setattr("executors.backends.kubernetes_manifest.PULL_S", 0)  # no image is pulled
        k8s.cluster.kubelet.grace_s = 0.1
        self.server = k8s
        return KubernetesExecutor().service

    def another(self, service: JobService) -> JobService:
        return KubernetesExecutor(**service.options).service

    def unknown(self, service: JobService) -> JobId:
        return {"job": "never-was-a0-r0", "namespace": "team", "index": 0, "uid": "u", "server": self.server.url}


@pytest.mark.live
@pytest.mark.k8s
@pytest.mark.timeout(2 * PATIENCE_S)
class TestKubernetesJobsLive(JobServiceContract):
    """The contract at the cluster of KUBECONFIG's current context. It needs no bucket."""

    patience_s = PATIENCE_S

    @pytest.fixture
    def service(self, monkeypatch: pytest.MonkeyPatch) -> JobService:
        if "KUBECONFIG" not in LIVE:
            pytest.skip("KUBECONFIG is not set, so no cluster is tested")
        monkeypatch.setenv("KUBECONFIG", LIVE["KUBECONFIG"])
        # Without this setting, a limit of 1 s takes half an hour.
        monkeypatch.setattr("executors.backends.kubernetes_manifest.PULL_S", 0)
        made = KubernetesExecutor().service
        self.cluster = LiveCluster(made)
        return made

    def another(self, service: JobService) -> JobService:
        return KubernetesExecutor(**service.options).service

    def unknown(self, service: JobService) -> JobId:
        where = {"namespace": self.cluster.namespace, "server": self.cluster.server}
        return {"job": "never-was-a0-r0", "index": 0, "uid": "u", **where}

    def checks_secrets(self, service: JobService) -> bool:
        return self.cluster.may("get", "secrets")

    def job(self, code: str, **changes: Any) -> JobSpec:
        return super().job(code, **{"limit_s": int(PATIENCE_S), **changes})
