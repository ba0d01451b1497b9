"""Tests the progress of a run: the rate of steps, the remaining time, and their display."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from executors.cli.table import replica_table
from executors.protocol import ReplicaStatus
from executors.status import DecisionLine, Progress, ReplicaState, RunStatus, name_rate
from executors.view.progress import ProgressBars, ProgressLines, bars
from executors.worker.pace import Pace

RUNNING, SUCCEEDED, PENDING = ReplicaStatus.RUNNING, ReplicaStatus.SUCCEEDED, ReplicaStatus.PENDING


def replica(rank: int, status: ReplicaStatus = RUNNING, attempt: int = 0, **reported: Any) -> ReplicaState:
    return ReplicaState(rank, attempt, status, reported=reported)


def state(*replicas: ReplicaState) -> RunStatus:
    return RunStatus("mine", "local", replicas)


def far(rank: int, step: float, per_s: float, total: float = 400, status: ReplicaStatus = RUNNING) -> ReplicaState:
    return replica(rank, status, step=step, steps_per_s=per_s, total_steps=total)


def drawn(table: Any, width: int) -> list[str]:
    screen = io.StringIO()
    Console(width=width, file=screen).print(table)
    return [line.rstrip() for line in screen.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("seen", "now", "rate"),
    [
        ([(0, 5)], 9, None),
        ([(0, None), (1, 10), (2, 20), (3, 30)], 3, 10),
        ([(0, 0), (1, 0), (60, 1), (61, 1), (120, 2)], 179, 1 / 60),  # steps are slower than the measurements
        ([(t, 100 * t) for t in range(101)], 100, 100),
        ([(t, 10 * t) for t in range(11)], 31, 10 * 10 / 30),  # no step is made
        ([(0, 10), (1, 20), (61, 620)], 61, 10),  # the steps that others made while the replica was away come at once
        ([(0, 100), (1, 110), (2, 50), (3, 53), (4, 56)], 4, 3),  # back to a checkpoint
        ([(0, math.nan), (1, 10**400), (2, math.inf), (3, 1), (4, 2)], 4, None),
    ],
)
def test_the_rate_is_of_the_last_minute(seen: Sequence[tuple[float, Any]], now: float, rate: float | None) -> None:
    pace = Pace()
    for at, step in seen:
        pace.look(at, step)
    assert pace.steps_per_s(now) == (None if rate is None else pytest.approx(rate, rel=0.01))


def test_a_rank_that_catches_up_with_the_run_is_not_fast_and_one_that_is_always_late_gets_on_by_leaps() -> None:
    for leap_at in (1, 2, 50):
        pace, step = Pace(), 300
        for second in range(100):
            step += 10 if second != leap_at else 400
            pace.look(second, step)
            assert pace.steps_per_s(second) in (None, 10), (leap_at, second)
    for second in range(100, 200):
        step += 10 if second % 10 else 110  # trains half of each phase
        pace.look(second, step)
    assert pace.steps_per_s(200) == pytest.approx(20, rel=0.1)


def test_the_remaining_time_of_a_run_is_the_longest_of_its_running_ranks() -> None:
    now = state(far(0, 200, 10), far(1, 240, 4), far(2, 400, 10, status=SUCCEEDED), replica(3, PENDING), replica(4))
    assert [each.left_s for each in now.replicas] == [20, 40, None, None, None]
    assert now.progress == Progress(240, 400, 4)
    assert now.describe_progress().endswith(": step 200-400 of 400, 4.00 steps/s, 40 s left")
    assert (now.to_json()["left_s"], now.replicas[0].to_json()["left_s"]) == (40, 20)
    begun = state(replica(0, step=3, total_steps=10), replica(1, step=2, total_steps=10))
    assert begun.progress == Progress(2, 10, None)
    assert begun.describe_progress() == "2 running: step 2-3 of 10"
    assert state(far(0, 400, 1, status=SUCCEEDED)).progress is None


@pytest.mark.parametrize(
    ("step", "total", "per_s", "share", "left_s"),
    [
        (500, 400, 1.0, 1.0, 0.0),
        (-5, 400, 1.0, 0.0, 405.0),
        (1, 400, 1e-300, 1 / 400, None),
        (1, 400, math.inf, None, None),
        (math.inf, 400, 1.0, None, None),
        (1, 0, 1.0, None, None),
        (1, 10**299, 1.0, None, None),
        (math.nan, 400, 1.0, None, None),
        (1, math.nan, 1.0, None, None),
    ],
)
def test_odd_reports_are_no_odd_progress(
    step: float, total: float, per_s: float, share: float | None, left_s: float | None
) -> None:
    odd = far(0, step, per_s, total)
    assert (odd.progress and odd.progress.share) == share
    assert odd.left_s == left_s
    drawn([replica_table(state(odd), width=80), bars(state(odd), 1) or ""], 80)


def test_a_rate_has_three_digits() -> None:
    rates = (123456.7, 123.4, 12.34, 8.2, 0.5, 0.01667, 2e9)
    assert [name_rate(rate) for rate in rates] == ["123457", "123", "12.3", "8.20", "0.50", "0.0167", "2e+09"]


def test_a_narrow_table_omits_the_least_important_columns_first() -> None:
    numbers: dict[str, Any] = {"round": 4, "step": 120, "total_steps": 400, "steps_per_s": 8.2}
    now = state(replica(0, attempt=1, **numbers, loss=2.5, round_s=1.0, lr=1e-4, gnorm=0.5))
    for width, more, head in (
        (200, None, "rank attempt status round step steps/s left loss in rounds lr gnorm"),
        (80, None, "rank attempt status round step left loss lr gnorm"),
        (60, None, "rank attempt status round step left loss"),
        (60, ["steps_per_s"], "rank attempt status round step steps/s left loss"),
    ):
        lines = drawn(replica_table(now, width=width, more=more), 200)
        assert lines[0].split() == head.split()
        assert "120/400" in lines[1]


def test_a_run_has_a_bar_and_few_ranks_have_one_each() -> None:
    now = state(far(0, 100, 10), far(1, 200, 10), far(2, 400, 10, status=SUCCEEDED))
    lines = drawn(bars(now, 16), 80)
    assert [line.split()[0] for line in lines] == ["run", "rank", "rank", "rank"]
    assert lines[0].endswith("25%  100/400  10.0 steps/s, 30 s left")
    assert lines[3].endswith("100%  400/400  succeeded")
    assert len(drawn(bars(now, 2), 80)) == 1
    assert bars(state(replica(0, step=1)), 16) is None


def test_without_a_terminal_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = [0.0]
    lines = ProgressLines("mine", lambda: now_s[0])
    for second in range(25):
        now_s[0] = float(second)
        lines.update(state(far(0, 10 * second, 10)))
    lines.update(state(far(0, 400, 10, status=SUCCEEDED)))
    assert capsys.readouterr().err.splitlines() == [
        "replicas: mine: 1 running: step 0 of 400, 10.0 steps/s, 40 s left",
        "replicas: mine: 1 running: step 100 of 400, 10.0 steps/s, 30 s left",
        "replicas: mine: 1 running: step 200 of 400, 10.0 steps/s, 20 s left",
        "replicas: mine: 1 succeeded: step 400",
    ]


def test_a_decision_is_printed_once_with_and_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    now = replace(state(far(0, 100, 10)), decided=[DecisionLine(1.0, "restarting it\x1b[2J")])
    for view in (
        ProgressLines("mine"),
        ProgressBars("mine", Console(file=screen, force_terminal=True, width=80, height=24)),
    ):
        for _ in range(2):
            view.update(now)
        view.close()
    assert capsys.readouterr().err.count("replicas: mine: restarting it\n") == 1
    assert screen.getvalue().count("restarting it") == 1


def test_bars_stay_on_the_terminal_only_when_the_run_has_ended() -> None:
    screen = io.StringIO()
    view = ProgressBars("mine", Console(file=screen, force_terminal=True, width=80, height=24))
    view.update(state(far(0, 100, 10)))
    view.close()
    erased = screen.getvalue()
    assert "25%" in erased
    assert erased.endswith("\x1b[2K")
    view.update(state(far(0, 400, 10, status=SUCCEEDED)))
    view.close()
    assert "100%" in screen.getvalue()
    assert not screen.getvalue().endswith("\x1b[2K")
