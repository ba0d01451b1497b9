"""The loop around `DiLoCo.step()`: its first step, its end, and the model after it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from support.training import PLAIN, leave, next_process, nudge, place
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, OneCycleLR, SequentialLR

from diloco import DiLoCo
from diloco.errors import DiLoCoError
from diloco.testing import run_replicas
from diloco.training_loop import IDLE_PASSES
from executors.store import MemoryStore


def values_of(model: nn.Module) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def anchor_of(diloco: DiLoCo) -> list[float]:
    return [float(value) for tensor in diloco.anchor().values() for value in tensor.flatten()]


@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"overlap_steps": 1}, {"wire": "int8"}], ids=str)
def test_a_loop_over_steps_makes_each_planned_step_once_and_ends_with_one_model(options: dict[str, Any]) -> None:
    def body(where: Mapping[str, Any]) -> tuple[list[int], list[float], list[float]]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        diloco = DiLoCo(model, inner_steps=4, total_steps=10, **PLAIN, **options, **where)
        steps = []
        for step in diloco.steps():
            steps.append(step)
            nudge(model, 1.0 + where["rank"])
            diloco.step()
        assert diloco.is_over
        diloco.close()
        return steps, values_of(model), anchor_of(diloco)

    (steps, values, anchor), (_, others, _) = run_replicas(2, body)
    assert steps == list(range(10))
    assert values == others == anchor


def test_a_loop_by_the_clock_ends_with_the_last_planned_round() -> None:
    model = nn.Linear(1, 1)
    diloco = DiLoCo(model, round_seconds=0.02, total_rounds=3, **PLAIN, **place())
    for _ in diloco.steps():
        nudge(model, 1.0)
        diloco.step()
    assert (diloco.is_over, diloco.progress) == (True, 1.0)
    diloco.close()
    assert values_of(model) == anchor_of(diloco)


def test_a_resumed_replica_makes_only_the_remaining_steps() -> None:
    store = MemoryStore()
    first = DiLoCo(nn.Linear(1, 1), inner_steps=2, total_steps=6, snapshot_every=1, **PLAIN, **place(store))
    for _, _ in zip(range(4), first.steps(), strict=False):
        nudge(first._model_state.model, 1.0)
        first.step()
    leave(first)
    next_process()
    with DiLoCo(
        model := nn.Linear(1, 1), inner_steps=2, total_steps=6, snapshot_every=1, **PLAIN, **place(store)
    ) as second:
        steps = []
        for step in second.steps():
            steps.append(step)
            nudge(model, 1.0)
            second.step()
    assert steps == [4, 5]
    next_process()
    with DiLoCo(nn.Linear(1, 1), inner_steps=2, total_steps=6, snapshot_every=1, **PLAIN, **place(store)) as third:
        assert third.is_over
        assert list(third.steps()) == [5]
        assert list(third.steps()) == [], "the last pass is made only once in a process"


@pytest.mark.parametrize("calls_step", [True, False])
def test_a_replica_that_is_started_after_the_last_round_makes_the_last_pass_again_and_keeps_the_anchor(
    calls_step: bool,
) -> None:
    """Code after the loop uses the loop's variables, so they have to exist; the pass itself changes nothing."""
    store = MemoryStore()
    options: dict[str, Any] = {"inner_steps": 2, "total_steps": 6, **PLAIN, **place(store)}
    for attempt in range(2):
        model, ema = nn.Linear(2, 1), nn.Linear(2, 1)
        diloco = DiLoCo(model, **options)
        diloco.average_also(ema)
        passes = []
        for step in diloco.steps():
            passes.append(step)
            nudge(model, 1.0)
            nudge(ema, 0.5)
            loss = model.weight.sum().item()
            if calls_step or attempt == 0:
                diloco.step()
        assert passes == ([5] if attempt else list(range(6)))
        assert (diloco.inner_step, diloco.rounds) == (6, 3)
        assert (values_of(model), values_of(ema)) == (anchor_of(diloco), anchor_of(diloco._extra[0][0]))
        assert loss != model.weight.sum().item() or attempt == 0
        diloco.close()  # does not warn of steps that are in no average
        next_process()


def test_a_loop_of_the_user_that_begins_at_0_after_the_last_round_is_warned_of() -> None:
    store = MemoryStore()
    options: dict[str, Any] = {"inner_steps": 2, "total_steps": 4, **PLAIN, **place(store)}
    with DiLoCo(model := nn.Linear(2, 1), **options) as first:
        for _ in first.steps():
            nudge(model, 1.0)
            first.step()
    next_process()
    with DiLoCo(nn.Linear(2, 1), **options) as second:
        second.step()
        with pytest.warns(UserWarning, match=r"step\(\) was called after the end of the run"):
            second.step()


@pytest.mark.parametrize(
    ("options", "argument"), [({"inner_steps": 5}, "total_steps"), ({"round_seconds": 1.0}, "total_rounds")]
)
def test_steps_without_a_planned_end_name_the_argument_that_plans_one(options: dict[str, Any], argument: str) -> None:
    diloco = DiLoCo(nn.Linear(1, 1), **options, **place())
    with pytest.raises(DiLoCoError, match=f"Pass {argument}="):
        diloco.steps()
    assert not diloco.is_over
    leave(diloco)


def test_a_loop_over_steps_that_never_calls_step_is_an_error_and_not_endless() -> None:
    diloco = DiLoCo(nn.Linear(1, 1), inner_steps=5, total_steps=10, **PLAIN, **place())
    steps = diloco.steps()
    assert [next(steps) for _ in range(IDLE_PASSES)] == [0] * IDLE_PASSES
    with pytest.raises(DiLoCoError, match=r"Call diloco\.step\(\)"):
        next(steps)
    leave(diloco)


def test_a_step_past_the_end_warns_once_and_the_model_keeps_the_anchor() -> None:
    model = nn.Linear(2, 1)
    diloco = DiLoCo(model, inner_steps=2, total_steps=4, **PLAIN, **place())
    for _ in range(4):
        nudge(model, 1.0)
        diloco.step()
    anchor = anchor_of(diloco)
    nudge(model, 1.0)
    with pytest.warns(UserWarning, match=r"after the end of the run \(total_steps=4, at inner step 4\)"):
        assert diloco.step() is None
    assert (values_of(model), diloco.inner_step, diloco.rounds) == (anchor, 4, 2)
    nudge(model, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        diloco.step()
        nudge(model, 1.0)
        diloco.close()  # does not warn of steps that are in no average: they were undone
    assert values_of(model) == anchor


def test_sync_past_the_end_warns_has_no_round_and_undoes_the_steps_before_as_step_does() -> None:
    model, ema = nn.Linear(2, 1), nn.Linear(2, 1)
    diloco = DiLoCo(model, inner_steps=2, total_steps=4, **PLAIN, **place())
    diloco.average_also(ema)
    for _ in diloco.steps():
        nudge(model, 1.0)
        diloco.step()
    anchor, average = anchor_of(diloco), values_of(ema)
    nudge(model, 1.0)
    nudge(ema, 1.0)
    with pytest.warns(UserWarning, match=r"sync\(\) was called after the end of the run \(total_steps=4"):
        assert diloco.sync() == []
    assert (values_of(model), values_of(ema), diloco.rounds, diloco.inner_step) == (anchor, average, 2, 4)
    diloco.close()
    assert values_of(model) == anchor


@pytest.mark.filterwarnings("ignore:.*after the end of the run:UserWarning")
def test_replicas_whose_loops_run_past_the_end_by_different_numbers_of_steps_end_with_one_model() -> None:
    def body(where: Mapping[str, Any]) -> list[float]:
        model = nn.Linear(2, 1)
        with DiLoCo(model, inner_steps=3, total_steps=7, **PLAIN, **where) as diloco:
            for _ in range(8 + 5 * where["rank"]):
                nudge(model, 1.0 + where["rank"])
                diloco.step()
        return values_of(model)

    first, second = run_replicas(2, body)
    assert first == second


def test_a_run_ends_at_once_if_sync_runs_its_last_planned_round_early() -> None:
    model = nn.Linear(1, 1)
    diloco = DiLoCo(model, inner_steps=2, total_steps=4, **PLAIN, **place())
    for _ in range(3):
        nudge(model, 1.0)
        diloco.step()
    diloco.sync()
    assert diloco.is_over
    diloco.close()


def test_after_closing_each_replica_holds_the_anchor_also_without_a_planned_end() -> None:
    def body(where: Mapping[str, Any]) -> tuple[list[float], str]:
        model = nn.Linear(2, 1)
        diloco = DiLoCo(model, inner_steps=2, **PLAIN, **where)
        for _ in range(5):
            nudge(model, 1.0 + where["rank"])
            diloco.step()
        try:
            diloco.close()
        except UserWarning as warning:  # the tests' settings make errors of warnings
            return values_of(model), str(warning)
        return values_of(model), ""

    (first, warning), (second, _) = run_replicas(2, body)
    assert first == second
    assert "the model no longer contains it" in warning


def test_a_model_without_any_round_keeps_its_trained_values() -> None:
    model = nn.Linear(1, 1)
    diloco = DiLoCo(model, inner_steps=5, allow_no_rounds=True, **place())
    nudge(model, 1.0)
    values = values_of(model)
    diloco.step()
    diloco.close()
    assert values_of(model) == values


def test_an_error_in_the_loop_leaves_the_live_model_as_it_was() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ZeroDivisionError), DiLoCo(model, inner_steps=1, **PLAIN, **place()) as diloco:  # noqa: PT012
        diloco.step()
        nudge(model, 1.0)
        values = values_of(model)
        raise ZeroDivisionError
    assert values_of(model) == values


def test_a_users_own_loop_gets_a_line_with_its_first_step_when_it_comes_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = MemoryStore()
    first = DiLoCo(nn.Linear(1, 1), inner_steps=2, total_steps=6, snapshot_every=1, **PLAIN, **place(store))
    for _ in range(2):
        nudge(first._model_state.model, 1.0)
        first.step()
    leave(first)
    assert "inner step" not in capsys.readouterr().err
    next_process()
    second = DiLoCo(nn.Linear(1, 1), inner_steps=2, total_steps=6, snapshot_every=1, **PLAIN, **place(store))
    second.step()
    second.step()
    assert capsys.readouterr().err.count("continues at inner step 2 of 6") == 1
    leave(second)
    next_process()
    third = DiLoCo(nn.Linear(1, 1), inner_steps=2, total_steps=6, snapshot_every=1, **PLAIN, **place(store))
    next(third.steps())
    third.step()
    assert "inner step" not in capsys.readouterr().err
    leave(third)


def test_a_loop_that_reads_the_runs_step_or_uses_steps_of_another_diloco_gets_no_line_about_its_begin(
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = MemoryStore()
    options: dict[str, Any] = {"inner_steps": 2, "total_steps": 8, "snapshot_every": 1, **PLAIN, **place(store)}

    def by_range(first: DiLoCo) -> Iterable[int]:
        return range(first.inner_step, 8)

    def by_steps(first: DiLoCo) -> Iterable[int]:
        return first.steps()

    def while_not_over(first: DiLoCo) -> Iterable[int]:
        return iter(lambda: first.is_over, True)

    for loop in (by_range, by_range, by_steps, while_not_over):
        first, second = (DiLoCo(nn.Linear(1, 1), name=name, **options) for name in ("generator", "critic"))
        for _, _ in zip(range(2), loop(first), strict=False):
            for diloco in (first, second):
                nudge(diloco._model_state.model, 1.0)
                diloco.step()
        leave(first)
        leave(second)
        next_process()
    assert "must begin" not in capsys.readouterr().err


def one_cycle(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    return OneCycleLR(optimizer, 0.1, total_steps=steps)


def behind_a_warmup(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    warmup = LambdaLR(optimizer, lambda step: (step + 1) / 4)
    return SequentialLR(optimizer, [warmup, one_cycle(optimizer, steps - 3)], milestones=[3])


def chained(optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    return ChainedScheduler([LambdaLR(optimizer, lambda step: 1.0), one_cycle(optimizer, steps)])


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning", "ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("schedule_of", [one_cycle, behind_a_warmup, chained])
@pytest.mark.parametrize("length", [6, 4])
def test_a_schedule_that_follows_stops_at_its_own_end_and_at_the_end_of_the_run(schedule_of: Any, length: int) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = schedule_of(optimizer, length)
    diloco = DiLoCo(model, inner_steps=2, total_steps=6, **PLAIN, **place())
    diloco.attach_state("optimizer", optimizer)
    diloco.attach_state("schedule", schedule, follow=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(9):
            optimizer.step()
            diloco.step()
        diloco.close()
    said = [str(warning.message) for warning in caught]
    assert sum("The schedule 'schedule' ends at step 4" in text for text in said) == (length < 6)
    assert sum("after the end of the run" in text for text in said) == 1
