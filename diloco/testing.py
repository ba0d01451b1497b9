"""Helps to test code that trains with DiLoCo: runs replicas as threads of one process, with a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from executors.store import MemoryStore, Store

T = TypeVar("T")


def run_replicas(
    n: int, body: Callable[[Mapping[str, Any]], T], *, store: Store | None = None, run_id: str = "test"
) -> list[T]:
    """Run a function once per rank, each in its own thread, and return the results in the order of the ranks.

        def train(where):
            with DiLoCo(nn.Linear(2, 1), inner_steps=10, **where) as diloco:
                ...

        run_replicas(2, train)

    All threads share the random generator of torch. A function that needs the same numbers in each test draws them from
    its own `torch.Generator`.

    Args:
        n: The number of replicas, at least 1.
        body: The function. It gets the arguments that place a `DiLoCo` in the run: store, run_id, rank and world_size.
        store: The store of the run. Default: a new store in memory.
        run_id: The id of the run. Default: "test".

    Raises:
        BaseException: the error of the lowest rank whose function failed.
    """
    store = store or MemoryStore(f"test-{id(body)}")
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def replica(rank: int) -> None:
        where = {"store": store, "run_id": run_id, "rank": rank, "world_size": n}
        try:
            results[rank] = body(where)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors[rank] = error

    threads = [threading.Thread(target=replica, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in sorted(errors):
        raise errors[rank]
    return [results[rank] for rank in range(n)]
