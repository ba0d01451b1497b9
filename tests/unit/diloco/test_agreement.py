"""Replicas must agree on model and settings. A replica that differs is refused, and the error names the difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.training import adam, leave, next_process, place
from torch import nn

from diloco.errors import ContributionError
from diloco.outer import open_diloco
from diloco.rendezvous.training_state import check_agreement
from diloco.trainers.trainer_link import TrainerLink
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
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "snapshot_every": ({}, {"snapshot_every": 11}, "snapshot_every=10", "snapshot_every=11"),
    "inner_steps": ({}, {"inner_steps": 4, "total_steps": 800},
                    "inner_steps=2 and total_steps=400", "inner_steps=4 and total_steps=800"),
    "round_seconds": (CLOCKED, {**CLOCKED, "round_seconds": 40}, "round_seconds=30.0", "round_seconds=40.0"),
    "total_rounds": (CLOCKED, {**CLOCKED, "total_rounds": 41}, "total_rounds=40", "total_rounds=41"),
    "steps or the clock": ({}, CLOCKED,
                           "inner_steps=2 and total_steps=400", "round_seconds=30.0 and total_rounds=40"),
    "momentum_warmup": ({}, {"momentum_warmup": 8}, "momentum_warmup=9", "momentum_warmup=8"),
    "momentum_warmup, by default": ({}, {"momentum_warmup": "auto"}, "momentum_warmup=9", "momentum_warmup='auto'"),
    "no total": ({"total_steps": None}, {}, "total_steps=None", "total_steps=400"),
    "final_average": ({}, {"final_average": False}, "final_average=True", "final_average=False"),
    "wire": ({"mean_wire": "bf16"}, {"wire": "int8", "mean_wire": "bf16"}, "wire='fp32'", "wire='int8'"),
    "mean_wire": ({"wire": "int4"}, {"wire": "int4", "mean_wire": "fp32"}, "mean_wire='int8'", "mean_wire='fp32'"),
    "outer_lr": ({"outer_lr": 0.7}, {"outer_lr": 0.5}, "outer_lr=0.7", "outer_lr=0.5"),
    "outer_lr, by default": ({}, {"outer_lr": 0.7},
                             "outer_lr=1.0 and outer_momentum=0.5", "outer_lr=0.7 and outer_momentum=0.9"),
    "outer_momentum": ({"outer_momentum": 0.5}, {"outer_momentum": 0.6}, "outer_momentum=0.5", "outer_momentum=0.6"),
    "outer_momentum, by default": ({}, {"outer_momentum": 0.9},
                                   "outer_lr=1.0 and outer_momentum=0.5", "outer_lr=0.7 and outer_momentum=0.9"),
    "one outer setting in either": ({"outer_lr": 1.0}, {"outer_momentum": 0.5},
                                    "outer_lr=1.0 and outer_momentum=0.9", "outer_lr=0.7 and outer_momentum=0.5"),
    "plans with other default settings": ({"total_steps": 1000}, {"total_steps": 1600},
                                         "total_steps=1000", "total_steps=1600"),
    "outer_optimizer": ({"outer_optimizer": sgd}, {"outer_optimizer": adam},
                        "outer_optimizer='sgd'", "outer_optimizer='adam'"),
    "a given outer_optimizer": ({}, {"outer_optimizer": adam},
                                "outer_lr=1.0 and outer_momentum=0.5", "outer_optimizer='adam'"),
    "several": ({"outer_lr": 0.7}, {"outer_lr": 0.5, "wire": "bf16", "mean_wire": "fp32"},
                "wire='fp32' and outer_lr=0.7", "wire='bf16' and outer_lr=0.5"),
}  # fmt: skip
"""The arguments of two replicas beyond `PLANNED`, and the values that the error shows for each."""


def refusal(first: tuple[nn.Module, dict[str, Any]], second: tuple[nn.Module, dict[str, Any]]) -> str:
    """Return the error of a second replica that does not fit the run of the first one."""
    store = MemoryStore()
    diloco = open_diloco(first[0], **{**PLANNED, **first[1]}, **place(store, 0, 2))
    with pytest.raises(ContributionError) as caught:
        open_diloco(second[0], **{**PLANNED, **second[1]}, **place(store, 1, 2)).close()
    diloco.close()
    next_process()
    return str(caught.value)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_replica_that_was_given_other_arguments_is_refused_with_those_of_both(name: str) -> None:
    there, here, begun_with, has = SETTINGS[name]
    message = refusal((two_layers(), there), (two_layers(), here))
    assert message == (
        f"Rank 1 does not fit run 'test': rank 0 began it with {begun_with}, and rank 1 has {has}. "
        "A run keeps the arguments that it began with: give them to all replicas."
    )


@pytest.mark.parametrize(
    ("there", "here"),
    # some of these numbers come from epochs of a loader with one batch less
    [(39, 38), (400, 395), (38, 40), (5000, 4960), (80, 40)],
)
def test_steps_that_come_from_shares_of_other_lengths_are_named_with_the_remedy(there: int, here: int) -> None:
    planned = {"inner_steps": 1, "momentum_warmup": "auto"}
    message = refusal(
        (two_layers(), {**planned, "total_steps": there}), (two_layers(), {**planned, "total_steps": here})
    )
    assert message == (
        f"Rank 1 does not fit run 'test': rank 0 began it with total_steps={there}, and rank 1 has total_steps={here}. "
        "If total_steps comes from the length of a loader, use shard(dataset, equal=True), which gives all ranks the "
        "same number of items."
    )


def test_other_numbers_of_steps_that_make_the_same_rounds_are_no_difference() -> None:
    store = MemoryStore()
    options = {**PLANNED, "inner_steps": 10}
    with open_diloco(two_layers(), **{**options, "total_steps": 398}, **place(store, 0, 2), allow_no_rounds=True):
        open_diloco(two_layers(), **{**options, "total_steps": 399}, **place(store, 1, 2), allow_no_rounds=True).close()


def test_a_trainers_plan_is_named_by_the_trainers_own_argument_too() -> None:
    store = MemoryStore()
    options = {name: value for name, value in PLANNED.items() if name != "total_steps"}
    diloco = open_diloco(two_layers(), **{**options, "total_steps": 400}, **place(store, 0, 2))
    with pytest.raises(ContributionError, match="use shard") as caught:
        TrainerLink(two_layers(), 395, {**options, **place(store, 1, 2)})
    assert caught.value.__notes__ == [
        "This trainer plans total_steps=395, from step 0. Give all replicas the same max_steps, or data "
        "of the same length: shard(dataset, equal=True)."
    ]
    leave(diloco)


def test_trainers_that_begin_at_other_steps_are_named_as_such() -> None:
    begun = refusal((two_layers(), {"begun_at": 5, "total_steps": 395}), (two_layers(), {}))
    assert begun == (
        "Rank 1 does not fit run 'test': the trainer of rank 0 began at step 5, and the trainer of rank 1 at step 0. "
        "Let all replicas begin from the same checkpoint, or none of them."
    )


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
    with open_diloco(two_layers(), outer_optimizer=outer_optimizer, **place(MemoryStore())) as diloco:
        contract = dict(diloco._model_state.agreement())
    outer = {"outer_lr", "outer_momentum"} if outer_optimizer is None else {"outer_optimizer"}
    always = {"fragments", "stepped", "inner_steps", "wire", "mean_wire", "final_average", "momentum_warmup"}
    assert set(contract) == always | outer | {"tensors", "last_entry", "snapshot_every", "given"}
    for setting in set(contract) - {"tensors", "given"}:
        for other in ({**contract, setting: "another"}, {k: v for k, v in contract.items() if k != setting}):
            if other.get(setting) == contract[setting]:
                continue  # None means the same as no value
            for here, there in ((contract, other), (other, contract)):
                with pytest.raises(ContributionError, match=f"rank 3 began it with .*{setting}=|rank 2 has {setting}="):
                    check_agreement(here, there, run_id="test", author=3, rank=2)
