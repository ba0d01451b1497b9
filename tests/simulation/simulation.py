"""Runs one schedule of the real rendezvous in a simulated world: `run_schedule` runs the schedule of a seed.

`invariants.py` has the invariants. Only I4 is checked here: when the faults end, all live replicas finish, joiners too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from support.patience import ENDLESS

from diloco.errors import DivergenceError, FencedError, QuorumTimeoutError
from diloco.rendezvous import phase as rounds
from diloco.rendezvous.claims import claim
from diloco.rendezvous.frames import MeanHead, digests_of
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity
from diloco.rendezvous.reduction import BlockFormat, ShardInput, Write, weighted_mean
from diloco.rendezvous.restore import RestoredWork
from diloco.rendezvous.retrying_store import Map, RetryingStore
from diloco.rendezvous.round import Context, Limits, RoundResult
from diloco.rendezvous.training_side import Inline, Scheduler, TrainingSide
from executors.errors import CorruptObjectError
from simulation.integer_state import BLOCK_ELEMENTS, SLOTS, IntegerState
from simulation.invariants import Invariants, Process, Violation
from simulation.round_greenlet import RoundGreenlet
from simulation.scenario import CALM, Absence, Scenario
from simulation.world import MOST_DELAY_S, Died, SimulatedStore, World

RUN = "run"
MOST_S = 20_000.0
"""The longest time of a schedule, in simulated seconds. A schedule that takes longer has a process that never ends."""


@dataclass
class Simulation(Invariants):
    """One schedule."""

    live: set[str] = field(default_factory=set)
    is_traced: bool = True
    training: type[IntegerState] = IntegerState
    map: Map = map
    """Applies a function to several arguments, as a process with several threads does."""

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.world = World(scenario.seed, scenario.faults, is_traced=self.is_traced)
        self.store = SimulatedStore(
            self.world,
            answer_s=scenario.answer_s,
            upload_s=scenario.upload_s,
            checks_uploads=scenario.checks_uploads,
        )
        self.store.deleting = self._check_collection
        if not scenario.streams:
            self.store.put_if_absent_streamed = None  # type: ignore[method-assign,assignment]
        self.keys = Keys(RUN, "main")
        spe = scenario.steps_per_entry if scenario.entry_s is None else 1
        total = max(scenario.entries) * spe if scenario.is_planned else None
        self.steps = rounds.RoundPlan(spe, scenario.n_fragments, scenario.overlap_steps, total, scenario.entry_s)

    def run(self) -> None:
        scenario, rng = self.scenario, self.world.rng
        for rank in range(scenario.world_size):
            self._spawn(rank, delay_s=rng.uniform(0, 0.1 if scenario.is_phased else 3.0))
        for _ in range(scenario.joiners):
            self._spawn(None, delay_s=rng.uniform(0, 6 * scenario.phase_s if scenario.is_phased else 60))
        for absence in scenario.absences:
            self.world.at(absence.at_s, partial(self._away, absence))
        self.world.run(MOST_S if scenario.until_s is None else scenario.until_s)
        if self.failures:
            raise Violation(self.failures[0])
        if scenario.until_s is not None:
            return
        if self.live:
            raise Violation(f"I4: {sorted(self.live)} never finished")
        self._check_history()
        if scenario.is_phased:
            self._check_all_are_named()

    # -- processes ---------------------------------------------------------------------------------------------------

    def _spawn(self, rank: int | None, delay_s: float, checkpoint: RestoredWork | None = None) -> None:
        slot = len(self.processes)
        if slot >= SLOTS and self.scenario.until_s is None:
            return  # each process needs a slot for its work, except in schedules that end at a fixed time
        name = f"{'joiner' if rank is None else f'rank {rank}'}.{slot}"
        scenario = self.scenario
        state = self.training(
            scenario.n_fragments,
            slot % SLOTS,
            slot,
            wires=scenario.wires,
            keeps_later_work=scenario.keeps_later_work,
        )
        steps = replace(self.steps)  # each replica has its own plan, because it learns by itself that a run was stopped
        state.prepare(is_final=steps.is_final, trains_on=steps.overlaps or scenario.in_background)
        state.proof = self.proof
        process = Process(name, rank, slot, state, steps, is_restored=checkpoint is not None)
        self.processes.append(process)
        self.world.spawn(name, lambda: self._process(process, checkpoint), delay_s)

    def _away(self, absence: Absence) -> None:
        """Kill the newest process of a rank and start another one later, or suspend the process for a while."""
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

    def _process(self, process: Process, checkpoint: RestoredWork | None) -> None:
        self.live.add(process.name)
        try:
            self._train(process, checkpoint)
            self.clean[process.slot] = process.state
        except Died:
            if not self.scenario.absences:
                self._bury(process)
        except FencedError:
            self.world.note("is fenced")
        except (QuorumTimeoutError, CorruptObjectError) as error:
            if not self._is_excused(str(error)) and not self._is_superseded(process):
                self.failures.append(f"I4: {process.name}: {error}")
        except Exception as error:  # noqa: BLE001 - any other error of a replica is a violation
            if not (isinstance(error, DivergenceError) and self._is_of_another_host(str(error))):
                self.failures.append(f"{process.name}: {type(error).__name__}: {error}")
        process.ended_s = self.world.now
        self.live.discard(process.name)

    def _is_superseded(self, process: Process) -> bool:
        """Return True if a newer process of this rank has begun. Any error may then end the older process."""
        me = process.me
        return me is not None and self.keys.claim(me.rank, me.attempt + 1) in self.store.objects

    def _is_of_another_host(self, error: str) -> bool:
        """Return True if a divergence was caused by a mean whose head was damaged, so that nothing proves its bits."""
        found = re.search(r"round (\d+)", error)
        return found is not None and self._is_unprovable((int(found[1]) - 1) % self.scenario.n_fragments)

    def _is_excused(self, error: str) -> bool:
        """Return True if a replica failed because an object that it needed was damaged."""
        rotten = self.store.ever_rotten
        found = re.match(r"Round (\d+)", error)
        entry = int(found[1]) - 1 if found else -1
        if any("/part/" in key or "/mean/" in key for key in rotten):
            return True
        # If means are not stored, a decided mean is in the contributions. A replica that is behind needs all of them.
        if not self.layout.stores_mean and any(map(self._is_decided_input, rotten)):
            return True
        missing = re.findall(r"\d+", error.partition("Missing ranks:")[2])
        if self.scenario.min_quorum > 1 and any(self.keys.claim(int(r), 0) not in self.store.objects for r in missing):
            return True  # the missing replica died before its claim, and was not started again
        # In a sealed entry, a damaged input is left out of the mean, so it is no excuse.
        is_sealed = f"{RUN}/diloco/main/seal/{entry}" in self.store.objects
        return not is_sealed and any(f"/r{entry}/contribution/" in key for key in rotten)

    def _is_decided_input(self, key: str) -> bool:
        """Return True if a contribution is in a mean that is not stored, and whose head is."""
        found = re.search(r"/r(\d+)/contribution/(\d+)$", key)
        mean = None if found is None else self.keys.mean(int(found[1]), 0)
        if found is None or mean not in self.store.ever:
            return False
        return int(found[2]) not in MeanHead.parse(self.store.ever[mean][0], mean, self.proof).left_out

    def _train(self, process: Process, checkpoint: RestoredWork | None) -> None:
        world, scenario, state = self.world, self.scenario, process.state
        store = RetryingStore(self.store, clock=world.clock, tolerance=ENDLESS)
        nonce = f"nonce{process.slot}"
        me = claim(store, self.keys, process.rank, scenario.world_size, nonce, lambda: world.sleep(0.1))
        process.me = me
        scheduler: Scheduler = RoundGreenlet(world) if scenario.in_background else Inline(world.wait)
        context = Context(
            store=store,
            keys=self.keys,
            me=me,
            training=state,
            plan=process.steps,
            proof=self.proof,
            min_quorum=scenario.min_quorum,
            weight=scenario.weights[me.rank % len(scenario.weights)],
            snapshot_every=scenario.snapshot_every,
            limits=Limits(
                grace_s=scenario.grace_s,
                round_timeout_s=600.0,
                small_bytes=0 if scenario.sharded else 1 << 20,
                block_elements=BLOCK_ELEMENTS,
                piece_bytes=1,  # so each block of an input is a piece of its own, up to the largest number of pieces
            ),
            # Replicas that all compute a mean come to the same bits, because the order of the operations is fixed.
            reduce=_reduce_of_host(process.slot) if self.layout.stores_mean else weighted_mean,
            clock=world.clock,
            wait=scheduler.pause,
            in_background=scheduler.in_background,
            carry_rounds=scenario.carry_rounds,
            rng=world.rng,
            map=self.map,
            background=lambda job: world.spawn(f"{world.who()} keeps", lambda: _until_death(job)),
        )
        side = TrainingSide(context, scheduler)
        process.phase = side.phase
        self._check_what_lands(side, state)
        side.start(checkpoint)
        process.here_s = world.now
        slower = scenario.speeds[me.rank] if me.rank < len(scenario.speeds) else 1.0
        entries = scenario.entries[me.rank] if me.rank < scenario.world_size else max(scenario.entries)
        while not self._has_finished(process, side, entries):
            if side.position >= scenario.stops.get(me.rank, math.inf):
                side.phase.wants_to_stop = True
            self._perhaps_copy(me, side, state)
            self._perhaps_flip(me, side.position, state)
            world.sleep(world.rng.uniform(*scenario.step_s) * slower)
            state.train_step()
            began_s, was_out, was_named = world.now, side.is_out_of_phase, context.members.names_me
            adopted = side.step()
            if adopted:
                world.note(f"has adopted {adopted[-1].round}{', and is out of phase' * side.phase.is_out_of_phase}")
                process.adopted_s.append(world.now)
            steps = process.steps
            if steps.is_over(side.position) and side.phase.run_step < (steps.total_steps or 0):
                raise Violation(f"{process.name}: the plan has ended before its last step")
            if checkpoint is None:
                self._check_ledger(process, side.phase)
            if scenario.is_phased:
                self._check_waits(process, adopted, began_s, was_out, was_named)
            process.is_new = was_out or (process.is_new and not adopted)
        process.left_out_of_phase = side.phase.is_out_of_phase  # a seal may count its early contribution later
        side.leave()
        process.left_at, process.has_made_all = side.position, side.position >= entries

    def _check_what_lands(self, side: TrainingSide, state: IntegerState) -> None:
        """Check the state of the anchor at each result, while the round runner waits for the merge."""
        runner, merge_ready = side.runner, side.runner._merge_ready

        def check_first(result: RoundResult) -> None:
            self._check_state(state, runner.position)
            merge_ready(result)

        runner._merge_ready = check_first

    def _has_finished(self, process: Process, side: TrainingSide, entries: int) -> bool:
        if process.steps.total_steps is None:
            return side.position >= entries
        # Loops of users end by `is_over` or by the number of steps. Both ways must end at the right step.
        if self.scenario.stops:
            return process.steps.is_over(side.position)
        return side.phase.run_step >= process.steps.total_steps

    def _perhaps_copy(self, me: Identity, side: TrainingSide, state: IntegerState) -> None:
        world = self.world
        if world.happens(self.scenario.copies):
            delay_s = world.rng.uniform(0.0, 60.0)
            if world.rng.random() < 0.5:
                world.note(f"a second copy of rank {me.rank} starts in {delay_s:.0f} s")
                self._spawn(me.rank, delay_s)
            else:
                world.note(f"a copy from this state of rank {me.rank} starts in {delay_s:.0f} s")
                state.dropped = True
                self._spawn(me.rank, delay_s, restored_from(side, state))

    def _perhaps_flip(self, me: Identity, position: int, state: IntegerState) -> None:
        if self.scenario.flip is None or self.scenario.flip[:2] != (me.rank, position) or state.excused_until:
            return
        f = self.scenario.flip[2]
        self.world.note(f"a bit flips in fragment {f}")
        state.flip(f)
        state.excused_until = position + (f - position) % self.scenario.n_fragments + 1

    def _bury(self, process: Process) -> None:
        """Act as the supervisor of a dead process: perhaps record its outcome, and perhaps start it again."""
        world, slot = self.world, process.slot
        rank = process.me.rank if process.me else process.rank
        if rank is None:
            return
        if self.scenario.all_leave_outcomes or world.rng.random() < 0.6:
            world.at(world.rng.uniform(0.1, 5.0), lambda: self._record_end(rank, slot))
        if world.rng.random() < 0.5:
            self._spawn(rank, world.rng.uniform(0.1, 60.0))

    def _record_end(self, rank: int, slot: int, *, looks_again: bool = True) -> None:
        """Record the outcome of a process as a supervisor does, under the newest attempt that it has claimed.

        The process may have died before it could read its own claim. If there is no claim yet, the outcome is recorded
        under the attempt that was asked for, and once more later if a delayed claim has appeared by then.
        """
        attempt, own = 0, []
        while claimed := self.store.objects.get(self.keys.claim(rank, attempt)):
            if json.loads(claimed)["nonce"] == f"nonce{slot}":
                own.append(attempt)  # a process that could not read its first claim has two claims
            attempt += 1
        if not own and looks_again:
            self.world.at(MOST_DELAY_S, lambda: self._record_end(rank, slot, looks_again=False))
        attempt = own[-1] if own else 0
        key = self.keys.outcome(rank, attempt)
        self.world.note(f"{key}: {self.store._create(key, b'{}')}")


def restored_from(side: TrainingSide, state: IntegerState) -> RestoredWork:
    """Return a checkpoint of a process: its position and its uncounted work."""
    return RestoredWork(side.position, state.progress(), list(side.runner.account.uncounted_since))


def _until_death(job: Callable[[], None]) -> None:
    with suppress(Died):
        job()


def _reduce_of_host(host: int) -> Callable[..., tuple[str, ...]]:
    """Return a reduction whose results differ in the last bits from those on other hosts, as on other processors."""

    def reduce(
        inputs: Sequence[ShardInput],
        out: memoryview,
        blocks: BlockFormat,
        write: Write | None = None,
        clipped: set[int] | None = None,
    ) -> tuple[str, ...]:
        made = bytearray()
        weighted_mean(inputs, out, blocks, None if write is None else made.extend, clipped)
        whole = out if write is None else memoryview(made)
        bits = np.frombuffer(whole, np.uint32)
        bits ^= np.uint32(host & bool(inputs))
        if write is not None:
            write(whole)
        return digests_of(whole, blocks.mean_wire.size(blocks.block_elements), blocks.proof)

    return reduce


def calm(**changes: Any) -> Simulation:
    """Return a schedule of three replicas without random faults.

    Args:
        changes: fields of `Scenario` to replace.
    """
    return Simulation(replace(CALM, **{"entries": [4, 4, 4], **changes}))


def run_schedule(
    seed: int,
    *,
    is_traced: bool = True,
    training: type[IntegerState] = IntegerState,
    stops_always: bool = False,
    **changes: Any,
) -> Simulation:
    """Run the schedule of a seed, and return it.

    Args:
        seed: determines the whole schedule.
        is_traced: True: record every call, so that the schedule can be printed.
        training: the class of the training state of each process.
        stops_always: True: a rank stops the run in any case.
        changes: fields of `Scenario` to replace.

    Raises:
        Violation: an invariant does not hold. The message has the seed.
    """
    scenario = replace(Scenario.random(seed), **changes) if changes else Scenario.from_seed(seed)
    scenario = scenario.stopping() if stops_always else scenario
    simulation = Simulation(scenario, is_traced=is_traced, training=training)
    try:
        simulation.run()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from None
    return simulation
