"""Thousands of random schedules, and each rule of the protocol undone in turn: the simulation must notice."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rendezvous_simulation import run_schedule
from simulated_invariants import Violation
from simulated_world import Faults

from diloco.keeping import Keeper, collect_garbage
from diloco.keys import Keys
from diloco.log import Log
from diloco.means import InputGoneError, Means
from diloco.patience import PatientStore
from diloco.records import MeanHead, Seal, digests_of
from diloco.reduction import BadInputError, Input, weighted_mean
from diloco.rendezvous import Rendezvous
from diloco.rounds import Round
from diloco.sealing import Sealing
from diloco.work import Settled

SCHEDULES = int(os.environ.get("REPLICAS_SCHEDULES", "5000"))
FIRST_SEED = int(os.environ.get("REPLICAS_FIRST_SEED", "0"))
"""Fresh seeds: REPLICAS_FIRST_SEED=$RANDOM000 REPLICAS_SCHEDULES=100000 pytest tests/test_rendezvous_simulation.py"""


@pytest.mark.parametrize("part", range(8))
@pytest.mark.timeout(3600)
def test_invariants_hold_in_random_schedules_of_faults(part: int) -> None:
    for seed in range(FIRST_SEED + part, FIRST_SEED + SCHEDULES, 8):
        run_schedule(seed)


@pytest.mark.parametrize("seed", [513, 2238, 3002, 101429, 492212788596, 325973480116, 855278631975])
def test_schedules_that_once_found_something_stay_fine(seed: int) -> None:
    """A joiner's claim seen late; readings that failed for good; a mean made again; a first anchor put again.

    The last two: copies that died before they knew of their claim, or with two, and whose end stood under another.
    """
    run_schedule(seed)


def test_a_seed_replays_its_schedule() -> None:
    assert run_schedule(7).world.schedule() == run_schedule(7).world.schedule()


Patch = Callable[[pytest.MonkeyPatch], None]


def seals_are_collected(patch: pytest.MonkeyPatch) -> None:
    """Seals are deleted with the rest."""

    def mutant(store: PatientStore, keys: Keys, newest: int, snapshot_every: int) -> None:
        collect_garbage(store, keys, newest, snapshot_every)
        for entry in range(newest - snapshot_every):
            store.remove(keys.seal(entry))

    patch.setattr("diloco.keeping.collect_garbage", mutant)


def the_answer_of_the_own_put_is_believed(patch: pytest.MonkeyPatch) -> None:
    """Work counts as sent only when the store answered."""
    answered: set[tuple[int, str]] = set()

    def create(self: PatientStore, key: str, data: Any) -> None:
        try:
            if self.store.put_if_absent(key, data):
                answered.add((id(self), key))
        except Exception:  # noqa: BLE001 - whatever the store says
            answered.discard((id(self), key))

    applied = Rendezvous._apply

    def apply(self: Rendezvous, r: Round, seal: Seal, mean: Any) -> Any:
        key = self._keys.contribution(r.entry, self._me.rank)
        verdict = Settled.COUNTED if (id(self._store), key) in answered else Settled.KEPT
        patch.setattr(self._log, "settle", lambda seal: verdict)
        return applied(self, r, seal, mean)

    patch.setattr(PatientStore, "create", create)
    patch.setattr(Rendezvous, "_apply", apply)


def another_nonce_is_not_settled(patch: pytest.MonkeyPatch) -> None:
    settle = Log.settle

    def mutant(self: Log, seal: Seal) -> Settled:
        settled = settle(self, seal)
        return Settled.KEPT if settled is Settled.DROPPED else settled

    patch.setattr(Log, "settle", mutant)


def everybody_averages_for_itself(patch: pytest.MonkeyPatch) -> None:
    def collect(self: Means, r: Round, seal: Seal) -> Any:
        if not seal.shards:
            return [memoryview(seal.mean)]
        try:
            return [memoryview(bytes(self._compute(r, seal, shard)[1])) for shard in range(seal.shards)]
        except InputGoneError:
            return None

    patch.setattr(Means, "collect", collect)


def the_owner_applies_its_own_bytes(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: Means, r: Round, seal: Seal, shard: int, head: MeanHead, payload: memoryview) -> Any:
        return payload

    patch.setattr(Means, "_adopt_standing", mutant)


def parts_have_common_keys(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keys, "part", lambda self, entry, nonce, index: f"{self.run_id}/diloco/main/part/{entry}/{index}")


def gone_is_corrupt(patch: pytest.MonkeyPatch) -> None:
    read = Means._input

    def mutant(self: Means, r: Round, seal: Seal, rank: int, shard: int) -> Input:
        try:
            return read(self, r, seal, rank, shard)
        except InputGoneError:
            raise BadInputError(rank, "is gone") from None

    patch.setattr(Means, "_input", mutant)


def rotten_inputs_are_averaged(patch: pytest.MonkeyPatch) -> None:
    def trusting(inputs: list[Input], out: memoryview, *, block_bytes: int) -> tuple[str, ...]:
        honest = [Input(i.rank, i.weight, i.data, digests_of(i.data, block_bytes)) for i in inputs]
        return weighted_mean(honest, out, block_bytes=block_bytes)

    patch.setattr("rendezvous_simulation.weighted_mean", trusting)
    patch.setattr("diloco.sealing._is_intact", lambda head, payload, block_bytes: True)


def rotten_inputs_are_never_left_out(patch: pytest.MonkeyPatch) -> None:
    compute = Means._compute

    def mutant(self: Means, r: Round, seal: Seal, shard: int) -> tuple[MeanHead, memoryview]:
        head, payload = compute(self, r, seal, shard)
        if head.left_out:
            raise InputGoneError
        return head, payload

    patch.setattr(Means, "_compute", mutant)


def nobody_says_bye(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rendezvous, "say_bye", lambda self: None)


def the_seal_is_not_read_back(patch: pytest.MonkeyPatch) -> None:
    """Who seals applies its own decision."""
    seal_with = Sealing._seal_with
    own: dict[tuple[int, int], Seal] = {}

    def sealing(self: Sealing, r: Round, good: set[int], anchor: str) -> bool:
        create = self._store.create

        def remember(key: str, data: Any) -> None:
            own.setdefault((id(self._store), r.entry), Seal.parse(b"".join(data)))
            create(key, data)

        patch.setattr(self._store, "create", remember, raising=False)
        try:
            return seal_with(self, r, good, anchor)
        finally:
            patch.delattr(self._store, "create", raising=False)

    read = Log.seal
    patch.setattr(Sealing, "_seal_with", sealing)
    patch.setattr(Log, "seal", lambda self, entry: own.get((id(self._store), entry)) or read(self, entry))


def live_work_survives_being_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Log, "settle", lambda self, seal: Settled.KEPT)


def missing_inputs_count_as_decided(patch: pytest.MonkeyPatch) -> None:
    """A reader that finds no mean takes zeros."""
    collect = Means.collect

    def mutant(self: Means, r: Round, seal: Seal) -> Any:
        mean = collect(self, r, seal)
        return mean if mean is not None else [np.zeros(r.size_bytes, np.uint8).data]

    patch.setattr(Means, "collect", mutant)


def pointers_are_created_at_once(patch: pytest.MonkeyPatch) -> None:
    """A snapshot's pointer does not wait for seals that agree with it."""
    patch.setattr(Keeper, "_agrees", lambda self, copy, entry, seal: True)


def what_is_jumped_over_is_not_settled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Log, "verdicts", lambda self, first, end, n_fragments: [None] * n_fragments)


def everything_is_collected(patch: pytest.MonkeyPatch) -> None:
    """The horizon is the newest snapshot's, and its own parts go too."""

    def mutant(store: PatientStore, keys: Keys, newest: int, snapshot_every: int) -> None:
        collect_garbage(store, keys, newest, snapshot_every)
        for key in store.found(keys.parts()):
            store.remove(key)

    patch.setattr("diloco.keeping.collect_garbage", mutant)


MUTANTS: list[Patch] = [
    seals_are_collected,
    the_answer_of_the_own_put_is_believed,
    another_nonce_is_not_settled,
    everybody_averages_for_itself,
    the_owner_applies_its_own_bytes,
    parts_have_common_keys,
    gone_is_corrupt,
    rotten_inputs_are_averaged,
    rotten_inputs_are_never_left_out,
    nobody_says_bye,
    the_seal_is_not_read_back,
    live_work_survives_being_counted,
    missing_inputs_count_as_decided,
    pointers_are_created_at_once,
    what_is_jumped_over_is_not_settled,
    everything_is_collected,
]


def tilted(mutant: Patch, seed: int) -> dict[str, Any]:
    """Return changes of a plan that make what a mutant gets wrong more likely, so that few schedules show it."""
    pair = {"world_size": 2, "entries": [9, 9], "n_fragments": 1, "snapshot_every": 1, "flip": None}
    if mutant is rotten_inputs_are_never_left_out:
        return {**pair, "sharded": True, "joiners": 0, "copies": 0.0, "faults": Faults(rots=0.02)}
    if mutant is pointers_are_created_at_once:
        flip = (seed % 3, 2 + seed % 3, 1)  # before an even entry it goes into a copy that only the next seal refutes
        three = {"world_size": 3, "entries": [6] * 3, "n_fragments": 2, "snapshot_every": 2}
        return {**three, "flip": flip, "copies": 0.0, "joiners": 0, "faults": Faults()}
    return {}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_undoing_a_rule_of_the_protocol_is_noticed(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    for seed in range(4000):
        try:
            run_schedule(seed, **tilted(mutant, seed))
        except Violation:
            return
    pytest.fail(f"4,000 schedules did not notice that {mutant.__name__.replace('_', ' ')}.")


@pytest.mark.parametrize("mutant", [rotten_inputs_are_never_left_out, pointers_are_created_at_once])
def test_without_the_mutant_the_tilted_plans_are_fine(mutant: Patch) -> None:
    for seed in range(50):
        run_schedule(seed, **tilted(mutant, seed))
