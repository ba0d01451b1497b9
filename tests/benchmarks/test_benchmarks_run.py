"""Each benchmark runs at toy size and writes its comparisons. These tests check no times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from servers.slurm.cluster import Cluster

from benchmarks.__main__ import main
from benchmarks.harness import Comparison, Options
from benchmarks.rounds import MEMORY, can_mount

ROOT = Path(__file__).parents[2]
PEERS = {
    "L5": "multiprocessing forkserver",
    "S1": "gloo all_reduce",
    "S5": "the payload, sharded: (3 - 1/N) M",
    "S8": None,
    "S6": None,
    "S9": None,
    "S10": "reading one object after the other",
    "O1": "torch.optim.SGD(nesterov, foreach), then a digest of its state",
    "O2": None,
    "Q1": None,
    "Q2": None,
    "Q3": None,
    "Q4": None,
    "P4": None,
    "P5": None,
    "M1": None,
    "M2": None,
    "M3": None,
    "R3": None,
    "R4": None,
    "R5": None,
    "R6": None,
    "R10": None,
    "C1": None,
    "D1": None,
    "D2": None,
    "D3": None,
    "W1": None,
    "W2": "alone",
    "W3": "fp32",
    "W4": "fp32",
    "W5": "fp32",
    "W7": None,
    "W10": None,
    "W11": "int8",
}
Found = dict[str, list[dict[str, Any]]]
pytestmark = pytest.mark.timeout(300)


def run_benchmarks(file: Path, *arguments: str) -> Found:
    """Run the command at toy size, and return its comparisons by name."""
    command = [sys.executable, "-m", "tests.benchmarks", "--quick", "--json", str(file), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    document = json.loads(file.read_text())
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["versions"]["torch"]
    found: Found = {}
    for comparison in document["comparisons"]:
        found.setdefault(comparison["name"], []).append(comparison)
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Run all quick benchmarks in one process, because the import of torch takes the most time."""
    return run_benchmarks(tmp_path_factory.mktemp("benchmarks") / "found.json", *PEERS)


def test_every_benchmark_runs_with_its_peer(found: Found) -> None:
    assert found.keys() == PEERS.keys()
    for name, peer in PEERS.items():
        assert found[name][-1]["base"] == peer, name
        # A look may need no request to the service, and no job may be lost.
        samples = [method["samples"] for method in found[name][-1]["methods"].values()]
        assert all(
            each and all(sample > 0 or name in ("Q1", "R5", "R6", "R10") for sample in each) for each in samples
        ), name


def test_a_round_moves_exactly_the_bytes_that_the_protocol_says(found: Found) -> None:
    methods = found["S8"][-1]["methods"]
    assert {way: row["median"] for way, row in methods.items()} == {"read": 1.0, "written": 1.5}, (
        "each of two replicas reads 1 and writes 1.5 times the model"
    )


def test_replicas_are_exactly_alike_and_data_parallel_up_to_rounding(found: Found) -> None:
    different, apart = found["C1"]
    assert [row["max"] for row in different["methods"].values()] == [0.0]
    assert all(0 < row["max"] <= 1 for row in apart["methods"].values())


@pytest.mark.slow
def test_the_loss_of_wires_and_the_time_of_signatures_are_measured(tmp_path: Path) -> None:
    found = run_benchmarks(tmp_path / "found.json", "W6", "W8")
    assert {name: rows[-1]["base"] for name, rows in found.items()} == {"W6": None, "W8": "unsigned"}


@pytest.mark.slow
def test_goodput_recovery_and_utilization_are_measured(tmp_path: Path) -> None:
    found = run_benchmarks(tmp_path / "found.json", "R7", "R8", "R9", "W12")
    bases = {name: rows[-1]["base"] for name, rows in found.items()}
    assert bases == {"R7": None, "R8": None, "R9": "goal: bytes / link + 1 s", "W12": None}
    for row in found["R9"]:
        parts = {name: method["median"] for name, method in row["methods"].items()}
        goal = parts.pop("goal: bytes / link + 1 s")
        assert goal > 1
        assert parts.pop("all") == pytest.approx(sum(parts.values()), rel=0.01), "the parts make up the restart"


@pytest.mark.slurm
def test_launching_at_slurm_is_measured(slurm: Cluster, tmp_path: Path) -> None:
    found = run_benchmarks(tmp_path / "found.json", "E1")
    assert sorted(found) == ["E1", "E2", "E3"]


@pytest.mark.slow
def test_replicas_of_several_processes_are_compared_with_torchrun(tmp_path: Path) -> None:
    found = run_benchmarks(tmp_path / "found.json", "P1", "P2", "P6")
    assert {name: rows[-1]["base"] for name, rows in found.items()} == {
        "P1": "torchrun",
        "P2": "torchrun",
        "P3": "torchrun",
        "P6": None,
    }
    assert found["P6"][-1]["note"].endswith("2 of 2")


@pytest.mark.slow
def test_launching_with_torch_is_compared_with_torchrun(tmp_path: Path) -> None:
    found = run_benchmarks(tmp_path / "found.json", "L1", "L6", "R1")
    assert sorted(found) == ["L1", "L3", "L4", "L6", "R1", "R2"]
    assert all(found[name][-1]["base"] == "torchrun" for name in ("L1", "L3", "L4", "L6", "R1"))


def test_an_unknown_benchmark_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["L9"])
    assert "L9" in capsys.readouterr().err


def test_a_benchmark_that_fails_is_named_at_the_end_and_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(options: Options) -> list[Comparison]:
        raise OSError("no such mount")

    def measures(options: Options) -> list[Comparison]:
        return [Comparison("Z2", "a row", "s", {"ours": [1.0]})]

    monkeypatch.setattr("benchmarks.__main__.BENCHMARKS", {("Z1",): fails, ("Z2",): measures})
    with pytest.raises(SystemExit, match="These benchmarks failed, see above: Z1"):
        main(["--json", str(tmp_path / "found.json")])
    assert "no such mount" in capsys.readouterr().err
    assert [row["name"] for row in json.loads((tmp_path / "found.json").read_text())["comparisons"]] == ["Z2"]


@pytest.mark.skipif(not can_mount(), reason="this user cannot mount")
def test_a_mount_of_a_benchmark_hides_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "checkout").write_text("here")
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [*MEMORY.around, "sh", "-c", 'cat "$1/checkout" && test -w "$TMPDIR" && exit 7', "sh", str(tmp_path)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("here", 7)
    assert [path.name for path in tmp_path.iterdir()] == ["checkout"]
