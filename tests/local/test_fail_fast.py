"""Tests `fail_fast`: the first failure ends the run, as long as no replica has had a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.new_runs import create_run
from support.standalone_replicas import Cloud, ended, outcome_of, running_cloud, ship, wait_for_line, write_files

from executors import LocalProcessExecutor, Run, current_replica, open_store
from executors.attempt import Attempt
from executors.protocol import ReplicaStatus
from executors.restarts.decision_log import DecisionLog
from executors.restarts.fail_fast import end_others
from executors.run.run import view_of
from executors.settings.run_spec import RunSpec, StartSpec
from executors.store.memory import MemoryStore
from executors.task import create
from executors.task.launch_request import LaunchRequest
from executors.testing import eventually

TASKS = """
import threading
from executors import current_replica

def main(fails):
    if current_replica().rank == fails:
        raise ValueError("boom")
    try:
        print("waiting", flush=True)
        threading.Event().wait()
    finally:
        print("cleaned up", flush=True)
"""


def train(go: str, rounds: int) -> None:
    """Fail on rank 2 when a file exists, after some rounds of rank 1."""
    import time

    me = current_replica()
    if me.rank == 1 and rounds:
        me.report(round=rounds)
    while me.rank != 2 or not Path(go).exists():
        time.sleep(0.01)
    raise ValueError("boom")


def launched(executor: LocalProcessExecutor, folder: Path, rounds: int, **more: Any) -> Run:
    store = open_store(folder / "store")
    args = {"go": str(folder / "go"), "rounds": rounds}
    spec = create_run(store, "otter", train, args, 3, backend="local")
    run = Run(store, "otter", executor=executor, handles=start(executor, spec.with_settings(**more)))
    eventually(lambda: all(replica.heartbeat_age_s is not None for replica in run.status().replicas))
    return run


def start(executor: LocalProcessExecutor, spec: RunSpec) -> list[Any]:
    return executor.start_ranks(StartSpec(spec, train))


def test_the_first_failure_before_the_first_round_ends_the_others(local: LocalProcessExecutor, tmp_path: Path) -> None:
    run = launched(local, tmp_path, 0, fail_fast=True)
    (tmp_path / "go").touch()
    assert run.wait(60)
    outcomes = run.outcomes()
    assert [outcome.status for outcome in outcomes] == ["cancelled", "cancelled", "failed"]
    for rank in (0, 1):
        expected = f"Replica {rank} was ended: rank 2 failed before the first round: ValueError: boom."
        assert outcomes[rank].error == expected
    (barring,) = DecisionLog(view_of(run).store, "otter").read()  # so that no process starts any of them again
    assert (barring.kind, barring.rank) == ("cancel", None)


@pytest.mark.parametrize(("rounds", "fail_fast"), [(1, True), (0, False)])
def test_a_failure_after_a_round_or_of_a_run_that_did_not_ask_for_it_leaves_the_others(
    local: LocalProcessExecutor, tmp_path: Path, rounds: int, fail_fast: bool
) -> None:
    run = launched(local, tmp_path, rounds, fail_fast=fail_fast)
    if rounds:
        eventually(lambda: run.status().replicas[1].reported)
    (tmp_path / "go").touch()
    eventually(lambda: run.outcomes()[2].status == "failed")
    assert not [entry.key for entry in view_of(run).store.list("otter/") if entry.key.endswith("cancel.json")]
    run.cancel()


def test_if_fewer_are_enough_a_rank_that_was_not_available_ends_no_one() -> None:
    for run_id, min_replicas, reason, ends in (
        ("all", None, "start_failed", True),
        ("fewer", 2, "start_failed", False),
        ("failed", 2, "exception", True),
        ("replaced", None, "fenced", False),
    ):
        store = MemoryStore()
        request = LaunchRequest.of(train, n=2, args={"go": "", "rounds": 0}, min_replicas=min_replicas)
        create.create_run(request, run_id, store, {"backend": "local"})
        failed = Attempt(store, run_id, 0)
        end_others(failed, failed.record(failed.new_outcome(ReplicaStatus.FAILED, reason)), 2)  # type: ignore[arg-type]
        assert Attempt(store, run_id, 1).has("cancel.json") is ends, run_id


def test_a_replica_killed_from_outside_is_a_failure_too(local: LocalProcessExecutor, tmp_path: Path) -> None:
    import os
    import signal

    from support.runs import pid_of

    run = launched(local, tmp_path, 0, fail_fast=True)
    os.kill(pid_of(run.handles[0]), signal.SIGKILL)
    assert run.wait(60)
    assert [outcome.status for outcome in run.outcomes()] == ["failed", "cancelled", "cancelled"]
    assert "rank 0 failed before the first round: Replica 0 of 3 was ended by signal 9" in str(run.outcomes()[1].error)


def test_replicas_without_a_supervisor_end_each_other(tmp_path: Path) -> None:
    workspace = write_files(tmp_path / "work", tasks_of_user=TASKS)
    with running_cloud(tmp_path) as cloud:
        spec = ship(tmp_path / "shared", workspace, "tasks_of_user:main", {"fails": 1}, n=3)
        check_that_they_end(cloud, spec.with_settings(fail_fast=True))


def check_that_they_end(cloud: Cloud, spec: RunSpec) -> None:
    waiting = cloud.start(spec, 0)
    wait_for_line(waiting, "waiting")
    assert ended(cloud.start(spec, 1))[0] == 1
    code, out, _ = ended(waiting)
    assert (code, out.splitlines()[0]) == (143, "cleaned up")
    assert ended(cloud.start(spec, 2))[0] == 143, "a rank that starts later is ended, too"
    for rank in (0, 2):
        outcome = outcome_of(spec, rank)
        assert (outcome.status, outcome.reason) == ("cancelled", "cancelled")
        assert outcome.error == f"Replica {rank} was ended: rank 1 failed before the first round: ValueError: boom."
