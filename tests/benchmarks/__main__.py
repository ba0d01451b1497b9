"""The command `python -m tests.benchmarks`."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from . import (
    beside,
    by_the_clock,
    dashboards,
    exactness,
    far,
    goodput,
    launch,
    looking,
    loss_of_wires,
    members,
    metrics,
    noticing,
    outer_step,
    pages,
    ray_jobs,
    recovery,
    restarts,
    rounds,
    slurm,
    trainer,
    training_loop,
    utilization,
    watching,
    wires,
)
from .harness import Comparison, Options, report

Benchmark = Callable[[Options], list[Comparison]]

# The goals of each benchmark. One measurement may serve several goals.
BENCHMARKS: dict[tuple[str, ...], Benchmark] = {
    ("L1", "L3", "L4"): launch.first_line,
    ("L2",): launch.first_step,
    ("L5",): launch.many,
    ("L6",): launch.heavy_imports,
    ("S1", "S5", "S8"): rounds.rounds,
    ("S6",): noticing.noticing,
    ("S9", "S10"): far.far,
    ("O1", "O2"): outer_step.outer_step,
    ("W1",): beside.lost,
    ("W2",): beside.steps,
    ("W3", "W4", "W5", "W11"): wires.wires,
    ("W6",): loss_of_wires.loss_of_wires,
    ("W7",): beside.planned,
    ("W8",): beside.signed,
    ("W9",): by_the_clock.by_the_clock,
    ("W10",): outer_step.memory_beside,
    ("W12",): utilization.utilization,
    ("Q1", "Q2", "Q3", "Q4"): looking.looking,
    ("M1", "M3"): metrics.metrics,
    ("M2",): pages.pages,
    ("D1", "D2"): dashboards.dashboards,
    ("D3",): dashboards.first_paint,
    ("E4",): ray_jobs.ray_jobs,
    ("T1",): trainer.trainer,
    ("T2", "T3"): training_loop.training_loop,
    ("R1", "R2"): restarts.restarts,
    ("R3",): watching.stacks,
    ("R4",): watching.marks,
    ("R5",): watching.false_alarms,
    ("R6",): restarts.goodput,
    ("R7",): goodput.published_recipe,
    ("R8",): goodput.own_recipe,
    ("R9",): recovery.recovery,
    ("R10",): watching.rules,
    ("P1",): members.restarts_of_members,
    ("P2", "P3"): members.launches_of_members,
    ("P4",): members.next_calls,
    ("P5",): members.steps_of_members,
    ("P6",): members.cancels,
    ("E1", "E2", "E3"): slurm.slurm,
    ("C1",): exactness.exactness,
}
LONG = ("R5", "R6", "R7", "R8", "R9", "W6", "W12")
NAMES = sorted(name for names in BENCHMARKS for name in names)


def main(arguments: Sequence[str] | None = None) -> list[Comparison]:
    """Run the benchmarks that the command line names. Default: all that take less than half an hour.

    If one fails, the others run, the table has their rows, and the command ends with exit code 1.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description="Benchmarks beside their peers.")
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which: {', '.join(NAMES)}; all but {', '.join(LONG)} by default"
    )
    parser.add_argument("--repeat", type=int, metavar="N", help="repetitions of everything")
    parser.add_argument("--seconds", type=float, metavar="S", help="how long R5 and R6 go on; an hour and half of one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument("--quick", action="store_true", help="toy sizes, to see that everything runs")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.names) - set(NAMES):
        parser.error(f"there is no benchmark {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    options = Options(chosen.repeat, chosen.quick, chosen.seconds)
    comparisons: list[Comparison] = []
    failed: list[str] = []
    for names, benchmark in BENCHMARKS.items():
        if (not chosen.names and names[0] not in LONG) or set(names) & set(chosen.names):
            began = time.monotonic()
            try:
                comparisons += benchmark(options)
            except Exception:  # noqa: BLE001 - the other benchmarks take hours, and are not lost with this one
                traceback.print_exc()
                failed.append(" ".join(names))
            print(f"{' '.join(names)}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    if options.quick:
        for comparison in comparisons:
            comparison.goals = {}  # the goals do not apply to toy sizes
    report(comparisons, chosen.json)
    if failed:
        sys.exit(f"These benchmarks failed, see above: {', '.join(failed)}.")
    return comparisons


if __name__ == "__main__":
    main()
