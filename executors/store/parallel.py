"""Several requests at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from executors.errors import StoreError
from executors.store.protocol import Store
from executors.store.url import is_near

MAX_THREADS = 64  # no store's connections are fewer
T = TypeVar("T")
R = TypeVar("R")


def in_parallel(act: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Act on several items at once; return what that gave, in their order.

    All items are acted on before the first error is raised. An interrupt in between is raised at once: the threads of a
    pool would hold up Ctrl-C, and the end of the process, for as long as a store is silent.

    Args:
        act: is called with each item, from several threads.
        items: what to act on.

    Raises:
        Exception: the first that `act` raised, in the order of the items.

    Example:
        in_parallel(store.delete, ["runs/a", "runs/b"])
    """
    futures = in_threads(act, items, MAX_THREADS)
    wait(futures)
    return [future.result() for future in futures]


def at_store(store: Store, act: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Act on several items of a store: at once where each takes round trips, and in turn where it is near."""
    return [*map(act, items)] if len(items) < 2 or is_near(store.url) else in_parallel(act, items)


def in_threads(act: Callable[[T], R], items: Sequence[T], n_threads: int) -> list[Future[R]]:
    """Begin to call `act` with each item in daemon threads, and return the answers to come.

    Unlike the threads of a pool, these threads delay neither a caller that stops waiting nor the end of the process.
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


def answered_within(limit_s: float, asked: Future[T], where: str) -> T:
    """Return the answer to a question, if it comes in time. A later answer is dropped.

    Args:
        limit_s: how long to wait, in seconds.
        asked: the question, as `in_threads` returns it.
        where: the url of the store, for the message.

    Raises:
        StoreError: there is no answer in time.
        Exception: the error that the question itself raised.

    Example:
        (asked,) = in_threads(store.get, ["runs/a/run.json"], 1)
        answered_within(5.0, asked, store.url)
    """
    if not wait([asked], limit_s).done:
        raise StoreError(f"{where} did not answer within {limit_s:g} s.", url=where)
    return asked.result()


def within(limit_s: float, act: Callable[[], T], where: str) -> T:
    """Return what `act` returns within a time. After that, `act` continues in a daemon thread without a caller.

    Args:
        limit_s: how long to wait, in seconds.
        act: asks the store.
        where: the url of the store, for the message.

    Raises:
        StoreError: there is no answer in time.
        Exception: the error that `act` raised.

    Example:
        within(5.0, lambda: bytes(store.get("runs/a/run.json")), store.url)
    """
    (asked,) = in_threads(lambda _: act(), [None], 1)
    return answered_within(limit_s, asked, where)
