"""What the command shows while a run goes on, on a simulated clock: few lines, and no end for a store's hiccup."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from typing import Any, cast

import pytest

from executors.cli.following import PlainView, follow, progress_line
from executors.cli.output import Output, one_line
from executors.cli.table import replica_table
from executors.errors import BackendError, StoreError
from executors.outcome import Outcome
from executors.protocol import ReplicaStatus
from executors.run import Run
from executors.run_record import RunRecord
from executors.status import ReplicaState, RunStatus

RUNNING, SUCCEEDED, FAILED = ReplicaStatus.RUNNING, ReplicaStatus.SUCCEEDED, ReplicaStatus.FAILED


class Clock:
    """A clock that only sleeping moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ScriptedRun:
    """A run whose states come from a script."""

    record = RunRecord(backend="local", world_size=1, entrypoint="f", task_digest="0" * 64, created_at=0.0)

    def __init__(self, script: Callable[[], RunStatus]) -> None:
        self.status = script


def replica(rank: int, status: ReplicaStatus = RUNNING, error: str | None = None, **reported: Any) -> ReplicaState:
    outcome = Outcome(rank, 0, status, "exception", error=error) if error is not None else None
    return ReplicaState(rank, 0, status, outcome, reported=reported)


def state(*replicas: ReplicaState, at: float = 0.0) -> RunStatus:
    return RunStatus("mine", "local", replicas, at=at)


def shown(script: Callable[[], RunStatus], clock: Clock) -> None:
    run = cast(Run, ScriptedRun(script))
    follow(run, PlainView(Output(), run, clock), clock.sleep, clock)


def test_each_change_of_state_is_one_line_and_progress_comes_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()

    def script() -> RunStatus:
        if clock.now < 35:
            return state(*(replica(rank, step=int(clock.now * 10) + rank) for rank in range(3)), at=clock.now)
        return state(replica(0, SUCCEEDED), replica(1, FAILED, "Trace\nOops: no"), replica(2, SUCCEEDED), at=clock.now)

    shown(script, clock)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[ 0.0 s] ranks 0-2 running"
    assert [line.partition("] ")[2].partition(":")[0] for line in lines[1:4]] == ["3 running"] * 3
    assert [line.partition("] ")[2] for line in lines[4:]] == [
        "ranks 0, 2 succeeded",
        "rank 1 failed (exception: Oops: no)",
    ]


def test_a_run_that_reports_nothing_new_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    shown(lambda: state(replica(0, RUNNING if clock.now < 1000 else SUCCEEDED, step=1), at=clock.now), clock)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_a_store_that_hiccups_is_told_once_and_the_run_is_followed_on(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()

    def script() -> RunStatus:
        if 5 < clock.now < 50:
            raise StoreError("no answer")
        return state(replica(0, RUNNING if clock.now < 60 else SUCCEEDED), at=clock.now)

    shown(script, clock)
    assert capsys.readouterr().out.count("The store does not work; trying on: no answer") == 1


def test_a_backend_that_hiccups_is_told_once_and_the_run_is_followed_on(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()

    def script() -> RunStatus:
        if 5 < clock.now < 50:
            raise BackendError("token expired")
        return state(replica(0, RUNNING if clock.now < 60 else SUCCEEDED), at=clock.now)

    shown(script, clock)
    assert capsys.readouterr().out.count("The backend does not work; trying on: token expired") == 1


def test_a_backend_that_is_seldom_asked_and_always_fails_ends_the_following(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    seldom = itertools.cycle([False] * 9 + [True])

    def script() -> RunStatus:
        if next(seldom):
            raise BackendError("token expired")
        return state(replica(0, RUNNING), at=clock.now)

    with pytest.raises(BackendError, match="token expired"):
        shown(script, clock)
    assert clock.now > 60
    assert capsys.readouterr().out.count("The backend does not work; trying on: token expired") == 1


def test_a_backend_that_cannot_be_asked_at_all_ends_the_following_at_once() -> None:
    clock = Clock()

    def script() -> RunStatus:
        raise BackendError("no SDK")

    with pytest.raises(BackendError, match="no SDK"):
        shown(script, clock)
    assert clock.now == 0


def test_a_store_that_stays_away_ends_the_following() -> None:
    clock = Clock()

    def script() -> RunStatus:
        raise StoreError("gone")

    with pytest.raises(StoreError, match="gone"):
        shown(script, clock)
    assert clock.now > 60


def test_progress_tells_the_span_of_what_the_ranks_reported() -> None:
    ranks = (replica(0, step=120, loss=2.5, round=4), replica(1, step=130, loss=2.25, round=4), replica(2))
    assert progress_line(state(*ranks)) == "3 running: round 4, step 120-130, loss 2.2500-2.5000"
    assert progress_line(state(replica(0, ReplicaStatus.PENDING))) == "1 pending"


def test_a_replicas_text_moves_no_cursor_and_stays_on_its_line() -> None:
    assert one_line("\x1b[2J\x1b[31mred\x1b[0m\r\n\x07bell") == "red   bell"
    assert one_line("x" * 400, 10) == "xxxxxxxxx…"


def test_a_table_of_many_ranks_shows_the_failed_ones_and_counts_the_rest() -> None:
    from rich.console import Console

    ranks = [replica(rank, FAILED if rank in (7, 90) else RUNNING) for rank in range(100)]
    screen = io.StringIO()
    Console(width=80, file=screen).print(replica_table(state(*ranks), 5))
    shown_ranks = [line.split()[0] for line in screen.getvalue().splitlines()]
    assert shown_ranks == ["rank", "0", "1", "2", "7", "90", "…"]
