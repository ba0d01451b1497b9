"""Runs one schedule of restarts: a service with containers, controllers outside the run, and orders of users.

`decide`, `DecisionLog`, `RestartController` and the orders are the real ones. They use the simulated store and the
scheduler of `simulation/world.py`.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from executors.attempt import replica_key
from executors.errors import StoreError
from executors.protocol import ReplicaStatus
from executors.restarts import decision_log, orders
from executors.restarts.controller import RestartContext, RestartController, RunSnapshot
from executors.restarts.decision_log import Decision, DecisionLog, is_blocked
from simulation.invariants import Violation
from simulation.restarts.invariants import check
from simulation.restarts.processes import Container, OutsideController, Worker
from simulation.restarts.record_store import RUN, CachedLog, RecordStore
from simulation.restarts.scenario import OutsideEvent, RestartScenario, parse
from simulation.world import Died, World

GRACE_S, BLOCK_S = 5.0, 15.0
MOST_ASLEEP_S = 150.0
PATIENCE_S = 1500.0
MARKER = b'{"why": "cancelled"}'


class RestartSimulation:
    """One schedule. The class attributes switch off rules of the simulated processes, for mutants."""

    looks_when_claiming = True
    has_intents = True
    appends_cancel = True
    marks_decided = True
    renews_pages = True
    dismisses = True

    def __init__(self, scenario: RestartScenario, *, is_traced: bool = True) -> None:
        self.scenario = scenario
        self.world = World(scenario.seed, scenario.faults, is_traced=is_traced)
        self.store = RecordStore(self)
        self.limit_s = scenario.faults.until_s + PATIENCE_S
        self.entries: list[Decision] = []
        """The decision log, as the store has it now."""
        self.landed_s: list[float] = []
        self.logs: list[DecisionLog] = []
        self.controllers: list[RestartController] = []
        self.containers: list[Container] = []
        self.workers: list[Worker] = []
        self.preempted: set[tuple[int, int]] = set()
        self.asked: Counter[tuple[int, int]] = Counter()
        self.cancelled: list[tuple[float, float, list[int]]] = []
        """For each cancel, the times at which it began and ended, and its ranks."""
        self.has_progress = False
        self.failure = ""
        self._names: Counter[str] = Counter()
        self._snapshots: dict[str, RunSnapshot] = {}

    def run(self) -> RestartSimulation:
        """Run the schedule to its end, and return it.

        Raises:
            Violation: a process did something that is not allowed.
        """
        ours = {"retry": self._retry, "this_process": self.world.who}
        real = {name: getattr(decision_log, name) for name in ours}
        for name, value in ours.items():
            setattr(decision_log, name, value)
        try:
            for rank in range(self.scenario.n_ranks):
                self.store._create(replica_key(RUN, rank, 0, "intent.json"), b"launcher")
            self.ask(dict.fromkeys(range(self.scenario.n_ranks), 0))
            for _ in range(self.scenario.n_controllers):
                self._spawn_controller(0.0)
            self._spawn_controller(self.scenario.faults.until_s)
            for act in self.scenario.acts:
                self.world.at(act.at_s, functools.partial(self._act, act))
            self.world.run(self.limit_s)
        finally:
            for name, value in real.items():
                setattr(decision_log, name, value)
        if self.failure:
            raise Violation(self.failure)
        return self

    def name(self, kind: str) -> str:
        self._names[kind] += 1
        return f"{kind}.{self._names[kind]}"

    def log(self, clock: Callable[[], float] | None = None) -> DecisionLog:
        log = CachedLog(self.store, RUN, clock or self.world.clock)
        self.logs.append(log)
        return log

    def controller(self, starter: Any) -> RestartController:
        scenario, world = self.scenario, self.world
        ahead_s = world.rng.uniform(0.0, scenario.skew_s)
        launched = None if scenario.policy is None else parse(scenario.policy)

        def clock() -> float:
            return world.now + ahead_s

        controller = RestartController(
            self.log(clock),
            RestartContext(launched, scenario.n_ranks, 0.0, scenario.min_replicas),
            starter=starter,
            has_wider=scenario.has_wider,
            clock=clock,
            monotonic=world.clock,
        )
        self.controllers.append(controller)
        return controller

    def snapshot(self, who: str) -> RunSnapshot:
        """Return the attempts and outcomes of the run, as a list of the store shows them. The list may be stale."""
        store = self.store
        store.point("list")
        if self.world.happens(self.world.faults.stale) and who in self._snapshots:
            return self._snapshots[who]
        newest = {rank: store.newest[rank] for rank in range(self.scenario.n_ranks)}
        ends = {each[0]: store.ends[each] for each in newest.items() if each in store.ends}
        self._snapshots[who] = RunSnapshot(newest, ends, self.has_progress)
        return self._snapshots[who]

    def ask(self, attempts: Mapping[int, int]) -> None:
        """Start containers as the service does: with a delay, and perhaps twice."""
        self.asked.update(attempts.items())
        groups = [attempts] if self.scenario.is_shared else [{rank: number} for rank, number in attempts.items()]
        for group in groups:
            for _ in range(1 + (self.world.rng.random() < self.scenario.copies)):
                container = Container(self, group)
                self.containers.append(container)
                self.world.spawn(container.name, container.body, self.world.rng.uniform(0.1, 8.0))

    def is_living(self, rank: int) -> bool:
        """Return True if the service still runs a container of the rank."""
        return any(container.is_alive and rank in container.attempts for container in self.containers)

    def seems_living(self, rank: int) -> bool:
        """Return True if the service reports a container of the rank as running. The report may be wrong."""
        return self.is_living(rank) and not self.world.happens(self.scenario.lies)

    def decided(self, entry: Decision) -> None:
        """Take a new entry of the log into account. The processes that it ends must have ended after some time."""
        self.entries.append(entry)
        self.landed_s.append(self.world.now)
        if entry.kind in ("cancel", "stop"):
            calm_s = max(self.world.now, self.scenario.faults.until_s + MOST_ASLEEP_S)
            late_s = calm_s - self.world.now + (entry.within_s or 0.0) + self.scenario.skew_s + GRACE_S + BLOCK_S
            self.world.at(late_s, functools.partial(self._check_gone, entry))

    def check_start(self, attempts: Mapping[int, int]) -> None:
        """Check that the log allows the attempts that a controller is about to start."""
        for rank, number in attempts.items():
            entry = next((each for each in reversed(self.entries) if each.start.get(rank) == number), None)
            if entry is None:
                self.fail(f"rank {rank} is started as attempt {number}, which no decision allows")
            elif self.world.now < entry.not_before - self.scenario.skew_s - 0.002:
                self.fail(f"rank {rank} is started at {self.world.now:.3f} s, before {entry.not_before:.3f} s")

    def check_begin(self, worker: Worker, began_s: float) -> None:
        """Check S3: no user code runs if a cancel or a stop was in the log when the process read it for its claim."""
        stood = [entry for entry, at_s in zip(self.entries, self.landed_s, strict=True) if at_s <= began_s]
        misled = any("/decisions/" in key for who, key in self.store.misled if who == worker.name)
        if is_blocked(stood, worker.rank) and is_blocked(self.entries, worker.rank) and not misled:
            self.fail(f"S3: {worker.name} runs user code of rank {worker.rank}, which is cancelled or stopped")

    def fail(self, what: str) -> None:
        self.world.note(what)
        self.failure = self.failure or what

    def _check_gone(self, entry: Decision) -> None:
        for worker in self.workers:
            blocking_order = decision_log.blocking_order(self.entries, worker.rank)
            if worker.runs_user_code and blocking_order is entry:
                self.fail(f"S3: {worker.name} lives long after rank {worker.rank} was ended by a {entry.kind}")

    def _retry(self, act: Callable[[], Any]) -> Any:
        for _ in range(3):
            try:
                return act()
            except StoreError:
                self.world.sleep(0.5)
        return act()

    def _spawn_controller(self, delay_s: float) -> None:
        controller = OutsideController(self)
        self.world.spawn(controller.name, controller.body, delay_s)

    def _act(self, act: OutsideEvent) -> None:
        if act.what == "kill":
            living = [each for each in self.containers if each.is_alive and each.workers]
            if living:
                container = self.world.rng.choice(living)
                if self.world.rng.random() < 0.5:
                    self.preempted.update((rank, worker.number) for rank, worker in container.workers.items())
                container.die()
                self.world.kill(container.name)
            return
        name = self.name(act.what)
        self.world.spawn(name, functools.partial(self._user, act))

    def _user(self, act: OutsideEvent) -> None:
        try:
            for _ in range(5):
                try:
                    getattr(self, f"_{act.what}")(act)
                    return
                except StoreError:
                    self.world.sleep(1.0)
        except Died:
            pass

    def _cancel(self, act: OutsideEvent) -> None:
        ranks = range(self.scenario.n_ranks) if act.rank is None else [act.rank]
        log, began_s = self.log(), self.world.now
        if self.appends_cancel:
            orders.order_cancel(log, None if act.rank is None else [act.rank])
        newest = self.snapshot(self.world.who()).newest
        log.read()
        for rank in ranks:
            decided = [entry.start[rank] for entry in log.entries if rank in entry.start and self.marks_decided]
            for number in range(max([newest[rank], *decided]) + 1):
                if (rank, number) not in self.store.ends:
                    self.store.put_if_absent(replica_key(RUN, rank, number, "cancel.json"), MARKER)
        for container in [each for each in self.containers if each.is_alive]:
            for rank in set(ranks) & container.workers.keys():
                container._end(rank, "cancelled")
        self.cancelled.append((began_s, self.world.now, list(ranks)))

    def _stop(self, act: OutsideEvent) -> None:
        orders.order_stop(self.log(), 20.0)

    def _policy(self, act: OutsideEvent) -> None:
        orders.order_policy(self.log(), parse(act.policy), None)

    def _resume(self, act: OutsideEvent) -> None:
        """Start the ended ranks again, as the user orders it."""
        log, person = self.log(), OutsideController(self)
        n_seen = len(log.read())
        snapshot = self.snapshot(person.name)
        ranks = range(self.scenario.n_ranks) if act.rank is None else [act.rank]
        ended = {rank for rank in ranks if rank in snapshot.ends}
        start = {r: snapshot.newest[r] + 1 for r in ended if snapshot.ends[r].status is not ReplicaStatus.SUCCEEDED}
        if start and orders.order_resume(log, start, n_seen) is None:
            person.launch(start)


def run_schedule(seed: int, *, is_traced: bool = True, **changes: Any) -> RestartSimulation:
    """Run the schedule of a seed, and check it.

    Args:
        seed: determines the whole schedule.
        is_traced: True: record every call, so that the schedule can be printed.
        changes: fields of `RestartScenario` to replace.

    Raises:
        Violation: an invariant does not hold. The message has the seed.
    """
    simulation = RestartSimulation(replace(RestartScenario.from_seed(seed), **changes), is_traced=is_traced)
    try:
        check(simulation.run())
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from None
    return simulation
