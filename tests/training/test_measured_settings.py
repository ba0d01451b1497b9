"""The script that measures outer settings does what `DiLoCo` does, and an interrupted measurement loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.examples import load_example
from support.training import place
from torch import nn

from diloco import DiLoCo
from executors.store import MemoryStore

INNER_STEPS, ROUNDS = 3, 5


@pytest.fixture
def script() -> Any:
    """Return the module of the script."""
    return load_example("measure_outer_settings.py")


class Training:
    """Replicas that train one after the other, each on its own batches, as a user's loop does."""

    def __init__(self, script: Any, task: str, n: int) -> None:
        self._script, self._task = script, script.TASKS[task]
        torch.manual_seed(0)
        model = self._task.model()
        self.models: list[nn.Module] = [deepcopy(model) for _ in range(n)]
        self._optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in self.models]
        self._generators = [torch.Generator().manual_seed(rank) for rank in range(n)]

    def step(self) -> None:
        for rank, (model, optimizer) in enumerate(zip(self.models, self._optimizers, strict=True)):
            inputs, targets = self._task.data().draw(rank, len(self.models), 4, self._generators[rank])
            self._script.loss_of(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


def anchor_of_replicas(models: Sequence[nn.Module], training: Training, given: dict[str, Any]) -> dict[str, Any]:
    """Train real replicas that communicate in memory, and return the shared parameters at the end."""
    store, n = MemoryStore(), len(models)
    plan = {"inner_steps": INNER_STEPS, "total_steps": INNER_STEPS * ROUNDS, **given}
    with ThreadPoolExecutor(n) as at_once:  # replicas in one run wait for each other
        replicas = list(at_once.map(lambda rank: DiLoCo(models[rank], **plan, **place(store, rank, n)), range(n)))
        for _ in range(INNER_STEPS * ROUNDS):
            training.step()
            list(at_once.map(DiLoCo.step, replicas))
        list(at_once.map(DiLoCo.close, replicas))
    return replicas[0].anchor()


@pytest.mark.parametrize("task", ["ConvNet, BatchNorm, SGD", "transformer"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"outer_momentum": 0.9},
        {"outer_lr": 1.0, "outer_momentum": 0.0},
        {"momentum_warmup": 0, "final_average": False},
        {"total_steps": None},
        {"sync_buffers": False},
    ],
    ids=str,
)
def test_replicas_of_the_script_end_with_the_anchor_of_real_replicas_bit_for_bit(
    script: Any, task: str, given: dict[str, Any]
) -> None:
    training = Training(script, task, 2)
    settings = script.settings_of(given, inner_steps=INNER_STEPS, rounds=ROUNDS, n=2)
    together = script.Together(training.models, settings, sync_buffers=given.get("sync_buffers"))
    for step in range(INNER_STEPS * ROUNDS):
        training.step()
        if (step + 1) % INNER_STEPS == 0:
            together.round(step // INNER_STEPS)

    training = Training(script, task, 2)
    anchor = anchor_of_replicas(training.models, training, given)
    for slot in together.fragment.slots:
        of_script = together.anchor[slot.start : slot.end].view(slot.shape)
        assert torch.equal(of_script, anchor.pop(slot.name)), slot.name
    assert not anchor


@pytest.mark.parametrize("name", ["transformer", "GRU", "ConvNet, BatchNorm, SGD", "ConvNet, GroupNorm, AdamW"])
def test_stacked_models_train_as_each_does_alone(script: Any, name: str) -> None:
    task: Any = script.TASKS[name]
    torch.manual_seed(0)
    alone = [task.model() for _ in range(3)]
    stacked = [deepcopy(model) for model in alone]
    inner = script.Inner(task, stacked, steps=6)
    each = [script.Inner(task, [model], steps=6) for model in alone]
    for step in range(6):
        batches = [task.data().draw(rank, 3, 4, torch.Generator().manual_seed(step)) for rank in range(3)]
        inner.step(step, batches)
        for one, batch in zip(each, batches, strict=True):
            one.step(step, [batch])
    for one, other in zip(stacked, alone, strict=True):
        for (tensor, ours), theirs in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=tensor)


def test_data_parallel_models_stay_one_model_and_others_do_not(script: Any) -> None:
    task = script.TASKS["transformer"]
    torch.manual_seed(0)
    models = [task.model()]
    models += [deepcopy(models[0]) for _ in range(3)]
    inner = script.Inner(task, models, steps=4)
    batches = [task.data().draw(rank, 4, 4, torch.Generator().manual_seed(1)) for rank in range(4)]
    inner.step(0, batches, joined=slice(2))
    heads: list[torch.Tensor] = [model.get_parameter("head.weight") for model in models]
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])
    assert not torch.equal(heads[2], heads[3])


def test_the_recurrent_model_computes_the_same_as_a_gru_of_torch(script: Any) -> None:
    torch.manual_seed(0)
    ours: Any = script.ByteGRU(8)
    theirs: Any = nn.GRU(24, 8, batch_first=True)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(torch.eye(24))
        theirs.bias_ih_l0.zero_()
        theirs.weight_hh_l0.copy_(ours.recurrent.weight)
        theirs.bias_hh_l0.copy_(ours.recurrent.bias)
    tokens = torch.randint(256, (2, 7))
    torch.testing.assert_close(ours(tokens), ours.head(theirs(ours.embedding(tokens))[0]))


def test_an_interrupted_measurement_continues_after_the_last_whole_line(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = script.grid(1, ["GRU"])[:2]
    whole, cut = (
        script.Measured(point=point, losses={"outer_momentum=0.8": 1.5}, with_new_statistics={}, seconds=0.1).line()
        + "\n"
        for point in points
    )
    lines = tmp_path / "measured.jsonl"
    lines.write_text(whole + cut[:30])
    assert [one.point for one in script.read_lines(lines)] == points[:1]

    script.begin_line(lines)
    with lines.open("a") as appended:
        appended.write(cut)
    assert [one.point for one in script.read_lines(lines)] == points

    results = tmp_path / "results.json"
    script.write_results(results, script.read_lines(lines))
    assert [one.losses for one in script.read_results(results)] == [{"outer_momentum=0.8": 1.5}] * 2


def test_a_setting_that_was_added_later_is_trained_alone_and_joins_the_finished_point(script: Any) -> None:
    added = "outer_momentum=0.8"
    point = script.Point(task="GRU", n=2, inner_steps=2, rounds=2, seed=0)
    (all_of_it,) = script.left([point], [])
    whole = script.measure(all_of_it)
    before = script.Measured(
        point=point,
        losses={name: loss for name, loss in whole.losses.items() if name != added},
        with_new_statistics={},
        seconds=1.0,
    )
    (missing,) = script.left([point], [before])
    assert missing.names == (added,)
    (joined,) = script.merged([before, script.measure(missing)])
    assert joined.losses == pytest.approx(whole.losses)
    assert script.left([point], [joined]) == []
