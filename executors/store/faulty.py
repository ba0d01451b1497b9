"""A store around a store that fails on request: at random by a seed, or at one call, by verb, key and count.

    store = FaultyStore(open_store(url), seed=7, delay_s=0.3, lost=0.02)
    store.fail_at("put_if_absent", key="*/seal/*", count=2, before=lambda: os.kill(os.getpid(), signal.SIGKILL))
    store.fail_at("put", key="*/mean/*", action="lost")
    ...
    print(store.log)          # ["#12 put_if_absent 'main/3/seal/0': done, reply lost", …]

The fault of the n-th call of a verb for a key depends on the seed, the verb, the key and n alone, so threads that
interleave differently see the same faults. Each process has a store of its own: give each its own seed.
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
    """Some calls to a store: of one verb, with keys of one pattern."""

    verb: Verb | Literal["*"]
    key: str
    """A shell's pattern, where `*` covers slashes, too. A table of named points has `{rank}` in it, and
    `{round}` (1, 2, 3, …) or `{index}` (one less)."""
    inside: bool | None = None
    """True means only reads that begin inside an object, False only the other reads, and None any read."""

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
    """Any store, with faults.

    Args:
        store: the store that does the work.
        seed: of everything that happens at random.
        delay_s: each call first waits, up to so long.
        lost: the rate of calls that are done, and then raise `StoreError`.
        error: the rate of calls that raise `StoreError` and do nothing.
        corrupt: the rate of reads in which one bit is wrong (the stored object stays right).
        truncate: the rate of reads that end too early.
        sleep: waits for the seconds of a delay.

    Raises:
        ValueError: a rate is not from 0 to 1, or the delay is not a number of seconds.
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
                raise ValueError(f"{name} is a rate from 0 to 1, got {name}={rate}.")
        if not 0 <= delay_s < float("inf"):
            raise ValueError(f"delay is a number of seconds, got delay={delay_s}.")
        self.store = store
        self.log: list[str] = []
        """The faults, each with the call that it hit, in order."""
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
        """Let the `count`-th call from now on of this verb whose key fits fail.

        Args:
            verb, key, inside: of the calls, as in `FaultPoint`; for `list` the key is the prefix.
            count: 1 is the next such call; None means every one.
            action: "error": `StoreError`, and nothing was done. "lost": done, and then `StoreError`.
            before: called before the call is done (to die there, or to raise).
            after: called when it is done, before its caller knows. Calls that fail do not count, such as a read that
                finds nothing.

        Raises:
            ValueError: there is no such verb, count is below 1, or not exactly one of action, before, after is given.
        """
        if verb != "*" and verb not in get_args(Verb):
            raise ValueError(f"No verb {verb!r}. A store has {', '.join(get_args(Verb))}; '*' is any of them.")
        if count is not None and count < 1:
            raise ValueError(f"count must be at least 1, got count={count}.")
        if sum(given is not None for given in (action, before, after)) != 1:
            raise ValueError("A fault needs exactly one of action, before and after.")
        if action is not None and action not in get_args(Action):
            raise ValueError(f"action is 'error' or 'lost', got {action!r}.")
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
        """Count a call, and return the faults that are due: before it, or after it is done."""
        matching = [
            fault
            for fault in self._faults
            if (fault.after is not None) == is_done and fault.point.matches(verb, key, inside)
        ]
        for fault in matching:
            fault.seen += 1
        return [fault for fault in matching if fault.count in (None, fault.seen)]
