"""A third-party executor keeps the contract of an executor, and `launch()` adds runs, outcomes and events to it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from support.processes import end, is_alive
from support.third_party import PopenExecutor

from executors import ReplicaHandle, ReplicasError, ServerlessExecutor, attach, launch
from executors.attempt import Attempt
from executors.errors import ReplicaCancelledError, ReplicaFailedError, ReplicaLostError, StoreError
from executors.store.faulty import FaultyStore
from executors.store.file import FileStore
from executors.store.url import store_at
from executors.testing import ExecutorContract, eventually
from executors.testing.executor_contract import task
from executors.testing.helpers import environment

NO_CHECKS = "it starts whatever it is given"
NO_REASONS = "it knows an exit code and a log, nothing more"


@pytest.fixture
def executor(third_party: PopenExecutor) -> PopenExecutor:
    return third_party


class TestThirdPartyExecutor(ExecutorContract):
    takes_callables = False
    expected_failures: ClassVar[dict[str, str]] = {
        "test_an_entrypoint_that_does_not_exist_is_refused_by_name": NO_CHECKS,
        "test_arguments_that_do_not_fit_are_refused_before_anything_starts": NO_CHECKS,
        "test_a_result_that_is_not_json_is_a_failure_that_names_its_place": NO_REASONS,
        "test_an_exit_without_a_result_is_a_failure_with_the_exit_code": NO_REASONS,
        "test_the_rank_can_have_one_more_variable": "it passes all arguments on",
    }

    @pytest.fixture
    def executor(self, executor: PopenExecutor) -> ServerlessExecutor:
        return cast(ServerlessExecutor, executor)

    def kill(self, executor: ServerlessExecutor, handle: Any) -> None:
        os.kill(handle.process.pid, signal.SIGKILL)


def test_the_third_party_module_imports_nothing_from_this_project() -> None:
    source = Path(sys.modules[PopenExecutor.__module__].__file__ or "").read_text()
    assert "executors" not in source
    assert "diloco" not in source


def test_a_third_party_gets_a_name_json_arguments_and_a_warning_about_the_directory_it_must_reach(
    executor: PopenExecutor, capfd: pytest.CaptureFixture[str], state_home: Path, tmp_path: Path
) -> None:
    run = launch(executor, task("echo"), 2, args={"a": 1})
    results = run.results()
    assert results == [{"rank": rank, "args": {"a": 1}} for rank in range(2)]
    assert attach(run.run_id).results() == results
    assert executor.entrypoints == [("executors.worker.call", {"run": run.url})]
    (line,) = capfd.readouterr().err.splitlines()
    assert str(state_home / "replicas") in line

    run = launch(executor, task("echo"), 1, rendezvous=str(tmp_path / "chosen"))
    run.wait()
    assert capfd.readouterr().err == "", "no warning is printed if the user has chosen the rendezvous"
    assert (tmp_path / "chosen" / run.run_id / "run.json").is_file()


def test_a_function_runs_on_an_executor_that_takes_only_names(executor: PopenExecutor) -> None:
    factor = 7

    def entrypoint(base: int) -> dict[str, Any]:
        from executors import current_replica

        me = current_replica()
        me.report(step=3, loss=0.5)
        return {"value": base * factor, "rank": me.rank, "world_size": me.world_size}

    run = launch(executor, entrypoint, 3, args={"base": 6})
    assert run.results() == [{"value": 42, "rank": rank, "world_size": 3} for rank in range(3)]


def test_results_and_failures_come_from_the_store_and_not_from_the_executor(executor: PopenExecutor) -> None:
    run = launch(executor, task("fail_on"), 2, args={"rank": 1})
    with pytest.raises(ReplicaFailedError, match="rank 1 fails on purpose") as caught:
        run.results()
    assert caught.value.rank == 1
    assert [(row.status, row.reason) for row in run.outcomes()] == [("succeeded", None), ("failed", "exception")]

    run = launch(executor, task("no_json"), 1)
    run.wait()
    (row,) = run.outcomes()
    assert (row.status, row.reason) == ("failed", "result_not_serializable")
    assert "result['loss'][3]" in (row.error or "")


def test_a_replica_killed_on_a_third_party_is_lost_and_the_run_ends(executor: PopenExecutor) -> None:
    run = launch(executor, task("hang_on"), 2, args={"rank": 1})
    eventually(lambda: "hanging" in run.logs(rank=1))
    os.kill(run.handles[1].process.pid, signal.SIGKILL)
    assert run.wait(timeout=60)
    with pytest.raises(ReplicaLostError):
        run.results()
    rows = run.outcomes()
    assert [row.status for row in rows] == ["succeeded", "failed"]
    assert rows[1].reason in ("signal", "lost")


def test_a_run_on_a_third_party_can_be_cancelled_and_the_end_of_the_block_cancels_it(executor: PopenExecutor) -> None:
    with launch(executor, task("hang"), 2) as left:
        eventually(lambda: "hanging" in left.logs(rank=0))
    run = launch(executor, task("hang"), 2)
    for rank in range(2):
        eventually(lambda rank=rank: "hanging" in run.logs(rank=rank))  # type: ignore[misc]
    run.cancel()
    assert run.wait(timeout=60)
    assert [(row.status, row.reason) for row in run.outcomes()] == [("cancelled", "cancelled")] * 2
    with pytest.raises(ReplicaCancelledError):
        run.results()
    assert not any(is_alive(handle.process.pid) for handle in (*run.handles, *left.handles))


class NotedExecutor(PopenExecutor):
    """An executor whose handles can be stored in the run's store, and that refuses to cancel rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.tickets: list[Any] = []

    def launch_replicas(self, *args: Any, **more: Any) -> list[Any]:
        self.tickets = super().launch_replicas(*args, **more)
        return [ReplicaHandle(ticket.rank, self.backend_name, {}) for ticket in self.tickets]

    def cancel(self, handle: Any) -> None:
        if handle.rank == 0:
            raise RuntimeError("the API is down")
        super().cancel(self.tickets[handle.rank])


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize("kind", [StoreError, KeyboardInterrupt])
def test_replicas_of_a_third_party_are_cancelled_if_their_handles_cannot_be_stored(
    kind: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise kind("for a moment")

    store = FaultyStore(FileStore(tmp_path), seed=0)
    store.fail_at("put", key="*/0001/0/handle.json", before=fail)
    monkeypatch.setattr("executors.backend.store_at", lambda url: store)
    noted = NotedExecutor()
    with pytest.raises(kind):
        launch(cast(ServerlessExecutor, noted), task("hang"), 3, rendezvous=tmp_path)
    assert [is_alive(ticket.process.pid) for ticket in noted.tickets] == [True, False, False]


LEAVES = """
import sys
from support.third_party import PopenExecutor
from executors import launch
run = launch(PopenExecutor(), "executors.testing.tasks:hang", 2, rendezvous="runs", detach="detached" in sys.argv)
print(run.url, *(handle.process.pid for handle in run.handles))
"""


def leave(tmp_path: Path, *args: str) -> tuple[str, list[int], str]:
    """Run a script that launches and ends without waiting. Return the run's url, its processes, and stderr."""
    (tmp_path / "leaves.py").write_text(LEAVES)
    command = [sys.executable, "leaves.py", *args]
    found = environment(TMPDIR=str(tmp_path))
    left = subprocess.run(command, capture_output=True, text=True, env=found, cwd=tmp_path, timeout=100)
    assert left.returncode == 0, left
    url, *pids = left.stdout.split()
    return url, list(map(int, pids)), left.stderr


def test_a_script_that_ends_without_waiting_ends_its_third_party_replicas_and_prints_that(tmp_path: Path) -> None:
    url, pids, said = leave(tmp_path)
    assert not any(map(is_alive, pids))
    run_id = url.rpartition("/")[2]
    assert f"replicas: run {run_id} ends with this process. Wait for it with run.wait()" in said
    store, _, run_id = url.rpartition("/")
    outcomes = [Attempt(store_at(store), run_id, rank).outcome() for rank in range(2)]
    assert [each and (each.status, each.reason) for each in outcomes] == [("cancelled", "cancelled")] * 2


def test_a_script_that_ends_without_waiting_leaves_a_detached_run_of_a_third_party_alone(tmp_path: Path) -> None:
    _, pids, said = leave(tmp_path, "detached")
    try:
        assert all(map(is_alive, pids))
        assert "ends with this process" not in said
    finally:
        end(dict.fromkeys(pids, ""))


def test_a_run_that_was_waited_for_is_not_kept_until_the_exit(executor: PopenExecutor) -> None:
    waited, left = launch(executor, task("echo"), 1), launch(executor, task("echo"), 1)
    known = [weakref.ref(waited), weakref.ref(left)]
    waited.results()
    del waited, left
    gc.collect()
    assert [ref() is None for ref in known] == [True, False]


def test_replicas_of_a_third_party_that_cannot_be_ended_at_the_exit_are_named_and_the_others_end(
    executor: PopenExecutor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    exits: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", exits.append)
    run = launch(executor, task("hang"), 3)
    cancel = executor.cancel

    def refuse(handle: Any) -> None:
        if handle.rank < 2:
            raise RuntimeError("the API is down")
        cancel(handle)

    monkeypatch.setattr(executor, "cancel", refuse)
    for told in exits:
        told()
    assert [is_alive(handle.process.pid) for handle in run.handles] == [True, True, False]
    said = f"replicas: ranks 0-1 of run {run.run_id} may still run on 'popen': RuntimeError: the API is down"
    assert said in capfd.readouterr().err
    monkeypatch.setattr(executor, "cancel", cancel)
    monkeypatch.setattr("atexit.unregister", exits.remove)
    run.cancel()
    assert exits == [], "no replica runs any more"


def test_environment_values_and_objects_without_the_verbs_are_refused(executor: PopenExecutor) -> None:
    with pytest.raises((ReplicasError, ValueError), match="env"):
        launch(executor, task("echo"), 1, env={"TOKEN": "secret"})
    assert executor.entrypoints == []
    with pytest.raises((TypeError, ReplicasError), match="collect"):
        launch(cast(Any, object()), task("echo"), 1)
