"""Goodput by two recipes of faults: a published one with exceptions and hangs (R7), and a harder one of our own (R8).

R7 follows a recipe of AWS: 2,000 steps, five seeded faults, 60 % exceptions and 40 % hangs, and all defaults. They
report an infrastructure goodput of 0.87 for a restart in the process, 0.86 for a restart in the job, and 0.36 for a
restart by Kubernetes. The rows here show the lost share, which is 1 minus the goodput. Source:
https://aws.amazon.com/blogs/machine-learning/fault-tolerant-distributed-training-on-amazon-eks-using-nvrx

Goodput is the time of the inner steps that an average counts, divided by the time of all replicas from the call of
`launch` to its results. So it includes the start, the rounds, and work that was made twice or dropped.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Timer
from typing import Any

from executors import Run, launch

from .goodput_replica import Fault
from .harness import Comparison, Options
from .launch import scratch_folder, state_of_its_own

sys.path.insert(0, str(Path(__file__).parents[1]))  # the helpers that tests share are below this folder

from support.outages import away

FILE = Path(__file__).with_name("goodput_replica.py")
N, STEPS, INNER_STEPS, N_EXCEPTIONS, N_HANGS = 4, 2000, 25, 3, 2
STEP_S = 0.5
HANGS = ("lock", "gil")
"""A deadlock of Python threads, and a call that waits while it holds the GIL."""
NEW_PROCESS, SAME_PROCESS = "a new process", "the same process, @restartable"
ENTRYPOINTS = {NEW_PROCESS: "train", SAME_PROCESS: "train_again"}
STORE_AWAY_S = 30.0


def planned_faults(seed: int, steps: int, n: int) -> list[Fault]:
    """Return the faults of the published recipe, at random ranks and steps.

    Args:
        seed: seeds all choices.
        steps: the inner steps of the run. No fault strikes in the first or last twentieth.
        n: the number of replicas.
    """
    rng = random.Random(seed)
    kinds = ["raise"] * N_EXCEPTIONS + [rng.choice(HANGS) for _ in range(N_HANGS)]
    rng.shuffle(kinds)
    return [(rng.randrange(n), rng.randrange(steps // 20, steps - steps // 20), kind) for kind in kinds]


def published_recipe(options: Options) -> list[Comparison]:
    """R7: steps of 500 ms, with restarts in a new process and in the same process."""
    n, steps, step_s = (2, 60, 0.01) if options.quick else (N, STEPS, STEP_S)
    samples: dict[str, list[float]] = {method: [] for method in ENTRYPOINTS}
    notes = []
    with state_of_its_own():
        _warm_up()
        for seed in range(options.repetitions(1)):
            faults = [] if options.quick else planned_faults(seed, steps, n)
            for method, task in ENTRYPOINTS.items():
                settings = {"inner_steps": min(INNER_STEPS, steps // 3), "total_steps": steps}
                lost, note = _lost_share(task, [step_s] * n, faults, settings)
                samples[method].append(lost)
                notes.append(f"seed {seed}, {method}: {note}")
    title = f"share of all time lost: N={n}, {steps} steps of {step_s * 1000:g} ms, {len(faults)} faults, all defaults"
    return [Comparison("R7", title, "", samples, goals=dict.fromkeys(samples, 0.05), note="; ".join(notes))]


def own_recipe(options: Options) -> list[Comparison]:
    """R8: hangs at the start and of the GIL, 30 s without the store, a rank of half speed, a SIGKILL each minute."""
    n, step_s, seconds = (2, 0.01, 1.0) if options.quick else (N, STEP_S, options.seconds or 1200.0)
    steps = round(seconds / step_s)
    faults: list[Fault] = [] if options.quick else [(0, -2, "lock"), (1, steps // 3, "gil"), (2, steps // 2, "gil")]
    steps_s = [step_s] * (n - 1) + [2 * step_s]
    settings = {"round_seconds": seconds / 120, "total_rounds": 120}
    if options.quick:
        settings = {"round_seconds": 0.2, "total_rounds": 4}
    chaos = [] if options.quick else ["kill:every=60"]
    samples, notes = [], []
    with state_of_its_own():
        _warm_up()
        for seed in range(options.repetitions(1)):
            away_at_s = None if options.quick else 0.6 * seconds
            lost, note = _lost_share("train", steps_s, faults, settings, chaos=chaos, seed=seed, away_at_s=away_at_s)
            samples.append(lost)
            notes.append(f"seed {seed}: {note}")
    title = (
        f"share of all time lost: N={n}, one at half speed, for {seconds:g} s, SIGKILL each minute, "
        f"{len(faults)} hangs, {STORE_AWAY_S:g} s without the store"
    )
    method = "rounds by the clock"
    return [Comparison("R8", title, "", {method: samples}, goals={method: 0.1}, note="; ".join(notes))]


def _warm_up() -> None:
    """Start a run that is not measured, so that no measured run reads the files of torch from a cold disk."""
    _lost_share("train", [0.01], [], {"inner_steps": 2, "total_steps": 4})


def _lost_share(
    task: str,
    step_s: Sequence[float],
    faults: Sequence[Fault],
    settings: dict[str, Any],
    *,
    away_at_s: float | None = None,
    **options: Any,
) -> tuple[float, str]:
    """Return the share of the replicas' time that is in no counted step, and a note with the reasons."""
    n = len(step_s)
    with scratch_folder("goodput-") as folder:
        marks = Path(folder, "faults")
        marks.mkdir()
        arguments = {"folder": str(marks), "faults": faults, "step_s": step_s, "settings": settings}
        began = time.monotonic()
        run = launch(
            "local", f"{FILE}:{task}", n, args=arguments, rendezvous=f"{folder}/store", restarts="100,oom=100",
            **options,
        )  # fmt: skip
        outage = Timer(away_at_s or 0.0, _take_away, [Path(folder, "store")])
        if away_at_s is not None:
            outage.start()
        run.results()
        all_s = time.monotonic() - began
        if away_at_s is not None:
            outage.join()
        counted_s, note = _counted_s(run, step_s)
        struck = len(list(marks.iterdir()))
    goodput = counted_s / (n * all_s)
    note = f"goodput {goodput:.4f}, {all_s:.0f} s, {struck} of {len(faults)} faults, {note}"
    print(note, file=sys.stderr, flush=True)
    return 1 - goodput, note


def _take_away(store: Path) -> None:
    with away(store):
        time.sleep(STORE_AWAY_S)


def _counted_s(run: Run, step_s: Sequence[float]) -> tuple[float, str]:
    """Return the seconds of counted steps of all replicas, and a note on the other steps."""
    ledger = run.metrics().ledger
    counted_s = sum(work.counted * step_s[rank] for rank, work in ledger.by_rank.items())
    return counted_s, f"steps lost {ledger.lost:.0f}, dropped {ledger.dropped:.0f}, carried {ledger.carried:.0f}"
