"""Random schedules of faults; and those that once found something."""

from __future__ import annotations

import os

import pytest

from simulation.model_check import CheckedModelState, DroppingModelState
from simulation.scenario import Scenario
from simulation.simulation import Simulation, run_schedule

SCHEDULES = int(os.environ.get("REPLICAS_SCHEDULES", "400"))
FIRST_SEED = int(os.environ.get("REPLICAS_FIRST_SEED", "0"))
"""Fresh seeds: `make simulate`."""
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.timeout(3600)
def test_invariants_hold_in_random_schedules_of_faults(part: int) -> None:
    for seed in range(FIRST_SEED + part, FIRST_SEED + SCHEDULES, PARTS):
        run_schedule(seed)


def test_schedules_that_once_found_something_stay_fine() -> None:
    """A joiner's claim seen late; readings that failed for good; a mean made again; a first anchor put again.

    Then copies that died before they knew of their claim, or with two, and whose end was recorded under another. In
    phases: an overlap's slack before a last round that has none; a returner that waits; a grace shorter than a look;
    600 and 902: a seal that comes while something is sent for it. RoundGreenlet the training: rounds that fail and have
    landed; what was held for an entry that was jumped over; a replica out of phase that presents itself no more;
    one that comes to the end of a plan by entries that the others had without it; steps that left with the work of
    an earlier attempt. Three readings that were wrong in a moment, and a long sleep before the next. One that comes
    back when the others have long sent what is then sealed. A mean whose head has rotted, computed on an unlike host.
    One whose steps are long, by the clock: the mean came in the midst of one, and in that of another a round was due.
    """
    seeds: tuple[int, ...] = (513, 2238, 3002, 101429, 492212788596, 325973480116, 855278631975, 1546749660)
    seeds += (9006374, 9008771, 9008772, 20010732, 203650224431, 93669702450, 93669702514, 598520567880, 569670020615)
    seeds += (507005789320,)
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
