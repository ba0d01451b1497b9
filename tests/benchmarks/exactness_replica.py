"""The task of replicas in the benchmark of exactness: train with DiLoCo, and data-parallel over gloo."""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from xxhash import xxh3_128_hexdigest

from diloco import DiLoCo
from executors import current_replica


def train(rounds: int, meeting_file: str) -> list[dict[str, Any]]:
    """Return the digest of the anchor after each round, and the anchor's distance from the data-parallel parameters."""
    torch.set_num_threads(1)
    replica = current_replica()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    n = replica.world_size
    dist.init_process_group("gloo", init_method=f"file://{meeting_file}", rank=replica.rank, world_size=n)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 8))
    peer = deepcopy(model)
    data = torch.Generator().manual_seed(1 + replica.rank)
    inner, inner_of_peer = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, peer))
    found = []
    with DiLoCo(model, inner_steps=1, outer_lr=1.0, outer_momentum=0.0, momentum_warmup=0) as diloco:
        for number in range(rounds):
            inputs = torch.randn(32, 64, generator=data)
            _step(model, inner, inputs)
            diloco.step()
            _backward(peer, inputs)
            for parameter in peer.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= n
            inner_of_peer.step()
            anchor = torch.cat([values.reshape(-1) for values in diloco.anchor().values()])
            theirs = torch.cat([parameter.detach().reshape(-1) for parameter in peer.parameters()])
            rounding = torch.finfo(torch.float32).eps * float(theirs.abs().max()) * (number + 1)
            found.append(
                {
                    "anchor": xxh3_128_hexdigest(anchor.numpy().data.cast("B")),
                    "apart": float((anchor - theirs).abs().max()) / rounding,
                }
            )
    dist.destroy_process_group()
    return found


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> None:
    _backward(model, inputs)
    optimizer.step()


def _backward(model: nn.Module, inputs: torch.Tensor) -> None:
    model.zero_grad()
    model(inputs).square().mean().backward()
