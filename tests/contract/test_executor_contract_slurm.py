"""Slurm keeps the contract of an executor, at a real cluster on loopback."""

from __future__ import annotations

import pytest
from servers.slurm.cluster import Cluster

from executors import ReplicaHandle, ServerlessExecutor, SlurmExecutor
from executors.testing import ExecutorContract

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


class TestSlurm(ExecutorContract):
    @pytest.fixture
    def executor(self, slurm: Cluster) -> ServerlessExecutor:
        self.cluster = slurm
        return SlurmExecutor()

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        job = handle.metadata["job"]
        self.cluster.kill_job(f"{job['id']}_{job['task']}")
