"""The public interface of DiLoCo, and mistakes of other implementations."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import safetensors.torch
import torch
from support.training import PLAIN, leave, nudge, place
from torch import nn

from diloco.errors import AbortedError, ContributionError, DiLoCoError, QuorumTimeoutError
from diloco.outer import open_diloco
from diloco.rendezvous.frames import head_bytes
from diloco.rendezvous.round import Limits
from diloco.testing import run_replicas
from executors.store import MemoryStore


def seeded(model: nn.Module, seed: int) -> nn.Module:
    own = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=own)
    return model


def test_replicas_with_different_seeds_start_from_one_model() -> None:
    def body(where: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        model = seeded(nn.Linear(3, 3), where["rank"])
        with open_diloco(model, **where):
            return {name: p.detach().clone() for name, p in model.named_parameters()}

    first, *others = run_replicas(3, body)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


def test_a_gradient_may_be_accumulated_across_a_round() -> None:
    model = nn.Linear(2, 2)
    with open_diloco(model, inner_steps=1, **place()) as diloco:
        model(torch.ones(1, 2)).sum().backward()
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        diloco.step()
        assert all(
            torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True) if p.grad is not None
        )
        assert len(before) == 2


def test_a_half_precision_model_has_a_float32_anchor() -> None:
    def body(where: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        model = model.to(dtype)
        with open_diloco(model, inner_steps=1, **PLAIN, **where) as diloco:
            nudge(model, [0.0, 2.0**-7, 2.0**-6][where["rank"]])
            diloco.step()
            return diloco.anchor()["weight"], model.weight.detach()

    for dtype in (torch.bfloat16, torch.float16):
        for anchor, live in run_replicas(3, body):
            assert anchor.dtype == torch.float32
            torch.testing.assert_close(anchor, torch.full((1, 2), 1 + 2.0**-7))
            assert live.dtype == dtype


def test_frozen_parameters_are_left_alone_and_do_not_misalign_the_rest() -> None:
    def body(where: Mapping[str, Any]) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
        seeded(model, where["rank"])
        model.get_parameter("0.weight").requires_grad_(False)
        with open_diloco(model, inner_steps=1, **where) as diloco:
            nudge(model, 1.0)
            diloco.step()
        return model

    one, two = run_replicas(2, body)
    assert not torch.equal(one.get_parameter("0.weight"), two.get_parameter("0.weight"))
    for name in ("0.bias", "1.weight", "1.bias"):
        assert torch.equal(one.get_parameter(name), two.get_parameter(name))


def test_float_buffers_are_averaged_and_counters_stay_local() -> None:
    def body(where: Mapping[str, Any]) -> tuple[float, int]:
        model = nn.BatchNorm1d(2)
        with open_diloco(model, inner_steps=1, outer_lr=0.5, outer_momentum=0.9, **where) as diloco:
            for _ in range(where["rank"] + 1):
                model(torch.full((4, 2), 10.0 * where["rank"]))
            diloco.step()
            assert model.running_mean is not None
            assert model.num_batches_tracked is not None
            return model.running_mean[0].item(), int(model.num_batches_tracked)

    # Rank 0 stays at 0, and rank 1 goes 0 -> 1 -> 1.9. The result is their mean with every outer optimizer.
    (mean, count), (other_mean, other_count) = run_replicas(2, body)
    assert mean == other_mean == pytest.approx(0.95)
    assert (count, other_count) == (1, 2)


def test_a_parameter_that_changed_its_shape_is_named() -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(768, 32, bias=False)})
    diloco = open_diloco(model, inner_steps=1, allow_no_rounds=True, **place())
    model["lm_head"] = nn.Linear(768, 50, bias=False)
    with pytest.raises(ContributionError) as caught:
        diloco.step()
    assert str(caught.value) == (
        "Contribution of rank 0 for round 1: 'lm_head.weight' has shape (50, 768), this model has (32, 768)."
    )
    diloco.close()


def test_parameters_that_are_not_finite_are_not_sent() -> None:
    for value in (float("nan"), float("inf")):
        model, store = nn.Linear(3, 3), MemoryStore()
        diloco = open_diloco(model, inner_steps=1, allow_no_rounds=True, **place(store))
        with torch.no_grad():
            model.bias[1] = value
        with pytest.raises(ContributionError, match=r"rank 0 for round 1: 'bias' is not finite in 1 of 3 values"):
            diloco.step()
        diloco.close()
        assert not list(store.list("test/diloco/main/r0/contribution"))


def test_a_missing_replica_costs_the_grace_and_no_more() -> None:
    def body(where: Mapping[str, Any]) -> tuple[int, ...]:
        model = nn.Linear(2, 2)
        with open_diloco(model, inner_steps=1, grace_s=0.2, **{**where, "world_size": 3}) as diloco:
            for _ in range(3):
                report = diloco.step()
            assert report is not None
            return report.ranks

    pace_of_two_in_a_world_of_three = run_replicas(2, body)
    assert pace_of_two_in_a_world_of_three == [(0, 1), (0, 1)]


def test_a_round_without_quorum_names_the_missing_ranks() -> None:
    where = {**place(), "world_size": 8}
    limits = Limits(grace_s=0.05, round_timeout_s=0.5, takeover_after_s=0.0)
    diloco = open_diloco(nn.Linear(2, 2), inner_steps=1, min_quorum=6, limits=limits, **where)
    with pytest.raises(QuorumTimeoutError) as caught:
        diloco.step()
    assert str(caught.value) == (
        "Round 1: 1 of 8 contributions arrived in 0.5 s, min_quorum is 6. Missing ranks: 1, 2, 3, 4, 5, 6, 7."
    )
    assert isinstance(caught.value, TimeoutError)
    leave(diloco)


def test_an_abort_ends_a_wait() -> None:
    store = MemoryStore()
    where = {**place(store), "world_size": 2}
    diloco = open_diloco(nn.Linear(2, 2), inner_steps=1, limits=Limits(abort_check_s=0.0), **where)
    store.put("test/abort.json", json.dumps({"who": "rank 1", "why": "out of budget"}).encode())
    with pytest.raises(AbortedError, match="Run 'test' was aborted: rank 1: out of budget"):
        diloco.step()
    leave(diloco)


def test_a_process_that_leaves_is_not_waited_for() -> None:
    def body(where: Mapping[str, Any]) -> int:
        with open_diloco(nn.Linear(2, 2), inner_steps=1, grace_s=1e6, **where) as diloco:
            for _ in range(2 + 3 * where["rank"]):
                diloco.step()
            return diloco.rounds

    assert run_replicas(3, body) == [2, 5, 8]


def test_sync_synchronises_every_fragment_now() -> None:
    def body(where: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        model = seeded(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 0)
        with open_diloco(model, inner_steps=100, fragments=2, **PLAIN, **where) as diloco:
            nudge(model, 1.0 + where["rank"])
            assert [report.fragment for report in diloco.sync()] == [0, 1]
        return dict(model.named_parameters())

    one, two = run_replicas(2, body)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_rounds_that_were_asked_for_are_worth_the_steps_that_were_made() -> None:
    def body(where: Mapping[str, Any]) -> list[int]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with open_diloco(model, inner_steps=100, fragments=2, **where) as diloco:
            steps = []
            for _ in range(7):
                diloco.step()
            diloco.sync()
            steps.append(diloco.inner_step)
            diloco.sync()
            steps.append(diloco.inner_step)
            for _ in range(3):
                diloco.step()
            steps.append(diloco.inner_step)
            diloco.sync()
            return steps

    assert run_replicas(2, body) == [[7, 7, 10]] * 2


def test_a_checkpoint_of_the_same_run_is_taken_up_where_the_run_is_now() -> None:
    model = nn.Linear(2, 2)
    with open_diloco(model, inner_steps=2, **place()) as diloco:
        for _ in range(5):
            nudge(model, 0.5)
            diloco.step()
        saved, weights = diloco.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
        assert (diloco.rounds, diloco.inner_step) == (2, 5)
        for _ in range(5):
            nudge(model, 0.5)
            diloco.step()
        later = diloco.anchor()
        model.load_state_dict(weights)
        diloco.load_state_dict(saved)
        assert diloco.rounds == 5
        assert all(torch.equal(later[name], value) for name, value in diloco.anchor().items())
        with pytest.raises(ValueError, match="belongs to another run"):
            diloco.load_state_dict({**saved, "rounds": 99})


def test_a_closed_diloco_reports_that_and_an_error_inside_leaves_a_bye() -> None:
    store = MemoryStore()
    diloco = open_diloco(nn.Linear(2, 2), **place(store))
    diloco.close()
    diloco.close()
    with pytest.raises(DiLoCoError, match="closed"):
        diloco.step()
    with pytest.raises(ZeroDivisionError), open_diloco(nn.Linear(2, 2), name="other", **place(store)):
        _ = 1 / 0
    assert [entry.key for entry in store.list("test/diloco/other/bye")] == ["test/diloco/other/bye/0/0"]


def test_the_first_anchor_is_readable_by_safetensors() -> None:
    store = MemoryStore()
    model = nn.Linear(2, 3)
    open_diloco(model, **place(store)).close()
    (part,) = [entry.key for entry in store.list("test/diloco/main/part/")]
    tensors = safetensors.torch.load(bytes(store.get(part)))
    assert torch.equal(tensors["anchor/weight"], model.weight.detach())


def test_own_contributions_are_deleted_after_their_round() -> None:
    store = MemoryStore()
    with open_diloco(nn.Linear(2, 2), inner_steps=1, **place(store)) as diloco:
        for _ in range(3):
            diloco.step()
    kept = [entry.key.removeprefix("test/diloco/main/") for entry in store.list("test/diloco/main/")]
    assert [key for key in kept if not key.startswith("part/")] == [
        "bye/0/0",
        "offer/0/0",
        "seal/0",
        "seal/1",
        "seal/2",
        "snapshot/0",
    ]


def test_sharded_rounds_move_the_expected_number_of_payload_bytes() -> None:
    blocks, block_elements, n = 12, 64, 4

    def body(where: Mapping[str, Any]) -> tuple[int, int]:
        model = nn.Linear(blocks * block_elements, 1, bias=False)
        limits = Limits(grace_s=1e6, small_bytes=0, block_elements=block_elements)
        with open_diloco(model, inner_steps=1, limits=limits, **where) as diloco:
            store = CountingStore(diloco._training_side._context.store.store)
            diloco._training_side._context.store.store = store
            diloco.step()
            return store.written, store.read

    written, read = map(sum, zip(*run_replicas(n, body), strict=True))
    payload = blocks * block_elements * 4
    assert written == n * payload + payload
    assert read <= n * payload * (2 - 2 / n)


class CountingStore:
    """Counts the bytes of payloads: everything after the heads of contributions and means."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.written = self.read = 0

    def put_if_absent(self, key: str, data: Any) -> bool:
        created: bool = self._store.put_if_absent(key, data)
        if "/r0/" in key and created:
            self.written += len(data[1])
        return created

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        data: memoryview = self._store.get(key, start=start, size=size)
        if "/contribution/" in key and start:
            self.read += len(data)
        if "/mean/" in key and size is None:
            self.read += len(data) - head_bytes(3)  # each of four shards has three of the twelve blocks
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"inner_steps": 0}, "inner_steps must be at least 1, got inner_steps=0"),
    ({"inner_steps": 5, "fragments": 2}, "inner_steps must be a multiple of the number of fragments"),
    ({"inner_steps": 4, "overlap_steps": 4}, "overlap_steps must be less than inner_steps / fragments = 4"),
    ({"overlap_steps": "some"}, "overlap_steps must be \"auto\" or an integer of at least 0, got overlap_steps='some'"),
    ({"background": "yes"}, "background must be True, False or \"auto\", got background='yes'"),
    (
        {"background": False, "overlap_steps": "auto"},
        'overlap_steps="auto" lets training continue .* background=False',
    ),
    ({"merge": "keep"}, "merge must be one of 'anchor', 'carry', got merge='keep'"),
    ({"merge": "carry", "mix": 0.5}, 'merge="carry" keeps later work as it is, so mix must be 0, got mix=0.5'),
    ({"carry_rounds": 0}, "carry_rounds must be None or at least 1, got carry_rounds=0"),
    ({"carry_rounds": 1.5}, "carry_rounds must be None or an integer of at least 1, got carry_rounds=1.5"),
    ({"mix": 1.5}, "mix must be at least 0 and at most 1, got mix=1.5"),
    ({"wire": "fp8"}, "wire must be one of 'fp32', 'bf16', 'int8', 'int4', 'top8', got wire='fp8'"),
    ({"mean_wire": "top8"}, "mean_wire must be one of 'fp32', 'bf16', 'int8', 'int4', 'each', got mean_wire='top8'"),
    ({"mean_wire": 4}, "mean_wire must be one of 'fp32', 'bf16', 'int8', 'int4', 'each', got mean_wire=4"),
    ({"late": "never"}, "late must be one of 'carry', 'drop', got late='never'"),
    ({"outer_momentum": 1.0}, "outer_momentum must be at least 0 and below 1"),
    ({"outer_lr": -0.5}, "outer_lr must be at least 0, got outer_lr=-0.5"),
    ({"outer_lr": "auto"}, "outer_lr must be None or a number, got outer_lr='auto'"),
    ({"weight": 0}, "weight must be more than 0"),
    ({"weight": -1}, "weight must be more than 0, got weight=-1"),
    ({"weight": float("nan")}, "weight must be more than 0, got weight=nan"),
    ({"weight": 1e300}, r"weight must be at least 0 and at most 1e\+30, got weight=1e\+300"),
    ({"round_seconds": 0}, "round_seconds must be more than 0, got round_seconds=0"),
    ({"round_seconds": -1.0}, "round_seconds must be at least 0, got round_seconds=-1.0"),
    ({"round_seconds": float("nan")}, "round_seconds must be at least 0, got round_seconds=nan"),
    ({"round_seconds": True}, "round_seconds must be a number, got round_seconds=True"),
    ({"round_seconds": "30"}, "round_seconds must be a number, got round_seconds='30'"),
    (
        {"round_seconds": 30, "inner_steps": 500},
        r"Give either inner_steps .* or round_seconds .*, not both: got inner_steps=500 and round_seconds=30\.",
    ),
    (
        {"round_seconds": 30, "total_steps": 900},
        "total_steps is for rounds by step, and round_seconds=30 .* Use total_rounds=… instead.",
    ),
    ({"round_seconds": 30, "overlap_steps": 1}, "overlap_steps is for rounds by step.* Use overlap_seconds=… instead."),
    ({"total_rounds": 9}, "total_rounds needs round_seconds, got total_rounds=9. Use total_steps=…"),
    ({"overlap_seconds": "auto"}, "overlap_seconds needs round_seconds, .* Use overlap_steps=… instead."),
    ({"round_seconds": 30, "total_rounds": 1.5}, "total_rounds must be None or an integer of at least 1, got .*1.5"),
    (
        {"round_seconds": 30, "fragments": 2, "overlap_seconds": 15},
        "overlap_seconds must be less than round_seconds / fragments = 15, got overlap_seconds=15",
    ),
    ({"round_seconds": 30, "overlap_seconds": "some"}, "overlap_seconds must be \"auto\" or a number, got .*'some'"),
    (
        {"round_seconds": 30, "background": False, "overlap_seconds": "auto"},
        'overlap_seconds="auto" lets training continue .* background=False',
    ),
    ({"fragments": True}, "fragments must be a number, or lists of modules or names, got fragments=True"),
    ({"fragments": "0"}, "fragments must be a number, or lists of modules or names, got fragments='0'"),
    ({"sync_buffers": "x"}, "sync_buffers must be True, False or None, got sync_buffers='x'"),
    ({"min_quorum": 0}, "min_quorum must be at least 1"),
    ({"min_quorum": 3}, "min_quorum must be at most the world size of 1"),
    ({"momentum_warmup": -1}, "momentum_warmup must be"),
    ({"total_steps": 0}, "total_steps must be at least 1"),
    ({"total_steps": 400}, "total_steps must be at least inner_steps.*total_steps=400 and inner_steps=500"),
    ({"round_timeout_s": 0}, "round_timeout_s must be more than 0"),
    ({"final_average": "x"}, "final_average must be True or False"),
    ({"outer_optimizer": "sgd"}, "outer_optimizer must be a callable"),
    ({"name": "a/b"}, "name must be a word without"),
    ({"name": ""}, "name must be a word without '/'"),
    ({"name": ".."}, "name must be a word without '/'"),
    ({"name": 5}, "name must be a word without '/'"),
    ({"rank": -1}, "rank must be at least 0"),
    ({"rank": "joins"}, 'rank must be an integer or "join"'),
    ({"model": nn.Linear(2, 2, dtype=torch.complex64)}, "'weight' is torch.complex64. DiLoCo averages real numbers"),
    ({"model": nn.Linear(2, 2, device="meta")}, "'weight' is on the meta device"),
    ({"model": [nn.Parameter(torch.zeros(2))]}, "must be a torch.nn.Module, got a list"),
]


def test_a_bad_argument_is_refused_before_anything_is_written() -> None:
    for arguments, message in REFUSED:
        store = MemoryStore()
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with pytest.raises((ValueError, TypeError), match=message):
            open_diloco(**{"model": model, **place(store), **arguments})
        assert not list(store.list("")), arguments


def test_outside_a_replica_the_missing_arguments_are_named() -> None:
    with pytest.raises(DiLoCoError, match="needs the arguments store, run_id, rank and world_size"):
        open_diloco(nn.Linear(2, 2), rank=0)
