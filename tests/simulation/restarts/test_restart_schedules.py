"""Random schedules of ended attempts, restart decisions and faults."""

from __future__ import annotations

import os

import pytest

from simulation.restarts.simulation import run_schedule

SCHEDULES = int(os.environ.get("REPLICAS_SCHEDULES", "400"))
FIRST_SEED = int(os.environ.get("REPLICAS_FIRST_SEED", "0"))
"""`make simulate-restarts` runs new seeds."""


@pytest.mark.timeout(3600)
def test_restarts_keep_their_invariants_in_random_schedules_of_faults() -> None:
    for seed in range(FIRST_SEED, FIRST_SEED + SCHEDULES):
        run_schedule(seed, is_traced=False)


def test_a_seed_replays_its_schedule_of_restarts() -> None:
    assert run_schedule(7).world.schedule() == run_schedule(7).world.schedule()


def test_a_schedule_of_restarts_that_once_found_a_fault_stays_fine() -> None:
    """Each seed found one of these cases, in nearly this order.

    - A later policy shortened a wait.
    - A policy was ordered when no controller was running, so it stops no rank.
    - A supervisor woke up and ended its own process, which had claimed the attempt that the supervisor should start.
    - A supervisor closed later attempts than the one that its sleeping process would claim, and a resume started that.
    - A cancel did not see a resume, and so took the stop before the resume for valid.
    - A cancel was ordered when all ranks had ended, so no decision follows it.

    Cases that earlier versions of the scenarios found have tests with the rules and the controller.
    """
    for seed in (6038489, 521878033435, 272794890778, 186166190090, 186166336430, 186166247183, 376313571137):
        run_schedule(seed, is_traced=False)
