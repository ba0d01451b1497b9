"""The simulated processes of a run: workers, supervisors in containers, and controllers outside the run."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from greenlet import getcurrent  # type: ignore[import-untyped]

from executors.attempt import replica_key
from executors.errors import StoreError
from executors.protocol import Outcome, ReplicaStatus
from executors.restarts.controller import RunSnapshot
from executors.restarts.decision_log import decision_on, is_blocked
from simulation.restarts.record_store import RUN
from simulation.restarts.scenario import ENDS
from simulation.world import Died

if TYPE_CHECKING:
    from simulation.restarts.simulation import RestartSimulation

LOOK_S, INTENT_S = 10.0, 30.0
CALM_S = 300.0
"""The time after the faults from which all user code succeeds, so that the run ends."""


class Worker:
    """The process of one rank."""

    def __init__(self, container: Container, rank: int, asked: int) -> None:
        self.simulation, self.container = container.simulation, container
        self.rank, self.number = rank, asked
        self.name = self.simulation.name(f"worker{rank}")
        self.outcome: Outcome | None = None
        self.is_alive, self.has_claimed, self.runs_user_code = True, False, False
        self.is_waiting, self.go_on, self.claimed = False, 0, asked

    def body(self) -> None:
        try:
            while self.claim():
                self.runs_user_code = True
                self.work()
                self.runs_user_code = False
                if self.outcome is None or not self.outcome.goes_on or not self.wait():
                    break
        except (Died, StoreError):
            pass
        finally:
            self.is_alive = self.runs_user_code = False
            self.container.wake()

    def wait(self) -> bool:
        """Wait for the next attempt, as a process with a restartable entrypoint does. Return False if there is none."""
        self.is_waiting = True
        self.container.wake()
        while not self.go_on:
            self.simulation.world.sleep(0.05)
        number, self.go_on, self.outcome = self.go_on, 0, None
        self.number = number if number > 0 else self.number
        return number > 0

    def claim(self) -> bool:
        simulation, store = self.simulation, self.simulation.store
        while True:
            key = functools.partial(replica_key, RUN, self.rank, self.number)
            if store.has(key("cancel.json")):
                store.record(Outcome(self.rank, self.number, ReplicaStatus.CANCELLED, "cancelled"))
                return False
            if store.wins(key("started.json"), self.name.encode()):
                break
            self.number += 1
        self.has_claimed, self.claimed = True, self.number
        log, began_s = simulation.log(), simulation.world.now
        if simulation.looks_when_claiming:
            log.read()
            if is_blocked(log.entries, self.rank):
                store.record(Outcome(self.rank, self.number, ReplicaStatus.CANCELLED, "cancelled"))
                return False
        simulation.check_begin(self, began_s)
        return True

    def work(self) -> None:
        world, scenario = self.simulation.world, self.simulation.scenario
        dice = world.rng
        end = ENDS[kind := dice.choice(scenario.ends)]
        if world.now > scenario.faults.until_s + (0.0 if kind == "free" else CALM_S):
            end = ENDS[kind := "succeeded"]  # otherwise the run might never end, because a window renews budgets
        marks = int(dice.random() < scenario.progresses)
        self.simulation.has_progress |= bool(marks)
        world.sleep(dice.uniform(*scenario.life_s))
        saved = int(bool(marks) and dice.random() < scenario.saves)
        reached = {"round": float(dice.choice([1, 1, 2]))} if marks else {}
        status = ReplicaStatus.SUCCEEDED if kind == "succeeded" else ReplicaStatus.FAILED
        stays = kind.startswith("raises") and scenario.restartable > 0 and dice.random() < scenario.restartable
        self.outcome = Outcome(
            self.rank,
            self.number,
            status,
            progress_marks=marks,
            saved_marks=saved,
            reached=reached,
            goes_on=stays,
            **end,
        )
        world.note(f"ends: {kind}, saved {saved}")
        if kind in ("succeeded", "raises", "raises otherwise"):
            self.simulation.store.record(self.outcome)


class Container:
    """A supervisor with its workers. It starts ranks in its own container."""

    how = "fork"

    def __init__(self, simulation: RestartSimulation, attempts: Mapping[int, int]) -> None:
        self.simulation, self.attempts = simulation, dict(attempts)
        self.name = simulation.name("container")
        self.workers: dict[int, Worker] = {}
        self.idle: dict[int, Worker] = {}
        """The processes that wait for their next attempt."""
        self.ending: dict[int, str] = {}
        self.is_alive = True
        self._turn, self._pauses, self._poked = 0, False, False
        self._looked_at_s = simulation.world.now
        self.controller = simulation.controller(self)

    def may_start(self, rank: int) -> bool:
        return rank in self.attempts

    def start(self, attempts: Mapping[int, int]) -> None:
        self.simulation.check_start(attempts)
        for rank, number in attempts.items():
            if worker := self.workers.get(rank):
                if not worker.has_claimed or worker.number >= number:
                    continue  # the worker runs that attempt already, or may still claim it
                self._end(rank, "fenced")
                self._conclude(rank)
            idle = self.idle.pop(rank, None)
            if idle is not None and idle.is_alive and self._stays(rank, number):
                self._continue(idle, rank, number)
                continue
            if idle is not None:
                idle.go_on = -1
            self._run(rank, number)

    def _stays(self, rank: int, number: int) -> bool:
        entry = decision_on(self.controller.log.entries, rank, number - 1)
        return entry is not None and entry.how == "process"

    def _continue(self, worker: Worker, rank: int, number: int) -> None:
        """Let a process that waits run the next attempt."""
        self.attempts[rank] = number
        self.workers[rank] = worker
        worker.is_waiting = False
        if self.simulation.renews_pages:
            worker.has_claimed = False
        worker.go_on = number

    def _dismiss(self, wait_s: float | None) -> None:
        """End processes that wait for an attempt that will not come."""
        for rank, worker in list(self.idle.items()):
            entries = self.controller.log.entries
            entry = decision_on(entries, rank, worker.number)
            is_planned = entry is None or entry.start.get(rank, -1) > worker.number
            if wait_s is None or not is_planned or is_blocked(entries, rank) or not worker.is_alive:
                del self.idle[rank]
                worker.go_on = -1

    def body(self) -> None:
        try:
            for rank, number in self.attempts.items():
                self._run(rank, number)
            wait_s: float | None = LOOK_S
            while wait_s is not None:
                self._pause(wait_s)
                wait_s = self._pass()
        except Died:
            pass
        finally:
            self.die()

    def die(self) -> None:
        """End the container with all its processes."""
        self.is_alive = False
        for worker in (*self.workers.values(), *self.idle.values()):
            self._kill(worker)

    def wake(self) -> None:
        self._poked = True
        if self._pauses:
            self.simulation.world.at(0.0, functools.partial(self._resume, self._turn))

    def _pause(self, seconds: float) -> None:
        if not self._poked:
            world = self.simulation.world
            self._task, self._pauses = getcurrent(), True
            world.at(seconds, functools.partial(self._resume, self._turn))
            world._main.switch()
        self._poked = False

    def _resume(self, turn: int) -> None:
        if self._pauses and turn == self._turn:
            self._turn, self._pauses = self._turn + 1, False
            self.simulation.world._run(self._task)

    def _run(self, rank: int, number: int) -> None:
        self.attempts[rank] = number
        self.workers[rank] = worker = Worker(self, rank, number)
        self.simulation.workers.append(worker)
        self.simulation.world.spawn(worker.name, worker.body)

    def _kill(self, worker: Worker) -> None:
        if worker.is_alive:
            worker.is_alive = worker.runs_user_code = False
            self.simulation.world.at(0.0, lambda: self.simulation.world.kill(worker.name))

    def _end(self, rank: int, why: str) -> None:
        self.ending.setdefault(rank, why)
        self._kill(self.workers[rank])

    def _pass(self) -> float | None:
        simulation = self.simulation
        try:
            for rank in [rank for rank, worker in self.workers.items() if not worker.is_alive]:
                self._conclude(rank)
            for rank in [rank for rank, worker in self.workers.items() if worker.is_waiting]:
                self.attempts[rank] = self.workers[rank].number
                self.idle[rank] = self.workers.pop(rank)
            if simulation.world.now >= self._looked_at_s + LOOK_S - 0.001:
                self._looked_at_s = simulation.world.now
                self._look()
            self.attempts.update({rank: each.number for rank, each in self.workers.items() if each.has_claimed})
            snapshot = simulation.snapshot(self.name)
            newest = {
                **snapshot.newest,
                **{rank: max(snapshot.newest[rank], own) for rank, own in self.attempts.items()},
            }
            ends = {
                rank: replace(end, goes_on=end.goes_on and rank in self.idle)
                for rank, end in snapshot.ends.items()
                if end.attempt == newest[rank]
            }
            wait_s = self.controller.advance(RunSnapshot(newest, ends, snapshot.has_progress))
            if simulation.dismisses:
                self._dismiss(wait_s)
        except StoreError:
            return 1.0
        if not self.workers and not self.idle and wait_s is None:
            return None
        left_s = max(0.01, self._looked_at_s + LOOK_S - simulation.world.now)
        return left_s if wait_s is None else min(wait_s + 0.001, left_s)

    def _conclude(self, rank: int) -> None:
        """Record an outcome for an ended worker that has none."""
        worker, store = self.workers[rank], self.simulation.store
        number = worker.number
        claim = store.claims.get((rank, number))
        while number > self.attempts[rank] and claim != worker.name.encode():
            number, claim = number - 1, store.claims.get((rank, number - 1))
        if claim in (None, worker.name.encode()):
            why = self.ending.get(rank)
            if why is not None:
                status = ReplicaStatus.CANCELLED if why == "cancelled" else ReplicaStatus.FAILED
                outcome = Outcome(rank, number, status, why)  # type: ignore[arg-type]
            else:
                outcome = worker.outcome or Outcome(rank, number, ReplicaStatus.FAILED, "signal", -9, "SIGKILL")
            store.record(outcome)
        self.attempts[rank] = number
        del self.workers[rank]
        self.ending.pop(rank, None)

    def _look(self) -> None:
        """End workers that a stop or a cancel blocks, and workers that a newer attempt has fenced."""
        store, now = self.simulation.store, self.simulation.world.now
        self.controller.log.read()
        for rank, worker in self.workers.items():
            order = self.controller.blocking_order(rank)
            if order is not None and now >= order.at + (order.within_s or 0.0):
                self._end(rank, "cancelled")
            elif worker.has_claimed and (store.newest[rank] > worker.claimed or (rank, worker.claimed) in store.ends):
                last = (rank, store.newest[rank])
                is_own = store.claims.get(last) == worker.name.encode() and last not in store.ends
                if is_own and worker.outcome is None:
                    self.simulation.fail(f"S6: {worker.name} is fenced by its own claim")
                self._end(rank, "fenced")
        for rank in [rank for rank, number in self.attempts.items() if rank not in self.workers]:
            if store.newest[rank] > self.attempts[rank]:
                del self.attempts[rank]  # another supervisor has the rank now


class OutsideController:
    """A controller that watches the run from outside. It starts ranks through the service."""

    how = "launch"

    def __init__(self, simulation: RestartSimulation) -> None:
        self.simulation = simulation
        self.name = simulation.name("controller")
        self.controller = simulation.controller(self)
        self._intents: dict[tuple[int, int], float] = {}

    def may_start(self, rank: int) -> bool:
        return not self.simulation.seems_living(rank)

    def start(self, attempts: Mapping[int, int]) -> None:
        self.simulation.check_start(attempts)
        self.launch(attempts)

    def launch(self, attempts: Mapping[int, int]) -> None:
        simulation, store = self.simulation, self.simulation.store
        mine = {}
        nonce = simulation.name(self.name).encode()
        for rank, number in attempts.items():
            key = replica_key(RUN, rank, number, "intent.json")
            if not simulation.has_intents or store.wins(key, nonce):
                mine[rank] = number
        if mine:
            store.point("before the service's call")
            simulation.ask(mine)
            store.point("after the service's call")
        for rank, number in mine.items():
            store.put_if_absent(replica_key(RUN, rank, number, "handle.json"), nonce)

    def body(self) -> None:
        simulation = self.simulation
        try:
            while simulation.world.now < simulation.limit_s:
                wait_s = None
                try:
                    self._find_lost()
                    snapshot = simulation.snapshot(self.name)
                    wait_s = self.controller.advance(snapshot)
                    if self._is_over(snapshot):
                        return
                except StoreError:
                    wait_s = 1.0
                pause_s = simulation.world.rng.uniform(3.0, 15.0)
                simulation.world.sleep(pause_s if wait_s is None else min(wait_s + 0.001, pause_s))
        except Died:
            pass

    def _find_lost(self) -> None:
        """Record an outcome for attempts that the service reports as gone."""
        simulation, store = self.simulation, self.simulation.store
        for rank, number in list(store.newest.items()):
            if (rank, number) in store.ends or simulation.seems_living(rank):
                continue
            seen_s = self._intents.setdefault((rank, number), simulation.world.now)
            if (rank, number) in store.claims or simulation.world.now >= seen_s + INTENT_S:
                reason = "preempted" if (rank, number) in simulation.preempted else "lost"
                store.record(Outcome(rank, number, ReplicaStatus.FAILED, reason))  # type: ignore[arg-type]

    def _is_over(self, snapshot: RunSnapshot) -> bool:
        return len(snapshot.ends) == self.simulation.scenario.n_ranks and all(
            map(self._is_final, snapshot.ends.values())
        )

    def _is_final(self, end: Outcome) -> bool:
        log = self.controller.log.entries
        if self.simulation.is_living(end.rank):
            return False
        if end.status is not ReplicaStatus.FAILED or self.controller.policy is None or is_blocked(log, end.rank):
            return True
        answer = decision_on(log, end.rank, end.attempt)
        return answer is not None and answer.kind == "give_up"
