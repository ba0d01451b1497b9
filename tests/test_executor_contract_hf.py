"""Hugging Face Jobs keep the contract of an executor: at the local Hub, and with `-m live` at the service itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from servers.hub_server import HubServer
from servers.s3_server import S3Server

from executors import HFJobsExecutor, ReplicaHandle, ServerlessExecutor
from executors.testing import ExecutorContract


@pytest.fixture
def _account(hub: HubServer, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    folder = tmp_path / "workspace"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, value in {**hub.environment, "REPLICAS_RENDEZVOUS": s3.url("runs")}.items():
        monkeypatch.setenv(name, value)
    return hub


class TestHFJobs(ExecutorContract):
    reaches_local_store = False

    @pytest.fixture
    def executor(self, _account: HubServer) -> ServerlessExecutor:
        self.hub = _account
        return HFJobsExecutor()

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        self.hub.kill(handle.metadata["job"]["id"], "Evicted")
