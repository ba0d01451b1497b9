"""Replicas of several processes, as `--procs` starts them, train together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from diloco import DiLoCo
from executors import current_replica, launch


def train() -> list[object]:
    """Train a replicated model, and return where, the number of rounds and the sum of the model at the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    diloco = DiLoCo(model, inner_steps=2, total_steps=6)
    for _ in diloco.steps():
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        diloco.step()
    diloco.close()
    sums = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(sums, torch.stack([p.detach().sum() for p in model.parameters()]).sum().reshape(1))
    dist.destroy_process_group()
    replica = current_replica()
    return [replica.rank, replica.member, replica.members, diloco.rounds, [float(each) for each in sums]]


def test_replicas_of_two_processes_that_the_launch_starts_end_with_one_model() -> None:
    with launch("local", train, 2, procs=2, timeout=120) as run:
        first, second = run.results()
    assert (first[:4], second[:4]) == ([0, 0, 2, 3], [1, 0, 2, 3])
    assert first[4] == second[4]
    assert first[4][0] == first[4][1]
