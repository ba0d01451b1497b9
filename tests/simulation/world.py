"""A deterministic world for simulated processes: a scheduler with one greenlet per process, a clock, and a store.

Each store call may go wrong in these ways. The caller dies before or after the call. The reply is lost. The call fails
and does nothing. A write takes effect later, perhaps after the caller's death. A reply is stale or garbled. The caller
sleeps for a long time. All of this follows from one seed, so a schedule can be replayed and printed.
"""

from __future__ import annotations

import heapq
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from diloco.rendezvous.frames import head_bytes
from executors.errors import KeyNotFoundError, StoreError
from executors.store import Data, Entry, Produce

HEAD_BYTES = head_bytes(1)
CONTRIBUTION_HEAD_BYTES = head_bytes(3)  # a fragment of the simulated work has three blocks
ROTS = re.compile("/contribution/|/mean/|/part/")
"""The keys of objects that may become damaged."""


MOST_DELAY_S = 150.0
"""The longest time from the error of a write to its delayed effect."""


class Died(BaseException):
    """The simulated process is killed at this call."""


@dataclass
class Faults:
    """The probability of each fault per store call, until `until_s`."""

    lost_reply: float = 0.0
    refused: float = 0.0
    lands_later: float = 0.0
    stale: float = 0.0
    garbled: float = 0.0
    rots: float = 0.0
    slow: float = 0.0
    asleep: float = 0.0
    dies: float = 0.0
    deaths_left: int = 0
    until_s: float = 200.0


@dataclass
class World:
    """The scheduler: runs the process that is due next. If several are due, the seed decides."""

    seed: int
    faults: Faults = field(default_factory=Faults)
    now: float = 0.0
    is_traced: bool = True

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.trace: list[tuple[float, str, str]] = []
        self._queue: list[tuple[float, float, int, Callable[[], None]]] = []
        self._number = 0
        self._names: dict[greenlet, str] = {}
        self._held: dict[str, float] = {}
        self._suspended: dict[int, list[tuple[greenlet, object]]] = {}
        self._until_s = math.inf
        self._main = getcurrent()

    def clock(self) -> float:
        return self.now

    def at(self, delay_s: float, action: Callable[[], None]) -> None:
        """Plan an action for a later time. The seed decides the order of actions at the same time."""
        self._number += 1
        heapq.heappush(self._queue, (self.now + delay_s, self.rng.random(), self._number, action))

    def spawn(self, name: str, body: Callable[[], None], delay_s: float = 0.0) -> None:
        """Start a simulated process."""
        # The parent is the scheduler. When a greenlet ends, its parent continues, and that must not be another process.
        task = greenlet(body, parent=self._main)
        self._names[task] = name
        self.at(delay_s, lambda: self._run(task))

    def sleep(self, seconds: float) -> None:
        """Let other processes run for a while. Call it from inside a simulated process."""
        if self.now + seconds <= self._until_s and (not self._queue or self._queue[0][0] > self.now + seconds):
            self.now += seconds  # no other process is due in between, so no switch is needed
            return
        task = getcurrent()
        self.at(seconds, lambda: self._run(task))
        self._main.switch()

    def wait(self, timeout_s: float, prefixes: Sequence[str]) -> None:
        self.sleep(timeout_s)

    def suspend(self, what: object, limit_s: float = math.inf) -> None:
        """Let other processes run until one of them calls `wake` with this object, or the time has passed."""
        me, waiting = (getcurrent(), object()), self._suspended.setdefault(id(what), [])

        def time_is_over() -> None:
            if me in waiting:
                waiting.remove(me)
                self._run(me[0])

        waiting.append(me)
        if limit_s < math.inf:
            self.at(limit_s, time_is_over)
        self._main.switch()

    def wake(self, what: object) -> None:
        """Continue the processes that wait for this object. The seed decides their order."""
        waiting = self._suspended.get(id(what), [])
        for task, _ in waiting:
            self.at(0.0, partial(self._run, task))
        waiting.clear()

    def run(self, until_s: float | None = None) -> None:
        """Run until no action is left, or until a time."""
        self._until_s = math.inf if until_s is None else until_s
        while self._queue and (until_s is None or self._queue[0][0] <= until_s):
            self.now, _, _, action = heapq.heappop(self._queue)
            action()

    def kill(self, name: str) -> None:
        """Kill a process where it is. Call it from outside all processes."""
        for task in [task for task, its in self._names.items() if its == name and task and not task.dead]:
            self.note(f"{name} is killed")
            task.throw(Died)

    def hold(self, name: str, until_s: float) -> None:
        """Suspend a process until a time."""
        self.note(f"{name} is suspended until {until_s:.3f} s")
        self._held[name] = until_s

    def note(self, what: str) -> None:
        """Record a line of the schedule, if the schedule is traced."""
        if not self.is_traced:
            return
        self.trace.append((self.now, self.who(), what))

    def who(self) -> str:
        """Return the name of the running process, or "store" outside all processes."""
        return self._names.get(getcurrent(), "store")

    def happens(self, probability: float) -> bool:
        """Return True with a probability, and False after the end of the faults."""
        return probability > 0 and self.now < self.faults.until_s and self.rng.random() < probability

    def _run(self, task: greenlet) -> None:
        held_s = self._held.get(self._names[task], 0.0) - self.now
        if held_s > 0:
            self.at(held_s, lambda: self._run(task))
        elif not task.dead:
            task.switch()

    def schedule(self) -> str:
        """Return the whole schedule as a text, one line for each call."""
        return "\n".join(f"{at:9.3f} s  {who:<10} {what}" for at, who, what in self.trace)


class SimulatedStore:
    """A `Store` in memory in which each call may go wrong."""

    def __init__(
        self, world: World, *, answer_s: float = 0.001, upload_s: float = 0.0, checks_uploads: bool = False
    ) -> None:
        self.url = "simulated://"
        self.checks_uploads = checks_uploads
        self.created_s: dict[str, float] = {}
        """By key, the time at which an object first existed."""
        self.deleting: Callable[[str], None] = lambda key: None
        """Called with each key that is about to be deleted."""
        self.objects: dict[str, bytes] = {}
        self.ever: dict[str, list[bytes]] = {}
        """By key, every value that an object ever had, including deleted ones."""
        self.ever_rotten: set[str] = set()
        """The keys of objects that were damaged."""
        self.headless: set[str] = set()
        """The keys of means whose heads were damaged. The head proves the payload."""
        self.misled: set[tuple[str, str]] = set()
        """Pairs of a process and a key that the process wrongly found missing, or could not read."""
        self.garbled: dict[str, int] = {}
        """Number of garbled replies by key."""
        self._world = world
        self._acts: dict[str, Callable[[], object]] = {}
        self._answer_s = answer_s
        self._upload_s = upload_s

    def put_if_absent(self, key: str, data: Data) -> bool:
        value = _joined(data)
        has_payload = "/contribution/" in key and len(value) > CONTRIBUTION_HEAD_BYTES
        return self._write("create", key, lambda: self._create(key, value), self._upload_s if has_payload else 0.0)

    def put_if_absent_streamed(self, key: str, head_bytes: int, produce: Produce) -> bool:
        pieces: list[bytes] = []
        head = produce(lambda piece: pieces.append(bytes(piece)))
        return self.put_if_absent(key, [head, *pieces])

    def put(self, key: str, data: Data) -> None:
        value = _joined(data)
        self._write("put", key, lambda: self._set(key, value))

    def delete(self, key: str) -> None:
        self._write("delete", key, lambda: self._delete(key))

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        faults, world = self._world.faults, self._world
        self._before("get", key)
        if faults.refused and world.happens(faults.refused):
            world.note(f"get {key}: error")
            self.misled.add((world.who(), key))
            raise StoreError("refused", key=key)
        value = self.objects.get(key)
        if value is None or (faults.stale and world.happens(faults.stale)):
            if world.is_traced:
                world.note(f"get {key}: {'nothing' if value is None else 'nothing (stale)'}")
            if value is not None:
                self.misled.add((world.who(), key))
            raise KeyNotFoundError("nothing", key=key)
        if faults.rots and ROTS.search(key) and world.happens(faults.rots):
            value = self.objects[key] = _rotten(value, world.rng)
            self.ever_rotten.add(key)
            if "/mean/" in key and value[:HEAD_BYTES] != self.ever[key][-1][:HEAD_BYTES]:
                self.headless.add(key)
            world.note(f"{key} rots")
        if faults.garbled and world.happens(faults.garbled):
            value = _garble(value, world.rng)
            self.garbled[key] = self.garbled.get(key, 0) + 1
            world.note(f"get {key}: garbled")
            self.misled.add((world.who(), key))
        elif world.is_traced:
            world.note(f"get {key}")
        if faults.deaths_left:
            self._perhaps_die("after it")
        end = len(value) if size is None else start + size
        if end > len(value):
            raise StoreError("too short", key=key)
        return memoryview(value)[start:end]

    def list(self, prefix: str) -> Iterator[Entry]:
        return iter([Entry(key, len(self.objects[key]), 0.0) for key in sorted(self.objects) if key.startswith(prefix)])

    def _write(self, verb: str, key: str, apply: Callable[[], bool], upload_s: float = 0.0) -> bool:
        faults, world = self._world.faults, self._world
        self._before(verb, key, upload_s)
        if world.happens(faults.refused):
            world.note(f"{verb} {key}: error, not applied")
            raise StoreError("refused", key=key)
        if world.happens(faults.lands_later):
            delay_s = world.rng.choice([0.1, 3.0, 40.0, MOST_DELAY_S])
            world.note(f"{verb} {key}: error, lands in {delay_s} s")
            world.at(delay_s, lambda: world.note(f"{verb} {key} lands: {apply()}"))
            raise StoreError("timed out", key=key)
        result = apply()
        if world.happens(faults.lost_reply):
            world.note(f"{verb} {key}: applied ({result}), error")
            raise StoreError("reply lost", key=key)
        world.note(f"{verb} {key}: {result}")
        self._after()
        return result

    def _before(self, verb: str, key: str, upload_s: float = 0.0) -> None:
        faults, world = self._world.faults, self._world
        seconds = self._answer_s + upload_s
        if faults.asleep and world.happens(faults.asleep):
            seconds = world.rng.choice([5.0, 60.0, 150.0])
            world.note(f"sleeps {seconds} s before {verb} {key}")
        elif faults.slow and world.happens(faults.slow):
            seconds = world.rng.uniform(0.0, 2.0)
        world.sleep(seconds)
        if faults.deaths_left:
            self._perhaps_die(f"before {verb} {key}")

    def _after(self) -> None:
        self._perhaps_die("after it")

    def _perhaps_die(self, where: str) -> None:
        world = self._world
        if world.faults.deaths_left and world.happens(world.faults.dies):
            world.faults.deaths_left -= 1
            world.note(f"dies {where}")
            raise Died

    def _create(self, key: str, value: bytes) -> bool:
        if key in self.objects:
            return False
        self._set(key, value)
        for name in [name for name in self._acts if key.endswith(name)]:
            self._acts.pop(name)()
        return True

    def _set(self, key: str, value: bytes) -> bool:
        self.objects[key] = value
        self.created_s.setdefault(key, self._world.now)
        standing = self.ever.setdefault(key, [])
        if value not in standing:
            standing.append(value)
        return True

    def when_created(self, name: str, act: Callable[[], object]) -> None:
        """Do something when the first object is created whose key ends with this name."""
        self._acts[name] = act

    def _delete(self, key: str) -> bool:
        self.deleting(key)
        return self.objects.pop(key, None) is not None


def _garble(value: bytes, rng: random.Random) -> bytes:
    if not value:
        return value
    reach = len(value) if rng.random() < 0.5 else min(len(value), 48)  # in half of the cases, at the end of the payload
    at = len(value) - 1 - rng.randrange(reach)
    return value[:at] + bytes([value[at] ^ (1 << rng.randrange(8))]) + value[at + 1 :]


def _rotten(value: bytes, rng: random.Random) -> bytes:
    return value[: rng.randrange(len(value))] if value and rng.random() < 0.3 else _garble(value, rng)


def _joined(data: Data) -> bytes:
    return bytes(data) if isinstance(data, (bytes, bytearray, memoryview)) else b"".join(data)
