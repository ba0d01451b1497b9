"""Train a model in DistributedDataParallel, in replicas of several processes.

    replicas launch examples/ddp.py --n 2 --procs 2     # 2 replicas of 2 processes; --procs gpu: one for each GPU
    torchrun --nproc-per-node 2 examples/ddp.py         # one replica, to try the script

The processes of a replica average gradients at each step. The replicas average their work in rounds. An arrow marks the
lines that differ from a script for `torchrun`.
"""

from __future__ import annotations

import hashlib
import os
from itertools import chain, repeat

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from diloco import DiLoCo
from executors import current_replica


def main(steps: int = 200, inner_steps: int = 10) -> dict[str, object]:
    replica = current_replica()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(device := torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    dist.init_process_group()  # nccl for tensors on GPUs, gloo for others
    x, noise = torch.randn(2, 65536, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, torch.tanh(x @ torch.linspace(-1, 1, 16)) + 0.3 * noise[:, 0])
    held_out, training = data[:8192], TensorDataset(*data[8192:])
    plain = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1), torch.nn.Flatten(0))
    model = DistributedDataParallel(plain.to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    share = replica.shard(training)  # <- each process of each replica has its own share
    batches = chain.from_iterable(repeat(DataLoader(share, batch_size=64, shuffle=True)))
    loss_before = loss_of(plain, held_out)
    with DiLoCo(model, inner_steps=inner_steps, total_steps=steps) as diloco:  # <-
        diloco.attach_state("optimizer", optimizer)  # <- a replica that starts again continues with it
        for _ in diloco.steps():  # <-
            inputs, targets = (part.to(device) for part in next(batches))
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()  # <-
            replica.report(loss=loss.item())
    loss_after = loss_of(plain, held_out)
    digest = hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in plain.parameters())).hexdigest()
    models: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(models, digest)  # all processes have the same model
    dist.destroy_process_group()
    return {"loss_before": loss_before, "loss": loss_after, "models": models}


@torch.no_grad()
def loss_of(model: torch.nn.Module, data: tuple[torch.Tensor, ...]) -> float:
    device = next(model.parameters()).device
    inputs, targets = (part.to(device) for part in data)
    return float((model(inputs) - targets).square().mean())


if __name__ == "__main__":
    print(main())
