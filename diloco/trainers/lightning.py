"""DiLoCo for the `Trainer` of Lightning: a callback, `DiLoCoCallback`.

    trainer = Trainer(max_steps=4000, callbacks=[DiLoCoCallback(inner_steps=100)])
    trainer.fit(module, DataLoader(current_replica().shard(dataset)))

Give each replica its own data. Logs and checkpoints are in a folder for each rank: `default_root_dir/0`, …
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from pathlib import Path
from typing import Any

from executors.errors import raise_missing_package

try:
    from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
    from lightning.pytorch.callbacks import Checkpoint, StochasticWeightAveraging
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
except ImportError as error:
    raise_missing_package("diloco.trainers.lightning", error, "lightning")

from diloco.trainers.data_position import DataPosition
from diloco.trainers.trainer_link import TrainerLink, check_options, extended_total
from executors.replica import current_replica, find_replica

log = logging.getLogger(__name__)


class DiLoCoCallback(Callback):  # type: ignore[misc]
    """Trains a LightningModule together with the other replicas of the run.

        Trainer(max_steps=4000, callbacks=[DiLoCoCallback(inner_steps=100)]).fit(module, loader)

    When training ends, the module is the anchor. In a process that is not a replica, the callback trains alone.

    A replica that starts again continues with the optimizers, schedules and data position of its newest saved state,
    and at the run's step. With a `StatefulDataLoader`, the data continue at the exact item. A stream in a
    `StatefulDataLoader` continues at the batch, but skips one batch that Lightning had fetched early. Any other loader
    skips the seen batches of the epoch. A `ckpt_path` matters only at the beginning of a new run. A replica that starts
    again may also be given a `ckpt_path`, but continues at the run's step.

    A WeightAveraging of Lightning, such as EMAWeightAveraging, is averaged over the replicas in each round. When
    training ends, the module is then that average.

    A replica may have several processes (`replicas launch --procs 2`), with `Trainer(devices=2, strategy="ddp")`.
    Lightning divides the data among them itself, so its data are `replica.shard(data, per="replica")`.

    Each replica has folders of its own. The rank is added to `default_root_dir`, to the `save_dir` of a CSVLogger and a
    TensorBoardLogger, and to the `dirpath` of a ModelCheckpoint. `ModelCheckpoint.best_model_path` has the whole path.

    Args:
        inner_steps: Batches with a step of the optimizer from one round to the next, at least 1, default 500.
        options: Other arguments of `DiLoCo`, except `total_steps`, which the trainer plans.

    Raises:
        TypeError: `DiLoCo` has no such argument, or the trainer decides it.
        ValueError: When training begins: the trainer does not use all processes of the replica, or its strategy is
            neither DDP nor ModelParallelStrategy (FSDP2).
    """

    def __init__(self, inner_steps: int = 500, **options: Any) -> None:
        self._options = check_options(inner_steps, options)
        self._link: TrainerLink | None = None
        self._data = DataPosition()
        self._step = 0
        """The trainer's step after the newest batch."""
        self._folders: OwnFolders | None = None
        self._min_steps: int | None = None
        """The script's own `min_steps`, before which it does not stop early."""

    @property
    def diloco(self) -> Any:
        """The `DiLoCo` of the training. None before training has begun.

        callback.diloco.average_also(ema)
        """
        return None if self._link is None else self._link.diloco

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._folders is None and (replica := find_replica()) is not None:
            self._folders = OwnFolders(trainer, replica.rank)
        # A callback that averages weights must make its step before the round, which averages its values and saves its
        # count. So it is moved before this callback. Lightning still uses the old list for the current stage, and the
        # new order from the next stage on.
        if stage == "fit" and (averages := _weight_averages(trainer)):
            first = [each for each in trainer.callbacks if each in averages]
            trainer.callbacks = [*first, *(each for each in trainer.callbacks if each not in averages)]
        # Set the steps before `configure_optimizers`, because its schedules read the number of steps from the trainer.
        if stage == "fit" and pl_module.automatic_optimization and (total := extended_total(self._options)) is not None:
            _train_until(trainer, total)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._folders is not None:
            self._folders.remove_unused()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        members = current_replica().members
        strategies = SingleDeviceStrategy if members == 1 else (DDPStrategy, ModelParallelStrategy)
        if trainer.world_size != members or not isinstance(trainer.strategy, strategies):
            remedy = "devices=1" if members == 1 else f"devices={members}, strategy='ddp'"
            raise ValueError(
                f"DiLoCoCallback in a replica with {members} {'process' if members == 1 else 'processes'} got a "
                f"trainer with {trainer.world_size} and {type(trainer.strategy).__name__}. Use Trainer({remedy}); "
                "`replicas launch --procs N` starts N processes in each replica."
            )
        is_simple = pl_module.automatic_optimization  # with manual optimization, a batch may have any number of steps
        planned = trainer.estimated_stepping_batches if is_simple else math.inf
        self._link = link = TrainerLink(
            pl_module,
            None if planned == math.inf else int(planned),
            self._options,
            begun_at=trainer.global_step if is_simple else 0,
            may_grow=is_simple,
        )
        for number, optimizer in enumerate(trainer.optimizers):
            link.diloco.attach_state(f"optimizer {number}", optimizer)
        for number, each in enumerate(trainer.lr_scheduler_configs):
            if each.interval == "step" and each.frequency == 1:
                link.attach_schedule(f"schedule {number}", each.scheduler)
            else:
                link.diloco.attach_state(f"schedule {number}", each.scheduler)
        self._average_averages(trainer)
        self._min_steps = trainer.fit_loop.epoch_loop.min_steps
        trainer.fit_loop.epoch_loop.min_steps = math.inf
        self._attach_data(trainer)
        self._set_step(trainer, pl_module)

    def _average_averages(self, trainer: Trainer) -> None:
        """Also average the weight averages of Lightning's callbacks over the replicas."""
        for number, each in enumerate(_weight_averages(trainer)):
            self.diloco.average_also(each._average_model)
            self.diloco.attach_state(f"average {number}", AverageCount(each))
        for each in trainer.callbacks:
            if isinstance(each, StochasticWeightAveraging):
                log.warning(
                    "rank %s: StochasticWeightAveraging averages the weights of this replica alone, and the anchor "
                    "replaces them at the end. Use Lightning's WeightAveraging, which is averaged over the replicas.",
                    current_replica().rank,
                )  # fmt: skip

    def _attach_data(self, trainer: Trainer) -> None:
        """Let the loader begin at the saved position.

        The trainer has already created its iterator, so the iterator is created again.
        """
        loader, diloco = trainer.train_dataloader, self.diloco
        is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if is_stateful:
            diloco.attach_state("data", loader)
        self._data.begin_at(trainer.current_epoch)
        diloco.attach_state("position" if is_stateful else "data", self._data)
        self._data.go_to(loader, is_stateful=is_stateful)
        if current_replica().attempt and diloco.rounds:
            # Otherwise Lightning would shorten the epoch by the batches that its checkpoint has seen.
            trainer.fit_loop.epoch_loop.restarting = False
        if current_replica().attempt or diloco.rounds:
            iter(trainer.fit_loop._data_fetcher)

    def _set_step(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._link is not None and pl_module.automatic_optimization:
            progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
            progress.total.completed = progress.total.ready = self._link.trainer_step
        self._step = trainer.global_step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._data.epoch_begins()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        # Batches of an earlier attempt count, so that the trainer notices the end of the epoch and validates there.
        if n := self._data.left_out:
            fetcher, progress = trainer.fit_loop._data_fetcher, trainer.fit_loop.epoch_loop.batch_progress
            for name in ("ready", "started", "processed", "completed"):
                setattr(progress.current, name, getattr(progress.current, name) + n)
            fetcher.fetched += n
            fetcher.done = progress.is_last_batch = fetcher.done or fetcher.fetched == fetcher.length

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        link = self._link
        assert link is not None
        self._data.batch_seen()
        if trainer.global_step == self._step:
            return  # gradients are being accumulated, so no step was made
        before = link.last
        link.step()
        self._set_step(trainer, pl_module)
        numbers: dict[str, Any] = {}
        if link.last is not None and link.last is not before:
            numbers = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        if numbers:
            current_replica().report(**numbers)  # report the trainer's step, which DiLoCo counts
        self._end_together(trainer)

    def _end_together(self, trainer: Trainer) -> None:
        """Let the trainer stop early only when the run has ended, so that all replicas stop at the same round.

        An EarlyStopping sets `trainer.should_stop` on this replica alone. Lightning does not stop before `min_steps`,
        so `min_steps` is infinite until the run has ended.
        """
        link, loop = self._link, trainer.fit_loop.epoch_loop
        assert link is not None
        if link.has_grown:
            _train_until(trainer, link.begun_at + (link.total_steps or 0))
        if link.is_over:
            loop.min_steps, trainer.should_stop = self._min_steps, True
            return
        loop.min_steps = self._min_steps
        is_asked = trainer.should_stop and trainer.fit_loop._can_stop_early  # the script may have its own min_steps
        if not (is_asked and not link.stop()):
            loop.min_steps = math.inf
            trainer.should_stop = trainer.should_stop and not is_asked  # otherwise Lightning logs a line at each step

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        current_replica().progress()  # a validation may take longer than any step, and also counts as progress

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._link is not None:
            trainer.fit_loop.epoch_loop.min_steps = self._min_steps
            self._link.finish(is_asked_for=trainer.should_stop)
            # Lightning copies the average into the module at the end. The anchor has just replaced that copy, so copy
            # the average again.
            for each in _weight_averages(trainer):
                each.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._link is not None:
            self._link.diloco.__exit__(type(exception), exception, exception.__traceback__)

    def state_dict(self) -> dict[str, Any]:
        """Return the anchor, the outer state and the position, for programs that read a checkpoint.

        Training does not load them, because it begins with the checkpoint's model.
        """
        return {} if self._link is None else {"diloco": self._link.diloco.state_dict()}


def _weight_averages(trainer: Trainer) -> list[Any]:
    """Return the callbacks of a trainer that keep an average of the weights, such as EMAWeightAveraging."""
    kind = getattr(callbacks, "WeightAveraging", None)  # since Lightning 2.6
    return [each for each in trainer.callbacks if kind is not None and isinstance(each, kind)]


class AverageCount:
    """Saves the number of steps that an average of weights has seen, for the next attempt. The run stores its values.

    Without the number, an average would begin again with the current weights.

    Args:
        callback: a WeightAveraging of Lightning in which training has begun.

    Example:
        diloco.attach_state("average", AverageCount(callback))
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def state_dict(self) -> dict[str, int]:
        """Return the number of steps, and the last step and epoch of the average."""
        return {
            "n": int(self._callback._average_model.n_averaged),
            "step": self._callback._latest_update_step,
            "epoch": self._callback._latest_update_epoch,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Load the numbers that an earlier attempt saved.

        Args:
            state: the value that `state_dict` returned.
        """
        self._callback._average_model.n_averaged.fill_(state["n"])
        self._callback._latest_update_step = state["step"]
        self._callback._latest_update_epoch = state["epoch"]


def _train_until(trainer: Trainer, step: int) -> None:
    """Let a trainer end at a step, whether it has planned steps or epochs."""
    trainer.fit_loop.epoch_loop.max_steps = step
    trainer.fit_loop.max_epochs = -1


class OwnFolders:
    """Gives a replica folders for logs and checkpoints that no other replica writes to.

    A logger of Lightning chooses its folder `version_N` by a listing. Replicas that start together choose the same N.
    So the rank becomes part of each path, which needs no agreement. Lightning creates the folders of loggers before the
    first hook of a callback. These folders stay empty, and are removed at the end.

    Args:
        trainer: the trainer, whose loggers and checkpoint callbacks are changed.
        rank: this replica.

    Example:
        OwnFolders(trainer, current_replica().rank)
    """

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self._rank = rank
        self._unused: list[Path] = []
        trainer._default_root_dir = self._own(trainer.default_root_dir)
        for logger in trainer.loggers:
            if isinstance(logger, (CSVLogger, TensorBoardLogger)):
                self._move(logger, writes=current_replica().member == 0)
            elif (
                current_replica().member == 0
                and not type(logger).__module__.startswith("lightning.")
                and (logger.save_dir or logger.log_dir)
            ):
                # The other loggers of Lightning (wandb, mlflow, …) begin a run of their own in each process.
                log.warning(
                    "rank %s: each replica's %s may write to %r. Add current_replica().rank to the folder.",
                    rank, type(logger).__name__, logger.save_dir or logger.log_dir,
                )  # fmt: skip
        for each in trainer.callbacks:
            if isinstance(each, Checkpoint) and getattr(each, "dirpath", None) is not None:
                each.dirpath = self._own(each.dirpath)

    def _own(self, folder: str | os.PathLike[str]) -> str:
        """Return this rank's own folder inside a folder.

        If the script has added the rank itself, as the last part of the path, the folder is returned as it is.
        """
        path = os.fspath(folder)
        return path if os.path.basename(os.path.normpath(path)) == str(self._rank) else f"{path}/{self._rank}"

    def _move(self, logger: Any, *, writes: bool) -> None:
        """Let a logger write to this rank's own folder, as if it had been created with that folder."""
        if writes and os.path.isdir(logger.log_dir):  # otherwise the folder is in a bucket, or does not exist yet
            self._unused.append(Path(logger.log_dir))
        if writes and logger._experiment is not None and isinstance(logger, TensorBoardLogger):
            logger._experiment.close()
            with contextlib.suppress(OSError):  # another part of the script may have begun to write to it
                for file in Path(logger.log_dir).glob(f"events.*.{socket.gethostname()}.{os.getpid()}.*"):
                    file.unlink()
        logger._experiment = None
        logger._root_dir = self._own(logger._root_dir)
        if isinstance(logger, CSVLogger):
            logger._save_dir = self._own(logger._save_dir)
        # an earlier attempt of this rank has used the folder
        if writes and isinstance(logger.version, int) and os.path.isdir(logger.log_dir):
            logger._version = logger._get_next_version()

    def remove_unused(self) -> None:
        """Remove the folders that loggers created before they were moved, if they are empty."""
        for folder in self._unused:
            for each in (folder, folder.parent):
                with contextlib.suppress(OSError):  # the folder is not empty, or another replica has removed it
                    each.rmdir()
