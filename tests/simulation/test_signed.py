"""V8: in a signed run, only objects that were made with the key enter a mean or a state.

An adversary who can write to the store replaces objects at any time. The new objects are forged, or are genuine objects
of other rounds, ranks and runs. Some genuine objects come back later. The run may stop, but every replica that
continues has the log's state.
"""

from __future__ import annotations

import hmac
import logging
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from diloco.rendezvous.envelope import UNSIGNED, BadRecordError, Proof, Signatures, frame, proof_of, unproven_fields
from diloco.rendezvous.frames import Seal
from diloco.rendezvous.restore import SnapshotReader
from diloco.rendezvous.snapshot import SnapshotPointer
from diloco.rendezvous.training_state import Arrays
from diloco.wires.wire import Floats
from simulation.integer_state import BLOCK_ELEMENTS, SLOTS, IntegerState
from simulation.invariants import Process, Violation
from simulation.scenario import CALM
from simulation.simulation import Simulation
from simulation.world import HEAD_BYTES, SimulatedStore

KEY = b"the key of this run"
STRANGER = proof_of(b"the key of somebody else")
OBJECTS = re.compile(r"/(contribution|mean|seal|snapshot|part)/")
STOPPED = re.compile(r": (Divergence|Contribution|Aborted|Corrupt|QuorumTimeout)\w*Error: |^I4|^I13")
STEERED = re.compile(r"V8: |Violation: entry \d+: the sealed contribution of rank \d+ was never stored")
SCHEDULES = 12


@dataclass
class Attacked(Simulation):
    """A schedule without random faults."""

    proof: Proof = field(default_factory=lambda: proof_of(KEY))
    attacks: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.chance = random.Random(f"adversary {self.scenario.seed}")
        self.world.at(self.chance.uniform(0.0, 20.0), self.attack)

    def attack(self) -> None:
        """Replace an object by a forged one, and perhaps put the genuine one back later."""
        if self.live or self.world.now < 30.0:
            self.world.at(self.chance.expovariate(2.0), self.attack)
        objects = self.store.objects
        keys = [key for key in objects if OBJECTS.search(key)]
        if not keys:
            return
        key = self.chance.choice(keys)
        acts = self.forged, self.unsigned, self.of_another_run, self.of_another_object, self.changed
        act = self.chance.choice(acts)
        target = re.sub(r"(/r|seal/)(\d+)", lambda m: f"{m[1]}{int(m[2]) + self.chance.choice([0, 0, 1])}", key)
        value, before = act(key, target), objects.get(target)
        if value is None or value == before:
            return
        self.attacks[act.__name__] += 1
        self.world.note(f"{target} is {act.__name__}")
        objects[target] = value
        if self.chance.random() < 0.9:
            self.world.at(self.chance.choice([0.002, 0.1, 1.0, 5.0]), lambda: self.put_back(target, value, before))

    def put_back(self, key: str, mine: bytes, before: bytes | None) -> None:
        if self.store.objects.get(key) == mine:
            if before is None:
                del self.store.objects[key]
            else:
                self.store.objects[key] = before

    def framed_by(self, key: str, proof: Proof, name: str) -> bytes | None:
        """Return an object with more work of a rank in it. Everything in it is right except the proof."""
        value = self.store.objects[key]
        try:
            fields = unproven_fields(value)
        except BadRecordError:
            return None
        head = value[: len(value) - len(self.payload_of(key))]
        payload = (np.frombuffer(self.payload_of(key), np.float32) + np.float32(64)).tobytes()
        if "blocks" in fields:
            fields["blocks"] = "".join(proof.digest(payload[at : at + 16]) for at in range(0, len(payload), 16))
        if "mean" in fields:
            fields["mean"] = proof.digest(payload)
        made = frame(fields, name, proof)
        return made.ljust(len(head), b"\0") + payload

    def payload_of(self, key: str) -> bytes:
        value, n_bytes = self.store.objects[key], 4 * SLOTS
        if "/mean/" in key:
            return value[HEAD_BYTES:]
        has_payload = "/contribution/" in key or ("/seal/" in key and "mean" in unproven_fields(value))
        return value[-n_bytes:] if has_payload and len(value) > n_bytes else b""

    def forged(self, key: str, target: str) -> bytes | None:
        return self.framed_by(key, STRANGER, target)

    def unsigned(self, key: str, target: str) -> bytes | None:
        return self.framed_by(key, UNSIGNED, target)

    def of_another_run(self, key: str, target: str) -> bytes | None:
        return self.framed_by(key, self.proof, f"another-{target}")

    def of_another_object(self, key: str, target: str) -> bytes | None:
        """Return a genuine object of another round or rank, or an earlier value of this object."""
        kind = OBJECTS.search(key)
        assert kind
        others = [value for other, values in self.store.ever.items() if kind[0] in other for value in values]
        return self.chance.choice(others)

    def changed(self, key: str, target: str) -> bytes | None:
        value = self.store.objects[key]
        at = self.chance.randrange(len(value))
        return value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]

    def _train(self, process: Process, checkpoint: Any) -> None:
        replay = process.state.replay

        def checked(entry: int, mean: Sequence[memoryview]) -> None:
            if mean:
                self.check_mean(entry, np.frombuffer(b"".join(mean), np.float32))
            replay(entry, mean)

        process.state.replay = checked  # type: ignore[method-assign]
        super()._train(process, checkpoint)

    def _check_state(self, state: IntegerState, position: int) -> None:
        """Do nothing: if a mean was forged, replicas may read different inputs and reload the state from the log."""

    def check_mean(self, entry: int, mean: Floats) -> None:
        """Check that each mean has only work of replicas that the seal names."""
        if self.keys.seal(entry) not in self.store.ever:
            raise Violation(f"V8: no replica has sealed entry {entry}")
        seal = self.seal_of(entry)
        sent = {rank: self.sealed_contribution(entry, rank, seal)[1] for rank in seal.inputs}
        ways = [ranks for n in range(len(sent) + 1) for ranks in combinations(sent, n)]
        for at in range(0, SLOTS, BLOCK_ELEMENTS):
            block = slice(at, at + BLOCK_ELEMENTS)
            if not any(np.allclose(mean[block], mean_of(seal, sent, ranks)[block]) for ranks in ways):
                raise Violation(f"V8: in the mean of entry {entry} is {mean}, and its members sent {sent}")

    def check(self) -> None:
        """Check that no forged object has changed the state of a replica."""
        for rank in [*range(self.scenario.world_size), *[None] * self.scenario.joiners]:
            self._spawn(rank, delay_s=self.chance.uniform(0.0, 3.0))
        self.world.run(200.0)
        if steered := [failure for failure in self.failures if not STOPPED.search(failure)]:
            raise Violation(steered[0])


def mean_of(seal: Seal, sent: Mapping[int, Floats], ranks: Sequence[int]) -> Floats:
    """Return the mean of the work of some replicas of a seal. Without any replica it is zero."""
    total = sum(seal.replicas[rank].weight for rank in ranks)
    return sum((sent[rank] * (seal.replicas[rank].weight / total) for rank in ranks), np.zeros(SLOTS, np.float32))


def attacked(seed: int) -> Attacked:
    world_size = 2 + seed % 3
    return Attacked(
        replace(
            CALM,
            seed=seed,
            world_size=world_size,
            entries=[12] * world_size,
            sharded=seed % 2 == 0,
            streams=seed % 3 == 0,
            n_fragments=1 + seed % 2,
            snapshot_every=2,
            grace_s=3.0,
            joiners=seed % 4 // 3,
        ),
        is_traced=False,
    )


@pytest.fixture(autouse=True)
def _snapshots_are_checked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Check that a replica loads only a state that a replica has stored under the same key."""
    caplog.set_level(logging.ERROR, "diloco")
    took = SnapshotReader._took

    def checked(self: SnapshotReader, entry: int, pointer: SnapshotPointer, arrays: Arrays) -> bool:
        key, store = self._keys.snapshot(entry), self._store.store
        assert isinstance(store, SimulatedStore)
        if pointer not in [SnapshotPointer.parse(value, key, self._context.proof) for value in store.ever.get(key, ())]:
            raise Violation(f"V8: no replica has written the pointer that rank {self._me.rank} read from {key}")
        return took(self, entry, pointer, arrays)

    monkeypatch.setattr(SnapshotReader, "_took", checked)


def test_forged_records_can_stop_a_signed_run_but_not_change_it() -> None:
    attacks: Counter[str] = Counter()
    adopted = 0
    for seed in range(SCHEDULES):
        simulation = attacked(seed)
        simulation.check()
        attacks += simulation.attacks
        adopted += sum(len(process.adopted_s) for process in simulation.processes)
    assert min(attacks.values()) > 5 * SCHEDULES, attacks
    assert len(attacks) == 5
    assert adopted > 3 * SCHEDULES, "too few rounds were sealed, so nothing was tested"


def without_the_object_s_key(self: Signatures, key: str, head: bytes) -> bytes:
    return HEAD(self, "", head)


HEAD = Signatures.of_head
MUTANTS = {
    "the HMAC leaves the object's key out": (Signatures, "of_head", without_the_object_s_key),
    "the HMAC has no key": (Signatures, "of_head", lambda self, key, head: UNSIGNED.of_head(key, head)),
    "proofs are not compared": (hmac, "compare_digest", lambda mine, found: True),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_undoing_a_rule_of_signing_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[mutant])
    assert STEERED.search(first_violation())


def first_violation() -> str:
    for seed in range(100):
        try:
            attacked(seed).check()
        except Violation as violation:
            return str(violation)
    return "nothing in 100 schedules"
