"""Calling an SDK: imported late, with time limits, how often to poll."""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from executors.errors import MissingDependencyError
from executors.store.parallel import in_threads

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
T = TypeVar("T")
FIRST_PAUSE_S = 0.25
GROWTH = 1.5
LONGEST_PAUSE_S = 5.0
MAX_UNANSWERED = 64


def call_each(act: Callable[[T], R], items: Sequence[T], n_threads: int) -> list[R]:
    """Return what `act` returns for each item, called in threads; raise what one raised when all have ended."""
    if len(items) == 1:
        return [act(items[0])]
    futures = in_threads(act, items, n_threads)
    wait(futures)
    return [future.result() for future in futures]


def call_with_timeout(limit_s: float, call: Callable[[], T]) -> T:
    """Return what `call` returns or raises in time. After that, `call` continues in a daemon thread without a caller.

    A connection that died silently would hold a call for ever.

    Raises:
        TimeoutError: the time has passed.
    """
    for earlier in [call for call in _unanswered if call.done()]:
        _unanswered.discard(earlier)
    if len(_unanswered) >= MAX_UNANSWERED:
        raise TimeoutError(f"{MAX_UNANSWERED} earlier requests have had no answer yet")
    (answer,) = in_threads(lambda _: call(), [None], 1)
    if not wait([answer], limit_s).done:
        _unanswered.add(answer)
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return answer.result()


_unanswered: set[Future[Any]] = set()
"""Calls without a caller, each with a thread. Without a limit, they would pile up."""


class LazyModule:
    """A module that is imported when something of it is first used: SDKs are slow to import, and optional.

    Args:
        missing: the message when it is not installed.
    """

    def __init__(self, name: str, missing: str) -> None:
        self._name = name
        self._missing = missing

    def __getattr__(self, attribute: str) -> Any:
        try:
            module = importlib.import_module(self._name)
        except ImportError as error:
            raise MissingDependencyError(self._missing) from error
        return getattr(module, attribute)


class TokenBucket:
    """A budget of requests: some at once, then a fixed number a second. Safe for threads."""

    def __init__(self, per_s: float, at_once: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._at_once = self._left = at_once
        self._clock = clock
        self._filled_at = clock()
        self._lock = threading.Lock()

    def take(self, n: int = 1) -> bool:
        """Take n of what is left; False, and nothing is taken, when that is less."""
        with self._lock:
            now = self._clock()
            self._left = min(self._at_once, self._left + (now - self._filled_at) * self._per_s)
            self._filled_at = now
            if self._left < n:
                return False
            self._left -= n
            return True


class PollThrottle(Generic[K]):
    """Decides what may be asked for again: soon at first, then ever less often. Safe for threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next: dict[K, tuple[float, float]] = {}
        """When it may be asked for again, and the pause after that."""
        self._lock = threading.Lock()

    def due(self, keys: Iterable[K], can_pay: Callable[[K], bool] = lambda _: True) -> list[K]:
        """Return what to ask for now, what has waited longest first. A caller asks for all that it gets.

        Args:
            can_pay: takes from a budget; what it refuses stays due.
        """
        now, found = self._clock(), []
        with self._lock:
            for key in sorted(keys, key=lambda key: self._next.get(key, (-math.inf, 0))[0]):
                due_at, pause_s = self._next.get(key, (now, FIRST_PAUSE_S))
                if now < due_at or not can_pay(key):
                    break
                self._next[key] = (now + pause_s, min(pause_s * GROWTH, LONGEST_PAUSE_S))
                found.append(key)
        return found

    def forget(self, key: K) -> None:
        """Make something due: something happened to it, or it has ended."""
        with self._lock:
            self._next.pop(key, None)
