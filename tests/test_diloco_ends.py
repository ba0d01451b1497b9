"""Stragglers, how a planned run ends, and what a DiLoCo refuses before it begins."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from diloco import DiLoCo
from diloco.errors import DiLoCoError
from diloco.keys import Keys
from diloco.rounds import Pace
from diloco.testing import run_replicas
from executors.records import exists
from executors.store import MemoryStore
from executors.testing import eventually

PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}


def nudge(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


def test_a_straggler_fulfils_the_plan_and_adds_no_round_of_its_own() -> None:
    others_left = threading.Event()

    def body(where: Mapping[str, Any]) -> tuple[int, int, float, float]:
        late = where["rank"] == 0
        model = nn.Linear(1, 1, bias=False)
        pace = Pace(grace_s=0.05, patience_s=0.01)
        with DiLoCo(model, inner_steps=1, total_steps=40, outer_momentum=0.5, **where, _pace=pace) as diloco:
            if late:
                others_left.wait()
            while diloco.inner_step < 40:
                nudge(model, -1.0)
                diloco.step()
            anchor = diloco.anchor()["weight"].item()
        others_left.set()
        return diloco.rounds, diloco.inner_step, anchor, model.weight.item()

    late, early = run_replicas(2, body)
    assert late == early
    assert late[:2] == (40, 40)


def test_a_late_replica_is_in_phase_again_and_loses_nothing() -> None:
    early_done = threading.Event()

    def body(where: Mapping[str, Any]) -> tuple[float, int]:
        model = nn.Linear(1, 1, bias=False)
        late = where["rank"] == 1
        pace = Pace(grace_s=60.0 if late else 0.05, patience_s=0.01)
        with DiLoCo(model, inner_steps=1, total_steps=4, **PLAIN, **where, _pace=pace) as diloco:
            start = diloco.anchor()["weight"].item()
            if late:
                early_done.wait()
                nudge(model, 4.0)
                report = diloco.step()  # catches up, presents its work for the open round, and does not wait for it
                assert report is not None
                assert (report.round, report.counted, diloco.rounds) == (2, False, 3)
            else:
                for _ in range(3):
                    nudge(model, 1.0)
                    diloco.step()
                early_done.set()
                keys = Keys(where["run_id"], "main")
                eventually(lambda: exists(where["store"], keys.contribution(3, 1)), "the late one has sent its work")
            report = diloco.step()  # together: the mean of 0 and 4
            assert report is not None
            assert report.ranks == (0, 1)
            assert report.counted
            return diloco.anchor()["weight"].item() - start, diloco.inner_step

    (moved, steps), (late_moved, late_steps) = run_replicas(2, body)
    assert moved == late_moved == pytest.approx(3.0 + 2.0)
    assert steps == late_steps == 4


def where_of(store: MemoryStore) -> dict[str, Any]:
    return {"store": store, "run_id": "test", "rank": 0, "world_size": 1}


def test_a_second_diloco_of_the_same_name_is_refused_while_the_first_is_open() -> None:
    where = where_of(MemoryStore())
    with DiLoCo(nn.Linear(2, 2), **where):
        with pytest.raises(DiLoCoError, match=r"named 'main' is open in this replica already.*name="):
            DiLoCo(nn.Linear(2, 2), **where)
        with DiLoCo(nn.Linear(3, 3), name="other", **where):
            pass


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2, dtype=torch.complex64), "'weight' is torch.complex64; only real numbers"),
        (nn.Linear(2, 2, device="meta"), "'weight' is on the meta device"),
        ([nn.Parameter(torch.zeros(2))], "must be a torch.nn.Module, got a list"),
    ],
)
def test_what_cannot_be_averaged_is_refused_by_name(model: Any, message: str) -> None:
    store = MemoryStore()
    with pytest.raises(TypeError, match=message):
        DiLoCo(model, **where_of(store))
    assert not list(store.list("test/diloco/"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_quorum": 3}, "min_quorum must be at most the world size of 1"),
        ({"round_timeout_s": 0}, "round_timeout_s must be more than 0"),
        ({"final_average": "x"}, "final_average must be True or False"),
        ({"weight": -1}, "weight must be more than 0, got weight=-1"),
        ({"name": ""}, "name must be a word without '/'"),
    ],
)
def test_an_argument_that_cannot_work_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        DiLoCo(nn.Linear(2, 2), **where_of(MemoryStore()), **arguments)
