"""Runs a function in the processes of replicas that have several, by fork, over gloo."""

from __future__ import annotations

import faulthandler
import os
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # optimizers import it, which takes seconds, so this process imports it before the forks
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import nn

import executors.replica as replicas
from executors.replica import CONTRACT, replica_from, set_current_replica

LIMIT_S = 120
"""The longest time of a member, in seconds. It is less than the limit of a test."""
shards_on_cpus = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this release of torch cannot train a sharded model on CPUs"
)
"""Skips a test that trains a model of `fully_shard`, where torch can do that on GPUs only, as torch 2.6."""
each_kind = pytest.mark.parametrize("kind", ["ddp", pytest.param("sharded", marks=shards_on_cpus)])
"""Runs a test that trains a model for each kind of replica with several processes."""
Body = Callable[[int, int], Any]


def run_members(folder: Path, sizes: Sequence[int], body: Body, *, attempt: int = 0) -> dict[tuple[int, int], Any]:
    """Return the results of a function in all processes, by rank and member. An error becomes its text.

    Args:
        folder: a folder for the store and the results.
        sizes: by rank, the number of processes of the replica.
        body: called with the rank and the number of the member.
        attempt: the attempt of all replicas.
    """
    context = get_context("fork")
    processes = [
        context.Process(target=_run, args=(folder, rank, member, sizes, attempt, body))
        for rank, size in enumerate(sizes)
        for member in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    places = [(rank, member) for rank, size in enumerate(sizes) for member in range(size)]
    paths = {place: folder / f"result-{place[0]}-{place[1]}-{attempt}" for place in places}
    return {
        place: torch.load(path, weights_only=False) if path.exists() else "ended without a result"
        for place, path in paths.items()
    }


def _run(folder: Path, rank: int, member: int, sizes: Sequence[int], attempt: int, body: Body) -> None:
    # A member that is stuck shows where, and ends before the limit of the test, which would leave it behind.
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    replicas.leave_process_group()
    size = sizes[rank]
    values = (rank, len(sizes), "run", attempt, f"file://{folder}/store")
    os.environ.update(zip(CONTRACT, map(str, values), strict=True))
    replica = replica_from(os.environ)
    replica.claimed_nonce = f"nonce-{rank}-{attempt}"
    set_current_replica(replica)
    if size > 1:
        os.environ.update(REPLICA_MEMBER=str(member), REPLICA_MEMBERS=str(size))
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/group-{rank}-{attempt}", rank=member, world_size=size
        )
        # Without a barrier, a member that leaves the group at once closes a connection that another still opens.
        dist.barrier()
    try:
        result = body(rank, member)
    except BaseException as error:  # noqa: BLE001 - the test reads its text
        traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    torch.save(result, folder / f"part-{rank}-{member}-{attempt}")
    os.replace(folder / f"part-{rank}-{member}-{attempt}", folder / f"result-{rank}-{member}-{attempt}")
    os._exit(0)


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3))


def wrapped(model: nn.Sequential, kind: str) -> nn.Module:
    """Return a model as `kind` of training uses it: "one", "ddp" or "sharded"."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "sharded":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def whole(tensor: Any) -> torch.Tensor:
    """Return all values of a tensor, also if it is sharded over the members."""
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> None:
    """Make one step on random data, which is the same in all members of a replica."""
    model(torch.randn(4, 8, generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
