"""DiLoCo for the `Trainer` of transformers: a callback, `DiLoCoCallback`, and the function `replica_arguments`.

    args = replica_arguments(TrainingArguments("out", max_steps=4000))
    trainer = Trainer(model, args, train_dataset=…, callbacks=[DiLoCoCallback(inner_steps=100)])
    trainer.train()

A round is at the end of an update. By then the schedule has made its step and gradients are zero, but neither a
checkpoint nor an evaluation of this step was made. So at a multiple of `inner_steps`, the saved and the evaluated
model is the anchor, and so is the model after `train()`.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import os
import signal
from pathlib import Path
from typing import Any, TypeVar

from executors.errors import kind_of, raise_missing_package

try:
    from torch.utils.data import IterableDataset
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise_missing_package("diloco.trainers.hf", error, "hf-trainer")

from diloco.duplicate_work import ADVICE
from diloco.errors import DuplicateWorkError
from diloco.tensor_names import is_dtensor
from diloco.trainers.data_position import DataPosition
from diloco.trainers.trainer_link import TrainerLink, check_options, extended_total
from executors.replica import Replica, current_replica, find_replica

A = TypeVar("A", bound=TrainingArguments)
log = logging.getLogger(__name__)

SAME_ORDER = (
    "The Trainer's seed and so the order of the data is the same in each replica, unless each has its own share. "
    "Trainer(model, replica_arguments(args), …), from diloco.trainers.hf, gives each replica its own."
)
SAME_STREAM = (
    "A stream has the same order in each replica, unless each has its own share: current_replica().shard(dataset). "
    "replica_arguments(args), from diloco.trainers.hf, gives each replica its own folder."
)
OWN_ORDER = "Give each replica its own order: Trainer(model, replica_arguments(args), …), of diloco.trainers.hf."
SEEDS_APART = 10_007
"""The difference between the seeds of two neighboring ranks.

The order of epoch e comes from seed + e. So with neighboring seeds, one replica would have the orders of the other, one
epoch later.
"""


def replica_arguments(args: A) -> A:
    """Return a replica's own copy of the arguments: with its own order of the data, its own folder and its own name.

        args = replica_arguments(TrainingArguments("out", max_steps=4000))  # writes to out/0, out/1, …

    Pass the copy to `Trainer`, and use it wherever the script uses `args`. The copy has the class of `args`, which may
    be a subclass of TrainingArguments, such as TRL's SFTConfig. No argument changes the order of a stream: train on
    `current_replica().shard(dataset)`.

    If the run was extended (`replicas resume RUN --total-steps N`), `max_steps` of the copy is the run's new last step.
    The learning rate schedule is then made for that number of steps.

    With `push_to_hub`, rank 0 alone pushes, to the repository that `args` names. On the other ranks `push_to_hub` is
    also set to False in `args` itself, because scripts end with `if args.push_to_hub: trainer.push_to_hub()`.

    Args:
        args: the arguments of the script. In a process that is not a replica, the copy equals them.

    Raises:
        TypeError: `args` is not TrainingArguments.
    """
    if not isinstance(args, TrainingArguments):
        raise TypeError(
            f"replica_arguments(…) needs TrainingArguments, or a subclass such as TRL's SFTConfig, got {kind_of(args)}."
        )
    own, replica = copy.copy(args), find_replica()
    if replica is not None:
        folder = args.output_dir or "trainer_output"
        own.output_dir = os.path.join(folder, str(replica.rank))
        if getattr(args, "logging_dir", None):  # transformers 4 has derived logging_dir from output_dir
            own.logging_dir = os.path.join(args.logging_dir, str(replica.rank))
        # Without a name, transformers would name the repository after the last folder, which is the rank.
        own.hub_model_id = args.hub_model_id or Path(folder).absolute().name
        if replica.rank != 0:
            own.push_to_hub = args.push_to_hub = False
        own.run_name = f"{args.run_name or replica.run_id}-{replica.rank}"
        own.data_seed = (args.seed if args.data_seed is None else args.data_seed) + SEEDS_APART * replica.rank
        own.seed = args.seed + SEEDS_APART * replica.rank
        own.of_replica = replica.rank
        if (total := extended_total({})) is not None:
            own.max_steps = total
    return own


class DiLoCoCallback(TrainerCallback):  # type: ignore[misc]
    """Trains the Trainer's model together with the other replicas of the run.

        Trainer(model, args, train_dataset=share, callbacks=[DiLoCoCallback(inner_steps=100)]).train()

    When training ends, the model is the anchor. In a process that is not a replica, the callback trains alone.

    A replica that starts again continues with the optimizer, the schedule and the data position of its newest saved
    state, and at the run's step. A checkpoint that `train()` resumes from matters only at the beginning of a new run.

    A replica may have several processes (`replicas launch --procs`), in which the Trainer uses DDP, or FSDP2 with
    `fsdp=True`. The Trainer divides the data among them itself, so its data are `replica.shard(data, per="replica")`.

    With `load_best_model_at_end`, each replica ends with the best model that it has evaluated and saved itself. All
    replicas have the same one if evaluations are at rounds (`eval_steps` is a multiple of `inner_steps`) and no replica
    was away.

    The log has `diloco/round` and `diloco/wait_s`. Its means are about this replica's own steps; the Trainer alone
    would divide by the run's steps. Trackers of `report_to` run before this callback, and see neither. Put these
    callbacks after this one with `trainer.add_callback(trainer.pop_callback(WandbCallback))`, or use `replicas launch
    --tracker wandb`.

    Args:
        inner_steps: Updates of the optimizer from one round to the next, at least 1, default 500.
            `gradient_accumulation_steps` does not change it.
        options: Other arguments of `DiLoCo`, except `total_steps`, which is the trainer's `max_steps`. The default of
            `snapshot_every` is smaller than in `DiLoCo` if few rounds are planned.

    Raises:
        TypeError: `DiLoCo` has no such argument, or the trainer decides it.
        ValueError: When training begins: the Trainer does not use all processes of the replica, or it uses DeepSpeed or
            FSDP1. Or another replica uses the same folder.
    """

    def __init__(self, inner_steps: int = 500, **options: Any) -> None:
        self._options = check_options(inner_steps, options)
        self._link: TrainerLink | None = None
        self._data = DataPosition()
        self._folder: OwnFolder | None = None
        self._advice = ADVICE
        """The advice in the message for replicas that train on the same data."""
        self._was_terminated = False
        self._control: tuple[Any, type[Any]] | None = None
        """The trainer's control, and its class before this training."""
        self._begun_at = self._logged_at = 0
        self._n_steps = self._n_unlogged = 0
        """The steps of this replica. The run's step also grows while this replica is away."""

    @property
    def diloco(self) -> Any:
        """The `DiLoCo` of the training. None before training has begun.

        callback.diloco.average_also(ema)
        """
        return None if self._link is None else self._link.diloco

    # -- begin -------------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **with_: Any
    ) -> None:
        replica = current_replica()
        if self._link is not None:
            raise ValueError(
                "This DiLoCoCallback was used by an earlier train(). Create another one, with another name=…."
            )
        if problem := _problem_of(args, replica, with_.get("model")):
            raise ValueError(problem)
        if replica.rank != 0:
            _leave_pushes_to_rank_0()
        # The other processes of the replica use the same folder, and would print the same warnings.
        is_leader = replica.member == 0
        self._folder = OwnFolder(Path(args.output_dir), replica) if is_leader else None
        if self._folder is not None:
            self._folder.check()
        # An added rank is not part of the launch's world_size, which may be 1 although there are several replicas.
        has_own = getattr(args, "of_replica", None) == replica.rank
        is_stream = isinstance(getattr(with_["train_dataloader"], "dataset", None), IterableDataset)
        self._advice = ADVICE if has_own or is_stream else OWN_ORDER
        # A stream does not show whether it is a share. A script that uses `replica_arguments` is trusted to use shares.
        if is_leader and max(replica.world_size, replica.rank + 1) > 1 and not has_own:
            log.warning("rank %s: %s", replica.rank, SAME_STREAM if is_stream else SAME_ORDER)
        if is_leader and args.load_best_model_at_end:
            self._warn_of_own_best(args, state, with_["train_dataloader"])
        self._begun_at = self._logged_at = state.global_step
        link = TrainerLink(with_["model"], state.max_steps, self._options, begun_at=state.global_step)
        optimizer = with_["optimizer"]
        link.diloco.attach_state("optimizer", getattr(optimizer, "optimizer", optimizer))
        link.attach_schedule("schedule", with_["lr_scheduler"])
        if (scaler := getattr(optimizer, "scaler", None)) is not None:
            link.diloco.attach_state("scaler", scaler)
        self._data.begin_at(*_begin_of_data(args, state, with_["train_dataloader"]))
        link.diloco.attach_state("data", self._data)
        args.ignore_data_skip |= self._data.is_loaded
        self._data.go_to(with_["train_dataloader"])
        state.global_step = link.trainer_step
        self._link = link
        self._end_together(control)
        if self._folder is not None:
            self._folder.check()
        if args.enable_jit_checkpoint:
            self._note_sigterm()

    def _end_together(self, control: TrainerControl) -> None:
        """Let the trainer see a request to stop only when the run has ended.

        So all replicas stop at the same round. An EarlyStoppingCallback, or any other callback, sets
        `control.should_training_stop` on this replica alone, during an evaluation. The trainer leaves its loop right
        after that, without calling any hook. So the attribute becomes a property, but only in this control object.
        """
        kind, name, ours = type(control), "should_training_stop", self

        def get(control: Any) -> bool:
            is_asked = bool(control.__dict__[name])
            link = ours._link
            if not is_asked or link is None or link.is_over or ours._was_terminated:
                return is_asked
            return not link.stop()

        def put(control: Any, value: bool) -> None:
            control.__dict__[name] = value

        # The subclass has the same name as the class, because a checkpoint saves the state under the class name.
        self._control = control, kind
        control.__class__ = type(kind.__name__, (kind,), {name: property(get, put)})

    def _warn_of_own_best(self, args: TrainingArguments, state: TrainerState, loader: Any) -> None:
        """Warn if evaluations are between rounds, where the model is this replica's own and not the anchor."""
        inner_steps = self._options["inner_steps"]
        every = state.eval_steps if args.eval_strategy == "steps" else _updates_per_epoch(args, state, loader)
        if every % inner_steps:
            log.warning(
                "load_best_model_at_end: evaluations every %s steps are between the rounds, which are every %s, so "
                "each replica ends with a model of its own. Use eval_strategy='steps' and eval_steps=%s.",
                every, inner_steps, math.ceil(every / inner_steps) * inner_steps,
            )  # fmt: skip

    def _note_sigterm(self) -> None:
        """Let the trainer save its checkpoint at SIGTERM, and the replica end after that."""
        save = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: Any) -> None:
            self._was_terminated = True
            if callable(save):
                save(number, frame)

        signal.signal(signal.SIGTERM, handle)

    # -- training ----------------------------------------------------------------------------------------------------

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **with_: Any) -> None:
        self._data.epoch_begins()

    def on_substep_end(self, args: Any, state: TrainerState, control: TrainerControl, **with_: Any) -> None:
        self._data.batch_seen()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **with_: Any) -> None:
        link, folder = self._link, self._folder
        assert link is not None
        self._data.batch_seen()
        self._n_steps, self._n_unlogged = self._n_steps + 1, self._n_unlogged + 1
        before = link.last
        try:
            link.step()
        except DuplicateWorkError as error:
            raise DuplicateWorkError(str(error).replace(ADVICE, self._advice)) from None
        # check again, because a replica that joined later may use the same folder
        if folder is not None and (before is None or before is not link.last):
            folder.check()
        state.global_step = link.trainer_step
        state.epoch = self._data.epochs(state.epoch)
        if link.is_over:
            control.should_training_stop = True

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **with_: Any) -> None:
        current_replica().progress()  # an evaluation may take longer than any step, and also counts as progress

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **with_: Any) -> None:
        if self._data.began_in_the_middle:
            with_["model"].zero_grad()  # the last update of a shortened epoch may be incomplete
            if not self._data.has_seen_any:
                # Transformers stops after an epoch without batches. Here an earlier attempt has seen them all.
                control.should_training_stop = False

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **with_: Any
    ) -> None:
        self._correct_means(logs, state.global_step)
        if self._link is not None and (last := self._link.last) is not None:
            logs.update({"diloco/round": last.round, "diloco/wait_s": round(last.wait_s, 3)})
        if state.log_history:
            state.log_history[-1].update(logs)
        numbers = {name: value for name, value in logs.items() if type(value) in (int, float)}
        current_replica().report(**numbers)  # report the trainer's step, which DiLoCo counts

    def _correct_means(self, logs: dict[str, Any], step: int) -> None:
        """Correct the means in the log. The trainer has divided their sums by the run's steps.

        Without the correction the means are wrong, because the run made some of these steps without this replica.
        """
        if "loss" in logs and "learning_rate" in logs and self._n_unlogged:
            logs["loss"] *= (step - self._logged_at) / self._n_unlogged
            self._logged_at, self._n_unlogged = step, 0
        elif "train_loss" in logs and self._n_steps:
            factor = (step - self._begun_at) / self._n_steps
            logs["train_loss"] *= factor
            for name in {"train_samples_per_second", "train_steps_per_second"} & logs.keys():
                logs[name] /= factor

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **with_: Any) -> None:
        assert self._link is not None
        # The trainer has saved its checkpoint and restored the handler, so the signal ends the replica now.
        if self._was_terminated and find_replica() is not None:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._control is not None:
            changed, kind = self._control
            changed.__class__ = kind
        is_best = bool(args.load_best_model_at_end and state.best_model_checkpoint)
        self._link.finish(is_asked_for=control.should_training_stop, keep_model=is_best)
        if self._folder is not None:
            self._folder.leave()


def _updates_per_epoch(args: TrainingArguments, state: TrainerState, loader: Any) -> int:
    """Return the optimizer's steps in an epoch.

    A stream has no length, so for a stream return the steps of the whole training.
    """
    try:
        return max(1, math.ceil(len(loader) / int(args.gradient_accumulation_steps)))
    except TypeError:
        return int(state.max_steps)


def _begin_of_data(args: TrainingArguments, state: TrainerState, loader: Any) -> tuple[int, int]:
    """Return the epoch in which the trainer begins after a checkpoint, and how many of its batches it skips."""
    updates = _updates_per_epoch(args, state, loader)
    epoch, made = divmod(state.global_step, updates)
    return epoch, 0 if args.ignore_data_skip else made * args.gradient_accumulation_steps


def _problem_of(args: TrainingArguments, replica: Replica, model: Any) -> str | None:
    if args.deepspeed:
        return "DiLoCoCallback cannot be used with deepspeed=…. Remove it, or use fsdp=True for a large model."
    if args.world_size != replica.members:
        return (
            f"DiLoCoCallback needs all processes of the Trainer in one replica, and this one is rank "
            f"{args.process_index} of {args.world_size} in a process group, in a replica of {replica.members}. Start "
            f"them with `replicas launch --procs {args.world_size}`."
        )
    if args.fsdp and replica.members == 1:
        return "DiLoCoCallback cannot be used with fsdp=… in one process. Remove it, or launch with --procs gpu."
    # The configuration does not show this: the default version has changed, and accelerate shards nothing on CPUs.
    if args.fsdp and not any(map(is_dtensor, model.parameters())):
        return (
            f"DiLoCoCallback got fsdp={args.fsdp!r}, and FSDP2 has not sharded the model. Use "
            "fsdp_config={'version': 2} on GPUs, because FSDP1 is not supported and accelerate shards no model on CPUs."
        )
    if args.auto_find_batch_size:
        return "DiLoCoCallback needs a constant batch size, got auto_find_batch_size=True. Pass False."
    return None


@functools.cache  # replace the method only once in a process
def _leave_pushes_to_rank_0() -> None:
    """Let `trainer.push_to_hub()` do nothing in this process, for trainers that have a DiLoCoCallback.

    Scripts call it at their end, on each replica. All replicas would push the same model to one repository at the same
    time, and all commits but one would fail. A callback can neither reach its trainer nor prevent the push, so the
    method of the class is replaced, in all replicas except rank 0.
    """
    push_to_hub = Trainer.push_to_hub

    @functools.wraps(push_to_hub)
    def pushed_by_rank_0(trainer: Any, *args: Any, **options: Any) -> Any:
        if not any(isinstance(each, DiLoCoCallback) for each in trainer.callback_handler.callbacks):
            return push_to_hub(trainer, *args, **options)
        log.warning("rank %s: push_to_hub() is left to rank 0, which pushes for all replicas.", current_replica().rank)
        return None

    Trainer.push_to_hub = pushed_by_rank_0


class OwnFolder:
    """A folder that no other replica of the run may write to.

    The same path may be one folder for all machines, or a different folder on each machine. So each replica leaves its
    number in the folder, and looks for the numbers of others.

    Args:
        folder: the folder.
        replica: the replica of this process.

    Example:
        OwnFolder(Path("out/0"), current_replica()).check()
    """

    def __init__(self, folder: Path, replica: Replica) -> None:
        self._folder = folder
        self._replica = replica
        self._numbers = folder / ".replicas" / replica.run_id

    def check(self) -> None:
        """Leave this replica's number in the folder.

        Raises:
            ValueError: another replica writes to the folder.
        """
        if self._replica.is_alone:  # also check a run of one replica, because replicas may be added to it
            return
        self._numbers.mkdir(parents=True, exist_ok=True)
        (self._numbers / str(self._replica.rank)).touch()
        others = sorted(int(number) for number in os.listdir(self._numbers) if number != str(self._replica.rank))
        if others:
            raise ValueError(
                f"Rank {others[0]} writes to output_dir={str(self._folder)!r}, too, so replicas would overwrite "
                "checkpoints. Give each replica its own folder and its own order of the data: "
                "Trainer(model, replica_arguments(args), …), from diloco.trainers.hf."
            )

    def leave(self) -> None:
        """Remove this replica's number from the folder."""
        (self._numbers / str(self._replica.rank)).unlink(missing_ok=True)
        for folder in (self._numbers, self._numbers.parent):
            if folder.is_dir() and not os.listdir(folder):
                folder.rmdir()
