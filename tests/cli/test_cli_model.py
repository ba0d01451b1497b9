"""`replicas model` writes the trained model of a run to a file, on any machine, during the run and after it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from servers.s3.server import S3Server
from support.chaos_tasks import closed_gates, train
from support.cli import HereInstead

from executors import LocalProcessExecutor, Run, attach, launch
from executors.errors import MissingDependencyError
from executors.run.run import view_of
from executors.store.run_key import RUN_KEY, key_file
from executors.testing import eventually

LOCAL = LocalProcessExecutor(term_grace_s=0.5)


def trained(folder: Path, run_id: str = "mine", **more: object) -> Run:
    args = {"folder": str(folder), "rounds": 8, "snapshot_every": 3}
    run = launch(LOCAL, train, 2, args=args, seed=1, run_id=run_id, **more)  # type: ignore[arg-type]
    run.results()
    return run


def test_the_file_has_the_model_and_the_command_prints_its_round(here: HereInstead, tmp_path: Path) -> None:
    run = trained(tmp_path)
    done = here.replicas("model", "mine", "--out", tmp_path / "m.safetensors")
    assert done.code == 0, done
    assert "It is the model of mine after round 8, step " in done.stdout
    found = load_file(tmp_path / "m.safetensors")
    again = run.model()
    assert found.keys() == again.keys()
    assert all(torch.equal(values, again[name]) for name, values in found.items())
    document = here.replicas("model", "mine", "-o", tmp_path / "m.safetensors", "--round", 7, "--json").json
    assert (document["rounds"], document["missing"], set(document["tensors"])) == (7, {}, set(found))


def test_a_model_that_is_not_available_is_an_error_and_writes_no_file(here: HereInstead, tmp_path: Path) -> None:
    trained(tmp_path)
    file = tmp_path / "m.safetensors"
    for options, says in (
        (("--step", 0), "Available: steps "),
        (("--name", "other"), "It has: main"),
        (("--dtype", "half"), "--dtype must be live or float32"),
        (("--step", -1), "-1"),
    ):
        done = here.replicas("model", "mine", "--out", file, *options)
        assert done.code == 2
        assert says in done.stderr
        assert not file.exists()
    done = here.replicas("model", "mine", "--out", tmp_path / "none" / "m.safetensors")
    assert done.code == 2
    assert "Cannot write to" in done.stderr
    launch(LOCAL, "job:main", 1, run_id="other").wait()
    done = here.replicas("model", "other", "--out", file)
    assert "train without DiLoCo" in done.stderr


def test_a_run_at_a_bucket_is_read_by_its_address_and_a_signed_one_with_its_key(
    here: HereInstead, tmp_path: Path, s3: S3Server, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path, rendezvous=s3.url("runs"), signed=True)
    assert run.model().keys()
    key = key_file("mine").read_text()
    shutil.rmtree(state_home)  # another machine
    done = here.replicas("model", run.url, "--out", tmp_path / "m.safetensors")
    assert done.code == 2
    assert RUN_KEY in done.stderr
    monkeypatch.setenv(RUN_KEY, key)
    assert here.replicas("model", run.url, "--out", tmp_path / "m.safetensors").code == 0
    assert attach(run.url).model().keys() == load_file(tmp_path / "m.safetensors").keys()


def test_the_ends_of_launch_and_collect_name_the_command_for_the_model_and_the_artifacts(
    here: HereInstead, tmp_path: Path
) -> None:
    trained(tmp_path)
    line = "Get the model: replicas model mine --out model.safetensors"
    assert line in here.replicas("wait", "mine").stdout
    assert line in here.replicas("collect", "mine", "--out", tmp_path / "out").stdout
    launch(LOCAL, "job:keep", 1, run_id="other").wait()
    told = here.replicas("collect", "other", "--out", tmp_path / "others")
    assert "\n  0/artifacts/model/weights.txt\n" in told.stdout
    assert "The model:" not in told.stdout


def test_without_torch_the_message_names_the_package(tmp_path: Path) -> None:
    trained(tmp_path)
    code = """
import sys
sys.modules["torch"] = None
from executors import attach
from executors.errors import MissingDependencyError
try:
    attach("mine").model()
except MissingDependencyError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "without the package 'torch'" in done.stdout
    assert MissingDependencyError.__mro__


def test_a_run_is_extended_after_its_success_and_add_and_resume_say_how(here: HereInstead, tmp_path: Path) -> None:
    trained(tmp_path)
    refused = here.replicas("resume", "mine")
    assert (
        "no replica to resume: 2 succeeded. To train it further: replicas resume mine --total-steps N" in refused.stderr
    )
    assert "Extend it first: replicas resume mine --total-steps N" in here.replicas("add", "mine", "--n", 1).stderr
    for options, says in (
        (("--total-steps", 40), "--total-steps must be more: got 40"),
        (("--total-rounds", 50), "use --total-steps instead of --total-rounds"),
        (("--total-steps", 50, "--total-rounds", 50), "not both"),
    ):
        refused = here.replicas("resume", "mine", *options)
        assert (refused.code, says in refused.stderr) == (2, True), refused
    extended = here.replicas("resume", "mine", "--total-steps", 65)
    assert extended.code == 0, extended
    assert "extended to 65 steps" in extended.stdout
    assert "extended from 40 to 65 steps" in here.replicas("logs", "mine", "--rank", 1).stdout
    done = here.replicas("model", "mine", "--out", tmp_path / "m.safetensors", "--json").json
    assert (done["rounds"], done["step"]) == (13, 65)
    refused = here.replicas("resume", "mine", "--total-steps", 50)
    assert "was extended to total_steps=65 already, got total_steps=50" in refused.stderr


def test_a_run_that_trains_is_extended_without_a_restart(here: HereInstead, tmp_path: Path) -> None:
    args = {"folder": str(tmp_path / "gates"), "rounds": 6, "gates": [3]}
    with closed_gates(tmp_path / "gates", [3]) as open_gate, launch(LOCAL, train, 2, args=args, run_id="mine") as run:
        eventually(lambda: all(state.reported.get("round") == 3 for state in run.status().replicas))
        told = here.replicas("resume", "mine", "--total-steps", 50)
        assert told.code == 0, told
        assert "Its replicas continue when they reach their old total" in told.stdout
        open_gate(3)
        run.results()
        assert {replica.attempt for replica in run.status().replicas} == {0}
    assert here.replicas("model", "mine", "--out", tmp_path / "m", "--json").json["step"] == 50


def test_a_rank_that_was_cancelled_on_purpose_does_not_change_the_result_of_the_others(
    here: HereInstead, tmp_path: Path
) -> None:
    run = launch(LOCAL, "job:hang", 2, args={"ranks": [1]}, run_id="mine")
    eventually(lambda: "hanging" in run.logs(1))
    assert here.replicas("cancel", "mine", "--rank", 1).code == 0
    ended = here.replicas("wait", "mine")
    assert ended.code == 0, ended
    assert "Rank 1 was cancelled with `cancel --rank`" in ended.stdout
    assert run.results() == [None, None]
    with launch(LOCAL, "job:hang", 2, run_id="all") as other:
        eventually(lambda: all("hanging" in other.logs(rank) for rank in range(2)))
        for rank in range(2):
            here.replicas("cancel", "all", "--rank", rank)
        assert here.replicas("wait", "all").code == 130


def test_a_run_starts_from_another_ones_model_in_another_store(
    here: HereInstead, tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = trained(tmp_path, rendezvous=s3.url("runs"), signed=True)
    (here.folder.path / "tuned.py").write_text(
        "from support.chaos_tasks import train\n\ndef main(folder):\n    return train(folder, rounds=2)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    options = ("tuned.py:main", "--n", 3, "--arg", f"folder={tmp_path}", "--from", source.url, "--run-id", "tuned")
    planned = here.replicas("launch", *options, "--dry-run").json
    assert planned["run_record"]["settings"]["from_run"] == source.url
    assert planned["run_record"]["key_id"] == view_of(source).record.key_id
    done = here.replicas("launch", *options)
    assert done.code == 0, done
    first = here.replicas("model", "tuned", "--round", 0, "--out", tmp_path / "first").code
    assert first == 0
    assert all(torch.equal(values, load_file(tmp_path / "first")[name]) for name, values in source.model().items())
    assert "starts from round 8, step 40, of run mine" in here.replicas("logs", "tuned").stdout


def test_a_source_that_cannot_be_used_is_refused_before_anything_is_written(here: HereInstead, tmp_path: Path) -> None:
    trained(tmp_path)
    launch(LOCAL, "job:main", 1, run_id="other").wait()
    for options, says in (
        (("--from", "none"), "No run 'none' is known"),
        (("--from", "other"), "has no model to start from"),
        (("--from", "mine", "--from-step", 1), "no longer has the state of step 1"),
        (("--from", "mine", "--signed"), "is not signed, so nothing proves its model"),
        (("--from-step", 1), "--from-step"),
    ):
        refused = here.replicas("launch", "job:main", "--n", 1, "--run-id", "new", *options)
        assert (refused.code, says in refused.stderr) == (2, True), refused
        assert "new" not in {row["run_id"] for row in here.replicas("ls", "--json").json["runs"]}
