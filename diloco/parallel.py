"""Asking a store for many objects at once, where each answer takes a while to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

from executors.store import MemoryStore, Store
from executors.store.file import FileStore

T = TypeVar("T")
R = TypeVar("R")
T_co = TypeVar("T_co", covariant=True)

THREADS = 8
"""An S3 store's reads of large objects are parallel in themselves, and its pool has connections for so many of them."""


class Map(Protocol):
    """What the builtin `map` does; perhaps with several calls at once."""

    def __call__(self, act: Callable[[T], R], things: Iterable[T], /) -> Iterator[R]: ...


class Answer(Protocol[T_co]):
    """What a `concurrent.futures.Future` is asked for."""

    def done(self) -> bool: ...
    def result(self) -> T_co: ...


class Ask(Protocol):
    """Asks for something, now or beside the training."""

    def __call__(self, question: Callable[[], T], /) -> Answer[T]: ...


def at_once(question: Callable[[], T]) -> Answer[T]:
    """Ask now."""
    answer: Future[T] = Future()
    answer.set_result(question())
    return answer


class ParallelMap:
    """A `Map` of threads, which are started when they are needed first."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, act: Callable[[T], R], things: Iterable[T], /) -> Iterator[R]:
        listed = list(things)
        if len(listed) < 2:
            return map(act, listed)
        return self._threads().map(act, listed)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "diloco reads")
        return self._pool

    def ask(self, question: Callable[[], T]) -> Answer[T]:
        """Ask beside the training."""
        return self._threads().submit(question)

    def close(self) -> None:
        """Start nothing more; what is under way ends by itself."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def is_near(store: Store) -> bool:
    """Tell whether the store answers at once, so that threads would cost more than they save."""
    return isinstance(store, (FileStore, MemoryStore))
