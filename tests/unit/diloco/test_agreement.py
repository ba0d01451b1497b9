"""What replicas must have in common: one that differs in any of it is refused, with the difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.training import adam, next_process, place
from torch import nn

from diloco import DiLoCo
from diloco.errors import ContributionError
from diloco.rendezvous.training_state import check_agreement
from executors.store import MemoryStore


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def two_layers(order: str = "ab", size: int = 2) -> nn.Module:
    return nn.ModuleDict({name: nn.Linear(size, 2, bias=False) for name in order})


PLANNED: dict[str, Any] = {"inner_steps": 2, "total_steps": 400, "momentum_warmup": 9, "round_timeout_s": 5.0}
CLOCKED: dict[str, Any] = {"inner_steps": None, "total_steps": None, "round_seconds": 30, "total_rounds": 40}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "snapshot_every": ({}, {"snapshot_every": 11}, "snapshot_every is 10 there and 11 here"),
    "inner_steps": ({}, {"inner_steps": 4, "total_steps": 800}, "inner_steps is 2 there and 4 here"),
    "round_seconds": (CLOCKED, {**CLOCKED, "round_seconds": 40}, "round_seconds is 30.0 there and 40.0 here"),
    "total_rounds": (CLOCKED, {**CLOCKED, "total_rounds": 41}, "total_rounds is 40 there and 41 here"),
    "steps or the clock": ({}, CLOCKED, "inner_steps is 2 there and None here"),
    "momentum_warmup": ({}, {"momentum_warmup": 8}, "momentum_warmup is 9 there and 8 here"),
    "last_entry": ({}, {"total_steps": 402}, "last_entry is 199 there and 200 here"),
    "final_average": ({}, {"final_average": False}, "final_average is True there and False here"),
    "wire": ({"mean_wire": "bf16"}, {"wire": "int8", "mean_wire": "bf16"}, "wire is 'fp32' there and 'int8' here"),
    "mean_wire": ({"wire": "int4"}, {"wire": "int4", "mean_wire": "fp32"}, "mean_wire is 'int8' there and 'fp32' here"),
    "outer_lr": ({}, {"outer_lr": 0.5}, "outer_lr is 0.7 there and 0.5 here"),
    "outer_momentum": ({}, {"outer_momentum": 0.8}, "outer_momentum is 0.9 there and 0.8 here"),
    "outer_optimizer": (
        {"outer_optimizer": sgd}, {"outer_optimizer": adam}, "outer_optimizer is 'sgd' there and 'adam' here",
    ),
    "a given outer_optimizer": ({}, {"outer_optimizer": adam}, "outer_lr is 0.7 there and None here"),
    "no outer_optimizer": ({"outer_optimizer": sgd}, {}, "outer_optimizer is 'sgd' there and None here"),
}  # fmt: skip


def refusal(first: tuple[nn.Module, dict[str, Any]], second: tuple[nn.Module, dict[str, Any]]) -> str:
    """Return why a second replica does not fit the run that a first one has begun."""
    store = MemoryStore()
    diloco = DiLoCo(first[0], **{**PLANNED, **first[1]}, **place(store, 0, 2))
    with pytest.raises(ContributionError) as caught:
        DiLoCo(second[0], **{**PLANNED, **second[1]}, **place(store, 1, 2)).close()
    diloco.close()
    next_process()
    return str(caught.value)


def test_a_replica_with_another_setting_is_refused() -> None:
    for there, here, difference in SETTINGS.values():
        message = refusal((two_layers(), there), (two_layers(), here))
        assert message == f"This replica does not fit run 'test', begun by rank 0: {difference}."


MODELS: dict[str, tuple[nn.Module, nn.Module, str]] = {
    "shape": (two_layers(), two_layers(size=3), "'a.weight' has shape (2, 2), this model has (2, 3)"),
    "dtype": (two_layers(), two_layers().half(), "'a.weight' is float32, this model has float16"),
    "order": (two_layers(), two_layers("ba"), "the parameters come in another order"),
    "missing": (two_layers(), two_layers("a"), "'b.weight' of shape (2, 2) is missing in this model"),
    "extra": (two_layers(), two_layers("abc"), "'c.weight' of shape (2, 2) is only in this model"),
}


def test_a_replica_with_another_model_is_refused() -> None:
    for there, here, difference in MODELS.values():
        assert difference in refusal((there, {}), (here, {})).replace("torch.", "")


def test_a_replica_with_other_fragments_is_refused() -> None:
    def dealt(fragments: Any) -> tuple[nn.Module, dict[str, Any]]:
        return two_layers(), {"fragments": fragments}

    swapped = refusal(dealt([["a"], ["b"]]), dealt([["b"], ["a"]]))
    assert "'a.weight' belongs to fragment 0 there and to 1 here" in swapped
    assert "'b.weight' belongs to fragment 1 there and to 0 here" in refusal(dealt(2), dealt(1))


@pytest.mark.parametrize("outer_optimizer", [None, adam])
def test_no_setting_that_replicas_must_share_is_left_out_of_the_comparison(outer_optimizer: Any) -> None:
    with DiLoCo(two_layers(), outer_optimizer=outer_optimizer, **place(MemoryStore())) as diloco:
        contract = dict(diloco._model_state.agreement())
    outer = {"outer_lr", "outer_momentum"} if outer_optimizer is None else {"outer_optimizer"}
    optional = {"round_seconds", "total_rounds", "steps or the clock"}
    optional |= {"outer_lr", "outer_momentum", "outer_optimizer", "a given outer_optimizer", "no outer_optimizer"}
    assert set(contract) == (set(SETTINGS) - optional) | outer | {"tensors", "fragments", "stepped"}
    for setting in set(contract) - {"tensors"}:
        for other in ({**contract, setting: "another"}, {k: v for k, v in contract.items() if k != setting}):
            if other.get(setting) == contract[setting]:
                continue  # None is as good as nothing
            for here, there in ((contract, other), (other, contract)):
                with pytest.raises(ContributionError, match=f"begun by rank 3: {setting} is .* there and .* here"):
                    check_agreement(here, there, run_id="test", author=3)
