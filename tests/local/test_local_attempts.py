"""Two copies of one rank: each has an attempt of its own, and the newest one counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from support import tasks
from support.processes import is_alive
from support.records import read_json
from support.runs import key_of, record_of

from executors import LocalProcessExecutor, ReplicaHandle, ReplicaStatus, Run, attach, launch, open_store
from executors.attempt import Attempt
from executors.errors import KeyNotFoundError
from executors.protocol import Outcome
from executors.run.run import view_of
from executors.store.records import exists
from executors.testing import eventually
from executors.testing.executor_contract import task
from executors.testing.helpers import environment

CALL = "import sys; from executors.worker import call; print(call(sys.argv[1]))"


def second_copy(run: Run, rank: int = 0) -> subprocess.Popen[str]:
    """Start the same job again, like a service that restarts it by itself."""
    return subprocess.Popen(
        [sys.executable, "-c", CALL, run.url],
        env=environment(REPLICA_RANK=str(rank)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refused(run: Run) -> str:
    """Start a second copy, and return its error."""
    with second_copy(run) as copy:
        _, complaints = copy.communicate(timeout=60)
    assert copy.returncode != 0
    return complaints


def test_a_second_copy_claims_the_next_attempt(local: LocalProcessExecutor) -> None:
    def entrypoint() -> int:
        from executors import current_replica

        return current_replica().attempt

    run = launch(local, entrypoint, 1)
    assert run.results() == [0]
    with second_copy(run) as copy:
        printed, complaints = copy.communicate(timeout=60)
    assert printed == "1\n", complaints
    claims = [read_json(view_of(run).store, f"{run.run_id}/replicas/0000/{attempt}/started.json") for attempt in (0, 1)]
    assert claims[0]["nonce"] != claims[1]["nonce"]
    assert attach(run.run_id).results() == [1], "the newest attempt counts"
    assert read_json(view_of(run).store, f"{run.run_id}/replicas/0000/0/outcome.json")["result"] == 0, (
        "the outcome of the first attempt is unchanged"
    )


def test_a_rank_is_running_again_while_its_second_copy_runs(local: LocalProcessExecutor) -> None:
    run = launch(local, task("hang"), 1)
    eventually(lambda: "hanging" in run.logs(rank=0))
    with second_copy(run) as copy:
        try:
            eventually(lambda: exists(view_of(run).store, f"{run.run_id}/replicas/0000/1/started.json"))
            os.kill(int(record_of(run.handles[0], "started.json")["pid"]), 9)
            assert not run.wait(timeout=0.5), "the run has not ended while the second copy runs"
        finally:
            copy.kill()
    run.cancel()


def test_a_cancelled_attempt_is_not_passed_by(local: LocalProcessExecutor) -> None:
    run = launch(local, task("hang"), 1)
    eventually(lambda: "hanging" in run.logs(rank=0))
    run.cancel()
    assert "cancelled" in refused(run)
    assert not list(view_of(run).store.list(f"{run.run_id}/replicas/0000/1/"))
    assert attach(run.run_id).outcomes()[0].status == "cancelled"


def mark_cancelled(handle: ReplicaHandle) -> None:
    """Write the cancel marker like a process on another machine, which cannot wake the supervisor."""
    open_store(handle.metadata["store_url"]).put_if_absent(key_of(handle, "cancel.json"), b"{}")


def test_a_marker_left_by_another_machine_ends_a_running_replica_and_one_that_waits() -> None:
    executor = LocalProcessExecutor(preload=(), max_parallel=1, term_grace_s=0.5)
    handles = executor.launch_replicas(2, task("hang"), {})
    eventually(lambda: "hanging" in executor.stream_logs(handles[0]))
    for handle in reversed(handles):
        mark_cancelled(handle)
        (row,) = executor.collect([handle], timeout=60)
        assert (row["status"], row["reason"]) == ("cancelled", "cancelled")
    assert record_of(handles[1], "started.json") is None
    assert executor.stream_logs(handles[1]) == ""


def test_an_outcome_that_another_process_wrote_first_counts(local: LocalProcessExecutor, tmp_path: Path) -> None:
    """A worker that comes back finds the key taken."""

    def entrypoint(go: str) -> str:
        import os
        import time

        while not os.path.exists(go):
            time.sleep(0.01)
        return "too late"

    run = launch(local, entrypoint, 1, args={"go": str(tmp_path / "go")})
    lost = Outcome(0, 0, ReplicaStatus.FAILED, "lost", error="recorded as lost")
    assert view_of(run).store.put_if_absent(key_of(run.handles[0], "outcome.json"), json.dumps(asdict(lost)).encode())
    (tmp_path / "go").write_text("")
    supervisor = run.handles[0].metadata["supervisor_pid"]
    eventually(lambda: not is_alive(supervisor), "the supervisor has nothing left to watch")
    assert attach(run.run_id).outcomes()[0].reason == "lost"


def test_a_task_that_is_missing_or_of_another_python_is_a_failure_that_names_it(local: LocalProcessExecutor) -> None:
    run = launch(local, tasks.rank, 1)
    run.wait()
    key = f"{run.run_id}/task/task.json"
    view_of(run).store.put(key, json.dumps({**read_json(view_of(run).store, key), "python": "3.2"}).encode())
    complaints = refused(run)
    assert f"pickled by Python 3.2, this replica runs {sys.version_info.major}.{sys.version_info.minor}" in complaints
    assert "importable entrypoint" in complaints
    view_of(run).store.delete(key)
    complaints = refused(run)
    assert KeyNotFoundError.__name__ in complaints
    assert "task/task.json" in complaints


def test_a_task_that_was_changed_after_the_launch_is_not_run() -> None:
    executor = LocalProcessExecutor(preload=(), max_parallel=1, term_grace_s=0.5)
    run = launch(executor, task("hang"), 2)
    eventually(lambda: "hanging" in run.logs(rank=0))
    key = f"{run.run_id}/task/task.json"
    view_of(run).store.put(
        key, json.dumps({**read_json(view_of(run).store, key), "entrypoint": "os:getcwd", "args": {}}).encode()
    )
    run.cancel(rank=0)
    run.wait()
    changed = run.outcomes()[1]
    assert changed.status == "failed"
    assert "not what was launched" in (changed.error or "")


def test_a_newer_handle_of_the_store_is_of_the_attempt_where_it_is_found(tmp_path: Path) -> None:
    """The attempt number in the handle itself does not count, because the number selects the log file that is shown."""
    launched = Attempt(open_store(tmp_path), "otter", 0).bare_handle("local")
    for number, forged in ((0, {}), (1, {"attempt": "../../../.."})):
        attempt = Attempt(open_store(tmp_path), "otter", 0, number)
        attempt.store.put(attempt.key("handle.json"), ReplicaHandle(0, "local", forged).to_json().encode())
    newest, handle = Attempt.of_handle(launched, "local")
    assert newest.number == handle.metadata["attempt"] == 1
