"""Random schedules of faults, and schedules that once found a fault of the protocol."""

from __future__ import annotations

import os

import pytest

from simulation.model_check import CheckedModelState, DroppingModelState
from simulation.scenario import Scenario
from simulation.simulation import Simulation, run_schedule

SCHEDULES = int(os.environ.get("REPLICAS_SCHEDULES", "400"))
FIRST_SEED = int(os.environ.get("REPLICAS_FIRST_SEED", "0"))
"""`make simulate` runs new seeds."""
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.timeout(3600)
def test_invariants_hold_in_random_schedules_of_faults(part: int) -> None:
    for seed in range(FIRST_SEED + part, FIRST_SEED + SCHEDULES, PARTS):
        run_schedule(seed)


def test_schedules_that_once_found_something_stay_fine() -> None:
    """Each seed found a fault of the protocol in one of these cases.

    - A claim of a joiner became visible late. Readings failed permanently. A mean or a first anchor was written again.
    - A process died before it could read its claim, or had two claims, and its outcome named another attempt.
    - In phases: the slack of an overlap counted before a last round, which has no overlap. A replica that came back
      waited. The grace was shorter than a look. A seal appeared while work was sent for it (600 and 902).
    - In the background: a round failed after its result was ready. Work was held for an entry that was passed. A
      replica out of phase stopped contributing early. A replica reached the end of a plan through entries of the
      others. Steps were sent together with the work of an earlier attempt.
    - Three wrong readings followed at once, and then a long sleep. A replica came back after the others had sent the
      contributions of the entry that was sealed next.
    - Another host computed a mean again whose head was damaged.
    - With rounds by the clock and long steps, a mean arrived in one step, and a round was due in another.
    - The replica that stores the head of a mean was suspended (905500: the invariant left its time out).
    """
    seeds: tuple[int, ...] = (513, 2238, 3002, 101429, 492212788596, 325973480116, 855278631975, 1546749660)
    seeds += (9006374, 9008771, 9008772, 20010732, 203650224431, 93669702450, 93669702514, 598520567880, 569670020615)
    seeds += (507005789320, 905500)
    for seed in seeds:
        run_schedule(seed)
    for seed in (27, 223, 600, 902, 50763, 200907):
        Simulation(Scenario.phased(seed)).run()


def test_a_seed_replays_its_schedule() -> None:
    assert run_schedule(7).world.schedule() == run_schedule(7).world.schedule()


@pytest.mark.parametrize("training", [CheckedModelState, DroppingModelState])
def test_the_live_parameters_of_a_model_hold_the_work_that_the_simulation_counts(
    training: type[CheckedModelState],
) -> None:
    for seed in range(30):
        run_schedule(seed, training=training)
