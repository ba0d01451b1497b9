"""Hugging Face Jobs keep the contract of an executor: at the local Hub, and with `-m live` at the service itself."""

from __future__ import annotations

import pytest
from servers.hub_server import HubServer

from executors import HFJobsExecutor, ReplicaHandle, ServerlessExecutor
from executors.testing import ExecutorContract


class TestHFJobs(ExecutorContract):
    reaches_local_store = False

    @pytest.fixture
    def executor(self, hf: HubServer) -> ServerlessExecutor:
        self.hub = hf
        return HFJobsExecutor()

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        self.hub.kill(handle.metadata["job"]["id"], "Evicted")
