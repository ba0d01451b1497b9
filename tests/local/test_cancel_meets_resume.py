"""A cancel stops a resume that is under way. A resume after the cancel starts the ranks again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest

from executors import LocalProcessExecutor, Run, attach, current_replica, launch
from executors.errors import LaunchError
from executors.restarts.decision_log import DecisionLog
from executors.run.resume import resume
from executors.run.run import view_of
from executors.settings.run_spec import StartSpec
from executors.testing import eventually
from executors.view.run_view import RunView

PLAIN = LocalProcessExecutor(preload=(), term_grace_s=0.5)


def fail_once(folder: str) -> str:
    """Fail in the first attempt; leave a file in a later one."""
    replica = current_replica()
    if replica.attempt == 0:
        raise RuntimeError("not yet")
    Path(folder, f"{replica.rank}-{replica.attempt}").touch()
    return "done"


class CancelledInAResume(LocalProcessExecutor):
    """Cancels the run once, like another process, while a resume launches."""

    is_armed: ClassVar[bool] = False

    def start_ranks(self, start: StartSpec, *more: Any) -> Any:
        if start.spec.attempt > 0 and self.is_armed:
            type(self).is_armed = False
            attach(start.spec.run_id, executor=PLAIN).cancel()
        return super().start_ranks(start, *more)


@pytest.fixture
def failed(tmp_path: Path) -> Run:
    run = launch(CancelledInAResume(preload=(), term_grace_s=0.5), fail_once, 2, args={"folder": str(tmp_path)})
    run.wait(60)
    return run


def kinds(run: Run) -> list[tuple[str, int | None, dict[int, int]]]:
    return [(entry.kind, entry.rank, entry.start) for entry in DecisionLog(view_of(run).store, run.run_id).read()]


def ran(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "-" in path.name)


def test_an_attempt_that_a_resume_starts_after_a_cancel_runs_no_user_code(
    failed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CancelledInAResume, "is_armed", True)
    again = resume(failed)
    assert again.wait(60)
    assert [(o.status, o.attempt, o.error) for o in again.outcomes()] == [
        ("cancelled", 1, f"Replica {rank} was ended: cancelled by the user.") for rank in range(2)
    ]
    assert ran(tmp_path) == []
    assert kinds(failed) == [("resume", None, {0: 1, 1: 1}), ("cancel", None, {})]


def test_a_cancel_between_the_look_and_the_order_of_a_resume_is_reported(
    failed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look = RunView.status

    def cancel_behind_it(self: RunView, **more: Any) -> Any:
        found = look(self, **more)
        monkeypatch.setattr(RunView, "status", look)
        attach(self.run_id, executor=PLAIN).cancel()
        return found

    monkeypatch.setattr(RunView, "status", cancel_behind_it)
    with pytest.raises(LaunchError, match=r"was cancelled meanwhile by \S+:\d+"):
        resume(failed)
    assert kinds(failed) == [("cancel", None, {})]


def test_a_resume_after_a_cancel_starts_only_the_ranks_that_it_names(failed: Run, tmp_path: Path) -> None:
    failed.cancel()
    assert resume(failed, ranks=[1]).wait(60)
    assert [outcome.status for outcome in failed.outcomes()] == ["failed", "succeeded"]
    assert ran(tmp_path) == ["1-1"]
    failed.cancel(0)
    assert kinds(failed) == [("cancel", None, {}), ("resume", None, {1: 1}), ("cancel", 0, {})]


def test_cancelling_one_rank_blocks_that_one_alone(
    failed: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed.cancel(1)
    failed.cancel(1)
    assert kinds(failed) == [("cancel", 1, {})] * 2, (
        "the second cancel adds an entry, because a resume may have followed the first"
    )


def test_a_run_that_has_succeeded_is_not_written_to(tmp_path: Path) -> None:
    with launch(PLAIN, "time:time", 2) as run:
        run.results()
    assert kinds(run) == []


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise LaunchError("no process can be started")

    monkeypatch.setattr(LocalProcessExecutor, "start_ranks", refuse)


def orders_of(run_id: str) -> list[tuple[str, int | None, str]]:
    return [
        (entry.kind, entry.rank, entry.words) for entry in DecisionLog(view_of(attach(run_id)).store, run_id).read()
    ]


BARRED = [("cancel", None, "The launch failed before all replicas were started: no process can be started")]


@pytest.mark.usefixtures("nothing_starts")
def test_a_launch_that_fails_half_way_blocks_its_run() -> None:
    with pytest.raises(LaunchError):
        launch(PLAIN, "time:time", 2, run_id="otter")
    assert orders_of("otter") == BARRED


def test_a_resume_from_a_snapshot_that_fails_half_way_blocks_the_new_run(
    failed: Run, nothing_starts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.run.resume.new_run_id", lambda: "heron")
    with pytest.raises(LaunchError):
        resume(failed, from_snapshot=True)
    assert orders_of("heron") == BARRED


def test_a_resume_carries_out_at_once_a_restart_that_waits(tmp_path: Path) -> None:
    run = launch(PLAIN, fail_once, 1, args={"folder": str(tmp_path)}, restarts="5,backoff=600s")
    eventually(lambda: kinds(run), "a restart is decided")
    assert resume(run).results() == ["done"]
    assert kinds(run) == [("restart", 0, {0: 1}), ("resume", None, {0: 1})]
