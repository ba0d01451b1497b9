"""The constructor warns of outer settings that measured worse, names the remedy, and is silent about all others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.training import place
from torch import nn

from diloco import DiLoCo

PLANNED = {"inner_steps": 10, "total_steps": 100}


def warnings_of(model: nn.Module, **given: Any) -> list[str]:
    """Return the warnings of a constructor."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        DiLoCo(model, **given, **place()).close()
    assert all(warning.filename == __file__ for warning in caught), "a warning points at the user's own line"
    return [str(warning.message) for warning in caught]


def outer_of(**given: Any) -> tuple[float, float]:
    """Return the outer learning rate and momentum on which all replicas must agree."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with DiLoCo(model, **given, allow_no_rounds=True, **place()) as diloco:
        agreement = diloco._model_state.agreement()
    return agreement["outer_lr"], agreement["outer_momentum"]


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def without_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False), nn.GroupNorm(1, 2))


def frozen() -> nn.Module:
    model = normed()
    model[1].eval()  # type: ignore[index]
    return model


def paper(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("rounds", [2, 15, 29, 60])
def test_a_run_of_few_rounds_is_warned_of_nothing(rounds: int) -> None:
    """Plain averaging in few rounds measured worse than the defaults in most runs."""
    assert warnings_of(linear(), inner_steps=10, total_steps=10 * rounds) == []


@pytest.mark.parametrize("inner_steps", [1, 5, 9])
def test_a_short_run_of_short_rounds_is_warned_with_the_momentum_that_measured_better(inner_steps: int) -> None:
    given = {"inner_steps": inner_steps, "total_steps": 60 * inner_steps, "outer_momentum": 0.9}
    (message,) = warnings_of(linear(), **given)
    assert message.startswith(f"inner_steps={inner_steps} with outer_momentum=0.9: ")
    assert message.endswith(
        "Remove outer_momentum, which gives outer_lr=1.0 and outer_momentum=0.5, or use inner_steps of at least 10."
    )


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"outer_lr": 1.0}, "outer_lr"),
        ({"outer_momentum": 0.95}, "outer_momentum"),
        ({"outer_lr": 0.7, "outer_momentum": 0.9}, "outer_lr and outer_momentum"),
    ],
    ids=str,
)
def test_the_warning_of_short_rounds_names_the_arguments_to_remove_and_they_help(
    given: dict[str, float], named: str
) -> None:
    plan = {"inner_steps": 5, "total_steps": 300}
    (message,) = warnings_of(linear(), **plan, **given)
    assert f"Remove {named}, which gives " in message
    assert warnings_of(linear(), **plan) == []


@pytest.mark.parametrize(
    "given",
    [
        {"total_steps": 300, "outer_lr": 1.0, "outer_momentum": 0.5},
        {"total_steps": 300, "outer_optimizer": paper},
        {"total_steps": 305, "outer_momentum": 0.9},
        {"total_steps": 300},
        {},
    ],
    ids=["lower momentum", "own optimizer", "more rounds than measured", "default momentum", "unknown end"],
)
def test_settings_that_did_not_measure_worse_cause_no_warning(given: dict[str, Any]) -> None:
    assert warnings_of(linear(), inner_steps=5, **given) == []


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"inner_steps": 10}, "Pass total_steps=…, or "),
        ({"round_seconds": 60.0}, "Pass total_rounds=…, or "),
        ({**PLANNED, "final_average": False}, "Pass final_average=True, or "),
        ({"inner_steps": 10, "sync_buffers": False}, "Pass total_steps=…, or "),
    ],
    ids=["unknown end", "by the clock", "no final average", "own statistics"],
)
def test_a_batch_norm_without_a_final_average_causes_a_warning_with_the_remedy(
    given: dict[str, Any], remedy: str
) -> None:
    (message,) = warnings_of(normed(), **given)
    assert message.startswith("'1' is a BatchNorm, and no final average is planned")
    assert remedy in message
    assert "update_bn(loader, model)" in message


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (normed, PLANNED),
        (normed, {"round_seconds": 60.0, "total_rounds": 9}),
        (normed, {"inner_steps": 10, "outer_momentum": 0.0}),
        (normed, {"inner_steps": 10, "outer_optimizer": paper}),
        (without_statistics, {"inner_steps": 10}),
        (frozen, {"inner_steps": 10}),
    ],
    ids=["planned", "planned by the clock", "no momentum", "own optimizer", "no statistics", "frozen statistics"],
)
def test_statistics_that_fit_are_not_warned_of(model: Callable[[], nn.Module], given: dict[str, Any]) -> None:
    assert warnings_of(model(), **given) == []


@pytest.mark.parametrize(
    ("given", "outer"),
    [
        ({"inner_steps": 10, "total_steps": 1000}, (1.0, 0.5)),
        ({"inner_steps": 10, "total_steps": 1001}, (0.7, 0.9)),
        ({"inner_steps": 49, "total_steps": 1000}, (1.0, 0.5)),
        ({"inner_steps": 50, "total_steps": 1000}, (1.0, 0.8)),
        ({"inner_steps": 300, "total_steps": 1000}, (1.0, 0.8)),
        ({"inner_steps": 50, "total_steps": 1001}, (0.7, 0.9)),
        ({"inner_steps": 10, "total_steps": 1000, "fragments": 2}, (1.0, 0.5)),
        ({"inner_steps": 10}, (0.7, 0.9)),
        ({"round_seconds": 60.0, "total_rounds": 9}, (0.7, 0.9)),
    ],
    ids=str,
)
def test_outer_settings_follow_the_length_of_the_plan_and_of_its_rounds_if_neither_is_given(
    given: dict[str, Any], outer: tuple[float, float]
) -> None:
    assert outer_of(**given) == outer


@pytest.mark.parametrize("total_steps", [1000, 5000, None])
@pytest.mark.parametrize(
    ("given", "outer"),
    [
        ({"outer_lr": 1.0}, (1.0, 0.9)),
        ({"outer_momentum": 0.8}, (0.7, 0.8)),
        ({"outer_momentum": 0.0}, (0.7, 0.0)),
        ({"outer_lr": 0.0}, (0.0, 0.9)),
        ({"outer_lr": 0.3, "outer_momentum": 0.6}, (0.3, 0.6)),
    ],
    ids=str,
)
def test_a_given_outer_setting_wins_and_the_other_is_the_papers_in_plans_of_any_length(
    given: dict[str, float], outer: tuple[float, float], total_steps: int | None
) -> None:
    assert outer_of(inner_steps=10, total_steps=total_steps, **given) == outer
