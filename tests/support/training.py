"""Helpers for tests of training: arguments of a DiLoCo, models whose steps are made by hand, and new attempts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from diloco import DiLoCo
from diloco.rendezvous.claims import _claimed
from executors.store import MemoryStore

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}
"""Options for plain averaging, without an outer optimizer."""


def place(store: Any = None, rank: int = 0, world_size: int = 1) -> dict[str, Any]:
    """Return the store, the run and the rank for a DiLoCo. Without a store, it gets a new one."""
    return {"store": store or MemoryStore(), "run_id": "test", "rank": rank, "world_size": world_size}


def nudge(model: nn.Module, by: Any) -> None:
    """Make an inner step without an optimizer."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def next_process() -> None:
    """Make the next DiLoCo of a rank claim a new attempt, as in another process."""
    _claimed.clear()


def leave(diloco: DiLoCo) -> None:
    """Leave the run without the warning of `close` about steps that were not averaged."""
    diloco._close(in_order=False)


def adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.1)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD (Defazio et al., 2405.15682): y is in the model and z in the state, as in the authors' own
    code.
    """

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            weight = 1 / (group["k"] + 1)
            for y in group["params"]:
                z = self.state[y].setdefault("z", y.detach().clone())
                y.data.lerp_(z, weight)
                y.data.add_(y.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(y.grad, alpha=group["lr"])
            group["k"] += 1

    def eval(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.lerp_(self.state[p]["z"], 1 - 1 / group["beta"])
