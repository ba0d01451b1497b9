"""For tests of code that trains with DiLoCo: replicas as threads of one process, meeting in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from executors.store import MemoryStore, Store

T = TypeVar("T")


def run_replicas(
    n: int, body: Callable[[Mapping[str, Any]], T], *, store: Store | None = None, run_id: str = "test"
) -> list[T]:
    """Run `body` once per rank, each in its own thread, and return the results in rank order.

    `body` gets the arguments that place a `DiLoCo` in the run: `DiLoCo(model, **where)`. All threads share torch's
    random generator. A body that needs the same numbers each time draws them from its own `torch.Generator`.

    Raises: the error of the lowest rank that failed.
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
