"""A launch that asks for no restarts gets those that are free: of replicas whose machine the service took back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.fake_jobs import FakeJobs, Machines, start, wait_until_hanging

from executors import Run
from executors.task.policy import Restarts
from executors.testing import eventually


@pytest.fixture(autouse=True)
def _tells_preemption(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeJobs, "tells_preemption", lambda self, gpu: True)


@contextmanager
def waited_for(run: Run) -> Iterator[None]:
    """Wait for a run in another thread meanwhile, as a launching process does; end the run."""
    waiting = threading.Thread(target=run.wait, args=(120,))
    waiting.start()
    try:
        yield
    finally:
        run.cancel()
        waiting.join()


def test_a_replica_whose_machine_was_taken_back_comes_back_by_itself(machines: Machines) -> None:
    run = start(2, "hang")
    assert run.record.restarts == "preempted"
    with waited_for(run):
        wait_until_hanging(run)
        machines.end(machines.job_of(run, 1), "preempted")
        eventually(lambda: machines.living() == [(0, 0), (1, 1)], "rank 1 is started again")


@pytest.mark.parametrize("reason", ["oom", "lost", None])
def test_no_other_end_is_answered(machines: Machines, reason: str | None) -> None:
    run = start(1, "hang")
    with waited_for(run):
        wait_until_hanging(run)
        machines.end(machines.job_of(run, 0), reason)  # type: ignore[arg-type]
        eventually(lambda: run.status().is_terminal, "the run is over")
        assert machines.living() == []
        assert [outcome.attempt for outcome in run.outcomes()] == [0]


@pytest.mark.parametrize(("restarts", "recorded"), [("none", None), ("2", "2")])
def test_what_is_asked_for_wins(machines: Machines, restarts: str, recorded: str | None) -> None:
    run = start(1, "main", restarts=restarts)
    assert run.record.restarts == recorded
    assert run.wait(60)


def test_a_detached_run_has_no_such_restarts_because_nobody_waits_for_it(machines: Machines) -> None:
    run = start(1, "main", detach=True)
    assert run.record.restarts is None
    assert run.wait(60)


def test_a_replica_s_own_supervisor_goes_on_without_a_policy(machines: Machines) -> None:
    start(1, "main").wait(60)
    (job,) = machines.jobs
    assert "REPLICA_RESTARTS" not in job.job.env, "it would end a replica that is idle"


def test_the_policy_is_read_as_it_is_written() -> None:
    assert str(Restarts.parse("preempted")) == "preempted"
    assert Restarts.parse("preempted").only_preempted
