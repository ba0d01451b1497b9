"""Replicas that differ in how they run the model: compiled, wrapped by a trainer, or plain. They train together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from executors import launch


def train_wrapped(steps: int, folder: str) -> dict[str, float]:
    """Train a model that is plain, compiled as a whole, compiled in a layer, or in DDP; the rank decides."""
    from diloco import DiLoCo
    from executors import current_replica

    rank, plain = current_replica().rank, nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
    model: nn.Module = plain
    if rank == 1:
        model = torch.compile(plain, backend="eager")  # type: ignore[assignment]
    elif rank == 2:
        plain[0] = torch.compile(plain[0], backend="eager")  # type: ignore[assignment]
    elif rank == 3:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with DiLoCo(model, inner_steps=5, total_steps=steps) as diloco:
        while diloco.inner_step < steps:
            inputs = torch.randn(16, 2)
            (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            diloco.step()
        assert diloco.rounds == steps // 5
        return {name: float(values.double().sum()) for name, values in diloco.anchor().items()}


@pytest.mark.filterwarnings("ignore:Only 4 rounds")
def test_replicas_train_together_whichever_of_them_compile_or_wrap_the_model(tmp_path: object) -> None:
    with launch("local", train_wrapped, n=4, args={"steps": 20, "folder": str(tmp_path)}, timeout=300) as run:
        results = run.results()
    assert set(results[0]) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert all(result == results[0] for result in results)
