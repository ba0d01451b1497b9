"""The measurements for a GPU run on a CPU with small models, so that a first run on a GPU does not fail for nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("run.sh")


@pytest.mark.usefixtures("state_home")
def test_the_script_for_a_gpu_measures_each_part_on_a_cpu(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHON": sys.executable, "REPLICAS_GPU_SMALL": "1"}
    done = subprocess.run(["bash", SCRIPT, tmp_path], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    measured = json.loads((tmp_path / "measured.json").read_text())
    assert measured["overlap"]["ratio"] > 0
    assert set(measured["restart"]) >= {"whole_s", "imported_s", "device_s", "built_s", "loaded_s", "step_s"}
    assert None not in measured["training"]["results"]
