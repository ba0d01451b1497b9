"""A launch that starts with fewer replicas than it asks for: at a service that refuses some, or lets them wait."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from servers.s3.server import S3Server
from support.fake_jobs import FakeExecutor, FakeJobs, Machines, start

from executors import Run, attach, launch
from executors.errors import LaunchError
from executors.registry.run_index import local_store
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store.records import exists
from executors.testing import eventually

pytestmark = pytest.mark.usefixtures("quick_tries")


@pytest.fixture(autouse=True)
def _no_machines(machines: Machines) -> None:
    """The service accepts jobs but does not start them, because these tests need only their states."""
    machines.is_held = True


def reasons(run: Run) -> list[str | None]:
    return [outcome.reason for outcome in run.outcomes()]


def test_a_rank_that_is_refused_is_left_out_when_enough_others_are_started(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    machines.fail("start", "rejected", rank=2)
    run = start(4, min_replicas=3)
    assert [handle and handle.rank for handle in run.handles] == [0, 1, None, 3]
    assert machines.living() == [(0, 0), (1, 0), (3, 0)]
    assert "replicas: Rank 2 could not be started: Fake: rejected, as the test asked." in capsys.readouterr().err
    assert reasons(run) == [None, None, "start_failed", None]
    assert view_of(run).record.settings.min_replicas == 3
    run.cancel()


def test_a_launch_that_gets_too_few_ends_them_and_says_how_many_were_asked_for(machines: Machines) -> None:
    for rank in (1, 2):
        machines.fail("start", "rejected", rank=rank)
    with pytest.raises(LaunchError, match=r"replica 1 of 4: .*; at least 3 of 4 were asked for\. Those already"):
        start(4, min_replicas=3)
    assert machines.living() == []
    decides = machines.hold(1, 2)
    with ThreadPoolExecutor(1) as pool:
        launching = pool.submit(launch, FakeExecutor(), "job.py:main", 4, run_id="owl", min_replicas=3, gather_s=0.2)
        eventually(lambda: exists(local_store(), "owl/replicas/0001/0/cancel.json"), "rank 1 is given up")
        decides.set()
        with pytest.raises(LaunchError, match=r"started 2 of 4 replicas within 0.2 s; at least 3 of 4 were asked for"):
            launching.result()
    assert machines.living() == []
    assert set(reasons(attach("owl", executor=FakeExecutor()))) == {"cancelled"}


def test_missing_ranks_join_when_they_have_started(machines: Machines, capsys: pytest.CaptureFixture[str]) -> None:
    decides = machines.hold(1, 3)
    run = start(4, min_replicas=2, gather_s=0.2)
    assert "replicas: started with 2 of 4 replicas; 2 may still join." in capsys.readouterr().err
    assert machines.living() == [(0, 0), (2, 0)]
    assert run.handles[1] is None
    assert machines.count("find") == 0, "the launching process does not search for the job that it is starting"
    decides.set()
    eventually(lambda: machines.living() == [(rank, 0) for rank in range(4)])
    eventually(lambda: None not in run.handles)
    assert [machines.job_of(run, rank).job.key.rank for rank in range(4)] == [0, 1, 2, 3]
    run.cancel()
    assert machines.living() == []


@pytest.fixture
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.backends.jobs.gang_start.TEND_S", 0.05)


@pytest.mark.usefixtures("_quick_looks")
def test_missing_ranks_are_given_up_when_the_others_have_ended(machines: Machines) -> None:
    decides = machines.hold(1)
    run = start(3, min_replicas=2, gather_s=0.2)
    for rank in (0, 2):
        machines.end(machines.job_of(run, rank), "preempted")
    assert run.wait(30, n=2)
    assert [outcome.rank for outcome in run.as_completed()][2:] == [1]
    assert reasons(run) == ["preempted", "start_failed", "preempted"]
    decides.set()
    assert "the other replicas ended before it started" in str(run.outcomes()[1].error)
    eventually(lambda: machines.living() == [])


@pytest.mark.usefixtures("_quick_looks")
def test_a_rank_that_is_refused_after_the_launch_is_reported(machines: Machines) -> None:
    decides = threading.Event()
    machines.fail("start", "rejected", when=lambda: decides.wait(60), rank=1)
    run = start(3, min_replicas=2, gather_s=0.2)
    decides.set()
    eventually(lambda: reasons(run) == [None, "start_failed", None])
    run.cancel()


def test_a_launcher_that_ends_records_that_missing_ranks_do_not_come(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[tuple[Any, ...]] = []
    monkeypatch.setattr("executors.backends.jobs.gang_start.atexit.register", lambda *call: at_exit.append(call))
    decides = machines.hold(1)
    monkeypatch.setattr(FakeJobs, "interrupt_starts", lambda _: decides.set())
    run = start(3, min_replicas=2, gather_s=0.2)
    close, late = next(call for call in at_exit if "_close" in call[0].__name__)
    close(late)
    assert reasons(run) == [None, "start_failed", None]
    assert "its launcher ended before it started" in str(run.outcomes()[1].error)
    run.cancel()


def test_a_launcher_that_ends_does_not_wait_for_a_bucket_that_does_not_answer(
    machines: Machines, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[tuple[Any, ...]] = []
    monkeypatch.setattr("executors.backends.jobs.gang_start.atexit.register", lambda *call: at_exit.append(call))
    decides = machines.hold(1)
    monkeypatch.setattr(FakeJobs, "interrupt_starts", lambda _: decides.set())
    monkeypatch.setattr("executors.backends.jobs.gang_start.CLOSE_S", 0.5)
    monkeypatch.setattr("executors.backends.jobs.gang_start.TEND_S", 600.0)
    run = start(3, min_replicas=2, gather_s=2.0, rendezvous=s3.url("runs"))  # starts at a bucket are slow under load
    s3.misbehave(unavailable=1.0)
    close, late = next(call for call in at_exit if "_close" in call[0].__name__)
    close(late)
    assert len(s3.requests("GET", "replicas/0001/0/outcome.json")) == 1, "tried once"
    s3.misbehave()
    run.cancel()


def test_a_detached_launch_gives_up_replicas_that_have_not_started(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    decides = machines.hold(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeJobs, "interrupt_starts", lambda _: decides.set())
        run = start(3, min_replicas=2, gather_s=0.2, detach=True)
    assert "replicas: started with 2 of 3 replicas; 1 did not start within 0.2 s" in capsys.readouterr().err
    assert reasons(run) == [None, "start_failed", None]
    assert machines.living() == [(0, 0), (2, 0)]
    run.cancel()


def test_a_rank_that_is_refused_is_not_a_failure_that_ends_the_run(machines: Machines) -> None:
    machines.fail("start", "rejected", rank=2)
    run = start(4, min_replicas=3, fail_fast=True)
    assert not run.wait(0)
    assert machines.living() == [(0, 0), (1, 0), (3, 0)]
    run.cancel()


def test_a_resume_waits_for_missing_ranks_as_long_as_the_launch_did_or_as_its_own_setting_says(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(3, min_replicas=2, gather_s=0.3)
    assert view_of(run).record.settings.gather_s == 0.3
    for gather_s, said in ((None, "0.3 s"), (0.1, "0.1 s")):
        run.cancel()
        decides = machines.hold(1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeJobs, "interrupt_starts", lambda _, decides=decides: decides.set())
            run = resume(run, gather_s=gather_s, detach=True)
        assert f"1 did not start within {said}" in capsys.readouterr().err
        machines.forgive()
    run.cancel()


def test_a_time_to_wait_for_missing_ranks_is_refused_if_all_are_needed(machines: Machines) -> None:
    with pytest.raises(ValueError, match=r"gather_s= \(--gather\) has an effect only with min_replicas= .* Give both"):
        start(2, gather_s=5)
    run = start(1)
    run.cancel()
    with pytest.raises(ValueError, match=r"launched without min_replicas, so gather_s= \(--gather\) has no effect"):
        resume(run, gather_s=5)


def test_a_time_to_wait_for_missing_ranks_may_be_as_long_as_any_duration(machines: Machines) -> None:
    decides = machines.hold(1)
    with ThreadPoolExecutor(1) as pool:
        launching = pool.submit(start, 2, min_replicas=1, gather_s=9e10)
        eventually(lambda: launching.done() or machines.living() == [(0, 0)])
        decides.set()
        run = launching.result()
    assert machines.living() == [(0, 0), (1, 0)]
    run.cancel()


def test_a_rank_that_is_refused_when_the_run_is_resumed_is_not_reported_to_be_anothers(
    machines: Machines, capsys: pytest.CaptureFixture[str]
) -> None:
    run = start(3, min_replicas=2)
    for rank in range(3):
        machines.end(machines.job_of(run, rank), "preempted")
    machines.fail("start", "rejected", rank=1)
    capsys.readouterr()
    resume(run)
    assert capsys.readouterr().err == "replicas: Rank 1 could not be started: Fake: rejected, as the test asked.\n"
    assert machines.living() == [(0, 1), (2, 1)]
    run.cancel()
