"""A contribution that is much larger than the others is scaled down before it is averaged, in every wire."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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


@pytest.mark.parametrize("limits", [Limits(), SHARDED], ids=["in the seal", "in shards"])
@pytest.mark.parametrize("wire", ["fp32", "int8", "top8"])
def test_a_replica_with_a_silent_factor_of_100_harms_no_other(
    wire: str, limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def body(where: Mapping[str, Any], *, robust: Any) -> tuple[torch.Tensor, list[RoundReport]]:
        model, reports = nn.Linear(900, 1, bias=False), []
        nn.init.zeros_(model.weight)
        options = {"inner_steps": 1, "wire": wire, "robust": robust, **PLAIN, **where}
        diloco = open_diloco(model, **options, limits=limits)
        for step in range(4):
            work = torch.from_numpy(normal(10 * where["rank"] + step, 900))
            nudge(model, work * (100.0 if where["rank"] == 1 else 1.0))
            report = diloco.step()
            assert report is not None
            reports.append(report)
        anchor = diloco.anchor()["weight"][0]
        leave(diloco)
        return anchor, reports

    clipped = run_replicas(4, lambda where: body(where, robust="clip"))
    for anchor, reports in clipped:
        assert torch.equal(anchor, clipped[0][0])
        assert [report.clipped for report in reports] == [(1,)] * 4
        assert float(anchor.norm()) < 4 * 900**0.5
    plain = run_replicas(4, lambda where: body(where, robust=None))
    assert all(report.clipped == () for report in plain[0][1])
    assert float(plain[0][0].norm()) > 20 * float(clipped[0][0].norm())
    warnings = [record.getMessage() for record in caplog.records if "scaled down" in record.message]
    assert len(warnings) == 2, "the replica warns at the first round and after three in a row"
    assert all(warning.startswith("rank 1: ") for warning in warnings)


def test_training_continues_although_the_gradients_of_one_replica_explode() -> None:
    def body(where: Mapping[str, Any]) -> list[float]:
        draw = torch.Generator().manual_seed(where["rank"])
        model, losses = nn.Linear(4, 1), []
        truth = torch.tensor([[1.0], [-2.0], [3.0], [0.5]])
        with open_diloco(model, inner_steps=5, total_steps=100, robust="clip", **where) as diloco:
            for step in range(100):
                x = torch.randn(16, 4, generator=draw)
                loss = nn.functional.mse_loss(model(x), x @ truth)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                explodes = where["rank"] == 2 and 20 <= step < 60
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter.sub_(0.02 * gradient * (1e6 if explodes and step % 5 == 4 else 1.0))
                losses.append(loss.item())
                diloco.step()
        return losses

    results = run_replicas(4, body)
    for losses in (results[0], results[1], results[3]):
        assert sum(losses[-10:]) < 0.1 * sum(losses[:10])
        assert max(losses) < 10 * max(losses[:5])


def test_of_two_replicas_a_warning_names_the_one_with_the_larger_work_and_blames_neither(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(where: Mapping[str, Any], *, factor: float) -> torch.Tensor:
        model = nn.Linear(900, 1, bias=False)
        nn.init.zeros_(model.weight)
        diloco = open_diloco(model, inner_steps=1, robust="clip", **PLAIN, **where)
        for step in range(4):
            work = torch.from_numpy(normal(10 * where["rank"] + step, 900))
            nudge(model, work * (factor if where["rank"] == 1 else 1.0))
            diloco.step()
        anchor = diloco.anchor()["weight"][0]
        leave(diloco)
        return anchor

    def said(text: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if text in record.getMessage()]

    caplog.set_level(logging.WARNING)
    run_replicas(2, lambda where: body(where, factor=1.0))
    (few,) = said("had two contributions, and robust='clip' compares three or more")
    assert few.startswith("rank 0: 3 rounds up to 3 ")
    assert not said("the contribution of rank")
    caplog.clear()
    anchors = run_replicas(2, lambda where: body(where, factor=100.0))
    assert torch.equal(*anchors)
    first, later = said("the contribution of rank 1 was more than 3 times as large as the one of this replica")
    assert first.startswith("rank 0: in round 1, ")
    assert later.startswith("rank 0: in 3 rounds up to 3, ")


def test_a_replica_that_leaves_the_place_to_which_a_bad_one_led_it_is_not_suspected_of_a_stale_copy() -> None:
    """Its gradients lead straight back to the values before the round, and no optimizer of torch makes the steps."""
    truth = torch.randn(64, 1, generator=torch.Generator().manual_seed(3))

    def body(where: Mapping[str, Any]) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 1))
        draw = torch.Generator().manual_seed(100 + where["rank"])
        with open_diloco(model, inner_steps=5, total_steps=50, robust="clip", **where) as diloco:
            for step in range(50):
                x = torch.randn(32, 64, generator=draw)
                loss = nn.functional.mse_loss(model(x), x @ truth)
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                is_bad = where["rank"] == 3 and 10 <= step < 30
                with torch.no_grad():
                    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                        parameter.sub_(0.02 * gradient * (-1.0 if is_bad else 1.0))
                diloco.step()
        return loss.item()

    assert max(run_replicas(4, body)) < 1.0


def test_replicas_agree_on_the_rule_and_other_values_are_refused() -> None:
    for bad in ("trim", True, 3):
        with pytest.raises(ValueError, match=r"robust must be None or 'clip', got robust="):
            open_diloco(nn.Linear(2, 2), inner_steps=1, robust=bad, **place())
