"""If several processes resume a run of jobs at the same time, or a resume fails, each rank has at most one job."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.fake_jobs import FakeExecutor, Machines, attached, launched

from executors import Run
from executors.attempt import Attempt
from executors.errors import AlreadyResumedError, LaunchError
from executors.restarts.decision_log import DecisionLog
from executors.run.resume import resume
from executors.run.run import view_of
from executors.settings.run_spec import StartSpec
from executors.store import store_at
from executors.testing import eventually

pytestmark = pytest.mark.usefixtures("quick_tries")


@pytest.fixture(autouse=True)
def _no_machines(machines: Machines) -> None:
    """The service accepts jobs but does not start them, because these tests need only their states."""
    machines.is_held = True


def test_a_run_is_resumed_after_a_resume_that_failed(machines: Machines) -> None:
    run = launched(machines, 2)
    run.cancel(0)
    machines.fail("start", "rejected")
    with pytest.raises(LaunchError, match="replica 0 of 2"):
        resume(attached())
    again = resume(attached())
    assert [state.attempt for state in again.status().replicas] == [2, 0]
    assert machines.living() == [(0, 2), (1, 0)]


class Refusing(FakeExecutor):
    """An executor that refuses to start a third attempt."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self._error = error

    def start_ranks(self, start: StartSpec, *more: Any) -> Any:
        if start.spec.attempt == 2:
            raise self._error("no third one")
        return super().start_ranks(start, *more)


@pytest.mark.parametrize("error", [LaunchError, KeyboardInterrupt])
def test_a_resume_that_is_refused_in_part_leaves_nothing_running(
    machines: Machines, error: type[BaseException]
) -> None:
    """Ranks at different attempts are started one after the other."""
    run = launched(machines, 3)
    run.cancel()
    resume(attached(), ranks=[1], detach=True).cancel()
    with pytest.raises(error, match="no third one"):
        resume(Run(view_of(run).store, "otter", executor=Refusing(error)), detach=True)
    assert machines.living() == []
    assert [(str(state.status), state.attempt) for state in attached().status().replicas] == [("cancelled", 1)] * 3
    ordered = [entry.rank for entry in DecisionLog(view_of(run).store, "otter").read() if "no third one" in entry.words]
    assert ordered == [0, 2, 1], "the decision log blocks the ranks, so no controller continues the resume"
    resume(attached(), detach=True)
    assert machines.living() == [(0, 2), (1, 2), (2, 2)]


class Overtaken(FakeExecutor):
    """An executor that lets another resume run first, once, when it must start later attempts."""

    def __init__(self, ranks: list[int] | None) -> None:
        super().__init__()
        self._ranks = ranks

    def start_ranks(self, start: StartSpec, *more: Any) -> Any:
        FakeExecutor().start_ranks(start.with_spec(ranks=tuple(self._ranks or start.ranks)), *more)
        return super().start_ranks(start, *more)


def resume_overtaken(machines: Machines, by_ranks: list[int] | None) -> None:
    run = launched(machines, 3)
    run.cancel()
    resume(Run(view_of(run).store, "otter", executor=Overtaken(by_ranks)))


def test_a_second_resume_starts_nothing_and_its_error_names_the_first_one(machines: Machines) -> None:
    told = r"Ranks 0-2 of run 'otter' are being resumed .*attempt 1, begun by .*:\d+\)"
    with pytest.raises(AlreadyResumedError, match=told):
        resume_overtaken(machines, None)
    assert machines.living() == [(0, 1), (1, 1), (2, 1)]
    assert machines.count("start") == 6


def test_a_resume_that_is_overtaken_in_part_continues_with_the_rest(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    resume_overtaken(machines, [1])
    assert "replicas: Rank 1 of run 'otter' is being resumed by another process" in capsys.readouterr().err
    assert machines.living() == [(0, 1), (1, 1), (2, 1)]


def test_a_resume_that_is_overtaken_in_part_and_fails_ends_its_own_jobs_alone(machines: Machines) -> None:
    run = launched(machines, 3)
    run.cancel()
    machines.fail("start", "rejected", rank=2, when=lambda: eventually(lambda: (0, 1) in machines.living()))
    with pytest.raises(LaunchError, match="replica 2 of 3"):
        resume(Run(view_of(run).store, "otter", executor=Overtaken([1])))
    assert machines.living() == [(1, 1)]
    states = [(str(state.status), state.attempt) for state in attached().status().replicas]
    assert states == [("cancelled", 1), ("pending", 1), ("failed", 1)]


class BesideOneThatDies(FakeExecutor):
    """An executor for which another process begins rank 1 first, and dies before it calls the service."""

    def start_ranks(self, start: StartSpec, *more: Any) -> Any:
        run = start.spec
        Attempt(store_at(run.store_url), run.run_id, 1, run.attempt).create_intent("another's", takes_s=0.0)
        return super().start_ranks(start, *more)


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_process_that_resumes_beside_one_that_dies_does_not_wait_for_its_rank(
    machines: Machines, is_refused: bool
) -> None:
    run = launched(machines, 2)
    run.cancel()
    executor = BesideOneThatDies()
    if is_refused:
        machines.fail("start", "rejected", rank=0)
    with pytest.raises(LaunchError) if is_refused else contextlib.nullcontext():
        resume(Run(view_of(run).store, "otter", executor=executor))
    seen = Run(view_of(run).store, "otter", executor=executor)
    eventually(lambda: seen.status().replicas[1].status == "failed", "the service reports the failed job")
    outcome = seen.status().replicas[1].outcome
    assert outcome is not None
    assert (outcome.attempt, outcome.reason) == (1, "start_failed")


def test_a_state_of_an_attempt_is_not_used_for_the_next_attempt_that_begins_during_the_look(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a resume would start a third attempt of the rank, and a second job."""
    launched(machines, 2).cancel()
    look, others = view_of(attached()).reader, iter([[], [0], [1]])
    update = look.records.update

    def update_after_another_resumed(max_age_s: float = 0.0) -> None:
        if ranks := next(others, []):
            resume(attached(), ranks=ranks)
        update(max_age_s)

    monkeypatch.setattr(look.records, "update", update_after_another_resumed)
    assert [(str(state.status), state.attempt) for state in look.look([0, 1])] == [("pending", 1), ("pending", 0)]


def test_ranks_that_several_resume_at_once_have_one_job_more(machines: Machines) -> None:
    launched(machines, 3).cancel()
    found, together = [attached() for _ in range(4)], threading.Barrier(4)

    def bring_back(run: Run) -> None:
        together.wait()
        with contextlib.suppress(
            AlreadyResumedError, ValueError
        ):  # the second answer comes if the process looked after the other resume had begun
            resume(run)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(bring_back, found))
    assert machines.living() == [(0, 1), (1, 1), (2, 1)]
    assert machines.count("start") == 6
