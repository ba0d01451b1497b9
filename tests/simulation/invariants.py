"""The invariants of the rendezvous, checked while a simulated schedule runs and when it has ended.

- I1: each seal, snapshot pointer and claim has one value, forever.
- I2: after each applied entry, the state of a replica equals the log's state, and so does every snapshot.
- I3: each unit of local work is in at most one mean. It is in exactly one mean, unless its process died, was copied, or
  sent an object that was damaged.
- I10: the first anchor is the model of one process.
- I11: after the last fault, every seal from the third on names every live replica of equal speed.
- I12: the wait for an expected replica is not longer than the grace, and a replica out of phase never stops training.
- I13: before a snapshot is deleted, two later snapshots are complete.
- I14: a seal names the ranks that ask for the end of the run. Every live process then ends after the same entry, which
  is the last one of the log.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field, replace

import numpy as np

from diloco.rendezvous import phase as rounds
from diloco.rendezvous.envelope import UNSIGNED, Proof
from diloco.rendezvous.frames import Contribution, MeanHead, Seal, head_bytes
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity
from diloco.rendezvous.reduction import ShardInput, weighted_mean
from diloco.rendezvous.round import MOST_PAUSE_S, Layout, Limits, RoundReport
from diloco.rendezvous.snapshot import SnapshotPointer, decode_part
from diloco.wires.wire import Floats
from simulation.integer_state import BLOCK_ELEMENTS, SLOTS, WIRES, IntegerState, most_left, step, values_of
from simulation.scenario import Scenario
from simulation.world import SimulatedStore, World


class Violation(AssertionError):
    """Raised if an invariant does not hold."""


@dataclass
class Process:
    """One simulated process, and the times at which it took part."""

    name: str
    rank: int | None
    slot: int
    state: IntegerState
    steps: rounds.RoundPlan
    """The plan of the process, which ends early once the process has read that the run was stopped."""
    here_s: float | None = None
    """The time at which the process had loaded the run's state, and had contributed early if it was out of phase."""
    ended_s: float | None = None
    adopted_s: list[float] = field(default_factory=list)
    held_s: list[tuple[float, float]] = field(default_factory=list)
    me: Identity | None = None
    is_new: bool = True
    """True if the process has not had a round in phase yet."""
    left_out_of_phase: bool = False
    """True if the process left while it was out of phase."""
    is_restored: bool = False
    """True if the process continues with the work of another one, and does not know the steps of that work."""
    phase: rounds.Phase | None = None
    left_at: int | None = None
    """The position at which the process left without an error."""
    has_made_all: bool = False
    """True if the process left because it had applied all entries of its scenario."""

    def is_here(self, at_s: float) -> bool:
        """Return True if the process took part in the run at this time."""
        return self.here_s is not None and self.here_s <= at_s and (self.ended_s is None or self.ended_s > at_s)


@dataclass
class Invariants:
    """Checks the invariants of one schedule."""

    scenario: Scenario
    proof: Proof = UNSIGNED
    processes: list[Process] = field(default_factory=list)
    clean: dict[int, IntegerState] = field(default_factory=dict)
    """By slot, the states of processes that have finished, and whose work no other process has."""
    failures: list[str] = field(default_factory=list)
    log: list[tuple[list[Floats], list[Floats]]] = field(default_factory=list)
    """The state before each entry, computed from the stored objects."""
    world: World = field(init=False)
    store: SimulatedStore = field(init=False)
    keys: Keys = field(init=False)
    steps: rounds.RoundPlan = field(init=False)

    @property
    def layout(self) -> Layout:
        return Layout(SLOTS, Limits(block_elements=BLOCK_ELEMENTS), *WIRES[self.scenario.wires])

    @property
    def states(self) -> list[IntegerState]:
        return [process.state for process in self.processes]

    def _check_ledger(self, process: Process, phase: rounds.Phase) -> None:
        """Check that a process knows the number of steps in its live work, except for rounding errors of the wire.

        Contributions are weighed by this number.
        """
        slot = process.slot % SLOTS
        units = [int(undone[slot] + 1e-3) for undone in process.state.undone]
        if any(
            not 0 <= unit - made <= most_left(self.scenario.wires, process.state.done)
            for unit, made in zip(units, phase.uncounted_steps, strict=True)
        ):
            raise Violation(f"{process.name} has {units} uncounted steps, but its phase counts {phase.uncounted_steps}")

    def _check_waits(
        self,
        process: Process,
        adopted: list[RoundReport],
        began_s: float,
        was_out: bool,
        was_named: bool,
    ) -> None:
        """Check I12 in a schedule in which only the answers of the store take time."""
        scenario, now = self.scenario, self.world.now
        # The beginning of the phase: a suspension since then may have made a step of the phase long.
        phase_s = ([0.0, *process.adopted_s])[-2 if adopted else -1]
        if any(start < now and end > min(began_s, phase_s) for start, end in process.held_s):
            return
        calls_s = (
            60 * scenario.answer_s + 3 * scenario.upload_s + 1.2
        )  # the pauses between two looks are a second at most
        if "each" in scenario.wires and any(each.held_s for each in self.processes):
            # The replica that stores the head of a mean may be suspended. Then each other one waits for its turn.
            calls_s += scenario.world_size * Limits().takeover_after_s
        if was_out and not adopted and now - began_s > 60 * scenario.answer_s + scenario.upload_s:
            raise Violation(f"I12: {process.name}, out of phase, made no step for {now - began_s:.3f} s")
        if scenario.sharded or (adopted and process.steps.is_final(adopted[-1].round - 1)):
            return  # waits for a mean do not count, and at the end of a plan a replica can only wait
        grace_s = max(scenario.grace_s, scenario.phase_s / 20)
        if scenario.entry_s is not None:  # a step in which a process was suspended took that much longer
            held_s = max((end - start for each in self.processes for start, end in each.held_s), default=0.0)
            grace_s = max(grace_s, min(scenario.entry_s, 2.0 * (scenario.longest_step_s + held_s)))
        for entry in adopted:
            early_s = scenario.longest_step_s + 1.0 if was_out or process.is_new else 0.0  # a step and a look
            most_s = grace_s + early_s if was_named else 2 * scenario.phase_s + 2 * grace_s
            waited_s = entry.late_s if scenario.in_background else entry.wait_s
            if waited_s > most_s + calls_s:
                raise Violation(f"I12: {process.name} waited {waited_s:.3f} s for round {entry.round}")

    def _check_all_are_named(self) -> None:
        """Check I11: from the third seal after the last fault, all live replicas are named.

        A seal counts only if some of its work was sent after the last fault, and if it names a live replica. Otherwise
        the replicas that came back since could not be in it.
        """
        pause_s = min(MOST_PAUSE_S, max(0.02, self.scenario.grace_s / 4))
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
            if "/seal/" in key and at_s > calm_s + pause_s
        )
        n_since = 0
        ended_at = next((entry for entry, seal in enumerate(self.seals()) if seal.stops), None)
        for at_s, entry in sealed:
            if ended_at is not None and entry > ended_at:
                break  # the last rounds of a stopped run follow at once, without a phase in which to come back
            members = self.seal_of(entry).replicas
            named = {member.nonce for member in members.values()}
            sent_s = max(self.store.created_s[self.keys.contribution(entry, rank)] for rank in members)
            here = [process for process in self.processes if process.is_here(at_s)]
            left_out = [process for process in here if f"nonce{process.slot}" not in named]
            n_since += sent_s > calm_s and len(left_out) < len(here)
            if left_out and n_since > 2:
                raise Violation(
                    f"I11: {left_out[0].name} is not in seal {entry} at {at_s:.3f} s; no fault after {calm_s:.3f} s"
                )

    def _check_collection(self, key: str) -> None:
        """Check I13: before a part is deleted, two later snapshots are complete."""
        if "/part/" not in key or self.store.ever_rotten:
            return
        entry = int(key.split("/part/")[1].split("/")[0])
        whole = 0
        for pointed in [k for k in self.store.objects if "/snapshot/" in k]:
            later = int(pointed.rpartition("/")[2])
            pointer = SnapshotPointer.parse(self.store.objects[pointed], pointed, self.proof)
            whole += later > entry and self.keys.part(later, pointer.nonce, 0) in self.store.objects
        if whole < 2:
            self.failures.append(f"I13: {key} is deleted while there are {whole} later snapshots")

    def _check_state(self, state: IntegerState, position: int) -> None:
        """Check I2 after each applied entry. A process that wrongly found the next seal missing is excused."""
        anchor, momentum = self._log_state(position)
        n_fragments = self.scenario.n_fragments
        for f in range(n_fragments):
            if _equal([state.anchor[f], state.momentum[f]], [anchor[f], momentum[f]]):
                continue
            next_entry = position + (f - position) % n_fragments
            if next_entry < state.excused_until or self._is_unprovable(f):
                continue
            if (self.world.who(), self.keys.seal(next_entry)) not in self.store.misled:
                raise Violation(f"I2: before entry {position} the state of fragment {f} is not the log's")

    def _is_unprovable(self, fragment: int) -> bool:
        """Return True if the head of a mean of this fragment was damaged, so that nothing proves the bits of the mean.

        Another host that computes the mean again may get other bits, and then differs from later seals.
        """
        entries = (int(key.split("/r")[-1].split("/")[0]) for key in self.store.headless)
        return any(entry % self.scenario.n_fragments == fragment for entry in entries)

    def _log_state(self, position: int) -> tuple[list[Floats], list[Floats]]:
        if not self.log:
            pointer = self.pointer_of(0)
            part = decode_part(memoryview(self.store.ever[self.keys.part(0, pointer.nonce, 0)][0]))
            anchor = [np.array(part[str(f)]) for f in range(self.scenario.n_fragments)]
            self.log.append((anchor, [np.zeros_like(a) for a in anchor]))
        while len(self.log) <= position:
            anchor, momentum = deepcopy(self.log[-1])
            if (mean := self.stored_mean(len(self.log) - 1)[0]).size:
                step(anchor, momentum, len(self.log) - 1, mean)
            self.log.append((anchor, momentum))
        return self.log[position]

    def stored_mean(self, entry: int) -> tuple[Floats, list[set[int]]]:
        """Return the mean of an entry, and for each slot the ranks that were left out of it."""
        seal = self.seal_of(entry)
        if not seal.inputs:
            return np.zeros(0, np.float32), [set() for _ in range(SLOTS)]
        if not seal.shards:
            return values_of(self.layout.mean_wire, [memoryview(seal.mean)]), [set() for _ in range(SLOTS)]
        values, left_out = [], []
        if not self.layout.stores_mean:
            return self._computed_mean(entry, seal)
        for shard in range(seal.shards):
            part = self.layout.shard(shard, seal.shards)
            key = self.keys.mean(entry, shard)
            data = self.store.ever[key][0]
            values.append(memoryview(data)[head_bytes(part.end_block - part.first_block) :])
            left_out += [set(MeanHead.parse(data, key, self.proof).left_out)] * part.n_elements
        return values_of(self.layout.mean_wire, values), left_out

    def _computed_mean(self, entry: int, seal: Seal) -> tuple[Floats, list[set[int]]]:
        """Compute a mean that is not stored from the sealed contributions that its head counts."""
        key = self.keys.mean(entry, 0)
        head = MeanHead.parse(self.store.ever[key][0], key, self.proof)
        inputs = []
        for rank, member in seal.inputs.items():
            if rank not in head.left_out:
                contribution, data = self.sealed_bytes(entry, rank, seal)
                inputs.append(ShardInput(rank, member.weight, data[self.layout.head_bytes :], contribution.blocks))
        out = memoryview(bytearray(self.layout.mean_bytes))
        digests = weighted_mean(inputs, out, self.layout.blocks(SLOTS, self.proof))
        if digests != head.blocks:
            raise Violation(f"entry {entry}: the stored head of the mean does not have the digests of its inputs")
        return np.frombuffer(out, np.float32), [{*head.left_out} for _ in range(SLOTS)]

    def _check_end(self) -> None:
        """Check I14 when all processes have ended."""
        planned, seals = replace(self.steps), self.seals()
        for entry, seal in enumerate(seals):
            if seal.stops:
                planned.end_after(entry, seal.stops)
        if not planned.ended_by:
            ended = [process.name for process in self.processes if process.steps.ended_by]
            if ended:
                raise Violation(f"I14: {ended[0]} ended a run that no rank has stopped")
            return
        n = planned.n_entries
        assert n is not None
        if len(seals) > n:
            raise Violation(f"I14: the run was stopped after entry {n - 1}, and entry {len(seals) - 1} was sealed")
        for process in self.processes:
            if process.left_at is not None and process.left_at != n and not process.has_made_all:
                raise Violation(f"I14: {process.name} ended at {process.left_at}, the run after entry {n - 1}")
            if process.steps.ended_by and process.steps != planned:
                raise Violation(f"I14: {process.name} ended by {process.steps}, the run by {planned}")

    def _check_history(self) -> None:
        self._check_end()
        for key, values in self.store.ever.items():
            decides = "/seal/" in key or "/snapshot/" in key or key.endswith("started.json")
            if decides and len(values) > 1:
                raise Violation(f"I1: {key} had {len(values)} values")
            if "/contribution/" in key and self.steps.is_over(int(key.split("/r")[-1].split("/")[0])):
                raise Violation(f"{key} was sent for an entry that is not planned")
        if self.keys.snapshot(0) not in self.store.ever:
            return  # all processes died before the first snapshot
        pointer = self.pointer_of(0)
        if not _equal(IntegerState(self.scenario.n_fragments, 0, int(pointer.nonce[5:])).anchor, self._log_state(0)[0]):
            raise Violation("I10: the first anchor is not the model of a process")
        counted = [np.zeros(SLOTS, np.float32) for _ in range(self.scenario.n_fragments)]
        spoilt: set[int] = set()
        entry = 0
        while self.keys.seal(entry) in self.store.ever:
            self._count(entry, counted[entry % self.scenario.n_fragments], spoilt)
            entry += 1
        self._check_counts(counted, spoilt)
        self._check_snapshots()

    def _check_snapshots(self) -> None:
        for key in self.store.ever:
            if "/snapshot/" not in key:
                continue
            entry = int(key.rpartition("/")[2])
            pointer = self.pointer_of(entry)
            part = decode_part(memoryview(self.store.ever[self.keys.part(entry, pointer.nonce, 0)][0]))
            state = IntegerState(self.scenario.n_fragments, 0, 0)
            state.load(part)
            anchor, momentum = self._log_state(entry)
            if self.store.headless:
                continue
            if not (_equal(state.anchor, anchor) and _equal(state.momentum, momentum)):
                raise Violation(f"I2: the snapshot before entry {entry} is not the log's state")

    def _check_counts(self, counted: list[Floats], spoilt: set[int]) -> None:
        for units in counted:
            for state in self.states:
                if units[state.slot] > state.done:
                    raise Violation(
                        f"I3: {units[state.slot]} of {state.done} units of process {state.slot} were counted"
                    )
        for slot, state in self.clean.items():
            for fragment, units in enumerate(counted):
                total = units[slot] + state.undone[fragment][slot] + state.waiting[fragment][slot]
                total += state.given_up[fragment][slot]
                is_fine = abs(total - state.done) < 1e-3 or state.dropped or self.processes[slot].left_out_of_phase
                if not is_fine and slot not in spoilt:
                    raise Violation(f"I3: {total} of {state.done} units of process {slot} are accounted for")

    def _count(self, entry: int, counted: Floats, spoilt: set[int]) -> None:
        seal = self.seal_of(entry)
        sent = {rank: self.sealed_contribution(entry, rank, seal) for rank in seal.replicas}
        for rank, (head, _) in sent.items():
            member = seal.replicas[rank]
            if head.anchor != seal.anchor:
                raise Violation(f"entry {entry}: the work of rank {rank} was made from another anchor than the seal's")
            self._check_weight(rank, head, sent[rank][1], member.nonce)
            if (head.weight, head.in_phase, head.nonce) != (member.weight, member.in_phase, member.nonce):
                raise Violation(f"entry {entry}: the seal and the contribution of rank {rank} differ")
        if seal.stops != tuple(rank for rank, (head, _) in sorted(sent.items()) if head.stop):
            raise Violation(f"I14: the seal of entry {entry} names {seal.stops} as the ranks that stop the run")
        if seal.phase_s != max(head.phase_s for head, _ in sent.values()):
            raise Violation(f"entry {entry}: the seal does not have the longest phase of its replicas")
        if seal.same:  # no two processes do equal work
            raise Violation(f"entry {entry}: the seal names the work of {seal.same} as equal")
        if seal.shards and any(self.keys.mean(entry, shard) not in self.store.ever for shard in range(seal.shards)):
            return  # all processes died before there was a mean
        mean, left_out = self.stored_mean(entry)
        for slot in range(SLOTS):
            members = [rank for rank in seal.inputs if rank not in left_out[slot]]
            for rank in left_out[slot]:
                spoilt.add(int(seal.replicas[rank].nonce[5:]))
                key = self.keys.contribution(entry, rank)
                if key not in self.store.ever_rotten and self.store.garbled.get(key, 0) < 3:
                    raise Violation(f"entry {entry}: rank {rank} was left out, although its contribution is intact")
            total = sum(seal.replicas[rank].weight for rank in members)
            expected = sum(sent[rank][1][slot] * seal.replicas[rank].weight for rank in members) / (total or 1.0)
            rounding = 1e-4 * max(1.0, abs(expected)) + 2 / 1024 * (self.scenario.wires != "exact")
            if mean.size and abs(mean[slot] - expected) > rounding:
                raise Violation(f"entry {entry}: the mean of slot {slot} is {mean[slot]}, of the sealed {expected}")
            counted[slot] += sum(sent[rank][1][slot] for rank in members)

    def _check_weight(self, rank: int, head: Contribution, payload: Floats, nonce: str) -> None:
        """Check that early work, and all work by the clock, has the weight of its steps. No work has the weight 0."""
        whole, is_clocked = self.scenario.weights[rank % len(self.scenario.weights)], self.scenario.entry_s is not None
        expected = whole
        if not head.in_phase or is_clocked:
            share = head.steps if is_clocked else min(1.0, head.steps / self.steps.inner_steps)
            expected *= share if payload.size else 0.0
            is_known = not (is_clocked and self.processes[int(nonce[5:])].is_restored)
            # A sparse wire sends the rest of all earlier steps, too, and those may be many more than these.
            made = self.processes[int(nonce[5:])].state.done
            if is_known and abs(payload.sum() - head.steps) > most_left(self.scenario.wires, made):
                raise Violation(f"rank {rank} sent {payload.sum()} units, but reports {head.steps} steps")
        if abs(head.weight - expected) > 1e-6:
            raise Violation(f"rank {rank} sent {head.steps} steps with a weight of {head.weight}, not {expected}")

    def seal_of(self, entry: int) -> Seal:
        """Return the seal of an entry, as it was created."""
        key = self.keys.seal(entry)
        return Seal.parse(self.store.ever[key][0], key, self.proof)

    def pointer_of(self, entry: int) -> SnapshotPointer:
        """Return the pointer of a snapshot, as it was created."""
        key = self.keys.snapshot(entry)
        return SnapshotPointer.parse(self.store.ever[key][0], key, self.proof)

    def seals(self) -> list[Seal]:
        """Return the seals in their order, as they were created."""
        seals: list[Seal] = []
        while (key := self.keys.seal(len(seals))) in self.store.ever:
            seals.append(Seal.parse(self.store.ever[key][0], key, self.proof))
        return seals

    def sealed_contribution(self, entry: int, rank: int, seal: Seal) -> tuple[Contribution, Floats]:
        head, data = self.sealed_bytes(entry, rank, seal)
        payload = data[self.layout.head_bytes :]
        return head, values_of(self.layout.wire, [payload]) if payload else np.zeros(0, np.float32)

    def sealed_bytes(self, entry: int, rank: int, seal: Seal) -> tuple[Contribution, memoryview]:
        """Return the head of a sealed contribution, and the whole object as it was created."""
        key = self.keys.contribution(entry, rank)
        for value in self.store.ever[key]:
            head, digest = Contribution.parse(value, key, self.proof)
            if digest == seal.replicas[rank].digest:
                return head, memoryview(value)
        raise Violation(f"entry {entry}: the sealed contribution of rank {rank} was never stored")


def _equal(left: list[Floats], right: list[Floats]) -> bool:
    return all(a.tobytes() == b.tobytes() for a, b in zip(left, right, strict=True))
