"""Rounds over a sparse wire: work that is not sent waits, partly beside the model. Malformed work changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
import torch
from support.training import PLAIN, leave, next_process, nudge, place
from support.wires import REFUSED, N, block_of_three
from torch import Tensor, nn

from diloco import DiLoCo
from diloco.outer import open_diloco
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.frames import Contribution, digests_of
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.round import Layout, Limits
from diloco.rendezvous.training_state import Verdict
from diloco.testing import run_replicas
from diloco.wires import WIRES
from diloco.wires.top8 import Top8
from diloco.wires.wire import BLOCK_ELEMENTS
from executors.store import MemoryStore

SHARDED = Limits(small_bytes=0, block_elements=300)
KEYS = Keys("test", "main")


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


@pytest.fixture
def _nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Top8, "keeps", 1.0)


def zeros(n: int = 1000) -> nn.Linear:
    model = nn.Linear(n, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def move_of(seed: int, n: int = 1000) -> Tensor:
    return torch.randn(1, n, generator=torch.Generator().manual_seed(seed))


def rest_of(diloco: DiLoCo, fragment: int = 0) -> Tensor:
    rest = diloco._model_state._held[fragment].rest
    assert rest is not None
    return rest.values


# -- where work is -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_nothing_is_given_up")
@pytest.mark.parametrize("options", [{}, {"overlap_steps": 1, "merge": "carry"}], ids=["in turn", "carry"])
def test_counted_work_and_unsent_work_add_up_to_all_work(options: dict[str, Any]) -> None:
    def body(where: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        model, moved = zeros(), torch.zeros(1, 1000)
        given = {"inner_steps": 2, "wire": "top8", "mean_wire": "fp32", **PLAIN, **options}
        diloco = open_diloco(model, **given, **where, limits=SHARDED)
        for step in range(20):
            move = move_of(100 * where["rank"] + step)
            moved += move
            nudge(model, move)
            diloco.step()
        work = diloco._model_state.progress()[0]
        assert 0.3 < float(rest_of(diloco).norm() / work.norm()) < 1.0
        leave(diloco)
        return diloco.anchor()["weight"], work, moved

    results = run_replicas(2, body)
    anchor = results[0][0]
    not_sent = torch.stack([work for _, work, _ in results]).mean(0)
    all_work = torch.stack([moved for _, _, moved in results]).mean(0)
    torch.testing.assert_close(anchor[0] - not_sent, all_work[0], rtol=1e-4, atol=1e-4)


def test_a_quarter_of_the_kept_rest_is_in_the_live_parameters_and_a_tenth_is_given_up() -> None:
    model, move = zeros(), move_of(0)
    with open_diloco(model, inner_steps=1, wire="top8", mean_wire="fp32", **PLAIN, **place()) as diloco:
        nudge(model, move)
        report = diloco.step()
        assert report is not None
        anchor = diloco.anchor()["weight"]
        kept = 0.9 * (move - anchor)  # as values, so with the opposite sign of work
        torch.testing.assert_close(model.weight.detach() - anchor, 0.25 * kept)
        torch.testing.assert_close(-rest_of(diloco), 0.75 * kept[0])
        assert report.wire_error == pytest.approx(float((move - anchor).norm() / move.norm()), rel=1e-5)
        assert report.wire_error == pytest.approx(0.8, abs=0.05), "most work is not sent at once, which is not an error"


def test_a_wire_that_sends_every_value_needs_no_memory_for_a_rest() -> None:
    for wire in WIRES.values():
        next_process()
        diloco = open_diloco(zeros(), inner_steps=1, wire=wire.name, **place())
        assert all((held.rest is not None) == wire.is_sparse for held in diloco._model_state._held), wire.name
        leave(diloco)


VERDICTS: list[tuple[Verdict | None, bool]] = [
    (None, True), (Verdict.KEPT, True), (Verdict.COUNTED, False), (Verdict.DROPPED, False),
]  # fmt: skip
"""The decisions about the work of an earlier attempt, and whether the rest stays."""


def after_one_round(model: nn.Module, **options: Any) -> DiLoCo:
    """Return a DiLoCo with work: a rest in both places, and one step that was not sent."""
    diloco = open_diloco(model, inner_steps=1, wire="top8", mean_wire="fp32", **PLAIN, **place(), **options)
    nudge(model, move_of(0))
    diloco.step()
    nudge(model, move_of(1))
    assert rest_of(diloco).any()
    return diloco


def test_all_work_of_an_earlier_attempt_is_divided_between_both_places() -> None:
    for (verdict, stays), mix in product(VERDICTS, (0.0, 0.5)):
        next_process()
        model = zeros()
        diloco = after_one_round(model, mix=mix)
        state, anchor = diloco._model_state, diloco.anchor()["weight"]
        (work,) = state.progress()
        torch.testing.assert_close(work, (anchor - model.weight.detach())[0] + rest_of(diloco))
        state.resume([work.clone()], [verdict])
        if stays:
            torch.testing.assert_close(rest_of(diloco), 0.75 * work)
            torch.testing.assert_close(model.weight.detach(), anchor - 0.25 * work)
            torch.testing.assert_close(state.progress()[0], work)
        else:
            share = mix if verdict is Verdict.COUNTED else 0.0
            assert not rest_of(diloco).any(), verdict
            torch.testing.assert_close(model.weight.detach(), anchor - share * work)
        leave(diloco)


def test_work_that_a_round_does_not_count_waits_and_dropped_work_leaves_no_rest() -> None:
    mean = [torch.full((1000,), -0.5).numpy().data.cast("B")]
    cases = ((Verdict.KEPT, "carry", True), (Verdict.KEPT, "drop", False), (Verdict.DROPPED, "carry", False))
    for verdict, late, stays in cases:
        next_process()
        model = zeros()
        diloco = after_one_round(model, late=late)
        state = diloco._model_state
        before = state.progress()[0]
        state.hold(0, is_early=False)
        packed = state.pack(1)
        state.apply(1, mean, verdict, packed, partly=False)
        state.merge()
        after = state.progress()[0]
        torch.testing.assert_close(after, before if stays else torch.zeros_like(before), rtol=1e-5, atol=1e-6)
        assert bool(rest_of(diloco).any()) == stays, (verdict, late)
        leave(diloco)


def test_the_rest_follows_a_state_that_was_loaded_unless_it_was_counted() -> None:
    """A round that was jumped over counted the sent part of the rest, too. That part must not be sent twice."""
    cases = (
        (None, None, True),
        (Verdict.KEPT, None, True),
        (Verdict.COUNTED, 0, False),
        (Verdict.DROPPED, None, False),
    )
    for verdict, partly, stays in cases:
        next_process()
        model = zeros()
        diloco = after_one_round(model)
        state = diloco._model_state
        work, anchors = state.progress()[0], state.anchors_now()
        state.hold(0, is_early=True)
        state.anchors[0].add_(3.0)
        state.follow(anchors, [verdict], partly=partly)
        state.prepare_merge()
        state.merge()
        torch.testing.assert_close(state.progress()[0], work if stays else torch.zeros(1000), rtol=1e-5, atol=1e-5)
        assert bool(rest_of(diloco).any()) == stays, (verdict, partly)
        leave(diloco)


def test_the_last_planned_round_leaves_no_rest() -> None:
    def body(where: Mapping[str, Any]) -> None:
        model = zeros()
        with open_diloco(model, inner_steps=2, total_steps=4, wire="top8", **where) as diloco:
            for step in range(4):
                nudge(model, move_of(step))
                diloco.step()
                if step == 1:
                    assert rest_of(diloco).any()
            assert not rest_of(diloco).any()
            assert torch.equal(model.weight, diloco.anchor()["weight"])

    run_replicas(2, body)


@pytest.mark.usefixtures("_nothing_is_given_up")
def test_a_replica_that_comes_back_between_two_rounds_loses_no_work() -> None:
    store, options = MemoryStore(), {"inner_steps": 2, "wire": "top8", "mean_wire": "fp32", "fragments": 2, **PLAIN}
    moved = torch.zeros(2, 1000)
    for attempt in range(3):
        next_process()
        model = nn.Sequential(zeros(), zeros())
        diloco = open_diloco(model, **options, **place(store))
        diloco.attach_state("generator", torch.Generator())
        if attempt:
            assert rest_of(diloco).any()
        for step in range(8):
            for fragment, parameter in enumerate(model.parameters()):
                move = move_of(100 * attempt + 10 * step + fragment)
                moved[fragment] += move[0]
                with torch.no_grad():
                    parameter.add_(move)
            diloco.step()
        diloco._saver.save_attached()
        diloco._workers.uploads.finish()
        leave(diloco)  # as after a crash, right after a round
    anchor = torch.stack([values[0] for values in diloco.anchor().values()])
    work = torch.stack(diloco._model_state.progress())
    torch.testing.assert_close(anchor - work, moved, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_has_the_rest() -> None:
    store, options = MemoryStore(), {"inner_steps": 1, "wire": "top8", "mean_wire": "fp32", **PLAIN}
    diloco = open_diloco(model := zeros(), **options, **place(store))
    for step in range(3):
        nudge(model, move_of(step))
        diloco.step()
    checkpoint, weights = diloco.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    work = diloco._model_state.progress()[0]
    leave(diloco)
    for has_rest in (True, False):
        next_process()
        again = open_diloco(other := zeros(), **options, **place(store))
        other.load_state_dict(weights)
        again.load_state_dict(checkpoint if has_rest else {k: v for k, v in checkpoint.items() if k != "rest"})
        assert torch.equal(again._model_state.progress()[0], work) == has_rest
        assert bool(rest_of(again).any()) == has_rest, (
            "after a load, the process has a rest exactly if the checkpoint has one"
        )
        leave(again)


def test_a_model_in_bf16_trains_over_a_sparse_wire() -> None:
    model = zeros().to(torch.bfloat16)
    move = move_of(0).bfloat16()
    with open_diloco(model, inner_steps=1, wire="top8", mean_wire="fp32", **PLAIN, **place()) as diloco:
        for _ in range(30):
            nudge(model, move)
            diloco.step()
        anchor = diloco.anchor()["weight"]
    along = float((anchor * move).sum() / (move.float().norm() ** 2))
    assert 0.8 * 30 < along < 1.2 * 30, "the anchor does not follow the work"


# -- malformed contributions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_sharded", [True, False], ids=["in shards", "in the seal"])
@pytest.mark.parametrize("what", REFUSED)
def test_a_malformed_contribution_is_left_out_and_the_run_continues(
    what: str, is_sharded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The head and the digests of the contribution are right, as if a faulty program with the run's key had sent it."""
    caplog.set_level(logging.WARNING)
    store = MemoryStore()
    limits = Limits(small_bytes=0 if is_sharded else 1 << 20, grace_s=0.05, takeover_after_s=0.01)
    model = zeros(N)
    options: dict[str, Any] = {"inner_steps": 1, "wire": "top8", "mean_wire": "fp32", **PLAIN}
    diloco = open_diloco(model, **options, **place(store, 0, 2), limits=limits)
    payload = block_of_three()
    REFUSED[what](payload)
    store.put(KEYS.claim(1, 0), b'{"nonce": "other"}')
    head = Contribution(
        1, 0, "other", 1.0, diloco._model_state.digest(0), size_bytes=len(payload),
        blocks=digests_of(payload, len(payload), UNSIGNED), norms=(1.0,), wire="top8",
    ).head("", UNSIGNED)  # fmt: skip
    store.put(KEYS.contribution(0, 1), head + bytes(payload))
    for entry in range(2):
        nudge(model, move_of(entry, N))
        report = diloco.step()
        assert report is not None
        assert (report.ranks, report.verdict) == ((0,), "counted")
    left_out = [record.message for record in caplog.records if "does not include it" in record.message]
    assert len(left_out) == is_sharded
    leave(diloco)


# -- sizes -------------------------------------------------------------------------------------------------------------


def test_a_contribution_has_a_42nd_of_the_bytes_of_fp32() -> None:
    n = 25 * BLOCK_ELEMENTS
    sparse, dense = (Layout(n, Limits(), WIRES[wire], WIRES["int4"]) for wire in ("top8", "fp32"))
    assert sparse.size_bytes <= 0.024 * dense.size_bytes
    assert sparse.mean_bytes == dense.mean_bytes
