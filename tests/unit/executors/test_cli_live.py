"""Tests on a simulated clock the lines that the command prints during a run, and how long it waits for store and
backend.
"""

from __future__ import annotations

import io
import itertools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.made_up_runs import decision_of
from support.new_runs import run_json

from executors.cli.live import PlainView, follow
from executors.cli.output import Output, note, without_unwritable_lines
from executors.cli.table import replica_table
from executors.errors import BackendError, ReplicasError, StoreError
from executors.patience import AGAIN_S, CONTROLLER, FIRST_WORD_S, FOLLOWER, ROUND, Waits
from executors.protocol import Outcome, ReplicaStatus
from executors.run.run import Run, view_of
from executors.run.run_manager import RunManager
from executors.run.waiter import ReadTolerance, Waiter
from executors.status import DecisionLine, Installation, ReplicaState, RestartState, RunStatus
from executors.store.memory import MemoryStore
from executors.task.record import RunRecord
from executors.view.run_state_reader import RunStateReader

RUNNING, SUCCEEDED, FAILED = ReplicaStatus.RUNNING, ReplicaStatus.SUCCEEDED, ReplicaStatus.FAILED


class Clock:
    """A clock that only sleeping moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


RECORD = RunRecord.parse(run_json(n=1, created_at=0.0))


class ScriptedManager(RunManager):
    """A manager that ends no run early, but reports that it would."""

    def end_early(self, now: RunStatus, option: str) -> str | None:
        return f"rank {now.failed_early[0]} failed early; {option} ends the run."


class ScriptedRun(Run):
    """A run whose status comes from a script."""

    def __init__(self, script: Callable[[], RunStatus]) -> None:
        super().__init__(MemoryStore(), "mine")
        view_of(self).record = RECORD
        self._manager = ScriptedManager(view_of(self))
        self._script = script

    def status(self, *, reports: bool = True) -> RunStatus:
        return self._script()


def replica(rank: int, status: ReplicaStatus = RUNNING, error: str | None = None, **reported: Any) -> ReplicaState:
    outcome = Outcome(rank, 0, status, "exception", error=error) if error is not None else None
    return ReplicaState(rank, 0, status, outcome, reported=reported)


def state(*replicas: ReplicaState, at: float = 0.0) -> RunStatus:
    return RunStatus("mine", "local", replicas, at=at)


def show(script: Callable[[], RunStatus], clock: Clock, timeout_s: float | None = None) -> bool:
    run = ScriptedRun(script)
    view, waits = PlainView(Output(), run, clock), Waits(clock=clock)
    return follow(run, view, sleep=clock.sleep, clock=clock, timeout_s=timeout_s, waits=waits)


def test_a_failure_before_the_first_round_is_one_while_others_continue() -> None:
    assert state(replica(0), replica(1, FAILED, "no"), replica(2, FAILED, "no")).failed_early == [1, 2]
    assert state(replica(0, round=1), replica(1, FAILED, "no")).failed_early == []
    assert state(replica(0, SUCCEEDED), replica(1, FAILED, "no")).failed_early == [], (
        "a run that has ended has no early failure"
    )
    fenced = ReplicaState(1, 0, FAILED, Outcome(1, 0, FAILED, "fenced"))
    assert state(replica(0), fenced).failed_early == [], (
        "a fenced attempt is not a failure, because a newer one continues"
    )


def test_a_failure_before_the_first_round_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()

    def script() -> RunStatus:
        others = SUCCEEDED if clock.now > 5 else RUNNING
        return state(replica(0, others), replica(1, FAILED, "Oops: no"), at=clock.now)

    assert show(script, clock)
    assert "Rank 1 failed early; --fail-fast ends the run.\n" in capsys.readouterr().out


@pytest.mark.parametrize("jump_s", [3 * 365 * 86_400.0, -3 * 365 * 86_400.0])
def test_the_time_since_the_launch_is_right_even_if_the_wall_clock_is_set(
    capsys: pytest.CaptureFixture[str], jump_s: float
) -> None:
    clock, launched_at = Clock(), time.time()

    def script() -> RunStatus:
        others = SUCCEEDED if clock.now > 5 else RUNNING
        return state(replica(0, others), at=launched_at + clock.now + (jump_s if clock.now > 5 else 0.0))

    run = ScriptedRun(script)
    view_of(run).record = replace(view_of(run).record, created_at=launched_at)
    assert follow(run, PlainView(Output(), run, clock), sleep=clock.sleep, clock=clock)
    assert re.search(r"\[ *[5-7]\.\d s\] rank 0 succeeded", capsys.readouterr().out)


class FullDisk(io.StringIO):
    """A stream whose writes fail while `error` is set."""

    error: OSError | None = None

    def write(self, text: str) -> int:
        if self.error is not None:
            raise self.error
        return super().write(text)


def test_lines_that_cannot_be_printed_while_a_run_is_watched_are_dropped_and_that_is_reported_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, output = FullDisk(), Output()
    monkeypatch.setattr("sys.stdout", disk)
    with without_unwritable_lines():
        for word, error in (
            ("one", None),
            ("two", OSError(28, "full")),
            ("three", OSError(28, "full")),
            ("four", None),
        ):
            disk.error = error
            output.print(word)
    assert disk.getvalue() == "one\nfour\n"
    told = "Note: Lines of output are lost, because they cannot be written (full). The run continues.\n"
    assert capsys.readouterr().err == told
    disk.error = OSError(28, "full")
    with pytest.raises(OSError, match="full"):
        print("after the run")


def test_a_full_disk_under_stdout_and_stderr_ends_no_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk()
    disk.error = OSError(28, "full")
    monkeypatch.setattr("sys.stdout", disk)
    monkeypatch.setattr("sys.stderr", disk)
    with without_unwritable_lines():
        Output().print("progress")
        note("a warning of a backend")


def test_a_closed_pipe_ends_the_watching(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FullDisk()
    monkeypatch.setattr("sys.stdout", disk)
    disk.error = BrokenPipeError()
    with without_unwritable_lines(), pytest.raises(BrokenPipeError):
        print("to nobody")


def test_a_store_that_fails_while_a_run_is_ended_early_is_asked_again_at_the_next_look(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()

    def end_early(manager: RunManager, status: RunStatus, option: str) -> str:
        if clock.now < 2 * FIRST_WORD_S:
            raise StoreError("no answer")
        return "it ends the run."

    monkeypatch.setattr(ScriptedManager, "end_early", end_early)

    def script() -> RunStatus:
        others = SUCCEEDED if clock.now > 20 else RUNNING
        return state(replica(0, others), replica(1, FAILED, "Oops: no"), at=clock.now)

    assert show(script, clock)
    said = capsys.readouterr().out
    assert said.index("Waiting for the rendezvous, 5 s so far, 1 h at most: no answer") < said.index("It ends the run.")


def test_each_change_of_status_is_one_line_and_progress_comes_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()

    def script() -> RunStatus:
        if clock.now < 35:
            return state(*(replica(rank, step=int(clock.now * 10) + rank) for rank in range(3)), at=clock.now)
        return state(replica(0, SUCCEEDED), replica(1, FAILED, "Trace\nOops: no"), replica(2, SUCCEEDED), at=clock.now)

    assert show(script, clock)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[ 0.0 s] ranks 0-2 running"
    assert [line.partition("] ")[2].partition(":")[0] for line in lines[1:4]] == ["3 running"] * 3
    assert [line.partition("] ")[2] for line in lines[4:]] == [
        "ranks 0, 2 succeeded",
        "rank 1 failed (exception: Oops: no)",
    ]


def test_an_installation_is_one_line_for_all_ranks_and_then_a_line_of_progress_now_and_then(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()

    def script() -> RunStatus:
        if clock.now > 25:
            return state(replica(0, SUCCEEDED), replica(1, SUCCEEDED), at=clock.now)
        installs = [Installation("torch", clock.now + rank, int(clock.now * 1e8), 3 * 10**9) for rank in range(2)]
        pending = [
            ReplicaState(rank, 0, ReplicaStatus.PENDING, doing=each.what, installation=each)
            for rank, each in enumerate(installs)
        ]
        return state(*pending, at=clock.now)

    assert show(script, clock)
    first, *progress, last = capsys.readouterr().out.splitlines()
    assert first.endswith("ranks 0-1 pending (installing torch)")
    assert [re.sub(r"^\[.*?\] ", "", line) for line in progress] == [
        f"2 pending: ranks 0-1 installing torch, {gb} of 3.0 GB, {s} s" for gb, s in (("1.0", 11), ("2.0", 21))
    ]
    assert last.endswith("ranks 0-1 succeeded")


def test_each_decision_is_a_line_once_and_the_replica_does_not_repeat_it(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    restarting = DecisionLine(1.5, "restarting rank 0 as attempt 1 (1 of 3): signal, SIGKILL \x1b[2J")
    given_up = DecisionLine(6.0, "rank 0 given up: it failed twice the same way.")

    def script() -> RunStatus:
        if clock.now < 1:
            return state(replica(0), at=clock.now)
        if clock.now < 3:
            waits = RestartState(decision=decision_of("restart"), note="restarts in 2 s", is_awaited=True)
            pending = ReplicaState(0, 0, ReplicaStatus.PENDING, restart=waits)
            return replace(state(pending, at=clock.now), decided=[restarting])
        if clock.now < 5:
            return replace(state(replica(0), at=clock.now), decided=[restarting])
        gone = RestartState(decision=decision_of("give_up"), note="given up: …")
        failed = replace(replica(0, FAILED, "Oops: no"), restart=gone)
        return replace(state(failed, at=clock.now), decided=[restarting, given_up])

    assert show(script, clock)
    assert [line.partition("] ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "rank 0 running",
        "restarting rank 0 as attempt 1 (1 of 3): signal, SIGKILL",
        "rank 0 pending",
        "rank 0 running",
        given_up.line,
        "rank 0 failed",
    ]


def test_a_run_that_reports_nothing_new_is_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    assert show(lambda: state(replica(0, RUNNING if clock.now < 1000 else SUCCEEDED, step=1), at=clock.now), clock)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_watching_ends_when_its_time_has_ended() -> None:
    clock = Clock()
    assert not show(lambda: state(replica(0)), clock, timeout_s=3.2)
    assert clock.now == 3.2


@pytest.mark.parametrize(("kind", "name"), [(StoreError, "rendezvous"), (BackendError, "backend")])
def test_a_failure_that_passes_is_reported_once(
    capsys: pytest.CaptureFixture[str], kind: type[ReplicasError], name: str
) -> None:
    clock = Clock()

    def script() -> RunStatus:
        if 5 < clock.now < 50:
            raise kind("no answer")
        return state(replica(0, RUNNING if clock.now < 120 else SUCCEEDED), at=clock.now)

    assert show(script, clock)
    said = capsys.readouterr().out
    assert said.count(f"Waiting for the {name}, 5 s so far") == 1
    assert said.count("no answer") == 1
    assert said.count(f"The wait for the {name} has ended after ") == 1


def test_a_process_that_follows_a_run_reports_its_wait_once_a_minute(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()

    def script() -> RunStatus:
        if 5 < clock.now < 5 + 10 * AGAIN_S:
            raise StoreError("no answer")
        return state(replica(0, RUNNING if clock.now < 700 else SUCCEEDED), at=clock.now)

    assert show(script, clock)
    assert capsys.readouterr().out.count("Waiting for the rendezvous") == 10


def test_a_process_that_keeps_or_follows_a_run_waits_longer_than_its_replicas() -> None:
    assert ROUND.seconds < FOLLOWER.seconds < CONTROLLER.seconds


def test_a_failure_that_lasts_longer_than_the_patience_is_raised(capsys: pytest.CaptureFixture[str]) -> None:
    """Most readings of a status ask only the store. Here, every tenth reading asks the backend, too."""
    for kind, every, waits in ((StoreError, 1, True), (BackendError, 10, True), (BackendError, 1, False)):
        clock, readings = Clock(), itertools.count(1)

        def script(kind: type[ReplicasError] = kind, every: int = every, readings: Any = readings) -> RunStatus:
            if next(readings) % every == 0:
                raise kind("no answer")
            return state(replica(0))

        with pytest.raises(kind, match="no answer") as raised:
            show(script, clock)
        limit_s = FOLLOWER.limit_for(kind("no answer"))
        assert limit_s <= clock.now < limit_s + 2 * AGAIN_S if waits else clock.now == 0, (kind, every)
        assert raised.value.was_waited_for is waits
        assert bool(capsys.readouterr().out.count(": no answer")) == waits


def test_progress_shows_the_range_of_the_steps_that_the_ranks_reported() -> None:
    ranks = (replica(0, step=120, loss=2.5, round=4), replica(1, step=130, loss=2.25, round=4), replica(2))
    assert state(*ranks).describe_progress() == "3 running: round 4, step 120-130, loss 2.2500-2.5000"
    assert state(replica(0, ReplicaStatus.PENDING)).describe_progress() == "1 pending"


def test_a_table_of_many_ranks_shows_the_failed_ones_and_counts_the_rest() -> None:
    from rich.console import Console

    ranks = [replica(rank, FAILED if rank in (7, 90) else RUNNING) for rank in range(100)]
    screen = io.StringIO()
    Console(width=80, file=screen).print(replica_table(state(*ranks), 5, width=80))
    shown_ranks = [line.split()[0] for line in screen.getvalue().splitlines()]
    assert shown_ranks == ["rank", "0", "1", "2", "7", "90", "…"]


class FailingObserver:
    """The reader of a wait whose time limit is reached before its second look."""

    records = SimpleNamespace(ranks=(0,), run_id="mine", record=RECORD)
    error: ReplicasError | None = None

    def look(self) -> list[ReplicaState]:
        if self.error is not None:
            raise self.error
        return []

    def pauses(self) -> Iterator[float]:
        return itertools.repeat(0.0)


@pytest.mark.parametrize("error", [StoreError("no answer"), BackendError("no answer")])
def test_failures_before_a_pause_between_two_waits_do_not_count_towards_the_limit(error: ReplicasError) -> None:
    observer, clock = FailingObserver(), Clock()
    waiter = Waiter(cast(RunStateReader, observer), lambda: None, lambda states: False)
    waiter._tolerance = ReadTolerance(lambda: FOLLOWER, Waits(lambda words: None, clock))
    limit_s = FOLLOWER.limit_for(error)
    assert not waiter.wait(None, 0, None)
    observer.error = error
    assert not waiter.wait(None, 0, None)
    clock.sleep(2 * limit_s)  # the script works on the results that have arrived
    assert not waiter.wait(None, 0, None), "a new failure begins a new pause"
    n_looks = int(limit_s / 10) - 1
    for _ in range(n_looks):  # a script with many short waits reads the state all the time
        clock.sleep(10)
        assert not waiter.wait(None, 0, None)
    clock.sleep(10)
    with pytest.raises(type(error)):
        waiter.wait(None, 0, None)
