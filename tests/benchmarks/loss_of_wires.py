"""The cost of wires and overlaps in loss (W6): the goals of the table of docs/how-to/slow-links.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .harness import Comparison, Options

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "compare_wires.py"
INNER_STEPS = (10, 20)
GOALS = {
    "int8": 0.3,
    "int4": 0.5,
    "top8": 1.0,
    "top8, each": 1.0,
    "carry, overlap H/5": 0.5,
    "carry, overlap H/2": 2.5,
    "carry, fragments": 1.0,
}
BASE = "fp32"


def loss_of_wires(options: Options) -> list[Comparison]:
    """W6."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        few = ["--steps", "20", "--only", "int8"] if options.quick else []
        seeds = ["--seeds", str(options.repetitions(3))]
        command = [sys.executable, str(EXAMPLE), "--json", file.name, *seeds, *few]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
        runs = json.loads(Path(file.name).read_text())["runs"]  # the example has replaced the file
    return [_compared(h, [run for run in runs if run["inner_steps"] == h]) for h in INNER_STEPS]


def _compared(inner_steps: int, runs: list[dict[str, Any]]) -> Comparison:
    by_setting: dict[str, dict[int, float]] = {}
    for run in runs:
        by_setting.setdefault(run["setting"], {})[run["seed"]] = run["loss"]
    base = by_setting.pop(BASE)
    more = {name: [100 * (loss[s] / base[s] - 1) for s in sorted(base)] for name, loss in by_setting.items()}
    goals = {name: most for name, most in GOALS.items() if name in more}
    title = f"the demo's transformer, 4 replicas, H={inner_steps}: held-out loss above that of {BASE}"
    return Comparison("W6", title, "%", more, goals=goals)
