"""The local executor keeps the contract of an executor."""

from __future__ import annotations

import os
import signal

import pytest
from support.runs import pid_of

from executors import LocalProcessExecutor, ReplicaHandle, ServerlessExecutor
from executors.testing import ExecutorContract


class TestLocalExecutor(ExecutorContract):
    @pytest.fixture
    def executor(self) -> ServerlessExecutor:
        return LocalProcessExecutor(preload=(), term_grace_s=0.5)

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        os.kill(pid_of(handle), signal.SIGKILL)
