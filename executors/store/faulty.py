"""FaultyStore: a store for tests that passes calls on to another store, and injects faults at random or at one call.

    store = FaultyStore(open_store(url), seed=7, delay_s=0.3, lost=0.02)
    store.fail_at("put_if_absent", key="*/seal/*", count=2, before=lambda: os.kill(os.getpid(), signal.SIGKILL))
    store.fail_at("put", key="*/mean/*", action="lost")
    ...
    print(store.log)          # ["#12 put_if_absent 'main/3/seal/0': done, reply lost", …]

Whether the n-th call of a verb for a key fails depends only on the seed, the verb, the key and n. So the faults are the
same if threads interleave differently. Each process has its own store. Give each process its own seed.
"""

from __future__ import annotations

import fnmatch
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from executors.errors import StoreError
from executors.store.protocol import Data, Entry, Store

Verb = Literal["put_if_absent", "put", "get", "list", "delete"]
Action = Literal["error", "lost"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FaultPoint:
    """The calls to a store that a fault hits: calls of one verb, with keys of one pattern.

    Example:
        FaultPoint("put_if_absent", "*/seal/*")
    """

    verb: Verb | Literal["*"]
    """The method of the store. `*` is any method."""
    key: str
    """A shell pattern in which `*` also matches slashes. The patterns of named points contain `{rank}`, and `{round}`
    (counted from 1) or `{index}` (counted from 0).
    """
    inside: bool | None = None
    """True: only reads that begin inside an object. False: only other reads. None: any read."""

    def matches(self, verb: Verb, key: str, inside: bool) -> bool:
        return self.verb in ("*", verb) and self.inside in (None, inside) and fnmatch.fnmatchcase(key, self.key)


@dataclass
class _Fault:
    point: FaultPoint
    count: int | None
    action: Action | None
    before: Callable[[], object] | None
    after: Callable[[], object] | None
    seen: int = 0


class FaultyStore:
    """A store that passes calls on to another store and injects faults.

    Args:
        store: the store that does the work.
        seed: the seed of all random faults.
        delay_s: the longest random wait before each call, in seconds. Default 0.
        lost: the share of calls that are made and then raise `StoreError`, 0 to 1. Default 0.
        error: the share of calls that raise `StoreError` and have no effect, 0 to 1. Default 0.
        corrupt: the share of reads that return one wrong bit, 0 to 1. The stored object does not change. Default 0.
        truncate: the share of reads that return too few bytes, 0 to 1. Default 0.
        sleep: waits for the given number of seconds. Default: `time.sleep`.

    Raises:
        ValueError: a rate is not from 0 to 1, or the delay is negative or infinite.

    Example:
        FaultyStore(MemoryStore(), seed=7, lost=0.02)
    """

    def __init__(
        self,
        store: Store,
        *,
        seed: int,
        delay_s: float = 0.0,
        lost: float = 0.0,
        error: float = 0.0,
        corrupt: float = 0.0,
        truncate: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rates = {"error": error, "lost": lost, "corrupt": corrupt, "truncate": truncate}
        for name, rate in self._rates.items():
            if not 0 <= rate <= 1:
                raise ValueError(f"{name} must be a rate from 0 to 1, got {name}={rate}.")
        if not 0 <= delay_s < float("inf"):
            raise ValueError(f"The delay must be a number of seconds from 0 on, got {delay_s}.")
        self.store = store
        self.log: list[str] = []
        """The injected faults in their order, each with the call that it hit."""
        self._seed = seed
        self._delay_s = delay_s
        self._sleep = sleep
        self._faults: list[_Fault] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        self._n_calls = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<FaultyStore around {self.store!r}>"

    def fail_at(
        self,
        verb: Verb | Literal["*"],
        *,
        key: str = "*",
        inside: bool | None = None,
        count: int | None = 1,
        action: Action | None = None,
        before: Callable[[], object] | None = None,
        after: Callable[[], object] | None = None,
    ) -> None:
        """Inject a fault at the `count`-th call of a verb from now on. Give one of action, before and after.

        Args:
            verb: the method of the store, as in `FaultPoint`.
            key: a pattern for the key, as in `FaultPoint`. For `list` it is compared with the prefix. Default: any key.
            inside: selects reads that begin inside an object, as in `FaultPoint`. Default: any read.
            count: the number of the call: 1 is the next such call. None is every such call. Default 1.
            action: "error" raises `StoreError` instead of the call. "lost" makes the call and then raises `StoreError`.
            before: a function that is called before the store's call, for example to kill the process or to raise an
                error.
            after: a function that is called after the store's call, before the result is returned. Calls that fail,
                such as a read of a missing key, are not counted.

        Raises:
            ValueError: the verb or the action is unknown, count is below 1, or not exactly one of action, before and
                after is given.
        """
        if verb != "*" and verb not in get_args(Verb):
            raise ValueError(f"A store has no verb {verb!r}. Use one of {', '.join(get_args(Verb))}, or '*' for any.")
        if count is not None and count < 1:
            raise ValueError(f"count must be at least 1, got count={count}.")
        if sum(given is not None for given in (action, before, after)) != 1:
            raise ValueError("A fault needs exactly one of action, before and after.")
        if action is not None and action not in get_args(Action):
            raise ValueError(f"action must be 'error' or 'lost', got {action!r}.")
        with self._lock:
            self._faults.append(_Fault(FaultPoint(verb, key, inside), count, action, before, after))

    @property
    def url(self) -> str:
        return self.store.url

    def put_if_absent(self, key: str, data: Data) -> bool:
        return self._call("put_if_absent", key, lambda: self.store.put_if_absent(key, data))

    def put(self, key: str, data: Data) -> None:
        self._call("put", key, lambda: self.store.put(key, data))

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        return self._call("get", key, lambda: self.store.get(key, start=start, size=size), inside=start > 0)

    def list(self, prefix: str) -> Iterator[Entry]:
        return self._call("list", prefix, lambda: self.store.list(prefix))

    def delete(self, key: str) -> None:
        self._call("delete", key, lambda: self.store.delete(key))

    def _call(self, verb: Verb, key: str, act: Callable[[], T], inside: bool = False) -> T:
        with self._lock:
            self._n_calls += 1
            self._calls[verb, key] += 1
            call = f"#{self._n_calls} {verb} {key!r}"
            dice = random.Random(f"{self._seed} {verb} {key!a} {self._calls[verb, key]}")
            faults = self._hit(verb, key, inside, is_done=False)
        delay_s = dice.uniform(0, self._delay_s)
        struck = {name for name, rate in self._rates.items() if dice.random() < rate}
        struck |= {fault.action for fault in faults if fault.action is not None}

        def note(what: str) -> None:
            self.log.append(f"{call}: {what}")

        if delay_s:
            note(f"waited {delay_s:.3f} s")
            self._sleep(delay_s)
        for before in [fault.before for fault in faults if fault.before is not None]:
            note("fault point before it")
            before()
        failure = f"Injected fault: {verb} of {key!r} in {self.url}"
        if "error" in struck:
            note("not done, error")
            raise StoreError(f"{failure} was not done.", key=key, url=self.url)
        result = act()
        with self._lock:
            faults = self._hit(verb, key, inside, is_done=True)
        for after in [fault.after for fault in faults if fault.after is not None]:
            note("fault point after it")
            after()
        if "lost" in struck:
            note("done, reply lost")
            raise StoreError(f"{failure} may have been done; its reply was lost.", key=key, url=self.url)
        if isinstance(result, memoryview) and len(result):
            if "corrupt" in struck:
                changed, bit = bytearray(result), dice.randrange(8 * len(result))
                changed[bit // 8] ^= 1 << bit % 8
                note(f"bit {bit} of {len(result)} bytes flipped")
                result = memoryview(changed).toreadonly()  # type: ignore[assignment]
            if "truncate" in struck:
                kept = dice.randrange(len(result))
                note(f"cut from {len(result)} to {kept} bytes")
                result = result[:kept]  # type: ignore[assignment]
        return result

    def _hit(self, verb: Verb, key: str, inside: bool, *, is_done: bool) -> Sequence[_Fault]:
        """Count a call, and return the faults that hit it: the faults before the call, and the faults after it."""
        matching = [
            fault
            for fault in self._faults
            if (fault.after is not None) == is_done and fault.point.matches(verb, key, inside)
        ]
        for fault in matching:
            fault.seen += 1
        return [fault for fault in matching if fault.count in (None, fault.seen)]
