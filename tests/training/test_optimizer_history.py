"""A warning after a round for an optimizer with a history of earlier steps, and for no other optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training import leave, place
from torch import nn

from diloco import DiLoCo
from diloco.optimizer_history import OptimizerHistory, has_history
from diloco.stale_copies.optimizer_hook import _watchers


class TwoLoop(torch.optim.LBFGS):
    """An optimizer with the state of LBFGS and a name without meaning."""


class OneStepLBFGS(torch.optim.SGD):
    """An optimizer with the name of LBFGS and another kind of state."""


class Remembering(torch.optim.SGD):
    """Keeps its last gradients, as for Anderson acceleration, in lists of a parameter's state."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("past_gradients", []).append(parameter.grad.clone())
        return super().step(closure)


class Shampoo(torch.optim.SGD):
    """Keeps a matrix for each dimension of a parameter, of the shape of a square parameter."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("preconditioners", [torch.eye(size) for size in parameter.shape])
                state["prev_grad"] = parameter.grad.clone()  # the gradient of one step, as in Rprop and Adan
        return super().step(closure)


def messages(train: Callable[[nn.Module, DiLoCo], None]) -> list[str]:
    """Return the warnings of a training with a round after every second step."""
    model = nn.Linear(8, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        diloco = DiLoCo(model, inner_steps=2, total_steps=8, **place())
        train(model, diloco)
        leave(diloco)
    return [str(each.message) for each in caught if "history" in str(each.message)]


def steps(
    model: nn.Module, diloco: DiLoCo, optimizer: torch.optim.Optimizer, count: int, *, clear: bool = False
) -> None:
    inputs = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        return torch.as_tensor(loss)

    for _ in range(count):
        closure()
        optimizer.step(closure if isinstance(optimizer, torch.optim.LBFGS) else None)  # type: ignore[arg-type]
        if diloco.step() is not None and clear:
            optimizer.state.clear()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, TwoLoop, OneStepLBFGS, Remembering])
def test_an_optimizer_with_a_history_from_before_a_round_is_warned_of_once_with_the_remedy(kind: Any) -> None:
    options = {"momentum": 0.9} if issubclass(kind, torch.optim.SGD) else {"max_iter": 4}
    (message,) = messages(lambda model, diloco: steps(model, diloco, kind(model.parameters(), 0.01, **options), 8))
    assert message == (
        f"{kind.__name__} computes its steps from a history of gradients, which is from before round 1, so it may "
        "diverge. Call optimizer.state.clear() when diloco.step() returns a report."
    )


def test_an_optimizer_with_a_history_that_takes_over_later_is_warned_of() -> None:
    def train(model: nn.Module, diloco: DiLoCo) -> None:
        steps(model, diloco, torch.optim.Adam(model.parameters(), 0.01), 4)
        steps(model, diloco, torch.optim.LBFGS(model.parameters(), 0.01), 4)

    (message,) = messages(train)
    assert message.startswith("LBFGS computes its steps from a history of gradients, which is from before round 3,")


def test_a_history_that_the_loop_clears_after_each_round_is_not_warned_of() -> None:
    def train(model: nn.Module, diloco: DiLoCo) -> None:
        steps(model, diloco, torch.optim.LBFGS(model.parameters(), 0.01), 8, clear=True)

    assert messages(train) == []


def test_a_new_optimizer_after_each_round_has_no_history() -> None:
    def train(model: nn.Module, diloco: DiLoCo) -> None:
        for _ in range(4):
            steps(model, diloco, torch.optim.LBFGS(model.parameters(), 0.01), 2)

    assert messages(train) == []


def test_an_optimizer_of_another_model_may_keep_its_history() -> None:
    def train(model: nn.Module, diloco: DiLoCo) -> None:
        other = nn.Linear(8, 8)
        lbfgs = torch.optim.LBFGS(other.parameters(), 0.01)
        sgd = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(4):
            steps(model, diloco, sgd, 2)
            lbfgs.step(lambda: other(torch.ones(8)).square().sum())  # type: ignore[no-untyped-call]

    assert messages(train) == []


USUAL: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.01, momentum=0.9, nesterov=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, 0.01, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, 0.01, foreach=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, 0.01),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.01),
    "Adadelta": lambda parameters: torch.optim.Adadelta(parameters, 0.01),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, 0.01),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, 0.01),
    "Muon": lambda parameters: torch.optim.Muon([p for p in parameters if p.dim() == 2], 0.01),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, 0.01),
    "RAdam": lambda parameters: torch.optim.RAdam(parameters, 0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01, momentum=0.9, centered=True),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, 0.01),
    "Shampoo": lambda parameters: Shampoo(parameters, 0.01),
}


@pytest.mark.parametrize("name", USUAL)
def test_a_usual_optimizer_has_no_history(name: str) -> None:
    def train(model: nn.Module, diloco: DiLoCo) -> None:
        steps(model, diloco, optimizer := USUAL[name](list(model.parameters())), 8)
        assert optimizer.state
        assert not has_history(optimizer)

    assert messages(train) == []


def test_nothing_watches_steps_after_a_close_or_if_it_was_dropped() -> None:
    def is_watched(callback: Any) -> bool:
        return any(callback in callbacks for callbacks in _watchers.values())

    model = nn.Linear(8, 8)
    diloco = DiLoCo(model, inner_steps=2, **place())
    callback = diloco._history._callback
    steps(model, diloco, torch.optim.SGD(model.parameters()), 4)
    assert is_watched(callback)
    diloco.close()
    assert not is_watched(callback)

    history = OptimizerHistory(nn.Linear(8, 8))
    callback = history._callback
    assert is_watched(callback)
    del history
    torch.optim.SGD([torch.zeros(1)]).step()  # the next step removes the DiLoCo that was dropped
    assert not is_watched(callback)
