"""Ray keeps both contracts, at a real head on loopback that asks for a token: `make test-ray`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers.ray import N_CPUS, WHY_NOT, RayHead, is_installed, ray_head
from servers.s3.server import CREDENTIALS, S3Server
from support.processes import environment_of, parent_of

from executors import RayExecutor, ReplicaHandle, ServerlessExecutor, launch, list_runs
from executors.backends.jobs.service import JobId, JobKey, JobService, JobServiceError, JobSpec
from executors.backends.ray_client import package_of
from executors.errors import BackendError
from executors.run.run import view_of
from executors.testing import ExecutorContract, JobServiceContract, eventually
from executors.testing.executor_contract import task

pytestmark = [
    *(pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)),
    pytest.mark.skipif(not is_installed(), reason=WHY_NOT),
]

SCRIPT = "print('mine')"
PATIENCE_S = 180.0  # a job takes 2 s, and half a minute on a busy machine
MORE_THAN_THERE_IS = 1000.0  # the number of CPUs that no node has, so such a job waits


def job(run_id: str, rank: int = 0) -> JobSpec:
    return JobSpec(JobKey("s3://bucket/runs", run_id, rank, 0), ("python", "-c", SCRIPT), (), {}, {})


@pytest.fixture(scope="module")
def _one_that_runs() -> Iterator[Callable[[], RayHead]]:
    heads: list[RayHead] = []
    with contextlib.ExitStack() as stack:

        def one_that_runs() -> RayHead:
            if not heads or heads[-1].process.poll() is not None:
                heads.append(stack.enter_context(ray_head()))
            return heads[-1]

        yield one_that_runs


@pytest.fixture
def head(_one_that_runs: Callable[[], RayHead], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayHead]:
    """A cluster of one node, which is this machine, and an empty workspace. Its jobs end with the test."""
    head = _one_that_runs()
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    for name, value in head.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    yield head
    if head.process.poll() is None:
        head.end_jobs()


class TestRayJobs(JobServiceContract):
    patience_s = PATIENCE_S

    @pytest.fixture
    def service(self, head: RayHead) -> JobService:
        return RayExecutor(credentials="env").service

    def another(self, service: JobService) -> JobService:
        return RayExecutor(**service.options).service

    def unknown(self, service: JobService) -> JobId:
        return {"id": "never-was", "url": f"{os.environ['RAY_API_SERVER_ADDRESS']}/#/jobs/never-was"}

    def test_a_job_that_runs_into_its_limit_is_ended(self, service: JobService) -> None:
        pytest.skip("Ray has no time limits: the supervisor in the job ends the replica")


class OnThisMachine(RayExecutor):
    def __init__(self) -> None:
        super().__init__(shared_disk=True)


class TestRay(ExecutorContract):
    patience_s = PATIENCE_S

    @pytest.fixture
    def executor(self, head: RayHead) -> ServerlessExecutor:
        self.head = head
        return OnThisMachine()

    def kill(self, executor: ServerlessExecutor, handle: ReplicaHandle) -> None:
        """Kill Ray's own processes beside the replica. That ends the replica, like the loss of its node."""
        ours = {"REPLICA_RUN_ID": handle.metadata["run_id"], "REPLICA_RANK": str(handle.rank)}
        everyone = [int(each.name) for each in Path("/proc").glob("[0-9]*")]
        pids = {pid for pid in everyone if ours.items() <= environment_of(pid).items()}
        # Ray starts this process with the replica's environment
        (supervisor,) = [pid for pid in pids if parent_of(pid) not in pids]
        os.kill(supervisor, signal.SIGKILL)

    def lose_reply(self, executor: ServerlessExecutor) -> Callable[[], int]:
        assert isinstance(executor, RayExecutor)
        client: Any = executor.service._client  # type: ignore[attr-defined]
        n_before, send, lost = len(self.head.jobs()), client._send, list[str]()

        def send_and_lose(method: str, path: str, *more: Any) -> Any:
            answer = send(method, path, *more)
            if (method, path) == ("POST", "/api/jobs/") and not lost:
                lost.append(path)
                raise ConnectionResetError("as the test asked")
            return answer

        client._send = send_and_lose
        return lambda: len(self.head.jobs()) - n_before


def test_a_token_that_is_missing_or_wrong_is_refused_and_nothing_is_written(
    head: RayHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("f" * 64)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, r"Missing authentication token \(HTTP 401\)"),
        ({"token_file": str(tmp_path / "token")}, r"Invalid authentication token \(HTTP 403\)"),
    ]
    for options, words in cases:
        with pytest.raises(BackendError, match=rf"{words}\. Set RAY_AUTH_TOKEN_PATH"):
            launch(RayExecutor(shared_disk=True, **options), task("echo"), 1)
    assert list_runs() == []


def test_a_repeated_start_starts_no_second_job(head: RayHead) -> None:
    service = RayExecutor().service
    started = service.start(job("twice"))
    assert service.start(job("twice")) == started
    assert [each["submission_id"] for each in head.jobs()].count(started["id"]) == 1


def test_a_log_has_at_most_two_lines_before_the_users_lines(head: RayHead) -> None:
    service = RayExecutor().service
    job_id = service.start(job("log"))
    eventually(lambda: service.logs(job_id, 10) == "mine\n", within_s=PATIENCE_S)
    written = json.loads(head.ask("GET", f"/api/jobs/{job_id['id']}/logs"))["logs"].splitlines()
    assert (len(written), written[0].endswith("Runtime env is setting up."), written[2]) == (3, True, "mine")


def test_a_deleted_package_is_uploaded_again_for_the_next_launch(head: RayHead) -> None:
    for rank in (0, 1):
        service = RayExecutor().service
        job_id = service.start(job("package", rank))
        eventually(lambda: service.state(job_id).has_ended, within_s=PATIENCE_S)  # noqa: B023
        assert service.state(job_id).exit_code == 0
        head.forget_package(package_of(SCRIPT)[0])


def test_a_list_of_64_jobs_is_short_and_has_no_credentials_and_waiting_jobs_are_cancelled_at_once(
    head: RayHead, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAS_RENDEZVOUS", s3.url("runs"))
    n_before = len(head.ask("GET", "/api/jobs/"))
    run = launch(RayExecutor(cpus=MORE_THAN_THERE_IS), task("echo"), 64)
    listed = head.ask("GET", "/api/jobs/").decode()
    assert len(listed) - n_before < 200_000
    assert not any(value in listed for value in (*CREDENTIALS.values(), head.token_file.read_text()))
    assert run.status().replicas[63].doing == "waiting for room, or for its environment"
    run.cancel()
    assert run.wait(PATIENCE_S)
    assert {str(outcome.reason) for outcome in run.outcomes()} == {"cancelled"}


def test_replicas_meet_in_a_bucket_and_waiting_ones_start_when_others_have_ended(
    head: RayHead, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLICAS_RENDEZVOUS", s3.url("runs"))
    run = launch(RayExecutor(cpus=N_CPUS, credentials="env"), task("echo"), 2, args={"x": "$HOME"})
    assert run.results() == [{"rank": rank, "args": {"x": "$HOME"}} for rank in range(2)]
    first, second = sorted(run.outcomes(), key=lambda outcome: outcome.started_at or 0.0)
    assert first.finished_at <= (second.started_at or 0.0)


def test_a_job_that_a_user_stops_at_ray_ends_with_that_reason_and_is_not_restarted(head: RayHead) -> None:
    run = launch(OnThisMachine(), task("hang"), 1, restarts="3,backoff=0s")
    eventually(lambda: "hanging" in run.logs(rank=0), within_s=PATIENCE_S)
    head.ask("POST", f"/api/jobs/{view_of(run).reader.handles.of(0).metadata['job']['id']}/stop")
    assert run.wait(PATIENCE_S)
    (outcome,) = run.outcomes()
    assert (outcome.attempt, outcome.reason) == (0, "signal")
    assert "terminated by SIGTERM, sent by Ray or its administrators" in (outcome.error or "")


def test_without_the_head_nothing_starts_and_no_replica_counts_as_lost(head: RayHead) -> None:
    executor = OnThisMachine()
    run = launch(executor, task("hang"), 1)
    eventually(lambda: "hanging" in run.logs(rank=0), within_s=PATIENCE_S)
    head.kill()
    with pytest.raises(JobServiceError, match=r"cannot be reached: .*Connection refused") as caught:
        executor.service.state(view_of(run).reader.handles.of(0).metadata["job"])
    assert caught.value.kind == "unavailable"
    assert executor.poll(view_of(run).reader.handles.of(0)) == "running"
    with pytest.raises(BackendError, match="cannot be reached"):
        launch(executor, task("echo"), 1)
