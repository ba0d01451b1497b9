"""Train a small model with Accelerate on several replicas: an ordinary loop of Accelerate and three more lines.

    pip install 'serverless-replicas[hf-trainer]' torchdata
    replicas launch examples/accelerate_loop.py --n 2

An arrow marks the three lines. `attach_state` saves the state that a replica needs if it is killed and starts again.
"""

from __future__ import annotations

import hashlib
from itertools import chain, repeat

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

from diloco import DiLoCo
from executors import current_replica


def main(steps: int = 400, inner_steps: int = 10) -> dict[str, object]:
    replica = current_replica()
    stateful = DataLoaderConfiguration(use_stateful_dataloader=True)  # so that its position is saved
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=stateful)
    x, noise = torch.randn(2, 65536, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, torch.tanh(x @ torch.linspace(-1, 1, 16)) + 0.3 * noise[:, 0])
    held_out, training = data[:8192], TensorDataset(*data[8192:])
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1), torch.nn.Flatten(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    loader = DataLoader(replica.shard(training), batch_size=64, shuffle=True)  # <-
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    loss_before = loss_of(model, held_out)
    diloco = DiLoCo(model, inner_steps=inner_steps, total_steps=steps, snapshot_every=2)  # <-
    with diloco:
        diloco.attach_state("optimizer", optimizer)
        diloco.attach_state("schedule", schedule, follow=True)  # DiLoCo steps it
        diloco.attach_state("data", loader)
        batches = chain.from_iterable(repeat(loader))
        for _ in diloco.steps():
            inputs, targets = next(batches)
            with accelerator.accumulate(model):
                loss = (model(inputs) - targets).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                diloco.step()  # <-
                replica.report(loss=loss.item())
    digest = hashlib.sha256(b"".join(values.cpu().numpy().tobytes() for values in model.state_dict().values()))
    return {"loss_before": loss_before, "loss": loss_of(model, held_out), "model": digest.hexdigest()}


@torch.no_grad()
def loss_of(model: torch.nn.Module, data: tuple[torch.Tensor, ...]) -> float:
    device = next(model.parameters()).device
    inputs, targets = (part.to(device) for part in data)
    return float((model(inputs) - targets).square().mean())


if __name__ == "__main__":
    print(main())
