"""Tests restarts in the same process: an entrypoint with `@restartable` is called again as the next attempt."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.again_tasks import (
    break_the_gpu,
    end_in_turn,
    fail_often,
    fail_three_times,
    fail_to_finalize,
    fail_to_initialize,
    fail_to_release,
    fail_unfit,
    fail_without_progress,
    hang_when_told,
    lose_the_gpu,
    train_again,
    train_while_the_other_waits,
)
from support.ended_attempts import decisions, ends, over

from executors import LocalProcessExecutor, Run, launch
from executors.attempt import Attempt
from executors.run.run import view_of
from executors.testing import eventually

ON_A_GPU = [
    pytest.mark.cuda,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="this machine has no GPU"),
]
QUICK = "backoff=0.05s:0.1s"


def started(executor: LocalProcessExecutor, entrypoint: Any, restarts: str = f"5,{QUICK}", **args: Any) -> Run:
    return launch(executor, entrypoint, 1, args=args, restarts=restarts, timeout=120)


def told(run: Run, rank: int) -> list[str]:
    """Return the reason of each attempt's end."""
    return [str(end.reason or end.status) for end in ends(run, rank)]


def ways(run: Run) -> list[str | None]:
    """Return the kind of start of each attempt."""
    return [end.how for end in ends(run, 0)]


def test_after_an_exception_the_same_process_calls_the_entrypoint_again(
    local: LocalProcessExecutor, state_home: Path
) -> None:
    run = over(started(local, end_in_turn, kinds=["exception", "exception"]))
    assert (told(run, 0), ways(run)) == (["exception", "exception", "succeeded"], [None, "process", "process"])
    found = run.results()[0]
    assert {end.pid for end in ends(run, 0)} == {found["pid"]}
    assert found["before"] == "ValueError: boom"
    assert [end.goes_on for end in ends(run, 0)] == [True, True, False]
    order = [f"{what} {n}" for n in range(3) for what in ("initialize", "call", "finalize", "check")]
    assert found["calls"] == order[:-2]
    assert [entry.how for entry in decisions(run)] == ["process", "process"]


def test_no_model_of_a_failed_call_is_alive_in_the_next_call(local: LocalProcessExecutor) -> None:
    run = over(started(local, end_in_turn, kinds=["exception", "exception"]))
    assert run.results()[0]["living"] == 0


def test_each_attempt_in_the_same_process_has_its_own_log(local: LocalProcessExecutor, state_home: Path) -> None:
    run = over(started(local, end_in_turn, kinds=["exception"]))
    logs = [
        (state_home / "replicas" / Attempt(view_of(run).store, run.run_id, 0, attempt).key("output.log")).read_text()
        for attempt in range(2)
    ]
    assert logs[0].startswith("attempt 0\n")
    assert "ValueError: boom" in logs[0]
    assert logs[1] == "attempt 1\n"


@pytest.mark.parametrize("kind", ["exit", "sys.exit", "SIGKILL"])
def test_a_process_that_has_ended_is_replaced_by_a_new_one(local: LocalProcessExecutor, kind: str) -> None:
    run = over(started(local, end_in_turn, kinds=["exception", kind]))
    assert ways(run) == [None, "process", "fork"]
    pids = [end.pid for end in ends(run, 0)]
    assert pids[0] == pids[1] != pids[2]
    assert run.results()[0]["calls"] == ["initialize 2", "call 2"]


@pytest.mark.parametrize(
    ("entrypoint", "args", "words"),
    [
        (fail_unfit, {}, "health_check returned False"),
        (fail_to_finalize, {}, "finalize raised RuntimeError: cannot be closed"),
        (end_in_turn, {"kinds": ["thread"]}, "threads of the failed call still run: left behind"),
        (fail_to_release, {}, "the end of the failed call raised RuntimeError: CUDA error"),
        (lose_the_gpu, {}, "the GPU raised RuntimeError: CUDA error: an illegal memory access"),
        pytest.param(break_the_gpu, {}, "the GPU raised", marks=ON_A_GPU),
    ],
    ids=["health check", "finalize", "thread", "release", "lost GPU", "broken GPU"],
)
def test_a_process_that_is_not_fit_is_replaced_by_a_new_one(
    local: LocalProcessExecutor, entrypoint: Any, args: dict[str, Any], words: str
) -> None:
    run = over(started(local, entrypoint, **args))
    assert (told(run, 0), ways(run)) == (["exception", "succeeded"], [None, "fork"])
    assert [entry.how for entry in decisions(run)] == ["fork"]
    assert words in "".join(run.logs(attempt="all"))


def test_a_failure_of_initialize_is_a_failure_of_the_attempt(local: LocalProcessExecutor) -> None:
    run = over(started(local, fail_to_initialize))
    assert (told(run, 0), ways(run)) == (["exception", "succeeded"], [None, "process"])
    assert "ValueError: not ready" in str(ends(run, 0)[0].error)


def test_when_the_budget_is_used_up_the_process_ends(local: LocalProcessExecutor) -> None:
    run = over(started(local, end_in_turn, f"1,{QUICK}", kinds=["exception"] * 3))
    assert told(run, 0) == ["exception", "exception"]
    assert [entry.kind for entry in decisions(run)] == ["restart", "give_up"]
    with pytest.raises(ProcessLookupError):
        os.kill(ends(run, 0)[0].pid or 0, 0)


def test_without_a_policy_a_restartable_entrypoint_is_called_once(local: LocalProcessExecutor) -> None:
    run = over(launch(local, end_in_turn, 1, args={"kinds": ["exception"]}, timeout=120))
    assert (told(run, 0), decisions(run)) == (["exception"], [])


def test_after_two_attempts_without_progress_a_new_process_runs_the_next_one(local: LocalProcessExecutor) -> None:
    run = over(started(local, fail_three_times))
    assert ways(run) == [None, "process", "process", "fork"]


def test_after_a_hang_the_same_process_calls_the_entrypoint_again_with_a_new_watchdog(
    local: LocalProcessExecutor,
) -> None:
    run = over(launch(local, hang_when_told, 1, args={"n": 2}, restarts=f"5,{QUICK}", hang_timeout="1:8", timeout=120))
    assert (told(run, 0), ways(run)) == (["hang", "hang", "succeeded"], [None, "process", "process"])
    found = run.results()[0]
    assert {end.pid for end in ends(run, 0)} == {found["pid"]}
    assert found["living"] == 0
    assert "made no progress" in found["before"]


def test_a_cancel_ends_a_process_that_waits_for_its_next_attempt(local: LocalProcessExecutor) -> None:
    run = started(local, fail_without_progress, "5,backoff=300s:300s")  # after progress, a restart waits for nothing
    eventually(lambda: decisions(run), "the decision")
    run.cancel()
    over(run)
    assert told(run, 0)[0] == "exception"
    assert len(told(run, 0)) <= 2


def test_two_hundred_restarts_keep_memory_and_descriptors_level(local: LocalProcessExecutor) -> None:
    run = over(started(local, fail_often, "300,backoff=0s:0s", n=200))
    found = run.results()[0]["measured"]
    assert {end.pid for end in ends(run, 0)} == {run.results()[0]["pid"]}
    (early_mb, *early), (late_mb, *late) = found[2], found[-1]
    assert late_mb - early_mb < 10
    assert late == early


OVERLAPPED = {"fragments": 2, "overlap_steps": 1, "wire": "int8"}


@pytest.mark.parametrize("options", [{}, OVERLAPPED], ids=["plain", "overlapped"])
def test_a_diloco_continues_in_the_same_process_and_misses_at_most_the_rounds_of_the_failures(
    local: LocalProcessExecutor, tmp_path: Path, options: dict[str, Any]
) -> None:
    fails_at = [14, 22]
    args = {"total_steps": 40, "fails_at": fails_at, "options": options, "folder": str(tmp_path)}
    run = over(launch(local, train_again, 2, args=args, restarts=f"5,{QUICK}", timeout=120))
    steady, failed = run.results()
    assert [end.how for end in ends(run, 1)] == [None, "process", "process"], "".join(run.logs(attempt="all"))
    assert {end.pid for end in ends(run, 1)} == {failed["pid"]}
    assert failed["living"] == 0
    assert steady["anchor"] == failed["anchor"]
    missed = [number for number, ranks in steady["reports"] if ranks != [0, 1]]
    assert len(missed) <= len(fails_at)


@pytest.mark.parametrize("in_block", [False, True], ids=["open", "in a block"])
@pytest.mark.parametrize(
    "options", [{}, {"min_quorum": 2}, {"min_quorum": 2, **OVERLAPPED}], ids=["plain", "quorum", "overlapped"]
)
def test_no_round_misses_a_replica_that_failed_and_continues_in_its_process(
    local: LocalProcessExecutor, options: dict[str, Any], *, in_block: bool
) -> None:
    args = {"total_steps": 32, "fails_at": [14, 22], "options": options, "in_block": in_block}
    run = over(launch(local, train_while_the_other_waits, 2, args=args, restarts=f"5,{QUICK}", timeout=120))
    steady, failed = run.results()
    assert [end.how for end in ends(run, 1)] == [None, "process", "process"], "".join(run.logs(attempt="all"))
    assert {end.pid for end in ends(run, 1)} == {failed["pid"]}
    assert steady["anchor"] == failed["anchor"]
    assert [number for number, ranks in steady["reports"] if ranks != [0, 1]] == []
    assert failed["begins_at"] in (22, 23), "the replica continues at the step that its peer has reached"


def test_a_replica_that_is_not_called_again_says_goodbye_so_that_no_other_one_waits(
    local: LocalProcessExecutor,
) -> None:
    args = {"total_steps": 32, "fails_at": [14, 15], "options": {"min_quorum": 2}}
    run = over(launch(local, train_while_the_other_waits, 2, args=args, restarts=f"1,{QUICK}", timeout=120))
    assert told(run, 1) == ["exception", "exception"], "".join(run.logs(attempt="all"))
    store, folder = view_of(run).store, f"{run.run_id}/diloco/main/bye/"
    assert f"{folder}1/1" in {entry.key for entry in store.list(folder)}
    assert f"{folder}1/0" not in {entry.key for entry in store.list(folder)}, (
        "attempt 0 wrote no bye, because attempt 1 continued"
    )
    assert told(run, 0) == ["succeeded"]
