"""Tests how replicas that are jobs run and end, in addition to the contract of executors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cli import Folder, HereInstead
from support.fake_jobs import FakeExecutor, Machines, attached, ends, start, wait_until_hanging

from executors import Run, launch
from executors.backend import Observation, PendingReplica
from executors.backends.jobs.job_outcomes import STILL_S, JobOutcomeRecorder
from executors.errors import BackendError, ReplicaLostError
from executors.restarts.decision_log import DecisionLog
from executors.run.run import manager_of, view_of
from executors.store.records import to_bytes
from executors.testing import eventually


def test_each_way_to_end_a_job_from_outside_has_its_reason(machines: Machines) -> None:
    run = start(7, "hang", args={"deaf": True})  # a replica that receives SIGTERM writes its own outcome
    wait_until_hanging(run)
    killed, memory, evicted, forgotten, stopped, cancelled, broken = (machines.job_of(run, rank) for rank in range(7))
    machines.end(killed)
    machines.end(memory, "oom", "Reason: OOMKilled.")
    machines.end(evicted, "preempted")
    machines.end(forgotten)
    be_silent_for(run, 3, 3600)
    forgotten.is_forgotten = True
    view_of(run).executor.service.stop({"id": stopped.id})  # type: ignore[attr-defined]
    run.cancel(5)
    machines.end(broken, "start_failed")
    assert ends(run) == [
        ("failed", "signal"),
        ("failed", "oom"),
        ("failed", "preempted"),
        ("failed", "lost"),
        ("cancelled", "cancelled"),
        ("cancelled", "cancelled"),
        ("failed", "start_failed"),
    ]
    outcomes = run.outcomes()
    who = "Replica {} of 7 (attempt 0)"
    said = [
        " was ended by SIGKILL (exit code 137).",
        " was killed: out of memory. Fake says: Reason: OOMKilled.",
        " was preempted: Fake took its machine back.",
        " was lost: Fake reports it gone and it left no outcome. Its last heartbeat was 36",
        " was cancelled at Fake, not by `replicas`.",
    ]
    for rank, text in enumerate(said):
        assert (outcomes[rank].error or "").startswith(who.format(rank) + text), outcomes[rank]
    assert outcomes[5].error == "Replica 5 was ended: cancelled by the user."
    assert [outcome.exit_code for outcome in outcomes] == [137, 137, 137, None, 137, 137, 137]
    assert [outcome.signal for outcome in outcomes[:3]] == ["SIGKILL", "SIGKILL", None]
    assert outcomes[0].output_tail == "hanging\n"
    with pytest.raises(ReplicaLostError):
        run.results()
    assert attached().outcomes() == outcomes
    assert cancelled.state().has_ended


def be_silent_for(run: Run, rank: int, seconds: float) -> None:
    """Set the age of the last heartbeat of a lost replica."""
    view_of(run).store.put(f"otter/replicas/{rank:04d}/0/heartbeat.json", to_bytes({"at": time.time() - seconds}))


@pytest.mark.parametrize("lists_jobs", [False, True])
def test_a_job_that_some_answers_do_not_know_is_not_lost_while_its_replica_beats(
    machines: Machines, lists_jobs: bool
) -> None:
    machines.lists_jobs = lists_jobs
    run = start(function="hang")
    wait_until_hanging(run)
    job = machines.job_of(run, 0)
    for of in (run, attached()):
        job.is_forgotten = True
        eventually(lambda of=of: of.status().replicas[0].note == "Fake does not know its job")  # type: ignore[misc]
        assert not of.wait(2), "the run has not ended, although the service does not know the job"
        assert of.status().counts == "1 running"
        job.is_forgotten = False
    eventually(lambda: run.status().replicas[0].note == "", "the note disappears when the service knows the job again")
    run.cancel()
    assert ends(run) == [("cancelled", "cancelled")]


@pytest.mark.parametrize("has_started", [True, False])
def test_a_replica_whose_job_is_unknown_is_lost_when_its_heartbeat_has_stood_still_for_90_s(
    machines: Machines, has_started: bool
) -> None:
    machines.is_held = not has_started
    run = start(function="hang")
    if has_started:
        wait_until_hanging(run)
    machines.end(machines.job_of(run, 0))
    machines.jobs[0].is_forgotten = True
    now, executor = 0.0, FakeExecutor()
    executor._recorder = JobOutcomeRecorder(executor.service, executor._states, clock=lambda: now)
    ask = [PendingReplica(run.handles[0], 0)]
    for now in (0.0, STILL_S - 1):  # noqa: B007 - it is the clock
        eventually(lambda: executor.observe(ask) == [Observation(doing="Fake does not know its job")])
    if has_started:
        be_silent_for(run, 0, 5)  # the last heartbeat came late
        now = STILL_S
        assert executor.observe(ask)[0].outcome is None
        now = 2 * STILL_S - 1
        assert executor.observe(ask)[0].outcome is None
    now = 2 * STILL_S
    assert ends_of(executor.observe(ask)) == ["lost"]


@pytest.mark.parametrize("age_s", [600, 3600])
def test_one_look_judges_a_replica_with_an_unknown_job_by_the_age_of_its_heartbeat_with_a_margin(
    machines: Machines, age_s: float
) -> None:
    run = start(function="hang", args={"deaf": True})
    wait_until_hanging(run)
    machines.end(machines.job_of(run, 0))
    machines.jobs[0].is_forgotten = True
    be_silent_for(run, 0, age_s)
    assert attached().status().counts == ("1 running" if age_s == 600 else "1 failed")


@pytest.mark.parametrize("has_started", [True, False])
@pytest.mark.parametrize("age_s", [600, 3600])
def test_one_look_judges_a_replica_without_a_heartbeat_by_the_time_of_its_start(
    machines: Machines, age_s: float, has_started: bool
) -> None:
    machines.is_held = True
    run = start()
    machines.end(machines.job_of(run, 0))
    machines.jobs[0].is_forgotten = True
    begun_at = time.time() - age_s
    queued_s = 86400 if has_started else 0  # the claim is newer than the heartbeat
    intent = {"nonce": "n", "by": "its launcher", "at": begun_at - queued_s}
    view_of(run).store.put("otter/replicas/0000/0/intent.json", to_bytes(intent))
    if has_started:
        view_of(run).store.put("otter/replicas/0000/0/started.json", to_bytes({"nonce": "n", "at": begun_at}))
    alive = "1 running" if has_started else "1 pending"
    assert attached().status().counts == (alive if age_s == 600 else "1 failed")


def test_a_replica_whose_job_is_unknown_can_be_cancelled_at_once(machines: Machines) -> None:
    run = start(function="hang", args={"deaf": True})
    wait_until_hanging(run)
    machines.end(machines.job_of(run, 0))
    machines.jobs[0].is_forgotten = True
    eventually(lambda: run.status().replicas[0].note == "Fake does not know its job")
    run.cancel()
    assert ends(run) == [("cancelled", "cancelled")]


def test_the_services_limit_ends_a_replica_that_does_not_end_itself(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.backends.jobs.executor.INSTALL_S", -58)
    run = start(function="hang", args={"deaf": True}, timeout=60)
    assert ends(run) == [("failed", "timeout")]
    assert run.outcomes()[0].error == "Replica 0 of 1 (attempt 0) ran into its time limit of 60 s."


def test_the_reason_why_a_start_failed_is_in_the_outcome(machines: Machines) -> None:
    machines.is_held = True
    run = start()
    view_of(run).store.delete("otter/task/code.tar.gz")
    machines.release()
    assert ends(run) == [("failed", "start_failed")]
    (outcome,) = run.outcomes()
    assert outcome.exit_code == 78
    assert "before its entrypoint was reached. Its log ends: replicas: replica 0 of run otter" in (outcome.error or "")
    assert "cannot read task/code.tar.gz" in (outcome.error or "")


def test_replicas_that_get_no_machine_are_pending_and_can_be_cancelled(machines: Machines) -> None:
    machines.is_held = True
    run = start(2)
    assert attached().status().counts == "2 pending"
    assert [state.note for state in attached().status().replicas] == ["scheduling"] * 2, (
        "the message contains the text of the service"
    )
    assert run.logs(rank=0) == ""
    run.cancel()
    assert ends(run) == [("cancelled", "cancelled")] * 2
    assert machines.living() == []


def test_the_outcome_replaces_a_log_that_the_service_has_deleted(machines: Machines) -> None:
    run = start(args={"times": 2})
    run.results()
    machines.job_of(run, 0).is_forgotten = True
    assert run.logs(rank=0).splitlines() == ["hello 0 of rank 0", "hello 1 of rank 0"]


def test_the_log_of_a_cancelled_replica_reports_that_it_was_cancelled(machines: Machines) -> None:
    run = start(function="hang")
    wait_until_hanging(run)
    run.cancel()
    eventually(lambda: "was terminated by SIGTERM, since it was cancelled." in run.logs(rank=0))


def test_logs_that_cannot_be_read_are_an_error_and_not_an_ending(machines: Machines) -> None:
    run = start(function="hang")
    wait_until_hanging(run)
    machines.fail("logs", "rejected")
    with pytest.raises(BackendError, match="Fake"):
        run.logs(rank=0)
    assert run.logs(rank=0) == "hanging\n"
    assert run.status().counts == "1 running"
    run.cancel()


@pytest.mark.usefixtures("quick_tries")
def test_a_service_that_cannot_answer_leaves_a_replica_as_it_is(
    machines: Machines, caplog: pytest.LogCaptureFixture
) -> None:
    machines.is_held = True
    run = start()
    caplog.set_level(logging.WARNING)
    for kind in ("unavailable", "unknown"):
        machines.calls.clear()
        machines.fail("state", kind, times=None)
        assert attached().status().counts == "1 pending"
        assert machines.count("state") == 1, "one poll asks once, and the next poll asks again"
        assert "Fake cannot report the state of its job" in caplog.text
        machines.forgive()
    machines.fail("state", "rejected")
    with pytest.raises(BackendError, match="Fake: rejected"):
        attached().status()
    run.cancel()


@pytest.mark.parametrize("ends_of_run", [Run.results, lambda run: list(run.as_completed())], ids=["results", "each"])
def test_a_refused_answer_while_a_script_waits_does_not_end_its_wait(
    machines: Machines,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    ends_of_run: Callable[[Run], list[object]],
) -> None:
    monkeypatch.setattr("executors.patience.FIRST_WORD_S", 0.0)
    monkeypatch.setattr("executors.patience.AGAIN_S", 0.0)
    machines.is_held = True
    run = start(2)

    def is_late() -> bool:
        if machines.count("state") < 5:
            return False
        machines.release()
        return True

    machines.fail("state", "rejected", when=is_late)
    assert len(ends_of_run(run)) == 2
    assert [str(outcome.status) for outcome in run.outcomes()] == ["succeeded"] * 2
    told = capsys.readouterr().err
    assert "replicas: waiting for the backend, 0 s so far, 15 min at most: Fake: rejected, as the test asked." in told


def test_a_waiting_script_gets_a_refusal_at_once_at_the_first_look_and_later_after_a_minute(
    machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.backends.jobs.sdk.FIRST_PAUSE_S", 0.0)  # each look asks the service
    machines.is_held = True
    run = start()
    machines.fail("state", "rejected", times=None)
    with pytest.raises(BackendError, match="Fake: rejected"):
        attached().wait()
    machines.forgive()
    assert not run.wait(0)
    machines.fail("state", "rejected", times=None)
    monkeypatch.setattr("executors.patience.SCALE", 0.0)
    with pytest.raises(BackendError, match="Fake: rejected"):
        run.wait()
    machines.forgive()
    run.cancel()


@pytest.mark.usefixtures("quick_tries")
def test_a_cancel_is_repeated_until_the_service_accepts_it(machines: Machines) -> None:
    machines.is_held = True
    run = start()
    for kind in ("unavailable", "unknown"):
        machines.fail("verify", kind)
        machines.fail("stop", kind, times=2, after_applying=kind == "unknown")
    attached().cancel()
    assert machines.living() == []
    assert ends(run) == [("cancelled", "cancelled")]


def test_a_cancel_that_is_refused_for_a_job_that_runs_is_an_error(machines: Machines) -> None:
    machines.is_held = True
    run = start()
    machines.fail("stop", "rejected")
    with pytest.raises(BackendError, match="Fake: rejected"):
        run.cancel()
    run.cancel()
    assert ends(run) == [("cancelled", "cancelled")]


@pytest.mark.parametrize(
    "refused", [["state"], ["state", "verify", "find", "stop"]], ids=["how they are", "everything"]
)
def test_a_cancel_is_ordered_although_the_service_rejects_every_question(
    machines: Machines, refused: list[str]
) -> None:
    machines.is_held = True
    run = start(2)
    for call in refused:
        machines.fail(call, "rejected", times=None)
    if "stop" in refused:
        with pytest.raises(BackendError, match="Fake: rejected"):
            attached().cancel()
        assert machines.living() == [(0, 0), (1, 0)]
    else:
        attached().cancel()
        assert machines.living() == [], "the cancel ends the jobs, although their states are unknown"
    assert [(entry.kind, entry.rank) for entry in DecisionLog(view_of(run).store, "otter").read()] == [("cancel", None)]
    assert all(view_of(run).newest_attempt(rank).has("cancel.json") for rank in range(2)), (
        "the cancel markers are written, and replicas read them"
    )
    machines.forgive()
    run.cancel()
    assert ends(run) == [("cancelled", "cancelled")] * 2


def test_the_command_cancels_all_ranks_that_it_is_given_although_the_service_rejects_every_question(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines.is_held = True
    run = start(3)
    for call in ("state", "verify"):
        machines.fail(call, "rejected", times=None)
    here = HereInstead(Folder(Path.cwd()), monkeypatch, capsys)
    told = here.replicas("cancel", "otter", "--rank", "0,2", "--backend", "support.fake_jobs:FakeExecutor")
    assert told.code == 2
    assert told.stderr.startswith("Error: Fake: rejected, as the test asked.")
    assert told.stdout.startswith("Cancelled ranks 0, 2 of otter in its store, which the replicas read.")
    assert [entry.rank for entry in DecisionLog(view_of(run).store, "otter").read()] == [0, 2]
    assert [view_of(run).newest_attempt(rank).has("cancel.json") for rank in range(3)] == [True, False, True]
    machines.forgive()
    run.cancel()


def test_a_request_to_cancel_asks_the_store_alone(machines: Machines) -> None:
    machines.is_held = True
    run = start(2)
    machines.calls.clear()
    manager_of(attached()).canceller.request()
    assert machines.calls == []
    assert all(view_of(run).newest_attempt(rank).has("cancel.json") for rank in range(2))
    run.cancel()


def test_a_replica_that_ended_just_before_it_was_cancelled_counts_as_cancelled(machines: Machines) -> None:
    run = start(function="hang", args={"deaf": True})
    wait_until_hanging(run)
    machines.end(machines.job_of(run, 0))
    FakeExecutor().cancel(run.handles[0])
    assert ends(run) == [("cancelled", "cancelled")]


def test_a_job_is_verified_once_in_each_process(machines: Machines) -> None:
    machines.is_held = True
    run = start()
    run.status()
    assert machines.count("verify") == 0, "the launcher does not verify its own job"
    other = attached()
    other.status()
    other.cancel()
    assert machines.count("verify") == 1
    assert ends(run) == [("cancelled", "cancelled")]


def test_one_answer_has_all_jobs_of_a_run_and_missing_jobs_are_requested_one_by_one(machines: Machines) -> None:
    machines.lists_jobs = True
    run = start(4, "hang", args={"deaf": True})
    wait_until_hanging(run)
    machines.calls.clear()
    other = attached()
    handles = [PendingReplica(handle, 0) for handle in other.handles]
    executor = FakeExecutor()
    assert executor.observe(handles) == [Observation()] * 4
    assert machines.calls == [("states", None)]
    machines.end(machines.job_of(run, 2), "preempted")
    eventually(lambda: executor.observe(handles)[2].outcome is not None)
    assert [rank for call, rank in machines.calls if call == "state"] == [2]
    assert ends_of(executor.observe(handles)) == [None, None, "preempted", None]
    run.cancel()


def ends_of(observations: list[Observation]) -> list[str | None]:
    return [None if each.outcome is None else each.outcome.reason for each in observations]


def test_the_reason_for_which_a_job_waits_is_reported(machines: Machines) -> None:
    for machines.lists_jobs in (False, True):
        machines.is_held = True
        run = launch(FakeExecutor(), "job.py:main", 1, run_id=f"otter-{int(machines.lists_jobs)}")
        (observed,) = FakeExecutor().observe([PendingReplica(view_of(run).reader.handles.of(0), 0)])
        assert observed == Observation(doing="scheduling")
        run.cancel()
