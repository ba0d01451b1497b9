"""What each replica does in the benchmark of rounds: average one flat tensor over gloo and over the store, in turn."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
import torch.distributed as dist

from diloco import DiLoCo
from executors import current_replica

from .counting import CountingStore


def exchange(n_elements: int, rounds: int, meeting_file: str) -> list[dict[str, Any]]:
    """Go through some rounds and return what each cost this replica."""
    torch.set_num_threads(1)
    replica = current_replica()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_file}", rank=replica.rank, world_size=replica.world_size
    )
    tensor = torch.empty(n_elements)
    model = torch.nn.Module()
    model.flat = torch.nn.Parameter(torch.zeros(n_elements))
    store = CountingStore(Path(unquote(urlsplit(replica.rendezvous).path)), 4 * n_elements, replica.world_size)
    found = []
    with DiLoCo(model, inner_steps=1_000_000, store=store, sync_buffers=False) as diloco:
        for _ in range(rounds):
            tensor.fill_(replica.rank + 1.0)
            model.flat.data.add_(0.001 * (replica.rank + 1))  # the inner steps
            gloo_s, _ = _timed(partial(dist.all_reduce, tensor))
            with _used_pages(store.root, 4 * n_elements * (1 + 1 / replica.world_size)):
                dist.barrier()
            store.reset()
            round_s, (report,) = _timed(diloco.sync)
            found.append(
                {
                    "gloo_s": gloo_s,
                    "round_s": round_s,
                    "wait_s": report.wait_s,
                    "move_s": report.move_s,
                    "reduce_s": report.reduce_s,
                    "step_s": report.step_s,
                    "read": vars(store.read),
                    "written": vars(store.written),
                    "ranks": report.ranks,
                }
            )
        dist.barrier()
    dist.destroy_process_group()
    return found


@contextlib.contextmanager
def _used_pages(folder: Path, size: float) -> Iterator[None]:
    """Take as much memory as the round is going to write into files, and leave it free and used.

    In a virtual machine the first use of a page may wait for the host, ten times as long as writing to it takes, and
    pages that stay free go back to the host. gloo's buffer is used over and over and never pays that, so the files of
    a round shall not either.
    """
    block = bytes(4 << 20)
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(int(size) // len(block) + 1):
            file.write(block)
        yield


def _timed(act: Callable[[], Any]) -> tuple[float, Any]:
    dist.barrier()
    began = time.perf_counter()
    result = act()
    return time.perf_counter() - began, result
