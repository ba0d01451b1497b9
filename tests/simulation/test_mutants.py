"""Undoes each rule of the protocol in turn: the simulation must notice it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from diloco.rendezvous.envelope import UNSIGNED, Proof
from diloco.rendezvous.frames import Seal, digests_of
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.mean import InputGoneError, Reducer
from diloco.rendezvous.reduction import BadInputError, BlockFormat, ShardInput, weighted_mean
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round_runner import RoundRunner
from diloco.rendezvous.seal import Sealer, SealLog
from diloco.rendezvous.snapshot import SnapshotWriter, collect_garbage
from diloco.rendezvous.training_side import TrainingSide
from diloco.rendezvous.training_state import Verdict
from simulation.integer_state import IntegerState
from simulation.invariants import Violation
from simulation.simulation import run_schedule
from simulation.world import Faults

Patch = Callable[[pytest.MonkeyPatch], None]
BROKEN = re.compile("TypeError|AttributeError|NameError")


def replaced(owner: Any, name: str, value: Any) -> Patch:
    return lambda patch: patch.setattr(owner, name, value)


def wrapped(owner: type, name: str, around: Callable[..., Any]) -> Patch:
    """Replace a method by `around(original, self, *arguments)`."""
    original = getattr(owner, name)
    return replaced(owner, name, lambda self, *args, **options: around(original, self, *args, **options))


def collecting(keys_of: Callable[[RetryingStore, Keys, int], list[str]]) -> Patch:
    """Let garbage collection also delete the keys that `keys_of` returns for the horizon."""

    def mutant(store: RetryingStore, keys: Keys, newest: int, snapshot_every: int, proof: Proof) -> None:
        collect_garbage(store, keys, newest, snapshot_every, proof)
        for key in keys_of(store, keys, newest - snapshot_every):
            store.remove(key)

    return lambda patch: patch.setattr("diloco.rendezvous.snapshot.collect_garbage", mutant)


def believe_the_answer_of_the_own_put(patch: pytest.MonkeyPatch) -> None:
    """Treat work as sent only if the store has acknowledged it."""
    answered: set[tuple[int, str]] = set()

    def create(self: RetryingStore, key: str, data: Any) -> None:
        try:
            if self.store.put_if_absent(key, data):
                answered.add((id(self), key))
        except Exception:  # noqa: BLE001 - whatever the store says
            answered.discard((id(self), key))

    def apply(applied: Any, self: RoundRunner, entry: Any, seal: Seal, mean: Any) -> Any:
        key = self._keys.contribution(entry.index, self._me.rank)
        verdict = Verdict.COUNTED if (id(self._store), key) in answered else Verdict.KEPT
        patch.setattr(self.seals, "verdict", lambda seal: verdict)
        return applied(self, entry, seal, mean)

    patch.setattr(RetryingStore, "create", create)
    wrapped(RoundRunner, "_apply", apply)(patch)


def keep_what_another_nonce_counted(verdict: Any, self: SealLog, seal: Seal) -> Any:
    found = verdict(self, seal)
    return Verdict.KEPT if found is Verdict.DROPPED else found


def average_for_oneself(self: Reducer, entry: Any, seal: Seal) -> Any:
    if not seal.shards:
        return [memoryview(seal.mean)]
    try:
        return [memoryview(bytes(self._compute(entry, seal, shard)[1])) for shard in range(seal.shards)]
    except InputGoneError:
        return None


def take_gone_for_corrupt(read: Any, self: Reducer, entry: Any, seal: Seal, rank: int, *part: Any) -> Any:
    try:
        return read(self, entry, seal, rank, *part)
    except InputGoneError:
        raise BadInputError(rank, "is gone") from None


def average_rotten_inputs(patch: pytest.MonkeyPatch) -> None:
    def trusting(
        inputs: list[ShardInput], out: memoryview, blocks: BlockFormat, write: Any = None, clipped: Any = None
    ) -> tuple[str, ...]:
        size = blocks.wire.size(blocks.block_elements)
        honest = [ShardInput(i.rank, i.weight, i.data, digests_of(i.data, size, UNSIGNED)) for i in inputs]
        return weighted_mean(honest, out, blocks, write, clipped)

    patch.setattr("simulation.simulation.weighted_mean", trusting)
    patch.setattr("diloco.rendezvous.seal._is_intact", lambda head, payload, block_bytes, proof: True)


def never_leave_an_input_out(compute: Any, self: Reducer, entry: Any, seal: Seal, shard: int) -> Any:
    head, payload = compute(self, entry, seal, shard)
    if head.left_out:
        raise InputGoneError
    return head, payload


def apply_the_own_seal(patch: pytest.MonkeyPatch) -> None:
    own: dict[tuple[int, int], Seal] = {}

    def sealing(seal_with: Any, self: Sealer, entry: Any, good: set[int], anchor: str) -> Any:
        create = self._store.create

        def remember(key: str, data: Any) -> None:
            own.setdefault((id(self._store), entry.index), Seal.parse(b"".join(data), "", UNSIGNED))
            create(key, data)

        patch.setattr(self._store, "create", remember, raising=False)
        try:
            return seal_with(self, entry, good, anchor)
        finally:
            patch.delattr(self._store, "create", raising=False)

    def read_own(read: Any, self: SealLog, entry: int) -> Any:
        return own.get((id(self._context.store), entry)) or read(self, entry)

    wrapped(Sealer, "_seal_with", sealing)(patch)
    wrapped(SealLog, "seal", read_own)(patch)


def take_all_that_was_held_for_what_was_sent(
    apply: Any, self: IntegerState, entry: int, mean: Any, verdict: Any, packed: Any, **options: Any
) -> Any:
    return apply(self, entry, mean, verdict, None, **options)


def take_zeros_for_a_missing_mean(collect: Any, self: Reducer, entry: Any, seal: Seal) -> Any:
    mean = collect(self, entry, seal)
    return mean if mean is not None else [np.zeros(entry.layout.mean_bytes, np.uint8).data]


NEVER_LEFT_OUT, AT_ONCE = "damaged inputs are never left out", "pointers do not wait for seals that agree with them"
SHOWN_BY = {
    "another nonce changes nothing": 441,
    "gone is corrupt": 555,
    "rotten inputs are averaged": 96,
    "no replica says bye": 21,
    "skipped entries have no verdict": 461,
}
"""Seeds of schedules that show a mutant which few schedules show. They are tried first."""
MUTANTS: dict[str, Patch] = {
    "seals are collected": collecting(lambda store, keys, end: [keys.seal(entry) for entry in range(end)]),
    "a replica believes the reply to its own put": believe_the_answer_of_the_own_put,
    "another nonce changes nothing": wrapped(SealLog, "verdict", keep_what_another_nonce_counted),
    "each replica averages for itself": replaced(Reducer, "collect", average_for_oneself),
    "the owner applies its own bytes": replaced(Reducer, "_adopt_stored", lambda self, e, s, shard, head, own: own),
    "parts have common keys": replaced(Keys, "part", lambda self, entry, nonce, i: self._under(f"part/{entry}/{i}")),
    "gone is corrupt": wrapped(Reducer, "_input", take_gone_for_corrupt),
    "rotten inputs are averaged": average_rotten_inputs,
    NEVER_LEFT_OUT: wrapped(Reducer, "_compute", never_leave_an_input_out),
    "no replica says bye": replaced(TrainingSide, "say_bye", lambda self: None),
    "the seal is not read back": apply_the_own_seal,
    "counted work stays in the live parameters": replaced(SealLog, "verdict", lambda self, seal: Verdict.KEPT),
    "a missing mean counts as decided": wrapped(Reducer, "collect", take_zeros_for_a_missing_mean),
    AT_ONCE: replaced(SnapshotWriter, "_agrees", lambda self, copy, entry, seal: True),
    "skipped entries have no verdict": replaced(
        SealLog, "verdicts", lambda self, first, end: [None] * len(self._context.layouts)
    ),
    "the rounding error of a wire is lost": wrapped(IntegerState, "apply", take_all_that_was_held_for_what_was_sent),
    "all parts are collected": collecting(lambda store, keys, end: store.list_keys(keys.parts())),
}


def tilted(mutant: str, seed: int) -> dict[str, Any]:
    """Return changes of a scenario that make the fault of a mutant more likely, so that few schedules are enough."""
    pair = {"world_size": 2, "entries": [9, 9], "n_fragments": 1, "snapshot_every": 1, "flip": None}
    if mutant == NEVER_LEFT_OUT:
        return {**pair, "sharded": True, "joiners": 0, "copies": 0.0, "faults": Faults(rots=0.02)}
    if mutant == AT_ONCE:
        # a flip before an even entry gets into a copy that only the next seal refutes
        flip = (seed % 3, 2 + seed % 3, 1)
        three = {"world_size": 3, "entries": [6] * 3, "n_fragments": 2, "snapshot_every": 2}
        return {**three, "flip": flip, "copies": 0.0, "joiners": 0, "faults": Faults()}
    return {}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_undoing_a_rule_of_the_protocol_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    found = first_violation(mutant)
    assert found, f"4,000 schedules did not notice that {mutant}."
    assert not BROKEN.search(found), f"the mutant itself is broken: {found}"


def first_violation(mutant: str) -> str:
    for seed in (SHOWN_BY.get(mutant, 0), *range(4000)):
        try:
            run_schedule(seed, **tilted(mutant, seed))
        except Violation as violation:
            return str(violation)
    return ""


def test_without_the_mutant_the_tilted_plans_are_fine() -> None:
    for mutant in (NEVER_LEFT_OUT, AT_ONCE):
        for seed in range(10):
            run_schedule(seed, **tilted(mutant, seed))
