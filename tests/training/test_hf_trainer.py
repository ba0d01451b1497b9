"""The Trainer of transformers with a DiLoCo beside it: each promise of the callback, against the real Trainer.

A replica is killed here by an error in the midst of training: what it leaves in the store is what a kill leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.training import next_process, place
from torch import nn

from diloco.errors import DuplicateWorkError
from diloco.outer import DiLoCo
from diloco.same_data import ADVICE, SameData
from executors.replica import Replica, set_current_replica
from executors.report.root_cause import MAX_CHARACTERS
from executors.shared_page import SharedPage
from executors.store import MemoryStore

transformers = pytest.importorskip("transformers", reason="pip install 'serverless-replicas[hf-trainer]'")
from diloco.trainers.companion import Companion  # noqa: E402
from diloco.trainers.hf import OWN_ORDER, DiLoCoCallback, replica_arguments  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:Only .* rounds are planned"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's, of torch
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
]
N_ITEMS, STEPS, INNER = 26, 24, 4
NONE: Mapping[str, Any] = MappingProxyType({})


@pytest.fixture(autouse=True)
def _a_replica(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    next_process()
    set_current_replica(Replica(0, 1, "another", 0, "memory://hf"))  # else each test says that it is none
    yield
    set_current_replica(None)


class Killed(Exception):
    pass


class Model(nn.Module):
    """Notes which items it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.drop = nn.Dropout(0.1)
        self.seen: list[int] = []

    def forward(self, at: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.seen += at.tolist()
        x = torch.stack([torch.sin(at + k) for k in range(3)], 1)
        return {"loss": (self.linear(x).squeeze(1) - labels).square().mean(), "logits": labels}


ITEMS = [{"at": float(at), "labels": at / N_ITEMS} for at in range(N_ITEMS)]


class Stream(torch.utils.data.IterableDataset[dict[str, float]]):
    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(ITEMS)


class Watch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Looks on, and ends the training at a step as a kill would."""

    def __init__(self, ours: Any, dies_at: int | None = None) -> None:
        self.ours = ours
        self.dies_at = dies_at
        self.evaluated: list[int] = []
        self.saved: list[Path] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **with_: Any) -> None:
        assert all(parameter.grad is None or not parameter.grad.any() for parameter in with_["model"].parameters())
        if state.global_step == self.dies_at:
            self.ours.diloco._workers.uploads.finish()
            self.ours.diloco._close(in_order=False)
            raise Killed

    def on_evaluate(self, args: Any, state: Any, control: Any, **with_: Any) -> None:
        if is_anchor(with_["model"], self.ours.diloco):
            self.evaluated.append(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **with_: Any) -> None:
        self.saved.append(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def is_anchor(model: nn.Module, diloco: DiLoCo) -> bool:
    return all(torch.equal(model.get_parameter(name), values) for name, values in diloco.anchor().items())


def arguments(folder: Path, **more: Any) -> Any:
    options: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2, "learning_rate": 0.05,
        "lr_scheduler_type": "cosine", "logging_steps": 2, "save_strategy": "no", "report_to": "none",
        "disable_tqdm": True, "remove_unused_columns": False, "use_cpu": True, "label_names": ["labels"], **more,
    }  # fmt: skip
    return transformers.TrainingArguments(**options)


def trainer(
    folder: Path, store: Any, options: Mapping[str, Any] = NONE, *, dies_at: int | None = None, data: Any = ITEMS,
    **more: Any,
) -> Any:  # fmt: skip
    ours = DiLoCoCallback(inner_steps=INNER, outer_lr=1.0, outer_momentum=0.0, **place(store), **options)
    made = transformers.Trainer(
        Model(), arguments(folder, **more), train_dataset=data, eval_dataset=ITEMS[:4], callbacks=[ours]
    )
    made.ours, made.watch = ours, Watch(ours, dies_at)
    made.add_callback(made.watch)
    return made


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
    if "epoch's end" in kind:  # of the epoch in which it came back
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
    assert back.state.log_history[-1]["train_loss"] == pytest.approx(sum(own) / len(own)), "of its own steps"
    for name, values in calm.model.state_dict().items():
        assert torch.equal(back.model.state_dict()[name], values), name


def test_a_round_is_one_of_updates_and_what_is_evaluated_and_saved_at_it_is_the_anchor(tmp_path: Path) -> None:
    more: dict[str, Any] = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    one = trainer(tmp_path, MemoryStore(), **more, save_strategy="steps", save_steps=INNER)
    one.train()
    assert one.ours.diloco.rounds == STEPS // INNER
    assert one.watch.evaluated == list(range(INNER, STEPS + 1, INNER)), "between two rounds it is the replica's own"
    assert is_anchor(one.model, one.ours.diloco)
    from safetensors.torch import load_file

    assert [int(folder.name.partition("-")[2]) for folder in one.watch.saved] == one.watch.evaluated
    last = load_file(one.watch.saved[-1] / "model.safetensors")
    assert all(torch.equal(last[name], values) for name, values in one.ours.diloco.anchor().items())


def test_the_log_has_rounds_and_the_replica_reports_what_the_trainer_logs(tmp_path: Path) -> None:
    me = Replica(0, 1, "another", 0, "memory://hf")
    set_current_replica(me)
    one = trainer(tmp_path, MemoryStore())
    one.train()
    rows = [row for row in one.state.log_history if "loss" in row]
    assert [row.get("diloco/round") for row in rows] == [None, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert rows[-1]["diloco/wait_s"] >= 0
    assert {"step", "loss", "grad_norm", "learning_rate", "diloco/round", "epoch"} <= me.reported.keys()
    assert me.reported["step"] == STEPS


class Tracker(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **with_: Any) -> None:
        self.rows.append({**logs, "step": state.global_step})


def test_a_tracker_that_was_put_behind_gets_rounds_and_means_of_the_replicas_own_steps(tmp_path: Path) -> None:
    store = MemoryStore()
    with pytest.raises(Killed):
        trainer(tmp_path, store, dies_at=9).train()
    next_process()
    back, tracker = trainer(tmp_path, store), Tracker()
    back.callback_handler.callbacks.insert(1, tracker)  # where report_to puts its own
    back.add_callback(back.pop_callback(Tracker))
    back.train()
    assert tracker.rows[0]["step"] == 10
    assert "diloco/round" in tracker.rows[-1]
    for told, kept in zip(tracker.rows, back.state.log_history, strict=True):
        assert told == {name: value for name, value in kept.items() if name in told}


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


def test_the_best_model_stays_where_the_trainer_was_told_to_load_it(tmp_path: Path) -> None:
    more: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": INNER,
        "save_strategy": "steps",
        "save_steps": INNER,
    }
    best: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    one = trainer(tmp_path, MemoryStore(), **more, **best)
    one.train()
    assert one.state.best_global_step < STEPS
    assert not is_anchor(one.model, one.ours.diloco)


def test_the_best_model_stays_where_training_ends_early_with_a_round_on_its_way(tmp_path: Path) -> None:
    steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    best: dict[str, Any] = {"load_best_model_at_end": True, "greater_is_better": True}
    one = trainer(tmp_path, MemoryStore(), {"overlap_steps": 2}, **steps, **best)
    one.add_callback(transformers.EarlyStoppingCallback(1))
    one.train()
    assert (one.state.best_global_step, one.state.global_step) == (5, 10)
    assert one.ours.diloco.rounds == 3, "the third is due at step 12, and was on its way"
    from safetensors.torch import load_file

    for name, values in load_file(tmp_path / "checkpoint-5/model.safetensors").items():
        assert torch.equal(one.model.state_dict()[name], values), name


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
    """It is given that checkpoint again, or none, or one that it has written itself."""
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
    assert died.model.seen[: 8 * 2] + back.model.seen == calm.model.seen, "it goes on where its second round was"


def test_progress_of_a_run_from_a_checkpoint_counts_the_trainers_steps(tmp_path: Path) -> None:
    trainer(tmp_path, MemoryStore(), max_steps=8, save_strategy="steps", save_steps=8).train()
    next_process()
    replica = Replica(0, 1, "another", 0, "memory://hf")
    set_current_replica(replica)
    trainer(tmp_path, MemoryStore()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert (replica.reported["step"], replica.reported["total_steps"]) == (STEPS, STEPS)


def refused(made: Any, **train: Any) -> str:
    with pytest.raises(ValueError, match=r"\.$") as caught:
        made.train(**train)
    return str(caught.value)


def test_what_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    one = trainer(tmp_path, MemoryStore())
    one.train()
    assert "one call of train(): give the next Trainer its own" in refused(one)
    for name, value, message in [
        ("fsdp", True, "cannot go with FSDP"),
        ("deepspeed", {"zero": 1}, "cannot go with DeepSpeed"),
        ("auto_find_batch_size", True, "needs a batch size that stays"),
        ("distributed_state", FourProcesses(), "this one is rank 3 of 4 in a process group"),
    ]:
        args = arguments(tmp_path)
        setattr(args, name, value)
        ours = DiLoCoCallback(inner_steps=INNER, **place(MemoryStore()))
        with pytest.raises(ValueError, match=message):
            ours.on_train_begin(args, transformers.TrainerState(), transformers.TrainerControl())
    with pytest.raises(TypeError, match="unexpected keyword argument 'inner_step'"):
        DiLoCoCallback(inner_step=5)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'total_steps'"):
        DiLoCoCallback(total_steps=5)
    with pytest.raises(TypeError, match=r"go by inner_steps, got round_seconds=30. .*while diloco.progress < 1"):
        DiLoCoCallback(round_seconds=30)


class FourProcesses:
    num_processes, process_index, local_process_index = 4, 3, 3


@pytest.mark.parametrize("world_size", [2, 1])  # 1: rank 1 was added
@pytest.mark.parametrize("has_own", [True, False])
def test_who_has_the_seed_of_all_is_told_before_training(
    tmp_path: Path, has_own: bool, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    set_current_replica(Replica(1, world_size, "another", 0, "memory://hf"))
    one = trainer(tmp_path, MemoryStore())
    if has_own:
        one.args = replica_arguments(one.args)
    one.train()
    said = [record.getMessage() for record in caplog.records if "seed is the same in each" in record.getMessage()]
    assert len(said) == (0 if has_own else 1)


@pytest.mark.parametrize("has_own", [True, False])
def test_who_has_one_stream_and_the_arguments_of_all_is_told_to_shard_it(
    tmp_path: Path, has_own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    set_current_replica(Replica(1, 2, "another", 0, "memory://hf"))
    one = trainer(tmp_path, MemoryStore(), data=Stream(), max_steps=4)
    if has_own:
        one.args = replica_arguments(one.args)
    one.train()
    said = [record.getMessage() for record in caplog.records if "the same in each replica" in record.getMessage()]
    assert ["current_replica().shard(dataset)" in line for line in said] == ([] if has_own else [True])


@pytest.mark.parametrize(
    ("has_own", "data", "advice"), [(False, ITEMS, OWN_ORDER), (True, ITEMS, ADVICE), (False, Stream(), ADVICE)]
)
def test_who_trains_on_the_same_data_is_told_what_would_help_where_a_table_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_own: bool, data: Any, advice: str
) -> None:
    report: Any = SimpleNamespace(round=10, counted=True, norm=1.0, same=tuple(range(4, 64)))
    check = SameData("raise", 4, None, lambda entry: True).check
    monkeypatch.setattr(Companion, "step", lambda self: check([report] * 3))
    one = trainer(tmp_path, MemoryStore(), data=data)
    one.args.of_replica = 0 if has_own else None
    with pytest.raises(DuplicateWorkError) as error:
        one.train()
    assert str(error.value) == (
        "Ranks 4, 5, 6, 7 and 56 more sent identical contributions 3 rounds in a row, up to round 10: they train on "
        f'the same data. {advice} Where it is meant: same_data="allow", or "warn".'
    )
    assert "replica_arguments(args)" in OWN_ORDER
    assert len(f"diloco.errors.DuplicateWorkError: {error.value}") <= MAX_CHARACTERS


def test_a_long_evaluation_is_progress(tmp_path: Path) -> None:
    page = SharedPage()
    set_current_replica(Replica(0, 1, "another", 0, "memory://hf", page=page))
    asked = arguments(tmp_path, per_device_eval_batch_size=1)
    transformers.Trainer(Model(), asked, eval_dataset=ITEMS[:4], callbacks=[DiLoCoCallback()]).evaluate()
    assert page.marks >= 4, "one for each batch"
