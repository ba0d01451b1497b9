"""`health_check`: a function that each new process calls before the task."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cli import Folder, HereInstead

from executors import LocalProcessExecutor, launch
from executors.attempt import Attempt
from executors.protocol import ReplicaStatus
from executors.restarts.controller import RestartContext, RestartController, RunSnapshot
from executors.restarts.decision_log import DecisionLog
from executors.run.run import view_of
from executors.settings.policy import Restarts
from executors.store import MemoryStore
from executors.worker.health_check import UnhealthyError, check_health

CHECKS = """
import random, sys, time
from executors import current_replica

def of_rank():
    rank = current_replica().rank
    print("checking", random.random(), flush=True)
    if rank == 1:
        raise OSError("the disk is read-only")
    if rank == 2:
        sys.exit("no GPU")
    return rank != 3

def draw():
    return random.random()
"""


def test_a_replica_whose_check_fails_ends_before_its_task_and_reports_the_reason(tmp_path: Path) -> None:
    (tmp_path / "checks_of_ranks.py").write_text(CHECKS)
    name = f"{tmp_path}/checks_of_ranks.py"
    local = LocalProcessExecutor(preload=())
    run = launch(local, f"{name}:draw", 4, health_check=f"{name}:of_rank", seed=7)
    run.wait(60)
    outcomes = run.outcomes()
    assert view_of(run).record.settings.health_check == f"{name}:of_rank"
    assert [outcome.reason for outcome in outcomes] == [None, *["start_failed"] * 3]
    for outcome, says in zip(outcomes[1:], ("OSError: the disk is read-only", "SystemExit: no GPU", ""), strict=True):
        expected = f"The health check {name}:of_rank " + (f"failed: {says}" if says else "returned False.")
        assert outcome.error == expected
        assert "checking" in str(outcome.output_tail)
    assert "checks_of_ranks.py" in str(outcomes[1].output_tail), "the traceback is in the log"
    unchecked = launch(local, f"{name}:draw", 4, seed=7).results()
    assert outcomes[0].result == unchecked[0], "a health check does not change the random numbers of the task"


def test_a_check_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, said = threading.Event(), list[str]()

    def end(words: str) -> None:
        said.append(words)
        ended.set()

    monkeypatch.setattr(threading, "wait_for_its_end", ended.wait, raising=False)
    check_health("threading:wait_for_its_end", end, limit_s=0.01)
    assert said == ["The health check threading:wait_for_its_end took longer than 0.01 s."]
    with pytest.raises(UnhealthyError, match=r"EntrypointImportError: .*does not exist"):
        check_health("threading:nothing_of_the_kind")


@pytest.mark.parametrize("answer", [False, np.bool_(False), np.array([1]) > 2, torch.tensor(1) > 2])
def test_a_check_that_returns_false_in_any_form_has_failed(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    monkeypatch.setattr(threading, "is_fine", lambda: answer, raising=False)
    with pytest.raises(UnhealthyError, match=r"is_fine returned False\."):
        check_health("threading:is_fine")


@pytest.mark.parametrize("answer", [True, None, 0, "fine", np.bool_(True), np.zeros(2, bool), torch.ones(2)])
def test_a_health_check_that_returns_anything_else_has_failed(monkeypatch: pytest.MonkeyPatch, answer: object) -> None:
    monkeypatch.setattr(threading, "is_fine", lambda: answer, raising=False)
    check_health("threading:is_fine")


class OnDevice:
    """A tensor of one element, whose device is used only when the value is read."""

    def __init__(self, look: Callable[[], object]) -> None:
        self.item = look

    def numel(self) -> int:
        return 1


def test_a_health_check_fails_if_the_truth_of_its_answer_cannot_be_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> object:
        raise RuntimeError("uncorrectable ECC error")

    monkeypatch.setattr(threading, "is_fine", lambda: OnDevice(fails), raising=False)
    with pytest.raises(UnhealthyError, match="failed: RuntimeError: uncorrectable ECC error"):
        check_health("threading:is_fine")


def test_an_answer_that_takes_too_long_is_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    monkeypatch.setattr(threading, "is_fine", lambda: OnDevice(ended.wait), raising=False)
    check_health("threading:is_fine", lambda words: ended.set(), limit_s=0.01)


def test_a_check_is_looked_at_before_anything_is_started(folder: Folder, here: HereInstead) -> None:
    shown = folder.launch("job:main", "--health-check", "job:keep", "--dry-run").json
    assert shown["run_record"]["settings"]["health_check"] == "job:keep"
    assert shown["task_record"]["launched_with"]["settings"]["health_check"] == "job:keep"
    told = folder.launch("job:main", "--health-check", "job:kep")
    assert told.code == 2
    assert "'kep' does not exist in it. Did you mean 'keep'?" in told.stderr
    assert "It is the health check of this launch." in told.stderr
    told = folder.launch("job:main", "--health-check", "job:die")
    assert "die() needs the argument 'rank'" in told.stderr


class AttemptStarter:
    how = "fork"

    def may_start(self, rank: int) -> bool:
        return True

    def start(self, attempts: Any) -> None:
        pass


@pytest.mark.parametrize(("has_wider", "expected"), [(True, ["fork", None]), (False, ["fork", "fork", "fork"])])
def test_a_process_that_is_unhealthy_twice_running_is_left_to_the_process_that_can_start_elsewhere(
    has_wider: bool, expected: list[str | None]
) -> None:
    log = DecisionLog(MemoryStore(), "run")
    controller = RestartController(
        log, RestartContext(Restarts(), 1, 0.0), starter=AttemptStarter(), has_wider=has_wider
    )

    def way(number: int, pid: int | None) -> str | None:
        attempt = Attempt(log.store, "run", 0, number)
        end = attempt.new_outcome(ReplicaStatus.FAILED, "start_failed", error="unwell", pid=pid)
        answer = controller.decide_on(end, RunSnapshot({0: number}, {0: end}))
        return None if answer is None else answer.how

    assert way(0, pid=None) is None, "there was no process at all"
    assert [way(number, pid=7) for number in range(len(expected))] == expected


def test_the_checks_that_ship_print_their_values_and_end_a_bad_process_with_the_value(tmp_path: Path) -> None:
    (tmp_path / "checks_of_ranks.py").write_text(CHECKS)
    name, local = f"{tmp_path}/checks_of_ranks.py", LocalProcessExecutor(preload=())
    run = launch(local, f"{name}:draw", 1, health_check="disk,store,clock")
    run.wait(60)
    assert run.outcomes()[0].status == "succeeded"
    log = run.logs(rank=0)
    assert [f"replicas: health check {each}: " in log for each in ("disk", "store", "clock")] == [True] * 3
    if not torch.cuda.is_available():
        run = launch(local, f"{name}:draw", 1, health_check="gpu")
        run.wait(60)
        assert run.outcomes()[0].reason == "start_failed"
        assert str(run.outcomes()[0].error).startswith("The health check gpu failed: no GPU can be used: PyTorch ")
