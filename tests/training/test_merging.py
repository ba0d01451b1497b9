"""The live parameters after a mean was applied in the background: by the formulas, and bit for bit."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.training import PLAIN, leave, next_process, nudge, place
from torch import nn

from diloco import DiLoCo
from diloco.outer import open_diloco
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.frames import Seal, SealedReplica
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.round import Limits
from diloco.rendezvous.training_state import Verdict
from diloco.testing import run_replicas
from diloco.wires.wire import decoded
from executors.store import MemoryStore

Floats = NDArray[np.float32]
N, REPLICAS = 600, 3
LIMITS = Limits(grace_s=1e6, block_elements=512)


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


def steps_of(rank: int, n: int, size: int = N) -> Floats:
    """Return fixed inner steps, which depend on no data."""
    return np.random.default_rng(rank).normal(size=(n, size), scale=0.1).astype(np.float32)


def as_decoded(values: Floats, wire: str) -> Floats:
    """Return the values that other replicas decode: the nearest of the levels up to the largest value of a group."""
    if wire == "fp32":
        return values
    if wire == "top8":
        return np.concatenate([largest_eighth(part) for part in np.split(values, [LIMITS.block_elements])])
    size, most = {"int8": (256, np.float32(127)), "int4": (128, np.float32(7))}[wire]
    groups = np.split(values, range(size, len(values), size))
    tops = [np.abs(group).max() for group in groups]
    steps = [np.rint(group * (most / top)) * (top * (1 / most)) for group, top in zip(groups, tops, strict=True)]
    return np.concatenate(steps)


def largest_eighth(values: Floats) -> Floats:
    """Return the largest eighth of the values by their signs, times 1.5 of their mean magnitude. The rest is zeros."""
    chosen = np.argsort(-np.abs(values))[: -(-len(values) // 8)]
    out = np.zeros_like(values)
    out[chosen] = np.sign(values[chosen]) * np.float32(1.5 * np.abs(values[chosen]).mean())
    return out


def expected(
    n_steps: int, every: int, overlap: int, *, wire: str, merge: str, mix: float
) -> tuple[list[Floats], Floats]:
    """Return the live parameters of each replica, and the anchor, by the formulas. Means are encoded as fp32."""
    anchor = np.zeros(N, np.float32)
    moves = [steps_of(rank, n_steps) for rank in range(REPLICAS)]
    live = [np.zeros(N, np.float32) for _ in range(REPLICAS)]
    held: list[Floats] = []
    waiting = [np.zeros(N, np.float32) for _ in range(REPLICAS)]
    keeps, share = (0.9, 0.25) if wire == "top8" else (1.0, 1.0)
    for step in range(1, n_steps + 1):
        live = [values + move[step - 1] for values, move in zip(live, moves, strict=True)]
        if step % every == (every - overlap) % every:
            held = [values.copy() for values in live]
        if step % every == 0:
            work = [anchor - values + rest for values, rest in zip(held, waiting, strict=True)]
            sent = [as_decoded(each, wire) for each in work]
            after = anchor - np.mean(sent, axis=0)
            kept = [keeps * (each - part) for each, part in zip(work, sent, strict=True)]
            waiting = [(1 - share) * rest for rest in kept]
            if merge == "carry":
                new = [after - share * rest for rest in kept]
                live = [values - old + to for values, old, to in zip(live, held, new, strict=True)]
            else:
                live = [
                    mix * values + (1 - mix) * (after - share * rest) for values, rest in zip(live, kept, strict=True)
                ]
            anchor = after
    return live, anchor


@pytest.mark.parametrize("overlap", [0, 2, 4])
@pytest.mark.parametrize(
    ("merge", "mix"), [("carry", 0.0), ("anchor", 0.0), ("anchor", 0.25)], ids=["carry", "anchor", "mix"]
)
@pytest.mark.parametrize("wire", ["fp32", "int8", "int4", "top8"])
def test_live_parameters_follow_the_formula(wire: str, merge: str, mix: float, overlap: int) -> None:
    def body(where: Mapping[str, Any]) -> tuple[Floats, Floats]:
        model = nn.Linear(N, 1, bias=False)
        nn.init.zeros_(model.weight)
        options: dict[str, Any] = {"merge": merge, "mix": mix, "wire": wire, "mean_wire": "fp32", **PLAIN}
        diloco = open_diloco(model, inner_steps=5, overlap_steps=overlap, **options, **where, limits=LIMITS)
        for move in steps_of(where["rank"], 20):
            nudge(model, torch.from_numpy(move))
            report = diloco.step()
            if report is not None:
                assert report.stale_steps == overlap
                assert (report.wire_error is None) == (wire == "fp32")
                if report.wire_error is not None:
                    low, high = {"int8": (0.001, 0.02), "int4": (0.02, 0.3), "top8": (0.7, 0.9)}[wire]
                    assert low < report.wire_error < high
        assert diloco.rounds == 4
        leave(diloco)
        return model.weight.detach().numpy().copy()[0], diloco.anchor()["weight"].numpy()[0]

    live, anchor = expected(20, 5, overlap, wire=wire, merge=merge, mix=mix)
    for rank, (mine, mine_anchor) in enumerate(run_replicas(REPLICAS, body)):
        np.testing.assert_allclose(mine_anchor, anchor, rtol=0, atol=3e-6)
        np.testing.assert_allclose(mine, live[rank], rtol=0, atol=3e-6, err_msg=f"rank {rank}")


CASES: dict[str, dict[str, Any]] = {
    "without overlap": {},
    "without overlap, mixed": {"mix": 0.25},
    "without overlap, int8": {"wire": "int8", "fragments": 2},
    "overlap": {"overlap_steps": 3},
    "overlap, carry, int4": {"overlap_steps": 2, "merge": "carry", "wire": "int4"},
    "fragments, always under way": {"fragments": 2, "overlap_steps": 1, "merge": "carry", "wire": "int8"},
    "without overlap, top8": {"wire": "top8", "fragments": 2},
    "overlap, carry, top8": {"overlap_steps": 2, "merge": "carry", "wire": "top8"},
    "overlap, top8": {"overlap_steps": 2, "wire": "top8", "mix": 0.25},
    "to the end of a plan": {"total_steps": 19, "overlap_steps": 2, "mix": 0.5},
    "bf16": {"overlap_steps": 2, "merge": "carry", "dtype": torch.bfloat16},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.* in no average", "ignore:.*after the end of the run")
def test_the_thread_changes_no_bit(case: str) -> None:
    """Anchors and live parameters are equal at every step, whether the thread is fast or slow."""
    options = dict(CASES[case])
    dtype = options.pop("dtype", torch.float32)

    def trained(*, background: bool) -> list[list[bytes]]:
        def body(where: Mapping[str, Any]) -> list[bytes]:
            model = nn.Sequential(nn.Linear(30, 20), nn.Linear(20, 10)).to(dtype)
            for parameter in model.parameters():
                nn.init.constant_(parameter, 0.5)
            seen = []
            options_ = {"inner_steps": 4, **options}
            diloco = open_diloco(model, background=background, weight=1.0 + where["rank"], **options_, **where)
            for move in steps_of(where["rank"], 20, 1):
                nudge(model, torch.from_numpy(move).to(dtype))
                diloco.step()
                seen += [parameter.detach().float().numpy().tobytes() for parameter in model.parameters()]
            diloco.close()
            seen += [parameter.detach().float().numpy().tobytes() for parameter in model.parameters()]
            return [*seen, *[values.numpy().tobytes() for values in diloco.anchor().values()]]

        return run_replicas(2, body)

    first = trained(background=True)
    assert first[0][-1] == first[1][-1]
    assert trained(background=True) == first
    assert trained(background=False) == first


# -- work that is never counted ----------------------------------------------------------------------------------------


def leave_out(store: MemoryStore, diloco: DiLoCo, entries: Sequence[int]) -> None:
    """Seal entries with another rank's empty work, so that the anchor does not change."""
    mean = np.zeros(4, np.float32).tobytes()
    seal = Seal({1: SealedReplica("another", 0, 1.0, "d" * 32)}, diloco._model_state.digest(0), 0, mean)
    for entry in entries:
        store.put_if_absent(Keys("test", "main").seal(entry), seal.data("", UNSIGNED))


@pytest.mark.parametrize("carry_rounds", [1, 4, None])
@pytest.mark.parametrize("at_once", [True, False])
def test_work_that_waits_too_long_is_given_up_once_and_with_a_warning(
    carry_rounds: int | None, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    store, model = MemoryStore(), nn.Linear(4, 1, bias=False)
    nn.init.zeros_(model.weight)
    options: dict[str, Any] = {"inner_steps": 1, "carry_rounds": carry_rounds, "late": "carry", **PLAIN}
    diloco = open_diloco(model, **options, **place(store, world_size=2), limits=Limits(grace_s=1e6))
    nudge(model, 1.0)
    if at_once:
        leave_out(store, diloco, range(12))
        diloco.step()
    else:
        for entry in range(1 + (carry_rounds or 12)):
            leave_out(store, diloco, [entry])
            while diloco.rounds == entry:
                diloco.step()
    assert diloco.rounds > (carry_rounds or 11)
    warnings = [record.message for record in caplog.records if "dropped" in record.message]
    assert set(model.weight.flatten().tolist()) == {1.0 if carry_rounds is None else 0.0}
    assert len(warnings) == (carry_rounds is not None), warnings
    if carry_rounds is not None:
        rounds = f"{carry_rounds} round{'s' * (carry_rounds > 1)}"  # there is no warning of a slow replica
        (warning,) = warnings
        assert warning.endswith(
            f"dropped because no mean of {rounds} counted it: they arrived after the round was decided. "
            "Use a larger grace_s to wait for them."
        )
    leave(diloco)


def test_a_late_replica_that_sees_the_end_in_the_midst_of_a_step_is_at_the_run_s_last_step() -> None:
    """A schedule that follows the run is at the last step, too. A schedule may refuse a step beyond its end."""
    store, model = MemoryStore(), nn.Linear(4, 1, bias=False)
    options: dict[str, Any] = {"inner_steps": 2, "total_steps": 4, "carry_rounds": None, **PLAIN}
    diloco = open_diloco(model, **options, **place(store, world_size=2), limits=Limits(grace_s=1e6))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4)
    diloco.attach_state("optimizer", optimizer)
    diloco.attach_state("schedule", schedule, follow=True)
    for entry in range(2):
        leave_out(store, diloco, [entry])
        while diloco.rounds == entry:
            optimizer.step()
            diloco.step()
    assert (diloco.inner_step, diloco.progress, schedule.last_epoch) == (4, 1.0, 4)
    leave(diloco)


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("background", [False, True])
def test_work_for_a_skipped_entry_is_sent_again_with_the_next_entry(wire: str, background: bool) -> None:
    model = nn.Linear(4, 4, bias=False)
    nn.init.zeros_(model.weight)
    diloco = open_diloco(model, **PLAIN, **place(), inner_steps=2, wire=wire, background=background)
    state = diloco._model_state
    nudge(model, 1.0)
    state.hold(0, is_early=True)
    before = state.anchors_now()
    state.anchors[0] += 5.0  # as if a later snapshot was loaded
    state.follow(before, [Verdict.KEPT], partly=None)
    state.prepare_merge()
    state.merge()
    nudge(model, 1.0)
    state.hold(0, is_early=False)
    sent = [values.copy() for _, values in decoded(state.wire, [state.pack(1).kept], 16, LIMITS.block_elements)]
    assert np.concatenate(sent) == pytest.approx(-2.0)
    leave(diloco)


def test_steps_that_are_dropped_while_a_replica_starts_again_are_counted_and_explained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    store = MemoryStore()
    options: dict[str, Any] = {"inner_steps": 1, "carry_rounds": 1, "late": "carry", **PLAIN}
    limits = Limits(grace_s=1e6)
    leave(open_diloco(nn.Linear(4, 1, bias=False), **options, **place(store, world_size=2), limits=limits))
    next_process()
    model = nn.Linear(4, 1, bias=False)
    diloco = open_diloco(model, **options, **place(store, world_size=2), limits=limits)
    nudge(model, 1.0)
    leave_out(store, diloco, range(4))
    while diloco.rounds < 4:
        nudge(model, 1.0)
        diloco.step()
    (warning,) = [record.message for record in caplog.records if "dropped" in record.message][:1]
    assert "inner step" in warning
    assert warning.endswith("this replica was starting while the others continued. You need not do anything.")
    leave(diloco)
