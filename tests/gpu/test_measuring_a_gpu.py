"""The measurements for a GPU run on a CPU with small models, so that a first run on a GPU does not fail for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.measure import PARTS, run_part

SCRIPT = Path(__file__).with_name("run.sh")
PART = """
import json, os, sys, time
name, file, limit_s = sys.argv[1:]
with open(file, "w") as out:
    json.dump({"first": 1}, out)
if name == "hangs":
    time.sleep(600)
os._exit(3 if name == "fails" else 0)
"""


@pytest.mark.timeout(1200)  # the script starts some twenty processes that import torch
@pytest.mark.usefixtures("state_home")
def test_the_script_for_a_gpu_measures_each_part_on_a_cpu(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHON": sys.executable, "REPLICAS_GPU_SMALL": "1"}
    done = subprocess.run(["bash", SCRIPT, tmp_path], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert [name for name in PARTS if "error" in measured[name]] == []
    assert all(measured["overlap"][merge]["ratio"] > 0 for merge in ("anchor", "carry"))
    split = {"whole_s", "called_s", "device_s", "text_s", "built_s", "anchor_s", "optimizer_s", "step_s", "read_s"}
    assert set(measured["restart"]["after_a_kill"]) >= split
    assert set(measured["restart"]["after_an_error_in_the_same_process"]) >= split
    results = measured["training"]["results"]
    assert [result["counted"] for result in results] == [result["rounds"] for result in results] == [2, 2]
    assert measured["training"]["together"]["steps"] == results[0]["steps"]


@pytest.mark.parametrize(
    ("name", "limit_s", "error"),
    [
        ("works", 60.0, None),
        ("fails", 60.0, "The process of this part ended with code 3. The log has the reason."),
        ("hangs", 5.0, "This part did not end within 5 s. The log has the stacks of its threads."),
    ],
)
def test_a_part_that_fails_or_hangs_keeps_its_first_figures(
    name: str, limit_s: float, error: str | None, tmp_path: Path
) -> None:
    found = run_part(name, limit_s, tmp_path / "part.json", [sys.executable, "-S", "-c", PART])
    del found["part_s"]
    assert found == {"first": 1, **({} if error is None else {"error": error})}


def test_without_its_packages_the_script_names_what_to_bring(tmp_path: Path) -> None:
    (tmp_path / "tests/gpu").mkdir(parents=True)
    copy = tmp_path / "tests/gpu/run.sh"
    copy.write_text(SCRIPT.read_text())
    environ = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    (tmp_path / "diloco.py").write_text("raise ImportError('xxhash is missing.')")
    done = subprocess.run(["bash", copy], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    log = (tmp_path / "out/log.txt").read_text()
    assert "xxhash is missing." in log
    assert "Run tests/gpu/fetch_wheels.sh on a machine with a network" in log
