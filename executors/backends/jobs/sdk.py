"""Calling an SDK: imported late, with time limits, how often to poll, and log streams that stay open."""

from __future__ import annotations

import importlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from executors.errors import MissingDependencyError

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")
T = TypeVar("T")
FIRST_PAUSE_S = 0.25
GROWTH = 1.5
LONGEST_PAUSE_S = 5.0
QUIET_S = 0.5  # a stream that is silent for so long has sent what there is
FIRST_LINE_S = 2.0  # how long the first line may take
LONGEST_S = 30.0
MAX_UNANSWERED = 64


def in_threads(act: Callable[[T], R], items: Sequence[T], n_threads: int) -> list[Future[R]]:
    """Begin to call `act` with each item in daemon threads, and return the answers to come.

    Unlike those of a pool, these threads hold up neither who stops waiting for them nor the end of the process.
    """
    futures: list[Future[R]] = [Future() for _ in items]
    waiting = deque(zip(items, futures, strict=True))

    def work() -> None:
        while waiting:
            try:
                item, future = waiting.popleft()
            except IndexError:  # another thread took the last one
                return
            try:
                future.set_result(act(item))
            except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
                future.set_exception(error)

    for number in range(min(n_threads, len(items))):
        threading.Thread(target=work, name=f"replicas-{number}", daemon=True).start()
    return futures


def call_with_timeout(limit_s: float, call: Callable[[], T]) -> T:
    """Return what `call` returns or raises in time; after that it goes on in a daemon thread, and nobody waits for it.

    A connection that died silently would hold a call for ever.

    Raises:
        TimeoutError: the time is over.
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
"""Calls that nobody waits for any more, each with a thread: were there no limit, they would pile up."""


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
    """A budget of requests: some at once, then so many a second. Safe for threads."""

    def __init__(self, per_s: float, at_once: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._at_once = self._left = at_once
        self._clock = clock
        self._filled_at = clock()
        self._lock = threading.Lock()

    def take(self, n: int = 1) -> bool:
        """Take n of what is left; False, and nothing is taken, when that is less."""
        with self._lock:
            self._fill()
            if self._left < n:
                return False
            self._left -= n
            return True

    def reserve(self) -> float:
        """Take one in any case; return the seconds to wait until it is there."""
        with self._lock:
            self._fill()
            self._left -= 1
            return max(0.0, -self._left / self._per_s)

    def _fill(self) -> None:
        now = self._clock()
        self._left = min(self._at_once, self._left + (now - self._filled_at) * self._per_s)
        self._filled_at = now


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
