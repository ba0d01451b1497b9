"""Replicas whose shares differ by one item: the error names the user's argument, and its remedy works."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from executors import launch
from executors.errors import ReplicaFailedError

EPOCHS = 40


def train(equal: bool) -> int:
    """Train for the number of steps in a loader of this replica's share."""
    from diloco import DiLoCo
    from executors import current_replica

    share = current_replica().shard(TensorDataset(torch.randn(9, 1)), equal=equal)
    loader = DataLoader(share, batch_size=2, shuffle=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with DiLoCo(model, inner_steps=2, total_steps=EPOCHS * len(loader)) as diloco:
        for _ in range(EPOCHS):
            for (inputs,) in loader:
                model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                diloco.step()
    return diloco.inner_step


def test_steps_made_of_unequal_shares_are_refused_by_the_name_that_the_user_wrote() -> None:
    run = launch("local", train, n=2, args={"equal": False}, timeout=120, fail_fast=True)
    with run, pytest.raises(ReplicaFailedError) as caught:
        run.results()
    message = str(caught.value)
    assert {"total_steps=120", "total_steps=80"} <= set(message.replace(",", " ").replace(".", " ").split())
    assert "use shard(dataset, equal=True)" in message
    assert not any(derived in message for derived in ("last_entry", "momentum_warmup"))


def test_the_remedy_for_unequal_shares_works() -> None:
    with launch("local", train, n=2, args={"equal": True}, timeout=120) as run:
        assert run.results() == [EPOCHS * 2] * 2
