"""What a launch on Modal asks for, and what it refuses before anything is started."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import modal
import pytest
from modal_of_tests import create_of
from servers.modal_server import TOKEN_SECRET, ModalServer
from servers.s3_server import CREDENTIALS, S3Server

from executors import ModalExecutor, launch, open_store
from executors.dry_run import rehearse
from executors.errors import BackendError, MissingDependencyError
from executors.launching import plan_launch
from executors.testing.executor_endings import task


@pytest.fixture(params=[None, "H100:2"], ids=["cpu", "gpu"])
def gpu(request: pytest.FixtureRequest) -> str | None:
    """What decides about the SDK's back end."""
    kind: str | None = request.param
    return kind


def images(server: ModalServer) -> list[str]:
    """The commands of every image that was asked for, in one text each."""
    return ["\n".join(call.request.image.dockerfile_commands) for call in server.calls_of("ImageGetOrCreate")]


def started_nothing(server: ModalServer) -> bool:
    return not server.calls_of("SandboxCreate", "SandboxCreateV2")


# What is asked for


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
    run = launch(executor, task("echo"), 1, run_id="otter", gpu=gpu, timeout=100)
    assert run.results()[0]["rank"] == 0
    (call,) = modal_runs.calls_of(create_of(gpu))
    asked = call.request.definition
    assert modal_runs.account.apps[call.request.app_id] == ("main", "my-app")
    assert (asked.resources.milli_cpu, asked.resources.memory_mb) == (500, 512)
    assert list(asked.scheduler_placement.regions) == ["us-east"]
    assert "aws" in str(asked).lower()
    assert asked.timeout_secs == 220
    assert (asked.resources.gpu_config.gpu_type, asked.resources.gpu_config.count) == (("H100", 2) if gpu else ("", 0))
    assert asked.name.startswith("otter-")
    assert {tag.tag_name: tag.tag_value for tag in call.request.tags}.items() >= {
        ("replicas-run", "otter"),
        ("replicas-rank", "0"),
        ("replicas-attempt", "0"),
    }
    assert images(modal_runs)[-1].startswith("FROM python:3.11")


def test_the_default_image_has_the_requirements_installed(modal_runs: ModalServer) -> None:
    Path("requirements.txt").write_text("einops==0.8.1\n./mine\n")
    run = launch(ModalExecutor(python_version="3.12"), task("echo"), 1, timeout=1)
    run.cancel()
    text = "\n".join(images(modal_runs))
    assert "einops==0.8.1" in text
    assert "torch==" in text
    assert "./mine" not in text, "a folder of the workspace is not there yet when the image is built"


def test_an_image_of_the_users_is_taken_as_it_is(modal_runs: ModalServer) -> None:
    image = modal.Image.debian_slim("3.11").run_commands("echo made-by-the-user")
    run = launch(ModalExecutor(image=image), task("echo"), 2)
    assert [result["rank"] for result in run.results()] == [0, 1]
    assert any("made-by-the-user" in text for text in images(modal_runs))
    assert not any("torch==" in text for text in images(modal_runs))


def test_all_sandboxes_are_asked_for_at_the_same_time(modal_runs: ModalServer, gpu: str | None) -> None:
    modal_runs.answer_together(create_of(gpu), 8)
    run = launch("modal", task("hang"), 8, gpu=gpu)
    assert [handle.rank for handle in run.handles] == list(range(8))
    assert len({handle.metadata["job"]["sandbox_id"] for handle in run.handles}) == 8
    run.cancel()


def test_an_executor_in_another_process_is_made_with_the_options_to_keep(modal_runs: ModalServer) -> None:
    executor = ModalExecutor(app_name="mine", pip=["einops"], secrets=["wandb"], image="python:3.11", memory_mb=64)
    again = ModalExecutor(**json.loads(json.dumps(executor.options_to_keep)))
    assert again.options_to_keep == executor.options_to_keep
    assert vars(again).keys() == vars(executor).keys()


# Secrets


def test_no_secret_is_seen_outside_secret_objects(
    modal_runs: ModalServer, s3: S3Server, gpu: str | None, capfd: pytest.CaptureFixture[str]
) -> None:
    modal_runs.secrets["wandb"] = {"WANDB_KEY": "the-key-of-wandb"}
    names = ["WANDB_KEY", "AWS_SECRET_ACCESS_KEY", "MINE"]
    own = {"MINE": "my-own-value"}
    run = launch("modal", task("variables"), 1, args={"names": names}, gpu=gpu, secrets=["wandb"], env=own)
    # The variables are there, where the replica runs,
    assert run.results() == [
        {
            "WANDB_KEY": "the-key-of-wandb",
            "AWS_SECRET_ACCESS_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            "MINE": "my-own-value",
        }
    ]
    values = ["the-key-of-wandb", TOKEN_SECRET, *CREDENTIALS.values()]
    # and nowhere else: not in what the vendor is asked,
    assert {value: modal_runs.requests_carrying(value) for value in values} == {value: [] for value in values}
    # nor in the store, but for the result, which the test itself returned,
    store = open_store(s3.url("runs"))
    kept = {entry.key: bytes(store.get(entry.key)).decode(errors="replace") for entry in store.list("")}
    assert [key for key, text in kept.items() if any(value in text for value in (*values, "my-own-value"))] == [
        f"{run.run_id}/replicas/0000/0/outcome.json"
    ]
    # nor on the command line, in handles, or in what is printed.
    (sandbox,) = modal_runs.sandboxes
    shown = [*sandbox.definition.entrypoint_args, repr(run), repr(run.handles), repr(run.executor), *capfd.readouterr()]
    assert not any(value in text for text in shown for value in (*values, "my-own-value"))


def test_a_secret_that_modal_does_not_have_is_refused_before_anything_starts(modal_runs: ModalServer) -> None:
    with pytest.raises(BackendError, match=r"Modal has no secret 'wandb'. Make it with: modal secret create wandb "):
        launch("modal", task("echo"), 2, secrets=["wandb"])
    assert started_nothing(modal_runs)


def test_a_dry_run_shows_the_requests_and_starts_nothing(modal_runs: ModalServer, s3: S3Server) -> None:
    modal_runs.secrets["wandb"] = {"WANDB_KEY": "the-key-of-wandb"}
    plan = plan_launch(
        ModalExecutor(region="us-east"), task("echo"), 2, secrets=["wandb"], env={"MINE": "my-own-value"}, gpu="H100"
    )
    shown = rehearse(plan)
    text = json.dumps(shown)
    jobs: list[Mapping[str, Any]] = shown["request"]["jobs"]
    assert shown["request"]["vendor"] == "Modal"
    assert [job["env"]["REPLICA_RANK"] for job in jobs] == ["0", "1"]
    assert [(job["gpu"], job["region"], job["timeout"]) for job in jobs] == [("H100", "us-east", 3720)] * 2
    assert jobs[0]["env"]["MINE"] == "***"
    assert jobs[0]["secrets"] == ["wandb", dict.fromkeys(CREDENTIALS, "***")]
    assert not any(value in text for value in ("my-own-value", "the-key-of-wandb", *CREDENTIALS.values()))
    assert started_nothing(modal_runs)
    assert list(open_store(s3.url("runs")).list("")) == []


# What is missing


def test_a_missing_sdk_is_said_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "modal", None)
    with pytest.raises(MissingDependencyError) as caught:
        launch("modal", task("echo"), 1)
    assert str(caught.value) == (
        "Backend 'modal' needs the Modal SDK. Install it with: pip install 'serverless-replicas[modal]'"
    )
    assert isinstance(caught.value, ImportError)


def test_a_missing_rendezvous_is_said_with_the_whole_command(
    modal_runs: ModalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REPLICAS_RENDEZVOUS")
    with pytest.raises(BackendError) as caught:
        launch("modal", "train.py:main", 8)
    assert str(caught.value) == (
        "Backend 'modal' needs a rendezvous that both sides reach. Try: replicas launch train.py:main --backend modal "
        "--n 8 --rendezvous s3://BUCKET/PREFIX (or set REPLICAS_RENDEZVOUS)."
    )


@pytest.mark.parametrize("missing", ["MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"])
def test_a_missing_token_is_said_before_anything_is_written(
    modal_runs: ModalServer, s3: S3Server, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.delenv(missing)
    with pytest.raises(BackendError) as caught:
        launch("modal", task("echo"), 1)
    assert str(caught.value) == (
        "Backend 'modal' needs a Modal token. Run: modal token new (or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET)."
    )
    assert list(open_store(s3.url("runs")).list("")) == []


def test_a_token_that_modal_refuses_is_said_before_anything_is_written(modal_runs: ModalServer, s3: S3Server) -> None:
    modal_runs.token = ("ak-another", "as-another")
    with pytest.raises(BackendError, match=r"Modal: Token ID or token secret is invalid. Run: modal token new"):
        launch("modal", task("echo"), 1)
    assert list(open_store(s3.url("runs")).list("")) == []


def test_more_than_a_day_is_refused(modal_runs: ModalServer) -> None:
    with pytest.raises(ValueError, match=r"at most 86280 seconds on Modal, got timeout=90000\..*replicas resume"):
        launch("modal", task("echo"), 1, timeout=90_000)


def test_in_a_notebook_where_an_event_loop_runs_nothing_complains(modal_runs: ModalServer, gpu: str | None) -> None:
    async def cell() -> list[Any]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run = launch(ModalExecutor(), task("talk"), 1, args={"n_lines": 3}, gpu=gpu)
            results = run.results()
            assert "line 2" in run.logs(rank=0)
            run.cancel()
            return results

    assert asyncio.run(cell()) == ["said"]
