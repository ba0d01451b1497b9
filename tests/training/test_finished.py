"""A supervisor sees the beginning and the end of training: after the end, a replica owes no progress."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.training import nudge
from torch import nn

from diloco import DiLoCo
from executors.replica import Replica, set_current_replica
from executors.replica.shared_page import SharedPage
from executors.store import MemoryStore


@pytest.fixture
def replica() -> Iterator[Replica]:
    store = MemoryStore("finished")
    found = Replica(0, 1, "run", 0, store.url, page=SharedPage(), claimed_nonce="nonce-finished")
    found.store = store
    store.put(found.key("started.json"), b'{"nonce": "nonce-finished"}')
    set_current_replica(found)
    yield found
    set_current_replica(None)


def diloco_of(**options: Any) -> tuple[nn.Module, DiLoCo]:
    model = nn.Linear(3, 1)
    return model, DiLoCo(model, inner_steps=2, outer_lr=1.0, outer_momentum=0.0, **options)


def train(model: nn.Module, diloco: DiLoCo, n: int) -> None:
    for _ in range(n):
        nudge(model, 0.1)
        diloco.step()


def page_of(replica: Replica) -> SharedPage:
    assert replica.page is not None
    return replica.page


def test_a_replica_owes_progress_from_its_first_diloco_to_the_end_of_its_last(replica: Replica) -> None:
    page = page_of(replica)
    assert (page.opened_at, page.is_finished) == (0.0, False)
    model, diloco = diloco_of()
    assert page.opened_at > 0
    train(model, diloco, 4)
    assert not page.is_finished
    diloco.close()
    assert page.is_finished


def test_a_mark_or_another_diloco_after_the_last_one_brings_the_limits_back(replica: Replica) -> None:
    page = page_of(replica)
    model, diloco = diloco_of()
    train(model, diloco, 2)
    diloco.close()
    replica.progress()
    assert not page.is_finished
    replica.finish_training()
    model, diloco = diloco_of(name="second")
    assert not page.is_finished
    train(model, diloco, 2)
    diloco.close()
    assert page.is_finished


def test_of_several_dilocos_the_last_one_decides(replica: Replica) -> None:
    page = page_of(replica)
    first, second = diloco_of(name="first"), diloco_of(name="second", total_steps=4)
    train(*first, 2)
    train(*second, 4)
    train(*first, 2)
    assert not page.is_finished, "the first DiLoCo has no planned end, and is open"
    first[1].close()
    assert page.is_finished, "the second DiLoCo has made its planned steps"
    second[1].close()
    assert page.is_finished


def test_the_planned_end_is_the_end_even_if_close_comes_later(replica: Replica) -> None:
    page = page_of(replica)
    model, diloco = diloco_of(total_steps=4)
    train(model, diloco, 3)
    assert not page.is_finished
    train(model, diloco, 1)
    assert page.is_finished, "the run is finished before close(), because an evaluation may follow"
    with pytest.warns(UserWarning, match="after the end of the run"):
        train(model, diloco, 1)
    assert page.is_finished, "steps after the planned end belong to no round"
    diloco.close()


def test_an_attempt_that_begins_after_the_planned_end_owes_nothing(replica: Replica) -> None:
    model, diloco = diloco_of(total_steps=4)
    train(model, diloco, 4)
    diloco.close()
    again = Replica(0, 1, "run", 1, replica.rendezvous, page=SharedPage(), claimed_nonce="nonce-again")
    again.store = replica.store
    again.store.put(again.key("started.json"), b'{"nonce": "nonce-again"}')
    set_current_replica(again)
    _, diloco = diloco_of(total_steps=4)
    assert page_of(again).is_finished
    assert page_of(again).progress_marks == 0
    diloco.close()
