"""A run that continues from the newest complete snapshot of another run."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import decoder
from support.records import read_json
from support.training import nudge
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from diloco import DiLoCo
from executors import LocalProcessExecutor, attach, current_replica, launch
from executors.replica import Replica, set_current_replica
from executors.run.resume import resume
from executors.run.run import view_of
from executors.settings import Settings
from executors.store import MemoryStore
from executors.store.records import to_bytes


@pytest.fixture(autouse=True)
def _no_replica_is_left() -> Iterator[None]:
    yield
    set_current_replica(None)


class Training:
    """A single replica of one run, with an attached optimizer and schedule."""

    def __init__(self, store: MemoryStore, run_id: str, continues: str | None = None, attempt: int = 0) -> None:
        replica = Replica(rank=0, world_size=1, run_id=run_id, attempt=attempt, rendezvous=store.url)
        record = SimpleNamespace(continues=continues, key_id=None, settings=Settings(n=1))
        replica.__dict__ |= {"store": store, "record": record, "claimed_nonce": f"{run_id}-{attempt}"}
        store.put(replica.key("started.json"), f'{{"nonce": "{replica.nonce}"}}'.encode())
        set_current_replica(replica)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        options: dict[str, Any] = {"inner_steps": 2, "total_steps": 80, "snapshot_every": 3, "fragments": 2}
        self.diloco = DiLoCo(self.model_of_two(), **options)
        self.diloco.attach_state("optimizer", self.optimizer)
        self.diloco.attach_state("schedule", self.schedule, follow=True)

    def model_of_two(self) -> nn.Module:
        return nn.Sequential(self.model, nn.Linear(1, 1))

    def train_until(self, rounds: int) -> Training:
        while self.diloco.rounds < rounds:
            nudge(self.model, 0.1)
            self.model.weight.grad = torch.ones_like(self.model.weight)
            self.optimizer.step()
            self.diloco.step()
            self.diloco._workers.uploads.finish()
        return self

    def die(self) -> None:
        self.diloco._close(in_order=False)

    @property
    def inner_moment(self) -> float:
        return float(self.optimizer.state[self.model.weight]["exp_avg"][0, 0])


def test_the_new_run_begins_with_the_anchor_momentum_and_attached_state_of_the_snapshot() -> None:
    store = MemoryStore("going on")
    at_nine = Training(store, "old").train_until(9)
    anchor, moment = at_nine.diloco.anchor(), at_nine.inner_moment
    outer = [outer.digest() for outer in at_nine.diloco._model_state.anchor.outer]
    at_nine.train_until(11).die()

    new = Training(store, "new", continues="old")
    assert (new.diloco.rounds, new.diloco.inner_step, new.schedule.last_epoch) == (9, 9, 9)
    assert all(torch.equal(values, anchor[name]) for name, values in new.diloco.anchor().items())
    assert [outer.digest() for outer in new.diloco._model_state.anchor.outer] == outer
    assert new.inner_moment == moment
    assert not [entry.key for entry in store.list("new/diloco/main/seal/")]
    new.train_until(10).die()
    for entry in list(store.list("old/")):
        store.delete(entry.key)  # not needed any more

    back = Training(store, "new", attempt=1)
    assert back.diloco.rounds == 10, "the replica died before the first snapshot of the new run"
    back.train_until(16).die()
    again = Training(store, "new", attempt=2)
    assert again.diloco.rounds == 16
    again.train_until(81)
    assert again.diloco.inner_step == 80
    again.diloco.close()
    assert not [entry.key for entry in store.list("new/diloco/main/part/0/")], (
        "the first state is deleted like any other snapshot"
    )


def say_what_it_continues() -> str | None:
    """Write another value into `run.json`, and return the run that this replica continues."""
    replica = current_replica()
    key = f"{replica.run_id}/run.json"
    replica.store.put(key, to_bytes({**read_json(replica.store, key), "continues": "evil"}))
    return replica.continues


def test_a_signed_run_continues_from_the_run_that_its_task_names_even_if_run_json_differs() -> None:
    old = launch(LocalProcessExecutor(), say_what_it_continues, 1, signed=True, run_id="old")
    assert old.results() == [None]
    view_of(old).store.put(
        "old/run.json", to_bytes({**read_json(view_of(old).store, "old/run.json"), "continues": None})
    )
    assert resume(attach("old"), from_snapshot=True).results() == ["old"]


def test_a_run_may_continue_from_one_that_continued_from_another() -> None:
    store = MemoryStore("going on twice")
    Training(store, "one").train_until(8).die()
    Training(store, "two", continues="one").train_until(11).die()
    three = Training(store, "three", continues="two")
    assert three.diloco.rounds == 9
    three.train_until(14).die()
    four = Training(store, "four", continues="three")
    assert four.diloco.rounds == 12
    four.die()


class Keeping(MemoryStore):
    """A store that deletes nothing."""

    def delete(self, key: str) -> None:
        pass


def test_a_run_that_continues_from_a_snapshot_is_read_by_the_decoder() -> None:
    store = Keeping("state to be read")
    Training(store, "old").train_until(11).die()
    new = Training(store, "new", continues="old").train_until(15)
    anchor = new.diloco.anchor()
    new.die()
    prefix = "new/diloco/main/"
    objects = {entry.key.removeprefix(prefix): bytes(store.get(entry.key)) for entry in store.list(prefix)}
    run = decoder.Run(objects)
    assert any(momentum.any() for momentum in run.momenta)
    assert list(run) == [*range(9, 15)]
    for fragment in range(2):
        for name, values in run.anchor(fragment).items():
            assert values.tobytes() == anchor[name].numpy().tobytes()
    fields = {*decoder.frame(objects["own/0/12/0/record"], "", decoder.UNSIGNED).head}
    assert fields == {"rank", "attempt", "position", "steps", "uncounted_since", "digest"}
