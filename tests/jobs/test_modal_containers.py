"""Tests the images and volumes of replicas at Modal."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import modal
import pytest
from servers.modal.server import ModalServer
from servers.s3.server import CREDENTIALS, S3Server
from support.modal import create_of
from support.sandboxes import gpu

from executors import ModalExecutor, attach, launch
from executors.backends.jobs.service import START_LIMIT_S, JobKey, JobServiceError, JobSpec
from executors.backends.modal import BUILD_S, GPU_START_S
from executors.errors import BackendError
from executors.run.resume import resume
from executors.run.run import view_of
from executors.testing.executor_contract import task

__all__ = ["gpu"]  # a fixture


def images(server: ModalServer) -> list[str]:
    """The commands of every image that was asked for, in one text each."""
    return ["\n".join(call.request.image.dockerfile_commands) for call in server.calls_of("ImageGetOrCreate")]


def test_modal_installs_the_requirements_in_the_default_image_and_in_a_layer_on_top_of_the_users(
    modal_runs: ModalServer,
) -> None:
    Path("requirements.txt").write_text("einops==0.8.1\n./mine\n")
    launch(ModalExecutor(python_version="3.12"), task("echo"), 1, timeout=1).cancel()
    text = "\n".join(images(modal_runs))
    assert "einops==0.8.1" in text
    assert "torch==" in text
    assert "./mine" not in text, (
        "the image does not install a folder of the workspace, which does not exist during the build"
    )
    n_images = len(images(modal_runs))
    Path("requirements.txt").unlink()
    image = modal.Image.debian_slim("3.11").run_commands("echo made-by-the-user")
    launch(ModalExecutor(image=image), task("echo"), 1).cancel()
    asked = images(modal_runs)[n_images:]
    assert any("made-by-the-user" in text for text in asked)
    (layer,) = {text for text in asked if "torch==" in text}
    assert "made-by-the-user" not in layer
    assert len([line for line in layer.splitlines() if line.startswith("RUN ")]) == 1, "the requirements are one layer"
    n_images = len(images(modal_runs))
    launch(ModalExecutor(image=image), task("echo"), 1, run_id="again").cancel()
    assert layer in images(modal_runs)[n_images:], "the second image reuses the layer that Modal has built"


@pytest.mark.usefixtures("modal_runs")
def test_a_start_may_build_an_image_and_then_wait_for_a_machine(gpu: str | None) -> None:
    job = JobSpec(JobKey("s3://bucket/runs", "otter", 0, 0), (), ("einops",), {}, {}, gpu=gpu)
    assert ModalExecutor().service.start_limit_s(job) == BUILD_S + (GPU_START_S if gpu else START_LIMIT_S)


def test_the_default_image_has_git_where_a_requirement_comes_from_there_and_knows_the_users_indexes(
    modal_runs: ModalServer,
) -> None:
    Path("requirements.txt").write_text(
        "--extra-index-url https://download.pytorch.org/whl/cpu\ntorch==2.13.0+cpu\n"
        "mine @ git+https://example.com/mine.git\n"
    )
    launch(ModalExecutor(), task("echo"), 1, timeout=1).cancel()
    text = "\n".join(images(modal_runs))
    assert "apt-get install -y git" in text
    options = "--index-strategy=unsafe-best-match --extra-index-url=https://download.pytorch.org/whl/cpu"
    assert options in text
    assert "torch==2.13.0+cpu" in text
    Path("requirements.txt").write_text("einops\n")
    n_images = len(images(modal_runs))
    launch(ModalExecutor(), task("echo"), 1, timeout=1).cancel()
    text = "\n".join(images(modal_runs)[n_images:])
    assert "git" not in text
    assert "--index-strategy" not in text


def test_a_run_with_an_image_object_is_resumed_only_with_an_image_that_is_given_again(modal_runs: ModalServer) -> None:
    image = modal.Image.debian_slim("3.11").run_commands("echo made-by-the-user")
    run = launch(ModalExecutor(image=image), task("hang"), 1, run_id="otter")
    run.cancel()
    assert view_of(run).record.placements[0].unrecorded_options == ("image",)
    asked_again = r"with the option 'image' of backend 'modal'.*--backend modal --option image=…"
    for found in (attach("otter"), attach("otter", executor="modal"), attach("otter", executor=ModalExecutor())):
        with pytest.raises(ValueError, match=asked_again):
            resume(found)
    for given in (run, attach("otter", executor=ModalExecutor(image="python:3.11"))):
        resume(given).cancel()
    assert [outcome.attempt for outcome in attach("otter").outcomes()] == [2]


def test_volumes_and_buckets_are_mounted_and_a_volume_that_is_not_there_is_refused(
    modal_runs: ModalServer, s3: S3Server, gpu: str | None
) -> None:
    volumes = {"/data": "corpus", "/more": "s3://bucket-of-mine/some/prefix"}
    executor = ModalExecutor(volumes=volumes)
    with pytest.raises(BackendError, match=r"no volume 'corpus'\. Create it with: modal volume create corpus"):
        launch(executor, task("echo"), 1, gpu=gpu)
    assert modal_runs.sandboxes == []
    modal_runs.account.volumes.add("corpus")
    launch(executor, task("echo"), 1, gpu=gpu).cancel()
    (call,) = modal_runs.calls_of(create_of(gpu))
    (volume,), (bucket,) = call.request.definition.volume_mounts, call.request.definition.cloud_bucket_mounts
    assert (volume.mount_path, volume.volume_id) == ("/data", f"vo-{'corpus':0>22}")
    assert (bucket.mount_path, bucket.bucket_name, bucket.key_prefix) == ("/more", "bucket-of-mine", "some/prefix/")
    assert not modal_runs.requests_carrying(CREDENTIALS["AWS_SECRET_ACCESS_KEY"])
    for path, source in (("data", "corpus"), ("/data", "gs://bucket"), ("/", "corpus")):
        with pytest.raises(ValueError, match="volume"):
            launch(ModalExecutor(volumes={path: source}), task("echo"), 1)


def test_how_an_image_is_built_is_shown_on_stderr_and_one_that_exists_says_nothing(
    modal_runs: ModalServer, capfd: pytest.CaptureFixture[str]
) -> None:
    modal_runs.account.builder_says = ["Step 7: uv pip install", "Resolved 31 packages"]
    executor = ModalExecutor()
    launch(executor, task("echo"), 2).cancel()
    out, err = capfd.readouterr()
    assert "Resolved 31 packages" not in out
    assert err.count("Resolved 31 packages") >= 1
    launch(ModalExecutor(), task("echo"), 2).cancel()
    assert capfd.readouterr() == ("", "")


def test_output_of_other_code_while_an_image_is_built_stays_on_stdout(
    modal_runs: ModalServer, capfd: pytest.CaptureFixture[str]
) -> None:
    modal_runs.account.builder_says, modal_runs.account.builder_is_slow = ["Step 7: uv pip install"], True
    service = ModalExecutor().service
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(service.start, JobSpec(JobKey("s3://bucket/runs", "otter", 0, 0), ("true",), (), {}, {}))
        modal_runs.wait_for("ImageJoinStreaming")
        print("a thread of the user's", flush=True)
        modal_runs.account.builder_is_slow = False
        service.stop(starting.result())
    out, err = capfd.readouterr()
    assert out == "a thread of the user's\n"
    assert "Step 7: uv pip install" in err


def test_while_an_image_is_built_a_launch_can_be_interrupted(modal_runs: ModalServer) -> None:
    modal_runs.account.builder_says, modal_runs.account.builder_is_slow = ["Step 7: uv pip install"], True
    service = ModalExecutor().service
    jobs = [JobSpec(JobKey("s3://bucket/runs", "otter", rank, 0), ("true",), (), {}, {}) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        starting = [pool.submit(service.start, job) for job in jobs]
        modal_runs.wait_for("ImageJoinStreaming")
        service.interrupt_starts()
        for each in starting:
            with pytest.raises(JobServiceError, match="given up"):
                each.result(timeout=30)
    modal_runs.account.builder_is_slow = False
    assert modal_runs.sandboxes == []
    service.stop(service.start(jobs[0]))
