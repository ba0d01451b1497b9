"""Two copies of one rank: each has an attempt of its own, and the newest one counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import local_tasks
from processes_of_tests import is_alive
from runs_of_tests import key_of, record_of

from executors import LocalProcessExecutor, ReplicaHandle, ReplicaStatus, Run, attach, launch, open_store
from executors.errors import KeyNotFoundError
from executors.outcome import Outcome
from executors.records import read_json
from executors.testing import eventually
from executors.testing.executor_endings import task
from executors.testing.processes import environment

CALL = "import sys; from executors.worker import call; print(call(sys.argv[1]))"


def second_copy(run: Run, rank: int) -> subprocess.Popen[str]:
    """Start the same input once more, as a vendor does who restarts it without asking."""
    return subprocess.Popen(
        [sys.executable, "-c", CALL, run.url],
        env=environment(REPLICA_RANK=str(rank)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_second_copy_claims_the_next_attempt(local: LocalProcessExecutor) -> None:
    def entrypoint() -> int:
        from executors import current_replica

        return current_replica().attempt

    run = launch(local, entrypoint, 1)
    assert run.results() == [0]
    with second_copy(run, 0) as copy:
        printed, complaints = copy.communicate(timeout=60)
    assert printed == "1\n", complaints
    claims = [read_json(run.store, f"{run.run_id}/replicas/0000/{attempt}/started.json") for attempt in (0, 1)]
    assert claims[0]["nonce"] != claims[1]["nonce"]
    assert attach(run.run_id).results() == [1], "the newest attempt counts"
    assert read_json(run.store, f"{run.run_id}/replicas/0000/0/outcome.json")["result"] == 0, "what stood stands"


def test_a_rank_is_running_again_while_its_second_copy_runs(local: LocalProcessExecutor) -> None:
    run = launch(local, local_tasks.rank, 1)
    run.wait()
    hanging = launch(local, task("hang"), 1)
    eventually(lambda: "hanging" in hanging.logs(rank=0))
    with second_copy(hanging, 0) as copy:
        try:
            second = f"{hanging.run_id}/replicas/0000/1/started.json"
            eventually(lambda: any(entry.key == second for entry in hanging.store.list(second)))
            os.kill(int(record_of(hanging.handles[0], "started.json")["pid"]), 9)
            assert not hanging.wait(timeout=0.5), "the second copy goes on"
        finally:
            copy.kill()
    hanging.cancel()


def test_a_cancelled_attempt_is_not_passed_by(local: LocalProcessExecutor) -> None:
    run = launch(local, task("hang"), 1)
    eventually(lambda: "hanging" in run.logs(rank=0))
    run.cancel()
    with second_copy(run, 0) as copy:
        _, complaints = copy.communicate(timeout=60)
    assert copy.returncode != 0
    assert "cancelled" in complaints
    assert not list(run.store.list(f"{run.run_id}/replicas/0000/1/"))
    assert attach(run.run_id).outcomes()[0].status == "cancelled"


def test_a_cancel_marker_that_comes_before_the_start_keeps_the_replica_from_starting(
    local: LocalProcessExecutor,
) -> None:
    executor = LocalProcessExecutor(preload=(), max_parallel=1, term_grace_s=0.5)
    handles = executor.launch_replicas(2, task("hang"), {})
    eventually(lambda: "hanging" in executor.stream_logs(handles[0]))
    mark_cancelled(handles[1])
    executor.cancel(handles[0])
    (row,) = executor.collect(handles[1:], timeout=60)
    assert (row["status"], row["reason"]) == ("cancelled", "cancelled")
    assert record_of(handles[1], "started.json") is None
    assert executor.stream_logs(handles[1]) == ""


def mark_cancelled(handle: ReplicaHandle) -> None:
    """Leave the marker as somebody on another machine does, who cannot wake the supervisor."""
    open_store(handle.metadata["store_url"]).put_if_absent(key_of(handle, "cancel.json"), b"{}")


def test_a_marker_left_by_another_machine_ends_a_running_replica(local: LocalProcessExecutor) -> None:
    handles = local.launch_replicas(1, task("hang"), {})
    eventually(lambda: "hanging" in local.stream_logs(handles[0]))
    mark_cancelled(handles[0])
    (row,) = local.collect(handles, timeout=60)
    assert (row["status"], row["reason"]) == ("cancelled", "cancelled")


def test_an_outcome_somebody_else_wrote_first_stands(local: LocalProcessExecutor, tmp_path: Path) -> None:
    """A worker that comes back finds the key taken."""

    def entrypoint(go: str) -> str:
        import os
        import time

        while not os.path.exists(go):
            time.sleep(0.01)
        return "too late"

    run = launch(local, entrypoint, 1, args={"go": str(tmp_path / "go")})
    lost = Outcome(0, 0, ReplicaStatus.FAILED, "lost", error="written off")
    assert run.store.put_if_absent(key_of(run.handles[0], "outcome.json"), json.dumps(asdict(lost)).encode())
    (tmp_path / "go").write_text("")
    supervisor = run.handles[0].metadata["supervisor_pid"]
    eventually(lambda: not is_alive(supervisor), "the supervisor has nothing left to watch")
    assert attach(run.run_id).outcomes()[0].reason == "lost"


def test_a_store_without_the_task_is_a_failure_that_names_the_key(local: LocalProcessExecutor) -> None:
    run = launch(local, local_tasks.rank, 1)
    run.wait()
    run.store.delete(f"{run.run_id}/task/task.json")
    with second_copy(run, 0) as copy:
        _, complaints = copy.communicate(timeout=60)
    assert copy.returncode != 0
    assert KeyNotFoundError.__name__ in complaints
    assert "task/task.json" in complaints


def test_a_pickle_made_by_another_python_is_refused_by_name(local: LocalProcessExecutor) -> None:
    run = launch(local, local_tasks.rank, 1)
    run.wait()
    key = f"{run.run_id}/task/task.json"
    run.store.put(key, json.dumps({**read_json(run.store, key), "python": "3.2"}).encode())
    with second_copy(run, 0) as copy:
        _, complaints = copy.communicate(timeout=60)
    assert f"pickled by Python 3.2, this replica runs {sys.version_info.major}.{sys.version_info.minor}" in complaints
    assert "importable entrypoint" in complaints


def test_a_task_that_was_changed_after_the_launch_is_not_run(tmp_path: Path) -> None:
    executor = LocalProcessExecutor(preload=(), max_parallel=1, term_grace_s=0.5)
    run = launch(executor, task("hang"), 2)
    eventually(lambda: "hanging" in run.logs(rank=0))
    key = f"{run.run_id}/task/task.json"
    run.store.put(key, json.dumps({**read_json(run.store, key), "entrypoint": "os:getcwd", "args": {}}).encode())
    run.cancel(rank=0)
    run.wait()
    changed = run.outcomes()[1]
    assert changed.status == "failed"
    assert "not what was launched" in (changed.error or "")
