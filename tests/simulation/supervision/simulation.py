"""A simulated run: containers with supervisors and workers, a service, keepers outside, and people.

`decide`, `DecisionLog` and `Keeper` are the real ones, on the store and under the scheduler of the other simulation.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from greenlet import getcurrent  # type: ignore[import-untyped]

from executors.attempt import replica_key
from executors.attempt.outcome import parse_outcome
from executors.errors import KeyNotFoundError, StoreError
from executors.protocol import Outcome, ReplicaStatus
from executors.supervision import decisions
from executors.supervision.decisions import Decision, DecisionLog, answer_to, is_barred
from executors.supervision.keeper import Keeper, Sight
from simulation.invariants import Violation
from simulation.supervision.invariants import check
from simulation.supervision.plan import ENDS, Act, Plan, parse
from simulation.world import Died, SimulatedStore, World

RUN = "run"
LOOK_S, GRACE_S, INTENT_S, BAR_S = 10.0, 5.0, 30.0, 15.0
MOST_ASLEEP_S = 150.0
PATIENCE_S = 1500.0
MARKER = b'{"why": "cancelled"}'
_parsed: dict[bytes, Decision] = {}


class Records(SimulatedStore):
    """The store, and what a list of it shows of attempts."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation.world, answer_s=0.01)
        self._simulation = simulation
        self.outcomes: list[Outcome] = []
        """Outcomes by the number that stands for each in the store."""
        self.begun: dict[tuple[int, int], float] = {}
        self.newest: dict[int, int] = {}
        self.ends: dict[tuple[int, int], Outcome] = {}
        self.claims: dict[tuple[int, int], bytes] = {}

    def _set(self, key: str, value: bytes) -> bool:
        super()._set(key, value)
        _, folder, *rest = key.split("/")
        if folder == "decisions":
            self._simulation.decided(_parse(value, key))
            return True
        rank, number, name = int(rest[0]), int(rest[1]), rest[2]
        if name == "cancel.json":
            return True
        self.begun.setdefault((rank, number), self._world.now)
        while (rank, self.newest.get(rank, -1) + 1) in self.begun:
            self.newest[rank] = self.newest.get(rank, -1) + 1
        if name == "outcome.json":
            found = self.outcomes[int(value)] if value.isdigit() else parse_outcome(value)
            self.ends[rank, number] = found
        elif name == "started.json":
            self.claims[rank, number] = value
        return True

    def record(self, outcome: Outcome) -> None:
        """Record an outcome unless there is one; what was cancelled is so."""
        key = functools.partial(replica_key, RUN, outcome.rank, outcome.attempt)
        if self.has(key("cancel.json")):
            outcome = Outcome(outcome.rank, outcome.attempt, ReplicaStatus.CANCELLED, "cancelled")
        self.outcomes.append(outcome)
        self.put_if_absent(key("outcome.json"), b"%d" % (len(self.outcomes) - 1))

    def has(self, key: str) -> bool:
        try:
            self.get(key)
        except KeyNotFoundError:
            return False
        return True

    def wins(self, key: str, value: bytes) -> bool:
        """Create, and return whether it is what the store has now."""
        for _ in range(3):
            try:
                self.put_if_absent(key, value)
            except StoreError:
                continue
            break
        return bytes(self.get(key)) == value

    def point(self, what: str) -> None:
        """Pass a point where something may go wrong beside the store."""
        self._before("do", what)
        if self._world.happens(self._world.faults.refused):
            raise StoreError(f"{what}: refused")


class Log(DecisionLog):
    """The real log; what it reads is parsed once."""

    def _find(self, index: int) -> Decision | None:
        key = self.key(index)
        try:
            return _parse(bytes(self.store.get(key)), key)
        except KeyNotFoundError:
            return None


def _parse(data: bytes, key: str) -> Decision:
    if data not in _parsed:
        if len(_parsed) > 10_000:
            _parsed.clear()
        _parsed[data] = Decision.parse(data, key)
    return _parsed[data]


class Worker:
    """The process of one rank."""

    def __init__(self, container: Container, rank: int, asked: int) -> None:
        self.simulation, self.container = container.simulation, container
        self.rank, self.number = rank, asked
        self.name = self.simulation.name(f"worker{rank}")
        self.outcome: Outcome | None = None
        self.is_alive, self.runs_user_code = True, False

    def body(self) -> None:
        try:
            if self.claim():
                self.runs_user_code = True
                self.work()
        except (Died, StoreError):
            pass
        finally:
            self.is_alive = self.runs_user_code = False
            self.container.wake()

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
        log, began_s = simulation.log(), simulation.world.now
        if simulation.looks_when_claiming:
            log.read()
            if is_barred(log.entries, self.rank):
                store.record(Outcome(self.rank, self.number, ReplicaStatus.CANCELLED, "cancelled"))
                return False
        simulation.check_begin(self, began_s)
        return True

    def work(self) -> None:
        world, plan = self.simulation.world, self.simulation.plan
        dice = world.rng
        end = ENDS[kind := dice.choice(plan.ends)]
        if kind == "free" and world.now > plan.faults.until_s:
            end = ENDS[kind := "succeeded"]  # else it never ends
        marks = int(dice.random() < plan.marks)
        self.simulation.has_progress |= bool(marks)
        world.sleep(dice.uniform(*plan.life_s))
        kept = int(bool(marks) and dice.random() < plan.kept)
        reached = {"round": float(dice.choice([1, 1, 2]))} if marks else {}
        status = ReplicaStatus.SUCCEEDED if kind == "succeeded" else ReplicaStatus.FAILED
        self.outcome = Outcome(self.rank, self.number, status, marks=marks, kept=kept, reached=reached, **end)
        world.note(f"ends: {kind}, kept {kept}")
        if kind in ("succeeded", "raises", "raises otherwise"):
            self.simulation.store.record(self.outcome)


class Container:
    """A supervisor with its workers; the hands "fork"."""

    how = "fork"

    def __init__(self, simulation: Simulation, attempts: Mapping[int, int]) -> None:
        self.simulation, self.attempts = simulation, dict(attempts)
        self.name = simulation.name("container")
        self.workers: dict[int, Worker] = {}
        self.ending: dict[int, str] = {}
        self.is_alive = True
        self._turn, self._pauses, self._poked = 0, False, False
        self._looked_at_s = simulation.world.now
        self.keeper = simulation.keeper(self)

    def may_start(self, rank: int) -> bool:
        return rank in self.attempts

    def start(self, attempts: Mapping[int, int]) -> None:
        self.simulation.check_start(attempts)
        for rank, number in attempts.items():
            if rank in self.workers:
                self._end(rank, "fenced")
                self._conclude(rank)
            self._run(rank, number)

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
        """Be gone, with all processes."""
        self.is_alive = False
        for worker in self.workers.values():
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
            if simulation.world.now >= self._looked_at_s + LOOK_S - 0.001:
                self._looked_at_s = simulation.world.now
                self._look()
            sight = simulation.sight(self.name)
            newest = {**sight.newest, **{rank: max(sight.newest[rank], own) for rank, own in self.attempts.items()}}
            ends = {rank: end for rank, end in sight.ends.items() if end.attempt == newest[rank]}
            wait_s = self.keeper.keep(Sight(newest, ends, sight.has_progress))
        except StoreError:
            return 1.0
        if not self.workers and wait_s is None:
            return None
        left_s = max(0.01, self._looked_at_s + LOOK_S - simulation.world.now)
        return left_s if wait_s is None else min(wait_s + 0.001, left_s)

    def _conclude(self, rank: int) -> None:
        """See that a worker that ended has an outcome."""
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
        """End what a stop or a cancel stands against, and what a newer attempt has fenced."""
        store, now = self.simulation.store, self.simulation.world.now
        self.keeper.log.read()
        for rank, worker in self.workers.items():
            bar = self.keeper.barred_by(rank)
            if bar is not None and now >= bar.at + (bar.within_s or 0.0):
                self._end(rank, "cancelled")
            elif store.newest[rank] > worker.number or (rank, worker.number) in store.ends:
                self._end(rank, "fenced")
        for rank in [rank for rank, number in self.attempts.items() if rank not in self.workers]:
            if store.newest[rank] > self.attempts[rank]:
                del self.attempts[rank]  # another's


class Outside:
    """A process that watches the run from outside; the hands "launch"."""

    how = "launch"

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.name = simulation.name("keeper")
        self.keeper = simulation.keeper(self)
        self._intents: dict[tuple[int, int], float] = {}

    def may_start(self, rank: int) -> bool:
        return not self.simulation.is_living(rank)

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
                    sight = simulation.sight(self.name)
                    wait_s = self.keeper.keep(sight)
                    if self._is_over(sight):
                        return
                except StoreError:
                    wait_s = 1.0
                pause_s = simulation.world.rng.uniform(3.0, 15.0)
                simulation.world.sleep(pause_s if wait_s is None else min(wait_s + 0.001, pause_s))
        except Died:
            pass

    def _find_lost(self) -> None:
        """Record what the service says is gone."""
        simulation, store = self.simulation, self.simulation.store
        for rank, number in list(store.newest.items()):
            if (rank, number) in store.ends or simulation.is_living(rank):
                continue
            seen_s = self._intents.setdefault((rank, number), simulation.world.now)
            if (rank, number) in store.claims or simulation.world.now >= seen_s + INTENT_S:
                reason = "preempted" if (rank, number) in simulation.preempted else "lost"
                store.record(Outcome(rank, number, ReplicaStatus.FAILED, reason))  # type: ignore[arg-type]

    def _is_over(self, sight: Sight) -> bool:
        return len(sight.ends) == self.simulation.plan.n_ranks and all(map(self._is_final, sight.ends.values()))

    def _is_final(self, end: Outcome) -> bool:
        log = self.keeper.log.entries
        if self.simulation.is_living(end.rank):
            return False
        if end.status is not ReplicaStatus.FAILED or self.keeper.policy is None or is_barred(log, end.rank):
            return True
        answer = answer_to(log, end.rank, end.attempt)
        return answer is not None and answer.kind == "give_up"


class Simulation:
    """One schedule; the flags are for mutants."""

    looks_when_claiming = True
    has_intents = True
    appends_cancel = True
    marks_decided = True

    def __init__(self, plan: Plan, *, is_traced: bool = True) -> None:
        self.plan = plan
        self.world = World(plan.seed, plan.faults, is_traced=is_traced)
        self.store = Records(self)
        self.limit_s = plan.faults.until_s + PATIENCE_S
        self.entries: list[Decision] = []
        """The log as it stands."""
        self.landed_s: list[float] = []
        self.logs: list[DecisionLog] = []
        self.containers: list[Container] = []
        self.workers: list[Worker] = []
        self.preempted: set[tuple[int, int]] = set()
        self.asked: Counter[tuple[int, int]] = Counter()
        self.cancelled: list[tuple[float, list[int]]] = []
        """When cancels were done, and of which ranks."""
        self.has_progress = False
        self.failure = ""
        self._names: Counter[str] = Counter()
        self._sights: dict[str, Sight] = {}

    def run(self) -> Simulation:
        """Run it to its end, and return it.

        Raises:
            Violation: something happened that must not.
        """
        ours = {"retry": self._retry, "this_process": self.world.who}
        real = {name: getattr(decisions, name) for name in ours}
        for name, value in ours.items():
            setattr(decisions, name, value)
        try:
            for rank in range(self.plan.n_ranks):
                self.store._create(replica_key(RUN, rank, 0, "intent.json"), b"launcher")
            self.ask(dict.fromkeys(range(self.plan.n_ranks), 0))
            for _ in range(self.plan.n_keepers):
                self._spawn_keeper(0.0)
            self._spawn_keeper(self.plan.faults.until_s)
            for act in self.plan.acts:
                self.world.at(act.at_s, functools.partial(self._act, act))
            self.world.run(self.limit_s)
        finally:
            for name, value in real.items():
                setattr(decisions, name, value)
        if self.failure:
            raise Violation(self.failure)
        return self

    def name(self, kind: str) -> str:
        self._names[kind] += 1
        return f"{kind}.{self._names[kind]}"

    def log(self, clock: Callable[[], float] | None = None) -> DecisionLog:
        log = Log(self.store, RUN, clock or self.world.clock)
        self.logs.append(log)
        return log

    def keeper(self, hands: Any) -> Keeper:
        plan, world = self.plan, self.world
        ahead_s = world.rng.uniform(0.0, plan.skew_s)
        launched = None if plan.policy is None else parse(plan.policy)

        def clock() -> float:
            return world.now + ahead_s

        return Keeper(
            self.log(clock),
            launched,
            world_size=plan.n_ranks,
            launched_at=0.0,
            min_replicas=plan.min_replicas,
            hands=hands,
            clock=clock,
            monotonic=world.clock,
        )

    def sight(self, who: str) -> Sight:
        """List the run's records."""
        store = self.store
        store.point("list")
        if self.world.happens(self.world.faults.stale) and who in self._sights:
            return self._sights[who]
        newest = {rank: store.newest[rank] for rank in range(self.plan.n_ranks)}
        ends = {each[0]: store.ends[each] for each in newest.items() if each in store.ends}
        self._sights[who] = Sight(newest, ends, self.has_progress)
        return self._sights[who]

    def ask(self, attempts: Mapping[int, int]) -> None:
        """Start containers, as the service does: late, and perhaps two."""
        self.asked.update(attempts.items())
        groups = [attempts] if self.plan.is_shared else [{rank: number} for rank, number in attempts.items()]
        for group in groups:
            for _ in range(1 + (self.world.rng.random() < self.plan.copies)):
                container = Container(self, group)
                self.containers.append(container)
                self.world.spawn(container.name, container.body, self.world.rng.uniform(0.1, 8.0))

    def is_living(self, rank: int) -> bool:
        """Return whether the service still runs a container of the rank."""
        return any(container.is_alive and rank in container.attempts for container in self.containers)

    def decided(self, entry: Decision) -> None:
        """Take note of an entry that stands now; what it ends has to be gone in time."""
        self.entries.append(entry)
        self.landed_s.append(self.world.now)
        if entry.kind in ("cancel", "stop"):
            calm_s = max(self.world.now, self.plan.faults.until_s + MOST_ASLEEP_S)
            late_s = calm_s - self.world.now + (entry.within_s or 0.0) + self.plan.skew_s + GRACE_S + BAR_S
            self.world.at(late_s, functools.partial(self._check_gone, entry))

    def check_start(self, attempts: Mapping[int, int]) -> None:
        """Check what a keeper is about to start against the log as it stands."""
        for rank, number in attempts.items():
            entry = next((each for each in reversed(self.entries) if each.start.get(rank) == number), None)
            if entry is None:
                self.fail(f"rank {rank} is started as attempt {number}, which nobody decided")
            elif self.world.now < entry.not_before - self.plan.skew_s - 0.002:
                self.fail(f"rank {rank} is started at {self.world.now:.3f} s, before {entry.not_before:.3f} s")

    def check_begin(self, worker: Worker, began_s: float) -> None:
        """S3: no user code runs behind a cancel or a stop that stood when the claim looked."""
        stood = [entry for entry, at_s in zip(self.entries, self.landed_s, strict=True) if at_s <= began_s]
        misled = any("/decisions/" in key for who, key in self.store.misled if who == worker.name)
        if is_barred(stood, worker.rank) and is_barred(self.entries, worker.rank) and not misled:
            self.fail(f"S3: {worker.name} runs user code of rank {worker.rank}, which is cancelled or stopped")

    def fail(self, what: str) -> None:
        self.world.note(what)
        self.failure = self.failure or what

    def _check_gone(self, entry: Decision) -> None:
        for worker in self.workers:
            barred_by = decisions.barred_by(self.entries, worker.rank)
            if worker.runs_user_code and barred_by is entry:
                self.fail(f"S3: {worker.name} lives long after rank {worker.rank} was ended by a {entry.kind}")

    def _retry(self, act: Callable[[], Any]) -> Any:
        for _ in range(3):
            try:
                return act()
            except StoreError:
                self.world.sleep(0.5)
        return act()

    def _spawn_keeper(self, delay_s: float) -> None:
        keeper = Outside(self)
        self.world.spawn(keeper.name, keeper.body, delay_s)

    def _act(self, act: Act) -> None:
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
        self.world.spawn(name, functools.partial(self._person, act))

    def _person(self, act: Act) -> None:
        try:
            for _ in range(5):
                try:
                    getattr(self, f"_{act.what}")(act)
                    return
                except StoreError:
                    self.world.sleep(1.0)
        except Died:
            pass

    def _cancel(self, act: Act) -> None:
        ranks = range(self.plan.n_ranks) if act.rank is None else [act.rank]
        log = self.log()
        if self.appends_cancel:
            log.append(lambda _: Decision(kind="cancel", rank=act.rank))
        newest = self.sight(self.world.who()).newest
        log.read()
        for rank in ranks:
            decided = [entry.start[rank] for entry in log.entries if rank in entry.start and self.marks_decided]
            for number in range(max([newest[rank], *decided]) + 1):
                if (rank, number) not in self.store.ends:
                    self.store.put_if_absent(replica_key(RUN, rank, number, "cancel.json"), MARKER)
        for container in [each for each in self.containers if each.is_alive]:
            for rank in set(ranks) & container.workers.keys():
                container._end(rank, "cancelled")
        self.cancelled.append((self.world.now, list(ranks)))

    def _stop(self, act: Act) -> None:
        self.log().append(lambda _: Decision(kind="stop", why="asked", within_s=20.0))

    def _policy(self, act: Act) -> None:
        self.log().append(lambda _: Decision(kind="policy", restarts=str(parse(act.policy))))

    def _resume(self, act: Act) -> None:
        """Start anew what ended, or what is decided and not begun, as a person asks for."""
        log, sight, person = self.log(), self.sight(self.world.who()), Outside(self)
        ranks = range(self.plan.n_ranks) if act.rank is None else [act.rank]

        def compute(_: object) -> Decision | None:
            start = {}
            for rank in ranks:
                end, newest = sight.ends.get(rank), sight.newest[rank]
                if end is not None and end.status is not ReplicaStatus.SUCCEEDED:
                    start[rank] = newest + 1
            return Decision(kind="resume", start=start) if start else None

        entry = log.append(compute)
        if entry is not None:
            person.name = self.world.who()
            person.launch(entry.start)


def run_schedule(seed: int, *, is_traced: bool = True, **changes: Any) -> Simulation:
    """Run one schedule and check it.

    Raises:
        Violation: with the seed in its message.
    """
    simulation = Simulation(replace(Plan.from_seed(seed), **changes), is_traced=is_traced)
    try:
        check(simulation.run())
    except Violation as violation:
        raise Violation(f"seed {seed}: {violation}") from None
    return simulation
