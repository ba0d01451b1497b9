"""The step that the live table shows: counted by `DiLoCo`, unless the script reports its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.training import PLAIN, leave, next_process, nudge
from torch import nn

from diloco import DiLoCo
from diloco.outer import open_diloco
from executors.replica import Replica, set_current_replica
from executors.replica.shared_page import SharedPage
from executors.status import Progress
from executors.store import MemoryStore


class Recorded:
    """A recorder that keeps each line."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def report(self, numbers: dict[str, float]) -> None:
        self.lines.append(dict(numbers))

    def round(self, ended: float, fields: object) -> None: ...

    def left(self, name: str, work: float) -> None: ...


@pytest.fixture
def replica() -> Iterator[Replica]:
    next_process()
    recorder, page = Recorded(), SharedPage()
    one = Replica(0, 1, "run", 0, "memory://steps", claimed_nonce="n", recorder=recorder, page=page)  # type: ignore[arg-type]
    one.__dict__["store"] = MemoryStore()
    set_current_replica(one)
    yield one
    set_current_replica(None)


def train(diloco: DiLoCo, model: nn.Module, steps: int) -> None:
    for _ in range(steps):
        nudge(model, 0.1)
        diloco.step()


def test_a_loop_that_reports_nothing_has_a_step_and_a_total(replica: Replica) -> None:
    model = nn.Linear(2, 1)
    diloco = open_diloco(model, inner_steps=4, total_steps=8, **PLAIN)
    train(diloco, model, 3)
    assert replica.reported["step"] == 3
    assert replica.page is not None
    assert replica.page.reached == {"step": 3.0}
    assert Progress.of({**replica.reported, "steps_per_s": 1.0}) is not None
    train(diloco, model, 5)
    assert (replica.reported["step"], replica.reported["total_steps"]) == (8, 8)
    diloco.close()


def test_a_loss_is_kept_with_the_step_that_it_was_reported_at(replica: Replica) -> None:
    model = nn.Linear(2, 1)
    diloco = open_diloco(model, inner_steps=4, **PLAIN)
    for step in (1, 2):
        train(diloco, model, 1)
        replica.report(loss=1 / step)
    assert replica.recorder.lines == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]  # type: ignore[union-attr]
    leave(diloco)


def test_the_steps_that_a_script_reports_replace_those_of_diloco(replica: Replica) -> None:
    model = nn.Linear(2, 1)
    diloco = open_diloco(model, inner_steps=4, **PLAIN)
    train(diloco, model, 2)
    replica.report(step=100)
    train(diloco, model, 1)
    replica.report(loss=0.5)
    assert replica.reported["step"] == 100
    assert replica.recorder.lines == [{"step": 100}, {"loss": 0.5}]  # type: ignore[union-attr]
    leave(diloco)


def test_the_steps_of_the_first_of_two_open_dilocos_are_shown_and_then_those_of_the_next(replica: Replica) -> None:
    models = [nn.Linear(2, 1) for _ in range(3)]
    first = open_diloco(models[0], inner_steps=4, **PLAIN)
    second = open_diloco(models[1], inner_steps=4, name="second", **PLAIN)
    train(first, models[0], 2)
    train(second, models[1], 5)
    assert replica.reported["step"] == 2
    leave(first)
    leave(second)
    third = open_diloco(models[2], inner_steps=4, name="third", **PLAIN)
    train(third, models[2], 1)
    assert replica.reported["step"] == 1
    leave(third)


def test_a_run_that_began_from_a_checkpoint_shows_the_trainers_steps(replica: Replica) -> None:
    model = nn.Linear(2, 1)
    diloco = open_diloco(model, inner_steps=4, total_steps=8, begun_at=100, **PLAIN)
    train(diloco, model, 3)
    assert (replica.reported["step"], replica.reported["total_steps"]) == (103, 108)
    leave(diloco)
