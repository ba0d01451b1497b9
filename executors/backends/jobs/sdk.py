"""Calling an SDK: imported late, with time limits, how often to poll, and log streams that stay open."""

from __future__ import annotations

import importlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
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
QUIET_S = 0.5  # a stream that is silent for so long has sent what there is
FIRST_LINE_S = 2.0  # how long the first line may take
LONGEST_S = 30.0


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


class _Stream:
    """One log stream, read by a thread of its own."""

    def __init__(self, n_lines: int, fetch: Callable[[], Iterator[str]]) -> None:
        self.n_lines = n_lines
        self.error: Exception | None = None
        self.has_ended = False
        self._lines: deque[str] = deque(maxlen=n_lines)
        self._last_line_at = time.monotonic()
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(fetch,), name="replicas-logs", daemon=True).start()

    def _read(self, fetch: Callable[[], Iterator[str]]) -> None:
        try:
            for line in fetch():
                with self._changed:
                    self._lines.append(line)
                    self._last_line_at = time.monotonic()
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - raised in the reader's thread
            self.error = error
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    def wait(self) -> list[str]:
        """Return the lines once the stream has ended or is silent: at once where it has been for a while."""
        deadline = time.monotonic() + LONGEST_S
        with self._changed:
            while not self.has_ended and (now := time.monotonic()) < deadline:
                left_s = self._last_line_at + (QUIET_S if self._lines else FIRST_LINE_S) - now
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            return list(self._lines)


class LogStreams:
    """Reads logs of jobs that still run: a stream that stays open serves the next reader, too."""

    def __init__(self) -> None:
        self._open: dict[str, _Stream] = {}
        self._lock = threading.Lock()

    def read(self, job: str, n_lines: int, fetch: Callable[[], Iterator[str]]) -> list[str]:
        """Return the last `n_lines` lines of a job.

        Args:
            fetch: opens the stream. One that breaks off is opened once more.

        Raises:
            Exception: what the stream raised, when it brought no line.
        """
        if n_lines < 1:
            return []
        lines: list[str] = []
        for is_last in (False, True):
            stream = self._stream(job, n_lines, fetch)
            lines = stream.wait() or lines
            if stream.error is None:
                break
            if is_last and not lines:
                raise stream.error
        return lines[-n_lines:]

    def _stream(self, job: str, n_lines: int, fetch: Callable[[], Iterator[str]]) -> _Stream:
        with self._lock:
            stream = self._open.get(job)
            if stream is None or stream.has_ended or stream.n_lines < n_lines:
                stream = self._open[job] = _Stream(n_lines, fetch)
            return stream
