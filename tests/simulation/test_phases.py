"""Phases that are longer than the grace: a replica that comes back is in phase again at once, and loses little work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest

from diloco.rendezvous.frames import Seal, hash_order
from diloco.rendezvous.membership import Identity
from diloco.rendezvous.phase import Phase, RoundPlan
from diloco.rendezvous.training_side import TrainingSide
from simulation.integer_state import IntegerState
from simulation.invariants import Process, Violation
from simulation.scenario import CALM, Absence, Scenario
from simulation.simulation import Simulation


def phased(phase_s: float, absences: list[Absence], until_s: float | None, **changes: object) -> Scenario:
    """Return a scenario of four replicas with steps of a second, or of a twentieth of a phase, and a fast store."""
    steps = max(20, round(phase_s))
    scenario = replace(
        CALM,
        world_size=4,
        entries=[10**6] * 8,
        sharded=False,
        snapshot_every=10,
        steps_per_entry=steps,
        step_s=(0.98 * phase_s / steps, 1.02 * phase_s / steps),
        upload_s=phase_s / 20,
        absences=absences,
        until_s=until_s,
    )
    return replace(scenario, **changes)  # type: ignore[arg-type]


def ran(phase_s: float, absences: list[Absence], until_s: float | None, **changes: object) -> Simulation:
    simulation = Simulation(phased(phase_s, absences, until_s, **changes))
    simulation.run()
    return simulation


def never_back(rank: int, at_s: float) -> Absence:
    return Absence(rank, at_s, 1e9, leaves_outcome=False)


def timed_seals(simulation: Simulation) -> list[tuple[float, Seal]]:
    """Return the seals in their order, with the time at which each was created."""
    created_s = simulation.store.created_s
    return [(created_s[simulation.keys.seal(entry)], seal) for entry, seal in enumerate(simulation.seals())]


def test_a_replica_away_for_longer_than_the_grace_is_in_every_later_seal() -> None:
    for phase_s, away_s in [(100.0, 45.0), (250.0, 60.0)]:
        at_s = 2.2 * phase_s
        simulation = ran(phase_s, [Absence(2, at_s, away_s)], until_s=20 * phase_s)
        back = [set(seal.replicas) for created_s, seal in timed_seals(simulation) if created_s > at_s + away_s]
        assert len(back) >= 15, phase_s
        assert all(members == {0, 1, 2, 3} for members in back), phase_s


@pytest.mark.parametrize("came", [{0, 1}, {1, 3}])
@pytest.mark.parametrize("n_fragments", [1, 2])
def test_ranks_that_never_came_cost_one_grace_and_a_late_rank_counts(came: set[int], n_fragments: int) -> None:
    """Two of four launched replicas never come. Later, one of them does."""
    phase_s, grace_s, late, late_s = 100.0, 30.0, 2, 450.0
    simulation = Simulation(phased(phase_s, [], until_s=15 * phase_s, n_fragments=n_fragments))
    spawn = simulation._spawn

    def spawn_some(rank: int | None, delay_s: float) -> None:
        if rank in {*came, late}:
            spawn(rank, late_s if rank == late else delay_s)

    simulation._spawn = spawn_some  # type: ignore[method-assign,assignment]
    simulation.run()
    seals = timed_seals(simulation)
    began_s = simulation.processes[0].here_s
    assert began_s is not None
    round_s = 1.05 * phase_s + phase_s / 20 + 3.0  # the steps, an upload, and the pauses between looks
    assert seals[0][0] < began_s + round_s + grace_s, (
        "the first round waits one grace for launched ranks that never came"
    )
    for (before_s, _), (created_s, seal) in pairwise(seals):
        assert created_s - before_s < round_s, f"{seal.replicas.keys()} waited for ranks that had never come"
    assert [set(seal.replicas) for created_s, seal in seals if created_s < late_s] == [came] * 3
    after = [set(seal.replicas) for created_s, seal in seals if created_s > late_s]
    assert after[1:] == [{*came, late}] * (len(after) - 1)


# -- scenes in which mutants must fail
# ------------------------------------------------------------------------------------


def a_replica_whose_peers_vanished_continues_alone() -> None:
    """Both replicas vanish without an outcome. A joiner continues after a wait that depends on the phase."""
    simulation = ran(100, [never_back(0, 70), never_back(1, 70)], 2000, world_size=2, joiners=1, seed=3)
    alone = [created_s for created_s, seal in timed_seals(simulation) if seal.replicas.keys() == {2}]
    assert alone, "the joiner never decides"
    assert alone[0] > 200, "the replica decides only after the longest wait for unseen replicas"


def work_that_was_counted_is_known_when_its_contribution_is_gone() -> None:
    simulation = Simulation(phased(20, [Absence(2, 50, 70, dies=False)], until_s=None, entries=[12] * 4, grace_s=3.0))
    create = simulation.store._create
    gone: list[str] = []

    def losing(key: str, value: bytes) -> bool:
        created = create(key, value)
        if created and "/seal/" in key:
            for rank, member in Seal.parse(value, key, simulation.proof).replicas.items():
                if not member.in_phase and member.weight and not gone:
                    gone.append(simulation.keys.contribution(int(key.rpartition("/")[2]), rank))
                    simulation.store.objects.pop(gone[0])
        return created

    simulation.store._create = losing  # type: ignore[method-assign]
    simulation.run()  # checks that nothing counts twice
    assert gone
    assert not simulation.states[2].dropped


def a_run_that_is_resumed_as_a_whole_is_in_phase_from_its_start(leaves_outcome: bool) -> None:
    simulation = ran(100, [Absence(rank, 220, 10 + rank, leaves_outcome=leaves_outcome) for rank in range(4)], 800)
    created_s, seal = next(timed for timed in timed_seals(simulation) if timed[0] > 235)
    assert set(seal.replicas) == {0, 1, 2, 3}
    assert created_s < 235 + 1.2 * 100


def a_dead_replica_costs_the_others_one_grace_from_when_they_waited() -> None:
    entry = next(entry for entry in range(1, 20) if hash_order(range(4), "seal", entry)[0] == 2)  # rank 2 seals first
    at_s = 105.0 * entry + 50
    simulation = ran(100, [never_back(2, at_s)], until_s=at_s + 300)
    created_s = simulation.store.created_s
    sent_s = [created_s[simulation.keys.contribution(entry, rank)] for rank in (0, 1, 3)]
    waited_s = created_s[simulation.keys.seal(entry)] - min(sent_s)
    assert 29.0 < waited_s < 30 + 2.5, "a dead replica costs one grace and one pause between two looks"


def a_replica_that_leaves_out_of_phase_does_not_wait() -> None:
    simulation = Simulation(phased(100, [], until_s=500, joiners=1, seed=3))
    leaving_s: list[float] = []
    has_finished = simulation._has_finished

    def leaves(process: Process, side: TrainingSide, entries: int) -> bool:
        me = side._context.me
        joiner = me.rank == 4 and side.phase.is_out_of_phase and simulation.states[4].done == 3
        if joiner:
            leaving_s.append(simulation.world.now)
        return joiner or has_finished(process, side, entries)

    simulation._has_finished = leaves  # type: ignore[method-assign]
    simulation.run()
    ended_s = simulation.processes[4].ended_s
    assert ended_s is not None
    assert ended_s - leaving_s[0] < 1.0


def a_quorum_that_cannot_be_reached_ends_a_replica_out_of_phase() -> None:
    away = [never_back(rank, 70) for rank in (0, 1)]
    scenario = phased(100, away, until_s=None, entries=[8] * 3, world_size=2, joiners=1, seed=3, min_quorum=2)
    simulation = Simulation(scenario)
    with pytest.raises(Violation, match="contributions arrived"):
        simulation.run()
    ended_s = simulation.processes[2].ended_s
    assert ended_s is not None
    assert ended_s > 28 + 230 + 600, "the wait is the bound of a lone replica and the time of a round"


def three_of_ten_steps_tell_how_long_ten_take() -> None:
    now, phase_s = [0.0], 20.0
    phase = Phase(RoundPlan(steps_per_entry=10), lambda: now[0])
    for _ in range(3):
        now[0] += phase_s / 10
        phase.count_step()
        now[0] += 5.0  # the time of a round does not count as phase
        phase.start_training_clock()
    assert phase.phase_s == pytest.approx(phase_s)
    phase.advance_in_phase(1, 0.0)
    assert phase.phase_s == pytest.approx(phase_s), "the length of a phase is the one that the replica knew last"


@pytest.mark.parametrize(
    "scene",
    [
        a_replica_whose_peers_vanished_continues_alone,
        work_that_was_counted_is_known_when_its_contribution_is_gone,
        partial(a_run_that_is_resumed_as_a_whole_is_in_phase_from_its_start, True),
        partial(a_run_that_is_resumed_as_a_whole_is_in_phase_from_its_start, False),
        a_dead_replica_costs_the_others_one_grace_from_when_they_waited,
        a_replica_that_leaves_out_of_phase_does_not_wait,
        a_quorum_that_cannot_be_reached_ends_a_replica_out_of_phase,
        three_of_ten_steps_tell_how_long_ten_take,
    ],
    ids=lambda scene: getattr(scene, "__name__", "a_run_that_is_resumed_as_a_whole"),
)
def test_scene(scene: Callable[[], None]) -> None:
    scene()


# -- replicas that join, leave or exist twice
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("die", [(2,), (0, 1, 2, 3)], ids=["one", "all"])
def test_a_returner_whose_predecessor_is_counted_keeps_its_own_work(die: tuple[int, ...]) -> None:
    """Rank 2 dies when its contribution is stored, alone or with all others, and comes back before the seal."""
    simulation = Simulation(phased(20, [], None, entries=[8] * 4, speeds=[1.5, 1.5, 1, 1.5], upload_s=0.0))
    simulation.scenario.absences.append(Absence(3, 1e9, 0.0))  # only this test decides about deaths

    def kill() -> None:
        for rank in die:
            simulation.world.at(0.0, partial(simulation._away, Absence(rank, 0.0, 1.0)))

    simulation.store.when_created(simulation.keys.contribution(1, 2), kill)
    simulation.run()
    again = next(process for process in simulation.processes[4:] if process.rank == 2)
    assert simulation.seals()[1].replicas[2].nonce == "nonce2", "the seal names the previous attempt"
    assert again.state.done > 0
    assert not again.state.dropped


def test_dropping_late_work_keeps_work_done_after_a_seal_has_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IntegerState, "carries", False)
    simulation = ran(100, [], until_s=450, joiners=1, seed=3)
    seals = simulation.seals()
    assert seals[0].replicas[4].weight == 0
    (_, work) = simulation.sealed_contribution(1, 4, seals[1])
    assert work.sum() > 130, "the dropped work is at most one phase and the steps before the seal"


def test_a_newer_copy_ends_an_older_one_in_the_midst_of_its_phase() -> None:
    simulation = Simulation(phased(1000, [], until_s=600, joiners=1, seed=3))
    simulation.world.at(100.0, lambda: simulation._spawn(4, 0.0))
    simulation.run()
    older, newer = simulation.processes[4:6]
    assert newer.me == Identity(4, 4, 1, "nonce5")
    assert older.ended_s is not None
    assert older.ended_s < 100 + 10 + 60, "the older copy ends within one look and one step"
    assert newer.ended_s is None


def test_a_replica_is_in_phase_again_when_all_named_ones_are_seen_to_be_dead() -> None:
    """All replicas die without outcomes. The first one that comes back takes the others for live replicas."""
    away = [Absence(rank, 220, 10 + 3 * rank, leaves_outcome=False) for rank in range(4)]
    simulation = Simulation(phased(100, away, until_s=260))
    out: list[list[int]] = []

    def look() -> None:
        out.append([p.slot for p in simulation.processes[4:] if p.phase is not None and p.phase.is_out_of_phase])

    simulation.world.at(232.0, look)
    simulation.world.at(255.0, look)
    simulation.run()
    assert out[0]
    assert out[1] == []


def test_a_wait_that_is_a_head_start_does_not_lengthen_the_grace() -> None:
    for seed in range(3, 7):
        simulation = ran(100, [], 450, joiners=1, seed=seed, steps_per_entry=20, step_s=(5.0, 5.0))
        (head, _) = simulation.sealed_contribution(2, 4, simulation.seals()[2])
        assert head.waited_s < 1.0, seed


# -- useful work -------------------------------------------------------------------------------------------------------

SCENES: dict[str, tuple[Scenario, float]] = {
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
"""Each scene has its events, and the share of useful work according to a time-stepped model with the same rules.

In both, writing a contribution takes a twentieth of a phase, so the largest possible share is 0.95.
"""


def useful_share(simulation: Simulation) -> float:
    """Return the counted steps as a share of all steps that fit into the time in which the replicas were running."""
    scenario = simulation.scenario
    assert scenario.until_s is not None
    counted = 0.0
    for entry, seal in enumerate(simulation.seals()):
        counted += sum(float(simulation.sealed_contribution(entry, rank, seal)[1].sum()) for rank in seal.inputs)
    possible = 0.0
    for rank in range(scenario.world_size):
        away_s = sum(absence.for_s for absence in scenario.absences if absence.rank == rank)
        slower = scenario.speeds[rank] if scenario.speeds else 1.0
        possible += (scenario.until_s - away_s) / slower * scenario.steps_per_entry / scenario.phase_s
    return counted / possible


def as_much_work_is_counted_as_in_a_model_of_phases(scene: str) -> float:
    scenario, model = SCENES[scene]
    simulation = Simulation(scenario)
    simulation.run()
    share = useful_share(simulation)
    print(f"useful work, {scene}: {share:.3f}; in the model {model:.3f}")
    assert share >= model - 0.03
    return share


@pytest.mark.parametrize("scene", SCENES)
def test_as_much_work_is_counted_as_in_a_model_of_phases(scene: str, record_property: Callable[..., None]) -> None:
    record_property("useful_work", as_much_work_is_counted_as_in_a_model_of_phases(scene))
