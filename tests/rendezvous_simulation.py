"""Random schedules of the real rendezvous in a simulated world, and the invariants that must hold in each.

I1 one value ever stands for each seal, snapshot pointer and claim. I2 after each adopted entry the state equals the
log's, and so does every snapshot. I3 each unit of local work is in at most one mean, and in exactly one unless its
process died, was copied, or sent something that rotted. I4 when faults end, all live replicas finish, joiners too.
I10 the first anchor is somebody's model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from simulated_plan import Plan
from simulated_work import BLOCK_BYTES, SLOTS, Toy, step
from simulated_world import MOST_DELAY_S, Died, SimulatedStore, World

from diloco.errors import FencedError, QuorumTimeoutError
from diloco.keys import Keys
from diloco.membership import Identity, claim
from diloco.patience import PatientStore
from diloco.records import Contribution, MeanHead, Seal, digests_of, head_bytes, shard_blocks
from diloco.reduction import Floats, Input, weighted_mean
from diloco.rendezvous import Rendezvous
from diloco.rounds import Pace
from diloco.snapshot import Pointer, decode_part

RUN = "run"


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Simulation:
    """One schedule."""

    plan: Plan
    live: set[str] = field(default_factory=set)
    toys: list[Toy] = field(default_factory=list)
    clean: dict[int, Toy] = field(default_factory=dict)
    """Toys of processes that finished and whose work nobody else has, by slot."""
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = World(self.plan.seed, self.plan.faults)
        self.store = SimulatedStore(self.world)
        if not self.plan.streams:
            self.store.put_if_absent_streamed = None  # type: ignore[method-assign,assignment]
        self.keys = Keys(RUN, "main")
        self.log: list[tuple[list[Floats], list[Floats]]] = []
        """State before each entry, computed from what stands."""

    def run(self) -> None:
        for rank in range(self.plan.world_size):
            self._spawn(rank, delay_s=self.world.rng.uniform(0, 3))
        for _ in range(self.plan.joiners):
            self._spawn(None, delay_s=self.world.rng.uniform(0, 60))
        self.world.run()
        if self.failures:
            raise Violation(self.failures[0])
        if self.live:
            raise Violation(f"I4: {sorted(self.live)} never finished")
        self._check_history()

    # -- processes ---------------------------------------------------------------------------------------------------

    def _spawn(self, rank: int | None, delay_s: float, checkpoint: tuple[int, Any] | None = None) -> None:
        if len(self.toys) >= SLOTS:
            return
        slot = len(self.toys)
        name = f"{'joiner' if rank is None else f'rank {rank}'}.{slot}"
        toy = Toy(self.plan.n_fragments, slot, slot)
        self.toys.append(toy)
        self.world.spawn(name, lambda: self._process(name, rank, slot, toy, checkpoint), delay_s)

    def _process(self, name: str, rank: int | None, slot: int, toy: Toy, checkpoint: tuple[int, Any] | None) -> None:
        self.live.add(name)
        claimed: list[Identity] = []
        try:
            self._train(rank, slot, toy, checkpoint, claimed)
            self.clean[slot] = toy
        except Died:
            self._bury(rank, slot, claimed)
        except FencedError:
            self.world.note("is fenced")
        except QuorumTimeoutError as error:
            if not self._is_excused(str(error)):
                self.failures.append(f"I4: {name}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a replica raises is a violation
            self.failures.append(f"{name}: {type(error).__name__}: {error}")
        self.live.discard(name)

    def _is_excused(self, error: str) -> bool:
        """Tell whether a replica waited in vain because what it needed had rotted."""
        rotten = self.store.ever_rotten
        entry = error.split(":")[0].removeprefix("Round ")
        if any("/part/" in key or "/mean/" in key for key in rotten):
            return True
        is_sealed = f"{RUN}/diloco/main/seal/{entry}" in self.store.objects  # then a rotten input is left out
        return not is_sealed and any(f"/r{entry}/contribution/" in key for key in rotten)

    def _train(
        self, rank: int | None, slot: int, toy: Toy, checkpoint: tuple[int, Any] | None, claimed: list[Identity]
    ) -> None:
        world, plan = self.world, self.plan
        store = PatientStore(self.store, clock=world.clock, error_patience_s=1e6)
        me = claim(store, self.keys, rank, plan.world_size, f"nonce{slot}", lambda: world.sleep(0.1))
        claimed.append(me)
        rendezvous = Rendezvous(
            store,
            self.keys,
            me,
            toy,
            min_quorum=plan.min_quorum,
            snapshot_every=plan.snapshot_every,
            pace=Pace(round_timeout_s=600.0, small_bytes=0 if plan.sharded else 1 << 20, block_bytes=BLOCK_BYTES),
            reduce=_reduce_of_host(slot),
            clock=world.clock,
            wait=world.wait,
            rng=world.rng,
            background=lambda job: world.spawn(f"{world.who()} keeps", lambda: _until_death(job)),
        )
        rendezvous.start(checkpoint)
        self._check_state(toy, rendezvous.position)
        entries = plan.entries[me.rank] if me.rank < plan.world_size else max(plan.entries)
        while rendezvous.position < entries:
            self._perhaps_copy(me, rendezvous, toy)
            self._perhaps_flip(me, rendezvous.position, toy)
            world.sleep(world.rng.uniform(0.1, 4.0))
            toy.labour()
            if plan.overlap:
                rendezvous.publish()
                world.sleep(world.rng.uniform(0.1, 4.0))
                toy.labour()
            world.note("meets")
            rendezvous.meet()
            self._check_state(toy, rendezvous.position)
        rendezvous.leave()

    def _perhaps_copy(self, me: Identity, rendezvous: Rendezvous, toy: Toy) -> None:
        world = self.world
        if world.happens(self.plan.copies):
            delay_s = world.rng.uniform(0.0, 60.0)
            if world.rng.random() < 0.5:
                world.note(f"a second copy of rank {me.rank} starts in {delay_s:.0f} s")
                self._spawn(me.rank, delay_s)
            else:
                world.note(f"a copy from this state of rank {me.rank} starts in {delay_s:.0f} s")
                toy.dropped = True
                self._spawn(me.rank, delay_s, (rendezvous.position, toy.progress()))

    def _perhaps_flip(self, me: Identity, position: int, toy: Toy) -> None:
        if self.plan.flip is None or self.plan.flip[:2] != (me.rank, position):
            return
        f = self.plan.flip[2]
        self.world.note(f"a bit flips in fragment {f}")
        toy.flip(f)
        toy.excused_until = position + (f - position) % self.plan.n_fragments + 1

    def _bury(self, rank: int | None, slot: int, claimed: list[Identity]) -> None:
        """What happens to a dead process: its supervisor may record it, and it may be started again."""
        world = self.world
        rank = claimed[0].rank if claimed else rank
        if rank is None:
            return
        if self.plan.all_leave_outcomes or world.rng.random() < 0.6:
            world.at(world.rng.uniform(0.1, 5.0), lambda: self._record_end(rank, slot))
        if world.rng.random() < 0.5:
            self._spawn(rank, world.rng.uniform(0.1, 60.0))

    def _record_end(self, rank: int, slot: int, *, looks_again: bool = True) -> None:
        """Record the end of a process as a supervisor does: under the newest attempt claimed in its name.

        It may have died before it knew of its claim, which fences others all the same. Without one it is recorded
        under the attempt that was asked for, and under its own should the claim land after all.
        """
        attempt, own = 0, []
        while claimed := self.store.objects.get(self.keys.claim(rank, attempt)):
            if json.loads(claimed)["nonce"] == f"nonce{slot}":
                own.append(attempt)  # more than one, if it could not read its first
            attempt += 1
        if not own and looks_again:
            self.world.at(MOST_DELAY_S, lambda: self._record_end(rank, slot, looks_again=False))
        attempt = own[-1] if own else 0
        key = self.keys.outcome(rank, attempt)
        self.world.note(f"{key}: {self.store._create(key, b'{}')}")

    # -- invariants --------------------------------------------------------------------------------------------------

    def _check_state(self, toy: Toy, position: int) -> None:
        """After each adopted entry. Who was told wrongly that a fragment's next seal is not there is excused."""
        anchor, momentum = self._log_state(position)
        n_fragments = self.plan.n_fragments
        for f in range(n_fragments):
            if _equal([toy.anchor[f], toy.momentum[f]], [anchor[f], momentum[f]]):
                continue
            next_entry = position + (f - position) % n_fragments
            if next_entry < toy.excused_until or self._is_unprovable(f):
                continue
            if (self.world.who(), self.keys.seal(next_entry)) not in self.store.misled:
                raise Violation(f"I2: before entry {position} the state of fragment {f} is not the log's")

    def _is_unprovable(self, fragment: int) -> bool:
        """Tell whether a mean of this fragment rotted so that nobody can prove what it was.

        Who computes it again on another host may come to other bits, and its later seals then differ from it.
        """
        entries = (int(key.split("/r")[-1].split("/")[0]) for key in self.store.headless)
        return any(entry % self.plan.n_fragments == fragment for entry in entries)

    def _log_state(self, position: int) -> tuple[list[Floats], list[Floats]]:
        if not self.log:
            pointer = Pointer.parse(self.store.objects[self.keys.snapshot(0)])
            part = decode_part(memoryview(self.store.ever[self.keys.part(0, pointer.nonce, 0)][0]))
            anchor = [np.array(part[str(f)]) for f in range(self.plan.n_fragments)]
            self.log.append((anchor, [np.zeros_like(a) for a in anchor]))
        while len(self.log) <= position:
            anchor, momentum = deepcopy(self.log[-1])
            step(anchor, momentum, len(self.log) - 1, self._standing_mean(len(self.log) - 1)[0])
            self.log.append((anchor, momentum))
        return self.log[position]

    def _standing_mean(self, entry: int) -> tuple[Floats, list[set[int]]]:
        """Return the mean of an entry, and who was left out for each slot."""
        seal = Seal.parse(self.store.ever[self.keys.seal(entry)][0])
        if not seal.shards:
            return np.frombuffer(seal.mean, np.float32), [set() for _ in range(SLOTS)]
        values, left_out = [], []
        n_blocks = SLOTS * 4 // BLOCK_BYTES
        for shard in range(seal.shards):
            first, end = shard_blocks(n_blocks, seal.shards, shard)
            data = self.store.ever[self.keys.mean(entry, shard)][0]
            values.append(data[head_bytes(end - first) :])
            left_out += [set(MeanHead.parse(data).left_out)] * ((end - first) * BLOCK_BYTES // 4)
        return np.frombuffer(b"".join(values), np.float32), left_out

    def _check_history(self) -> None:
        for key, values in self.store.ever.items():
            decides = "/seal/" in key or "/snapshot/" in key or key.endswith("started.json")
            if decides and len(values) > 1:
                raise Violation(f"I1: {key} had {len(values)} values")
        if self.keys.snapshot(0) not in self.store.ever:
            return  # everybody died before
        pointer = Pointer.parse(self.store.ever[self.keys.snapshot(0)][0])
        if not _equal(Toy(self.plan.n_fragments, 0, int(pointer.nonce[5:])).anchor, self._log_state(0)[0]):
            raise Violation("I10: the first anchor is nobody's model")
        counted = [np.zeros(SLOTS, np.float32) for _ in range(self.plan.n_fragments)]
        spoilt: set[int] = set()
        entry = 0
        while self.keys.seal(entry) in self.store.ever:
            self._count(entry, counted[entry % self.plan.n_fragments], spoilt)
            entry += 1
        self._check_counts(counted, spoilt)
        self._check_snapshots()

    def _check_snapshots(self) -> None:
        for key, values in self.store.ever.items():
            if "/snapshot/" not in key:
                continue
            entry = int(key.rpartition("/")[2])
            pointer = Pointer.parse(values[0])
            part = decode_part(memoryview(self.store.ever[self.keys.part(entry, pointer.nonce, 0)][0]))
            toy = Toy(self.plan.n_fragments, 0, 0)
            toy.load(part)
            anchor, momentum = self._log_state(entry)
            if self.store.headless:
                continue
            if not (_equal(toy.anchor, anchor) and _equal(toy.momentum, momentum)):
                raise Violation(f"I2: the snapshot before entry {entry} is not the log's state")

    def _check_counts(self, counted: list[Floats], spoilt: set[int]) -> None:
        for units in counted:
            for toy in self.toys:
                if units[toy.slot] > toy.done:
                    raise Violation(f"I3: {units[toy.slot]} of {toy.done} units of process {toy.slot} were counted")
        for slot, toy in self.clean.items():
            for fragment, units in enumerate(counted):
                total = units[slot] + toy.undone[fragment][slot]
                if total != toy.done and not toy.dropped and slot not in spoilt:
                    raise Violation(f"I3: {total} of {toy.done} units of process {slot} are accounted for")

    def _count(self, entry: int, counted: Floats, spoilt: set[int]) -> None:
        seal = Seal.parse(self.store.ever[self.keys.seal(entry)][0])
        payloads = {rank: self._sealed_payload(entry, rank, seal) for rank in seal.members}
        if seal.shards and any(self.keys.mean(entry, shard) not in self.store.ever for shard in range(seal.shards)):
            return  # everybody died before the mean stood
        mean, left_out = self._standing_mean(entry)
        for slot in range(SLOTS):
            members = [rank for rank in seal.members if rank not in left_out[slot]]
            for rank in left_out[slot]:
                spoilt.add(int(seal.members[rank].nonce[5:]))
                key = self.keys.contribution(entry, rank)
                if key not in self.store.ever_rotten and self.store.garbled.get(key, 0) < 3:
                    raise Violation(f"entry {entry}: rank {rank} was left out and had sent nothing bad")
            expected = sum(payloads[rank][slot] for rank in members) / max(1, len(members))
            if abs(mean[slot] - expected) > 1e-4:
                raise Violation(f"entry {entry}: the mean of slot {slot} is {mean[slot]}, of the sealed {expected}")
            counted[slot] += sum(payloads[rank][slot] for rank in members)

    def _sealed_payload(self, entry: int, rank: int, seal: Seal) -> Floats:
        for value in self.store.ever[self.keys.contribution(entry, rank)]:
            if Contribution.parse(value)[1] == seal.members[rank].digest:
                return np.frombuffer(value[head_bytes(SLOTS * 4 // BLOCK_BYTES) :], np.float32)
        raise Violation(f"entry {entry}: what rank {rank} is sealed with never stood")


def _until_death(job: Callable[[], None]) -> None:
    with suppress(Died):
        job()


def _reduce_of_host(host: int) -> Callable[..., tuple[str, ...]]:
    """Return a reduction whose sums differ in the last bit from other hosts', as on unlike processors."""

    def reduce(inputs: Sequence[Input], out: memoryview, *, block_bytes: int) -> tuple[str, ...]:
        weighted_mean(inputs, out, block_bytes=block_bytes)
        bits = np.frombuffer(out, np.uint32)
        bits ^= np.uint32(host & 1)
        return digests_of(out, block_bytes)

    return reduce


def _equal(left: list[Floats], right: list[Floats]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))


def run_schedule(seed: int, **changes: Any) -> Simulation:
    """Run one schedule.

    Args:
        changes: of the plan that follows from the seed.

    Raises: Violation: with the seed in its message.
    """
    simulation = Simulation(replace(Plan.from_seed(seed), **changes))
    try:
        simulation.run()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from None
    return simulation
