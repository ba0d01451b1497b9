"""A run with a trainer that is extended: the real trainers of transformers and Lightning train the longer run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import next_process

from diloco.errors import DiLoCoError
from executors.replica import Replica, set_current_replica
from executors.restarts.decision_log import DecisionLog
from executors.restarts.orders import order_policy
from executors.store import MemoryStore

FIRST, LONGER, INNER = 24, 40, 4
PLAIN: dict[str, Any] = {"inner_steps": INNER, "outer_lr": 1.0, "outer_momentum": 0.0}

pytestmark = pytest.mark.filterwarnings("ignore")  # both trainers print many hints


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    yield MemoryStore()
    set_current_replica(None)


def begin_attempt(store: MemoryStore, attempt: int) -> None:
    """Let this process be an attempt of the only replica of a run."""
    next_process()
    replica = Replica(0, 1, "run", attempt, store.url, claimed_nonce=f"nonce-{attempt}")
    replica.store = store
    store.put(replica.key("started.json"), f'{{"nonce": "nonce-{attempt}"}}'.encode())
    set_current_replica(replica)


def extend(store: MemoryStore, total_steps: int) -> None:
    order_policy(DecisionLog(store, "run"), totals={"total_steps": total_steps})


def train_hf(folder: Path, *, follows: bool = True, by_epochs: bool = False) -> tuple[Any, Any, list[float]]:
    """Train like a script without any code for extensions. Return trainer, callback and learning rates."""
    pytest.importorskip("transformers")
    from support.hf_trainers import ITEMS, Model, Watch, arguments
    from transformers import Trainer

    from diloco.trainers.hf import DiLoCoCallback, replica_arguments

    length: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2} if by_epochs else {"max_steps": FIRST}
    args = arguments(folder, **length)
    ours = DiLoCoCallback(**PLAIN)
    watch = Watch(ours)
    items = ITEMS[:24] if by_epochs else ITEMS
    made = Trainer(Model(), replica_arguments(args) if follows else args, train_dataset=items, callbacks=[ours, watch])
    made.train()
    return made, ours, [watch.rates[step] for step in sorted(watch.rates)]


@pytest.mark.parametrize("by_epochs", [False, True])
def test_the_trainer_of_transformers_trains_the_longer_run_with_a_schedule_for_it(
    store: MemoryStore, tmp_path: Path, by_epochs: bool
) -> None:
    begin_attempt(store, 0)
    first, _, rates = train_hf(tmp_path, by_epochs=by_epochs)
    assert (first.state.global_step, len(rates)) == (FIRST, FIRST)
    extend(store, LONGER)
    begin_attempt(store, 1)
    second, ours, rates = train_hf(tmp_path, by_epochs=by_epochs)
    assert (second.state.global_step, second.state.max_steps, ours.diloco.rounds) == (LONGER, LONGER, LONGER // INNER)
    assert len(second.model.seen) == 2 * (LONGER - FIRST)
    assert len(rates) == LONGER - FIRST
    assert rates[0] == 0.0, "the optimizer continues with the rate of its last step"
    assert 0.0 < rates[-1] < rates[1] < 0.05, "the rates follow the cosine of 40 steps, from step 24"
    anchor = ours.diloco.anchor()
    assert all(torch.equal(second.model.get_parameter(name), values) for name, values in anchor.items())


def test_a_trainer_of_transformers_with_its_own_arguments_gets_a_warning_that_explains_how_to_follow(
    store: MemoryStore, tmp_path: Path
) -> None:
    begin_attempt(store, 0)
    train_hf(tmp_path, follows=False)
    extend(store, LONGER)
    begin_attempt(store, 1)
    with pytest.raises(DiLoCoError, match=r"replica_arguments\(…\).* Nothing was trained"):
        train_hf(tmp_path, follows=False)


def train_lightning(folder: Path, *, by_epochs: bool = False, ordered_at: int | None = None) -> tuple[Any, Any, Any]:
    """Train like a script without any code for extensions. Return trainer, callback and module.

    Args:
        ordered_at: the step at which the extension is ordered, while this attempt trains.
    """
    lightning = pytest.importorskip("lightning.pytorch")

    from diloco.trainers.lightning import DiLoCoCallback
    from executors import current_replica

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(1, 1)
            self.planned = 0.0
            self.n_batches = 0

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.n_batches += 1
            if self.global_step == ordered_at:
                extend(current_replica().store, LONGER)  # type: ignore[arg-type]
            loss: torch.Tensor = self.linear(batch.float().unsqueeze(1)).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            self.planned = self.trainer.estimated_stepping_batches
            return torch.optim.AdamW(self.parameters(), 0.01)

    ours, module = DiLoCoCallback(**PLAIN), Module()
    length: dict[str, Any] = {"max_epochs": 2} if by_epochs else {"max_steps": FIRST}
    trainer = lightning.Trainer(
        accelerator="cpu", callbacks=[ours], enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, logger=False, default_root_dir=folder, **length,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.arange(24), batch_size=2))  # type: ignore[arg-type]
    return trainer, ours, module


@pytest.mark.parametrize("by_epochs", [False, True])
def test_the_trainer_of_lightning_trains_the_longer_run_and_plans_its_schedule_for_it(
    store: MemoryStore, tmp_path: Path, by_epochs: bool
) -> None:
    begin_attempt(store, 0)
    first, _, module = train_lightning(tmp_path, by_epochs=by_epochs)
    assert (first.global_step, module.planned) == (FIRST, FIRST)
    extend(store, LONGER)
    begin_attempt(store, 1)
    second, ours, module = train_lightning(tmp_path, by_epochs=by_epochs)
    assert (second.global_step, ours.diloco.rounds, ours.diloco.inner_step) == (LONGER, LONGER // INNER, LONGER)
    assert (module.planned, module.n_batches) == (LONGER, LONGER - FIRST)
    assert torch.equal(module.linear.weight.detach(), ours.diloco.anchor()["linear.weight"])


@pytest.mark.parametrize("by_epochs", [False, True])
def test_a_trainer_of_lightning_follows_an_extension_that_is_ordered_while_it_trains(
    store: MemoryStore, tmp_path: Path, by_epochs: bool
) -> None:
    begin_attempt(store, 0)
    trainer, ours, module = train_lightning(tmp_path, by_epochs=by_epochs, ordered_at=10)
    assert (trainer.global_step, module.n_batches, ours.diloco.inner_step) == (LONGER, LONGER, LONGER)
