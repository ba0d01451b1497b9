"""Several requests at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from executors.store.protocol import Store
from executors.store.url import is_near

MAX_THREADS = 64  # no store's connections are fewer
T = TypeVar("T")
R = TypeVar("R")


def in_parallel(act: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Act on several items at once."""
    with ThreadPoolExecutor(min(MAX_THREADS, max(1, len(items)))) as pool:
        return list(pool.map(act, items))


def at_store(store: Store, act: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Act on several items of a store: at once where each takes round trips, and in turn where it is near."""
    return [*map(act, items)] if len(items) < 2 or is_near(store.url) else in_parallel(act, items)


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
