"""Ray keeps both contracts, at a real head on loopback that asks for a token: `make test-ray`."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers.ray import WHY_NOT, RayHead, is_installed, ray_head
from support.processes import environment_of, parent_of

from executors import RayExecutor, ReplicaHandle, ServerlessExecutor
from executors.backends.jobs.service import JobId, JobService
from executors.testing import ExecutorContract, JobServiceContract

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.skipif(not is_installed(), reason=WHY_NOT)]


@pytest.fixture(scope="module")
def _head() -> Iterator[RayHead]:
    with ray_head() as head:
        yield head


@pytest.fixture
def head(_head: RayHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayHead]:
    """A cluster of one node, which is this machine, and an empty workspace. Its jobs end with the test."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, value in _head.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield _head
    _head.end_jobs()


class TestRayJobs(JobServiceContract):
    @pytest.fixture
    def service(self, head: RayHead) -> JobService:
        return RayExecutor(credentials="env").service

    def another(self, service: JobService) -> JobService:
        return RayExecutor(**service.options).service

    def unknown(self, service: JobService) -> JobId:
        return {"id": "never-was", "url": f"{os.environ['RAY_API_SERVER_ADDRESS']}/#/jobs/never-was"}

    def test_a_job_that_runs_into_its_limit_is_ended(self, service: JobService) -> None:
        pytest.skip("Ray has no limits: a replica's own supervisor ends it")


class OnThisMachine(RayExecutor):
    def __init__(self) -> None:
        super().__init__(shared_disk=True)


class TestRay(ExecutorContract):
    @pytest.fixture
    def executor(self, head: RayHead) -> ServerlessExecutor:
        return OnThisMachine()

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        """Kill what Ray has beside the replica; that ends the replica, as the end of its node does."""
        os.kill(supervisor_of(handle), signal.SIGKILL)


def supervisor_of(handle: ReplicaHandle) -> int:
    """Return the pid of Ray's supervisor of the job that runs a replica."""
    ours = {"REPLICA_RUN_ID": handle.metadata["run_id"], "REPLICA_RANK": str(handle.rank)}
    pids = {
        int(each.name)
        for each in Path("/proc").glob("[0-9]*")
        if ours.items() <= environment_of(int(each.name)).items()
    }
    (supervisor,) = {parent_of(pid) for pid in pids} - pids
    assert supervisor is not None
    return supervisor
