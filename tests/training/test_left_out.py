"""Warnings of parameters that were trained but not averaged, or that differ between replicas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from support.training import nudge, place
from torch import nn

from diloco import DiLoCo
from diloco.errors import ContributionError, DiLoCoError
from diloco.testing import run_replicas


@pytest.mark.parametrize("is_alike", [True, False])
def test_a_replica_whose_frozen_weights_are_not_the_others_is_warned(
    is_alike: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def body(where: Mapping[str, Any]) -> None:
        rank = where["rank"]
        frozen = nn.Linear(4, 4).requires_grad_(False)
        for parameter in frozen.parameters():
            nn.init.constant_(parameter, 1 + (1e-6 if is_alike else 1) * rank)  # equal, except for a machine's rounding
        with DiLoCo(nn.Sequential(frozen, nn.Linear(4, 1)), **where):
            pass

    run_replicas(2, body)
    warned = [
        r.getMessage() for r in caplog.records if "and so have 2 frozen parameters and buffers in all" in r.getMessage()
    ]
    assert len(warned) == (0 if is_alike else 1)


@pytest.mark.parametrize("change", ["unfreeze", "add"])
def test_a_parameter_that_is_trained_and_not_averaged_is_an_error_at_the_next_round(change: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    with DiLoCo(model, inner_steps=1, **place()) as diloco:
        diloco.step()
        if change == "unfreeze":
            model.requires_grad_(True)
        else:
            model.append(nn.Linear(2, 2))
        with pytest.raises(ContributionError, match=r"'(0|2).weight' is trained but not averaged.*2 such"):
            diloco.step()


def test_replicas_that_train_and_never_call_step_get_an_error_when_they_close() -> None:
    def body(where: Mapping[str, Any]) -> None:
        with (
            pytest.raises(DiLoCoError, match=r"trained, but step\(\) was never called"),
            DiLoCo(model := nn.Linear(2, 2), inner_steps=1, **where),
        ):
            nudge(model, 1.0)

    run_replicas(2, body)
