"""`make simulate`: the rendezvous under many random schedules, with fresh seeds; or one seed's schedule, printed.

python -m tests.simulation [SCHEDULES] [--model | --stops | --restarts] [--first SEED] [--processes N]
python -m tests.simulation --replay SEED [--stops | --restarts]

With --model, each process also trains a real model, which must agree. With --stops, a rank stops each run. With
--restarts, the schedules are of restart decisions, controllers, and the processes that they start.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from diloco.in_processes import in_processes
from simulation.batches import BATCH, run_batch
from simulation.invariants import Violation
from simulation.model_check import CheckedModelState
from simulation.restarts.invariants import check
from simulation.restarts.scenario import RestartScenario
from simulation.restarts.simulation import RestartSimulation
from simulation.restarts.simulation import run_schedule as run_restarts
from simulation.scenario import Scenario
from simulation.simulation import Simulation, run_schedule
from simulation.world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="?", type=int, default=250_000)
    parser.add_argument("--first", type=int, default=random.SystemRandom().randrange(1 << 40), help="the first seed")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--replay", type=int, metavar="SEED")
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--stops", action="store_true")
    parser.add_argument("--restarts", action="store_true")
    asked = parser.parse_args()
    if asked.replay is not None:
        return replay_restarts(asked.replay) if asked.restarts else replay(asked.replay, stops=asked.stops)
    print(f"{asked.schedules:,} schedules from seed {asked.first} on", flush=True)
    began, done, violations = time.monotonic(), 0, 0
    starts = range(asked.first, asked.first + asked.schedules, BATCH)
    run: Callable[..., object] = run_restarts if asked.restarts else run_schedule
    run = partial(run_schedule, training=CheckedModelState) if asked.model else run
    run = partial(run_schedule, stops_always=True) if asked.stops else run
    batch = partial(run_batch, run=run, end=asked.first + asked.schedules)
    for found in in_processes(batch, starts, asked.processes):
        done = min(done + BATCH, asked.schedules)
        violations += len(found)
        for text in found:
            print(text, flush=True)
        if done % (100 * BATCH) == 0 or done == asked.schedules:
            seconds = time.monotonic() - began
            print(f"{done:9,} done, {violations} violations, {seconds / done * 1000:.1f} ms each", flush=True)
    print(f"{done:,} schedules, {violations} violations", flush=True)
    return min(violations, 1)


def replay(seed: int, *, stops: bool) -> int:
    """Run and print the schedule of a seed, and print its result. Return the exit code.

    Args:
        seed: the seed.
        stops: True: a rank stops the run in any case.
    """
    scenario = Scenario.from_seed(seed).stopping() if stops else Scenario.from_seed(seed)
    print(scenario)  # before the run, which changes the number of deaths that are left
    simulation = Simulation(scenario)
    return show(simulation.world, simulation.run)


def replay_restarts(seed: int) -> int:
    """Run and print a schedule of restarts, and print its result. Return the exit code."""
    scenario = RestartScenario.from_seed(seed)
    print(scenario)
    simulation = RestartSimulation(scenario)
    return show(simulation.world, lambda: check(simulation.run()))


def show(world: World, run: Callable[[], object]) -> int:
    """Run a schedule, print it, and return the exit code."""
    violation = None
    try:
        run()
    except Violation as error:
        violation = error
    print(world.schedule())
    print(violation or "No invariant was violated.")
    return 0 if violation is None else 1


if __name__ == "__main__":
    sys.exit(main())
