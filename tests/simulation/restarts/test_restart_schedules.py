"""Random schedules of what ends, who answers, and what goes wrong meanwhile."""

from __future__ import annotations

import os

import pytest

from simulation.restarts.simulation import run_schedule

SCHEDULES = int(os.environ.get("REPLICAS_SCHEDULES", "400"))
FIRST_SEED = int(os.environ.get("REPLICAS_FIRST_SEED", "0"))
"""Fresh seeds: `make simulate-restarts`."""


@pytest.mark.timeout(3600)
def test_restarts_keep_their_invariants_in_random_schedules_of_faults() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + SCHEDULES):
        run_schedule(seed, is_traced=False)


def test_a_seed_replays_its_schedule_of_restarts() -> None:
    assert run_schedule(7).world.schedule() == run_schedule(7).world.schedule()


def test_a_schedule_of_restarts_that_once_found_a_fault_stays_fine() -> None:
    """A wait that a later policy shortened; a policy that came when nobody kept the run any more, which stops nothing;
    a supervisor that woke up and ended its own process, which had claimed the very attempt that it was to begin; one
    that closed attempts behind the one that its sleeping process was to claim, and a resume began that; a cancel that
    did not see a resume, and so took the stop before it for standing; a
    cancel when all was over, which nobody needs to answer.

    What older plans found has tests with the rules and the controller.
    """
    for seed in (6038489, 521878033435, 272794890778, 186166190090, 186166336430, 186166247183, 376313571137):
        run_schedule(seed, is_traced=False)
