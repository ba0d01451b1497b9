"""DiLoCo in the Trainer of transformers: each promise of the callback, with the real Trainer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.hf_trainers import INNER, ITEMS, STEPS, WARNINGS, Killed, Model, Stream, arguments, is_anchor, trainer
from support.training import next_process, place

from diloco import DiLoCo
from diloco.duplicate_work import ADVICE, DuplicateWorkCheck
from diloco.errors import DuplicateWorkError
from executors.replica import Replica, set_current_replica
from executors.replica.shared_page import SharedPage
from executors.store import MemoryStore
from executors.view.report.root_cause import MAX_CHARACTERS

transformers = pytest.importorskip("transformers", reason="pip install 'serverless-replicas[hf-trainer]'")
from diloco.trainers import hf  # noqa: E402
from diloco.trainers.hf import OWN_ORDER, DiLoCoCallback, replica_arguments  # noqa: E402
from diloco.trainers.trainer_link import TrainerLink  # noqa: E402

pytestmark = WARNINGS


@pytest.fixture(autouse=True)
def _a_replica(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    next_process()
    # otherwise each test warns that it is not a replica
    set_current_replica(Replica(0, 1, "another", 0, "memory://hf"))
    yield
    set_current_replica(None)


def test_a_round_counts_updates_and_the_model_that_is_evaluated_and_saved_at_it_is_the_anchor(tmp_path: Path) -> None:
    more: dict[str, Any] = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    one = trainer(tmp_path, MemoryStore(), **more, save_strategy="steps", save_steps=INNER)
    one.train()
    assert one.ours.diloco.rounds == STEPS // INNER
    assert one.watch.evaluated == list(range(INNER, STEPS + 1, INNER)), "the trainer evaluates only right after a round"
    assert is_anchor(one.model, one.ours.diloco)
    from safetensors.torch import load_file

    assert [int(folder.name.partition("-")[2]) for folder in one.watch.saved] == one.watch.evaluated
    last = load_file(one.watch.saved[-1] / "model.safetensors")
    assert all(torch.equal(last[name], values) for name, values in one.ours.diloco.anchor().items())


def test_the_log_has_rounds_and_the_replica_reports_the_numbers_of_the_trainer(tmp_path: Path) -> None:
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
    back.callback_handler.callbacks.insert(1, tracker)  # trackers of `report_to` are at this place
    back.add_callback(back.pop_callback(Tracker))
    back.train()
    assert tracker.rows[0]["step"] == 10
    assert "diloco/round" in tracker.rows[-1]
    for told, kept in zip(tracker.rows, back.state.log_history, strict=True):
        assert told == {name: value for name, value in kept.items() if name in told}


@pytest.mark.parametrize("rank", [0, 1])
def test_a_script_that_pushes_at_its_end_pushes_from_rank_0_alone(
    tmp_path: Path, rank: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pushed = []
    monkeypatch.setattr(transformers.Trainer, "push_to_hub", lambda trainer, message: pushed.append(message))
    hf._leave_pushes_to_rank_0.cache_clear()
    set_current_replica(Replica(rank, 2, "another", 0, "memory://hf"))
    one = trainer(tmp_path, MemoryStore())
    one.train()
    one.push_to_hub("the end")
    assert pushed == (["the end"] if rank == 0 else [])
    assert ("push_to_hub() is left to rank 0" in caplog.text) == (rank != 0)
    transformers.Trainer(Model(), arguments(tmp_path / "another")).push_to_hub("of no run")
    assert pushed[-1] == "of no run"
    hf._leave_pushes_to_rank_0.cache_clear()


def test_the_best_model_stays_if_the_trainer_loads_it_at_the_end(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("evaluates", "advice"),
    [
        ({"eval_strategy": "steps", "eval_steps": INNER, "save_strategy": "steps", "save_steps": INNER}, None),
        ({"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}, "eval_steps=8"),
        ({"eval_strategy": "epoch", "save_strategy": "epoch"}, "evaluations every 13 steps .* eval_steps=16"),
    ],
)
def test_a_trainer_whose_best_model_may_be_between_rounds_gets_a_warning(
    tmp_path: Path, evaluates: dict[str, Any], advice: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(tmp_path, MemoryStore(), load_best_model_at_end=True, **evaluates).train()
    (said,) = [line for line in caplog.messages if line.startswith("load_best_model_at_end")] or [""]
    assert re.search(advice, said) if advice else not said


def test_the_best_model_stays_where_training_ends_early_with_a_round_on_its_way(tmp_path: Path) -> None:
    steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    best: dict[str, Any] = {"load_best_model_at_end": True, "greater_is_better": True}
    one = trainer(tmp_path, MemoryStore(), {"overlap_steps": 2}, **steps, **best)
    one.add_callback(transformers.EarlyStoppingCallback(1))
    one.train()
    assert (one.state.best_global_step, one.state.global_step) == (5, 16)
    assert one.ours.diloco.rounds == 4, "the request to stop travels with the fourth round"
    from safetensors.torch import load_file

    for name, values in load_file(tmp_path / "checkpoint-5/model.safetensors").items():
        assert torch.equal(one.model.state_dict()[name], values), name


class Stops(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """Asks the trainer to stop during an evaluation, like an EarlyStoppingCallback."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **with_: Any) -> None:
        control.should_training_stop = True


@pytest.mark.parametrize("is_first", [True, False])
def test_a_trainer_that_wants_to_stop_asks_the_run_once_and_trains_until_the_run_has_ended(
    tmp_path: Path, is_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[int]()
    monkeypatch.setattr(DiLoCo, "stop", lambda diloco: asked.append(diloco.inner_step), raising=False)
    one = trainer(tmp_path, MemoryStore(), eval_strategy="steps", eval_steps=5)
    one.add_callback(Stops())
    if is_first:
        one.add_callback(one.pop_callback(DiLoCoCallback))
    one.train()
    assert (asked, one.state.global_step) == ([5], STEPS)
    assert type(one.control) is transformers.TrainerControl, "the control of the trainer has its own class again"


def test_progress_of_a_run_from_a_checkpoint_counts_the_trainers_steps(tmp_path: Path) -> None:
    trainer(tmp_path, MemoryStore(), max_steps=8, save_strategy="steps", save_steps=8).train()
    next_process()
    replica = Replica(0, 1, "another", 0, "memory://hf")
    set_current_replica(replica)
    trainer(tmp_path, MemoryStore()).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert (replica.reported["step"], replica.reported["total_steps"]) == (STEPS, STEPS)


def test_a_schedule_that_is_stepped_by_a_metric_is_kept_and_not_followed(tmp_path: Path) -> None:
    if "greedy" not in {each.value for each in transformers.SchedulerType}:
        pytest.skip("this release of transformers has no such schedule")
    more: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": INNER, "metric_for_best_model": "loss"}
    one = trainer(tmp_path, MemoryStore(), lr_scheduler_type="greedy", **more)
    one.train()
    assert one.state.global_step == STEPS
    assert one.lr_scheduler.last_epoch == STEPS // INNER, "evaluations"


def refused(made: Any, **train: Any) -> str:
    with pytest.raises(ValueError, match=r"\.$") as caught:
        made.train(**train)
    return str(caught.value)


def test_impossible_settings_are_refused_before_training(tmp_path: Path) -> None:
    one = trainer(tmp_path, MemoryStore())
    one.train()
    assert "was used by an earlier train(). Create another one" in refused(one)
    for name, value, message in [
        ("fsdp", True, "cannot be used with fsdp"),
        ("deepspeed", {"zero": 1}, "cannot be used with deepspeed"),
        ("auto_find_batch_size", True, "needs a constant batch size"),
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
    with pytest.raises(TypeError, match=r"cannot use round_seconds=30, .*inner_steps.*for step in diloco.steps\(\)"):
        DiLoCoCallback(round_seconds=30)


class FourProcesses:
    num_processes, process_index, local_process_index = 4, 3, 3


@pytest.mark.parametrize("world_size", [2, 1])  # with world size 1, rank 1 was added later
@pytest.mark.parametrize("has_own", [True, False])
def test_a_trainer_with_the_seed_of_all_replicas_gets_a_warning_before_training(
    tmp_path: Path, has_own: bool, world_size: int, caplog: pytest.LogCaptureFixture
) -> None:
    set_current_replica(Replica(1, world_size, "another", 0, "memory://hf"))
    one = trainer(tmp_path, MemoryStore())
    if has_own:
        one.args = replica_arguments(one.args)
    one.train()
    said = [record.getMessage() for record in caplog.records if "same in each replica, unless" in record.getMessage()]
    assert len(said) == (0 if has_own else 1)


@pytest.mark.parametrize("has_own", [True, False])
def test_a_trainer_with_a_stream_and_the_arguments_of_all_is_advised_to_shard_it(
    tmp_path: Path, has_own: bool, caplog: pytest.LogCaptureFixture
) -> None:
    set_current_replica(Replica(1, 2, "another", 0, "memory://hf"))
    one = trainer(tmp_path, MemoryStore(), data=Stream(), max_steps=4)
    if has_own:
        one.args = replica_arguments(one.args)
    one.train()
    said = [record.getMessage() for record in caplog.records if "the same order in each replica" in record.getMessage()]
    assert ["current_replica().shard(dataset)" in line for line in said] == ([] if has_own else [True])


@pytest.mark.parametrize(
    ("has_own", "data", "advice"), [(False, ITEMS, OWN_ORDER), (True, ITEMS, ADVICE), (False, Stream(), ADVICE)]
)
def test_the_advice_for_replicas_that_train_on_the_same_data_fits_into_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_own: bool, data: Any, advice: str
) -> None:
    report: Any = SimpleNamespace(round=10, counted=True, norm=1.0, same=tuple(range(4, 64)))
    check = DuplicateWorkCheck("raise", 4, None, lambda entry: True).check
    monkeypatch.setattr(TrainerLink, "step", lambda self: check([report] * 3))
    one = trainer(tmp_path, MemoryStore(), data=data)
    one.args.of_replica = 0 if has_own else None
    with pytest.raises(DuplicateWorkError) as error:
        one.train()
    assert str(error.value) == (
        "Ranks 4, 5, 6, 7 and 56 more sent identical contributions 3 rounds in a row, up to round 10: they train on "
        f'the same data. {advice} If it is intended, pass same_data="allow".'
    )
    assert "replica_arguments(args)" in OWN_ORDER
    assert len(f"diloco.errors.DuplicateWorkError: {error.value}") <= MAX_CHARACTERS


def test_a_long_evaluation_is_progress(tmp_path: Path) -> None:
    page = SharedPage()
    set_current_replica(Replica(0, 1, "another", 0, "memory://hf", page=page))
    asked = arguments(tmp_path, per_device_eval_batch_size=1)
    transformers.Trainer(Model(), asked, eval_dataset=ITEMS[:4], callbacks=[DiLoCoCallback()]).evaluate()
    assert page.progress_marks >= 4, "each evaluated batch is a mark of progress"
