"""Each work is counted once: with weights, quorums, checkpoints, joiners, shards and several fragments."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest

from diloco.rendezvous.envelope import UNSIGNED, Proof
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity
from diloco.rendezvous.reduction import weighted_mean
from diloco.rendezvous.restore import LogReplayer, RestoredWork
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import owners
from diloco.rendezvous.round_runner import RoundRunner
from diloco.rendezvous.snapshot import SnapshotPointer, collect_garbage, get_parts
from diloco.rendezvous.training_side import TrainingSide
from diloco.rendezvous.training_state import ApplyStats
from simulation.integer_state import SLOTS, IntegerState
from simulation.invariants import Process
from simulation.simulation import Simulation, restored_from
from simulation.simulation import calm as calm_
from simulation.world import Died

GRACE_S = 3.0


def calm(**changes: Any) -> Simulation:
    return calm_(**{"entries": [8, 8, 8], "step_s": (0.5, 2.0), "grace_s": GRACE_S, **changes})


def counted_units(simulation: Simulation, slot: int) -> float:
    """Return the amount of work of a process that the seals count."""
    return sum(
        float(simulation.sealed_contribution(entry, rank, seal)[1][slot])
        for entry, seal in enumerate(simulation.seals())
        for rank in seal.inputs
    )


def test_a_weight_of_three_counts_three_times_as_much() -> None:
    for sharded in (True, False):
        simulation = calm(weights=[1.0, 2.0, 3.0], sharded=sharded, entries=[4, 4, 4])
        simulation.run()
        for entry in range(4):
            mean = simulation.stored_mean(entry)[0]
            assert mean[:3].tolist() == pytest.approx([1 / 6, 2 / 6, 3 / 6]), (sharded, entry)


def test_two_of_three_are_not_enough_for_a_quorum_of_three_however_long_they_wait() -> None:
    for sharded in (True, False):
        simulation = calm(min_quorum=3, sharded=sharded, entries=[2, 2, 2])
        simulation.world.hold("rank 2.2", 100 * GRACE_S)
        simulation.run()
        assert [set(seal.replicas) for seal in simulation.seals()] == [{0, 1, 2}] * 2  # three meet a quorum of three
        sent_s = [simulation.store.created_s[simulation.keys.contribution(0, rank)] for rank in range(3)]
        assert max(sent_s[:2]) < 10 * GRACE_S
        assert simulation.store.created_s[simulation.keys.seal(0)] > sent_s[2] >= 100 * GRACE_S


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("n_fragments", [1, 2])
def test_work_that_was_made_from_another_anchor_is_not_counted(
    n_fragments: int, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = calm(n_fragments=n_fragments, sharded=sharded)
    pack = IntegerState.pack

    def packing(self: IntegerState, entry: int, *streaming: Any) -> Any:
        if self is simulation.states[2] and entry == 1:
            self.flip(entry % n_fragments)
        return pack(self, entry, *streaming)

    monkeypatch.setattr(IntegerState, "pack", packing)
    simulation.run()
    seals = simulation.seals()
    assert simulation.keys.contribution(1, 2) in simulation.store.ever
    assert set(seals[1].replicas) == {0, 1}
    for entry, seal in enumerate(seals):
        anchors = {simulation.sealed_contribution(entry, rank, seal)[0].anchor for rank in seal.replicas}
        assert anchors == {seal.anchor}


def test_work_counted_since_a_checkpoint_is_not_counted_again_by_a_copy_that_starts_from_it() -> None:
    simulation = calm(world_size=2, entries=[30, 30], steps_per_entry=2, snapshot_every=2)
    checkpoints: list[RestoredWork] = []

    def training(me: Identity, side: TrainingSide, state: IntegerState) -> None:
        if (me.rank, me.attempt) != (0, 0):
            return
        if side.position == 3 and side.phase.steps_since == 1:
            checkpoints.append(restored_from(side, state))
        if side.position == 4:
            raise Died  # entry 4 has counted the work in the checkpoint

    def come_back(process: Process) -> None:
        simulation._spawn(0, 60.0, checkpoints[0])

    simulation._perhaps_copy = training  # type: ignore[method-assign]
    simulation._bury = come_back  # type: ignore[method-assign]
    simulation.run()
    first, _, second = simulation.states
    assert checkpoints[0].progress[0][0] == 1.0
    assert second.done > 0
    assert {0, 1} == set(simulation.seals()[3].replicas)
    assert counted_units(simulation, 0) == first.done


def test_a_damaged_seal_of_a_passed_entry_drops_the_work_and_no_replica_hangs() -> None:
    simulation = calm(entries=[14, 14, 14], snapshot_every=2)
    seal = simulation.keys.seal(4)

    def rot() -> None:
        assert simulation.keys.mean(4, 0) not in simulation.store.objects  # the others have passed entry 4
        value = simulation.store.objects[seal]
        simulation.store.objects[seal] = value[:40] + bytes([value[40] ^ 1]) + value[41:]

    def hold() -> None:
        simulation.world.hold("rank 2.2", simulation.world.now + 200.0)
        simulation.world.at(190.0, rot)

    simulation.store.when_created(simulation.keys.contribution(4, 2), hold)
    simulation.run()
    assert 2 in simulation.seals()[4].replicas
    assert sorted(simulation.clean) == [0, 1, 2]
    assert simulation.states[2].dropped
    assert 5 <= counted_units(simulation, 2) <= simulation.states[2].done


def test_two_joiners_at_once_both_come_to_be_counted() -> None:
    simulation = calm(entries=[20, 20, 20], snapshot_every=2)
    for _ in range(2):
        simulation.world.at(10.0, lambda: simulation._spawn(None, 0.0))
    simulation.run()
    claims = [key for key in simulation.store.objects if key.endswith("started.json")]
    assert sorted(claims) == [simulation.keys.claim(rank, 0) for rank in range(5)]
    assert set(simulation.seals()[-1].replicas) == {0, 1, 2, 3, 4}


# -- snapshots and means -----------------------------------------------------------------------------------------------


def whole_snapshots(store: RetryingStore, keys: Keys, most: int) -> list[int]:
    """Return the entries of all snapshots that can be read."""
    pointers = {entry: store.peek(keys.snapshot(entry)) for entry in range(most + 1)}
    return [
        entry
        for entry, data in pointers.items()
        if data is not None
        and get_parts(store, keys, entry, SnapshotPointer.parse(data, "", UNSIGNED), UNSIGNED) is not None
    ]


@pytest.mark.parametrize("n_fragments", [1, 2])
def test_two_whole_snapshots_are_left_after_each_collection_of_a_run(
    n_fragments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = calm(entries=[16] * 3, snapshot_every=2, n_fragments=n_fragments)
    left: list[list[int]] = []

    def looking(store: RetryingStore, keys: Keys, newest: int, snapshot_every: int, proof: Proof) -> None:
        collect_garbage(store, keys, newest, snapshot_every, proof)
        left.append(whole_snapshots(store, keys, newest)[-2:])

    monkeypatch.setattr("diloco.rendezvous.snapshot.collect_garbage", looking)
    simulation.run()
    assert left == [[newest - 2, newest] for newest in range(2, 2 * len(left) + 1, 2)]
    assert len(left) >= 5


def test_in_a_calm_round_each_shard_is_reduced_once_and_by_its_owner() -> None:
    for world_size in (2, 3):
        simulation = calm(world_size=world_size, entries=[6] * world_size)
        simulation.run()
        created = Counter(
            (int(found[1]), int(found[2]), who)
            for _, who, what in simulation.world.trace
            if (found := re.match(r"create run/diloco/main/r(\d+)/mean/(\d+):", what))
        )
        expected = Counter(
            (entry, shard, f"rank {rank}.{rank}")
            for entry, seal in enumerate(simulation.seals())
            for shard in range(seal.shards)
            for rank in owners(entry, seal.owners, shard)[:1]
        )
        assert created == expected
        assert len(expected) == 6 * world_size


def test_means_are_sums_in_rank_order_whichever_rank_reduces_them_in_whatever_order_replicas_arrive() -> None:
    n, arrivals = 4, set()
    values = np.random.default_rng(0).lognormal(0.0, 6.0, (n, SLOTS)).astype(np.float32)
    pack = IntegerState.pack

    def packing(self: IntegerState, entry: int, *streaming: Any) -> Any:
        self.undone[0][:] = values[self.slot]  # fractions, whose sum is rounded
        return pack(self, entry, *streaming)

    def mean(order: list[int]) -> bytes:
        total = values[order[0]] * np.float32(1 / n)
        for rank in order[1:]:
            total = total + values[rank] * np.float32(1 / n)
        return bytes(total.tobytes())

    assert len({mean(order) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 3, 1], [1, 3, 0, 2])}) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IntegerState, "pack", packing)
        patch.setattr("simulation.simulation._reduce_of_host", lambda host: weighted_mean)
        patch.setattr(Simulation, "_check_history", lambda self: None)  # this check needs whole numbers
        for seed in range(8):
            simulation = calm(world_size=n, entries=[3] * n, seed=seed)
            simulation.run()
            created_s = simulation.store.created_s
            for entry in range(3):
                assert simulation.stored_mean(entry)[0].tobytes() == mean([0, 1, 2, 3]), seed
                contributions = [simulation.keys.contribution(entry, rank) for rank in range(n)]
                arrivals.add(tuple(sorted(range(n), key=lambda rank: created_s[contributions[rank]])))
    assert len(arrivals) > 6


# -- several fragments -------------------------------------------------------------------------------------------------


def each_fragment_is_compared_with_its_own_next_seal(
    n_fragments: int, flipped: int | None, sharded: bool, patch: pytest.MonkeyPatch
) -> None:
    simulation = calm(entries=[16] * 3, snapshot_every=100, n_fragments=n_fragments, sharded=sharded)
    reloaded: list[int] = []
    reload, apply = LogReplayer.reload, IntegerState.apply

    def reloading(self: LogReplayer, above: int = -1) -> bool:
        if self._context.me.rank == 2:
            reloaded.append(self.position)
        return reload(self, above)

    def applying(self: IntegerState, entry: int, *arguments: Any, **options: Any) -> ApplyStats:
        applied = apply(self, entry, *arguments, **options)
        if self is simulation.states[2] and entry == flipped:
            self.flip(entry % n_fragments)
        return applied

    patch.setattr(LogReplayer, "reload", reloading)
    patch.setattr(IntegerState, "apply", applying)
    world = simulation.world
    simulation.store.when_created("r2/contribution/2", lambda: world.hold("rank 2.2", world.now + 60))
    simulation.run()
    assert len(simulation.seals()) >= 16
    assert reloaded == ([] if flipped is None else [flipped + 1])


def test_catching_up_compares_each_fragment_with_its_own_next_seal() -> None:
    for n_fragments, flipped, sharded in product((2, 3), (None, 3, 4), (True, False)):
        with pytest.MonkeyPatch.context() as patch:
            each_fragment_is_compared_with_its_own_next_seal(n_fragments, flipped, sharded, patch)


def test_without_a_look_at_the_next_seal_a_flipped_bit_is_noticed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare each entry when it is applied, because sealed entries are applied one after another without a step."""
    monkeypatch.setattr(RoundRunner, "_check_next_seal", lambda self, entry: None)
    with pytest.raises(AssertionError):
        each_fragment_is_compared_with_its_own_next_seal(3, 5, False, monkeypatch)
