"""A replica that is asked to end, and the progress of a training that its supervisor sees."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.training import nudge
from torch import nn

from diloco import DiLoCo
from executors.replica import Replica, set_current_replica
from executors.replica.shared_page import STEPS, SharedPage
from executors.store import MemoryStore


@pytest.fixture(autouse=True)
def _no_replica_is_left() -> Iterator[None]:
    yield
    set_current_replica(None)


class Training:
    """An attempt of the first replica of a run, with an attached optimizer, and rounds of four steps."""

    def __init__(self, store: MemoryStore, attempt: int = 0, world_size: int = 1, **options: Any) -> None:
        self.page = SharedPage()
        replica = Replica(0, world_size, "run", attempt, store.url, page=self.page, claimed_nonce=f"nonce-{attempt}")
        replica.store = store
        store.put(replica.key("started.json"), f'{{"nonce": "{replica.nonce}"}}'.encode())
        set_current_replica(replica)
        self.replica = replica
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.diloco = DiLoCo(self.model, inner_steps=4, snapshot_every=100, **options)
        self.diloco.attach_state("optimizer", self.optimizer)

    def step(self) -> None:
        nudge(self.model, 0.1)
        self.model.weight.grad = torch.ones_like(self.model.weight)
        self.optimizer.step()
        self.diloco.step()

    @property
    def inner_moment(self) -> float:
        return float(self.optimizer.state[self.model.weight]["exp_avg"][0, 0])


def test_each_step_is_a_mark_and_a_round_that_counts_its_work_is_kept() -> None:
    store = MemoryStore("marks")
    training = Training(store)
    page = training.page
    assert (page.progress_marks, page.saved_marks, page.section) == (0, 0, STEPS)
    for _ in range(9):
        training.step()
    assert (page.progress_marks, page.saved_marks, page.section) == (9 + 2, 2, STEPS)
    assert page.reached == {"round": 2.0, "step": 9.0}, "DiLoCo reports the step if the script does not"
    assert set(page._rows) == {STEPS, "first anchor", "round"}
    training.diloco._close(in_order=False)
    again = Training(store, attempt=1)
    assert (again.diloco.rounds, again.page.progress_marks, again.page.saved_marks) == (2, 0, 0), (
        "rounds that were only caught up with are no marks"
    )
    again.diloco._close(in_order=False)


def test_a_notice_saves_the_attached_state_and_the_work_since_the_last_round() -> None:
    store = MemoryStore("notice")
    training = Training(store)
    for _ in range(6):
        training.step()
    training.page.announce(time.monotonic() + 25, 15)
    with pytest.raises(SystemExit) as left:
        training.step()
    assert left.value.code == 143
    assert [entry.key for entry in store.list("run/diloco/main/") if "/bye/" in entry.key]

    following = Training(store, attempt=1)
    assert following.diloco.rounds == 1
    assert following.inner_moment == training.inner_moment
    assert torch.allclose(following.model.weight, training.model.weight, atol=1e-6)
    following.diloco._close(in_order=False)


def test_a_notice_saves_the_attached_state_of_each_diloco_of_the_process() -> None:
    store = MemoryStore("two models")

    def begin(attempt: int) -> tuple[Training, DiLoCo, torch.optim.Optimizer]:
        training, other = Training(store, attempt), nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(other.parameters(), 0.1)
        another = DiLoCo(other, inner_steps=4, snapshot_every=100, name="another")
        another.attach_state("optimizer", optimizer)
        return training, another, optimizer

    def step(training: Training, another: DiLoCo, optimizer: torch.optim.Optimizer) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        training.step()
        another.step()

    begun = begin(0)
    for _ in range(6):
        step(*begun)
    begun[0].page.announce(time.monotonic() + 25, 15)
    with pytest.raises(SystemExit):
        step(*begun)
    following, another, optimizer = begin(1)
    assert (following.diloco.rounds, another.rounds) == (1, 1)
    assert following.inner_moment == begun[0].inner_moment
    kept, left = ([state["exp_avg"] for state in each.state.values()] for each in (optimizer, begun[2]))
    assert all(torch.equal(one, two) for one, two in zip(kept, left, strict=True))
    for diloco in (following.diloco, another):
        diloco._close(in_order=False)


@pytest.mark.parametrize("wire", ["fp32", "int8"])
@pytest.mark.parametrize("merge", ["anchor", "carry"])
def test_a_notice_while_work_is_in_flight_keeps_all_of_it(merge: str, wire: str) -> None:
    """The other replica never arrives."""
    store = MemoryStore(f"in flight {merge} {wire}")
    options: dict[str, Any] = {"world_size": 2, "overlap_steps": 2, "merge": merge, "wire": wire}
    training = Training(store, **options)
    for _ in range(3):
        training.step()
    training.page.announce(time.monotonic() + 25, 15)
    with pytest.raises(SystemExit):
        training.step()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rounds of")]
    assert [entry.key for entry in store.list("run/diloco/main/") if "/bye/" in entry.key]

    following = Training(store, attempt=1, **options)
    assert following.diloco.rounds == 0
    assert following.inner_moment == training.inner_moment
    assert torch.allclose(following.model.weight, training.model.weight, atol=1e-6)
    following.diloco._close(in_order=False)


@pytest.mark.parametrize("options", [{}, {"overlap_steps": 2}, {"background": True}], ids=str)
def test_a_stop_lets_a_replica_have_its_next_round(options: dict[str, Any]) -> None:
    store = MemoryStore(f"stop {options}")
    training = Training(store, **options)
    for _ in range(2):
        training.step()
    training.page.announce(time.monotonic() + 600)
    training.step()
    with pytest.raises(SystemExit):
        training.step()
    assert training.diloco.rounds == 1
    anchor = training.diloco.anchor()
    following = Training(store, attempt=1, **options)
    assert following.inner_moment == training.inner_moment
    assert all(torch.equal(values, anchor[name]) for name, values in following.diloco.anchor().items())
    following.diloco._close(in_order=False)
