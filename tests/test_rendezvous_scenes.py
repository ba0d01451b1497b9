"""Scenes that random schedules seldom reach: flipped bits, takeovers, deaths between seal and mean, late joiners."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from rendezvous_simulation import RUN, Simulation
from simulated_invariants import Process
from simulated_plan import Plan
from simulated_work import SLOTS, Toy
from simulated_world import Died, Faults

from diloco.errors import DivergenceError
from diloco.means import Means
from diloco.records import Seal
from diloco.rendezvous import Rendezvous
from diloco.rounds import Round


def plan(**changes: object) -> Plan:
    calm = Plan(
        seed=1,
        world_size=3,
        n_fragments=1,
        entries=[4, 4, 4],
        sharded=True,
        overlap=False,
        min_quorum=1,
        all_leave_outcomes=True,
        copies=0.0,
        faults=Faults(),
    )
    for name, value in changes.items():
        setattr(calm, name, value)
    return calm


@pytest.mark.parametrize("n_fragments", [1, 2])
@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("when", ["before packing", "after packing", "after applying"])
def test_a_flipped_bit_of_the_state_is_healed_from_the_log(
    when: str, rank: int, sharded: bool, n_fragments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(plan(sharded=sharded, n_fragments=n_fragments))
    flipped: list[str] = []
    pack, apply = Toy.pack, Toy.apply

    def packing(self: Toy, entry: int, *streaming: object) -> object:
        due = self is simulation.toys[rank] and entry == 1
        if due and when == "before packing":
            self.flip(entry % n_fragments)
            flipped.append(when)
        packed = pack(self, entry, *streaming)  # type: ignore[arg-type]
        if due and when == "after packing":
            # the head was made from the good state: its digest is taken after packing, so restore it then
            simulation.world.at(0.0005, lambda: self.flip(entry % n_fragments))
            flipped.append(when)
        return packed

    def applying(self: Toy, entry: int, *settling: object) -> None:
        apply(self, entry, *settling)  # type: ignore[arg-type]
        if self is simulation.toys[rank] and entry == 1 and when == "after applying":
            self.flip(entry % n_fragments)
            self.excused_until = entry + n_fragments + 1
            flipped.append(when)

    monkeypatch.setattr(Toy, "pack", packing)
    monkeypatch.setattr(Toy, "apply", applying)
    simulation.run()  # checks after each later entry that the state is the log's
    assert flipped == [when]


def test_a_replica_that_computes_otherwise_ends_alone_and_says_with_whom_it_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(plan())
    replay = Toy.replay

    def otherwise(self: Toy, entry: int, mean: object) -> None:
        replay(self, entry, mean)  # type: ignore[arg-type]
        if self is simulation.toys[2]:
            self.momentum[0] += np.float32(0.25)

    monkeypatch.setattr(Toy, "replay", otherwise)
    monkeypatch.setattr(Simulation, "_check_state", lambda self, toy, position: None)
    with pytest.raises(AssertionError, match=DivergenceError.__name__ + ": Rank 2, round .* of ranks 0, 1"):
        simulation.run()
    assert len(simulation.failures) == 1


def dies_in(method: str, owner: type, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process of a rank die when it calls a method for the second time."""
    original: Callable[..., object] = getattr(owner, method)
    calls: list[int] = []

    def deadly(self: Rendezvous | Means, *args: object) -> object:
        if self._me.rank == rank and self._me.attempt == 0:
            calls.append(rank)
            if len(calls) == 2:
                raise Died
        return original(self, *args)

    monkeypatch.setattr(owner, method, deadly)


@pytest.mark.parametrize("all_leave_outcomes", [True, False])
@pytest.mark.parametrize(("owner", "method"), [(Means, "_bring_about"), (Rendezvous, "_apply"), (Means, "collect")])
def test_a_death_between_seal_and_adoption_holds_nobody_up(
    owner: type, method: str, all_leave_outcomes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(plan(all_leave_outcomes=all_leave_outcomes))
    dies_in(method, owner, 1, monkeypatch)
    simulation.run()
    assert sum(toy.done >= 4 for toy in simulation.toys) >= 2
    if all_leave_outcomes:
        assert simulation.world.now < 30 + 70  # a restart begins within 60 s; nobody waits out a grace of 30 s on top


def test_everybody_dies_between_seal_and_mean_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(plan())
    bring_about = Means._bring_about

    def deadly(self: Means, *args: object) -> object:
        if self._me.attempt == 0:
            raise Died
        return bring_about(self, *args)  # type: ignore[arg-type]

    def bury(self: Simulation, process: Process) -> None:
        assert process.me is not None
        self.store._create(self.keys.outcome(process.me.rank, process.me.attempt), b"{}")
        self._spawn(process.rank, 10.0)

    monkeypatch.setattr(Means, "_bring_about", deadly)
    monkeypatch.setattr(Simulation, "_bury", bury)
    simulation.run()
    assert sorted(simulation.clean) == [3, 4, 5]


def test_without_faults_everybody_counts_in_every_round_and_little_is_asked() -> None:
    simulation = Simulation(plan(entries=[10, 10, 10]))
    simulation.run()
    assert all(toy.done == 10 and not toy.undone[0].any() for toy in simulation.toys)
    kept = [key for key in simulation.store.objects if "/contribution/" in key]
    assert kept == []
    assert f"{RUN}/diloco/main/bye/2/0" in simulation.store.objects
    assert SLOTS == 12


def rots(simulation: Simulation, pattern: str, at_s: float, *, cut: bool = False) -> list[str]:
    """Let everything that stands and matches rot at some time."""
    rotten: list[str] = []

    def act() -> None:
        for key, value in list(simulation.store.objects.items()):
            if re.search(pattern, key):
                simulation.store.objects[key] = value[:-5] if cut else value[:-1] + bytes([value[-1] ^ 1])
                simulation.store.ever_rotten.add(key)
                rotten.append(key)

    simulation.world.at(at_s, act)
    return rotten


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_contribution_that_rots_is_left_out(sharded: bool, cut: bool) -> None:
    simulation = Simulation(plan(sharded=sharded, entries=[6, 6, 6]))
    create = simulation.store._create
    spoilt: list[str] = []

    def rotting(key: str, value: bytes) -> bool:
        created = create(key, value)
        if key.endswith("r2/contribution/1") and created:
            simulation.store.objects[key] = value[:-5] if cut else value[:-1] + bytes([value[-1] ^ 1])
            simulation.store.ever_rotten.add(key)
            spoilt.append(key)
        return created

    simulation.store._create = rotting  # type: ignore[method-assign]
    simulation.run()
    assert len(spoilt) == 1
    assert all(toy.done >= 5 for toy in simulation.toys)  # who was left out catches up with that round
    assert sorted(simulation.clean) == [0, 1, 2]


@pytest.mark.parametrize("cut", [False, True])
def test_a_newest_snapshot_that_rots_is_passed_over_for_the_one_before_it(cut: bool) -> None:
    simulation = Simulation(plan(entries=[14, 14, 14], snapshot_every=3, joiners=0))
    late = Simulation._spawn
    simulation.world.at(30.0, lambda: late(simulation, None, 0.0))
    rotten: list[str] = []

    def rot_newest() -> None:
        newest = max(int(key.split("/")[4]) for key in simulation.store.objects if "/part/" in key)
        for key in [key for key in simulation.store.objects if f"/part/{newest}/" in key]:
            value = simulation.store.objects[key]
            simulation.store.objects[key] = value[:-5] if cut else value[:-1] + b"?"
            rotten.append(key)

    simulation.world.at(29.9, rot_newest)
    simulation.run()
    assert rotten
    assert sorted(simulation.clean) == [0, 1, 2, 3]


def test_who_finds_a_rotten_mean_and_no_inputs_goes_on_from_the_next_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = Simulation(plan(entries=[12, 12, 12], snapshot_every=2))
    sleeping: list[int] = []
    apply = Rendezvous._apply

    def slow(self: Rendezvous, r: Round, seal: Seal, mean: object) -> object:
        adopted = apply(self, r, seal, mean)  # type: ignore[arg-type]
        if self._me.rank == 2 and r.entry == 3 and not sleeping:
            sleeping.append(r.entry)
            self._wait(100.0, ())  # the others go on without this one
        return adopted

    monkeypatch.setattr(Rendezvous, "_apply", slow)
    rotten = rots(simulation, r"r4/mean/|seal/4$", 95.0)
    simulation.run()
    assert rotten
    assert sorted(simulation.clean) == [0, 1, 2]
    assert simulation.toys[2].done < 12  # it jumped


@pytest.mark.parametrize("restart", [(0, 1, 2), (1,)])
@pytest.mark.parametrize("sharded", [True, False])
def test_everybody_dies_and_some_come_back_to_where_the_log_is(
    sharded: bool, restart: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = Simulation(plan(sharded=sharded, entries=[9, 9, 9], snapshot_every=2))
    apply = Rendezvous._apply

    def deadly(self: Rendezvous, r: Round, seal: Seal, mean: object) -> object:
        if self._me.attempt == 0 and r.entry >= 5:
            raise Died
        return apply(self, r, seal, mean)  # type: ignore[arg-type]

    def bury(self: Simulation, process: Process) -> None:
        if process.rank in restart:
            self._spawn(process.rank, 40.0)

    monkeypatch.setattr(Rendezvous, "_apply", deadly)
    monkeypatch.setattr(Simulation, "_bury", bury)
    simulation.run()
    assert len(simulation.clean) == len(restart)
    assert f"{RUN}/diloco/main/seal/8" in simulation.store.objects


def test_a_finisher_that_is_started_again_has_nothing_to_do() -> None:
    simulation = Simulation(plan())
    simulation.world.at(200.0, lambda: simulation._spawn(1, 0.0))
    simulation.run()
    assert simulation.toys[3].done == 0
    assert 3 in simulation.clean


def test_an_equally_fast_joiner_is_counted_from_its_second_round_on(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(plan(entries=[12, 12, 12], snapshot_every=2))
    monkeypatch.setattr(simulation.world.rng, "uniform", lambda low, high: 3.0 if high == 4.0 else (low + high) / 2)
    simulation.world.at(13.0, lambda: simulation._spawn(None, 0.0))
    simulation.run()
    sealed = [
        entry
        for entry in range(12)
        if 3 in Seal.parse(simulation.store.objects[f"{RUN}/diloco/main/seal/{entry}"]).members
    ]
    assert sealed == list(range(sealed[0], 12))
    done = simulation.toys[3].done
    assert len(sealed) >= done - 1


@pytest.mark.parametrize("n_fragments", [1, 2])
@pytest.mark.parametrize("sharded", [True, False])
def test_storage_stays_within_its_bounds_over_two_hundred_rounds(sharded: bool, n_fragments: int) -> None:
    every = 4
    simulation = Simulation(
        plan(entries=[200, 200, 200], snapshot_every=every, sharded=sharded, n_fragments=n_fragments)
    )
    most: Counter[str] = Counter()

    def look() -> None:
        kinds = Counter(re.sub(r".*/(contribution|mean|part)/.*", r"\1", key) for key in simulation.store.objects)
        for kind in ("contribution", "mean", "part"):
            most[kind] = max(most[kind], kinds[kind])
        if simulation.live:
            simulation.world.at(0.5, look)

    simulation.world.at(5.0, look)
    simulation.run()
    assert most["contribution"] <= 2 * 3
    assert most["mean"] <= 3 * every * 3
    assert most["part"] <= 3
    assert sum("/seal/" in key for key in simulation.store.objects) == 200
