"""Tests the picture of a run in a notebook, and the thread that updates it."""

from __future__ import annotations

import itertools
import math
import re
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from support.new_runs import run_json

from executors.errors import StoreError
from executors.metrics.metrics import Metrics
from executors.metrics.rows import Numbers
from executors.protocol import Outcome, ReplicaStatus
from executors.status import DecisionLine, ReplicaState, RunStatus
from executors.store.memory import MemoryStore
from executors.task.record import RunRecord
from executors.testing import eventually
from executors.view import notebook
from executors.view.notebook import MAX_POINTS, Curves, Display, NotebookView, bar
from executors.view.run_view import RunView

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def state(*reports: dict[str, Any], status: ReplicaStatus = ReplicaStatus.RUNNING, attempt: int = 0) -> RunStatus:
    return RunStatus(
        "mine", "local", [ReplicaState(r, attempt, status, reported=each) for r, each in enumerate(reports)]
    )


def measured(*losses: float) -> Metrics:
    rows = [Numbers(rank=0, attempt=0, t=t, values={"step": 10.0 * t, "loss": loss}) for t, loss in enumerate(losses)]
    return Metrics(
        run_id="mine", world_size=1, began_at=0.0, as_of_s=0.0, attempts=[], rows=rows, problems=[], origins={}
    )


class ScriptedView(RunView):
    """A run whose status comes from a script. It measured nothing, and its page cannot be made."""

    def __init__(self, script: Callable[[], RunStatus]) -> None:
        super().__init__(MemoryStore(), "mine")
        self.record = RunRecord.parse(run_json(n=1))
        self._script = script

    def status(self, *, reports: bool = True) -> RunStatus:
        return self._script()

    @property
    def handles(self) -> list[Any]:
        raise StoreError("no answer")


def shown(look: Callable[[], RunStatus], view: NotebookView) -> Display:
    return Display(ScriptedView(look), view)


class Recorded(NotebookView):
    """A display that records everything that it should show."""

    def __init__(self) -> None:
        super().__init__()
        self.opened, self.shown, self.said = 0, list[str](), list[str]()

    def open(self, status: RunStatus) -> None:
        self.opened += 1

    def update(self, status: RunStatus) -> None:
        self.shown.append(str(status.status))

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "EVERY_S", 0.01)


def is_shown() -> bool:
    return any(thread.name == "replicas-show" for thread in threading.enumerate())


def test_a_curve_has_a_new_line_for_each_attempt_and_stays_small() -> None:
    curves = Curves()
    assert curves.to_svg() == ""
    for step in range(3 * MAX_POINTS):
        curves.add(state({"step": step, "loss": 1 / (step + 1)}, {"step": step, "loss": 2.0}))
    for step in (0, 1):
        curves.add(state({"step": step, "loss": 0.5}, attempt=1))
    lines = re.findall(r'points="([^"]*)"', curves.to_svg())
    assert len(lines) == 3
    assert all(len(line.split()) <= MAX_POINTS for line in lines)
    assert lines[0].startswith("60.0,90.0 ")
    assert lines[-1].split()[-1].startswith("620.0,")


def drawn(curves: Curves) -> list[list[tuple[float, float]]]:
    """Return the points of each line, in units of the picture."""
    lines = re.findall(r'points="([^"]*)"', curves.to_svg())
    return [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]  # type: ignore[misc]


def test_the_curves_of_many_attempts_stay_small() -> None:
    """The curve of a rank that came back continues at its step."""
    curves = Curves()
    for attempt in range(500):
        for step in range(100 * attempt, 100 * attempt + 90, 10):
            curves.add(state({"step": step, "loss": 1 / (step + 1)}, attempt=attempt))
    (line,) = drawn(curves)
    assert (line[0][0], line[-1][0], len(line) <= MAX_POINTS + 1) == (60.0, 620.0, True)
    many = Curves()
    for step in range(MAX_POINTS // 2):
        many.add(state(*({"step": step, "loss": 2.0} for _ in range(200))))
    assert len(drawn(many)) == 200
    assert len(many.to_svg()) < 400_000, "the curves are small, because a cell is sent every second"


def test_a_long_curve_is_as_dense_at_its_beginning_as_at_its_end() -> None:
    curves = Curves()
    for step in range(20 * MAX_POINTS + 7):
        curves.add(state({"step": step, "loss": 1 / (step + 1)}))
    (line,) = drawn(curves)
    gaps = [after[0] - before[0] for before, after in pairwise(line)]
    assert max(gaps) < 560 / (MAX_POINTS / 2) * 1.5
    assert line[-1][0] == 620.0


def test_a_cell_is_not_sent_html_that_it_already_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = list[str]()
    cell = SimpleNamespace(update=sent.append)
    monkeypatch.setattr(notebook, "_kit", lambda: SimpleNamespace(HTML=str, display=lambda *_, **__: cell))
    view, first, second = NotebookView(), state({"step": 1, "loss": 2.0}), state({"step": 2, "loss": 1.0})
    view.update(first)
    view.update(first)
    assert sent == []
    view.update(second)
    view.update(second)
    view.say("Looking again")
    view.update(second)
    assert [text.endswith("<p>Looking again</p>") for text in sent] == [False, True, False]
    view.open(first)
    assert len(sent) == 4, "the first cell gets the output with which the second begins"


def test_a_curve_begins_with_measurements_from_before_the_first_look() -> None:
    curves = Curves()
    curves.begin(measured(4.0, 3.0, 2.0))
    curves.add(state({"step": 20, "loss": 2.0}))
    curves.add(state({"step": 40, "loss": 1.0}))
    (line,) = re.findall(r'points="([^"]*)"', curves.to_svg())
    assert [point.split(",")[0] for point in line.split()] == ["60.0", "200.0", "340.0", "620.0"]


@pytest.mark.parametrize(
    "odd",
    [{"step": math.inf, "loss": 1.0}, {"step": 1, "loss": math.nan}, {"loss": 1.0}, {"step": 10**290, "loss": 1.0}],
)
def test_values_that_cannot_be_drawn_are_left_out_of_a_curve(odd: dict[str, Any]) -> None:
    curves = Curves()
    for step in (1, 2):
        curves.add(state({"step": step, "loss": 2.0}))
        curves.add(state(odd))
    (line,) = re.findall(r'points="([^"]*)"', curves.to_svg())
    assert len(line.split()) == 2


def test_text_of_a_run_is_inert_in_a_cell() -> None:
    hostile = f"{HOSTILE}\x1b[31m\u202e\x9b"
    outcome = Outcome(0, 0, ReplicaStatus.FAILED, "exception", error=f"Oops: {hostile}")
    failed = ReplicaState(0, 0, ReplicaStatus.FAILED, outcome, reported={f"<b>{hostile}": 1.0})
    html = RunStatus(hostile, hostile, [failed], decided=[DecisionLine(1.0, hostile)]).to_html(
        between=bar(state({"step": 1, "total_steps": 4}))
    )
    assert '<progress value="0.2500"' in html
    assert html.isprintable()
    assert set(re.findall(r"</?([a-z]+)", html)) == {"p", "progress", "table", "thead", "tbody", "tr", "th", "td"}


def test_one_thread_renews_all_cells_and_ends_with_the_run() -> None:
    is_over = threading.Event()
    view = Recorded()
    ended = ReplicaStatus.SUCCEEDED
    display = shown(lambda: state({}, status=ended) if is_over.is_set() else state({}), view)
    display.show()
    display.show()
    assert view.opened == 2
    assert sum(thread.name == "replicas-show" for thread in threading.enumerate()) == 1
    eventually(lambda: view.shown)
    is_over.set()
    display.settle()
    assert not is_shown()
    assert view.shown[-1] == "succeeded"
    display.show()
    assert not is_shown()


def test_a_store_that_fails_for_a_moment_is_named_and_one_that_fails_for_long_ends_the_display(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: Iterator[int] = itertools.count()

    def look() -> RunStatus:
        if next(looks) in (1, 2):
            raise StoreError("no answer")
        return state({})

    view = Recorded()
    shown(look, view).show()
    eventually(lambda: view.shown)
    assert view.said == ["Looking again: no answer"] * 2
    monkeypatch.setattr("executors.patience.SCALE", 0.0)
    looks = itertools.cycle([1])
    eventually(lambda: not is_shown())
    assert view.said[-1] == "No longer shown; call show() again: no answer"
