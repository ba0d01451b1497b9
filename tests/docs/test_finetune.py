"""The example `finetune`, from which users start, runs offline as its README describes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.cli import Folder

FINETUNE = Path(__file__).parents[2] / "examples" / "finetune"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # it takes a minute, mostly for imports


def test_the_profile_of_a_laptop_trains_evaluates_and_leaves_a_model_with_its_report(folder: Folder) -> None:
    pytest.importorskip("transformers")
    for file in FINETUNE.iterdir():
        if file.is_file():
            shutil.copy(file, folder.path)
    quick = ("--arg", "steps=40", "--arg", "inner_steps=8", "--arg", "max_characters=300000", "--run-id", "mine")
    result = folder.replicas("launch", "--profile", "laptop", *quick, "--json", environ={"HF_HUB_OFFLINE": "1"})
    assert result.code == 0, result
    first, second = (row["result"] for row in result.json["replicas"])
    assert first["model"] == second["model"], "all replicas end with the same model, bit for bit"
    assert first["loss"] == second["loss"] < 0.95 * first["loss_before"]
    assert "2 replicas trained a model of" in result.json["summary"]
    assert folder.replicas("collect", "mine", "--out", "kept").code == 0
    (report,) = (folder.path / "kept").rglob("report.md")
    assert report.read_text().count("\n| 40 | ") == 1, "the validation loss over time"
    assert {"model.safetensors", "tokenizer.json", "config.json"} <= {path.name for path in report.parent.iterdir()}


@pytest.mark.parametrize("profile", ["laptop", "modal", "hf"])
def test_every_profile_of_the_example_is_one_that_can_be_launched(folder: Folder, profile: str) -> None:
    shutil.copy(FINETUNE / "replicas.toml", folder.path)
    settings = folder.replicas("config", "--profile", profile, "--json").json["settings"]
    assert settings["backend"]["value"] == {"laptop": "local"}.get(profile, profile)
    assert ("rendezvous" in settings) == (profile != "laptop")
