"""The task of replicas in the benchmark of a far bucket: count requests and measure time."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

import diloco.outer
from diloco.outer import open_diloco
from diloco.rendezvous.round import Limits
from executors import current_replica
from executors.store import open_store
from executors.store.s3.store import S3Store


def meet(url: str, n_elements: int, rounds: int, block_elements: int, at_once: bool) -> list[dict[str, Any]]:
    """Run some rounds, and return the cost of each for this replica.

    Args:
        at_once: True: read several objects in parallel, as DiLoCo does at a bucket. False: one after the other.
    """
    torch.set_num_threads(1)
    replica = current_replica()
    if not at_once:
        setattr(diloco.outer, "is_local_store", lambda store: True)  # noqa: B010 - mypy knows no such export
    model = torch.nn.Module()
    model.flat = torch.nn.Parameter(torch.zeros(n_elements))
    store = open_store(url)
    assert isinstance(store, S3Store)
    requests: Counter[str] = Counter()

    def count(request: Any, **_: Any) -> None:
        requests[request.method] += 1

    store._client.meta.events.register("before-send.s3", count)
    limits = Limits(small_bytes=0, block_elements=block_elements)
    found = []
    with open_diloco(
        model, inner_steps=1_000_000, sync_buffers=False, store=store, run_id=replica.run_id, limits=limits
    ) as d:
        for _ in range(rounds):
            with torch.no_grad():
                model.flat.add_(0.001 * (replica.rank + 1))  # the inner steps
            requests.clear()
            began = time.perf_counter()
            (report,) = d.sync()
            found.append({"round_s": time.perf_counter() - began, "requests": dict(requests), "ranks": report.ranks})
    return found
