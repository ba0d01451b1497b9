"""Slurm keeps the contract of an executor, at a real cluster on loopback."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from servers.slurm.cluster import Cluster
from servers.slurm.commands import Commands

from executors import ReplicaHandle, ServerlessExecutor, SlurmExecutor
from executors.backends.slurm import SlurmJobs
from executors.testing import ExecutorContract

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


class TestSlurm(ExecutorContract):
    @pytest.fixture
    def executor(self, slurm: Cluster, slurm_commands: Commands) -> ServerlessExecutor:
        self.cluster, self.commands = slurm, slurm_commands
        return SlurmExecutor(partition="low", cpus=8)  # as many as a node has, so that an eviction hits one replica

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        self.cluster.kill_job(job_of(handle))

    def evict(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        self.cluster.evict(job_of(handle))

    def lose_reply(self, executor: ServerlessExecutor) -> Callable[[], int]:
        self.commands.lose_reply()
        before = len(self.cluster.jobs())
        return lambda: len(self.cluster.jobs()) - before

    def requests(self, executor: ServerlessExecutor) -> tuple[int, int]:
        assert isinstance(executor, SlurmExecutor)
        assert isinstance(executor.service, SlurmJobs)
        executor.service.sbatch = ["--hold"]
        return len(self.commands.calls("sbatch")), len(self.commands.calls("squeue"))


def job_of(handle: ReplicaHandle) -> str:
    """Return the id of a replica's job for Slurm's commands."""
    return "{id}_{task}".format(**handle.metadata["job"])
