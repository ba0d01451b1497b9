"""Tests requests to Ray, and how its answers are read, also wrong ones. contract/test_ray tests a real head."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from servers.s3.radosgw import free_port

from executors import RayExecutor
from executors.backends import ray_client
from executors.backends.jobs.service import JobKey, JobService, JobServiceError, JobSpec, JobState
from executors.backends.ray_client import RayJob
from executors.registry import describe_executor

TOKEN = "a-token-that-is-never-shown"
KEY = JobKey("s3://bucket/runs", "otter", 0, 0)
JOB = JobSpec(KEY, ("python", "-c", "print(1)"), (), {"REPLICA_RANK": "0"}, {"AWS_SECRET_ACCESS_KEY": "hush"})
RUNNING = {"submission_id": KEY.name, "status": "RUNNING", "metadata": KEY.labels}
WAITS = "waiting for room, or for its environment"
DEEP = "[" * 5000 + "]" * 5000


class Stub:
    """A server that sends planned answers: bytes, a status with a text, or no answer."""

    def __init__(self) -> None:
        self.says: dict[str, Any] = {}
        """The planned answers, by the beginning of method and path."""
        self.requests: list[tuple[str, str | None]] = []
        """Method, path and token of each request so far."""
        self.bodies: list[Any] = []
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                what = f"{self.command} {self.path}"
                stub.requests.append((what, self.headers.get("Authorization")))
                if body := self.rfile.read(int(self.headers.get("Content-Length") or 0)):
                    stub.bodies.append(json.loads(body) if body.startswith(b"{") else body)
                said = next(
                    (said for start, said in stub.says.items() if what.startswith(start)), (404, "Job x does not exist")
                )
                if said is None:
                    return  # the connection is closed
                status, text, *headers = said if isinstance(said, tuple) else (200, said)
                data = (
                    text if isinstance(text, bytes) else (text if isinstance(text, str) else json.dumps(text)).encode()
                )
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(OSError):  # the client has closed the connection
                    self.wfile.write(data)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"


@contextlib.contextmanager
def running_stub() -> Iterator[Stub]:
    stub = Stub()
    thread = threading.Thread(target=stub.server.serve_forever, args=(0.01,))
    thread.start()
    yield stub
    stub.server.shutdown()
    thread.join()
    stub.server.server_close()


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)


@pytest.fixture
def stub() -> Iterator[Stub]:
    with running_stub() as stub:
        stub.says = {"GET /api/packages/": "", "POST /api/jobs/": {"submission_id": KEY.name}}
        yield stub


@pytest.fixture
def service(stub: Stub) -> JobService:
    return RayExecutor(address=stub.address).service


def error_of(call: Callable[[], Any]) -> JobServiceError:
    with pytest.raises(JobServiceError) as caught:
        call()
    assert TOKEN not in str(caught.value)
    return caught.value


def calls_of(service: JobService) -> dict[str, Callable[[], Any]]:
    job_id = {"id": KEY.name, "url": ""}
    return {
        "GET /api/version": lambda: service.check_account(None, None, ()),
        f"GET /api/jobs/{KEY.name}/logs": lambda: service.logs(job_id, 10),
        f"GET /api/jobs/{KEY.name}": lambda: service.state(job_id),
        f"POST /api/jobs/{KEY.name}/stop": lambda: service.stop(job_id),
        "POST /api/jobs/": lambda: service.start(JOB),
    }


# Failures


def test_each_failure_has_its_kind_and_its_message(stub: Stub, service: JobService) -> None:
    for said, kind, kind_of_a_start, words in [
        ((401, "Unauthorized: Missing authentication token"), "rejected", "rejected", "Missing .*RAY_AUTH_TOKEN_PATH"),
        ((403, "Forbidden: Invalid authentication token"), "rejected", "rejected", "Invalid .*RAY_AUTH_TOKEN_PATH"),
        ((400, "Traceback:\n  File\nTypeError: a number\n"), "rejected", "rejected", r": TypeError: a number"),
        ((429, ""), "unavailable", "unavailable", "it gave no reason .HTTP 429"),
        ((503, "\x1b[31mno\x1b[0m agent\n.\n"), "unavailable", "unknown", r": no agent \(HTTP 503\)"),
        (None, "unavailable", "unknown", "cannot be reached: .*closed connection"),
    ]:  # fmt: skip
        for start, call in calls_of(service).items():
            stub.says = {start: said, "GET /api/packages/": ""}
            error = error_of(call)
            expected = kind_of_a_start if start == "POST /api/jobs/" else kind
            assert (error.kind, pytest.raises(JobServiceError, match=words).matches(error)) == (expected, True), error
    nobody = RayExecutor(address=f"http://127.0.0.1:{free_port()}").service
    for call in calls_of(nobody).values():
        assert error_of(call).kind == "unavailable"
    stub.says = {"GET /api/": (404, "default backend"), "POST /api/": (404, "default backend")}
    for start, call in calls_of(service).items():
        error = error_of(call)
        assert error.kind == "unavailable", "the answer of a proxy does not count as a lost job"
        assert "is not the dashboard of a Ray cluster: it has no /api/" in str(error), start
    stub.says = {f"GET /api/jobs/{KEY.name}/logs": (500, "KeyError: the agent of that node")}
    assert service.logs({"id": KEY.name}, 10) == "", "the log is empty, because the node is gone"


def test_redirects_are_not_followed_with_the_token(stub: Stub, service: JobService) -> None:
    with running_stub() as other:
        for status in (301, 302, 303, 307, 308):
            to = ("Location", f"{other.address}/api/version")
            stub.says = {"GET /api/": (status, "", to), "POST /api/": (status, "", to), "GET /api/packages/": ""}
            for call in calls_of(service).values():
                error = error_of(call)
                assert error.kind == "rejected"
                assert "Give the final address" in str(error)
    assert other.requests == []
    assert {token for _, token in stub.requests} == {f"Bearer {TOKEN}"}


def test_answers_that_are_invalid_are_refused_by_name_and_nothing_else_is_raised(
    stub: Stub, service: JobService
) -> None:
    for hostile in (
        b"", b"<html>", DEEP, b"\xff\xfe", "5", "[]", {}, {"submission_id": 5}, {**RUNNING, "status": None},
        {**RUNNING, "driver_exit_code": 1e99}, {**RUNNING, "driver_exit_code": True}, {**RUNNING, "metadata": [1]},
        {**RUNNING, "message": {}}, {**RUNNING, "submission_id": "../../x"}, {"logs": 5}, "1" * 100_000,
    ):  # fmt: skip
        for start, call in calls_of(service).items():
            stub.says = {start: hostile, "GET /api/packages/": ""}
            is_read = start.startswith("POST") and hostile != {**RUNNING, "submission_id": "../../x"}
            if start.endswith("/stop") or (
                is_read and isinstance(hostile, dict) and hostile.get("submission_id") == KEY.name
            ):
                call()
                continue
            error = error_of(call)
            assert error.kind == ("unknown" if start == "POST /api/jobs/" else "unavailable"), (start, hostile)
            assert "This is not an answer of Ray" in str(error)
        stub.says = {"GET /api/jobs/": hostile}
        job_id = {"id": KEY.name, "url": f"{stub.address}/#/jobs/{KEY.name}"}
        assert service.states({KEY: job_id}) == {}, "the state of the job is requested alone"
        stub.says = {
            "GET /api/jobs/": [hostile if isinstance(hostile, dict) else 5, [], {"submission_id": []}, RUNNING]
        }
        assert service.states({KEY: job_id}) == {KEY: JobState(False)}


def test_no_more_is_read_than_is_bearable(stub: Stub, service: JobService, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MAX_ANSWER_BYTES", "MAX_LIST_BYTES", "MAX_LOG_BYTES"):
        monkeypatch.setattr(ray_client, name, 2000)
    job_id = {"id": KEY.name, "url": f"{stub.address}/#/jobs/{KEY.name}"}
    stub.says = {"GET /api/jobs/": [RUNNING, *[{"filler": "x" * 100}] * 30]}
    assert service.states({KEY: job_id}) == {}
    stub.says = {"GET /api/jobs/": {"logs": "x" * 3000}}
    error = error_of(lambda: service.logs(job_id, 10))
    assert error.kind == "rejected"
    assert f"Read it with: ray job logs {KEY.name}" in str(error)


# Answers


def test_each_way_to_end_has_its_state() -> None:
    def state(status: str, **more: Any) -> JobState:
        return RayJob.parse({**RUNNING, "status": status, **more}).state

    died = "Job supervisor actor died: The actor died\n\tclass_name: JobSupervisor"
    setup = "runtime_env setup failed: no\nTraceback (most recent call last):\n  File x\nOSError: no package\n"
    late = "Job supervisor actor failed to start within 900.0 seconds."
    assert state("PENDING", message="Job has not started yet. It") == JobState(False, message=WAITS)
    assert state("RUNNING", message="Job is currently running.") == state("RUNNING") == JobState(False)
    assert state("OF_TOMORROW", message="who\x1b[1m knows") == JobState(False, message="who knows")
    assert state("SUCCEEDED", driver_exit_code=0) == state("SUCCEEDED") == JobState(True, None, 0)
    assert state("STOPPED", message="Job was intentionally stopped.") == JobState(True, "cancelled")
    for code, told in ((3, 3), (0, 0), (-9, 137), (-15, 143)):
        assert state("FAILED", driver_exit_code=code, message="x\nlog") == JobState(True, None, told)
    for error_type in ("JOB_SUPERVISOR_ACTOR_DIED", None):
        assert state("FAILED", message=died, error_type=error_type) == JobState(True, "lost", None, died.split("\n")[0])
    assert state("FAILED", message="Unexpected error occurred: x").reason == "lost"
    assert state("FAILED", message=late, error_type="JOB_SUPERVISOR_ACTOR_START_TIMEOUT").reason == "start_failed"
    assert state("FAILED", message=setup) == JobState(True, "start_failed", None, "OSError: no package")


def test_a_start_that_is_repeated_starts_nothing_and_another_users_job_is_not_ours(
    stub: Stub, service: JobService
) -> None:
    stub.says["POST /api/jobs/"] = (500, "ValueError: Job with submission_id x already exists. Please use another.")
    stub.says["GET /api/jobs/"] = RUNNING
    assert service.start(JOB) == {"id": KEY.name, "url": f"{stub.address}/#/jobs/{KEY.name}"}
    stub.says["GET /api/jobs/"] = {**RUNNING, "metadata": {}}
    assert "already exists" in str(error_of(lambda: service.start(JOB)))


def test_a_job_that_waits_for_room_counts_as_cancelled_once_it_was_stopped(stub: Stub, service: JobService) -> None:
    waits = {**RUNNING, "status": "PENDING", "message": "Job has not started yet."}
    stub.says = {"GET /api/jobs/": waits, "POST /api/jobs/": {"stopped": True}}
    job_id = {"id": KEY.name, "url": ""}
    assert service.state(job_id) == JobState(False, message=WAITS)
    service.stop(job_id)
    assert service.state(job_id) == JobState(True, "cancelled")


def test_a_job_of_another_cluster_is_not_taken_for_lost(stub: Stub, service: JobService) -> None:
    theirs = {"id": KEY.name, "url": "http://10.0.0.5:8265/#/jobs/x"}
    assert "was started at 'http://10.0.0.5:8265/#/jobs/x'. Give the address" in str(
        error_of(lambda: service.verify(theirs, KEY))
    )
    stub.says = {"GET /api/jobs/": RUNNING}  # the same cluster, by another address
    assert service.verify(theirs, KEY) == {"id": KEY.name, "url": f"{stub.address}/#/jobs/{KEY.name}"}


def test_a_log_has_no_lines_of_ray_itself(stub: Stub, service: JobService) -> None:
    rays = [
        "2026-11-22 20:09:02,761\tINFO job_manager.py:581 -- Runtime env is setting up.\n",
        f"Running entrypoint for job {KEY.name}: exec python replicas_bootstrap.py\n",
    ]
    for written, shown in (
        ("".join([*rays, "mine\n"]), "mine\n"),
        ("".join([rays[0], "early\n", rays[1], "mine"]), "early\nmine"),
        (rays[0], ""),
        ("mine\n", "mine\n"),
        (f"{''.join(rays)}{rays[1]}", rays[1]),
    ):
        stub.says = {"GET /api/jobs/": {"logs": written}}
        assert service.logs({"id": KEY.name}, 10) == shown
        assert [line for part in service.open_log({"id": KEY.name}).lines(10, has_ended=True) for line in part] == (
            shown.splitlines(keepends=True)
        )


def test_each_look_reads_a_log_once_and_a_long_one_is_looked_at_rarely(stub: Stub, service: JobService) -> None:
    log, pauses = service.open_log({"id": KEY.name}), []
    for n_lines in (1, 2, 400_000):
        stub.says = {"GET /api/jobs/": {"logs": "a long line of the job\n" * n_lines}}
        list(log.lines(10))
        pauses.append(log.pause_s)
    assert len(stub.requests) == 3
    assert pauses[:2] == [2.0, 2.0]
    assert pauses[2] > 8.0


# Requests


def test_a_replica_gets_the_requested_resources_under_the_name_of_its_attempt(
    stub: Stub, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {
        "resources": {"tpu": 1},
        "runtime_env": {"image_uri": "x"},
        "python": "/opt/my py/python",
    }
    service = RayExecutor(address=stub.address, cpus=0.5, memory_mb=2, **options).service
    command = service.command()
    stub.says.pop("GET /api/packages/")
    stub.says |= {"PUT /api/packages/gcs/_ray_pkg_": ""}
    for rank in range(3):
        service.start(
            replace(JOB, key=replace(KEY, rank=rank), command=command, gpu="H100:2", env={"MINE": "x $A ${rank}"})
        )
    asked = [what for what, _ in stub.requests]
    assert [what.split("/")[0] for what in asked] == ["GET ", "PUT ", *["POST "] * 3], (
        "a launch uploads one package for all replicas"
    )
    name = asked[0].rpartition("/")[2]
    assert stub.bodies[1] == {
        "submission_id": KEY.name,
        "entrypoint": "exec '/opt/my py/python' replicas_bootstrap.py",
        "entrypoint_num_cpus": 0.5,
        "entrypoint_num_gpus": 2,
        "entrypoint_memory": 2 << 20,
        "entrypoint_resources": {"accelerator_type:H100": 0.001, "tpu": 1},
        "metadata": KEY.labels,
        "runtime_env": {
            "image_uri": "x",
            "working_dir": f"gcs://{name}",
            "env_vars": {"$": "$", "REPLICA_NOTICE_S": "3", "MINE": "x ${$}A ${$}{rank}"},
        },
    }
    assert capsys.readouterr().err.count("sees the values of MINE") == 1
    for cpus, procs, cores in ((None, 4, 4), (None, 1, 1), (2.0, 4, 2.0)):
        shown = RayExecutor(cpus=cpus).service.describe(replace(JOB, procs=procs))
        assert shown["entrypoint_num_cpus"] == cores
    for gpu, n, resources in (("2", 2, {}), (None, 0, {}), ("A100-40G", 1, {"accelerator_type:A100-40G": 0.001})):
        shown = RayExecutor().service.describe(replace(JOB, gpu=gpu))
        assert (shown["entrypoint_num_gpus"], shown["entrypoint_resources"]) == (n, resources)


def test_credentials_travel_only_if_the_user_decides_so(service: JobService) -> None:
    env = RayExecutor(credentials="env").service
    signed = replace(JOB, credentials={"REPLICAS_RUN_KEY": "5b"})
    assert "AWS_SECRET_ACCESS_KEY" not in json.dumps(service.describe(JOB))
    assert env.describe(JOB)["runtime_env"]["env_vars"]["AWS_SECRET_ACCESS_KEY"] == "***"
    assert "or accept that with --option credentials=env" in str(error_of(lambda: service.start(signed)))
    assert "REPLICAS_RUN_KEY" in json.dumps(env.describe(signed))
    removed = replace(JOB, env={"MINE": "a ${HOME} b"})
    assert "Ray would remove '${HOME}' from the value of MINE" in str(error_of(lambda: service.start(removed)))


def test_the_token_is_found_where_ray_looks_for_it_and_is_never_shown(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.says = {"GET /api/version": {"ray_version": "2.60.0"}}

    def sent(**options: Any) -> str | None:
        executor = RayExecutor(address=stub.address, **options)
        executor.service.check_account(None, None, ())
        assert TOKEN not in f"{executor!r} {describe_executor(executor)} {executor.options_to_keep}"
        return stub.requests[-1][1]

    (tmp_path / "token").write_text("of-the-file\n")
    (tmp_path / "bad").write_text("two\nlines")
    assert sent(token_file=str(tmp_path / "token")) == f"Bearer {TOKEN}"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    assert sent() is None
    assert sent(token_file=str(tmp_path / "token")) == "Bearer of-the-file"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert sent() == "Bearer of-the-file"
    for file, words in (
        ("none", "cannot be read from .*/none': No such file"),
        ("bad", "a character that no token can have"),
    ):
        service = RayExecutor(address=stub.address, token_file=str(tmp_path / file)).service
        with pytest.raises(JobServiceError, match=rf"{words}.*Set RAY_AUTH_TOKEN_PATH"):
            service.check_account(None, None, ())


def test_the_address_of_the_cluster_comes_from_the_user_and_not_from_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    def address(**options: Any) -> object:
        return RayExecutor(**options).options_to_keep["address"]

    assert address() == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    assert address() == "http://127.0.0.1:8265"
    # so that the test does not reach a head that may run on this machine
    monkeypatch.setenv("RAY_ADDRESS", "ray://elsewhere:10001")
    with pytest.raises(ValueError, match=r"'ray://elsewhere:10001' is not the url of a Ray dashboard"):
        address()
    monkeypatch.setenv("RAY_ADDRESS", "https://ray.example/")
    assert address() == "https://ray.example"
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://[::1]:8265/prefix")
    assert address() == "http://[::1]:8265/prefix"
    assert address(address="http://head:8265") == "http://head:8265"
    recorded = describe_executor(RayExecutor(token_file="t", credentials="env", python="/x", shared_disk=True, cpus=2))
    assert recorded["executor_options"] == {"cpus": 2, "memory_mb": None, "shared_disk": True}
    assert recorded["unrecorded_options"] == ("address", "credentials", "python", "token_file")


def test_options_that_are_invalid_are_refused() -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"address": "ray://head:10001"}, "'ray://head:10001' is not the url of a Ray dashboard"),
        ({"address": "http://me:secret@head"}, "address='head' is not"),
        ({"address": "http://head/?x"}, "is not the url of a Ray dashboard"),
        ({"credentials": "no"}, "'nodes' or 'env', got 'no'"),
        ({"runtime_env": {"working_dir": "."}}, "'working_dir', which `replicas` sets itself"),
    ]
    for options, words in refused:
        with pytest.raises(ValueError, match=words) as caught:
            RayExecutor(**options)
        assert "secret" not in str(caught.value)
    for gpu in ("", "H100:x", "H100:", "a b"):
        with pytest.raises(ValueError, match="is not a GPU that Ray knows"):
            RayExecutor().service.describe(replace(JOB, gpu=gpu))


def test_replicas_meet_in_a_directory_only_if_all_nodes_see_it() -> None:
    assert [RayExecutor(shared_disk=value).needs_shared_rendezvous for value in (False, True)] == [True, False]
