"""Train a small model in a loop of your own, on several replicas. A killed replica continues after `replicas resume`.

    replicas launch examples/plain_loop.py --n 2
    replicas resume RUN                              # starts the killed replicas again
    python examples/plain_loop.py                    # alone, to try the loop

Three things differ from an ordinary loop: `replica.shard`, the `DiLoCo` with its attached states, and `diloco.step()`.
"""

from __future__ import annotations

import hashlib
from itertools import chain, repeat

import torch
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from diloco import DiLoCo
from executors import current_replica


def main(steps: int = 400, inner_steps: int = 10) -> dict[str, object]:
    replica = current_replica()
    x, noise = torch.randn(2, 65536, 16, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, torch.tanh(x @ torch.linspace(-1, 1, 16)) + 0.3 * noise[:, 0])
    held_out, training = data[:8192], TensorDataset(*data[8192:])
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1), torch.nn.Flatten(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    order = torch.Generator().manual_seed(replica.rank)
    loader = StatefulDataLoader(replica.shard(training), batch_size=128, shuffle=True, generator=order)
    loss_before = loss_of(model, held_out)
    with DiLoCo(model, inner_steps=inner_steps, total_steps=steps, snapshot_every=2) as diloco:
        diloco.attach_state("optimizer", optimizer)
        diloco.attach_state("schedule", schedule, follow=True)  # DiLoCo steps it
        diloco.attach_state("data", loader)
        batches = chain.from_iterable(repeat(loader))
        for _ in diloco.steps():
            inputs, targets = next(batches)
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
            replica.report(loss=loss.item())
    digest = hashlib.sha256(b"".join(values.numpy().tobytes() for values in model.state_dict().values()))
    return {"loss_before": loss_before, "loss": loss_of(model, held_out), "model": digest.hexdigest()}


@torch.no_grad()
def loss_of(model: torch.nn.Module, data: tuple[torch.Tensor, ...]) -> float:
    inputs, targets = data
    return float((model(inputs) - targets).square().mean())


if __name__ == "__main__":
    print(main())
