"""Attached state is saved so often that a resumed replica has lost little, and old states do not accumulate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from support.training import PLAIN, leave, next_process, place
from torch import nn

from diloco import DiLoCo
from diloco.testing import run_replicas
from executors.store import MemoryStore


def positions(store: MemoryStore, rank: int = 0) -> list[int]:
    """Return the rounds after which the states in a store were saved."""
    matches = (re.search(rf"/own/0*{rank}/(\d+)/\d+/record$", entry.key) for entry in store.list("test/"))
    return sorted({int(match[1]) for match in matches if match})


def train(store: MemoryStore, steps: int, *, keeps: Any = None, **options: Any) -> tuple[DiLoCo, torch.optim.Optimizer]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    diloco = DiLoCo(model, inner_steps=2, **{**PLAIN, **options}, **place(store))
    diloco.attach_state("optimizer", optimizer)
    for _ in range(steps):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        diloco.step()
        diloco._workers.uploads.finish()
    return diloco, optimizer


def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every save count as cheap, also on a busy machine."""
    monkeypatch.setattr("diloco.save_schedule.MOST_SHARE", float("inf"))
    monkeypatch.setattr("diloco.save_schedule.MOST_UPLOAD_SHARE", float("inf"))


def test_the_state_is_kept_after_the_first_round() -> None:
    store = MemoryStore()
    diloco, _ = train(store, 2)
    assert positions(store) == [1]
    leave(diloco)


def test_a_cheap_state_is_that_of_the_last_round_and_older_copies_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    store = MemoryStore()
    diloco, _ = train(store, 26)
    assert positions(store) == [1, 10, 12, 13]
    leave(diloco)


@pytest.mark.parametrize("wire", ["fp32", "int8"])
def test_a_replica_that_comes_back_continues_with_the_optimizer_of_the_last_round(
    wire: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    always(monkeypatch)
    store = MemoryStore()
    diloco, optimizer = train(store, 7, wire=wire)
    steps = [int(state["step"]) for state in optimizer.state.values()]
    assert steps == [7, 7]
    is_open = diloco  # keeps the object alive, so that it is not closed, as after SIGKILL
    next_process()
    again, restored = train(store, 0, wire=wire)
    assert [int(state["step"]) for state in restored.state.values()] == [6, 6]
    assert again.inner_step == 6
    leave(again)
    del is_open


def test_a_run_that_continues_from_a_snapshot_finds_the_state_of_its_period(monkeypatch: pytest.MonkeyPatch) -> None:
    always(monkeypatch)
    store = MemoryStore()
    diloco, _ = train(store, 2 * 13, snapshot_every=5)
    assert 10 in positions(store)
    leave(diloco)


def test_work_that_no_round_has_counted_comes_back_with_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A saved state lacks the live work only if all of it was counted."""
    always(monkeypatch)

    def body(where: Mapping[str, Any]) -> tuple[bool, bool]:
        model = nn.Linear(4, 1)
        diloco = DiLoCo(model, inner_steps=2, wire="int8", **PLAIN, **where)
        diloco.attach_state("optimizer", torch.optim.SGD(model.parameters(), 0.1))
        with torch.no_grad():
            for _ in range(4):
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.01)
                diloco.step()
        away = any(bool(part.any()) for part in diloco._model_state.progress())
        kept = diloco._model_state.leaves_no_work
        leave(diloco)
        return away, kept

    for away, kept in run_replicas(2, body):
        assert away
        assert not kept
