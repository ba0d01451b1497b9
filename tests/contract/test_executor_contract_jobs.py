"""JobExecutor keeps the contract of an executor: everything of a cloud but its SDK."""

from __future__ import annotations

import pytest
from support.fake_jobs import FakeExecutor, Machines

from executors import ReplicaHandle, ServerlessExecutor
from executors.native import NativeExecutor
from executors.testing import ExecutorContract


class TestJobExecutor(ExecutorContract):
    @pytest.fixture
    def executor(self, machines: Machines) -> ServerlessExecutor:
        self.machines = machines
        return FakeExecutor()

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        (job,) = [job for job in self.machines.jobs if job.id == handle.metadata["job"]["id"]]
        self.machines.end(job, "preempted")

    def test_it_has_all_that_the_executors_of_this_package_add(self, executor: ServerlessExecutor) -> None:
        assert isinstance(executor, NativeExecutor)


class TestGroupingJobExecutor(TestJobExecutor):
    """One whose service starts all jobs of a launch in one call."""

    @pytest.fixture
    def executor(self, machines: Machines) -> ServerlessExecutor:
        machines.starts_together = True
        self.machines = machines
        return FakeExecutor()
