"""JobExecutor keeps the contract of an executor, over a service whose jobs are local processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support import fake_jobs
from support.fake_jobs import FakeExecutor, GroupingFakeJobs, Machines

from executors import ReplicaHandle, ServerlessExecutor
from executors.backend import Backend, SupervisorStatus
from executors.backends.jobs import sdk
from executors.backends.jobs.job_outcomes import JobOutcomeRecorder
from executors.testing import ExecutorContract


class TestJobExecutor(ExecutorContract):
    @pytest.fixture
    def executor(self, machines: Machines) -> ServerlessExecutor:
        self.machines = machines
        return FakeExecutor()

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        (job,) = [job for job in self.machines.jobs if job.id == handle.metadata["job"]["id"]]
        self.machines.end(job, "preempted")

    def lose_reply(self, executor: ServerlessExecutor) -> Callable[[], int]:
        self.machines.fail("start", after_applying=True)
        return lambda: len(self.machines.jobs)

    def evict(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fake_jobs, "TERM_GRACE_S", 20.0)
            (job,) = [job for job in self.machines.jobs if job.id == handle.metadata["job"]["id"]]
            self.machines.end(job, "preempted", gently=True)

    def test_the_job_executor_is_a_backend(self, executor: ServerlessExecutor) -> None:
        assert isinstance(executor, Backend)


class TestGroupingJobExecutor(TestJobExecutor):
    """An executor whose service starts all jobs of a launch in one call."""

    @pytest.fixture
    def executor(self, machines: Machines) -> ServerlessExecutor:
        machines.starts_together = True
        self.machines = machines
        return FakeExecutor()

    def requests(self, executor: ServerlessExecutor) -> tuple[int, int]:
        self.machines.is_held = True
        return self.machines.count("start"), sum(self.machines.count(call) for call in ("states", "state", "find"))


Test = Callable[[Any], None]


def test_tests_of_the_contract_catch_executors_that_break_promises_about_their_engine(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these tests fails if the executor or the service breaks the promise that it tests."""
    machines.starts_together = True
    contract = TestGroupingJobExecutor()
    contract.machines = machines
    monkeypatch.setattr(TestGroupingJobExecutor, "patience_s", 5.0)
    monkeypatch.setattr("executors.testing.executor_contract.WATCHED_S", 4.0)
    lost, evicted = (
        contract.test_a_start_whose_answer_is_lost_is_found_and_not_done_twice,
        contract.test_an_eviction_is_preempted_in_status_and_in_the_decision,
    )
    mutants: list[tuple[Any, str, Any, Test]] = [
        (GroupingFakeJobs, "find", lambda _, key: [], lost),
        (JobOutcomeRecorder, "supervisor_of", lambda *_: SupervisorStatus(is_alive=False), evicted),
        (sdk, "LONGEST_PAUSE_S", 0.1, contract.test_many_replicas_are_started_and_watched_by_few_requests),
    ]
    for place, name, broken, test in mutants:
        with monkeypatch.context() as patch:
            patch.setattr(place, name, broken)
            with pytest.raises(AssertionError):
                test(FakeExecutor())
