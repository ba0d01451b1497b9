"""The contract of an executor catches wrong executors. Each mutant has a fault that was seen in a real system."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.processes import end, is_alive
from support.third_party import PopenExecutor

from executors.testing import ExecutorContract
from executors.testing.helpers import environment


class DrainsItsResults(PopenExecutor):
    """A mutant whose second `collect` finds no results."""

    def collect(self, handles: list[Any], *, timeout: int | None = None) -> list[dict[str, Any]]:
        rows = super().collect(handles, timeout=timeout)
        for handle, row in zip(handles, rows, strict=True):
            if getattr(handle, "drained", False):
                row["result"] = None
            handle.drained = True
        return rows


class KillsWhenItsPatienceEnds(PopenExecutor):
    """A mutant that kills the job if a read call runs out of time."""

    def collect(self, handles: list[Any], *, timeout: int | None = None) -> list[dict[str, Any]]:
        rows = super().collect(handles, timeout=timeout)
        for handle in handles:
            handle.process.kill()
            handle.process.wait()
        return rows


class CallsACancellationAFailure(PopenExecutor):
    def poll(self, handle: Any) -> str:
        return super().poll(handle).replace("cancelled", "failed")


class AsksPolitelyOnly(PopenExecutor):
    """A mutant that sends SIGTERM, and never SIGKILL."""

    def cancel(self, handle: Any) -> None:
        if handle.process.poll() is None:
            Path(handle.folder, "cancelled").touch()
            handle.process.terminate()


class KeepsOneLaunch(PopenExecutor):
    """A mutant that finds replicas by rank alone, so a second launch replaces the first one."""

    def launch_replicas(self, *args: Any, **kwargs: Any) -> list[Any]:
        self.latest = super().launch_replicas(*args, **kwargs)
        return self.latest

    def collect(self, handles: list[Any], *, timeout: int | None = None) -> list[dict[str, Any]]:
        return super().collect([self.latest[handle.rank] for handle in handles], timeout=timeout)


class AnswersInItsOwnOrder(PopenExecutor):
    def collect(self, handles: list[Any], *, timeout: int | None = None) -> list[dict[str, Any]]:
        return super().collect(sorted(handles, key=lambda handle: int(handle.rank)), timeout=timeout)


class HasNoTimeLimit(PopenExecutor):
    def launch_replicas(self, *args: Any, **kwargs: Any) -> list[Any]:
        return super().launch_replicas(*args, **{**kwargs, "timeout": 10**6})


class CallsAnyEndASuccess(PopenExecutor):
    def poll(self, handle: Any) -> str:
        return super().poll(handle).replace("failed", "succeeded")

    def collect(self, handles: list[Any], *, timeout: int | None = None) -> list[dict[str, Any]]:
        self.poll = super().poll  # type: ignore[method-assign]
        rows = super().collect(handles, timeout=timeout)
        return [{**row, "status": row["status"].replace("failed", "succeeded")} for row in rows]


class WritesItsExitCodesAsTexts(PopenExecutor):
    def collect(self, handles: list[Any], *, timeout: int | None = None) -> list[dict[str, Any]]:
        return [{**row, "exit_code": str(row["exit_code"])} for row in super().collect(handles, timeout=timeout)]


class Impatient(ExecutorContract):
    patience_s = 3.0


Impatient.__test__ = False  # type: ignore[attr-defined]
CONTRACT = Impatient()
MUTANTS: list[tuple[type[PopenExecutor], Callable[[Any], None]]] = [
    (
        DrainsItsResults,
        CONTRACT.test_one_failure_leaves_the_other_and_polling_cancelling_and_collecting_again_change_nothing,
    ),
    (KillsWhenItsPatienceEnds, CONTRACT.test_collects_own_time_limit_ends_nothing),
    (CallsACancellationAFailure, CONTRACT.test_a_cancelled_replica_stays_cancelled_and_the_others_continue),
    (AsksPolitelyOnly, CONTRACT.test_a_replica_that_ignores_sigterm_can_still_be_cancelled),
    (KeepsOneLaunch, CONTRACT.test_two_launches_of_one_executor_stay_apart),
    (AnswersInItsOwnOrder, CONTRACT.test_rows_come_in_the_order_of_the_handles_given),
    (HasNoTimeLimit, CONTRACT.test_a_time_limit_is_enforced),
    (WritesItsExitCodesAsTexts, CONTRACT.test_an_exception_is_a_failure_with_its_traceback),
    (CallsAnyEndASuccess, CONTRACT.test_an_exception_is_a_failure_with_its_traceback),
]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[type[PopenExecutor]], PopenExecutor]]:
    """Make executors whose processes end with the test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    tickets: list[Any] = []

    def make(kind: type[PopenExecutor]) -> PopenExecutor:
        class Watched(kind):  # type: ignore[misc, valid-type]
            def launch_replicas(self, *args: Any, **kwargs: Any) -> list[Any]:
                started: list[Any] = super().launch_replicas(*args, **kwargs)
                tickets.extend(started)
                return started

        return Watched()

    yield make
    for ticket in tickets:
        ticket.process.kill()
        ticket.process.wait()


def test_an_executor_that_breaks_a_promise_fails_its_test(
    make: Callable[[type[PopenExecutor]], PopenExecutor],
) -> None:
    for mutant, test in MUTANTS:
        try:
            test(make(mutant))
        except (AssertionError, pytest.fail.Exception):
            continue
        pytest.fail(f"{mutant.__name__} was not caught")
    with pytest.raises(AssertionError):
        CONTRACT.test_it_is_an_executor_without_inheriting(object())  # type: ignore[arg-type]


def test_replicas_of_the_contract_need_no_pytest() -> None:
    check = "import sys, executors.testing.tasks; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], env=environment()).returncode == 0


FAILS = """
import pytest
from support.third_party import PopenExecutor
from executors.testing import ExecutorContract

class CallsAllEnded(PopenExecutor):
    def launch_replicas(self, *args, **kwargs):
        tickets = super().launch_replicas(*args, **kwargs)
        with open("pids", "a") as file:
            file.write("".join(f"{ticket.process.pid}\\n" for ticket in tickets))
        return tickets

    def collect(self, handles, *, timeout=None):
        return [{**row, "status": "failed"} for row in super().collect(handles, timeout=timeout)]

class TestMine(ExecutorContract):
    takes_callables = False

    @pytest.fixture
    def executor(self):
        return CallsAllEnded()
"""


def test_a_test_of_the_contract_that_fails_leaves_no_replica_running(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(FAILS)
    name = "test_collects_own_time_limit_ends_nothing"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"test_mine.py::TestMine::{name}"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment(TMPDIR=str(tmp_path)), timeout=100
    )
    pids = [int(line) for line in (tmp_path / "pids").read_text().splitlines()]
    try:
        assert "1 failed" in done.stdout, done
        assert not any(map(is_alive, pids))
    finally:
        end(dict.fromkeys(pids, ""))
