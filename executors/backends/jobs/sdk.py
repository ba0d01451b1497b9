"""Helpers to call an SDK: late import, a time limit for calls, and a rate limit for requests."""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from executors.errors import MissingDependencyError, install_command
from executors.store.parallel import in_threads

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
T = TypeVar("T")
FIRST_PAUSE_S = 0.25
GROWTH = 1.5
LONGEST_PAUSE_S = 5.0
MAX_UNANSWERED = 64


def call_each(act: Callable[[T], R], items: Sequence[T], n_threads: int) -> list[R]:
    """Call a function with each item in threads, and return the results in the order of the items.

    Args:
        act: the function. It is called from several threads.
        items: the items.
        n_threads: the largest number of threads.

    Raises:
        Exception: the first error of `act`, in the order of the items. It is raised when all calls have ended.

    Example:
        call_each(service.state, job_ids, 16)
    """
    if len(items) == 1:
        return [act(items[0])]
    futures = in_threads(act, items, n_threads)
    wait(futures)
    return [future.result() for future in futures]


def call_with_timeout(limit_s: float, call: Callable[[], T]) -> T:
    """Make a call with a time limit, and return its result. After the limit the call continues in a daemon thread.

    Without the limit, a connection that broke without a sign would block its caller for ever.

    Args:
        limit_s: the longest wait, in seconds.
        call: the call.

    Raises:
        TimeoutError: there is no result in time, or too many earlier calls still have none.
        Exception: the error of the call.

    Example:
        call_with_timeout(60.0, api.whoami)
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
"""The calls that continue after their time limit, each in a thread. `MAX_UNANSWERED` limits their number."""


class LazyModule:
    """A module that is imported when one of its attributes is first used. SDKs are optional and slow to import.

    Args:
        name: the name of the module.
        needed_by: the first sentence of the error if the module is not installed, such as `Backend 'hf' needs it.`
        extra: our extra that brings the module. The error names the command that installs it.

    Raises:
        MissingDependencyError: at the first use, if the module is not installed.

    Example:
        hub = LazyModule("huggingface_hub", "Backend 'hf' needs the Hugging Face Hub client.", "hf")
    """

    def __init__(self, name: str, needed_by: str, extra: str) -> None:
        self._name = name
        self._needed_by = needed_by
        self._extra = extra

    def __getattr__(self, attribute: str) -> Any:
        try:
            module = importlib.import_module(self._name)
        except ImportError as error:
            message = f"{self._needed_by} Install it with: {install_command(self._extra)}"
            raise MissingDependencyError(message) from error
        return getattr(module, attribute)


class TokenBucket:
    """Limits the rate of requests: a number at the same time, and then a fixed number per second. It is thread-safe.

    Args:
        per_s: the number of requests that become available each second.
        at_once: the largest number of requests that can be available.
        clock: returns seconds of a monotonic clock.

    Example:
        budget = TokenBucket(1.6, 60)
        if budget.take():
            service.state(job_id)
    """

    def __init__(self, per_s: float, at_once: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._at_once = self._left = at_once
        self._clock = clock
        self._filled_at = clock()
        self._lock = threading.Lock()

    def take(self, n: int = 1) -> bool:
        """Take n requests from the budget and return True. If fewer are available, take none and return False.

        Args:
            n: the number of requests. Default 1.
        """
        with self._lock:
            now = self._clock()
            self._left = min(self._at_once, self._left + (now - self._filled_at) * self._per_s)
            self._filled_at = now
            if self._left < n:
                return False
            self._left -= n
            return True


class PollThrottle(Generic[K]):
    """Decides for which objects a poller asks now: often at first, then at growing intervals. It is thread-safe.

    Args:
        clock: returns seconds of a monotonic clock.

    Example:
        throttle = PollThrottle[JobKey]()
        for key in throttle.due(keys):
            service.state(jobs[key])
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next: dict[K, tuple[float, float]] = {}
        """For each key, the time from which it is due, and the pause after that in seconds."""
        self._lock = threading.Lock()

    def due(self, keys: Iterable[K], can_pay: Callable[[K], bool] = lambda _: True) -> list[K]:
        """Return the keys that are due, the longest waiting first. The caller asks for all of them.

        Args:
            keys: the keys that the caller is interested in.
            can_pay: takes the cost of a key from a budget. A key for which it returns False stays due. Default: all
                keys are free.
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
        """Make a key due at once, because its object has probably changed.

        Args:
            key: the key.
        """
        with self._lock:
            self._next.pop(key, None)
