"""Random schedules of the real rendezvous in a simulated world, and the invariants that must hold in each.

I1 one value ever stands for each seal, snapshot pointer and claim. I2 after each adopted entry the state equals the
log's, and so does every snapshot. I3 each unit of local work is in at most one mean, and in exactly one unless its
process died, was copied, or sent something that rotted. I4 when faults end, all live replicas finish, joiners too.
I10 the first anchor is somebody's model. I11 after the last fault every live replica of equal speed is named in every
seal from the third on. I12 who is expected is waited for no longer than the grace, and who is out of phase does not
stand still. I13 two later snapshots stand whole before one is deleted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from simulated_plan import Absence, Plan
from simulated_work import BLOCK_BYTES, SLOTS, Toy, step
from simulated_world import MOST_DELAY_S, Died, SimulatedStore, World

from diloco import phase as rounds
from diloco.errors import FencedError, QuorumTimeoutError
from diloco.keys import Keys
from diloco.membership import Identity, claim
from diloco.patience import PatientStore
from diloco.records import Contribution, MeanHead, Seal, digests_of, head_bytes, shard_blocks
from diloco.reduction import Floats, Input, weighted_mean
from diloco.rendezvous import Rendezvous
from diloco.rounds import Adopted, Pace
from diloco.snapshot import Pointer, decode_part

RUN = "run"
MOST_S = 20_000.0
"""No schedule takes as long by its own clock, unless somebody never ends."""


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Process:
    """One simulated process, and when it took part."""

    name: str
    rank: int | None
    slot: int
    toy: Toy
    here_s: float | None = None
    """When it had loaded the run, and presented itself where it was out of phase."""
    ended_s: float | None = None
    adopted_s: list[float] = field(default_factory=list)
    held_s: list[tuple[float, float]] = field(default_factory=list)
    me: Identity | None = None
    is_new: bool = True
    """Whether it is in its first round in phase."""
    left_out_of_phase: bool = False

    def is_here(self, at_s: float) -> bool:
        return self.here_s is not None and self.here_s <= at_s and (self.ended_s is None or self.ended_s > at_s)


@dataclass
class Simulation:
    """One schedule."""

    plan: Plan
    live: set[str] = field(default_factory=set)
    processes: list[Process] = field(default_factory=list)
    clean: dict[int, Toy] = field(default_factory=dict)
    """Toys of processes that finished and whose work nobody else has, by slot."""
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        plan = self.plan
        self.world = World(plan.seed, plan.faults)
        self.store = SimulatedStore(self.world, answer_s=plan.answer_s, upload_s=plan.upload_s)
        self.store.deleting = self._check_collection
        if not plan.streams:
            self.store.put_if_absent_streamed = None  # type: ignore[method-assign,assignment]
        self.keys = Keys(RUN, "main")
        total = max(plan.entries) * plan.steps_per_entry if plan.is_planned else None
        self.steps = rounds.Plan(plan.steps_per_entry, plan.n_fragments, plan.overlap_steps, total)
        self.log: list[tuple[list[Floats], list[Floats]]] = []
        """State before each entry, computed from what stands."""

    @property
    def toys(self) -> list[Toy]:
        return [process.toy for process in self.processes]

    def run(self) -> None:
        plan, rng = self.plan, self.world.rng
        for rank in range(plan.world_size):
            self._spawn(rank, delay_s=rng.uniform(0, 0.1 if plan.is_phased else 3.0))
        for _ in range(plan.joiners):
            self._spawn(None, delay_s=rng.uniform(0, 6 * plan.phase_s if plan.is_phased else 60))
        for absence in plan.absences:
            self.world.at(absence.at_s, partial(self._away, absence))
        self.world.run(MOST_S if plan.until_s is None else plan.until_s)
        if self.failures:
            raise Violation(self.failures[0])
        if plan.until_s is not None:
            return
        if self.live:
            raise Violation(f"I4: {sorted(self.live)} never finished")
        self._check_history()
        if plan.is_phased:
            self._check_everybody_is_named()

    # -- processes ---------------------------------------------------------------------------------------------------

    def _spawn(self, rank: int | None, delay_s: float, checkpoint: tuple[int, Any] | None = None) -> None:
        slot = len(self.processes)
        if slot >= SLOTS and self.plan.until_s is None:
            return  # with an end in time, work is counted, and not whose it is
        name = f"{'joiner' if rank is None else f'rank {rank}'}.{slot}"
        process = Process(name, rank, slot, Toy(self.plan.n_fragments, slot % SLOTS, slot))
        process.toy.is_final = self.steps.is_final
        process.toy.loses_steps = bool(self.steps.overlap_steps)
        self.processes.append(process)
        self.world.spawn(name, lambda: self._process(process, checkpoint), delay_s)

    def _away(self, absence: Absence) -> None:
        """Let the newest process of a rank die, and another come for it; or let it sleep for a while."""
        process = [process for process in self.processes if process.rank == absence.rank][-1]
        if process.ended_s is not None or process.here_s is None:
            return
        back_s = self.world.now + absence.for_s
        if not absence.dies:
            process.held_s.append((self.world.now, back_s))
            self.world.hold(process.name, back_s)
            return
        self.world.kill(process.name)
        self._spawn(absence.rank, absence.for_s)
        if absence.leaves_outcome:
            self._record_end(absence.rank, process.slot)

    def _process(self, process: Process, checkpoint: tuple[int, Any] | None) -> None:
        self.live.add(process.name)
        try:
            self._train(process, checkpoint)
            self.clean[process.slot] = process.toy
        except Died:
            if not self.plan.absences:
                self._bury(process)
        except FencedError:
            self.world.note("is fenced")
        except QuorumTimeoutError as error:
            if not self._is_excused(str(error)):
                self.failures.append(f"I4: {process.name}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a replica raises is a violation
            self.failures.append(f"{process.name}: {type(error).__name__}: {error}")
        process.ended_s = self.world.now
        self.live.discard(process.name)

    def _is_excused(self, error: str) -> bool:
        """Tell whether a replica waited in vain because what it needed had rotted."""
        rotten = self.store.ever_rotten
        entry = error.split(":")[0].removeprefix("Round ")
        if any("/part/" in key or "/mean/" in key for key in rotten):
            return True
        missing = re.findall(r"\d+", error.partition("Missing ranks:")[2])
        if self.plan.min_quorum > 1 and any(self.keys.claim(int(r), 0) not in self.store.objects for r in missing):
            return True  # it never began, and was not started again
        is_sealed = f"{RUN}/diloco/main/seal/{entry}" in self.store.objects  # then a rotten input is left out
        return not is_sealed and any(f"/r{entry}/contribution/" in key for key in rotten)

    def _train(self, process: Process, checkpoint: tuple[int, Any] | None) -> None:
        world, plan, toy = self.world, self.plan, process.toy
        store = PatientStore(self.store, clock=world.clock, error_patience_s=1e6)
        nonce = f"nonce{process.slot}"
        me = claim(store, self.keys, process.rank, plan.world_size, nonce, lambda: world.sleep(0.1))
        process.me = me
        rendezvous = Rendezvous(
            store,
            self.keys,
            me,
            toy,
            plan=self.steps,
            min_quorum=plan.min_quorum,
            weight=plan.weights[me.rank % len(plan.weights)],
            snapshot_every=plan.snapshot_every,
            pace=Pace(
                grace_s=plan.grace_s,
                round_timeout_s=600.0,
                small_bytes=0 if plan.sharded else 1 << 20,
                block_bytes=BLOCK_BYTES,
            ),
            reduce=_reduce_of_host(process.slot),
            clock=world.clock,
            wait=world.wait,
            rng=world.rng,
            background=lambda job: world.spawn(f"{world.who()} keeps", lambda: _until_death(job)),
        )
        rendezvous.start(checkpoint)
        process.here_s = world.now
        self._check_state(toy, rendezvous.position)
        slower = plan.speeds[me.rank] if me.rank < len(plan.speeds) else 1.0
        entries = plan.entries[me.rank] if me.rank < plan.world_size else max(plan.entries)
        while not self._has_finished(rendezvous, entries):
            self._perhaps_copy(me, rendezvous, toy)
            self._perhaps_flip(me, rendezvous.position, toy)
            world.sleep(world.rng.uniform(*plan.step_s) * slower)
            toy.labour()
            began_s, was_out, was_named = world.now, rendezvous.phase.is_out, rendezvous._members.names_me
            adopted = rendezvous.step()
            if adopted:
                world.note(f"has adopted {adopted[-1].entry}{', and is out of phase' * rendezvous.phase.is_out}")
                process.adopted_s.append(world.now)
                self._check_state(toy, rendezvous.position)
            if plan.is_phased:
                self._check_waits(process, adopted, began_s, was_out, was_named)
            process.is_new = was_out or (process.is_new and not adopted)
        process.left_out_of_phase = rendezvous.phase.is_out  # what it presented may be counted after it has left
        rendezvous.leave()

    def _has_finished(self, rendezvous: Rendezvous, entries: int) -> bool:
        if self.steps.total_steps is None:
            return rendezvous.position >= entries
        return rendezvous.inner_step >= self.steps.total_steps

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
        if self.plan.flip is None or self.plan.flip[:2] != (me.rank, position) or toy.excused_until:
            return
        f = self.plan.flip[2]
        self.world.note(f"a bit flips in fragment {f}")
        toy.flip(f)
        toy.excused_until = position + (f - position) % self.plan.n_fragments + 1

    def _bury(self, process: Process) -> None:
        """What happens to a dead process: its supervisor may record it, and it may be started again."""
        world, slot = self.world, process.slot
        rank = process.me.rank if process.me else process.rank
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

    def _check_waits(
        self,
        process: Process,
        adopted: list[Adopted],
        began_s: float,
        was_out: bool,
        was_named: bool,
    ) -> None:
        """I12, where nothing but a store's answers takes time."""
        plan, now = self.plan, self.world.now
        if any(start < now and end > began_s for start, end in process.held_s):
            return
        calls_s = 60 * plan.answer_s + 3 * plan.upload_s + 1.2  # the pauses between two looks are a second at most
        if was_out and not adopted and now - began_s > 60 * plan.answer_s + plan.upload_s:
            raise Violation(f"I12: {process.name}, out of phase, stood still for {now - began_s:.3f} s")
        if plan.sharded or (adopted and self.steps.is_final(adopted[-1].entry)):
            return  # waits for a mean are not counted; at the end of a plan there is nothing to do but wait
        grace_s = max(plan.grace_s, plan.phase_s / 20)
        for entry in adopted:
            early_s = 1.05 * plan.step_s[1] + 1.0 if was_out or process.is_new else 0.0  # a step and a look
            most_s = grace_s + early_s if was_named else 2 * plan.phase_s + 2 * grace_s
            if entry.wait_s > most_s + calls_s:
                raise Violation(f"I12: {process.name} waited {entry.wait_s:.3f} s for seal {entry.entry}")

    def _check_everybody_is_named(self) -> None:
        """I11: from the third seal on after the last fault."""
        calm_s = 0.0
        for process in self.processes:
            starts = [] if process.here_s is None else [process.here_s]
            for _, end_s in process.held_s:
                starts.append(next((at_s for at_s in process.adopted_s if at_s > end_s), end_s))
            ends = [] if process.ended_s is None or process.slot in self.clean else [process.ended_s]
            calm_s = max([calm_s, *starts, *ends])
        sealed = sorted(
            (at_s, int(key.rpartition("/")[2]))
            for key, at_s in self.store.created_s.items()
            if "/seal/" in key and at_s > calm_s
        )
        for at_s, entry in sealed[2:]:
            members = Seal.parse(self.store.objects[self.keys.seal(entry)]).members
            named = {member.nonce for member in members.values()}
            for process in self.processes:
                if process.is_here(at_s) and f"nonce{process.slot}" not in named:
                    raise Violation(
                        f"I11: {process.name} is not in seal {entry} at {at_s:.3f} s; all was calm from {calm_s:.3f} s"
                    )

    def _check_collection(self, key: str) -> None:
        """I13: before a part is deleted, two later snapshots stand whole."""
        if "/part/" not in key or self.store.ever_rotten:
            return
        entry = int(key.split("/part/")[1].split("/")[0])
        whole = 0
        for pointed in [k for k in self.store.objects if "/snapshot/" in k]:
            later = int(pointed.rpartition("/")[2])
            pointer = Pointer.parse(self.store.objects[pointed])
            whole += later > entry and self.keys.part(later, pointer.nonce, 0) in self.store.objects
        if whole < 2:
            self.failures.append(f"I13: {key} is deleted while {whole} later snapshots stand")

    def _check_state(self, toy: Toy, position: int) -> None:
        """After each adopted entry. Who was told wrongly that a fragment's next seal is not there is excused."""
        if self.plan.flip is not None and position > max(self.plan.entries):
            return  # the others have left, who would be right
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
            if (mean := self._standing_mean(len(self.log) - 1)[0]).size:
                step(anchor, momentum, len(self.log) - 1, mean)
            self.log.append((anchor, momentum))
        return self.log[position]

    def _standing_mean(self, entry: int) -> tuple[Floats, list[set[int]]]:
        """Return the mean of an entry, and who was left out for each slot."""
        seal = Seal.parse(self.store.ever[self.keys.seal(entry)][0])
        if not seal.inputs:
            return np.zeros(0, np.float32), [set() for _ in range(SLOTS)]
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
                is_fine = total == toy.done or toy.dropped or self.processes[slot].left_out_of_phase
                if not is_fine and slot not in spoilt:
                    raise Violation(f"I3: {total} of {toy.done} units of process {slot} are accounted for")

    def _count(self, entry: int, counted: Floats, spoilt: set[int]) -> None:
        seal = Seal.parse(self.store.ever[self.keys.seal(entry)][0])
        sent = {rank: self.sealed_contribution(entry, rank, seal) for rank in seal.members}
        for rank, (head, _) in sent.items():
            member = seal.members[rank]
            if head.anchor != seal.anchor:
                raise Violation(f"entry {entry}: the work of rank {rank} was made from another anchor than the seal's")
            self._check_weight(rank, head, sent[rank][1])
            if (head.weight, head.in_phase, head.nonce) != (member.weight, member.in_phase, member.nonce):
                raise Violation(f"entry {entry}: the seal does not say of rank {rank} what its contribution does")
        if seal.shards and any(self.keys.mean(entry, shard) not in self.store.ever for shard in range(seal.shards)):
            return  # everybody died before the mean stood
        mean, left_out = self._standing_mean(entry)
        for slot in range(SLOTS):
            members = [rank for rank in seal.inputs if rank not in left_out[slot]]
            for rank in left_out[slot]:
                spoilt.add(int(seal.members[rank].nonce[5:]))
                key = self.keys.contribution(entry, rank)
                if key not in self.store.ever_rotten and self.store.garbled.get(key, 0) < 3:
                    raise Violation(f"entry {entry}: rank {rank} was left out, and what it sent is fine")
            total = sum(seal.members[rank].weight for rank in members)
            expected = sum(sent[rank][1][slot] * seal.members[rank].weight for rank in members) / (total or 1.0)
            if mean.size and abs(mean[slot] - expected) > 1e-4 * max(1.0, abs(expected)):
                raise Violation(f"entry {entry}: the mean of slot {slot} is {mean[slot]}, of the sealed {expected}")
            counted[slot] += sum(sent[rank][1][slot] for rank in members)

    def _check_weight(self, rank: int, head: Contribution, payload: Floats) -> None:
        """Work that is sent early is weighed by the steps that it is made of; nothing weighs nothing."""
        whole = self.plan.weights[rank % len(self.plan.weights)]
        expected = whole
        if not head.in_phase:
            expected *= min(1.0, float(payload.sum()) / self.steps.inner_steps) if payload.size else 0.0
        if abs(head.weight - expected) > 1e-6:
            raise Violation(f"rank {rank} sent {payload.sum()} steps with a weight of {head.weight}, not {expected}")

    def sealed_contribution(self, entry: int, rank: int, seal: Seal) -> tuple[Contribution, Floats]:
        for value in self.store.ever[self.keys.contribution(entry, rank)]:
            head, digest = Contribution.parse(value)
            if digest == seal.members[rank].digest:
                return head, np.frombuffer(value[head_bytes(SLOTS * 4 // BLOCK_BYTES) :], np.float32)
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
    simulation = Simulation(replace(Plan.random(seed), **changes) if changes else Plan.from_seed(seed))
    try:
        simulation.run()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from None
    return simulation
