"""Hugging Face Jobs keep the contract of an executor: at the local Hub, and with `-m live` at the service itself.

Every test run checks the contract of `JobExecutor`, and the contract of the service's calls. `jobs/test_hf_jobs` tests
the code between the two.
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

PATIENCE_AT_THE_SERVICE_S = 900.0  # seconds; the job first waits in the queue and for its image


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
    """The contract at the service itself, with the account of HF_TOKEN and the rendezvous REPLICAS_LIVE_RENDEZVOUS, an
    S3 url. It costs little.
    """

    reaches_local_store = False
    patience_s = PATIENCE_AT_THE_SERVICE_S

    @pytest.fixture
    def executor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerlessExecutor:
        for name in ("HF_TOKEN", "REPLICAS_LIVE_RENDEZVOUS"):
            if name not in LIVE:
                pytest.skip(f"{name} is not set, so the service is not tested")
        for name, value in LIVE.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("REPLICAS_RENDEZVOUS", os.environ["REPLICAS_LIVE_RENDEZVOUS"])
        monkeypatch.chdir(tmp_path)
        return HFJobsExecutor()
