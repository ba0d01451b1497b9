"""Measures how small wires and overlapping rounds change the loss: makes the tables of docs/how-to/slow-links.md.

    python examples/compare_wires.py                                  # 84 runs of half a minute of a core
    python examples/compare_wires.py --only int8 int4 --seeds 5 --steps 2000 --inner-steps 50
    python examples/compare_wires.py --only top8 --json measured.json # continues an interrupted measurement
    python examples/compare_wires.py --bytes                          # the table of bytes, without any run

Each run trains the demo's transformer. The replicas take turns in one process and exchange averages in its memory. With
one seed, all settings see the same batches, so only the setting differs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from diloco import DiLoCo
from diloco.demo import OUTER_LR, OUTER_MOMENTUM, Inner, held_out_loss, load_text
from diloco.in_processes import in_processes
from diloco.planner import Link, Processor, cost_of_round
from executors.store import MemoryStore

BASE = "fp32"
REPLICAS = (2, 4, 8, 16)
MANY_VALUES = 1 << 30
"""The values of a model in which heads and other small objects are a negligible part of all bytes."""
text = cache(load_text)


def settings(inner_steps: int) -> dict[str, dict[str, Any]]:
    """Return the settings to compare, by name.

    With int4, means are encoded as int8, and with top8 as int4. Fragments overlap with all steps but one.

    Args:
        inner_steps: steps from one round to the next.
    """
    half, fragments = inner_steps // 2, 4 if inner_steps % 4 == 0 else 5
    in_turn = {"fragments": fragments, "overlap_steps": inner_steps // fragments - 1, "merge": "carry"}
    return {
        BASE: {},
        "bf16": {"wire": "bf16"},
        "int8": {"wire": "int8"},
        "int4": {"wire": "int4"},
        "top8": {"wire": "top8"},
        "top8, each": {"wire": "top8", "mean_wire": "each"},
        "carry, overlap H/5": {"overlap_steps": inner_steps // 5, "merge": "carry"},
        "anchor, overlap H/5": {"overlap_steps": inner_steps // 5},
        "carry, overlap H/2": {"overlap_steps": half, "merge": "carry"},
        "anchor, overlap H/2": {"overlap_steps": half},
        "carry, fragments": in_turn,
        "anchor, fragments": {**in_turn, "merge": "anchor"},
        "carry, fragments, int4": {**in_turn, "wire": "int4"},
        "carry, overlap H/2, top8": {"overlap_steps": half, "merge": "carry", "wire": "top8"},
    }


@dataclass(frozen=True)
class Trained:
    """One run and its result.

    Attributes:
        setting: the name of the setting.
        inner_steps: steps from one round to the next.
        seed: the seed of the model and the batches.
        steps: inner steps of each replica.
        batch: windows per step and replica.
        n: the number of replicas.
        loss: the loss on the held-out text, in nats per byte.
        n_bytes: the bytes that one replica has sent and read.
    """

    setting: str
    inner_steps: int
    seed: int
    steps: int
    batch: int
    n: int
    loss: float
    n_bytes: int

    @property
    def arguments(self) -> tuple[str, int, int, int, int, int]:
        """The arguments of `train` that made this run."""
        return self.setting, self.inner_steps, self.seed, self.steps, self.batch, self.n


def train(setting: str, inner_steps: int, seed: int, steps: int, batch: int, n: int) -> Trained:
    """Train n replicas in turn: each makes an inner step, then all count it.

    Args:
        setting: the name of the setting.
        inner_steps: steps from one round to the next.
        seed: the seed of the model and the batches.
        steps: inner steps of each replica.
        batch: windows per step and replica.
        n: the number of replicas.
    """
    torch.set_num_threads(1)
    inners = [Inner(text(), rank, n, steps=steps, batch=batch, seed=seed) for rank in range(n)]
    shared = {
        "inner_steps": inner_steps,
        "total_steps": steps,
        "outer_lr": OUTER_LR,
        "outer_momentum": OUTER_MOMENTUM,
        "store": MemoryStore(),
        "run_id": "compared",
        "world_size": n,
        **settings(inner_steps)[setting],
    }
    n_bytes = 0
    with ThreadPoolExecutor(n) as at_once:  # in a round, replicas wait for each other
        replicas = list(at_once.map(lambda rank: DiLoCo(inners[rank].model, rank=rank, **shared), range(n)))
        for step in range(steps):
            for inner in inners:
                inner.step(step)
            for report in at_once.map(DiLoCo.step, replicas):
                if report is not None:
                    assert len(report.ranks) == n, f"a replica is not in the round: {report}"
                    n_bytes += report.bytes_up + report.bytes_down
        list(at_once.map(DiLoCo.close, replicas))
    inners[0].model.load_state_dict(replicas[0].anchor(), strict=False)
    loss = held_out_loss(inners[0].model, text())
    return Trained(setting, inner_steps, seed, steps, batch, n, loss, n_bytes // n)


def read_results(path: Path) -> list[Trained]:
    """Return the runs of a file that `write_results` wrote. A file that is missing or empty has none.

    Args:
        path: the file.
    """
    data = path.read_text() if path.exists() else ""
    return [Trained(**run) for run in json.loads(data)["runs"]] if data else []


def write_results(path: Path, runs: Sequence[Trained], command: str) -> None:
    """Write the runs, one line for each, and the conditions of the measurement.

    Args:
        path: the file. It is replaced as a whole, so an interruption leaves the old or the new one.
        runs: all finished runs.
        command: the command that made the last of them.
    """
    about = {
        "about": "Held-out losses (nats per byte) of the demo's transformer by wire and overlap. Lower is better.",
        "command": command,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        },
    }
    lines = ",\n".join(f"  {json.dumps(asdict(run))}" for run in sorted(runs, key=lambda run: run.arguments))
    head = json.dumps(about, indent=1).removesuffix("\n}")
    written = path.with_name(f"{path.name}.new")
    written.write_text(f'{head},\n "runs": [\n{lines}\n ]\n}}\n')
    written.replace(path)


def table(found: Sequence[Trained], inner_steps: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a table: the mean over the seeds, relative to fp32, with the smallest and the largest value.

    Args:
        found: the finished runs.
        inner_steps: the values of H, one column for each.
    """
    by_run = {(run.setting, run.inner_steps, run.seed): run for run in found}
    names = [name for name in settings(inner_steps[0]) if any(run.setting == name for run in found)]
    yield " | ".join(["| loss, held out", *(f"H = {h}" for h in inner_steps), "bytes |"])
    yield "|---" * (len(inner_steps) + 2) + "|"
    for name in names:
        cells, shares = [], []
        for h in inner_steps:
            runs = [run for run in found if (run.setting, run.inner_steps) == (name, h)]
            pairs = [(run, by_run[BASE, h, run.seed]) for run in runs if (BASE, h, run.seed) in by_run]
            shares += [run.n_bytes / base.n_bytes for run, base in pairs]
            cells.append(_cell(name, pairs))
        yield " | ".join([f"| {name}", *cells, f"{fmean(shares):.0%} |" if shares else "|"])


def _cell(name: str, pairs: Sequence[tuple[Trained, Trained]]) -> str:
    """Return a cell of `table` from the runs of a setting, each with the run of fp32 and the same seed."""
    if not pairs:
        return ""
    if name == BASE:
        return f"{fmean(run.loss for run, _ in pairs):.4f}"
    more = [100 * (run.loss / base.loss - 1) for run, base in pairs]
    spread = f" ({min(more):+.2f} … {max(more):+.2f})" if len(more) > 1 else ", one seed"
    return f"{fmean(more):+.2f} %{spread}"


def bytes_table() -> Iterator[str]:
    """Yield the lines of a table: for each wire, the bytes that a replica sends and reads in a round, per value.

    `replicas plan` computes the same bytes. The factor in parentheses is the number of times that fp32 moves more.
    """
    yield " | ".join(["| bytes per value, up + down", *(f"N = {n}" for n in REPLICAS)]) + " |"
    yield "|---" * (len(REPLICAS) + 1) + "|"
    wires = {"fp32": None, "bf16": None, "int8": None, "int4": None, "top8": None, "top8, each": "each"}
    for name, mean_wire in wires.items():
        cells = []
        for n in REPLICAS:
            up, down = _bytes_per_value(name.partition(",")[0], mean_wire, n)
            times = sum(_bytes_per_value(BASE, None, n)) / (up + down)
            cells.append(f"{up:.2f} + {down:.2f}" + (f" ({times:.1f})" if name != BASE else ""))
        yield " | ".join([f"| {name}", *cells]) + " |"


def _bytes_per_value(wire: str, mean_wire: str | None, n: int) -> tuple[float, float]:
    """Return the bytes that a replica sends and reads in a round, for each value of a large model."""
    link = Link(up=1e9, down=1e9, latency_s=0.0)
    cost = cost_of_round(MANY_VALUES, n, wire, mean_wire, link, Processor())
    return cost.up / MANY_VALUES, cost.down / MANY_VALUES


def _train(arguments: tuple[str, int, int, int, int, int]) -> Trained:
    return train(*arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare wires and overlaps by the loss that they end with.")
    parser.add_argument("--only", nargs="+", default=[""], metavar="WORD", help="only settings with one of these words")
    parser.add_argument(
        "--inner-steps",
        nargs="+",
        type=int,
        default=[10, 20],
        metavar="H",
        help="steps between rounds; default 10 and 20",
    )
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N - 1; default 3")
    parser.add_argument("--steps", type=int, default=600, metavar="N", help="inner steps of each replica; default 600")
    parser.add_argument("--batch", type=int, default=2, metavar="N", help="windows per step and replica; default 2")
    parser.add_argument("--replicas", type=int, default=4, metavar="N", help="number of replicas; default 4")
    parser.add_argument(
        "--processes", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="default: one per core"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write each finished run to this file, and do not repeat runs that the file has",
    )
    parser.add_argument("--bytes", action="store_true", help="print the table of bytes, and train nothing")
    chosen = parser.parse_args(arguments)
    if chosen.bytes:
        print(*bytes_table(), sep="\n")
        return
    names = [name for name in settings(20) if name == BASE or any(word in name for word in chosen.only)]
    wanted = [
        (name, h, seed, chosen.steps, chosen.batch, chosen.replicas)
        for seed in range(chosen.seeds)
        for h in chosen.inner_steps
        for name in names
    ]
    found = read_results(chosen.json) if chosen.json is not None else []
    has_run = {run.arguments for run in found}
    command = shlex.join(["python", "examples/compare_wires.py", *(sys.argv[1:] if arguments is None else arguments)])
    left = [each for each in wanted if each not in has_run]
    for run in in_processes(_train, left, chosen.processes):
        found.append(run)
        print(f"H = {run.inner_steps}, seed {run.seed}, {run.setting}: {run.loss:.4f}", file=sys.stderr, flush=True)
        if chosen.json is not None:
            write_results(chosen.json, found, command)
    print(*table([run for run in found if run.arguments in set(wanted)], chosen.inner_steps), sep="\n")


if __name__ == "__main__":
    main()
