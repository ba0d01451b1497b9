"""A store around a store that fails as it is told: at random by a seed, or at one call, by verb, key and count.

    store = FaultyStore(open_store(url), seed=7, delay_s=0.3, lost=0.02)
    store.fail_at("put_if_absent", key="*/seal/*", count=2, before=lambda: os.kill(os.getpid(), signal.SIGKILL))
    store.fail_at("put", key="*/mean/*", action="lost")
    ...
    print(store.log)          # ["#12 put_if_absent 'main/3/seal/0': done, reply lost", …]

What the n-th call of a verb for a key suffers depends on the seed, the verb, the key and n alone, so that threads that
interleave differently suffer the same. Processes each have a store of their own: give each its own seed.
"""

from __future__ import annotations

import fnmatch
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

from executors.errors import StoreError
from executors.store.protocol import Data, Entry, Store

Verb = Literal["put_if_absent", "put", "get", "list", "delete"]
Action = Literal["error", "lost"]

T = TypeVar("T")


@dataclass
class _FaultPoint:
    verb: Verb | Literal["*"]
    key: str
    count: int | None
    action: Action | None
    before: Callable[[], object] | None
    after: Callable[[], object] | None
    inside: bool | None
    seen: int = 0


class FaultyStore:
    """Any store, with faults.

    Args:
        store: the store that does the work.
        seed: of everything that happens at random.
        delay_s: every call first waits, up to so long.
        lost: the rate of calls that are done, and then raise `StoreError`.
        error: the rate of calls that raise `StoreError` and do nothing.
        corrupt: the rate of reads in which one bit is wrong (what stands in the store stays right).
        truncate: the rate of reads that end too early.
        sleep: what the delays wait with.
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
        for name, rate in {"lost": lost, "error": error, "corrupt": corrupt, "truncate": truncate}.items():
            if not 0 <= rate <= 1:
                raise ValueError(f"{name} is a rate from 0 to 1, got {rate}.")
        if not 0 <= delay_s < float("inf"):
            raise ValueError(f"delay_s must be at least 0 and finite, got {delay_s}.")
        self.store = store
        self.log: list[str] = []
        """What was done to which call, in order."""
        self._seed = seed
        self._delay_s = delay_s
        self._lost = lost
        self._error = error
        self._corrupt = corrupt
        self._truncate = truncate
        self._sleep = sleep
        self._points: list[_FaultPoint] = []
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
        """Set a fault point: the `count`-th call from now on of this verb whose key fits does not end well.

        Args:
            verb: one of the five, or `*` for any.
            key: a pattern as in a shell, where `*` also covers slashes. For `list` it is matched with the prefix.
            inside: True: only reads that begin inside an object; False: only others; None: any.
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
            raise ValueError(f"count must be at least 1, or None for every call; got {count}.")
        if sum(what is not None for what in (action, before, after)) != 1:
            raise ValueError("A fault point needs exactly one of action, before and after.")
        if action is not None and action not in get_args(Action):
            raise ValueError(f"action is 'error' or 'lost', got {action!r}.")
        with self._lock:
            self._points.append(_FaultPoint(verb, key, count, action, before, after, inside))

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
            call = _Call(self._n_calls, verb, key, self.log)
            dice = random.Random(f"{self._seed} {verb} {key!a} {self._calls[verb, key]}")
            points = [p for p in self._points if p.after is None and self._hits(p, verb, key, inside)]
        delay_s, *rolls = dice.uniform(0, self._delay_s), *(dice.random() for _ in range(4))
        fails, loses, corrupts, truncates = (
            roll < rate
            for roll, rate in zip(rolls, (self._error, self._lost, self._corrupt, self._truncate), strict=True)
        )
        if delay_s:
            call.note(f"waited {delay_s:.3f} s")
            self._sleep(delay_s)
        for point in points:
            if point.before is not None:
                call.note("fault point before it")
                point.before()
        if fails or any(point.action == "error" for point in points):
            call.note("not done, error")
            raise self._failure(verb, key, "was not done")
        result = act()
        with self._lock:
            later = [p for p in self._points if p.after is not None and self._hits(p, verb, key, inside)]
        for point in later:
            assert point.after is not None
            call.note("fault point after it")
            point.after()
        if loses or any(point.action == "lost" for point in points):
            call.note("done, reply lost")
            raise self._failure(verb, key, "may have been done; its reply was lost")
        if isinstance(result, memoryview):
            return self._damaged(result, corrupts, truncates, dice, call)  # type: ignore[return-value]
        return result

    def _hits(self, point: _FaultPoint, verb: Verb, key: str, inside: bool) -> bool:
        if point.verb not in ("*", verb) or not fnmatch.fnmatchcase(key, point.key):
            return False
        if point.inside not in (None, inside):
            return False
        point.seen += 1
        return point.count in (None, point.seen)

    def _damaged(
        self, value: memoryview, corrupts: bool, truncates: bool, dice: random.Random, call: _Call
    ) -> memoryview:
        if corrupts and len(value):
            changed, bit = bytearray(value), dice.randrange(8 * len(value))
            changed[bit // 8] ^= 1 << bit % 8
            call.note(f"bit {bit} of {len(value)} bytes flipped")
            value = memoryview(changed).toreadonly()
        if truncates and len(value):
            kept = dice.randrange(len(value))
            call.note(f"cut from {len(value)} to {kept} bytes")
            value = value[:kept]
        return value

    def _failure(self, verb: str, key: str, what: str) -> StoreError:
        return StoreError(f"Injected fault: {verb} of {key!r} in {self.url} {what}.", key=key, url=self.url)


@dataclass(frozen=True)
class _Call:
    number: int
    verb: str
    key: str
    log: Any

    def note(self, what: str) -> None:
        self.log.append(f"#{self.number} {self.verb} {self.key!r}: {what}")
