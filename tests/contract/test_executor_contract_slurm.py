"""Slurm keeps the contract of an executor, at a real cluster on loopback."""

from __future__ import annotations

import pytest
from servers.slurm.cluster import Cluster
from servers.slurm.commands import Commands

from executors import ReplicaHandle, ServerlessExecutor, SlurmExecutor
from executors.testing import ExecutorContract

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


class TestSlurm(ExecutorContract):
    @pytest.fixture
    def executor(self, slurm: Cluster, slurm_commands: Commands) -> ServerlessExecutor:
        self.cluster, self.commands = slurm, slurm_commands
        return SlurmExecutor(partition="low")

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        self.cluster.kill_job(job_of(handle))

    def evict(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        self.cluster.evict(job_of(handle))

    def lose_reply(self, executor: ServerlessExecutor) -> None:
        self.commands.lose_reply()


def job_of(handle: ReplicaHandle) -> str:
    """Name a replica's job as Slurm's commands do."""
    return "{id}_{task}".format(**handle.metadata["job"])
