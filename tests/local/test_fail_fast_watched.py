"""If a rank fails before the first round of any rank, that is printed, and with `fail_fast` it ends the run."""

from __future__ import annotations

import re
import time

import pytest
from support.cli import HereInstead
from support.new_runs import run_json
from support.third_party import PopenExecutor

from executors import LocalProcessExecutor, Run, attach, launch
from executors.attempt import Attempt
from executors.errors import ReplicaFailedError, StoreError, UnwritableStoreError
from executors.protocol import Outcome, ReplicaStatus
from executors.run.run import manager_of, view_of
from executors.status import ReplicaState, RunStatus
from executors.store.memory import MemoryStore
from executors.task.record import RunRecord
from executors.testing import eventually

MIXED = (
    "import job\nfrom executors import current_replica\n"
    "def main():\n    return job.fail([1]) if current_replica().rank == 1 else job.hang()\n"
)


def test_the_waiting_process_ends_the_run_if_no_other_process_does(
    third_party: PopenExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    run = launch(third_party, "support.tasks:fail_or_hang", 3, args={"rank": 1}, fail_fast=True)
    with pytest.raises(ReplicaFailedError, match="rank 1"):
        run.results()
    assert [row.status for row in run.outcomes()] == ["cancelled", "failed", "cancelled"]
    assert "rank 1 failed before the first round: RuntimeError: " in (run.outcomes()[0].error or "")
    assert "rank 1 failed before the first round, which ends the run.\n" in capfd.readouterr().err
    assert view_of(attach(run.run_id)).record.settings.fail_fast


def test_fail_fast_ends_the_others_although_the_store_failed_at_first(
    third_party: PopenExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_cancel, failures = Attempt.request_cancel, iter([StoreError("no answer")] * 2)

    def fails_twice(attempt: Attempt, why: str) -> None:
        if error := next(failures, None):
            raise error
        request_cancel(attempt, why)

    monkeypatch.setattr(Attempt, "request_cancel", fails_twice)
    run = launch(third_party, "support.tasks:fail_or_hang", 2, args={"rank": 1}, fail_fast=True)
    assert run.wait(30)
    assert [row.status for row in run.outcomes()] == ["cancelled", "failed"]


def test_a_process_that_may_only_read_is_reported_once_that_it_cannot_end_the_run(
    third_party: PopenExecutor, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuses(attempt: Attempt, why: str) -> None:
        raise UnwritableStoreError("you may only read.")

    with monkeypatch.context() as patch:
        patch.setattr(Attempt, "request_cancel", refuses)
        run = launch(third_party, "support.tasks:fail_or_hang", 2, args={"rank": 1}, fail_fast=True)
        said = ""
        while "cannot end" not in said:  # the launch may print something else first
            assert not run.wait(1)
            said += capfd.readouterr().err
        assert not run.wait(1)
    assert said.endswith("rank 1 failed before the first round; this process cannot end the run: you may only read.\n")
    assert "cannot end" not in capfd.readouterr().err
    run.cancel()


def test_a_process_that_waits_elsewhere_and_cannot_end_the_run_has_no_error(third_party: PopenExecutor) -> None:
    run = launch(third_party, "support.tasks:fail_or_hang", 2, args={"rank": 1}, fail_fast=True)
    # the cancel marker of the other process may have ended the rank by then
    attach(run.run_id, executor=third_party).wait(4)
    assert run.wait(60)
    assert run.outcomes()[1].status == "failed"


def test_the_process_that_waits_prints_an_early_failure_once(
    local: LocalProcessExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    with launch(local, "support.tasks:fail_or_hang", 2, args={"rank": 1}) as run:
        said: list[str] = []

        def is_told() -> bool:
            assert not run.wait(0.2)
            said.extend(capsys.readouterr().err.splitlines())
            return bool(said)

        eventually(is_told)
        assert not run.wait(1)
    (line,) = [*said, *capsys.readouterr().err.splitlines()]
    assert line == (
        f"replicas: {run.run_id}: rank 1 failed before the first round; the others continue without it. "
        "fail_fast=True ends the run instead."
    )


def test_no_rank_is_reported_to_continue_if_all_ranks_fail_one_after_another() -> None:
    failed, running = ReplicaStatus.FAILED, ReplicaStatus.RUNNING
    states = [ReplicaState(rank, 0, failed, Outcome(rank, 0, failed, "exception")) for rank in (0, 1)]
    now = RunStatus("otter", "local", [*states, *(ReplicaState(rank, 0, running) for rank in (2, 3))])
    run = Run(MemoryStore(), "otter")
    view_of(run).record = RunRecord.parse(run_json(n=4, created_at=time.time()))
    assert manager_of(run).end_early(now, "--fail-fast") is None, (
        "no line is printed while the other ranks may still fail"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("executors.run.waiter.OTHERS_FAIL_S", 0.0)
        told = "ranks 0-1 failed before the first round; the others continue without them. --fail-fast ends"
        assert str(manager_of(run).end_early(now, "--fail-fast")).startswith(told)
        assert manager_of(run).end_early(now, "--fail-fast") is None, "the line is printed once"


def test_a_failure_after_a_round_ends_nothing(local: LocalProcessExecutor, capsys: pytest.CaptureFixture[str]) -> None:
    run = launch(local, "support.tasks:fail_after_a_round", 2, fail_fast=True)
    assert run.wait(60)
    assert [row.status for row in run.outcomes()] == ["succeeded", "failed"]
    assert capsys.readouterr().err == ""


def test_the_command_ends_the_run_with_exit_code_1(here: HereInstead) -> None:
    (here.folder.path / "mixed.py").write_text(MIXED)
    result = here.launch("mixed.py", "--fail-fast", n=3)
    assert result.code == 1, result
    assert "RuntimeError: it went wrong (rank 1 of 3, job.py:" in result.stdout
    told = r"ranks? ([0-2, ]+) cancelled \(rank 1 failed before the first round: RuntimeError: it went wrong"
    assert sorted(", ".join(re.findall(told, result.stdout)).split(", ")) == ["0", "2"], result
