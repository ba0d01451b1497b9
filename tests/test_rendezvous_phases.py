"""Inner phases that are longer than the grace: who was away is in phase again at once, and little work is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from rendezvous_simulation import Simulation
from simulated_plan import Absence, Plan
from simulated_world import Faults

from diloco.records import Seal


def phased(phase_s: float, absences: list[Absence], until_s: float, **changes: object) -> Plan:
    """Four replicas whose steps take a second, or a twentieth of a phase, at a store that answers at once."""
    steps = max(20, round(phase_s))
    plan = Plan(
        seed=1,
        world_size=4,
        n_fragments=1,
        entries=[10**6] * 8,
        sharded=False,
        overlap=False,
        min_quorum=1,
        all_leave_outcomes=True,
        copies=0.0,
        faults=Faults(),
        snapshot_every=10,
        steps_per_entry=steps,
        step_s=(0.98 * phase_s / steps, 1.02 * phase_s / steps),
        grace_s=30.0,
        answer_s=0.001,
        upload_s=phase_s / 20,
        absences=absences,
        until_s=until_s,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def seals_of(simulation: Simulation) -> list[tuple[float, Seal]]:
    """Return the seals in their order, and when each was created."""
    seals: list[tuple[float, Seal]] = []
    while (key := simulation.keys.seal(len(seals))) in simulation.store.objects:
        seals.append((simulation.store.created_s[key], Seal.parse(simulation.store.objects[key])))
    return seals


@pytest.mark.parametrize(("phase_s", "away_s"), [(100.0, 45.0), (250.0, 60.0)])
def test_who_was_away_for_longer_than_the_grace_is_in_every_later_seal(phase_s: float, away_s: float) -> None:
    at_s = 2.2 * phase_s
    simulation = Simulation(phased(phase_s, [Absence(2, at_s, away_s)], until_s=20 * phase_s))
    simulation.run()
    back = [set(seal.members) for created_s, seal in seals_of(simulation) if created_s > at_s + away_s]
    assert len(back) >= 15
    assert all(members == {0, 1, 2, 3} for members in back)


def useful_share(simulation: Simulation) -> float:
    """Return the counted steps as a share of those that fit into the time in which replicas were not away."""
    plan = simulation.plan
    assert plan.until_s is not None
    counted = 0.0
    for entry, (_, seal) in enumerate(seals_of(simulation)):
        counted += sum(float(simulation.sealed_contribution(entry, rank, seal)[1].sum()) for rank in seal.inputs)
    possible = 0.0
    for rank in range(plan.world_size):
        away_s = sum(absence.for_s for absence in plan.absences if absence.rank == rank)
        slower = plan.speeds[rank] if plan.speeds else 1.0
        possible += (plan.until_s - away_s) / slower * plan.steps_per_entry / plan.phase_s
    return counted / possible


SCENES: dict[str, tuple[Plan, float]] = {
    "phase 20, back after 7": (phased(20, [Absence(2, 45, 7)], 3000), 0.945),
    "phase 100, back after 45": (phased(100, [Absence(2, 220, 45)], 6000), 0.951),
    "phase 250, back after 60": (phased(250, [Absence(2, 520, 60)], 15000), 0.947),
    "three die": (phased(100, [Absence(2, 220, 7), Absence(1, 230, 50), Absence(3, 240, 20)], 6000), 0.949),
    "all die and are resumed 3 s apart": (
        phased(100, [Absence(rank, 220, 60 + 3 * rank) for rank in range(4)], 6000),
        0.945,
    ),
    "one is 5 % slower and late once": (phased(100, [Absence(3, 220, 45)], 6000, speeds=[1, 1, 1, 1.05]), 0.908),
    "one is slower by half": (phased(100, [], 6000, speeds=[1, 1, 1, 1.5]), 0.841),
    "one takes 2.5 times as long": (phased(100, [], 6000, speeds=[1, 1, 1, 2.5]), 0.864),
    "a kill every 60 s, phase 100": (
        phased(100, [Absence(j % 4, 100 + 60 * j, 8) for j in range(140)], 8600),
        0.745,
    ),
    "a kill every 5 s, phase 2": (
        phased(2, [Absence((j * 7) % 4, 5 + 5 * j, 0.4) for j in range(75)], 380, grace_s=4.0),
        0.877,
    ),
    "a kill every 60 s, phase 40, eight replicas": (
        phased(40, [Absence((j * 3) % 8, 100 + 60 * j, 5) for j in range(60)], 3800, grace_s=10.0, world_size=8),
        0.904,
    ),
}
"""What happens, and the share of useful work in a time-stepped model of phases that follows the same rules.

In both a contribution takes a twentieth of a phase to be written, so that 0.95 is the most.
"""


@pytest.mark.parametrize("scene", SCENES)
def test_as_much_work_is_counted_as_in_a_model_of_phases(scene: str, record_property: Callable[..., None]) -> None:
    plan, model = SCENES[scene]
    simulation = Simulation(plan)
    simulation.run()
    share = useful_share(simulation)
    print(f"useful work, {scene}: {share:.3f}; in the model {model:.3f}")
    record_property("useful_work", share)
    assert share >= model - 0.03
