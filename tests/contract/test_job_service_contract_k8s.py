"""Kubernetes keeps the contract of the calls: at a stand-in made from the client's models."""

from __future__ import annotations

import pytest
from servers.kubernetes.server import ApiServer

from executors import KubernetesExecutor
from executors.backends.jobs.service import JobId, JobService
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
