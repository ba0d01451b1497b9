"""Tests requests to Modal, and how its refusals, answers and failures are read, on both of the SDK's back ends.

The newer back end has the sandboxes without a GPU, and the older one has those with a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpclib import Status
from servers.modal.server import TOKEN_SECRET, ModalServer
from servers.s3.server import CREDENTIALS, S3Server
from support.cli import Folder, HereInstead
from support.modal import alive, create_of, of_backend
from support.sandboxes import gpu

from executors import ModalExecutor, attach, launch, open_store
from executors.backends.jobs.service import UNKNOWN, JobKey, JobService, JobServiceError, JobSpec, JobState
from executors.errors import BackendError, LaunchError, MissingDependencyError
from executors.launcher import plan_launch
from executors.run.run import view_of
from executors.task.launch_request import LaunchRequest
from executors.testing import eventually
from executors.testing.executor_contract import task

__all__ = ["gpu"]  # a fixture

KEY = JobKey("s3://bucket/runs", "otter", 0, 0)
HANG = ("python", "-u", "-c", "print('hanging'); import time; time.sleep(600)")


@pytest.fixture
def service(modal_runs: ModalServer) -> JobService:
    return ModalExecutor().service


@pytest.fixture
def job(gpu: str | None) -> JobSpec:
    return JobSpec(KEY, HANG, (), {}, {}, gpu=gpu)


# Requests


def test_all_options_reach_the_request(modal_runs: ModalServer, gpu: str | None) -> None:
    executor = ModalExecutor(
        app_name="my-app",
        cpu=0.5,
        memory_mb=512,
        region="us-east",
        cloud="aws",
        environment="main",
        image="python:3.11",
    )
    launch(executor, task("echo"), 1, run_id="otter", gpu=gpu and f"{gpu}:2", timeout=100).cancel()
    (call,) = modal_runs.calls_of(create_of(gpu))
    asked = call.request.definition
    assert modal_runs.account.apps[call.request.app_id] == ("main", "my-app")
    assert (asked.resources.milli_cpu, asked.resources.memory_mb) == (500, 512)
    assert list(asked.scheduler_placement.regions) == ["us-east"]
    assert "aws" in str(asked).lower()
    assert asked.timeout_secs == 1000
    assert (asked.resources.gpu_config.gpu_type, asked.resources.gpu_config.count) == (("H100", 2) if gpu else ("", 0))
    assert asked.name.startswith("otter-")
    assert {tag.tag_name: tag.tag_value for tag in call.request.tags}.items() >= {
        ("replicas-run", "otter"),
        ("replicas-rank", "0"),
        ("replicas-attempt", "0"),
    }
    images = [call.request.image for call in modal_runs.calls_of("ImageGetOrCreate")]
    assert any("\n".join(image.dockerfile_commands).startswith("FROM python:3.11") for image in images)


def test_all_sandboxes_are_asked_for_at_the_same_time(modal_runs: ModalServer, gpu: str | None) -> None:
    modal_runs.answer_together(create_of(gpu), 3)
    run = launch("modal", task("hang"), 3, gpu=gpu)
    assert [handle.rank for handle in run.handles] == list(range(3))
    assert len({handle.metadata["job"]["sandbox_id"] for handle in run.handles}) == 3
    run.cancel()


def test_an_executor_in_another_process_is_made_with_the_options_to_keep(modal_runs: ModalServer) -> None:
    executor = ModalExecutor(app_name="mine", pip=["einops"], secrets=["wandb"], image="python:3.11", memory_mb=64)
    again = ModalExecutor(**json.loads(json.dumps(executor.options_to_keep)))
    assert again.options_to_keep == executor.options_to_keep
    assert again.options_to_keep["image"] == "python:3.11"


def test_no_secret_is_seen_outside_secret_objects(
    modal_runs: ModalServer, s3: S3Server, gpu: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    modal_runs.secrets["wandb"] = {"WANDB_KEY": "the-key-of-wandb"}
    names = ["WANDB_KEY", "AWS_SECRET_ACCESS_KEY", "MINE"]
    own = {"MINE": "my-own-value"}
    run = launch("modal", task("variables"), 1, args={"names": names}, gpu=gpu, secrets=["wandb"], env=own)
    # The replica has the variables.
    assert run.results() == [
        {
            "WANDB_KEY": "the-key-of-wandb",
            "AWS_SECRET_ACCESS_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            "MINE": "my-own-value",
        }
    ]
    values = ["the-key-of-wandb", TOKEN_SECRET, *CREDENTIALS.values()]
    # The values are nowhere else: not in requests to the service,
    assert {value: modal_runs.requests_carrying(value) for value in values} == {value: [] for value in values}
    # not in the store, except for the result, which the test itself returned,
    store = open_store(s3.url("runs"))
    kept = {entry.key: bytes(store.get(entry.key)).decode(errors="replace") for entry in store.list("")}
    assert [key for key, text in kept.items() if any(value in text for value in (*values, "my-own-value"))] == [
        f"{run.run_id}/replicas/0000/0/outcome.json"
    ]
    # and not on the command line, in handles, or in printed text.
    (sandbox,) = modal_runs.sandboxes
    shown = [
        *sandbox.definition.entrypoint_args,
        repr(run),
        repr(run.handles),
        repr(view_of(run).executor),
        *capfd.readouterr(),
    ]
    assert not any(value in text for text in shown for value in (*values, "my-own-value"))


def test_a_dry_run_shows_the_requests_and_starts_nothing(modal_runs: ModalServer, s3: S3Server) -> None:
    modal_runs.secrets["wandb"] = {"WANDB_KEY": "the-key-of-wandb"}
    request = LaunchRequest.of(task("echo"), n=2, secrets=["wandb"], env={"MINE": "my-own-value"}, gpu="H100")
    shown = plan_launch(request, ModalExecutor(region="us-east")).dry_run()
    text = json.dumps(shown)
    jobs: list[Mapping[str, Any]] = shown["request"]["jobs"]
    assert shown["request"]["service"] == "Modal"
    assert [job["env"]["REPLICA_RANK"] for job in jobs] == ["0", "1"]
    assert [(job["gpu"], job["region"], job["timeout"]) for job in jobs] == [("H100", "us-east", 4500)] * 2
    assert jobs[0]["env"]["MINE"] == "***"
    assert jobs[0]["secrets"] == ["wandb", dict.fromkeys(CREDENTIALS, "***")]
    assert not any(value in text for value in ("my-own-value", "the-key-of-wandb", *CREDENTIALS.values()))
    assert modal_runs.sandboxes == []
    # a replica of an earlier test may still write its last record here
    assert list(open_store(s3.url("runs")).list(f"{shown['run_id']}/")) == []


def test_in_a_notebook_where_an_event_loop_runs_nothing_complains(modal_runs: ModalServer) -> None:
    async def cell() -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run = launch(ModalExecutor(), task("talk"), 1, args={"n_lines": 3})
            results = run.results()
            assert "line 2" in run.logs(rank=0)
            run.cancel()
            return results

    assert asyncio.run(cell()) == ["said"]


# Refused before anything is written


def test_a_missing_part_is_named_with_the_remedy_and_nothing_is_written(
    modal_runs: ModalServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = "Run: modal token new (or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET)."

    def refused(expected: type[Exception], message: str, n: int = 1, **options: Any) -> None:
        with pytest.raises(expected) as caught:
            launch("modal", task("echo"), n, **options)
        assert message in str(caught.value)

    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "modal", None)
        needed = "Backend 'modal' needs the Modal SDK. Install it with: pip install 'modal"
        refused(MissingDependencyError, needed)
    with monkeypatch.context() as patch:
        patch.delenv("REPLICAS_RENDEZVOUS")
        refused(
            BackendError,
            f"Backend 'modal' needs a rendezvous that both sides reach. Try: replicas launch {task('echo')} --backend "
            "modal --n 8 --rendezvous s3://BUCKET/PREFIX (or set REPLICAS_RENDEZVOUS).",
            n=8,
        )
    for name in ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        with monkeypatch.context() as patch:
            patch.delenv(name)
            refused(BackendError, f"Backend 'modal' needs a Modal token. {token}")
    made = "Modal has no secret 'wandb'. Create it with: modal secret create wandb KEY=VALUE"
    refused(BackendError, made, secrets=["wandb"])
    longest = "timeout must be at most 86280 seconds on Modal, got timeout=90000. Use a shorter timeout, and continue"
    refused(ValueError, longest, timeout=90_000)
    modal_runs.token = ("ak-another", "as-another")
    refused(BackendError, f"Modal: Token ID or token secret is invalid. {token}")
    assert modal_runs.sandboxes == []
    assert list(open_store(s3.url("runs")).list("")) == []


# Answers


def test_each_way_to_end_has_its_state(modal_runs: ModalServer, service: JobService, job: JobSpec) -> None:
    jobs = [replace(job, key=replace(KEY, rank=rank)) for rank in range(5)]
    ids = [service.start(each) for each in jobs]
    for each in ids:
        eventually(lambda each=each: "hanging" in service.logs(each, 9))  # type: ignore[misc]
    killed, memory, preempted, vanished, stopped = (each["sandbox_id"] for each in ids)
    modal_runs.kill(killed)
    modal_runs.oom_kill(memory)
    modal_runs.preempt(preempted)
    modal_runs.vanish(vanished)
    service.stop(ids[4])
    eventually(lambda: all(service.state(each).has_ended for each in ids))
    assert [service.state(each) for each in ids] == [
        JobState(True, "oom", 137),  # a kill from inside the container is most likely by the kernel
        JobState(True, "oom", 137),
        JobState(True, "preempted", 137),
        UNKNOWN,
        JobState(True, "preempted", 137),  # a cancel marker shows that this project ended it
    ]
    assert [service.logs(each, 9) for each in ids] == ["hanging\n"] * 3 + ["", "hanging\n"]
    assert stopped != vanished
    assert alive(modal_runs) == []


def test_the_states_of_those_that_run_are_one_list(modal_runs: ModalServer, service: JobService, job: JobSpec) -> None:
    keys = [replace(KEY, rank=rank) for rank in range(5)]
    jobs = {key: service.start(replace(job, key=key)) for key in keys}
    service.start(replace(job, key=replace(KEY, run_id="another")))
    service.stop(jobs[keys[1]])
    eventually(lambda: service.state(jobs[keys[1]]).has_ended)
    n_calls = len(modal_runs._dispatcher.calls)
    assert {key.rank: state for key, state in service.states(jobs).items()} == dict.fromkeys(
        (0, 2, 3, 4), JobState(False)
    )
    asked = [call.rpc for call in modal_runs._dispatcher.calls[n_calls:]]
    assert [rpc for rpc in asked if rpc.startswith("Sandbox")] == ["SandboxListV2"] * 3, (
        "the list has two pages and an empty one"
    )
    n_calls, other = len(modal_runs._dispatcher.calls), ModalExecutor().service
    assert len(other.states({keys[4]: jobs[keys[4]]})) == 1
    asked = [call.rpc for call in modal_runs._dispatcher.calls[n_calls:]]
    assert [rpc for rpc in asked if rpc.startswith("Sandbox")] == ["SandboxListV2"], (
        "one request is enough: the list has one page, and no tags are read"
    )
    for each in jobs.values():
        service.stop(each)


def test_a_process_that_looks_for_the_first_time_asks_for_a_list_and_nothing_else(
    modal_runs: ModalServer, service: JobService, job: JobSpec
) -> None:
    jobs = {key: service.start(replace(job, key=key)) for key in (KEY, replace(KEY, rank=1))}
    n_calls = len(modal_runs.calls_of())
    assert list(ModalExecutor().service.states(jobs)) == list(jobs)
    asked = [call.rpc for call in modal_runs.calls_of()[n_calls:]]
    assert [rpc for rpc in asked if rpc != "AuthTokenGet"] == ["SandboxListV2"]
    for each in jobs.values():
        service.stop(each)


@pytest.mark.parametrize("app_id", ["ap-another", "../x", 5, None, ["ap-another"], {}])
def test_a_handle_that_names_another_app_hides_the_state_of_no_other(
    modal_runs: ModalServer, service: JobService, job: JobSpec, app_id: object
) -> None:
    jobs = {key: service.start(replace(job, key=key)) for key in (KEY, replace(KEY, rank=1))}
    for wrong in jobs:
        told = ModalExecutor().service.states({**jobs, wrong: {**jobs[wrong], "app_id": app_id}})
        assert {key: told[key] for key in jobs if key != wrong} == {
            key: JobState(False) for key in jobs if key != wrong
        }
    everywhere = {key: {**job_id, "app_id": app_id} for key, job_id in jobs.items()}
    assert set(ModalExecutor().service.states(everywhere)) <= set(jobs), (
        "states are requested one by one, and no other job is returned"
    )
    for each in jobs.values():
        service.stop(each)


def test_a_look_at_a_sandbox_is_one_call_and_its_log_asks_for_nothing_else(
    modal_runs: ModalServer, service: JobService, job: JobSpec
) -> None:
    job_id = service.start(job)
    eventually(lambda: service.logs(job_id, 9) == "hanging\n")
    n_calls = len(modal_runs.calls_of())
    assert not service.state(job_id).has_ended
    assert service.logs(job_id, 9) == "hanging\n"
    look = of_backend("SandboxWait", job.gpu)
    first, *others = (call.rpc for call in modal_runs.calls_of()[n_calls:])
    assert (first, set(others)) == (look, {"AppFetchLogs"})
    service.stop(job_id)


def test_each_job_has_its_page(service: JobService, job: JobSpec) -> None:
    job_id = service.start(job)
    assert job_id["url"] == f"https://modal.com/id/{job_id['sandbox_id']}"
    assert service.verify({**job_id, "url": "https://evil.example.com"}, job.key) == job_id
    service.stop(job_id)


def test_a_job_whose_command_is_not_there_has_an_exit_code(service: JobService, job: JobSpec) -> None:
    job_id = service.start(replace(job, env={"PATH": "/nowhere"}))
    eventually(lambda: service.state(job_id).has_ended)
    assert service.state(job_id) == JobState(True, None, 128)


TRANSLATED: list[tuple[dict[str, Any], str, str]] = [
    ({"status": Status.UNAUTHENTICATED}, "rejected", "UNAUTHENTICATED as the test asked. Run: modal token new"),
    ({"status": Status.PERMISSION_DENIED, "message": "no sandboxes for you"}, "rejected", "no sandboxes for you."),
    ({"status": Status.INTERNAL, "times": 4}, "unknown", "INTERNAL as the test asked."),  # the SDK makes four tries
    ({"status": Status.RESOURCE_EXHAUSTED, "message": "over capacity, slow down"}, "unavailable", "slow down."),
    ({"status": Status.RESOURCE_EXHAUSTED, "message": "Insufficient capacity"}, "rejected", "Insufficient capacity."),
    ({"loses_connection": True, "times": 4}, "unknown", ""),
]


def test_a_failure_of_the_service_is_translated(modal_runs: ModalServer, service: JobService, job: JobSpec) -> None:
    hanging = service.start(replace(job, key=replace(KEY, rank=1)))
    calls: dict[str, Callable[[], object]] = {
        create_of(job.gpu): lambda: service.start(job),
        of_backend("SandboxWait", job.gpu): lambda: service.state(hanging),
        "AppFetchLogs": lambda: service.logs(hanging, 9),
    }
    for rpc, call in calls.items():
        for way, kind, message in TRANSLATED:
            modal_runs.fail(rpc, **way)
            with pytest.raises(JobServiceError, match="Modal") as caught:
                call()
            assert (caught.value.kind, message in str(caught.value)) == (kind, True), (rpc, way, caught.value)
            assert modal_runs.unused_faults() == [], (rpc, way)
    service.stop(hanging)


@pytest.mark.slow
def test_a_launch_gets_through_a_failing_service_with_each_rank_once(modal_runs: ModalServer, gpu: str | None) -> None:
    modal_runs.deduplicates = False  # a repeated request is a second one: the name alone keeps it from a second sandbox
    modal_runs.fail(create_of(gpu), loses_connection=True, after_applying=True, times=5, when=is_rank(3))
    modal_runs.fail(create_of(gpu), status=Status.INTERNAL, times=5, when=is_rank(5))  # once more than the SDK tries
    modal_runs.fail(create_of(gpu), status=Status.RESOURCE_EXHAUSTED, when=is_rank(6))
    run = launch("modal", task("hang"), 8, gpu=gpu)
    named = {handle.metadata["job"]["sandbox_id"]: handle.rank for handle in run.handles}
    assert named == {box.sandbox_id: int(box.tags["replicas-rank"]) for box in modal_runs.sandboxes}
    assert sorted(named.values()) == list(range(8))
    run.cancel()
    assert run.wait(60)
    assert alive(modal_runs) == []


def is_rank(rank: int) -> Any:
    return lambda request: request.definition.name.endswith(f"-r{rank:04d}-a0")


# Waiting for a GPU


@pytest.mark.slow
def test_a_gpu_that_never_comes_ends_the_launch_and_names_the_rank(
    modal_runs: ModalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modal.sandbox._impl_v1._SANDBOX_SCHEDULING_TIMEOUT", 4.0)  # of 21 minutes
    modal_runs.capacity = 3
    with pytest.raises(LaunchError, match="Insufficient capacity to create sandbox") as caught:
        launch("modal", task("hang"), 4, gpu="H100", run_id="otter")
    (unlucky,) = [box for box in modal_runs.sandboxes if not box.is_scheduled]
    assert caught.value.rank == int(unlucky.tags["replicas-rank"])
    assert "3 of 4 had a machine. The usual cause is the limit on GPUs at the same time" in str(caught.value)
    assert "--min-replicas 3" in str(caught.value)
    assert len(modal_runs.sandboxes) == 4, "the sandbox is not requested a second time"
    assert alive(modal_runs) == []


def test_a_start_that_waits_for_a_gpu_can_be_interrupted_and_leaves_nothing(
    modal_runs: ModalServer, service: JobService
) -> None:
    modal_runs.capacity = 0
    modal_runs.fail("SandboxGetFromName", Status.NOT_FOUND, times=99)  # the vendor promises to find those that run
    with ThreadPoolExecutor(2) as pool:
        starting = [
            pool.submit(service.start, JobSpec(replace(KEY, rank=rank), HANG, (), {}, {}, gpu="H100"))
            for rank in (0, 1)
        ]
        modal_runs.wait_for("SandboxGetTaskId", 2)
        service.interrupt_starts()
        for each in starting:
            with pytest.raises(JobServiceError, match="given up while it waited for a machine") as caught:
                each.result(timeout=30)
            assert caught.value.kind == "unknown"
    assert len(modal_runs.sandboxes) == 2
    assert alive(modal_runs) == []


@pytest.mark.slow
def test_ctrl_c_during_the_wait_for_a_gpu_ends_everything(modal_runs: ModalServer) -> None:
    modal_runs.capacity = 2
    modal_runs.fail("SandboxGetFromName", Status.NOT_FOUND, times=999)  # --- sandboxes that wait

    def interrupt() -> None:
        modal_runs.wait_for("SandboxCreate", 4, within_s=90.0)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        launch("modal", task("hang"), 4, gpu="H100", run_id="otter")
    thread.join()
    assert alive(modal_runs) == []
    rows = attach("otter").outcomes()
    assert [(str(row.status), row.reason) for row in rows] == [("cancelled", "cancelled")] * 4


# The command


def test_a_version_of_python_is_a_text_wherever_an_option_is_given(
    modal_runs: ModalServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = HereInstead(Folder(Path.cwd()), monkeypatch, capsys)
    launch = ("launch", "job.py:main", "--backend", "modal", "--n", 1, "--dry-run")
    for version in ("3.14", "3.10"):  # as a number, the second version would be 3.1
        told = here.replicas(*launch, "--option", f"python_version={version}", "--option", "memory_mb=512")
        (job,) = told.json["request"]["jobs"]
        assert (job["image"]["debian_slim"], job["memory"]) == (version, 512)
    monkeypatch.setenv("REPLICAS_OPTION", "python_version=3.10 memory_mb=512")
    (job,) = here.replicas(*launch).json["request"]["jobs"]
    assert (job["image"]["debian_slim"], job["memory"]) == ("3.10", 512)
    monkeypatch.delenv("REPLICAS_OPTION")
    Path("replicas.toml").write_text("[option.modal]\npython_version = 3.10\n")
    told = here.replicas(*launch)
    assert (told.code, "takes str | None, got 3.1. Write it in quotes." in told.stderr) == (2, True), told
    assert modal_runs.sandboxes == []


# Cost


@pytest.mark.parametrize(
    ("options", "gpu", "usd"),
    [
        ({}, None, 0.125 * 0.1419 + 0.125 * 0.024),
        ({"cpu": 2.0, "memory_mb": 4096}, None, 2 * 0.1419 + 4 * 0.024),
        ({"cpu": 2.0, "memory_mb": 4096}, "H100:8", 8 * 3.95 + 2 * 0.1419 + 4 * 0.024),
        ({"cpu": 1.0, "memory_mb": 1024}, "A100", 2.10 + 0.1419 + 0.024),
        ({}, "of-tomorrow", None),
        ({"region": "us-east"}, "H100", None),
    ],
)
def test_the_price_of_an_hour_is_that_of_the_workspace_s_rates(
    modal_runs: ModalServer, options: dict[str, Any], gpu: str | None, usd: float | None
) -> None:
    price = ModalExecutor(**options).price_per_hour(gpu)
    assert price == (None if usd is None else pytest.approx(usd))


def test_max_cost_limits_the_time_of_sandboxes(modal_runs: ModalServer) -> None:
    executor = ModalExecutor(cpu=1.0, memory_mb=1024)
    launch(executor, task("echo"), 1, run_id="otter", max_cost=0.1659 / 2).cancel()
    (call,) = modal_runs.calls_of("SandboxCreateV2")
    assert call.request.definition.timeout_secs == 1800, "the limit is half an hour, including the installation"
