"""Injects faults to test that a run survives them: `replicas launch --chaos SPEC`.

    kill:rank=1,round=3                      SIGKILL rank 1 when it is about to send its contribution to round 3
    kill:rank=1,at=seal,count=2,when=after   … when it has just tried to create its second seal
    kill:every=5                             SIGKILL a random rank every 5 s
    hang:rank=1,round=3,how=gil              make no progress: gil, spin, lock, loop or stop
    raise:rank=1,round=3,attempt=all         an exception there, in every attempt
    exit:rank=1,round=3,code=75              leave without an outcome
    oom:rank=1,round=3                       let the kernel kill the replica because memory runs out
    kill:rank=1,round=3,member=2             in process 2 of a replica of several, at a call of process 0
    store:lost=0.02,delay=0.3                2 % of all store calls are done and then fail; each waits up to 0.3 s first

The faults of a run are one of its settings, recorded in `run.json`, and the executor passes them to the replicas. A
worker injects them when it opens the run's store. The supervisor carries out `kill:every`. Other processes that open
the store, such as a helper, get no faults.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import math
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn

from executors.errors import unknown_name
from executors.process.lasting_threads import start_lasting_thread
from executors.replica.shared_page import SharedPage
from executors.store.faulty import FaultPoint, FaultyStore
from executors.store.memory import MemoryStore
from executors.store.protocol import Store

ENTRY_POINTS = "replicas.fault_points"
STRIKE_SIGNAL = signal.SIGURG  # ignored by default, and not used by Python, torch or the watchdog
MEMBER_PAUSE_S = 0.005  # between two looks of a member whether it must trigger a fault
MEMBER_LIMIT_S = 10.0  # the longest wait of member 0 for another one, which may have ended
EVERY_REPLICA: Mapping[str, FaultPoint] = {
    "claim": FaultPoint("put_if_absent", "*/replicas/{rank:04d}/*/started*.json"),
    "claim-read": FaultPoint("get", "*/replicas/{rank:04d}/*/started*.json"),
    "outcome": FaultPoint("put_if_absent", "*/replicas/{rank:04d}/*/outcome*.json"),
}


@functools.cache
def fault_points() -> Mapping[str, FaultPoint]:
    """Return the named store calls: the calls of every replica, and those that installed packages declare.

    A package declares a table of them under the entry point group `replicas.fault_points`.
    """
    from importlib.metadata import entry_points

    tables: list[Mapping[str, FaultPoint]] = [table.load() for table in entry_points(group=ENTRY_POINTS)]
    return {name: point for table in (*tables, EVERY_REPLICA) for name, point in table.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A fault that ends or stops a replica's own process, when the process makes a certain call to the store."""

    verb: ClassVar[str]
    """The verb for the line in the replica's log, as in "hangs"."""
    rank: int | None = None
    round: int | None = None
    """The number of the round, from 1 on, as the live table shows it. For a snapshot, the number of rounds in it."""
    at: str = "contribution"
    """The name of the store call, as in `fault_points`."""
    count: int = 1
    """The number of the call among the calls of that name, from 1 on."""
    when: Literal["before", "after"] = "before"
    """"before" strikes before the store's call, and "after" strikes after the call, before the replica has the reply.
    "after" does not strike at a read that finds no object.
    """
    attempt: int | None = 0
    """The number of the attempt. None, given as `attempt=all`: every attempt."""
    member: int = 0
    """The process that the fault hits, of a replica that has several. The calls that count are those of process 0."""

    def around(self, store: Store, seed: str, strike: Callable[[], None] | None = None) -> Store:
        """Return a store whose call triggers the fault.

        Args:
            store: the store of the run.
            seed: seeds random faults.
            strike: triggers the fault. None, the default: the method `strike`.

        Raises:
            ValueError: the fields do not fit together.
        """
        if self.rank is None:
            raise ValueError("a rank is missing. Give one, as in kill:rank=1,round=3.")
        if self.at not in fault_points():
            raise ValueError(unknown_name("fault point", self.at, fault_points()))
        if self.when not in ("before", "after"):
            raise ValueError(unknown_name("time", self.when, ("before", "after")))
        point = fault_points()[self.at]
        if self.round is not None and not ("{round}" in point.key or "{index}" in point.key):
            raise ValueError(f"at={self.at} has no rounds, got round={self.round}. Remove round=.")
        if self.round == 0 and "{index}" in point.key:
            raise ValueError("rounds count from 1, got round=0.")
        number, index = ("*", "*") if self.round is None else (self.round, self.round - 1)
        key = point.key.format(rank=self.rank, round=number, index=index)
        act = strike or self.strike
        before, after = (act, None) if self.when == "before" else (None, act)
        deadly = FaultyStore(store, seed=0)
        deadly.fail_at(point.verb, key=key, inside=point.inside, count=self.count, before=before, after=after)
        return deadly

    def strike(self) -> None:
        """Print a line into the replica's log, and then trigger the fault."""
        which = "" if self.round is None else f" of round {self.round}"
        member = f"member {self.member} of " if self.member else ""
        line = f"chaos: {member}rank {self.rank} {self.verb} {self.when} {self.at} {self.count}{which}"
        try:
            print(line, file=sys.stderr, flush=True)
        finally:  # the user's code may have closed or replaced stderr
            self.act(line)

    @property
    def is_at_once(self) -> bool:
        """True if any thread can trigger the fault, also while the main thread is in a call into C."""
        return True

    def act(self, line: str) -> None:
        """Trigger the fault in this process.

        Args:
            line: the line that was printed.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill(Strike):
    """SIGKILL at a call to the store, or every few seconds from the supervisor."""

    verb: ClassVar[str] = "dies"
    every: float = 0.0
    """Seconds between two kills by the supervisor, of `rank` or of a random rank. 0: a single kill at a store call."""

    def around(self, store: Store, seed: str, strike: Callable[[], None] | None = None) -> Store:
        if not self.every:
            return Strike.around(self, store, seed, strike)
        if not 0.01 <= self.every < math.inf:
            raise ValueError(f"every must be a number of seconds, at least 0.01, got every={self.every}.")
        if self != Kill(every=self.every, rank=self.rank):
            raise ValueError("every= can only be combined with rank=, because it kills by the clock.")
        return store

    def act(self, line: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang(Strike):
    """A hang: the replica makes no more progress, in one of five ways."""

    verb: ClassVar[str] = "hangs"
    how: str = "lock"

    def around(self, store: Store, seed: str, strike: Callable[[], None] | None = None) -> Store:
        if self.how not in HANGS:
            raise ValueError(unknown_name("way to hang", self.how, HANGS))
        return Strike.around(self, store, seed, strike)

    @property
    def is_at_once(self) -> bool:
        return self.how in ("gil", "spin", "stop")

    def act(self, line: str) -> None:
        HANGS[self.how]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise(Strike):
    """An exception in the user's call."""

    verb: ClassVar[str] = "raises"

    @property
    def is_at_once(self) -> bool:
        return False

    def act(self, line: str) -> NoReturn:
        raise RuntimeError(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit(Strike):
    """An exit of the process without an outcome."""

    verb: ClassVar[str] = "exits"
    code: int = 1

    def around(self, store: Store, seed: str, strike: Callable[[], None] | None = None) -> Store:
        if not 0 <= self.code <= 255:
            raise ValueError(f"an exit code must be from 0 to 255, got code={self.code}.")
        return Strike.around(self, store, seed, strike)

    def act(self, line: str) -> NoReturn:
        os._exit(self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory(Strike):
    """A kill by the kernel because memory runs out, in a control group with little memory."""

    verb: ClassVar[str] = "runs out of memory"

    def act(self, line: str) -> NoReturn:
        (small_memory() / "cgroup.procs").write_text(str(os.getpid()))
        taken = [bytearray(b"x" * (4 << 20)) for _ in range(2 * SMALL_MEMORY_BYTES >> 22)]
        raise RuntimeError(f"{line}, and got {len(taken)} blocks: its control group has no limit.")


def small_memory() -> Path:
    """Return a control group of this machine with little memory. The empty group is never removed.

    Raises:
        ValueError: this process cannot create one.
    """
    for root, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(root, "replicas-chaos")
        with contextlib.suppress(OSError):
            group.mkdir(exist_ok=True)
            if (group / limit).exists():
                (group / limit).write_text(str(SMALL_MEMORY_BYTES))
                for swap, value in (("memory.swappiness", "0"), ("memory.swap.max", "0")):
                    if (group / swap).exists():
                        (group / swap).write_text(value)
                return group
            group.rmdir()
    raise ValueError("oom needs a memory control group, which only root can create. Run the launch as root.")


SMALL_MEMORY_BYTES = 64 << 20


def _hold_gil() -> None:
    """Lock a C mutex twice, which waits forever. Unlike `sleep`, no signal interrupts this wait."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def _lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _loop() -> NoReturn:
    while True:
        pass


HANGS: Mapping[str, Callable[[], object]] = {
    "gil": _hold_gil,
    "spin": lambda: re.match("(a+)+$", "a" * 64 + "b"),  # one call that holds the GIL and computes for a very long time
    "lock": _lock_twice,
    "loop": _loop,
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFaults:
    """A store that fails at random, with rates per call and a delay in seconds; see `FaultyStore`."""

    lost: float = 0.0
    error: float = 0.0
    corrupt: float = 0.0
    truncate: float = 0.0
    delay: float = 0.0
    seed: int = 0
    rank: int | None = None
    """The rank whose store fails. None: the stores of all ranks fail."""

    def around(self, store: Store, seed: str) -> FaultyStore:
        """Return the store with these faults.

        Args:
            store: the store of the run.
            seed: seeds the random faults, together with the field `seed`.

        Raises:
            ValueError: all rates are 0.
        """
        if not any((self.lost, self.error, self.corrupt, self.truncate, self.delay)):
            raise ValueError("no fault is given. Give lost, error, corrupt, truncate (rates) or delay (seconds).")
        return FaultyStore(
            store,
            seed=random.Random(f"{self.seed} {seed}").getrandbits(32),
            delay_s=self.delay,
            lost=self.lost,
            error=self.error,
            corrupt=self.corrupt,
            truncate=self.truncate,
        )


KINDS: Mapping[str, type[Strike] | type[StoreFaults]] = {
    "kill": Kill,
    "hang": Hang,
    "raise": Raise,
    "exit": Exit,
    "oom": OutOfMemory,
    "store": StoreFaults,
}


def check_chaos(specs: Iterable[str], n: int, procs: int | None = 1) -> tuple[str, ...]:
    """Return the specs after a check against a run of `n` replicas.

    Args:
        specs: the specs, as in "kill:rank=1,round=3".
        n: the number of replicas.
        procs: the number of processes of each replica. None: it is counted where a replica starts. Default 1.

    Raises:
        ValueError: a spec cannot be parsed, or does not fit the run. For an unknown name, the message has the nearest
            known one.
    """
    checked = tuple(specs)
    for spec in checked:
        found = parse(spec)
        if found.rank is not None and found.rank >= n:
            raise ValueError(f"chaos {spec!r}: the run has the ranks 0 to {n - 1}, got rank={found.rank}.")
        member = getattr(found, "member", 0)
        if procs is not None and member >= procs:
            has = "one process, 0" if procs == 1 else f"the processes 0 to {procs - 1}"
            raise ValueError(f"chaos {spec!r}: each replica has {has}, got member={member}. Change member or --procs.")
        if isinstance(found, OutOfMemory):
            try:
                small_memory()
            except ValueError as error:
                raise ValueError(f"chaos {spec!r}: {error}") from None
    return checked


def parse(spec: str) -> Strike | StoreFaults:
    """Parse one spec: the name of its kind, a colon, and `name=value` pairs separated by commas.

    Args:
        spec: the spec, as in "kill:rank=1,round=3".

    Raises:
        ValueError: the spec cannot be parsed.
    """
    try:
        name, _, rest = spec.partition(":")
        if name not in KINDS:
            raise ValueError(unknown_name("fault", name, KINDS))
        types = {field.name: str(field.type) for field in dataclasses.fields(KINDS[name])}
        values: dict[str, Any] = {}
        for text in filter(None, rest.split(",")):
            key, equals, value = text.partition("=")
            if key not in types:
                raise ValueError(unknown_name(f"setting of {name}", key, types))
            if not equals or key in values:
                raise ValueError(f"{key!r} needs one value, as in {key}=1.")
            values[key] = _value(key, value, types[key])
        found = KINDS[name](**values)
        found.around(MemoryStore(), seed="")  # raises an error if the values do not fit together
    except ValueError as error:
        raise ValueError(f"chaos {spec!r}: {error}") from None
    return found


def inject_faults(
    store: Store, specs: Sequence[str], rank: int, attempt: int, page: SharedPage | None = None, procs: int = 1
) -> Store:
    """Return the store of one attempt of a rank, with the faults for this attempt.

    Args:
        store: the store of the run.
        specs: the specs of the run.
        rank: the rank.
        attempt: the number of the attempt.
        page: the page of this process, through which it asks other members for their faults. None: there are none.
        procs: the number of processes of the replica. Default 1.
    """
    # The store with strikes is the inner store, because strikes count calls. A call whose reply is lost has reached the
    # inner store.
    for kind in (Strike, StoreFaults):
        for number, spec in enumerate(map(parse, specs)):
            if not isinstance(spec, kind) or not _is_for(spec, rank, attempt):
                continue
            seed = f"{number} {rank} {attempt}"
            if isinstance(spec, Strike) and spec.member:
                if spec.member >= procs:  # the processes are counted where the replica starts, as with --procs gpu
                    text = f"chaos {specs[number]!r}: rank {rank} has {procs} processes, so nothing happens in it."
                    print(text, file=sys.stderr, flush=True)
                elif page is not None:
                    store = spec.around(store, seed, functools.partial(_ask_member, page, number))
            else:
                store = spec.around(store, seed)
    return store


def _is_for(spec: Strike | StoreFaults, rank: int, attempt: int) -> bool:
    return spec.rank in (None, rank) and getattr(spec, "attempt", None) in (None, attempt)


def _ask_member(page: SharedPage, number: int) -> None:
    """Ask another member to trigger a fault, and wait until it begins, so that the order of `when` holds."""
    page.strike = number + 1
    ends_at = time.monotonic() + MEMBER_LIMIT_S
    while page.strike and time.monotonic() < ends_at:
        time.sleep(MEMBER_PAUSE_S)


def await_strikes(specs: Sequence[str], rank: int, attempt: int, member: int, leader_page: SharedPage) -> None:
    """Trigger the faults of a member in this process when member 0 asks for them. A thread waits for that.

    The main thread of the process calls this, because faults such as an exception happen in the main thread.

    Args:
        specs: the specs of the run.
        rank: the rank.
        attempt: the number of the attempt.
        member: the number of this process in its replica.
        leader_page: the page of member 0.
    """
    found = {
        number: spec
        for number, spec in enumerate(map(parse, specs))
        if isinstance(spec, Strike) and spec.member == member and _is_for(spec, rank, attempt)
    }
    if not found:
        return
    due: list[Strike] = []
    signal.signal(STRIKE_SIGNAL, lambda *_: due.pop().strike())
    main_thread, pid = threading.get_ident(), os.getpid()

    def wait() -> None:
        while True:
            number = int(leader_page.strike) - 1
            if number in found:
                spec = found[number]
                leader_page.strike = 0
                if spec.is_at_once:
                    spec.strike()
                else:
                    # The main thread may be in a call into C. Then the fault happens when this call returns.
                    due.append(spec)
                    signal.pthread_kill(main_thread, STRIKE_SIGNAL)
            time.sleep(MEMBER_PAUSE_S)

    # Not a thread of `threading`, because `start` waits until the thread runs.
    start_lasting_thread(wait)
    # A forked helper of the replica has no such thread, and its signals have their defaults.
    os.register_at_fork(after_in_child=lambda: os.getpid() != pid and signal.signal(STRIKE_SIGNAL, signal.SIG_IGN))


class Killer:
    """Kills running ranks every few seconds, by `kill:every=…`. The supervisor calls it.

    Args:
        specs: the specs of the run.
        seed: seeds the choice of ranks.
    """

    def __init__(self, specs: Sequence[str], seed: str) -> None:
        kills = [kill for kill in map(parse, specs) if isinstance(kill, Kill) and kill.every]
        self._due_at = {kill: time.monotonic() + kill.every for kill in kills}
        self._dice = random.Random(seed)

    @property
    def next_at(self) -> float:
        """The time of the next kill by `time.monotonic`. Infinity: there is none."""
        return min(self._due_at.values(), default=math.inf)

    def strike(self, pids: Mapping[int, int]) -> None:
        """Kill a rank for each spec that is due.

        Args:
            pids: the pids of the running ranks, by rank.
        """
        now = time.monotonic()
        for kill, at in self._due_at.items():
            if now >= at:
                self._due_at[kill] = now + kill.every
                if ranks := sorted(pids.keys() if kill.rank is None else pids.keys() & {kill.rank}):
                    os.kill(pids[self._dice.choice(ranks)], signal.SIGKILL)


def _value(name: str, text: str, kind: str) -> Any:
    if name == "attempt" and text == "all":
        return None
    if not kind.startswith(("int", "float")):
        return text
    is_integer = kind.startswith("int")
    try:
        value = int(text) if is_integer else float(text)
    except ValueError:
        raise ValueError(f"{name} must be {'an integer' if is_integer else 'a number'}, got {name}={text}.") from None
    if name in ("rank", "round", "attempt", "member") and value < 0:
        raise ValueError(f"{name} must be at least 0, got {name}={value}.")
    return value
