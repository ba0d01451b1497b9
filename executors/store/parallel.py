"""Makes several requests to a store at the same time, in threads, and waits for answers with a time limit."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

from executors.errors import StoreError
from executors.store.protocol import Store
from executors.store.url import is_near

MAX_THREADS = 64  # every store allows at least this number of connections
T = TypeVar("T")
R = TypeVar("R")


def in_parallel(act: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call a function with each item in threads, and return the results in the order of the items.

    If a call raises, the error is raised after all calls have ended. Ctrl-C is raised at once. The threads of a pool
    would delay it, and the end of the process, for as long as the store does not answer.

    Args:
        act: the function. It is called from several threads.
        items: the items.

    Raises:
        Exception: the first error of `act`, in the order of the items.

    Example:
        in_parallel(store.delete, ["runs/a", "runs/b"])
    """
    futures = in_threads(act, items, MAX_THREADS)
    wait(futures)
    return [future.result() for future in futures]


def at_store(store: Store, act: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Call a function with each item of a store: in threads for a bucket, and one after the other for a directory.

    Args:
        store: the store that the calls ask. In a directory or in memory, threads would only cost time.
        act: the function.
        items: the items.

    Raises:
        Exception: the first error of `act`, in the order of the items.

    Example:
        at_store(store, store.delete, ["runs/a", "runs/b"])
    """
    return [*map(act, items)] if len(items) < 2 or is_near(store.url) else in_parallel(act, items)


def in_threads(act: Callable[[T], R], items: Sequence[T], n_threads: int) -> list[Future[R]]:
    """Begin to call a function with each item in daemon threads, and return a Future for each item.

    The threads of a pool would delay the end of the process until they have ended. These threads do not.

    Args:
        act: the function. It is called from several threads.
        items: the items.
        n_threads: the largest number of threads.

    Example:
        futures = in_threads(store.get, ["runs/a", "runs/b"], 2)
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
    """Wait for the result of a call, and return it. A result that comes after the time limit is dropped.

    Args:
        limit_s: the longest wait, in seconds.
        asked: the call, as `in_threads` returns it.
        where: the url of the store, for the message.

    Raises:
        StoreError: there is no result in time.
        Exception: the error of the call.

    Example:
        (asked,) = in_threads(store.get, ["runs/a/run.json"], 1)
        answered_within(5.0, asked, store.url)
    """
    if not wait([asked], limit_s).done:
        raise StoreError(f"{where} did not answer within {limit_s:g} s.", url=where)
    return asked.result()


def within(limit_s: float, act: Callable[[], T], where: str) -> T:
    """Call a function with a time limit, and return its result. After the limit it continues in a daemon thread.

    Args:
        limit_s: the longest wait, in seconds.
        act: the function, which asks the store.
        where: the url of the store, for the message.

    Raises:
        StoreError: there is no result in time.
        Exception: the error of `act`.

    Example:
        within(5.0, lambda: bytes(store.get("runs/a/run.json")), store.url)
    """
    (asked,) = in_threads(lambda _: act(), [None], 1)
    return answered_within(limit_s, asked, where)
