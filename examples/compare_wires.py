"""Measures how small wires and overlapping rounds change the loss: makes the table of docs/how-to/slow-links.md.

    python examples/compare_wires.py                                  # 84 runs of half a minute of a core
    python examples/compare_wires.py --only int8 int4 --seeds 5 --steps 2000 --inner-steps 50

Each run trains the demo's transformer. The replicas take turns in one process and exchange averages in its memory. With
one seed, all settings see the same batches, so only the setting differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from diloco import DiLoCo
from diloco.demo import OUTER_LR, OUTER_MOMENTUM, Inner, held_out_loss, load_text
from executors.store import MemoryStore

BASE = "fp32"
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
        loss: the loss on the held-out text, in nats per byte.
        n_bytes: the bytes that one replica has sent and read.
    """

    setting: str
    inner_steps: int
    seed: int
    loss: float
    n_bytes: int


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
    return Trained(setting, inner_steps, seed, held_out_loss(inners[0].model, text()), n_bytes // n)


def table(found: Sequence[Trained], inner_steps: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a table: the mean over the seeds, relative to fp32, with the smallest and the largest value.

    Args:
        found: the finished runs.
        inner_steps: the values of H, one column for each.
    """
    by_run = {(run.setting, run.inner_steps, run.seed): run for run in found}
    seeds = sorted({run.seed for run in found})
    names = [name for name in settings(inner_steps[0]) if (name, inner_steps[0], seeds[0]) in by_run]
    yield " | ".join(["| loss, held out", *(f"H = {h}" for h in inner_steps), "bytes |"])
    yield "|---" * (len(inner_steps) + 2) + "|"
    for name in names:
        cells = []
        for h in inner_steps:
            base = [by_run[BASE, h, seed].loss for seed in seeds]
            more = [100 * (by_run[name, h, seed].loss / its - 1) for seed, its in zip(seeds, base, strict=True)]
            cells.append(
                f"{fmean(base):.4f}" if name == BASE else f"{fmean(more):+.2f} % ({min(more):+.2f} … {max(more):+.2f})"
            )
        share = by_run[name, inner_steps[0], seeds[0]].n_bytes / by_run[BASE, inner_steps[0], seeds[0]].n_bytes
        yield " | ".join([f"| {name}", *cells, f"{share:.0%} |"])


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all losses to this file")
    chosen = parser.parse_args(arguments)
    names = [name for name in settings(20) if name == BASE or any(word in name for word in chosen.only)]
    found = []
    with ProcessPoolExecutor(chosen.processes, get_context("spawn")) as pool:
        runs = [
            pool.submit(train, name, h, seed, chosen.steps, chosen.batch, chosen.replicas)
            for seed in range(chosen.seeds)
            for h in chosen.inner_steps
            for name in names
        ]
        for done in as_completed(runs):
            found.append(run := done.result())
            print(f"H = {run.inner_steps}, seed {run.seed}, {run.setting}: {run.loss:.4f}", file=sys.stderr, flush=True)
    if chosen.json is not None:
        chosen.json.write_text(json.dumps([asdict(run) for run in found], indent=1) + "\n")
    print(*table(found, chosen.inner_steps), sep="\n")


if __name__ == "__main__":
    main()
