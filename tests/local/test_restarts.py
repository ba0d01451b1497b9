"""Tests restarts by a supervisor: the decision log decides about an end, and the next attempt is forked."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tasks
from support.chaos_tasks import closed_gates, train
from support.ended_attempts import decisions, ends, over, supervisor_of
from support.restart_tasks import (
    bomb,
    come_back_when_resumed,
    die_and_hang,
    die_when_told,
    end_always,
    end_first,
    hang_first,
    leave_when_asked,
    let_another_run_out_of_memory,
    never_leave,
    save_slowly,
    tell_previous_failure,
    use_the_loss_after_the_loop,
)
from support.runs import all_gone, folder_of, launcher, said

from executors import LocalProcessExecutor, Run, attach, launch
from executors.attempt import Attempt
from executors.cli.summary import code_of
from executors.errors import ReplicaCancelledError
from executors.patience import BRIEF
from executors.process import killed_for_memory
from executors.restarts.decision_log import Decision, DecisionLog
from executors.run.resume import resume
from executors.run.run import view_of
from executors.testing import eventually

QUICK = "backoff=0.05s:0.1s"


def started(executor: LocalProcessExecutor, entrypoint: Callable[..., Any], n: int, restarts: str, **args: Any) -> Run:
    return launch(executor, entrypoint, n, args=args, restarts=restarts, timeout=120)


def told(run: Run, rank: int) -> list[str]:
    """Return the end of each attempt of a rank in a word or two."""
    return [f"{end.reason or end.status}{f' {end.signal}' if end.signal else ''}" for end in ends(run, rank)]


def decided(run: Run, kind: str) -> Decision:
    (entry,) = eventually(lambda: [entry for entry in decisions(run) if entry.kind == kind], f"a {kind}")
    return entry


def test_each_kind_of_end_is_followed_by_a_new_process_of_the_same_supervisor(
    local: LocalProcessExecutor, small_memory: Path, state_home: Path
) -> None:
    kinds = ["SIGKILL", "SIGSEGV", "exit", "sys.exit", "exception", "memory", "helper"]
    run = over(started(local, end_first, len(kinds), f"1,{QUICK}", kinds=kinds, group=str(small_memory)))
    assert [told(run, rank) for rank in range(len(kinds))] == [
        ["signal SIGKILL", "succeeded"],
        ["signal SIGSEGV", "succeeded"],
        ["no_result", "succeeded"],
        ["no_result", "succeeded"],
        ["exception", "succeeded"],
        ["oom SIGKILL", "succeeded"],
        ["succeeded"],  # the process was a helper of the killed rank
    ]
    second = ends(run, 0)[1]
    assert (second.result, second.how) == (1, "fork")
    restarts = [(entry.rank, entry.start, entry.how, entry.charged) for entry in decisions(run)]
    assert sorted(restarts) == [(rank, {rank: 1}, "fork", True) for rank in range(6)]
    for attempt in range(2):
        log = state_home / "replicas" / Attempt(view_of(run).store, run.run_id, 0, attempt).key("output.log")
        assert log.read_text() == f"attempt {attempt} of rank 0\n"
    assert attach(run.run_id).results() == [1, 1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("kinds", "found"),
    [
        ([], None),
        (["exception"], "ValueError: boom"),
        (["exception", "SIGKILL"], "Replica 0 of 1 was ended by signal 9 (SIGKILL)."),
    ],
    ids=["first attempt", "exception", "kill"],
)
def test_a_new_process_knows_the_error_of_the_attempt_before(
    local: LocalProcessExecutor, kinds: list[str], found: str | None
) -> None:
    run = over(started(local, tell_previous_failure, 1, f"3,{QUICK}", kinds=kinds))
    assert run.results() == [found]


def test_without_a_policy_nothing_is_started_again(local: LocalProcessExecutor) -> None:
    run = over(launch(local, end_first, 1, args={"kinds": ["SIGKILL"], "group": ""}))
    assert (told(run, 0), decisions(run)) == (["signal SIGKILL"], [])


@pytest.mark.parametrize(
    ("kinds", "restarts", "reasons", "answers"),
    [
        # A SIGKILL may have any cause, so only attempts without progress end it.
        (["SIGKILL"], "9,no_progress=2", ["signal SIGKILL"] * 3, ["restart", "restart", "give_up no_progress"]),
        (["SIGKILL"], "1", ["signal SIGKILL"] * 2, ["restart", "give_up budget"]),
        (["exit"], "9", ["no_result"] * 2, ["restart", "give_up deterministic"]),
    ],
)
def test_a_crash_loop_ends(
    local: LocalProcessExecutor, kinds: list[str], restarts: str, reasons: list[str], answers: list[str]
) -> None:
    run = over(started(local, end_always, len(kinds), f"{restarts},{QUICK}", kinds=kinds))
    assert told(run, 0) == reasons
    assert [f"{entry.kind} {entry.why}".strip() for entry in decisions(run)] == answers


def test_two_ranks_that_crash_alike_before_any_progress_stop_the_run(local: LocalProcessExecutor) -> None:
    """The decision about the first end waits a second for the end of another rank. On a busy machine that end comes
    later, after one restart."""
    run = over(started(local, end_always, 3, f"9,{QUICK}", kinds=["exit", "exit", "hang"]))
    *before, last = [f"{entry.kind} {entry.why}".strip() for entry in decisions(run)]
    assert last == "stop deterministic"
    assert before in ([], ["restart"])
    assert {*told(run, 0), *told(run, 1)} == {"no_result"}
    (end,) = ends(run, 2)
    assert (end.reason, "the run was stopped: deterministic" in str(end.error)) == ("cancelled", True)


def test_code_after_the_loop_runs_in_a_replica_that_is_started_again_after_the_last_round(
    local: LocalProcessExecutor,
) -> None:
    chaos = ["kill:rank=1,round=4"]
    run = launch(
        local, use_the_loss_after_the_loop, 2, args={"has_own_loop": False}, restarts=f"3,{QUICK}", chaos=chaos
    )
    results = over(run).results()
    assert told(run, 1) == ["signal SIGKILL", "succeeded"]
    assert results[0] == results[1], "both replicas have the anchor"


def test_an_error_of_an_attempt_that_began_after_the_last_round_is_explained_and_ends_no_other_rank(
    local: LocalProcessExecutor,
) -> None:
    chaos = ["kill:rank=1,round=4"]
    run = launch(local, use_the_loss_after_the_loop, 2, args={"has_own_loop": True}, restarts=f"3,{QUICK}", chaos=chaos)
    assert told(over(run), 0) == ["succeeded"]
    assert told(run, 1) == ["signal SIGKILL", "exception", "exception"]
    last = ends(run, 1)[-1]
    assert "'loss'" in last.headline
    assert last.headline.endswith("(this attempt began after the last round)")
    assert "Set them before the loop, or loop over diloco.steps()" in str(last.error)
    assert any(last.headline in str(event.why) for event in run.events()), "the events show it, too"


def test_a_restart_together_ends_the_living_ranks_and_starts_them_again(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    run = started(local, die_and_hang, 3, f"3,together,{QUICK}", folder=str(tmp_path))
    eventually(lambda: len(list(tmp_path.glob("*.1"))) == 3, "all ranks have a second attempt")
    assert decided(run, "restart").start == {0: 1, 1: 1, 2: 1}
    assert [told(run, rank) for rank in range(3)] == [["signal SIGKILL"], ["fenced"], ["fenced"]]
    run.cancel()
    over(run)


def added(run: Run, **entry: Any) -> None:
    """Add an entry to the log, and wake the supervisor, which otherwise reads the log every ten seconds."""
    DecisionLog(view_of(run).store, run.run_id).append(lambda log: Decision(**entry))
    os.kill(supervisor_of(run), signal.SIGUSR1)


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"kind": "cancel"}, "cancelled by the user"),
        ({"kind": "stop", "why": "min_replicas"}, "the run was stopped: min_replicas"),
        ({"kind": "stop", "why": "asked", "within_s": 0.2}, "the run was stopped"),
    ],
)
def test_an_order_that_blocks_the_run_ends_living_ranks_and_planned_starts(
    local: LocalProcessExecutor, tmp_path: Path, entry: dict[str, Any], why: str
) -> None:
    run = started(local, die_and_hang, 2, "3,backoff=600s:600s", folder=str(tmp_path))
    decided(run, "restart")
    added(run, **entry)
    over(run)
    assert [told(run, rank) for rank in range(2)] == [["signal SIGKILL", "cancelled"], ["cancelled"]]
    assert why in str(ends(run, 1)[0].error)
    assert not Attempt(view_of(run).store, run.run_id, 0, 1).has("started.json")


def test_a_rank_that_leaves_on_request_is_stopped_whatever_is_ordered_later(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    run = started(local, leave_when_asked, 1, "3", folder=str(tmp_path))
    # A stop that comes between its claim and the call ends an attempt before it starts, and then there is no result.
    eventually((tmp_path / "called").exists, "the entrypoint was called")
    added(run, kind="stop", why="asked", within_s=60.0)
    (end,) = ends(over(run), 0)
    assert (end.status, end.reason, end.result) == ("cancelled", "stopped", "saved")
    run.cancel()
    assert run.status().replicas[0].note == "stopped"
    assert code_of(run, run.outcomes()) == 0
    with pytest.raises(ReplicaCancelledError, match=r"Replica 0 of 1 was stopped, as asked\."):
        run.results()


def test_a_run_that_is_cancelled_between_two_attempts_has_ended_at_once(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    run = started(local, die_and_hang, 1, "3,backoff=600s:600s", folder=str(tmp_path))
    decided(run, "restart")
    run.cancel()
    eventually(lambda: told(run, 0) == ["signal SIGKILL", "cancelled"], "the second attempt is cancelled", within_s=5)
    over(run)


def test_a_run_whose_launcher_is_gone_starts_nothing_more(tmp_path: Path) -> None:
    with launcher("restart_attached", str(tmp_path)) as process:
        launched = said(tmp_path / "launched")
        run = attach(launched["run_id"])
        decided(run, "restart")
        process.kill()
    over(run)
    assert [told(run, rank) for rank in range(2)] == [["signal SIGKILL", "cancelled"], ["cancelled"]]


def test_a_give_up_is_in_the_log_even_if_the_launcher_leaves_at_once(tmp_path: Path) -> None:
    with launcher("fail_apart", str(tmp_path)) as process:
        run = over(attach(said(tmp_path / "launched")["run_id"]))
        assert process.wait(60) == 0
    assert [told(run, rank) for rank in range(2)] == [["no_result"] * 2, ["exception"] * 2]
    assert sorted(f"{entry.kind} {entry.why}".strip() for entry in decisions(run)) == [
        *["give_up deterministic"] * 2,
        *["restart"] * 2,
    ]


def test_an_attempt_that_another_process_began_is_left_to_it(local: LocalProcessExecutor, tmp_path: Path) -> None:
    run = started(local, die_and_hang, 2, "3,backoff=1s:1s", folder=str(tmp_path))
    decided(run, "restart")
    theirs = {**run.handles[0].metadata, "attempt": 1, "nonce": "theirs"}
    handle = {"rank": 0, "backend_name": "local", "metadata": theirs}
    assert view_of(run).store.put_if_absent(
        Attempt(view_of(run).store, run.run_id, 0, 1).key("handle.json"), json.dumps(handle).encode()
    )
    Attempt(view_of(run).store, run.run_id, 1).request_cancel()
    over(run)
    assert (told(run, 0), len(list(tmp_path.glob("0.*")))) == (["signal SIGKILL"], 1)


def test_ranks_that_wait_for_a_place_and_restarts_take_turns(tmp_path: Path) -> None:
    executor = LocalProcessExecutor(preload=(), max_parallel=1, term_grace_s=0.5)
    kinds = ["SIGKILL", "return", "exception"]
    run = over(started(executor, end_first, 3, f"3,{QUICK}", kinds=kinds, group=""))
    assert [told(run, rank)[-1] for rank in range(3)] == ["succeeded"] * 3
    times = sorted((end.started_at or 0.0, end.finished_at) for rank in range(3) for end in ends(run, rank))
    assert all(later[0] >= earlier[1] - 0.05 for earlier, later in itertools.pairwise(times)), times


def test_nothing_of_an_attempt_is_left_when_the_next_one_starts(local: LocalProcessExecutor, tmp_path: Path) -> None:
    run = over(started(local, bomb, 1, f"1,{QUICK}", folder=str(tmp_path)))
    assert ends(run, 0)[-1].result == 0, told(run, 0)
    all_gone([int(path.name) for path in tmp_path.glob("[0-9]*")])


def test_a_rank_that_hangs_is_ended_with_its_stacks_and_starts_again(
    local: LocalProcessExecutor, state_home: Path
) -> None:
    args = {"kinds": ["loop", "mutex with the GIL", "stopped"]}
    run = launch(local, hang_first, 3, args=args, restarts=f"1,{QUICK}", hang_timeout="off")
    added(run, kind="policy", hang="1s:2s")
    over(run)
    assert [told(run, rank) for rank in range(3)] == [
        ["hang", "succeeded"],
        ["hang SIGKILL", "succeeded"],
        ["hang SIGKILL", "succeeded"],
    ]
    for rank in range(2):
        end, attempt = ends(run, rank)[0], Attempt(view_of(run).store, run.run_id, rank, 0)
        assert f"Replica {rank} of 3 made no progress for" in str(end.error)
        assert (end.progress_marks, len(end.stacks)) == (1, 2)
        stacks = bytes(view_of(run).store.get(attempt.key(end.stacks[0]))).decode()
        assert "in hang_first" in stacks
        assert stacks.rstrip() in (state_home / "replicas" / attempt.key("output.log")).read_text()
    assert "stopped by SIGSTOP" in str(ends(run, 2)[0].error)
    assert "stopped by SIGSTOP" in (state_home / "replicas" / run.run_id / "replicas/0002/0/output.log").read_text()


@pytest.mark.slow
def test_replicas_of_a_training_that_are_killed_come_back_by_themselves_and_end_with_one_anchor(tmp_path: Path) -> None:
    kills = ["kill:rank=1,round=2", "kill:rank=0,round=5", "kill:rank=1,round=5,attempt=1"]
    with closed_gates(tmp_path / "gates", [3]) as open_gate:
        run = launch(
            LocalProcessExecutor(term_grace_s=0.5),
            train,
            3,
            args={"folder": str(tmp_path / "gates"), "rounds": 8, "gates": [3]},
            chaos=kills,
            restarts="3",
            seed=1,
        )
        eventually(lambda: "round" in getattr(Attempt(view_of(run).store, run.run_id, 1, 1).beat(), "reported", ()))
        open_gate(3)
        over(run)
    assert [told(run, rank).count("signal SIGKILL") for rank in range(3)] == [1, 2, 0]
    results = [ends(run, rank)[-1].result for rank in range(3)]
    assert results[0]["anchor"] == results[1]["anchor"] == results[2]["anchor"]
    assert [entry.kind for entry in decisions(run)] == ["restart"] * 3


def test_a_cancel_waits_for_the_end_of_an_atomic_block(local: LocalProcessExecutor, tmp_path: Path) -> None:
    run = started(local, save_slowly, 1, "1", folder=str(tmp_path))
    eventually((tmp_path / "begun").exists)
    run.cancel()
    over(run)
    assert (told(run, 0), sorted(path.name for path in tmp_path.glob("[a-z]*"))) == (
        ["cancelled"],
        ["begun", "saved", "state"],
    )


def test_a_rank_that_is_given_up_and_resumed_belongs_to_its_new_supervisor(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    run = started(local, come_back_when_resumed, 2, "9,backoff=1s:1s", folder=str(tmp_path))
    decided(run, "give_up")
    resume(run, ranks=[0])
    eventually(lambda: len(decisions(run)) == 4, "the new supervisor decides about the next end")
    # the old supervisor reads the log before the new one starts its attempt
    os.kill(supervisor_of(run), signal.SIGUSR1)
    over(run)
    eventually(lambda: told(run, 0)[3:] == ["succeeded"])
    assert told(run, 0) == ["no_result", "no_result", "signal SIGKILL", "succeeded"]
    assert [entry.kind for entry in decisions(run)] == ["restart", "give_up", "resume", "restart"]
    handles = [Attempt(view_of(run).store, run.run_id, 0, number).handle("local") for number in range(4)]
    first, second, third, fourth = [handle and handle.metadata["supervisor_pid"] for handle in handles]
    assert (first == second, second == third, third == fourth) == (True, False, True)


def test_a_process_killed_for_lack_of_memory_elsewhere_makes_no_replica_out_of_memory(
    local: LocalProcessExecutor, small_memory: Path
) -> None:
    if killed_for_memory(1, 0.0) is None:
        pytest.skip("the kernel's log is read by root alone, and outside of containers")
    run = launch(local, let_another_run_out_of_memory, 1, args={"group": str(small_memory)})
    run.wait()
    assert [outcome.reason for outcome in run.outcomes()] == ["signal"]


def test_an_end_that_the_store_does_not_take_is_recorded_and_answered_when_it_does(
    local: LocalProcessExecutor, tmp_path: Path
) -> None:
    args = {"folder": str(tmp_path)}
    run = launch(local, die_when_told, 2, args=args, restarts=f"1,{QUICK}", timeout=120, rendezvous=tmp_path / "runs")
    first = folder_of(view_of(run).store.url) / Attempt(view_of(run).store, run.run_id, 0).key("")
    eventually((tmp_path / "0.0").exists, "the first attempt runs")
    away = first.rename(first.with_name("away"))
    first.write_text("")  # objects below it can be neither read nor written
    tasks.mark(tmp_path / "die")
    assert not run.wait(timeout=BRIEF.seconds + 2), "the run has not ended, because no process has recorded the end"
    first.unlink()
    away.rename(first)
    eventually((tmp_path / "0.1").exists, "the rank is started again")
    tasks.mark(tmp_path / "return")
    over(run)
    assert (told(run, 0), decided(run, "restart").start) == (["signal SIGKILL", "succeeded"], {0: 1})


def test_a_process_that_does_not_exit_after_its_end_is_killed_and_a_failed_rank_gets_a_new_attempt() -> None:
    executor = LocalProcessExecutor(preload=("support.leaves_within_seconds",), term_grace_s=0.5)
    args, restarts = {"fails": [1]}, f"1,{QUICK}"
    run = over(launch(executor, never_leave, 2, args=args, restarts=restarts, timeout=120, detach=True))
    assert [told(run, rank) for rank in range(2)] == [["succeeded"], ["exception", "succeeded"]]
    assert "exit functions of the process ran for 2 s" in run.logs(rank=0)
