"""Each benchmark runs at toy size and writes what it should; nothing here looks at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_benchmarks(file: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Run the command at toy size; return its comparisons by name, the last of each name."""
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--json", str(file), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["versions"]["torch"]
    return {comparison["name"]: comparison for comparison in document["comparisons"]}


@pytest.mark.parametrize(
    ("names", "peers"),
    [
        (("L5",), ["multiprocessing forkserver"]),
        (("S1", "S5", "S8"), ["gloo all_reduce", "the payload, sharded: (3 - 1/N) M", None]),
        (("S6",), [None]),
        (("S9", "S10"), [None, "reading one object after the other"]),
        (("O1", "O2"), ["floor: read and write two buffers, read one", None]),
    ],
)
def test_a_benchmark_runs_beside_its_peer(tmp_path: Path, names: tuple[str, ...], peers: list[str | None]) -> None:
    found = run_benchmarks(tmp_path / "found.json", *names)
    assert sorted(found) == sorted(names)
    for name, peer in zip(names, peers, strict=True):
        assert found[name]["base"] == peer
        for method in found[name]["methods"].values():
            assert method["samples"]
            assert all(sample > 0 for sample in method["samples"])
    if "S8" in found:  # counted, not timed: exactly what the protocol says, for two replicas
        assert {way: row["median"] for way, row in found["S8"]["methods"].items()} == {"read": 1.0, "written": 1.5}


def test_replicas_are_exactly_alike_and_data_parallel_up_to_rounding(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--json", str(tmp_path / "found.json"), "C1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    different, apart = json.loads((tmp_path / "found.json").read_text())["comparisons"]
    assert [row["max"] for row in different["methods"].values()] == [0.0]
    assert all(0 < row["max"] <= 1 for row in apart["methods"].values())


@pytest.mark.slow
def test_launching_with_torch_is_compared_with_torchrun(tmp_path: Path) -> None:
    found = run_benchmarks(tmp_path / "found.json", "L1")
    assert sorted(found) == ["L1", "L3", "L4"]
    assert all(comparison["base"] == "torchrun" for comparison in found.values())


def test_an_unknown_benchmark_is_named() -> None:
    command = [sys.executable, "-m", "tests.benchmarks", "L9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "L9" in done.stderr
