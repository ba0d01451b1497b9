"""Calling an SDK: imported late, with time limits, and how often to poll."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from executors.errors import MissingDependencyError

T = TypeVar("T")
FIRST_PAUSE_S = 0.25
GROWTH = 1.5
LONGEST_PAUSE_S = 5.0
JOBS_PER_PAUSE = 8
"""So many jobs may be asked for in one longest pause: beyond, the pause grows with their number. That is 480 requests
in five minutes, half of what Hugging Face allows a free account."""


def call_with_timeout(limit_s: float, call: Callable[[], T]) -> T:
    """Return what `call` returns or raises in time; after that it goes on in a daemon thread, and nobody waits for it.

    A connection that died silently would hold a call for ever.

    Raises:
        TimeoutError: the time is over.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            answer.set_exception(error)

    threading.Thread(target=run, name="replicas-call", daemon=True).start()
    if not wait([answer], limit_s).done:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return answer.result()


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


class PollThrottle:
    """Decides when a job may be asked about again: soon at first, then ever less often. Safe for threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next: dict[str, tuple[float, float]] = {}
        """By job: when it may be asked for again, and the pause after that."""
        self._lock = threading.Lock()

    def is_due(self, job: str) -> bool:
        """Whether to ask about this job now. A caller that gets True asks."""
        now = self._clock()
        with self._lock:
            due_at, pause_s = self._next.get(job, (now, FIRST_PAUSE_S))
            if now < due_at:
                return False
            longest_s = LONGEST_PAUSE_S * max(1.0, len(self._next) / JOBS_PER_PAUSE)
            self._next[job] = (now + pause_s, min(pause_s * GROWTH, longest_s))
            return True

    def forget(self, job: str) -> None:
        """Make a job due: something happened to it, or it has ended."""
        with self._lock:
            self._next.pop(job, None)
