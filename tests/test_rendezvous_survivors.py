"""Rules that could be undone unnoticed once: each has a test here that fails when it is, in the simulated world.

Those that need the real training state are in `test_diloco_survivors.py`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rendezvous_simulation import Simulation
from simulated_invariants import Process
from simulated_plan import Plan
from simulated_work import SLOTS, Toy
from simulated_world import Died, Faults, SimulatedStore, World

from diloco.keeping import collect_garbage
from diloco.keys import Keys
from diloco.membership import Identity, claim
from diloco.patience import PatientStore
from diloco.records import Seal, hash_order
from diloco.reduction import weighted_mean
from diloco.rendezvous import Rendezvous
from diloco.sharding import owners
from diloco.snapshot import Pointer, get_parts, put_parts
from executors.store import Data, MemoryStore
from executors.store.faulty import FaultyStore

GRACE_S = 3.0
CALM = Plan(
    seed=1,
    world_size=3,
    n_fragments=1,
    entries=[8, 8, 8],
    sharded=True,
    overlap=False,
    min_quorum=1,
    all_leave_outcomes=True,
    copies=0.0,
    faults=Faults(),
    step_s=(0.5, 2.0),
    grace_s=GRACE_S,
)


def calm(**changes: Any) -> Simulation:
    return Simulation(replace(CALM, faults=Faults(), **changes))


def seals_of(simulation: Simulation) -> list[Seal]:
    """Return the seals in their order, as they were created."""
    seals: list[Seal] = []
    while (key := simulation.keys.seal(len(seals))) in simulation.store.ever:
        seals.append(Seal.parse(simulation.store.ever[key][0]))
    return seals


def counted_units(simulation: Simulation, slot: int) -> float:
    """Return how much work of a process the seals count."""
    return sum(
        float(simulation.sealed_contribution(entry, rank, seal)[1][slot])
        for entry, seal in enumerate(seals_of(simulation))
        for rank in seal.inputs
    )


def when_created(simulation: Simulation, key: str, act: Any) -> None:
    """Do something when an object of this name is created."""
    create = simulation.store._create

    def watching(created: str, value: bytes) -> bool:
        is_new = create(created, value)
        if is_new and created.endswith(key):
            act()
        return is_new

    simulation.store._create = watching  # type: ignore[method-assign,assignment]


# -- what is counted, and how ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [True, False])
def test_who_weighs_three_times_as_much_counts_three_times_as_much(sharded: bool) -> None:
    simulation = calm(weights=[1.0, 2.0, 3.0], sharded=sharded, entries=[4, 4, 4])
    simulation.run()
    for entry in range(4):
        mean = simulation._standing_mean(entry)[0]
        assert mean[:3].tolist() == pytest.approx([1 / 6, 2 / 6, 3 / 6])


@pytest.mark.parametrize("sharded", [True, False])
def test_two_of_three_are_not_enough_for_a_quorum_of_three_however_long_they_wait(sharded: bool) -> None:
    simulation = calm(min_quorum=3, sharded=sharded, entries=[2, 2, 2])
    simulation.world.hold("rank 2.2", 100 * GRACE_S)
    simulation.run()
    assert [set(seal.members) for seal in seals_of(simulation)] == [{0, 1, 2}] * 2  # three of three are enough
    sent_s = [simulation.store.created_s[simulation.keys.contribution(0, rank)] for rank in range(3)]
    sealed_s = simulation.store.created_s[simulation.keys.seal(0)]
    assert max(sent_s[:2]) < 10 * GRACE_S
    assert sealed_s > sent_s[2] >= 100 * GRACE_S


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("n_fragments", [1, 2])
def test_work_that_was_made_from_another_anchor_is_not_counted(
    n_fragments: int, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = calm(n_fragments=n_fragments, sharded=sharded)
    pack = Toy.pack

    def packing(self: Toy, entry: int, *streaming: Any) -> Any:
        if self is simulation.toys[2] and entry == 1:
            self.flip(entry % n_fragments)
        return pack(self, entry, *streaming)

    monkeypatch.setattr(Toy, "pack", packing)
    simulation.run()
    seals = seals_of(simulation)
    assert simulation.keys.contribution(1, 2) in simulation.store.ever
    assert set(seals[1].members) == {0, 1}
    for entry, seal in enumerate(seals):
        anchors = {simulation.sealed_contribution(entry, rank, seal)[0].anchor for rank in seal.members}
        assert anchors == {seal.anchor}


def test_what_was_counted_since_a_checkpoint_is_not_counted_again_by_who_starts_from_it() -> None:
    simulation = calm(world_size=2, entries=[30, 30], steps_per_entry=2, snapshot_every=2)
    checkpoints: list[tuple[int, Any]] = []

    def training(me: Identity, rendezvous: Rendezvous, toy: Toy) -> None:
        if (me.rank, me.attempt) != (0, 0):
            return
        if rendezvous.position == 3 and rendezvous.phase.since == 1:
            checkpoints.append((rendezvous.position, toy.progress()))
        if rendezvous.position == 4:
            raise Died  # when the work in the checkpoint was counted

    def come_back(process: Process) -> None:
        simulation._spawn(0, 60.0, checkpoints[0])

    simulation._perhaps_copy = training  # type: ignore[method-assign]
    simulation._bury = come_back  # type: ignore[method-assign]
    simulation.run()
    first, _, second = simulation.toys
    assert checkpoints[0][1][0][0] == 1.0
    assert second.done > 0
    assert {0, 1} == set(seals_of(simulation)[3].members)
    assert counted_units(simulation, 0) == first.done


def test_a_seal_that_rots_while_it_is_jumped_over_lets_the_work_be_dropped_and_nobody_hang() -> None:
    simulation = calm(entries=[14, 14, 14], snapshot_every=2)
    sent = simulation.keys.contribution(4, 2)
    seal = simulation.keys.seal(4)

    def rot() -> None:
        assert simulation.keys.mean(4, 0) not in simulation.store.objects  # the others are beyond it
        value = simulation.store.objects[seal]
        simulation.store.objects[seal] = value[:40] + bytes([value[40] ^ 1]) + value[41:]

    def hold() -> None:
        simulation.world.hold("rank 2.2", simulation.world.now + 200.0)
        simulation.world.at(190.0, rot)

    when_created(simulation, sent, hold)
    simulation.run()
    assert 2 in seals_of(simulation)[4].members
    assert sorted(simulation.clean) == [0, 1, 2]
    assert simulation.toys[2].dropped
    assert counted_units(simulation, 2) <= simulation.toys[2].done
    assert counted_units(simulation, 2) >= 5


# -- who is who --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_two_joiners_at_once_share_no_rank_and_fence_nobody(seed: int) -> None:
    world = World(seed)
    store, keys = SimulatedStore(world), Keys("run", "main")
    found: list[Identity] = []

    def join(name: str) -> None:
        patient = PatientStore(store, clock=world.clock, error_patience_s=1e6)
        found.append(claim(patient, keys, None, 2, name, lambda: world.sleep(0.1)))

    for name in ("one", "other", "third"):
        world.spawn(name, lambda name=name: join(name))  # type: ignore[misc]
    world.run()
    assert sorted((me.rank, me.attempt) for me in found) == [(2, 0), (3, 0), (4, 0)]
    assert len({me.nonce for me in found}) == 3


def test_two_joiners_at_once_both_come_to_be_counted() -> None:
    simulation = calm(entries=[20, 20, 20], snapshot_every=2)
    for _ in range(2):
        simulation.world.at(10.0, lambda: simulation._spawn(None, 0.0))
    simulation.run()
    claims = [key for key in simulation.store.objects if key.endswith("started.json")]
    assert sorted(claims) == [simulation.keys.claim(rank, 0) for rank in range(5)]
    assert set(seals_of(simulation)[-1].members) == {0, 1, 2, 3, 4}


def claimed(store: Any, nonce: str = "mine") -> Identity:
    patient = PatientStore(store, clock=lambda: 0.0, error_patience_s=1e6)
    return claim(patient, Keys("run", "main"), 0, 1, nonce, lambda: None)


def test_a_claim_whose_reply_is_lost_is_one_s_own_nevertheless() -> None:
    store = FaultyStore(MemoryStore(), seed=0)
    store.fail_at("put_if_absent", key="*/started.json", action="lost")
    assert claimed(store).attempt == 0
    assert len(store.log) == 1


class Boastful(MemoryStore):
    """Lets somebody else come first, and says that it was us."""

    def put_if_absent(self, key: str, data: Data) -> bool:
        super().put_if_absent(key, b'{"nonce": "another"}') if key.endswith("/0/started.json") else None
        super().put_if_absent(key, data)
        return True


def test_a_claim_that_the_store_confirms_is_another_s_where_another_s_nonce_stands() -> None:
    assert claimed(Boastful()).attempt == 1


GOLDEN_ORDERS = {
    ("mean", 0): [1, 0, 4, 2, 5, 3],
    ("seal", 7): [5, 4, 1, 2, 3, 0],
    ("snapshot", 10): [4, 3, 5, 0, 2, 1],
}


def test_hash_orders_are_those_that_other_versions_of_this_code_find() -> None:
    assert {about: hash_order(range(6), *about) for about in GOLDEN_ORDERS} == GOLDEN_ORDERS


@pytest.mark.parametrize("seed", ["1", "2"])
def test_hash_orders_do_not_depend_on_the_process(seed: str) -> None:
    code = f"from diloco.records import hash_order\nprint([hash_order(range(6), *a) for a in {list(GOLDEN_ORDERS)}])"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(list(GOLDEN_ORDERS.values()))


# -- snapshots and means -----------------------------------------------------------------------------------------------


def whole_snapshots(store: PatientStore, keys: Keys, most: int) -> list[int]:
    """Return the entries before which a snapshot stands that can be read."""
    pointers = {entry: store.look(keys.snapshot(entry)) for entry in range(most + 1)}
    return [
        entry
        for entry, data in pointers.items()
        if data is not None and get_parts(store, keys, entry, Pointer.parse(data)) is not None
    ]


def test_after_each_collection_the_two_newest_snapshots_stand_whole() -> None:
    store, keys = PatientStore(MemoryStore(), clock=lambda: 0.0, error_patience_s=1e6), Keys("run", "main")
    for entry in range(0, 13, 3):
        if entry == 6:
            continue  # its writer has died: a multiple may have no snapshot
        digests = put_parts(store, keys, entry, "nonce", {"a": np.full(3, entry, np.float32)})
        assert digests is not None
        store.create(keys.snapshot(entry), Pointer("nonce", 0, digests, ("s",), {}).data())
        collect_garbage(store, keys, entry, 3)
        assert whole_snapshots(store, keys, 12) == {0: [0], 3: [0, 3], 9: [3, 9], 12: [9, 12]}[entry]


@pytest.mark.parametrize("n_fragments", [1, 2])
def test_two_whole_snapshots_stand_after_each_collection_of_a_run(
    n_fragments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = calm(entries=[16] * 3, snapshot_every=2, n_fragments=n_fragments)
    stood: list[list[int]] = []

    def looking(store: PatientStore, keys: Keys, newest: int, snapshot_every: int) -> None:
        collect_garbage(store, keys, newest, snapshot_every)
        stood.append(whole_snapshots(store, keys, newest)[-2:])

    monkeypatch.setattr("diloco.keeping.collect_garbage", looking)
    simulation.run()
    assert stood == [[newest - 2, newest] for newest in range(2, 2 * len(stood) + 1, 2)]
    assert len(stood) >= 5


@pytest.mark.parametrize("world_size", [2, 3])
def test_in_a_calm_round_each_shard_is_reduced_once_and_by_its_owner(world_size: int) -> None:
    simulation = calm(world_size=world_size, entries=[6] * world_size)
    simulation.run()
    created = Counter(
        (int(found[1]), int(found[2]), who)
        for _, who, what in simulation.world.trace
        if (found := re.match(r"create run/diloco/main/r(\d+)/mean/(\d+):", what))
    )
    expected = Counter(
        (entry, shard, f"rank {rank}.{rank}")
        for entry, seal in enumerate(seals_of(simulation))
        for shard in range(seal.shards)
        for rank in owners(entry, seal.owners, shard)[:1]
    )
    assert created == expected
    assert len(expected) == 6 * world_size


def test_means_are_sums_in_rank_order_whoever_reduces_them(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 4
    values = np.random.default_rng(0).lognormal(0.0, 6.0, (n, SLOTS)).astype(np.float32)
    simulation = calm(world_size=n, entries=[3] * n)
    pack = Toy.pack

    def packing(self: Toy, entry: int, *streaming: Any) -> Any:
        self.undone[0][:] = values[self.slot]  # not whole numbers: the sum rounds
        return pack(self, entry, *streaming)

    monkeypatch.setattr(Toy, "pack", packing)
    monkeypatch.setattr("rendezvous_simulation._reduce_of_host", lambda host: weighted_mean)
    monkeypatch.setattr(Simulation, "_check_history", lambda self: None)  # what is in it can be read off whole numbers
    simulation.run()

    def mean(order: list[int]) -> bytes:
        total = values[order[0]] * np.float32(1 / n)
        for rank in order[1:]:
            total = total + values[rank] * np.float32(1 / n)
        return bytes(total.tobytes())

    assert len({mean(order) for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 3, 1], [1, 3, 0, 2])}) == 4
    for entry in range(3):
        assert simulation._standing_mean(entry)[0].tobytes() == mean([0, 1, 2, 3])


# -- several fragments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("flipped", [None, 3, 4])
@pytest.mark.parametrize("n_fragments", [2, 3])
def test_who_catches_up_compares_each_fragment_with_its_own_next_seal(
    n_fragments: int, flipped: int | None, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation = calm(entries=[16] * 3, snapshot_every=100, n_fragments=n_fragments, sharded=sharded)
    reloaded: list[int] = []
    reload, apply = Rendezvous._reload, Toy.apply

    def reloading(self: Rendezvous, above: int = -1) -> bool:
        if self._me.rank == 2:
            reloaded.append(self.position)
        return reload(self, above)

    def applying(self: Toy, entry: int, *settling: Any) -> None:
        apply(self, entry, *settling)
        if self is simulation.toys[2] and entry == flipped:
            self.flip(entry % n_fragments)

    monkeypatch.setattr(Rendezvous, "_reload", reloading)
    monkeypatch.setattr(Toy, "apply", applying)
    when_created(simulation, "r2/contribution/2", lambda: simulation.world.hold("rank 2.2", simulation.world.now + 60))
    simulation.run()
    assert len(seals_of(simulation)) >= 16
    assert reloaded == ([] if flipped is None else [flipped + 1])


def test_who_does_not_look_at_the_next_seal_notices_a_flipped_bit_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the end: entries that are sealed are adopted in one go, and each is compared when it is applied."""
    monkeypatch.setattr(Rendezvous, "_check_next_seal", lambda self, r: None)
    with pytest.raises(AssertionError):
        test_who_catches_up_compares_each_fragment_with_its_own_next_seal(3, 5, False, monkeypatch)
