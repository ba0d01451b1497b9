"""A stranger's five verbs: what they keep of the contract, and what `launch()` adds to them."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
from processes_of_tests import is_alive
from strangers_executor import PopenExecutor

from executors import ReplicasError, ServerlessExecutor, attach, launch
from executors.errors import ReplicaCancelledError, ReplicaFailedError, ReplicaLostError
from executors.testing import ExecutorContract, eventually
from executors.testing.executor_endings import task


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[PopenExecutor]:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    started: list[Any] = []
    launch_replicas = PopenExecutor.launch_replicas

    @functools.wraps(launch_replicas)
    def remember(*args: Any, **kwargs: Any) -> Any:
        tickets = launch_replicas(*args, **kwargs)
        started.extend(tickets)
        return tickets

    monkeypatch.setattr(PopenExecutor, "launch_replicas", remember)
    yield PopenExecutor()
    for ticket in started:
        ticket.process.kill()
        ticket.process.wait()


NO_CHECKS = "it starts whatever it is told"
NO_REASONS = "it knows an exit code and a log, nothing more"


class TestStrangersExecutor(ExecutorContract):
    takes_callables = False
    expected_failures: ClassVar[dict[str, str]] = {
        "test_an_entrypoint_that_is_not_there_is_refused_by_name": NO_CHECKS,
        "test_arguments_that_do_not_fit_are_refused_before_anything_starts": NO_CHECKS,
        "test_a_result_that_is_no_json_is_a_failure_that_names_its_place": NO_REASONS,
        "test_leaving_without_a_result_is_a_failure_that_keeps_the_code": NO_REASONS,
        "test_the_rank_can_have_one_more_variable": "it passes all arguments on",
    }

    @pytest.fixture
    def executor(self, executor: PopenExecutor) -> ServerlessExecutor:
        return cast(ServerlessExecutor, executor)

    def kill(self, executor: ServerlessExecutor, handle: Any) -> None:
        os.kill(handle.process.pid, signal.SIGKILL)


def test_the_strangers_module_imports_nothing_of_ours() -> None:
    source = Path(sys.modules[PopenExecutor.__module__].__file__ or "").read_text()
    assert "executors" not in source
    assert "diloco" not in source


def test_a_stranger_gets_a_name_and_json_arguments(executor: PopenExecutor) -> None:
    run = launch(executor, task("echo"), 2, args={"a": 1})
    run.wait()
    ((entrypoint, args),) = executor.entrypoints
    assert entrypoint == "executors.worker.call"
    assert args.keys() == {"run"}
    assert args["run"].endswith(f"/{run.run_id}")


def test_a_function_runs_on_an_executor_that_takes_only_names(executor: PopenExecutor) -> None:
    factor = 7

    def entrypoint(base: int) -> dict[str, Any]:
        from executors import current_replica

        me = current_replica()
        return {"value": base * factor, "rank": me.rank, "world_size": me.world_size}

    run = launch(executor, entrypoint, 3, args={"base": 6})
    assert run.results() == [{"value": 42, "rank": rank, "world_size": 3} for rank in range(3)]


def test_results_and_failures_come_from_the_store_and_not_from_the_stranger(executor: PopenExecutor) -> None:
    run = launch(executor, task("fail_on"), 2, args={"rank": 1})
    with pytest.raises(ReplicaFailedError, match="rank 1 was to fail") as caught:
        run.results()
    assert caught.value.rank == 1
    assert [(row.status, row.reason) for row in run.outcomes()] == [("succeeded", None), ("failed", "exception")]


def test_an_unserialisable_result_is_told_for_a_stranger_as_well(executor: PopenExecutor) -> None:
    run = launch(executor, task("no_json"), 1)
    run.wait()
    (row,) = run.outcomes()
    assert (row.status, row.reason) == ("failed", "result_not_serializable")
    assert "result['loss'][3]" in (row.error or "")


def test_a_replica_killed_on_a_stranger_is_lost_and_the_run_ends(executor: PopenExecutor) -> None:
    run = launch(executor, task("hang_on"), 2, args={"rank": 1})
    eventually(lambda: "hanging" in run.logs(rank=1))
    os.kill(run.handles[1].process.pid, signal.SIGKILL)
    assert run.wait(timeout=60)
    with pytest.raises(ReplicaLostError):
        run.results()
    rows = run.outcomes()
    assert [row.status for row in rows] == ["succeeded", "failed"]
    assert rows[1].reason in ("signal", "lost")


def test_a_run_on_a_stranger_can_be_cancelled(executor: PopenExecutor) -> None:
    run = launch(executor, task("hang"), 2)
    for rank in range(2):
        eventually(lambda rank=rank: "hanging" in run.logs(rank=rank))  # type: ignore[misc]
    run.cancel()
    assert run.wait(timeout=60)
    assert [(row.status, row.reason) for row in run.outcomes()] == [("cancelled", "cancelled")] * 2
    with pytest.raises(ReplicaCancelledError):
        run.results()
    assert not any(is_alive(handle.process.pid) for handle in run.handles)


def test_leaving_the_block_cancels_a_strangers_replicas(executor: PopenExecutor) -> None:
    with launch(executor, task("hang"), 2) as run:
        eventually(lambda: "hanging" in run.logs(rank=0))
    assert not any(is_alive(handle.process.pid) for handle in run.handles)


def test_environment_values_are_refused_for_a_stranger(executor: PopenExecutor) -> None:
    with pytest.raises((ReplicasError, ValueError), match="env"):
        launch(executor, task("echo"), 1, env={"TOKEN": "secret"})
    assert executor.entrypoints == []


def test_a_stranger_is_told_that_its_replicas_must_see_the_directory(
    executor: PopenExecutor, capfd: pytest.CaptureFixture[str], state_home: Path
) -> None:
    launch(executor, task("echo"), 1).wait()
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1
    assert str(state_home / "replicas") in told[0]


def test_a_stranger_is_told_nothing_when_the_rendezvous_was_chosen(
    executor: PopenExecutor, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = launch(executor, task("echo"), 1, rendezvous=str(tmp_path / "chosen"))
    run.wait()
    assert capfd.readouterr().err == ""
    assert (tmp_path / "chosen" / run.run_id / "run.json").is_file()


def test_a_finished_run_of_a_stranger_can_be_attached(executor: PopenExecutor) -> None:
    run = launch(executor, task("echo"), 2)
    results = run.results()
    assert attach(run.run_id).results() == results


def test_progress_is_reported_from_inside_a_stranger(executor: PopenExecutor) -> None:
    def entrypoint() -> int:
        from executors import current_replica

        current_replica().report(step=3, loss=0.5)
        return 1

    run = launch(executor, entrypoint, 1)
    assert run.results() == [1]


def test_an_object_without_the_verbs_is_refused_by_name() -> None:
    with pytest.raises((TypeError, ReplicasError), match="collect"):
        launch(cast(Any, object()), task("echo"), 1)
