"""A replica with a Trainer of transformers that starts again continues at the run's step, with any checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_trainers import INNER, ITEMS, STEPS, WARNINGS, Killed, Stream, trainer
from support.training import next_process

from executors.replica import Replica, set_current_replica
from executors.replica.shared_page import SharedPage
from executors.store import MemoryStore

pytestmark = WARNINGS


@pytest.fixture(autouse=True)
def _a_replica() -> Iterator[None]:
    next_process()
    # otherwise each test warns that it is not a replica
    set_current_replica(Replica(0, 1, "another", 0, "memory://hf"))
    yield
    set_current_replica(None)


LOADERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "shuffled, over several epochs": (ITEMS, {}),
    "gradients of two batches": (ITEMS[:24], {"gradient_accumulation_steps": 2, "max_steps": 16}),
    "gradients of four batches, and of one at an epoch's end": (ITEMS, {"gradient_accumulation_steps": 4}),
    "a stream, over several passes": (Stream(), {}),
}


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("dies_at", [9, 14])
def test_a_replica_that_comes_back_has_its_optimizer_schedule_data_and_step(
    tmp_path: Path, kind: str, dies_at: int
) -> None:
    data, more = LOADERS[kind]
    calm = trainer(tmp_path, MemoryStore(), data=data, **more)
    calm.train()
    next_process()
    store = MemoryStore()
    dying = trainer(tmp_path, store, data=data, dies_at=dies_at, **more)
    with pytest.raises(Killed):
        dying.train()
    next_process()
    back = trainer(tmp_path, store, data=data, **more)
    back.train()
    assert back.state.global_step == calm.state.global_step
    if "epoch's end" in kind:  # the order of the items differs in the epoch in which the replica came back
        return
    batch = 2 * more.get("gradient_accumulation_steps", 1)
    assert dying.model.seen[: dies_at // INNER * INNER * batch] + back.model.seen == calm.model.seen
    if "stream" not in kind:
        assert back.state.epoch == pytest.approx(calm.state.epoch)
    assert back.optimizer.state_dict()["state"][0]["step"] == calm.optimizer.state_dict()["state"][0]["step"]
    logged = [
        [(row["learning_rate"], pytest.approx(row["loss"])) for row in each.state.log_history if "loss" in row]
        for each in (calm, back)
    ]
    assert logged[0][-len(logged[1]) :] == logged[1]
    own = [row["loss"] for row in back.state.log_history if "loss" in row]
    assert back.state.log_history[-1]["train_loss"] == pytest.approx(sum(own) / len(own)), (
        "the average loss counts only the replica's own steps"
    )
    for name, values in calm.model.state_dict().items():
        assert torch.equal(back.model.state_dict()[name], values), name


def test_a_rank_that_comes_back_after_the_end_ends_with_the_anchor(tmp_path: Path) -> None:
    store = MemoryStore()
    first = trainer(tmp_path, store)
    first.train()
    next_process()
    late = trainer(tmp_path, store)
    late.train()
    assert late.state.global_step == STEPS
    for name, values in first.model.state_dict().items():
        assert torch.equal(late.model.state_dict()[name], values), name


def test_a_run_may_begin_from_a_checkpoint_of_the_trainer(tmp_path: Path) -> None:
    first = trainer(tmp_path, MemoryStore(), max_steps=8, save_strategy="steps", save_steps=8)
    first.train()
    next_process()
    second = trainer(tmp_path, MemoryStore())
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert (second.state.global_step, second.ours.diloco.rounds) == (STEPS, (STEPS - 8) // INNER)
    steps = second.optimizer.state_dict()["state"][0]["step"]
    assert steps == STEPS


@pytest.mark.parametrize(("at", "again"), [(8, 8), (8, None), (8, 16), (13, 13), (16, 16)])  # an epoch has 13 updates
def test_a_replica_of_a_run_that_began_from_a_checkpoint_comes_back(tmp_path: Path, at: int, again: int | None) -> None:
    """The replica gets that checkpoint again, or none, or a checkpoint that it has written itself."""
    steps = at + 16
    first = trainer(tmp_path, MemoryStore(), max_steps=at, save_strategy="steps", save_steps=at)
    first.train()
    begins: dict[str, Any] = {"resume_from_checkpoint": str(tmp_path / f"checkpoint-{at}")}
    next_process()
    calm = trainer(tmp_path, MemoryStore(), max_steps=steps)
    calm.train(**begins)
    next_process()
    store = MemoryStore()
    died = trainer(tmp_path, store, dies_at=at + 10, max_steps=steps, save_strategy="steps", save_steps=at)
    with pytest.raises(Killed):
        died.train(**begins)
    next_process()
    set_current_replica(Replica(0, 1, "another", 1, "memory://hf"))
    back = trainer(tmp_path, store, max_steps=steps)
    back.train(resume_from_checkpoint=None if again is None else str(tmp_path / f"checkpoint-{again}"))
    assert (back.state.global_step, back.ours.diloco.rounds) == (steps, 16 // INNER)
    assert back.optimizer.state_dict()["state"][0]["step"] == steps
    assert back.lr_scheduler.last_epoch == steps
    assert died.model.seen[: 8 * 2] + back.model.seen == calm.model.seen, (
        "the replica continues with the data after its second round"
    )


def test_after_a_notice_the_schedule_continues_once_the_run_is_where_it_was(tmp_path: Path) -> None:
    calm = trainer(tmp_path, MemoryStore(), lr_scheduler_type="linear")
    calm.train()
    store = MemoryStore("noticed")
    for attempt, notice_at in enumerate((6, 10, None)):
        next_process()
        replica = Replica(0, 1, "run", attempt, store.url, page=SharedPage(), claimed_nonce=f"nonce-{attempt}")
        replica.__dict__["store"] = store
        store.put(replica.key("started.json"), f'{{"nonce": "{replica.nonce}"}}'.encode())
        set_current_replica(replica)
        one = trainer(tmp_path, None, notice_at=notice_at, lr_scheduler_type="linear")
        if notice_at is None:
            one.train()
            continue
        with pytest.raises(SystemExit):
            one.train()
    assert one.lr_scheduler.last_epoch == one.state.global_step == STEPS
    assert one.watch.rates == {step: calm.watch.rates[max(step, 10)] for step in range(8, STEPS)}


@pytest.mark.parametrize(("dies_at", "ends_at"), [(29, 39), (27, 37)])
def test_a_rank_that_comes_back_with_its_checkpoint_of_a_later_epoch_trains_to_the_end(
    tmp_path: Path, dies_at: int, ends_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank that does not reach the end logs that. Its trainer has only the epochs after the checkpoint."""
    three_epochs: dict[str, Any] = {"max_steps": 39, "save_strategy": "steps", "save_steps": 26}
    store = MemoryStore()
    with pytest.raises(Killed):
        trainer(tmp_path, store, {"snapshot_every": 5}, dies_at=dies_at, **three_epochs).train()
    next_process()
    set_current_replica(Replica(0, 1, "another", 1, "memory://hf"))
    back = trainer(tmp_path, store, {"snapshot_every": 5}, **three_epochs)
    back.train(resume_from_checkpoint=True)
    assert back.state.global_step == ends_at
    said = [line for line in caplog.messages if "The trainer ended by itself at step 37 of 39 planned steps." in line]
    assert len(said) == (ends_at < 39)
