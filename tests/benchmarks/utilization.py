"""Utilization (W12): the share of time that goes into inner steps behind links of 50 Mbit/s to 5 Gbit/s.

The grid is the one that diloco-measured published: 4 replicas, 30.8M parameters, about 30 ms a step, and an average
each 128 or 32 steps. A step waits instead of computing, because there the GPU computes and here four replicas share two
cores. Each result has the plan of `replicas plan` next to it.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from itertools import product
from typing import Any

from .beside import Link, run
from .harness import Comparison, Options

N, PARAMS, STEP_S = 4, 30_800_000, 0.03
LATENCY_S = 0.005
LINKS: dict[str, float] = {"50 Mbit/s": 6.25e6, "200 Mbit/s": 25e6, "1 Gbit/s": 125e6, "5 Gbit/s": 625e6}
"""The speed of each replica's link to the store, in bytes per second and direction."""
WIRES: dict[str, dict[str, Any]] = {
    "fp32": {"wire": "fp32"},
    "int4": {"wire": "int4"},
    "top8": {"wire": "top8"},
    "top8, each": {"wire": "top8", "mean_wire": "each"},
}
INNER_STEPS = {128: 5.0, 32: 60.0}
"""The steps between two averages, and the goal for the best wire: the largest lost share, in percent."""
GOAL_LINKS = {128: tuple(LINKS), 32: ("50 Mbit/s",)}
LEFT_FOR_MERGE = 2
"""A round must be over this number of steps before the next one begins."""


def utilization(options: Options) -> list[Comparison]:
    """W12: the share of time that is not spent in steps, by link and wire, with rounds while training continues."""
    n, params, step_s, rounds = (2, 50_000, 0.005, 1) if options.quick else (N, PARAMS, STEP_S, options.repeat or 3)
    links = dict(list(LINKS.items())[-1:]) if options.quick else LINKS
    found: list[Comparison] = []
    for (inner_steps, goal), (link, rate) in product(INNER_STEPS.items(), links.items()):
        lost: dict[str, list[float]] = {}
        notes, off = [], {}
        for name, wire in WIRES.items():
            settings = {**wire, "overlap_steps": inner_steps - LEFT_FOR_MERGE, "merge": "carry"}
            lost[name] = _lost(n, params, step_s, inner_steps, rounds, settings, rate)
            planned = _planned(n, params, step_s, inner_steps, wire, rate)
            used = 100 - lost[name][0]
            off[name] = [100 * abs(planned / used - 1)]
            notes.append(f"{name} {used:.1f} % of the time in steps, planned {planned:.1f} %")
            print(f"{link}, H={inner_steps}: {notes[-1]}", file=sys.stderr, flush=True)
        best = min(lost, key=lambda name: lost[name][0])
        goals = {best: goal} if link in GOAL_LINKS[inner_steps] else {}
        title = f"{params / 1e6:.1f}M parameters, N={n}, steps of {step_s * 1000:g} ms, H={inner_steps}, {link}"
        found += [
            Comparison("W12", f"{title}: time not in steps", "%", lost, goals=goals, note="; ".join(notes)),
            Comparison("W12", f"{title}: the plan is off by", "%", off, goals=dict.fromkeys(off, 10.0)),
        ]
    return found


def _lost(
    n: int, params: int, step_s: float, inner_steps: int, rounds: int, settings: dict[str, Any], rate: float
) -> list[float]:
    """Return the share of time, in percent, that the slowest replica did not spend in steps. The first round is left
    out.
    """
    link: Link = {"latency_s": LATENCY_S, "bytes_per_s": rate}
    results = run(
        "train", n, n_elements=params, link=link, inner_steps=inner_steps, step_s=step_s, rounds=rounds,
        settings=settings,
    )  # fmt: skip
    return [max(100 * sum(each["step_s"]) / each["all_s"] for each in results)]


@cache
def _speeds(wire: str) -> dict[str, float]:
    """Return the speeds of this machine's processor, as `replicas plan --probe` measures them."""
    import torch

    from diloco import processor

    torch.set_num_threads(1)
    return processor.measure("int8" if wire == "top8" else wire)  # the planner derives top8 from int8


def _planned(n: int, params: int, step_s: float, inner_steps: int, wire: dict[str, Any], rate: float) -> float:
    """Return the planned share of time in steps, in percent, for replicas that share the cores of this machine."""
    from diloco import planner

    share = min(1.0, len(os.sched_getaffinity(0)) / n)
    processor = planner.Processor(**{name: share * speed for name, speed in _speeds(wire["wire"]).items()})
    link = planner.Link(up=rate, down=rate, latency_s=LATENCY_S)
    job = planner.Workload(params=params, n=n, step_s=step_s, link=link, processor=processor)
    choice = planner.Choice(inner_steps=inner_steps, overlap_steps=inner_steps - LEFT_FOR_MERGE, **wire)
    return 100 * (1 - planner.evaluate(job, choice).share)
