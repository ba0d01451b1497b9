"""Statistics, as a BatchNorm keeps them: averaged, on whatever wire, and no work that is carried on."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diloco import DiLoCo
from diloco.testing import run_replicas
from diloco.wires import WIRES

VARIANCES = torch.logspace(-5, 0.5, 64)
RELATIVE = [wire.name for wire in WIRES.values() if wire.is_relative]
COARSE = [wire.name for wire in WIRES.values() if not wire.is_relative]


def statistics(model: nn.BatchNorm1d) -> Tensor:
    assert model.running_var is not None
    return model.running_var


def see(model: nn.BatchNorm1d, variances: Tensor, batches: int = 1) -> None:
    """Let the model see batches of such variances, which is what moves its statistics."""
    model.train()
    for _ in range(batches):
        model(torch.randn(64, len(variances)) * variances.sqrt())


@pytest.mark.parametrize("merge", ["anchor", "carry"])
@pytest.mark.parametrize("overlap_steps", [0, 1])
@pytest.mark.parametrize("wire", RELATIVE)
def test_variances_that_are_averaged_stay_positive_and_equal(wire: str, overlap_steps: int, merge: str) -> None:
    def body(where: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        model = nn.BatchNorm1d(len(VARIANCES))
        options: dict[str, Any] = {"overlap_steps": overlap_steps, "merge": merge, "wire": wire}
        with DiLoCo(model, inner_steps=2, total_steps=12, **options, **where) as diloco:
            for step in range(12):
                see(model, VARIANCES * (1 + where["rank"]), 20 if step % 2 else 1)
                diloco.step()
                assert (statistics(model) >= 0).all()
            return diloco.anchor()["running_var"], statistics(model).clone()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few rounds
        for anchor, live in run_replicas(2, body):
            assert torch.equal(anchor, live)
            assert (anchor > 0).all()


def test_a_replica_that_was_late_takes_the_statistics_of_the_others() -> None:
    is_sealed = threading.Event()

    def body(where: Mapping[str, Any]) -> bool:
        model = nn.BatchNorm1d(2)
        is_late = where["rank"] == 1
        diloco = DiLoCo(model, inner_steps=4, outer_lr=1.0, outer_momentum=0.0, grace_s=0.5, **where)
        for step in range(4):
            see(model, torch.full((2,), 0.01), 20)
            with torch.no_grad():
                model.weight.add_(0.01)
            if is_late and step == 3:
                assert is_sealed.wait(60)
            report = diloco.step()
        assert report is not None
        assert report.verdict == ("carried" if is_late else "counted")
        is_sealed.set()
        assert not torch.equal(model.weight, diloco.anchor()["weight"]) or not is_late
        taken = torch.equal(statistics(model), diloco.anchor()["running_var"])
        with pytest.raises(RuntimeError, match="enough"), diloco:
            raise RuntimeError("enough")
        return taken and bool((statistics(model) > 0).all())

    assert run_replicas(2, body) == [True, True]


@pytest.mark.parametrize("wires", [{"wire": wire} for wire in COARSE] + [{"mean_wire": "int8"}])
def test_statistics_stay_each_replicas_own_where_a_wire_is_too_coarse(wires: dict[str, Any]) -> None:
    model = nn.BatchNorm1d(2)
    with pytest.warns(UserWarning, match="Float buffers stay each replica's own.*'running_mean' and 1 more"):
        diloco = DiLoCo(model, inner_steps=1, **wires)
    with diloco:
        see(model, VARIANCES[:2])
        own = statistics(model).clone()
        diloco.step()
        assert diloco.anchor().keys() == {"weight", "bias"}
    assert torch.equal(statistics(model), own)


@pytest.mark.parametrize("wire", COARSE)
def test_averaging_statistics_over_a_coarse_wire_is_refused(wire: str) -> None:
    with pytest.raises(ValueError, match=r"sync_buffers=True: a wire of .* is too coarse.*Use bf16"):
        DiLoCo(nn.BatchNorm1d(2), wire=wire, sync_buffers=True)


def test_a_model_without_statistics_is_warned_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DiLoCo(nn.Linear(2, 2), wire="int8", allow_no_rounds=True).close()
