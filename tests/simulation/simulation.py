"""Random schedules of the real rendezvous in a simulated world; what must hold in each is in `invariants.py`.

I4, that all live replicas finish when faults end, joiners too, is checked here.
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
from diloco.rendezvous.frames import digests_of
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity, claim
from diloco.rendezvous.reduction import Blocks, Input, Write, weighted_mean
from diloco.rendezvous.restore import RestoredWork
from diloco.rendezvous.retrying_store import RetryingStore
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
"""No schedule takes as long by its own clock, unless somebody never ends."""


@dataclass
class Simulation(Invariants):
    """One schedule."""

    live: set[str] = field(default_factory=set)
    is_traced: bool = True
    training: type[IntegerState] = IntegerState

    def __post_init__(self) -> None:
        plan = self.plan
        self.world = World(plan.seed, plan.faults, is_traced=self.is_traced)
        self.store = SimulatedStore(self.world, answer_s=plan.answer_s, upload_s=plan.upload_s)
        self.store.deleting = self._check_collection
        if not plan.streams:
            self.store.put_if_absent_streamed = None  # type: ignore[method-assign,assignment]
        self.keys = Keys(RUN, "main")
        spe = plan.steps_per_entry if plan.entry_s is None else 1
        total = max(plan.entries) * spe if plan.is_planned else None
        self.steps = rounds.RoundPlan(spe, plan.n_fragments, plan.overlap_steps, total, plan.entry_s)

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

    def _spawn(self, rank: int | None, delay_s: float, checkpoint: RestoredWork | None = None) -> None:
        slot = len(self.processes)
        if slot >= SLOTS and self.plan.until_s is None:
            return  # with an end in time, work is counted, and not whose it is
        name = f"{'joiner' if rank is None else f'rank {rank}'}.{slot}"
        plan = self.plan
        toy = self.training(
            plan.n_fragments, slot % SLOTS, slot, is_lossy=plan.is_lossy, keeps_later_work=plan.keeps_later_work
        )
        steps = replace(self.steps)  # a replica learns of the end of a stopped run by itself
        toy.prepare(is_final=steps.is_final, trains_on=steps.overlaps or plan.in_background)
        toy.proof = self.proof
        process = Process(name, rank, slot, toy, steps, is_restored=checkpoint is not None)
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

    def _process(self, process: Process, checkpoint: RestoredWork | None) -> None:
        self.live.add(process.name)
        try:
            self._train(process, checkpoint)
            self.clean[process.slot] = process.toy
        except Died:
            if not self.plan.absences:
                self._bury(process)
        except FencedError:
            self.world.note("is fenced")
        except (QuorumTimeoutError, CorruptObjectError) as error:
            if not self._is_excused(str(error)) and not self._is_superseded(process):
                self.failures.append(f"I4: {process.name}: {error}")
        except Exception as error:  # noqa: BLE001 - whatever a replica raises is a violation
            if not (isinstance(error, DivergenceError) and self._is_of_another_host(str(error))):
                self.failures.append(f"{process.name}: {type(error).__name__}: {error}")
        process.ended_s = self.world.now
        self.live.discard(process.name)

    def _is_superseded(self, process: Process) -> bool:
        """Return whether a newer copy of this rank has begun: an older one ends, in one way or another."""
        me = process.me
        return me is not None and self.keys.claim(me.rank, me.attempt + 1) in self.store.objects

    def _is_of_another_host(self, error: str) -> bool:
        """Return whether a replica has to stop because nothing proves what it computed of a mean whose head rotted."""
        found = re.search(r"round (\d+)", error)
        return found is not None and self._is_unprovable((int(found[1]) - 1) % self.plan.n_fragments)

    def _is_excused(self, error: str) -> bool:
        """Return whether a replica waited in vain because what it needed had rotted."""
        rotten = self.store.ever_rotten
        found = re.match(r"Round (\d+)", error)
        entry = int(found[1]) - 1 if found else -1
        if any("/part/" in key or "/mean/" in key for key in rotten):
            return True
        missing = re.findall(r"\d+", error.partition("Missing ranks:")[2])
        if self.plan.min_quorum > 1 and any(self.keys.claim(int(r), 0) not in self.store.objects for r in missing):
            return True  # it never began, and was not started again
        is_sealed = f"{RUN}/diloco/main/seal/{entry}" in self.store.objects  # then a rotten input is left out
        return not is_sealed and any(f"/r{entry}/contribution/" in key for key in rotten)

    def _train(self, process: Process, checkpoint: RestoredWork | None) -> None:
        world, plan, toy = self.world, self.plan, process.toy
        store = RetryingStore(self.store, clock=world.clock, patience=ENDLESS)
        nonce = f"nonce{process.slot}"
        me = claim(store, self.keys, process.rank, plan.world_size, nonce, lambda: world.sleep(0.1))
        process.me = me
        scheduler: Scheduler = RoundGreenlet(world) if plan.in_background else Inline(world.wait)
        context = Context(
            store=store,
            keys=self.keys,
            me=me,
            training=toy,
            plan=process.steps,
            proof=self.proof,
            min_quorum=plan.min_quorum,
            weight=plan.weights[me.rank % len(plan.weights)],
            snapshot_every=plan.snapshot_every,
            limits=Limits(
                grace_s=plan.grace_s,
                round_timeout_s=600.0,
                small_bytes=0 if plan.sharded else 1 << 20,
                block_elements=BLOCK_ELEMENTS,
            ),
            reduce=_reduce_of_host(process.slot),
            clock=world.clock,
            wait=scheduler.pause,
            in_background=scheduler.in_background,
            carry_rounds=plan.carry_rounds,
            rng=world.rng,
            background=lambda job: world.spawn(f"{world.who()} keeps", lambda: _until_death(job)),
        )
        side = TrainingSide(context, scheduler)
        process.phase = side.phase
        self._check_what_lands(side, toy)
        side.start(checkpoint)
        process.here_s = world.now
        slower = plan.speeds[me.rank] if me.rank < len(plan.speeds) else 1.0
        entries = plan.entries[me.rank] if me.rank < plan.world_size else max(plan.entries)
        while not self._has_finished(process, side, entries):
            if side.position >= plan.stops.get(me.rank, math.inf):
                side.phase.wants_to_stop = True
            self._perhaps_copy(me, side, toy)
            self._perhaps_flip(me, side.position, toy)
            world.sleep(world.rng.uniform(*plan.step_s) * slower)
            toy.train_step()
            began_s, was_out, was_named = world.now, side.is_out_of_phase, context.members.names_me
            adopted = side.step()
            if adopted:
                world.note(f"has adopted {adopted[-1].round}{', and is out of phase' * side.phase.is_out_of_phase}")
                process.adopted_s.append(world.now)
            steps = process.steps
            if steps.is_over(side.position) and side.phase.run_step < (steps.total_steps or 0):
                raise Violation(f"{process.name}: the plan is over, and its steps are not")
            if checkpoint is None:
                self._check_ledger(process, side.phase)
            if plan.is_phased:
                self._check_waits(process, adopted, began_s, was_out, was_named)
            process.is_new = was_out or (process.is_new and not adopted)
        process.left_out_of_phase = side.phase.is_out_of_phase  # what it presented may be counted after it has left
        side.leave()
        process.left_at, process.has_made_all = side.position, side.position >= entries

    def _check_what_lands(self, side: TrainingSide, toy: IntegerState) -> None:
        """Check the state whenever something lands: the rounds then wait for the training."""
        runner, merge_ready = side.runner, side.runner._merge_ready

        def check_first(result: RoundResult) -> None:
            self._check_state(toy, runner.position)
            merge_ready(result)

        runner._merge_ready = check_first

    def _has_finished(self, process: Process, side: TrainingSide, entries: int) -> bool:
        if process.steps.total_steps is None:
            return side.position >= entries
        if self.plan.stops:  # loops of users end by `is_over` or by the number of steps, and both must be right
            return process.steps.is_over(side.position)
        return side.phase.run_step >= process.steps.total_steps

    def _perhaps_copy(self, me: Identity, side: TrainingSide, toy: IntegerState) -> None:
        world = self.world
        if world.happens(self.plan.copies):
            delay_s = world.rng.uniform(0.0, 60.0)
            if world.rng.random() < 0.5:
                world.note(f"a second copy of rank {me.rank} starts in {delay_s:.0f} s")
                self._spawn(me.rank, delay_s)
            else:
                world.note(f"a copy from this state of rank {me.rank} starts in {delay_s:.0f} s")
                toy.dropped = True
                self._spawn(me.rank, delay_s, restored_from(side, toy))

    def _perhaps_flip(self, me: Identity, position: int, toy: IntegerState) -> None:
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


def restored_from(side: TrainingSide, toy: IntegerState) -> RestoredWork:
    return RestoredWork(side.position, toy.progress(), list(side.runner.account.uncounted_since))


def _until_death(job: Callable[[], None]) -> None:
    with suppress(Died):
        job()


def _reduce_of_host(host: int) -> Callable[..., tuple[str, ...]]:
    """Return a reduction whose sums differ in the last bit from other hosts', as on unlike processors."""

    def reduce(inputs: Sequence[Input], out: memoryview, blocks: Blocks, write: Write | None = None) -> tuple[str, ...]:
        made = bytearray()
        weighted_mean(inputs, out, blocks, None if write is None else made.extend)
        whole = out if write is None else memoryview(made)
        bits = np.frombuffer(whole, np.uint32)
        bits ^= np.uint32(host & bool(inputs))
        if write is not None:
            write(whole)
        return digests_of(whole, blocks.mean_wire.size(blocks.block_elements), blocks.proof)

    return reduce


def calm(**changes: Any) -> Simulation:
    """Return a schedule of three replicas in which nothing goes wrong by itself."""
    return Simulation(replace(CALM, **{"entries": [4, 4, 4], **changes}))


def run_schedule(
    seed: int,
    *,
    is_traced: bool = True,
    training: type[IntegerState] = IntegerState,
    stops_always: bool = False,
    **changes: Any,
) -> Simulation:
    """Run one schedule.

    Args:
        seed: all of the schedule follows from it.
        stops_always: a rank stops the run, whatever the seed.
        is_traced: record every call, to be printed.
        training: what each process trains.
        changes: of the plan that follows from the seed.

    Raises: Violation: with the seed in its message.
    """
    plan = replace(Scenario.random(seed), **changes) if changes else Scenario.from_seed(seed)
    plan = plan.stopping() if stops_always else plan
    simulation = Simulation(plan, is_traced=is_traced, training=training)
    try:
        simulation.run()
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from None
    return simulation
