"""Tests rules about counting, copies, leaving and snapshots with the real training state.

All other tests once passed although these rules were removed.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from support.training import PLAIN, adam, leave, next_process, nudge, place
from torch import nn

from diloco import DiLoCo
from diloco.outer import open_diloco
from diloco.rendezvous.claims import _claimed
from diloco.rendezvous.envelope import UNSIGNED
from diloco.rendezvous.frames import Seal, SealedReplica
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.round import Limits
from diloco.rendezvous.training_state import Verdict
from diloco.testing import run_replicas
from executors.store import MemoryStore
from executors.store.faulty import FaultyStore

BLOCK_ELEMENTS = 16
NO_HURRY_S = 1e6
"""Limits with which no replica takes over the work of another one."""
SHARDED = Limits(small_bytes=0, block_elements=BLOCK_ELEMENTS, takeover_after_s=NO_HURRY_S, grace_s=NO_HURRY_S)
KEYS = Keys("test", "main")


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


def zeros(n_blocks: int = 4) -> nn.Linear:
    """Return a model of several blocks whose values show everything that was done."""
    model = nn.Linear(n_blocks * BLOCK_ELEMENTS, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def values_in(tensor: torch.Tensor) -> list[float]:
    return sorted(set(tensor.flatten().tolist()))


# -- work of another copy of a rank -----------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["carry", "drop"])
def test_work_that_another_copy_s_replaces_is_not_in_the_live_parameters_any_more(late: Any) -> None:
    store = MemoryStore()
    model = zeros()
    diloco = open_diloco(model, inner_steps=1, late=late, **PLAIN, **place(store))
    nudge(model, 1.0)
    mean = np.full(model.weight.numel(), -3.0, np.float32)  # a pseudo-gradient is anchor - live
    other = Seal({0: SealedReplica("another", 0, 1.0, "d" * 32)}, diloco._model_state.digest(0), 0, mean.tobytes())
    store.put_if_absent(KEYS.seal(0), other.data("", UNSIGNED))
    report = diloco.step()
    assert report is not None
    assert not report.counted
    assert values_in(model.weight) == values_in(diloco.anchor()["weight"]) == [3.0]
    leave(diloco)


def payload(value: float) -> memoryview:
    return np.full(zeros().weight.numel(), value, np.float32).data.cast("B")


def test_dropping_a_part_of_the_work_keeps_the_other_part() -> None:
    model = zeros()
    diloco = open_diloco(model, inner_steps=1, **PLAIN, **place())
    nudge(model, 4.0)
    diloco._model_state.hold(0, is_early=True)
    nudge(model, 1.0)
    diloco._model_state.apply(0, [payload(-3.0)], Verdict.DROPPED, None, partly=True)
    diloco._model_state.merge()
    assert values_in(diloco.anchor()["weight"]) == [3.0]
    assert values_in(model.weight) == [3.0 + 1.0]
    leave(diloco)


def test_the_part_of_restored_work_that_no_mean_contains_stays() -> None:
    verdicts: list[tuple[Verdict | None, float | None]] = [
        (None, 1.0), (Verdict.KEPT, 1.0), (Verdict.COUNTED, None), (Verdict.DROPPED, 0.0),
    ]  # fmt: skip
    for (verdict, stays), mix in itertools.product(verdicts, (0.0, 0.5)):
        model = zeros()
        diloco = open_diloco(model, inner_steps=1, mix=mix, **PLAIN, **place())
        nudge(model, 2.0)
        diloco._model_state.resume(diloco._model_state.progress(), [verdict])
        assert values_in(model.weight) == [2.0 * (mix if stays is None else stays)], (verdict, mix)
        leave(diloco)


def test_work_that_a_seal_counted_after_a_state_was_saved_does_not_return_in_the_next_attempt() -> None:
    died, gone_on, was_back = threading.Event(), threading.Event(), threading.Event()
    limits = Limits(grace_s=0.05, takeover_after_s=0.01)
    options: dict[str, Any] = {"inner_steps": 4, "fragments": 2, "snapshot_every": 2, "limits": limits, **PLAIN}
    options["same_data"] = "allow"

    def begin(where: Mapping[str, Any]) -> tuple[nn.Module, DiLoCo]:
        model = nn.Sequential(zeros(1), zeros(1))
        diloco = open_diloco(model, **options, **where)
        diloco.attach_state("data", torch.Generator())
        return model, diloco

    def train_until(position: int, model: nn.Module, diloco: DiLoCo) -> None:
        while diloco.rounds < position:
            nudge(model, 1.0)
            diloco.step()
        diloco._workers.uploads.finish()

    def lasting(where: Mapping[str, Any]) -> None:
        model, diloco = begin(where)
        train_until(3, model, diloco)
        died.wait()
        train_until(9, model, diloco)
        gone_on.set()
        was_back.wait()
        leave(diloco)

    def dying(where: Mapping[str, Any]) -> None:
        train_until(3, *begin(where))
        del _claimed["memory://", "test", 0, os.getpid()]  # from here on, the next attempt counts as another process
        died.set()
        gone_on.wait()
        model, diloco = begin(where)
        kept = diloco._attached.kept
        assert kept is not None
        assert kept.position == 2  # before the entry that counted the first fragment's work of that time
        assert values_in(kept.progress(diloco._model_state.sizes())[0]) == [-2.0]
        assert diloco.rounds == 9
        for name, anchor in diloco.anchor().items():
            assert torch.equal(model.get_parameter(name), anchor), f"{name}: work is there that was counted"
        leave(diloco)

    def body(where: Mapping[str, Any]) -> None:
        try:
            (lasting if where["rank"] else dying)(where)
        finally:
            for event in (died, gone_on, was_back) if not where["rank"] else (gone_on,):
                event.set()

    store = MemoryStore()
    run_replicas(2, body, store=store)
    seals = [Seal.parse(store.get(KEYS.seal(entry)), "", UNSIGNED).replicas for entry in range(9)]
    assert [set(members) for members in seals] == [{0, 1}] * 3 + [{1}] * 6


# -- leaving -----------------------------------------------------------------------------------------------------------


def test_close_applies_the_round_in_flight() -> None:
    def body(where: Mapping[str, Any]) -> tuple[int, float]:
        model = zeros()
        options: dict[str, Any] = {"inner_steps": 4, "overlap_steps": 2, "allow_no_rounds": True, **PLAIN}
        diloco = open_diloco(model, **options, **where, limits=Limits(grace_s=NO_HURRY_S))
        for _ in range(2):
            nudge(model, 1.0 + where["rank"])
            diloco.step()
        assert diloco.rounds == 0
        diloco.close()
        return diloco.rounds, diloco.anchor()["weight"].mean().item()

    assert run_replicas(2, body) == [(1, 3.0)] * 2


def test_a_bye_whose_first_writes_fail_is_written_again() -> None:
    store = FaultyStore(MemoryStore(), seed=0)
    for nth in (1, 2, 3):
        store.fail_at("put", key="*/bye/*", count=nth, action="error")
    open_diloco(zeros(), **place(store)).close()
    assert len(store.log) == 3
    assert [entry.key for entry in store.list("test/diloco/main/bye/")] == [KEYS.bye(0, 0)]


# -- snapshots ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer_optimizer", "flipped"),
    [(None, None), (None, "before it is sent"), (None, "after it is sent"), (adam, None), (adam, "after it is sent")],
)
def test_a_bit_that_flips_between_an_outer_step_and_the_copy_of_its_result_is_in_no_snapshot(
    outer_optimizer: Any, flipped: str | None
) -> None:
    store = FaultyStore(MemoryStore(), seed=0)
    model = zeros()
    diloco = open_diloco(model, inner_steps=1, snapshot_every=1, outer_optimizer=outer_optimizer, **place(store))

    def flip() -> None:
        diloco._model_state.anchors[0].view(torch.int32)[5] ^= 1 << 20

    if flipped == "after it is sent":
        store.fail_at("put_if_absent", key="*/r2/contribution/0", after=flip)
    for entry in range(3):
        nudge(model, 1.0)
        if flipped == "before it is sent" and entry == 2:
            flip()
        diloco.step()
        diloco._workers.uploads.finish()  # a replica that still writes a snapshot begins no other
    pointers = sorted(entry.key for entry in store.list("test/diloco/main/snapshot/"))
    assert pointers == [KEYS.snapshot(entry) for entry in range(3 if flipped is None else 2)]
    leave(diloco)


def test_a_checkpoint_with_an_outer_optimizer_stays_as_it_was() -> None:
    next_process()
    model = nn.Linear(2, 2)
    with open_diloco(model, inner_steps=1, outer_optimizer=adam, **place()) as diloco:

        def train(rounds: int) -> None:
            for _ in range(rounds):
                nudge(model, 0.1)
                diloco.step()

        def moment(state: dict[str, Any]) -> list[float]:
            values: list[float] = state["outer"][0]["state"][0]["exp_avg"].flatten().tolist()
            return values

        train(2)
        state = diloco.state_dict()
        taken = moment(state)
        train(2)
        assert moment(state) == taken, "the checkpoint shares no tensor with the optimizer"
        diloco.load_state_dict(state)
        train(2)
        assert moment(state) == taken, "the checkpoint shares no tensor with the optimizer after it was loaded"
