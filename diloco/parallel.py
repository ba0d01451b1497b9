"""Asking a store for many objects at once, where each answer takes a while to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from executors.store import MemoryStore, Store
from executors.store.file import FileStore

T = TypeVar("T")
R = TypeVar("R")

THREADS = 8
"""An S3 store's reads of large objects are parallel in themselves, and its pool has connections for so many of them."""


class Map(Protocol):
    """What the builtin `map` does; perhaps with several calls at once."""

    def __call__(self, act: Callable[[T], R], things: Iterable[T], /) -> Iterator[R]: ...


class ParallelMap:
    """A `Map` of threads, which are started when they are needed first."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, act: Callable[[T], R], things: Iterable[T], /) -> Iterator[R]:
        listed = list(things)
        if len(listed) < 2:
            return map(act, listed)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "diloco reads")
        return self._pool.map(act, listed)

    def close(self) -> None:
        """Start nothing more; what is under way ends by itself."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def is_near(store: Store) -> bool:
    """Tell whether the store answers at once, so that threads would cost more than they save."""
    return isinstance(store, (FileStore, MemoryStore))
