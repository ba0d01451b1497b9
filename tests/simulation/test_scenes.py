"""Scenes that random schedules seldom reach: flipped bits, deaths after a seal, damaged objects, late joiners."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from diloco.errors import DivergenceError
from diloco.rendezvous.frames import READ_TRIES
from diloco.rendezvous.mean import Reducer
from diloco.rendezvous.round_runner import RoundRunner
from diloco.rendezvous.training_state import ApplyStats
from simulation.integer_state import SLOTS, IntegerState
from simulation.invariants import Process
from simulation.simulation import RUN, Simulation, calm
from simulation.world import Died


def heal_a_flipped_bit(when: str, rank: int, n_fragments: int, *, sharded: bool) -> None:
    simulation = calm(sharded=sharded, n_fragments=n_fragments)
    flipped: list[str] = []
    pack, apply = IntegerState.pack, IntegerState.apply

    def packing(self: IntegerState, entry: int, *streaming: Any) -> object:
        due = self is simulation.states[rank] and entry == 1
        if due and when == "before packing":
            self.flip(entry % n_fragments)
            flipped.append(when)
        packed = pack(self, entry, *streaming)
        if due and when == "after packing":
            # The head should have the digest of the good state, which is computed after packing. So flip it back then.
            simulation.world.at(0.0005, lambda: self.flip(entry % n_fragments))
            flipped.append(when)
        return packed

    def applying(self: IntegerState, entry: int, *arguments: Any, **options: Any) -> ApplyStats:
        applied = apply(self, entry, *arguments, **options)
        if self is simulation.states[rank] and entry == 1 and when == "after applying":
            self.flip(entry % n_fragments)
            self.excused_until = entry + n_fragments + 1
            flipped.append(when)
        return applied

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IntegerState, "pack", packing)
        patch.setattr(IntegerState, "apply", applying)
        simulation.run()  # the simulation checks after each later entry that the state is the state of the log
    assert flipped == [when], (rank, n_fragments, sharded)


@pytest.mark.parametrize("when", ["before packing", "after packing", "after applying"])
def test_a_flipped_bit_of_the_state_is_healed_from_the_log(when: str) -> None:
    for rank, n_fragments, sharded in product(range(3), (1, 2), (True, False)):
        heal_a_flipped_bit(when, rank, n_fragments, sharded=sharded)


def test_a_replica_that_computes_otherwise_ends_alone_and_names_those_it_differs_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = calm()
    replay = IntegerState.replay

    def otherwise(self: IntegerState, entry: int, mean: Any) -> None:
        replay(self, entry, mean)
        if self is simulation.states[2]:
            self.momentum[0] += np.float32(0.25)

    monkeypatch.setattr(IntegerState, "replay", otherwise)
    monkeypatch.setattr(Simulation, "_check_state", lambda self, state, position: None)
    with pytest.raises(AssertionError, match=DivergenceError.__name__ + ": Rank 2, round .* of ranks 0, 1"):
        simulation.run()
    assert len(simulation.failures) == 1


# -- deaths ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("all_leave_outcomes", [True, False])
@pytest.mark.parametrize(
    ("owner", "method"), [(Reducer, "_reduce_shard"), (RoundRunner, "_apply"), (Reducer, "collect")]
)
def test_a_death_between_seal_and_outer_step_delays_no_other_replica(
    owner: type, method: str, all_leave_outcomes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = calm(all_leave_outcomes=all_leave_outcomes)
    original: Callable[..., object] = getattr(owner, method)
    calls: list[int] = []

    def deadly(self: RoundRunner | Reducer, *arguments: object) -> object:
        if (self._me.rank, self._me.attempt) == (1, 0):
            calls.append(1)
            if len(calls) == 2:
                raise Died
        return original(self, *arguments)

    monkeypatch.setattr(owner, method, deadly)
    simulation.run()
    assert sum(state.done >= 4 for state in simulation.states) >= 2
    if all_leave_outcomes:
        assert simulation.world.now < 30 + 70  # a restart within 60 s, and no grace of 30 s after it


def test_all_replicas_die_between_seal_and_mean_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = calm()
    reduce_shard = Reducer._reduce_shard

    def deadly(self: Reducer, *arguments: Any) -> object:
        if self._me.attempt == 0:
            raise Died
        return reduce_shard(self, *arguments)

    def bury(process: Process) -> None:
        assert process.me is not None
        simulation.store._create(simulation.keys.outcome(process.me.rank, process.me.attempt), b"{}")
        simulation._spawn(process.rank, 10.0)

    monkeypatch.setattr(Reducer, "_reduce_shard", deadly)
    monkeypatch.setattr(simulation, "_bury", bury)
    simulation.run()
    assert sorted(simulation.clean) == [3, 4, 5]


@pytest.mark.parametrize("restart", [(0, 1, 2), (1,)])
@pytest.mark.parametrize("sharded", [True, False])
def test_all_replicas_die_and_some_come_back_to_the_state_of_the_log(
    sharded: bool, restart: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = calm(sharded=sharded, entries=[9, 9, 9], snapshot_every=2)
    apply = RoundRunner._apply

    def deadly(self: RoundRunner, entry: Any, seal: Any, mean: Any) -> object:
        if self._me.attempt == 0 and entry.index >= 5:
            raise Died
        return apply(self, entry, seal, mean)

    def bury(process: Process) -> None:
        if process.rank in restart:
            simulation._spawn(process.rank, 40.0)

    monkeypatch.setattr(RoundRunner, "_apply", deadly)
    monkeypatch.setattr(simulation, "_bury", bury)
    simulation.run()
    assert len(simulation.clean) == len(restart)
    assert len(simulation.seals()) >= 9


def test_a_finisher_that_is_started_again_has_nothing_to_do() -> None:
    simulation = calm()
    simulation.world.at(200.0, lambda: simulation._spawn(1, 0.0))
    simulation.run()
    assert simulation.states[3].done == 0
    assert 3 in simulation.clean


# -- damaged objects
# ---------------------------------------------------------------------------------------------------------------


def rot(simulation: Simulation, pattern: str, rotten: list[str], *, cut: bool = False) -> None:
    """Damage all stored objects whose keys match."""
    for key, value in list(simulation.store.objects.items()):
        if re.search(pattern, key):
            simulation.store.objects[key] = value[:-5] if cut else value[:-1] + bytes([value[-1] ^ 1])
            simulation.store.ever_rotten.add(key)
            rotten.append(key)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_contribution_that_is_damaged_is_left_out(sharded: bool, cut: bool) -> None:
    simulation = calm(sharded=sharded, entries=[6, 6, 6])
    name, rotten = "r2/contribution/1", list[str]()
    simulation.store.when_created(name, lambda: rot(simulation, name, rotten, cut=cut))
    simulation.run()
    assert len(rotten) == 1
    assert all(state.done >= 5 for state in simulation.states)  # the replica that was left out catches up
    assert sorted(simulation.clean) == [0, 1, 2]


def test_a_contribution_without_which_there_is_none_is_read_again_after_the_grace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulation = calm(sharded=False, world_size=1, entries=[4])
    get, wrong = simulation.store.get, list[int]()

    def misreading(key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        data = get(key, start=start, size=size)
        if not key.endswith("r2/contribution/0") or len(wrong) == 2 * READ_TRIES:  # wrong reads of head and whole
            return data
        wrong.append(len(data))
        return memoryview(bytes(len(data)))

    monkeypatch.setattr(simulation.store, "get", misreading)
    simulation.run()
    assert len(wrong) == 2 * READ_TRIES
    assert [list(seal.replicas) for seal in simulation.seals()] == [[0]] * 4


@pytest.mark.parametrize("cut", [False, True])
def test_a_newest_snapshot_that_is_damaged_is_passed_over_for_the_one_before_it(cut: bool) -> None:
    simulation = calm(entries=[14, 14, 14], snapshot_every=3)
    rotten: list[str] = []

    def rot_newest() -> None:
        newest = max(int(key.split("/")[4]) for key in simulation.store.objects if "/part/" in key)
        rot(simulation, f"/part/{newest}/", rotten, cut=cut)

    simulation.world.at(29.9, rot_newest)
    simulation.world.at(30.0, lambda: simulation._spawn(None, 0.0))
    simulation.run()
    assert rotten
    assert sorted(simulation.clean) == [0, 1, 2, 3]


def test_a_damaged_mean_without_inputs_is_jumped_over_to_the_next_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = calm(entries=[12, 12, 12], snapshot_every=2)
    sleeping: list[int] = []
    apply = RoundRunner._apply

    def slow(self: RoundRunner, entry: Any, seal: Any, mean: Any) -> object:
        report = apply(self, entry, seal, mean)
        if self._me.rank == 2 and entry.index == 3 and not sleeping:
            sleeping.append(entry.index)
            self._context.wait(100.0, ())  # the others continue without this replica
        return report

    monkeypatch.setattr(RoundRunner, "_apply", slow)
    rotten: list[str] = []
    simulation.world.at(95.0, lambda: rot(simulation, r"r4/mean/|seal/4$", rotten))
    simulation.run()
    assert rotten
    assert sorted(simulation.clean) == [0, 1, 2]
    assert simulation.states[2].done < 12  # rank 2 has skipped entries by loading a snapshot


# -- nothing goes wrong ------------------------------------------------------------------------------------------------


def test_without_faults_all_replicas_count_in_every_round_and_no_work_is_left() -> None:
    simulation = calm(entries=[10, 10, 10])
    simulation.run()
    assert all(state.done == 10 and not state.undone[0].any() for state in simulation.states)
    assert [key for key in simulation.store.objects if "/contribution/" in key] == []
    assert f"{RUN}/diloco/main/bye/2/0" in simulation.store.objects
    assert SLOTS == 12


def test_an_equally_fast_joiner_is_counted_from_its_second_round_on(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = calm(entries=[12, 12, 12], snapshot_every=2)
    monkeypatch.setattr(simulation.world.rng, "uniform", lambda low, high: 3.0 if high == 4.0 else (low + high) / 2)
    simulation.world.at(13.0, lambda: simulation._spawn(None, 0.0))
    simulation.run()
    sealed = [entry for entry, seal in enumerate(simulation.seals()) if 3 in seal.replicas]
    assert sealed == list(range(sealed[0], 12))
    assert len(sealed) >= simulation.states[3].done - 1
