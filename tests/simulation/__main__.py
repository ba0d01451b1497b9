"""`make simulate`: the rendezvous under many random schedules, with fresh seeds; or one seed's schedule, printed.

python -m tests.simulation [SCHEDULES] [--first SEED] [--processes N]
python -m tests.simulation --replay SEED
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.invariants import Violation
from simulation.plan import Plan
from simulation.simulation import Simulation, run_schedule

BATCH = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("schedules", nargs="?", type=int, default=250_000)
    parser.add_argument("--first", type=int, default=random.SystemRandom().randrange(1 << 40), help="the first seed")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--replay", type=int, metavar="SEED")
    asked = parser.parse_args()
    if asked.replay is not None:
        return replay(asked.replay)
    logging.disable(logging.WARNING)  # what the schedules break on purpose
    print(f"{asked.schedules:,} schedules from seed {asked.first} on", flush=True)
    began, done, violations = time.monotonic(), 0, 0
    starts = range(asked.first, asked.first + asked.schedules, BATCH)
    with ProcessPoolExecutor(asked.processes) as pool:
        for found in pool.map(run_batch, starts, [asked.first + asked.schedules] * len(starts)):
            done = min(done + BATCH, asked.schedules)
            violations += len(found)
            for text in found:
                print(text, flush=True)
            if done % (100 * BATCH) == 0 or done == asked.schedules:
                seconds = time.monotonic() - began
                print(f"{done:9,} done, {violations} violations, {seconds / done * 1000:.1f} ms each", flush=True)
    return min(violations, 1)


def run_batch(start: int, end: int) -> list[str]:
    """Run some schedules and return what went wrong."""
    found = []
    gc.disable()  # a twentieth of the time; what a batch leaves is collected at its end
    for seed in range(start, min(start + BATCH, end)):
        try:
            run_schedule(seed, is_traced=False)
        except Violation as violation:
            found.append(str(violation))
    gc.collect()
    return found


def replay(seed: int) -> int:
    """Print a schedule, and how it ended."""
    plan = Plan.from_seed(seed)
    print(plan)  # before the run, which counts its deaths down
    simulation = Simulation(plan)
    violation = None
    try:
        simulation.run()
    except Violation as error:
        violation = error
    print(simulation.world.schedule())
    print(violation or "No invariant was violated.")
    return 0 if violation is None else 1


if __name__ == "__main__":
    sys.exit(main())
