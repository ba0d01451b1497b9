"""Hugging Face Jobs keep the contract of an executor: at the local Hub, and with `-m live` at the service itself.

In every run of the tests `JobExecutor` keeps it, and the service the contract of its calls: what is between them is
in `jobs/test_hf_jobs`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import LIVE
from servers.hub.server import HubServer

from executors import HFJobsExecutor, ReplicaHandle, ServerlessExecutor
from executors.testing import ExecutorContract

pytestmark = pytest.mark.slow

PATIENCE_AT_THE_SERVICE_S = 900.0  # its queue and its image come first


class TestHFJobs(ExecutorContract):
    reaches_local_store = False

    @pytest.fixture
    def executor(self, hf: HubServer) -> ServerlessExecutor:
        self.hub = hf
        return HFJobsExecutor()

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        self.hub.kill(handle.metadata["job"]["id"], "Evicted")


@pytest.mark.live
@pytest.mark.timeout(2 * PATIENCE_AT_THE_SERVICE_S)
class TestHFJobsLive(ExecutorContract):
    """The same at the service, for HF_TOKEN's account, meeting at the S3 url REPLICAS_LIVE_RENDEZVOUS. Costs little."""

    reaches_local_store = False
    patience_s = PATIENCE_AT_THE_SERVICE_S

    @pytest.fixture
    def executor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerlessExecutor:
        for name in ("HF_TOKEN", "REPLICAS_LIVE_RENDEZVOUS"):
            if name not in LIVE:
                pytest.skip(f"{name} is not set: nothing is asked of the service")
        for name, value in LIVE.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("REPLICAS_RENDEZVOUS", os.environ["REPLICAS_LIVE_RENDEZVOUS"])
        monkeypatch.chdir(tmp_path)
        return HFJobsExecutor()
