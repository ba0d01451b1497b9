"""DiLoCo in the Trainer of Lightning, with the real Trainer. A replica dies here by an error."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import next_process, place
from torch import nn

from diloco import DiLoCo
from diloco.errors import DiLoCoError
from diloco.testing import run_replicas
from executors.replica import Replica, leave_process_group, set_current_replica
from executors.replica.shared_page import SharedPage
from executors.store import MemoryStore

lightning = pytest.importorskip("lightning.pytorch", reason="pip install 'serverless-replicas[lightning]'")
from diloco.trainers.lightning import DiLoCoCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning prints many hints
N_ITEMS, STEPS, INNER = 26, 24, 4


def replica_of(run_id: str, attempt: int = 0, **more: Any) -> Replica:
    return Replica(0, 1, run_id, attempt, "memory://lightning", **{"claimed_nonce": f"{run_id}-{attempt}", **more})


@pytest.fixture(autouse=True)
def _a_replica() -> Iterator[None]:
    next_process()
    set_current_replica(replica_of("another"))  # otherwise each test warns that it is not a replica
    yield
    set_current_replica(None)


class Killed(Exception):
    pass


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, dies_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.dies_at = dies_at
        self.seen: list[int] = []
        self.rates: dict[int, float] = {}
        self.validated: list[int] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if self.global_step == self.dies_at:
            raise Killed
        self.seen += batch.tolist()
        self.rates[self.global_step] = self.trainer.optimizers[0].param_groups[0]["lr"]
        x = torch.stack([torch.sin(batch + k) for k in range(3)], 1)
        loss: torch.Tensor = (self.linear(x).squeeze(1) - batch / N_ITEMS).square().mean()
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated.append(self.global_step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    store: Any, loader: Any, *, dies_at: int | None = None, folder: Path, ckpt_path: Path | None = None,
    also: Sequence[Any] = (), name: str = "main", snapshot_every: int = 1, **more: Any,
) -> tuple[Any, Module, Any]:  # fmt: skip
    met: dict[str, Any] = {"name": name} if store is None else place(store)
    met |= {"outer_lr": 1.0, "outer_momentum": 0.0, "snapshot_every": snapshot_every}
    ours, module = DiLoCoCallback(inner_steps=INNER, **met), Module(dies_at)
    options: dict[str, Any] = {"max_steps": STEPS, "logger": False, "enable_checkpointing": bool(also), **more}
    trainer = lightning.Trainer(
        accelerator="cpu", callbacks=[ours, *also], enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **options,
    )  # fmt: skip
    from_: dict[str, Any] = {"ckpt_path": ckpt_path, "weights_only": True if ckpt_path else None}
    if dies_at is None:
        trainer.fit(module, loader, **from_)
    else:
        with pytest.raises(Killed):
            trainer.fit(module, loader, **from_)
        ours.diloco._workers.uploads.finish()
    return ours, module, trainer


def plain_loader() -> Any:
    return torch.utils.data.DataLoader(torch.arange(N_ITEMS), batch_size=2)  # type: ignore[arg-type]


def stateful_loader(n: int = 4 * STEPS) -> Any:
    """Return a loader of one epoch. In a replica that came back, the next epoch has another order, as in torchdata."""
    kind = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return kind(torch.arange(n), batch_size=2, shuffle=True, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("loader", [plain_loader, stateful_loader])
@pytest.mark.parametrize(("dies_at", "accumulated"), [(9, 1), (14, 1), (6, 2)])
def test_a_replica_that_comes_back_has_its_optimizer_schedule_data_and_step(
    tmp_path: Path, loader: Any, dies_at: int, accumulated: int
) -> None:
    more: dict[str, Any] = {"folder": tmp_path, "accumulate_grad_batches": accumulated}
    _, calm, _ = fit(MemoryStore(), loader(), **more)
    next_process()
    store = MemoryStore()
    _, died, _ = fit(store, loader(), dies_at=dies_at, **more)
    next_process()
    ours, back, trainer = fit(store, loader(), **more)
    kept = dies_at // INNER * INNER * 2 * accumulated
    assert trainer.global_step == STEPS
    assert ours.diloco.rounds == STEPS // INNER
    if accumulated == 1:  # otherwise the last update of the epoch in which the replica came back differs
        assert died.seen[:kept] + back.seen == calm.seen
        assert {step: calm.rates[step] for step in back.rates} == back.rates
        for name, values in calm.state_dict().items():
            assert torch.equal(back.state_dict()[name], values), name
    for name, values in ours.diloco.anchor().items():
        assert torch.equal(back.get_parameter(name), values), name


@pytest.mark.parametrize("loader", [plain_loader, lambda: stateful_loader(N_ITEMS)])
def test_a_schedule_by_epochs_is_where_it_would_be_after_coming_back(
    tmp_path: Path, loader: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation at the end of the epoch in which the replica started again comes at the same step, too."""

    def by_epochs(self: Module) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    monkeypatch.setattr(Module, "configure_optimizers", by_epochs)
    monkeypatch.setattr(Module, "val_dataloader", lambda self: [torch.tensor([0.0])])
    more: dict[str, Any] = {"folder": tmp_path, "max_steps": 39, "num_sanity_val_steps": 0}  # epochs of 13 steps
    store = MemoryStore()
    _, calm, _ = fit(MemoryStore(), loader(), **more)
    next_process()
    fit(store, loader(), dies_at=18, **more)
    next_process()
    _, back, _ = fit(store, loader(), **more)
    assert back.rates == {step: calm.rates[step] for step in range(16, 39)}
    assert (calm.validated, back.validated) == ([13, 26, 39], [26, 39])


def test_one_cycle_ends_after_a_notice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_cycle(self: Module) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    monkeypatch.setattr(Module, "configure_optimizers", one_cycle)
    store = MemoryStore("noticed")
    for attempt in (0, 1):
        next_process()
        replica = replica_of("run", attempt, page=SharedPage())
        replica.__dict__["store"] = store
        store.put(replica.key("started.json"), f'{{"nonce": "{replica.nonce}"}}'.encode())
        set_current_replica(replica)
        if attempt == 0:
            warned = Warned(replica, at=15)
            with pytest.raises(SystemExit):
                fit(None, plain_loader(), folder=tmp_path, also=[warned])
        else:
            _, back, trainer = fit(None, plain_loader(), folder=tmp_path)
    assert trainer.global_step == STEPS
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == STEPS
    assert list(back.rates) == list(range(12, STEPS)), "the rates continue from the last round"


class Warned(lightning.Callback):  # type: ignore[misc, name-defined]
    """At a given step, notifies the replica that its machine will be taken away."""

    def __init__(self, replica: Replica, at: int) -> None:
        self.replica = replica
        self.at = at

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.at:
            assert self.replica.page is not None
            self.replica.page.announce(time.monotonic() + 25, 15)


def test_a_checkpoint_has_the_state(tmp_path: Path) -> None:
    ours, _, trainer = fit(MemoryStore(), plain_loader(), folder=tmp_path, max_steps=8)
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    kept = torch.load(tmp_path / "it.ckpt", weights_only=True)["callbacks"]["DiLoCoCallback"]
    assert kept["diloco"]["rounds"] == ours.diloco.rounds == 2


@pytest.mark.parametrize("is_given_again", [True, False])
def test_a_replica_of_a_run_that_began_from_a_checkpoint_comes_back(tmp_path: Path, is_given_again: bool) -> None:
    set_current_replica(replica_of("before"))
    _, _, trainer = fit(MemoryStore(), plain_loader(), folder=tmp_path, max_steps=13)  # one epoch
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    begins: dict[str, Any] = {"folder": tmp_path, "ckpt_path": tmp_path / "it.ckpt", "max_steps": 29}
    replica = replica_of("another")
    set_current_replica(replica)
    next_process()
    _, calm, _ = fit(MemoryStore(), plain_loader(), **begins)
    assert (replica.reported["step"], replica.reported["total_steps"]) == (29, 29)
    next_process()
    store = MemoryStore()
    _, died, _ = fit(store, plain_loader(), dies_at=23, **begins)
    next_process()
    set_current_replica(replica_of("another", 1))
    ours, back, trainer = fit(store, plain_loader(), **{**begins, **({} if is_given_again else {"ckpt_path": None})})
    assert (trainer.global_step, ours.diloco.rounds) == (29, 4)
    assert died.seen[: 8 * 2] + back.seen == calm.seen
    assert {step: calm.rates[step] for step in back.rates} == back.rates
    for name, values in calm.state_dict().items():
        assert torch.equal(back.state_dict()[name], values), name


def test_a_rank_that_comes_back_with_its_checkpoint_of_a_later_epoch_trains_to_the_end(tmp_path: Path) -> None:
    more: dict[str, Any] = {"folder": tmp_path, "max_steps": -1, "max_epochs": 3, "snapshot_every": 5}  # 13 steps each
    store = MemoryStore()
    keeper = lightning.callbacks.ModelCheckpoint(tmp_path, filename="it", every_n_train_steps=26)
    fit(store, plain_loader(), dies_at=29, also=[keeper], **more)
    next_process()
    set_current_replica(replica_of("another", 1))
    ours, _, trainer = fit(store, plain_loader(), ckpt_path=tmp_path / "0/it.ckpt", **more)
    assert trainer.global_step == ours.diloco.inner_step == 39


@pytest.mark.parametrize("is_replica", [True, False])
def test_another_run_of_the_name_begins_where_a_checkpoint_of_the_first_is(tmp_path: Path, is_replica: bool) -> None:
    """This happens if a plain script is started again, or after `replicas rm RUN` and a launch with the same name."""
    for nonce, steps in [("first", 8), ("second", STEPS)]:
        replica = replica_of("again", claimed_nonce=nonce)
        replica.__dict__["store"] = MemoryStore()
        set_current_replica(replica if is_replica else None)
        begins = None if nonce == "first" else tmp_path / "it.ckpt"
        ours, _, trainer = fit(None, plain_loader(), folder=tmp_path, ckpt_path=begins, max_steps=steps)
        trainer.save_checkpoint(tmp_path / "it.ckpt")
    assert (trainer.global_step, ours.diloco.rounds) == (STEPS, (STEPS - 8) // INNER)


def test_a_training_after_another_in_one_replica_takes_a_name_of_its_own(tmp_path: Path) -> None:
    replica = replica_of("again")
    replica.__dict__["store"] = MemoryStore()
    set_current_replica(replica)
    keeper = lightning.callbacks.ModelCheckpoint(tmp_path, filename="it", every_n_train_steps=10)
    _, died, _ = fit(None, plain_loader(), dies_at=11, folder=tmp_path, also=[keeper])
    with pytest.raises(DiLoCoError, match="has closed a DiLoCo named 'main' already"):
        fit(None, plain_loader(), folder=tmp_path, ckpt_path=tmp_path / "0/it.ckpt")
    ours, back, trainer = fit(None, plain_loader(), folder=tmp_path, ckpt_path=tmp_path / "0/it.ckpt", name="second")
    assert (trainer.global_step, ours.diloco.rounds) == (STEPS, -(-(STEPS - 10) // INNER))
    assert len(back.seen) == 2 * (STEPS - 10), died.seen


def test_a_long_validation_is_progress(tmp_path: Path) -> None:
    page = SharedPage()
    set_current_replica(replica_of("another", page=page))
    trainer = lightning.Trainer(
        accelerator="cpu", callbacks=[DiLoCoCallback()], logger=False, default_root_dir=tmp_path
    )
    trainer.validate(Module(), plain_loader(), verbose=False)
    assert page.progress_marks == N_ITEMS // 2


class Stops(lightning.Callback):  # type: ignore[misc, name-defined]
    """Asks the trainer to stop after its first validation, like an EarlyStopping."""

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        trainer.should_stop = True


@pytest.mark.parametrize("least", [None, 20])
def test_a_trainer_that_wants_to_stop_asks_the_run_once_and_trains_until_the_run_has_ended(
    tmp_path: Path, least: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    monkeypatch.setattr(DiLoCo, "stop", lambda diloco: asked.append(diloco.inner_step), raising=False)
    monkeypatch.setattr(Module, "val_dataloader", lambda self: [torch.tensor([0.0])])
    more: dict[str, Any] = {"val_check_interval": 5, "num_sanity_val_steps": 0, "min_steps": least}
    _, _, trainer = fit(MemoryStore(), plain_loader(), folder=tmp_path, also=[Stops()], **more)
    assert asked == [6 if least is None else least], (
        "training ends at the step after the validation, and not before min_steps"
    )
    assert trainer.global_step == STEPS
    assert trainer.fit_loop.epoch_loop.min_steps == least


def fit_as(rank: int, folder: Path, loggers: Any, *, attempt: int = 0, also: Sequence[Any] = ()) -> Any:
    """Train as one of two ranks whose loggers chose their versions at the same moment, and return the trainer."""
    set_current_replica(Replica(rank, 2, "another", attempt, "memory://lightning", claimed_nonce=f"{rank}-{attempt}"))
    next_process()
    _, _, trainer = fit(MemoryStore(), plain_loader(), folder=folder, logger=loggers, also=also, log_every_n_steps=1)
    return trainer


class Logs(lightning.Callback):  # type: ignore[misc, name-defined]
    """A module that logs a number at the first step."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        trainer.logger.log_metrics({"number": 1.0}, 0)


@pytest.mark.parametrize("kind", ["CSVLogger", "TensorBoardLogger"])
@pytest.mark.parametrize("is_default", [True, False])
def test_ranks_that_start_together_log_to_folders_of_their_own(tmp_path: Path, kind: str, is_default: bool) -> None:
    makes = getattr(lightning.loggers, kind)
    folders = []
    for rank in (0, 1):
        logger: Any = True if is_default else makes(tmp_path, version=0)  # no logger found an older version
        trainer = fit_as(rank, tmp_path, logger, also=[Logs()])
        folders.append(Path(trainer.log_dir).relative_to(tmp_path))
        assert any((tmp_path / folders[-1]).iterdir())
    assert folders == [Path(f"{rank}/lightning_logs/version_0") for rank in (0, 1)]
    assert not (tmp_path / "lightning_logs").exists(), "the folder that Lightning made first is removed"


def test_an_attempt_after_another_keeps_the_logs_of_the_first(tmp_path: Path) -> None:
    for attempt in (0, 1):
        trainer = fit_as(1, tmp_path, lightning.loggers.CSVLogger(tmp_path), attempt=attempt)
    assert Path(trainer.log_dir) == tmp_path / "1/lightning_logs/version_1"


def test_checkpoints_are_in_folders_of_their_own_and_a_rank_in_the_path_is_not_added_twice(tmp_path: Path) -> None:
    found = []
    for rank in (0, 1):
        for folder in (tmp_path / "given", tmp_path / "with_rank" / str(rank)):
            keeper = lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=STEPS)
            fit_as(rank, tmp_path, False, also=[keeper])
            found.append(Path(keeper.best_model_path).parent.relative_to(tmp_path))
    assert found == [Path(each) for each in ("given/0", "with_rank/0", "given/1", "with_rank/1")]


def test_checkpoints_without_a_folder_are_below_the_loggers(tmp_path: Path) -> None:
    keeper = lightning.callbacks.ModelCheckpoint(every_n_train_steps=STEPS)
    fit_as(1, tmp_path, True, also=[keeper])
    assert Path(keeper.best_model_path).parent == tmp_path / "1/lightning_logs/version_0/checkpoints"


def test_a_logger_of_the_users_own_is_named_with_its_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Own(lightning.loggers.logger.DummyLogger):  # type: ignore[misc, name-defined]
        save_dir = "here"

    fit_as(1, tmp_path, Own())
    assert "rank 1: each replica's Own may write to 'here'." in caplog.text


def test_in_a_slurm_job_lightning_takes_over_no_signal_and_is_not_a_task_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the worker did not remove these variables, Lightning would ignore SIGTERM, and requeue the job at SIGUSR1."""
    for name, value in [("SLURM_NTASKS", "4"), ("SLURM_PROCID", "3"), ("SLURM_JOB_ID", "1234"), ("SLURM_NNODES", "2")]:
        monkeypatch.setenv(name, value)
    leave_process_group()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    during: list[Any] = []
    look = lightning.callbacks.LambdaCallback(
        on_train_start=lambda trainer, module: during.append(signal.getsignal(signal.SIGUSR1))
    )
    trainer = fit_as(1, tmp_path, True, also=[look])
    assert type(trainer._accelerator_connector.cluster_environment).__name__ == "LightningEnvironment"
    assert during == [before[signal.SIGUSR1]]
    assert {number: signal.getsignal(number) for number in before} == before
    assert Path(trainer.log_dir).parent == tmp_path / "1/lightning_logs"


AVERAGING = hasattr(lightning.callbacks, "WeightAveraging")


@pytest.mark.skipif(not AVERAGING, reason="Lightning has WeightAveraging since 2.6")
@pytest.mark.parametrize("ours_first", [True, False])
def test_an_average_of_the_weights_is_averaged_over_the_replicas_and_is_the_model_at_the_end(
    tmp_path: Path, ours_first: bool
) -> None:
    def body(where: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ours = DiLoCoCallback(inner_steps=INNER, outer_lr=1.0, outer_momentum=0.0, **where)
        average = lightning.callbacks.EMAWeightAveraging(decay=0.9)
        module = Module()
        trainer = lightning.Trainer(
            accelerator="cpu", callbacks=[ours, average] if ours_first else [average, ours], max_steps=STEPS,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, logger=False,
            default_root_dir=tmp_path,
        )  # fmt: skip
        data = torch.arange(N_ITEMS) + 7 * where["rank"]
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=2))
        (averaged,) = ours.diloco._extra
        (weights,) = [values for values in averaged[0].anchor().values() if values.shape == (1, 3)]
        return module.linear.weight.detach().clone(), weights, ours.diloco.anchor()["linear.weight"]

    (first, average, anchor), (second, _, _) = run_replicas(2, body)
    assert torch.equal(first, second), "all replicas end with the same average"
    assert torch.equal(first, average)
    assert not torch.equal(first, anchor)


@pytest.mark.skipif(not AVERAGING, reason="Lightning has WeightAveraging since 2.6")
def test_a_replica_that_comes_back_continues_with_its_average_and_not_with_a_new_one(tmp_path: Path) -> None:
    def average() -> Any:
        return lightning.callbacks.WeightAveraging()  # a plain mean over all steps, so that their number matters

    calm = average()
    fit(MemoryStore(), stateful_loader(), folder=tmp_path, also=[calm])
    next_process()
    store = MemoryStore()
    fit(store, stateful_loader(), dies_at=14, folder=tmp_path, also=[average()])
    next_process()
    back = average()
    fit(store, stateful_loader(), folder=tmp_path, also=[back])
    assert int(back._average_model.n_averaged) == int(calm._average_model.n_averaged)
    assert torch.allclose(back._average_model.module.linear.weight, calm._average_model.module.linear.weight)


def test_an_average_of_this_replica_alone_is_named_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    swa = lightning.callbacks.StochasticWeightAveraging(swa_lrs=0.01)
    fit(MemoryStore(), plain_loader(), folder=tmp_path, also=[swa], max_steps=-1, max_epochs=2)
    assert [record for record in caplog.records if "Use Lightning's WeightAveraging" in record.getMessage()]
