"""Rounds over wires that round values: no work is lost, and no replica reads the payload of another wire."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from support.training import PLAIN, leave, next_process, nudge, place
from torch import nn

from diloco.errors import DiLoCoError, QuorumTimeoutError
from diloco.outer import open_diloco
from diloco.rendezvous.envelope import UNSIGNED, unframe
from diloco.rendezvous.frames import Contribution, MeanHead, Seal, digests_of, head_bytes
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.round import Limits
from diloco.testing import run_replicas
from diloco.wires import WIRES
from diloco.wires.wire import Pieces, Wire, decoded
from executors.store import MemoryStore
from executors.store.faulty import FaultyStore

LOSSY = [wire.name for wire in WIRES.values() if not wire.is_exact and not wire.is_sparse]
"""The wires that round each value. `test_sparse_rounds.py` has the same promises for sparse wires."""
SPARSE = [wire.name for wire in WIRES.values() if wire.is_sparse]
KEYS = Keys("test", "main")
SHARDED = Limits(small_bytes=0, block_elements=300)


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


def zeros(n: int = 1000, dtype: torch.dtype = torch.float32) -> nn.Linear:
    model = nn.Linear(n, 1, bias=False, dtype=dtype)
    nn.init.zeros_(model.weight)
    return model


def uneven(scale: float = 1.0, n: int = 1000) -> torch.Tensor:
    """Return steps. Compared with the largest one, most of them are too small for the wire."""
    steps = torch.full((1, n), 1e-3 * scale)
    steps[0, ::100] = scale
    return steps


@pytest.mark.parametrize("limits", [Limits(), SHARDED], ids=["in the seal", "in shards"])
@pytest.mark.parametrize("wire", LOSSY)
def test_the_rounding_error_of_a_wire_is_sent_with_a_later_contribution(wire: str, limits: Limits) -> None:
    rounds = 40

    def body(where: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        model = zeros()
        with open_diloco(model, inner_steps=1, wire=wire, mean_wire="fp32", **PLAIN, **where, limits=limits) as diloco:
            for _ in range(rounds):
                nudge(model, uneven(1.0 + where["rank"]))
                report = diloco.step()
                assert report is not None
                assert (report.verdict, report.work) == ("counted", 1)
            live = model.weight.detach().clone()  # afterwards the model is the anchor
        return diloco.anchor()["weight"], live

    results = run_replicas(2, body)
    anchor = results[0][0]
    assert torch.equal(anchor, results[1][0])
    left = torch.stack([live - anchor for _, live in results]).mean(0)
    # Each unit of work of both replicas is in the anchor, or still in the live parameters.
    torch.testing.assert_close(anchor + left, rounds * uneven(1.5), rtol=1e-4, atol=1e-4)
    assert float((anchor / (rounds * uneven(1.5)) - 1).abs().max()) < {"bf16": 1e-4, "int8": 0.2, "int4": 4.0}[wire]
    assert float(left.abs().max()) < {"bf16": 2e-2, "int8": 2e-2, "int4": 0.3}[wire]


@pytest.mark.parametrize("wire", LOSSY)
def test_the_share_that_a_wire_leaves_out_of_large_work_is_known(wire: str) -> None:
    """The square of the work does not fit into a float32."""
    with open_diloco(model := zeros(), inner_steps=1, wire=wire, **PLAIN, **place()) as diloco:
        nudge(model, uneven(1e25))
        report = diloco.step()
    assert report is not None
    assert report.wire_error is not None
    assert 0 < report.wire_error < 0.01


@pytest.mark.parametrize("wire", [*LOSSY, *SPARSE])
def test_a_planned_run_ends_with_one_model(wire: str) -> None:
    def body(where: Mapping[str, Any]) -> bytes:
        model = zeros()
        with open_diloco(model, inner_steps=2, total_steps=4, wire=wire, **where) as diloco:
            for _ in range(4):
                nudge(model, uneven(1.0 + where["rank"]))
                diloco.step()
        assert torch.equal(model.weight, diloco.anchor()["weight"])
        return model.weight.detach().numpy().tobytes()

    assert len(set(run_replicas(2, body))) == 1


def test_with_mix_the_rounding_error_is_kept_in_the_same_share_as_the_live_value() -> None:
    model = zeros()
    with open_diloco(model, inner_steps=1, wire="int8", mean_wire="fp32", mix=0.5, **PLAIN, **place()) as diloco:
        nudge(model, uneven())
        live = model.weight.detach().clone()
        diloco.step()
        anchor = diloco.anchor()["weight"]
        torch.testing.assert_close(model.weight, 0.5 * live + 0.5 * live, rtol=1e-6, atol=1e-6)
        assert not torch.equal(anchor, live)


def test_a_bf16_model_keeps_the_rounding_error_as_far_as_its_digits_allow() -> None:
    model = zeros(dtype=torch.bfloat16)
    with open_diloco(model, inner_steps=1, wire="int8", mean_wire="fp32", **PLAIN, **place()) as diloco:
        for _ in range(30):
            nudge(model, uneven().bfloat16())
            diloco.step()
        anchor, live = diloco.anchor()["weight"], model.weight.detach().float()
    small = uneven() < 1
    assert float((live - 30 * uneven())[small].abs().max()) < 1e-3
    assert float((anchor - 30 * uneven())[small].abs().max()) < 1 / 127


def of_many_tensors(dtype: torch.dtype) -> nn.Sequential:
    """Return a model for two fragments, whose tensors end in the middle of blocks, with statistics to average."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(37, 41), nn.BatchNorm1d(41), nn.Linear(41, 13), nn.Linear(13, 700)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", [*LOSSY, *SPARSE])
def test_the_rounding_error_of_a_wire_is_the_same_with_and_without_held_work(wire: str, dtype: torch.dtype) -> None:
    """In background rounds the error is computed from a copy, and otherwise from the live parameters during the
    step.
    """
    first = of_many_tensors(dtype)

    def trained(where: Mapping[str, Any], *, background: bool) -> tuple[list[float | None], list[bytes]]:
        model, numbers, bits = deepcopy(first), list[float | None](), list[bytes]()
        options: dict[str, Any] = {
            "wire": wire,
            "fragments": 2,
            "sync_buffers": wire == "bf16",
            "background": background,
        }
        with open_diloco(model, inner_steps=2, limits=SHARDED, **options, **where) as diloco:
            work = torch.Generator().manual_seed(1 + where["rank"])
            for _ in range(8):
                for tensor in (*model.parameters(), model.get_buffer("1.running_var")):
                    with torch.no_grad():
                        tensor += (0.01 * torch.randn(tensor.shape, generator=work).abs()).to(dtype)
                report = diloco.step()
                assert report is not None
                numbers += [report.wire_error, report.norm, report.mean_norm]
                bits += [value.float().numpy().tobytes() for value in model.state_dict().values()]
            diloco.sync()
            held = [shadow._memory is not None for shadow in diloco._model_state._held]
            assert not any(held), "memory for held work is kept although no work is in flight"
        return numbers, bits

    ways = [run_replicas(2, partial(trained, background=background)) for background in (False, True)]
    for (numbers, bits), (numbers_of_other, bits_of_other) in zip(*ways, strict=True):
        assert numbers == pytest.approx(numbers_of_other, rel=1e-5)
        assert bits == bits_of_other


@pytest.mark.parametrize("wire", ["fp32", *LOSSY])
def test_parameters_that_are_tied_by_their_data_are_stepped_once(wire: str) -> None:
    model = nn.ParameterList([nn.Parameter(torch.zeros(600)), nn.Parameter(torch.zeros(600))])
    model[1].data = model[0].data
    options: dict[str, Any] = {"wire": wire, "outer_lr": 0.5, "outer_momentum": 0.0}
    with open_diloco(model, inner_steps=1, limits=SHARDED, **options, **place()) as diloco:
        for _ in range(3):
            with torch.no_grad():
                model[0] += 1.0
            diloco.step()
    torch.testing.assert_close(model[0].detach(), torch.full((600,), 1.5), rtol=1e-2, atol=1e-2)


def test_the_process_that_interrupts_a_step_finds_each_live_value_before_or_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def trained(*, stopped: bool) -> tuple[torch.Tensor, torch.Tensor]:
        model = zeros()
        options: dict[str, Any] = {"wire": "int4", "mean_wire": "fp32", "outer_lr": 0.5, "outer_momentum": 0.0}
        diloco = open_diloco(model, inner_steps=1, limits=SHARDED, **options, **place())
        nudge(model, torch.linspace(1, 2, 1000))
        before = model.weight.detach().clone()
        with monkeypatch.context() as patch:
            if stopped:
                patch.setattr("diloco.model_state.decoded", until_the_third_block)
            with suppress(KeyboardInterrupt):
                diloco.step()
        for act in (diloco.step, diloco.sync, diloco.anchor, diloco.state_dict, diloco.close) if stopped else ():
            with pytest.raises(DiLoCoError, match="interrupted, so this replica's anchor"):
                act()
        leave(diloco)
        return before, model.weight.detach().clone()

    def until_the_third_block(wire: Wire, *payload: Any) -> Pieces:
        for first, values in decoded(wire, *payload):
            if first == 600 and wire.name == "fp32":
                raise KeyboardInterrupt
            yield first, values

    (before, after), (_, half) = trained(stopped=False), trained(stopped=True)
    assert (before != after).all(), "the step changed no value, so nothing was tested"
    assert torch.equal(half[0, :600], after[0, :600])
    assert torch.equal(half[0, 600:], before[0, 600:])


@pytest.mark.parametrize("sharded", [True, False])
def test_a_contribution_of_another_wire_is_unreadable(sharded: bool) -> None:
    """The contribution is a payload of fp32 under another name, with the right size and right digests."""
    store = MemoryStore()
    limits = Limits(small_bytes=0 if sharded else 1 << 20, block_elements=300, grace_s=0.05, takeover_after_s=0.01)
    model = zeros()
    with open_diloco(model, inner_steps=1, **PLAIN, **place(store, 0, 2), limits=limits) as diloco:
        payload = np.ones(1000, np.float32).tobytes()
        store.put(KEYS.claim(1, 0), b'{"nonce": "other"}')
        anchor = diloco._model_state.digest(0)
        fields: dict[str, Any] = {
            "size_bytes": 4000,
            "blocks": digests_of(payload, 1200, UNSIGNED),
            "norms": (1.0,) * 4,
        }
        head = Contribution(1, 0, "other", 1.0, anchor, wire="bf16", **fields).head("", UNSIGNED)
        store.put(KEYS.contribution(0, 1), head + payload)
        nudge(model, 1.0)
        report = diloco.step()
    assert report is not None
    assert report.ranks == (0,)


def test_a_round_without_quorum_names_the_contributions_that_were_forged(caplog: pytest.LogCaptureFixture) -> None:
    store, limits = MemoryStore(), Limits(grace_s=0.05, round_timeout_s=0.3, takeover_after_s=0.0)
    for rank in (0, 1):
        store.put(f"test/diloco/main/r0/contribution/{rank}", b"forged")
    diloco = open_diloco(nn.Linear(2, 2), inner_steps=1, **{**place(store), "world_size": 3}, limits=limits)
    with pytest.raises(QuorumTimeoutError) as caught:
        diloco.step()
    leave(diloco)
    assert str(caught.value) == (
        "Round 1: 0 of 3 contributions arrived in 0.3 s, min_quorum is 1. Missing ranks: 2. "
        "Damaged contributions: ranks 0, 1."
    )
    assert caught.value.missing == [2]
    assert "test/diloco/main/r0/contribution/1 in memory:// was damaged in each of" in caplog.text


def test_a_mean_of_another_wire_is_not_stepped_with() -> None:
    store = FaultyStore(MemoryStore(), seed=0)
    limits = Limits(small_bytes=0, block_elements=2000)
    model = zeros()

    def forge() -> None:
        payload = bytes(WIRES["bf16"].size(1000)) * 2
        head = MeanHead(digests_of(payload, 8000, UNSIGNED), (), "bf16").head("", UNSIGNED)
        assert store.put_if_absent(KEYS.mean(0, 0), head + payload)

    store.fail_at("put_if_absent", key="*/r0/mean/0", before=forge)
    with open_diloco(model, inner_steps=1, **PLAIN, **place(store), limits=limits) as diloco:
        nudge(model, 1.0)
        report = diloco.step()
        assert report is not None
        assert torch.equal(diloco.anchor()["weight"], torch.ones(1, 1000))


def test_heads_name_the_wire_and_the_steps() -> None:
    kept: dict[str, bytes] = {}

    class Keeping(MemoryStore):
        def delete(self, key: str) -> None:
            pass

    store = Keeping()
    for wire in ("fp32", "int4"):
        next_process()
        where = {**place(store), "run_id": wire}
        model = zeros()
        with open_diloco(model, inner_steps=3, wire=wire, **PLAIN, **where, limits=SHARDED) as diloco:
            for _ in range(3):
                nudge(model, uneven())
                diloco.step()
            layout = diloco._training_side._context.layouts[0]
        keys = Keys(wire, "main")
        data = bytes(store.get(keys.contribution(0, 0)))
        assert len(data) == head_bytes(4) + layout.size_bytes
        head = unframe(data, "", UNSIGNED)[0]
        assert (head.get("wire", "fp32"), head["steps"], head["bytes"]) == (wire, 3, layout.size_bytes)
        mean, mean_wire = unframe(store.get(keys.mean(0, 0)), "", UNSIGNED)[0], {"fp32": "fp32", "int4": "int8"}[wire]
        assert mean.get("wire", "fp32") == mean_wire
        kept[wire] = data
    assert len(kept["int4"]) < len(kept["fp32"])
    seal = b"".join(Seal({0: member()}, "d" * 32, 0, b"1", wire="int8").data("", UNSIGNED))
    assert Seal.parse(seal, "", UNSIGNED).wire == "int8"


def member() -> Any:
    from diloco.rendezvous.frames import SealedReplica

    return SealedReplica("n", 0, 1.0, "d" * 32)
