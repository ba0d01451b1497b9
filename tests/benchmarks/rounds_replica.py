"""The task of each replica in the benchmark of rounds: average one flat tensor over gloo and over the store, in
turn.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
import torch.distributed as dist

from diloco import DiLoCo
from diloco.model_state import ModelState
from diloco.rendezvous.training_state import ApplyStats
from executors import current_replica

from .counting import CountingStore

RETURN_S = 5.0
"""A virtual machine returns freed memory to its host in passes every 2 s, which keep the processors busy."""


@dataclass(frozen=True)
class Moment:
    """The present time, and the processor time that this process has used so far."""

    at_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Moment:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return cls(time.perf_counter(), used.ru_utime + used.ru_stime)


def exchange(n_elements: int, rounds: int, wire: str, meeting_file: str) -> list[dict[str, Any]]:
    """Make some rounds, and return the costs of each for this replica."""
    torch.set_num_threads(1)
    replica = current_replica()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting_file}", rank=replica.rank, world_size=replica.world_size
    )
    model = torch.nn.Module()
    model.flat = torch.nn.Parameter(torch.zeros(n_elements))
    store = CountingStore(Path(unquote(urlsplit(replica.rendezvous).path)), 4 * n_elements, replica.world_size)
    arrivals = _note_when_the_mean_is_there()
    found = []
    # A momentum plays no part in the mean, and its memory would be missing for the files.
    with DiLoCo(
        model, inner_steps=1_000_000, outer_lr=1.0, outer_momentum=0.0, wire=wire, store=store, sync_buffers=False
    ) as diloco:
        for _ in range(rounds):
            value = float(model.flat.data[0])  # they are all the same
            began, ended, _ = _timed(partial(dist.all_reduce, model.flat.data))
            model.flat.data.fill_(value + 0.001 * (replica.rank + 1))  # the inner steps
            gloo = _costs("gloo", began, ended)
            dist.barrier()
            if n_elements >= 10_000_000:
                os.sync()  # data that waits to be written would delay this round
                time.sleep(RETURN_S)
            with _used_pages(int(4 * n_elements * (1 + 1 / replica.world_size))):
                dist.barrier()
            store.reset()
            began, ended, (report,) = _timed(diloco.sync)
            found.append(
                {
                    **gloo,
                    **_costs("mean", began, arrivals.pop()),
                    **_costs("round", began, ended),
                    "wait_s": report.wait_s,
                    "move_s": report.move_s,
                    "reduce_s": report.reduce_s,
                    "read": vars(store.read),
                    "written": vars(store.written),
                    "ranks": report.ranks,
                }
            )
        dist.barrier()
    dist.destroy_process_group()
    return found


def _note_when_the_mean_is_there() -> list[Moment]:
    """Let all replicas begin their outer steps together, when the last replica has the mean. Return the times of these
    moments.

    gloo makes no outer step. If replicas share processors, the outer steps of the first replicas would otherwise delay
    the last one.
    """
    arrivals: list[Moment] = []
    apply = ModelState.apply

    def applying(self: ModelState, *arguments: Any, **options: Any) -> ApplyStats:
        arrivals.append(Moment.now())
        dist.barrier()
        return apply(self, *arguments, **options)

    ModelState.apply = applying  # type: ignore[method-assign]
    return arrivals


@contextlib.contextmanager
def _used_pages(size: int) -> Iterator[None]:
    """Use and free the amount of memory that the round will write into files.

    In a virtual machine, the first use of a page may wait for the host, ten times as long as a write to the page takes.
    Pages that stay free go back to the host. The buffer of gloo is used again and again and never has this cost, so the
    files of a round must not have it either.
    """
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)  # small pages, as the pages of the files are
        for at in range(0, size, mmap.PAGESIZE):
            memory[at] = 1
        yield


def _timed(act: Callable[[], Any]) -> tuple[Moment, Moment, Any]:
    dist.barrier()
    began = Moment.now()
    result = act()
    return began, Moment.now(), result


def _costs(what: str, began: Moment, ended: Moment) -> dict[str, float]:
    return {f"{what}_s": ended.at_s - began.at_s, f"{what}_cpu_s": ended.cpu_s - began.cpu_s}
