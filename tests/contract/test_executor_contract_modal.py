"""The Modal executor keeps the contract of an executor: at a control plane on loopback, and with `-m live` at Modal.

`test_job_service_contract` and `jobs/test_modal` test the differences between the SDK's two back ends.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers.modal.server import ModalServer

from executors import ModalExecutor, ReplicaHandle, ServerlessExecutor
from executors.settings.run_spec import StartSpec
from executors.testing import ExecutorContract

pytestmark = pytest.mark.slow

NO_ACCOUNT = sorted({"MODAL_TOKEN_ID", "REPLICAS_LIVE_RENDEZVOUS"} - set(os.environ))


class WithGpus(ModalExecutor):
    """Requests a GPU for each replica, which selects the SDK's older back end."""

    def start_ranks(self, start: StartSpec, *more: Any) -> list[ReplicaHandle]:
        return super().start_ranks(replace(start, gpu=start.gpu or "H100"), *more)


class TestModalExecutor(ExecutorContract):
    """The contract with sandboxes without GPUs, which Modal starts at once."""

    @pytest.fixture
    def executor(self, modal_runs: ModalServer) -> ServerlessExecutor:
        self.server = modal_runs
        return ModalExecutor()

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        self.server.kill(handle.metadata["job"]["sandbox_id"])


@pytest.mark.live
@pytest.mark.skipif(bool(NO_ACCOUNT), reason=f"{' and '.join(NO_ACCOUNT)} not set")
@pytest.mark.timeout(1200)
class TestModalItself(ExecutorContract):
    """The contract at Modal itself.

    It needs a token, and a bucket that both sides reach, in `REPLICAS_LIVE_RENDEZVOUS`.
    """

    patience_s = 600.0
    make: type[ModalExecutor] = ModalExecutor

    @pytest.fixture
    def executor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerlessExecutor:
        monkeypatch.setenv("REPLICAS_RENDEZVOUS", os.environ["REPLICAS_LIVE_RENDEZVOUS"])
        monkeypatch.chdir(tmp_path)
        return self.make(app_name="replicas-tests")


class TestModalItselfWithGpus(TestModalItself):
    make = WithGpus
