"""Learning rate schedules of torch that follow a run which continues without a replica."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.training import PLAIN, leave, next_process, nudge, place
from torch import nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from diloco import DiLoCo
from diloco.lr_schedules import steps_counted, unwrapped
from diloco.trainers.trainer_link import TrainerLink
from executors.store import MemoryStore

STEPS = 80
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, STEPS),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "one cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1),
    "in turn": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=10), CosineAnnealingLR(optimizer, STEPS - 10)], [10]
    ),
    "chained": lambda optimizer: ChainedScheduler(
        [LinearLR(optimizer, 0.1, total_iters=10), ExponentialLR(optimizer, 0.99)]
    ),
}


@pytest.fixture(autouse=True)
def _processes_are_forgotten() -> None:
    next_process()


class Replica:
    """One process with a schedule that follows the run."""

    def __init__(self, where: dict[str, Any], kind: str, *, follow: bool = True, counted: int = 0) -> None:
        next_process()
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.1)
        self.schedule = SCHEDULES[kind](self.optimizer)
        for _ in range(counted):
            self.optimizer.step()
            self.schedule.step()
        self.follow = follow
        self.diloco = DiLoCo(self.model, inner_steps=4, snapshot_every=2, **PLAIN, **where)
        self.diloco.attach_state("optimizer", self.optimizer)
        self.diloco.attach_state("schedule", self.schedule, follow=follow)

    def train_until(self, step: int) -> Replica:
        while self.diloco.inner_step < step:
            nudge(self.model, 0.1)
            self.optimizer.step()
            if not self.follow:
                self.schedule.step()
            self.diloco.step()
        return self

    def end(self) -> None:
        self.diloco._workers.uploads.finish()
        leave(self.diloco)

    @property
    def rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])


def rate_at(step: int, kind: str) -> float:
    """Return the learning rate of a schedule after this number of steps."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], 0.1)
    schedule = SCHEDULES[kind](optimizer)
    for _ in range(step):
        optimizer.step()
        schedule.step()
    return float(optimizer.param_groups[0]["lr"])


def run_that_went_on(kind: str, *, follow: bool = True) -> MemoryStore:
    """Return the store of a run whose rank 0 ended after 20 steps, and which another rank continued to step 60."""
    store = MemoryStore()
    Replica(place(store), kind, follow=follow).train_until(20).end()
    Replica({**place(store), "rank": "join"}, kind).train_until(60).end()
    return store


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_that_follows_is_where_the_run_is_after_coming_back(kind: str) -> None:
    back = Replica(place(run_that_went_on(kind)), kind)
    assert back.diloco.inner_step == 60
    assert back.rate == pytest.approx(rate_at(60, kind))
    back.train_until(70)
    assert back.diloco.inner_step == steps_counted(back.schedule) == 70
    assert back.rate == pytest.approx(rate_at(70, kind))
    back.end()


def test_a_schedule_that_follows_is_stepped_with_each_step(caplog: pytest.LogCaptureFixture) -> None:
    one = Replica(place(), "cosine").train_until(7)
    assert one.rate == pytest.approx(rate_at(7, "cosine"))
    assert caplog.text == ""
    one.end()


@pytest.mark.parametrize("kind", ["lambda", "in turn"])
def test_a_schedule_that_has_counted_steps_before_the_run_continues_from_there(kind: str) -> None:
    """A new run begins with the script's own checkpoint. Then its replica starts again, with that checkpoint or
    without.
    """
    store = MemoryStore()
    one = Replica(place(store), kind, counted=10).train_until(20)
    assert one.rate == pytest.approx(rate_at(30, kind))
    one.end()
    for counted in (10, 0):
        back = Replica(place(store), kind, counted=counted)
        assert back.diloco.inner_step == 20
        assert back.rate == pytest.approx(rate_at(30, kind))
        back.end()


def test_the_schedule_of_an_added_rank_continues_at_the_step_of_the_others() -> None:
    store = MemoryStore()
    one = Replica(place(store), "lambda", counted=10).train_until(20)
    added = Replica({**place(store), "rank": "join"}, "lambda", counted=10)
    assert added.diloco.inner_step == 20
    assert added.rate == pytest.approx(rate_at(30, "lambda"))
    added.end()
    one.end()


def test_a_schedule_that_has_counted_before_the_trainer_continues_from_there() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    schedule = SCHEDULES["lambda"](optimizer)
    for _ in range(10):
        optimizer.step()
        schedule.step()
    link = TrainerLink(model, 40, {"inner_steps": 4, **PLAIN, **place(MemoryStore())})
    link.attach_schedule("schedule", schedule)
    for _ in range(20):
        nudge(model, 0.1)
        optimizer.step()
        schedule.step()
        link.step()
    assert schedule.last_epoch == 30
    leave(link.diloco)


def test_an_object_that_does_not_follow_is_named_once_with_the_steps_that_it_lags(
    caplog: pytest.LogCaptureFixture,
) -> None:
    back = Replica(place(run_that_went_on("cosine", follow=False)), "cosine", follow=False)
    lines = [line for line in caplog.messages if line.startswith("rank 0")]
    kept = back.schedule.last_epoch
    assert kept in (16, 20), "the schedule was saved with one of the last two rounds"
    assert lines == [f"rank 0: DiLoCo 'main' continued at step 60, with attached state from step {kept}"]
    back.diloco._attached.follow(100, back.diloco._training_side.phase.n_steps + 4)  # the run continued once more
    assert caplog.messages[-1] == (
        f"rank 0: DiLoCo 'main' continued at step 100, with attached state from step {kept + 4}"
    )
    assert back.schedule.last_epoch == kept
    back.end()


def greedy(optimizer: torch.optim.Optimizer) -> Any:
    """Return a schedule that needs a metric, like one of transformers."""
    return SimpleNamespace(last_epoch=0, step=lambda metric: None)


WRAPPED: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str]] = {
    "an optimizer": (lambda optimizer: optimizer, "Attach an optimizer without follow=True"),
    "plateau": (ReduceLROnPlateau, r"attach it without follow=True, and call its step\(metric\) yourself"),
    "by a metric": (greedy, r"call its step\(metric\) yourself"),
    "Lightning's dictionary": (
        lambda optimizer: {"scheduler": LinearLR(optimizer), "interval": "step"},
        "got a dict.*Pass its 'scheduler', if that is stepped once per inner step",
    ),
    "a user's wrapper": (lambda optimizer: SimpleNamespace(scheduler=LinearLR(optimizer)), "Pass its .scheduler, if"),
    "timm's": (
        lambda optimizer: SimpleNamespace(step=lambda epoch: None, step_update=lambda n: None),
        r"call its step_update\(diloco.inner_step\) after each diloco.step\(\)",
    ),
    "a function": (lambda optimizer: lambda step: 0.1, "a function of `diloco.inner_step`"),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_schedule_that_cannot_follow_is_refused_with_its_remedy(kind: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    diloco = DiLoCo(nn.Linear(1, 1), **place())
    made, remedy = WRAPPED[kind]
    with pytest.raises(TypeError, match=rf"needs a learning rate schedule of torch that counts its steps .*{remedy}"):
        diloco.attach_state("schedule", made(optimizer), follow=True)
    leave(diloco)


def test_an_optimizer_is_attached_before_its_schedule() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    diloco = DiLoCo(nn.Linear(1, 1), **place())
    diloco.attach_state("schedule", LinearLR(optimizer), follow=True)
    with pytest.raises(ValueError, match="Optimizer 'optimizer' was attached after its schedule"):
        diloco.attach_state("optimizer", optimizer)
    leave(diloco)


def test_a_schedule_and_an_optimizer_that_accelerate_prepared_follow_the_run_while_gradients_accumulate() -> None:
    accelerate = pytest.importorskip("accelerate")
    store, accelerator = MemoryStore(), accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)

    def trained(until: int) -> tuple[DiLoCo, Any]:
        next_process()
        model = nn.Linear(2, 1)
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, SCHEDULES["cosine"](optimizer))
        diloco = DiLoCo(model, inner_steps=4, snapshot_every=1, **PLAIN, **place(store))
        diloco.attach_state("optimizer", optimizer)
        diloco.attach_state("schedule", schedule, follow=True)
        while diloco.inner_step < until:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                schedule.step()  # the script also steps the schedule, which does no harm
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                diloco.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(rate_at(until, "cosine"))
        return diloco, optimizer

    first, _ = trained(8)
    first._workers.uploads.finish()
    leave(first)
    second, optimizer = trained(13)
    steps = {int(state["step"]) for state in optimizer.optimizer.state.values()}
    assert steps == {13}, "the optimizer's own state was restored, too"
    leave(second)


def test_a_prepared_schedule_that_takes_a_step_per_process_is_refused() -> None:
    pytest.importorskip("accelerate")
    from accelerate.scheduler import AcceleratedScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    prepared = SimpleNamespace(accelerator_state=SimpleNamespace(num_processes=4))
    with pytest.raises(TypeError, match=r"makes 4 steps per update.*Attach the schedule of torch"):
        unwrapped(AcceleratedScheduler(LinearLR(optimizer), prepared))


def test_a_model_optimizer_and_schedule_that_fabric_set_up_are_shared_and_attached() -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    plain = nn.Linear(2, 1)
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), 0.1))
    schedule = SCHEDULES["cosine"](optimizer)
    diloco = DiLoCo(model, inner_steps=4, **PLAIN, **place())
    diloco.attach_state("optimizer", optimizer)
    diloco.attach_state("schedule", schedule, follow=True)
    for _ in range(8):
        fabric.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        diloco.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(rate_at(8, "cosine"))
    assert all(torch.equal(plain.get_parameter(name), values) for name, values in diloco.anchor().items())
    leave(diloco)


def train_with_own_steps(every: int, *, after: int = 0) -> list[str]:
    """Return the warnings of a loop whose script also steps the schedule that follows, every few inner steps."""
    one = Replica(place(), "lambda")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(1, 31):
            nudge(one.model, 0.1)
            one.optimizer.step()
            if number > after and number % every == 0:
                one.schedule.step()
            one.diloco.step()
    one.end()
    return [str(each.message) for each in caught if "follow" in str(each.message)]


@pytest.mark.parametrize("every", [5, 10])
def test_a_schedule_that_counts_epochs_and_follows_is_a_warning(every: int) -> None:
    (message,) = train_with_own_steps(every)
    assert message.startswith(f"The schedule 'schedule' follows the run, and the script stepped it after {every} inner")
    assert "without follow=True" in message


def test_a_schedule_that_begins_later_than_the_run_and_follows_is_a_warning() -> None:
    assert len(train_with_own_steps(1, after=10)) == 1


def test_a_schedule_that_the_script_steps_with_each_inner_step_may_follow() -> None:
    assert train_with_own_steps(1) == train_with_own_steps(2) == []
