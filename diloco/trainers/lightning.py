"""The `Trainer` of Lightning with DiLoCo beside its optimizer.

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

from lightning.pytorch import Callback, LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import Checkpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import SingleDeviceStrategy

from diloco.trainers.data_position import DataPosition
from diloco.trainers.trainer_link import TrainerLink, check_options, extended_total
from executors.replica import current_replica, find_replica

log = logging.getLogger(__name__)


class DiLoCoCallback(Callback):  # type: ignore[misc]
    """Trains one model together with the other replicas of the run; in a process that is no replica, alone.

    A replica that comes back goes on with its optimizers, its schedules and its data where its newest snapshot was, and
    at the step where the run is. Data are where they were to the item with `StatefulDataLoader`, to the batch where it
    loads a stream, of which Lightning has fetched one more; else as many batches of the epoch are left out as were
    seen. A `ckpt_path` is where a run begins; who comes back may be given it again, and goes on where the run is. When
    training ends, the module is the anchor.

    A WeightAveraging of Lightning, as EMAWeightAveraging, is averaged over the replicas in each round. When training
    ends, the module is that average.

    Each replica has folders of its own: the rank is added to `default_root_dir`, to the `save_dir` of a CSVLogger and a
    TensorBoardLogger, and to the `dirpath` of a ModelCheckpoint. `ModelCheckpoint.best_model_path` has the whole path.

    Args:
        inner_steps: batches with a step of the optimizer from one round to the next.
        options: other arguments of `DiLoCo`, but `total_steps`, which is the trainer's.

    Raises:
        ValueError: when training begins, for a strategy of several processes.
    """

    def __init__(self, inner_steps: int = 500, **options: Any) -> None:
        self._options = check_options(inner_steps, options)
        self._link: TrainerLink | None = None
        self._data = DataPosition()
        self._step = 0
        """The trainer's, after the newest batch."""
        self._folders: OwnFolders | None = None
        self._min_steps: int | None = None
        """The script's own: it does not stop early before that."""

    @property
    def diloco(self) -> Any:
        """The `DiLoCo`, once training has begun."""
        return None if self._link is None else self._link.diloco

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._folders is None and (replica := find_replica()) is not None:
            self._folders = OwnFolders(trainer, replica.rank)
        # An average has to take its step before the round: its values are averaged and its count is kept there. Hooks
        # of this stage go through the old list.
        if stage == "fit" and (averages := _weight_averages(trainer)):
            first = [each for each in trainer.callbacks if each in averages]
            trainer.callbacks = [*first, *(each for each in trainer.callbacks if each not in averages)]
        # Before `configure_optimizers`, whose schedules ask the trainer how many steps there will be.
        if stage == "fit" and pl_module.automatic_optimization and (total := extended_total(self._options)) is not None:
            _train_until(trainer, total)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._folders is not None:
            self._folders.remove_unused()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.world_size != 1 or not isinstance(trainer.strategy, SingleDeviceStrategy):
            raise ValueError(
                f"DiLoCoCallback takes one process and one device a replica, got {trainer.world_size} processes and "
                f"{type(trainer.strategy).__name__}: Trainer(devices=1), in replicas of `replicas launch`."
            )
        is_simple = pl_module.automatic_optimization  # else a batch may have any number of steps
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
        """Average over the replicas, too, what callbacks of Lightning average over the steps."""
        for number, each in enumerate(_weight_averages(trainer)):
            self.diloco.average_also(each._average_model)
            self.diloco.attach_state(f"average {number}", AverageCount(each))
        for each in trainer.callbacks:
            if isinstance(each, StochasticWeightAveraging):
                log.warning(
                    "rank %s: StochasticWeightAveraging averages the weights of this replica alone, and at the end "
                    "DiLoCo puts the anchor in their place. Use Lightning's WeightAveraging, which is averaged over "
                    "the replicas.", current_replica().rank,
                )  # fmt: skip

    def _attach_data(self, trainer: Trainer) -> None:
        """Let the loader begin where the data were; the trainer made its iterator before."""
        loader, diloco = trainer.train_dataloader, self.diloco
        is_stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        if is_stateful:
            diloco.attach_state("data", loader)
        self._data.begin_at(trainer.current_epoch)
        diloco.attach_state("position" if is_stateful else "data", self._data)
        self._data.go_to(loader, is_stateful=is_stateful)
        if current_replica().attempt and diloco.rounds:
            trainer.fit_loop.epoch_loop.restarting = False  # else the epoch is cut by what a checkpoint had seen
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
        if n := self._data.left_out:  # else the trainer would not see the end of this epoch, nor do what is due there
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
            return  # gradients are being accumulated
        before = link.last
        link.step()
        self._set_step(trainer, pl_module)
        numbers: dict[str, Any] = {}
        if link.last is not None and link.last is not before:
            numbers = {name: float(value) for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        if numbers:
            current_replica().report(**numbers)  # with the step that DiLoCo counts, which is the trainer's
        self._end_together(trainer)

    def _end_together(self, trainer: Trainer) -> None:
        """Let the trainer stop early only when the run is over, on all replicas at the same round.

        An EarlyStopping sets `trainer.should_stop` on this replica alone. Lightning does not stop before `min_steps`,
        so these are infinite until the run is over.
        """
        link, loop = self._link, trainer.fit_loop.epoch_loop
        assert link is not None
        if link.has_grown:
            _train_until(trainer, link.begun_at + (link.total_steps or 0))
        if link.is_over:
            loop.min_steps, trainer.should_stop = self._min_steps, True
            return
        loop.min_steps = self._min_steps
        is_asked = trainer.should_stop and trainer.fit_loop._can_stop_early  # the script may have a least of its own
        if not (is_asked and not link.stop()):
            loop.min_steps = math.inf
            trainer.should_stop = trainer.should_stop and not is_asked  # else it logs each step

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        current_replica().progress()  # a validation may take longer than any step

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._link is not None:
            trainer.fit_loop.epoch_loop.min_steps = self._min_steps
            self._link.finish(is_asked_for=trainer.should_stop)
            # Lightning leaves the average in the module. It may have done so before, and the anchor is there now.
            for each in _weight_averages(trainer):
                each.on_train_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._link is not None:
            self._link.diloco.__exit__(type(exception), exception, exception.__traceback__)

    def state_dict(self) -> dict[str, Any]:
        """Return anchor, outer state and position, for whoever reads a checkpoint: a training begins with its model."""
        return {} if self._link is None else {"diloco": self._link.diloco.state_dict()}


def _weight_averages(trainer: Trainer) -> list[Any]:
    """Return the callbacks of a trainer that keep an average of the weights, as EMAWeightAveraging."""
    kind = getattr(callbacks, "WeightAveraging", None)  # since Lightning 2.6
    return [each for each in trainer.callbacks if kind is not None and isinstance(each, kind)]


class AverageCount:
    """How many steps an average of weights has seen, for the next attempt. The values are in the run.

    Without the count, an average begins again with the weights of the moment.

    Args:
        callback: a WeightAveraging of Lightning in which training has begun.

    Example:
        diloco.attach_state("average", AverageCount(callback))
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback

    def state_dict(self) -> dict[str, int]:
        """Return the count, and the last step and epoch that the average has."""
        return {
            "n": int(self._callback._average_model.n_averaged),
            "step": self._callback._latest_update_step,
            "epoch": self._callback._latest_update_epoch,
        }

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take a count that an earlier attempt kept.

        Args:
            state: as `state_dict` returned it.
        """
        self._callback._average_model.n_averaged.fill_(state["n"])
        self._callback._latest_update_step = state["step"]
        self._callback._latest_update_epoch = state["epoch"]


def _train_until(trainer: Trainer, step: int) -> None:
    """Let a trainer end at a step, whatever it has planned by steps or by epochs."""
    trainer.fit_loop.epoch_loop.max_steps = step
    trainer.fit_loop.max_epochs = -1


class OwnFolders:
    """Folders of logs and checkpoints that no other replica writes to.

    A logger of Lightning chooses its folder `version_N` by a listing. Replicas that start together choose the same N.
    So the rank becomes part of each path, which needs no agreement. Lightning makes the loggers' folders before the
    first hook of a callback: these stay empty, and are removed at the end.

    Args:
        trainer: its loggers and checkpoint callbacks are changed.
        rank: of this replica.
    """

    def __init__(self, trainer: Trainer, rank: int) -> None:
        self._rank = rank
        self._unused: list[Path] = []
        trainer._default_root_dir = self._own(trainer.default_root_dir)
        for logger in trainer.loggers:
            if isinstance(logger, (CSVLogger, TensorBoardLogger)):
                self._move(logger)
            elif not type(logger).__module__.startswith("lightning.") and (logger.save_dir or logger.log_dir):
                # Lightning's others (wandb, mlflow, …) begin a run of their own in each process.
                log.warning(
                    "rank %s: %s may write to %r in each replica. Give each its own folder, by current_replica().rank.",
                    rank, type(logger).__name__, logger.save_dir or logger.log_dir,
                )  # fmt: skip
        for each in trainer.callbacks:
            if isinstance(each, Checkpoint) and getattr(each, "dirpath", None) is not None:
                each.dirpath = self._own(each.dirpath)

    def _own(self, folder: str | os.PathLike[str]) -> str:
        """Return a folder of this rank's own, below a folder or equal to it.

        It is equal where the script has added the rank itself, as the last part of the path.
        """
        path = os.fspath(folder)
        return path if os.path.basename(os.path.normpath(path)) == str(self._rank) else f"{path}/{self._rank}"

    def _move(self, logger: Any) -> None:
        """Let a logger write to a folder of this rank's own, as if it had been made with that folder."""
        if os.path.isdir(logger.log_dir):  # else it is in a bucket, or not made yet
            self._unused.append(Path(logger.log_dir))
        if logger._experiment is not None and isinstance(logger, TensorBoardLogger):
            logger._experiment.close()
            with contextlib.suppress(OSError):  # another part of the script has begun to write to it
                for file in Path(logger.log_dir).glob(f"events.*.{socket.gethostname()}.{os.getpid()}.*"):
                    file.unlink()
        logger._experiment = None
        logger._root_dir = self._own(logger._root_dir)
        if isinstance(logger, CSVLogger):
            logger._save_dir = self._own(logger._save_dir)
        if isinstance(logger.version, int) and os.path.isdir(logger.log_dir):  # of an earlier attempt
            logger._version = logger._get_next_version()

    def remove_unused(self) -> None:
        """Remove the folders that loggers made before they were moved, as far as they are empty."""
        for folder in self._unused:
            for each in (folder, folder.parent):
                with contextlib.suppress(OSError):  # not empty, or removed by another replica
                    each.rmdir()
