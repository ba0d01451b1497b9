"""A contribution that is much larger than the others is scaled down before it is averaged, in every wire."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training import PLAIN, leave, next_process, nudge, place
from support.wires import encoded
from torch import nn

from diloco.outer import open_diloco
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.frames import MeanHead, Seal, SealedReplica, digests_of
from diloco.rendezvous.reduction import BadInputError, BlockFormat, ShardInput, clip_factors, weighted_mean
from diloco.rendezvous.round import Limits, RoundReport
from diloco.testing import run_replicas
from diloco.wires import FP32, WIRES
from diloco.wires.wire import Floats, Wire

SHARDED = Limits(small_bytes=0, block_elements=300)
F = np.float32


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


def inputs_of(wire: Wire, values: Sequence[Floats], weights: Sequence[float] = ()) -> list[ShardInput]:
    blocks = [encoded(wire, each) for each in values]
    return [
        ShardInput(rank, weights[rank] if weights else 1.0, memoryview(block), digests_of(block, len(block), UNSIGNED))
        for rank, block in enumerate(blocks)
    ]


def mean_of(inputs: Sequence[ShardInput], wire: Wire, n: int, *, clips: bool = True) -> tuple[Floats, set[int]]:
    out, clipped = memoryview(bytearray(4 * n)), set[int]()
    weighted_mean(inputs, out, BlockFormat(n, n, wire, FP32, UNSIGNED, clips), clipped=clipped)
    return np.frombuffer(out, F), clipped


def normal(seed: int, n: int = 1000) -> Floats:
    return np.random.default_rng(seed).standard_normal(n, F)


# -- the rule ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [5.0, 100.0, 1e20])
@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_a_contribution_that_is_far_larger_counts_with_the_norm_of_the_median(wire: Wire, factor: float) -> None:
    values = [normal(rank) for rank in range(4)]
    values[2] = (values[2] * factor).astype(F)
    plain = mean_of(inputs_of(wire, [normal(rank) for rank in range(4)]), wire, 1000)[0]
    mean, clipped = mean_of(inputs_of(wire, values), wire, 1000)
    assert clipped == {2}
    assert np.linalg.norm(mean - plain) < 0.05 * np.linalg.norm(plain)


@pytest.mark.parametrize("wire", WIRES.values(), ids=WIRES)
def test_contributions_of_about_one_size_are_averaged_as_they_are(wire: Wire) -> None:
    inputs = inputs_of(wire, [normal(rank) * F(1 + 0.5 * rank) for rank in range(4)], [1.0, 2.0, 3.0, 4.0])
    mean, clipped = mean_of(inputs, wire, 1000)
    assert not clipped
    assert mean.tobytes() == mean_of(inputs, wire, 1000, clips=False)[0].tobytes()


def test_two_contributions_are_not_compared_and_zeros_are_no_measure() -> None:
    cases = {
        "two": [normal(0), 100 * normal(1)],
        "one": [normal(0)],
        "a majority of zeros": [np.zeros(1000, F), np.zeros(1000, F), normal(1)],
    }
    for name, values in cases.items():
        inputs = inputs_of(FP32, values)
        mean, clipped = mean_of(inputs, FP32, 1000)
        assert not clipped, name
        assert mean.tobytes() == mean_of(inputs, FP32, 1000, clips=False)[0].tobytes(), name


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 9), st.integers(0, 2**32), st.integers(0, 8), st.floats(1e-6, 1e6))
def test_no_single_contribution_moves_the_mean_by_more_than_its_share_of_three_medians(
    n: int, seed: int, bad: int, factor: float
) -> None:
    values = [normal(seed + rank, 64) for rank in range(n)]
    values[bad % n] = (values[bad % n] * factor).astype(F)
    inputs = inputs_of(FP32, values)
    norms = sorted(float(np.linalg.norm(each)) for each in values)
    others = mean_of([each for each in inputs if each.rank != bad % n], FP32, 64, clips=False)[0] * (n - 1) / n
    moved = np.linalg.norm(mean_of(inputs, FP32, 64)[0] - others)
    assert moved <= 1.001 * 3 * norms[(n - 1) // 2] / n


def test_a_factor_is_a_bfloat16_that_never_lets_a_contribution_be_larger_than_the_median() -> None:
    for seed in range(50):
        values = [normal(seed), normal(seed + 1), normal(seed + 2) * F(3.5 + seed)]
        inputs = inputs_of(FP32, values)
        *same, factor = clip_factors(FP32, inputs, [each.data for each in inputs], 1000)
        assert same == [1, 1]
        assert int(np.float32(factor).view(np.uint32)) & 0xFFFF == 0
        norms = [float(np.linalg.norm(each.astype(np.float64))) for each in values]
        assert 0.99 * sorted(norms)[1] < float(factor) * norms[2] <= sorted(norms)[1] * (1 + 1e-6)


def test_each_block_is_judged_by_itself() -> None:
    values = [normal(rank, 600) for rank in range(3)]
    values[1][300:] *= 50
    blocks = [bytes(each.tobytes()) for each in values]
    inputs = [ShardInput(r, 1.0, memoryview(b), digests_of(b, 1200, UNSIGNED)) for r, b in enumerate(blocks)]
    out, clipped = memoryview(bytearray(2400)), set[int]()
    weighted_mean(inputs, out, BlockFormat(600, 300, FP32, FP32, UNSIGNED, True), clipped=clipped)
    plain = memoryview(bytearray(2400))
    weighted_mean(inputs, plain, BlockFormat(600, 300, FP32, FP32, UNSIGNED))
    assert clipped == {1}
    assert out[:1200] == plain[:1200]
    assert np.linalg.norm(np.frombuffer(out, F)[300:]) < 0.1 * np.linalg.norm(np.frombuffer(plain, F)[300:])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_contribution_that_is_not_finite_is_still_left_out_by_name(bad: float) -> None:
    values = [normal(rank) for rank in range(3)]
    inputs = inputs_of(FP32, values)
    values[1][7] = bad
    block = values[1].tobytes()
    inputs[1] = ShardInput(1, 1.0, memoryview(block), digests_of(block, len(block), UNSIGNED))
    with pytest.raises(BadInputError, match="rank 1 is not finite"):
        mean_of(inputs, FP32, 1000)


# -- records -----------------------------------------------------------------------------------------------------------


def test_records_name_the_ranks_that_were_scaled_down_only_if_there_are_any() -> None:
    replicas = {rank: SealedReplica(f"n{rank}", 0, 1.0, "d" * 32) for rank in range(3)}
    for clipped in ((), (1, 2)):
        seal = Seal(replicas, "d" * 32, 0, b"1", clipped=clipped)
        data = b"".join(bytes(part) for part in seal.data("", UNSIGNED))
        assert Seal.parse(data, "", UNSIGNED).clipped == clipped
        head = MeanHead(("d" * 32,), (), clipped=clipped).head("", UNSIGNED)
        assert MeanHead.parse(head, "", UNSIGNED).clipped == clipped
        assert (b"clipped" in data, b"clipped" in head) == (bool(clipped), bool(clipped))


# -- a run -------------------------------------------------------------------------------------------------------------


BAD = 1
"""The rank whose work is too large."""
FACTORS: dict[str, Callable[[int], float]] = {
    "a silent factor of 100": lambda step: 100.0,
    "exploding gradients": lambda step: 1e3**step,
}
"""By how much the work of that rank is too large, by step."""
WIRE_OPTIONS: dict[str, dict[str, Any]] = {
    **{name: {"wire": name} for name in WIRES},
    "each": {"wire": "top8", "mean_wire": "each"},
}
ROUNDS = 4


def rounds_of(
    where: Mapping[str, Any], factor: Callable[[int], float], *, limits: Limits = SHARDED, **options: Any
) -> tuple[torch.Tensor, list[RoundReport]]:
    """Return the anchor and the reports after some rounds in which the work of one rank has a factor."""
    model, reports = nn.Linear(900, 1, bias=False), []
    nn.init.zeros_(model.weight)
    diloco = open_diloco(model, inner_steps=1, **options, **PLAIN, **where, limits=limits)
    for step in range(ROUNDS):
        work = torch.from_numpy(normal(10 * where["rank"] + step, 900))
        nudge(model, work * (factor(step) if where["rank"] == BAD else 1.0))
        report = diloco.step()
        assert report is not None
        reports.append(report)
    anchor = diloco.anchor()["weight"][0]
    leave(diloco)
    return anchor, reports


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


@pytest.mark.parametrize("how", FACTORS)
@pytest.mark.parametrize(
    ("wire", "limits"),
    [*((wire, SHARDED) for wire in WIRE_OPTIONS), ("fp32", Limits()), ("top8", Limits())],
    ids=[*WIRE_OPTIONS, "fp32 in the seal", "top8 in the seal"],
)
def test_the_work_of_one_replica_that_is_too_large_harms_no_other_and_warnings_name_its_rank(
    wire: str, limits: Limits, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    factor, options = FACTORS[how], WIRE_OPTIONS[wire]
    clipped = run_replicas(4, lambda where: rounds_of(where, factor, limits=limits, robust="clip", **options))
    for anchor, reports in clipped:
        assert anchor.numpy().tobytes() == clipped[0][0].numpy().tobytes()
        assert [report.clipped for report in reports] == [(BAD,) if factor(step) > 1 else () for step in range(ROUNDS)]
        assert float(anchor.norm()) < 4 * 900**0.5
    plain = run_replicas(4, lambda where: rounds_of(where, factor, limits=limits, **options))
    assert all(report.clipped == () for report in plain[0][1])
    assert float(plain[0][0].norm()) > 20 * float(clipped[0][0].norm())
    warnings = said(caplog, "scaled down")
    assert len(warnings) == 2, "the replica warns at the first such round and after three in a row"
    assert all(warning.startswith(f"rank {BAD}: ") for warning in warnings)


def test_of_two_replicas_a_warning_names_the_one_with_the_larger_work_and_blames_neither(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    run_replicas(2, lambda where: rounds_of(where, lambda step: 1.0, robust="clip"))
    (few,) = said(caplog, "had two contributions, and robust='clip' compares three or more")
    assert few.startswith("rank 0: 3 rounds up to 3 ")
    assert not said(caplog, "the contribution of rank")
    caplog.clear()
    (one, _), (other, _) = run_replicas(2, lambda where: rounds_of(where, lambda step: 100.0, robust="clip"))
    assert torch.equal(one, other)
    first, later = said(caplog, "the contribution of rank 1 was more than 3 times as large as the one of this replica")
    assert first.startswith("rank 0: in round 1, ")
    assert later.startswith("rank 0: in 3 rounds up to 3, ")


@dataclass(frozen=True)
class Training:
    """A regression on four replicas, in which the gradients of one rank are wrong for some time.

    Attributes:
        widths: the widths of the layers.
        batch: samples of one step.
        steps: inner steps.
        bad: the rank with wrong gradients.
        factor: the factor of its gradients, by step.
    """

    widths: tuple[int, ...]
    batch: int
    steps: int
    bad: int
    factor: Callable[[int], float]


TRAININGS = {
    "gradients that explode": Training((4, 1), 16, 100, 2, lambda i: 1e6 if 20 <= i < 60 and i % 5 == 4 else 1.0),
    # Later, its gradients lead straight back to the values before a round. That must not look like a stale copy.
    "gradients of the opposite sign": Training((64, 32, 1), 32, 50, 3, lambda i: -1.0 if 10 <= i < 30 else 1.0),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_training_continues_after_one_replica_had_wrong_gradients(name: str) -> None:
    """No optimizer of torch makes the steps."""
    training = TRAININGS[name]
    truth = torch.randn(training.widths[0], 1, generator=torch.Generator().manual_seed(3))

    def body(where: Mapping[str, Any]) -> list[float]:
        draw, losses = torch.Generator().manual_seed(100 + where["rank"]), []
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(*widths, bias=widths[1] == 1) for widths in pairwise(training.widths)])
        with open_diloco(model, inner_steps=5, total_steps=training.steps, robust="clip", **where) as diloco:
            for step in range(training.steps):
                x = torch.randn(training.batch, len(truth), generator=draw)
                loss = nn.functional.mse_loss(model(x), x @ truth)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                factor = training.factor(step) if where["rank"] == training.bad else 1.0
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter.sub_(0.02 * factor * gradient)
                losses.append(loss.item())
                diloco.step()
        return losses

    for rank, losses in enumerate(run_replicas(4, body)):
        assert sum(losses[-5:]) < 0.1 * sum(losses[:5])
        assert rank == training.bad or max(losses) < 10 * max(losses[:5])


def test_replicas_agree_on_the_rule_and_other_values_are_refused() -> None:
    for bad in ("trim", True, 3):
        with pytest.raises(ValueError, match=r"robust must be None or 'clip', got robust="):
            open_diloco(nn.Linear(2, 2), inner_steps=1, robust=bad, **place())
