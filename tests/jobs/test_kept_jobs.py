"""Controllers outside of containers restart ranks of a run at a service if their containers have ended."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from servers.hub.server import HubServer
from servers.s3.server import S3Server
from support import fake_jobs
from support.cli import Folder
from support.fake_jobs import FakeExecutor, FakeJob, Machines, attached, start

from executors import Run, attach
from executors.attempt import Attempt, Intent
from executors.backend import PendingReplica
from executors.backends.jobs.job_outcomes import CLOCKS_DIFFER_S
from executors.backends.jobs.service import LONGEST_PATIENCE_S, START_LIMIT_S, JobSpec
from executors.restarts.decision_log import Decision, DecisionLog
from executors.restarts.lease import LeaseHolder, release_lease
from executors.run.resume import resume
from executors.run.run import manager_of, view_of
from executors.run.start_spec import start_specs_of, trusted_task
from executors.settings.run_spec import LEASE_S
from executors.store.records import to_bytes
from executors.testing import eventually

MAIN = """
import os, time
from pathlib import Path
from executors import current_replica

def main(folder):
    replica = current_replica()
    replica.report(step=replica.attempt)
    Path(folder, f"{replica.rank}-{replica.attempt}").write_text(str(os.getpid()))
    while not Path(folder, "go").exists():
        time.sleep(0.02)
    return replica.attempt
"""


HANGS_ONCE = """
import os, signal
from executors import current_replica

def main():
    if current_replica().attempt == 0:
        print("hanging", flush=True)
        signal.pause()
    return os.environ["WORDS"]
"""


@pytest.fixture
def folder(machines: Machines, tmp_path: Path) -> Path:
    made = tmp_path / "said"
    made.mkdir()
    Path("job.py").write_text(MAIN)
    return made


def waits(folder: Path, n: int = 2, **more: Any) -> Run:
    """Launch replicas that wait until a file exists."""
    run = start(n, args={"folder": str(folder)}, **more)
    eventually(lambda: len(list(folder.iterdir())) == n, "all replicas wait")
    return run


@contextmanager
def waiting(run: Run) -> Iterator[None]:
    """Wait for a run in a thread, as its launcher does."""
    thread = threading.Thread(target=run.wait, args=(120,))
    thread.start()
    try:
        yield
    finally:
        thread.join()


@pytest.fixture
def _time_after_a_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_jobs, "TERM_GRACE_S", 20.0)
    add = Machines.add

    def add_hurried(self: Machines, job: JobSpec) -> FakeJob:
        return add(self, replace(job, env={**job.env, "REPLICA_NOTICE_S": "0.01"}))  # its replica ends at once

    monkeypatch.setattr(Machines, "add", add_hurried)


def log_of(run: Run) -> list[Decision]:
    return list(DecisionLog(view_of(run).store, run.run_id).read())


def lose_container(machines: Machines, job: FakeJob) -> None:
    """End a job and all its processes without any notice."""
    machines.end(job)


def preempt(machines: Machines, job: FakeJob) -> None:
    machines.end(job, "preempted")


def give_notice(machines: Machines, job: FakeJob) -> None:
    """Preempt a job. Its container gets a notice, and writes an outcome that has only the signal."""
    machines.end(job, "preempted", gently=True)


@pytest.mark.usefixtures("_time_after_a_notice")
@pytest.mark.parametrize(
    ("restarts", "end", "reason"),
    [("2", lose_container, "signal"), ("0", preempt, "preempted"), ("0", give_notice, "preempted")],
)
def test_the_launching_process_restarts_a_replica_that_lost_its_container(
    machines: Machines, folder: Path, restarts: str, end: Callable[[Machines, FakeJob], None], reason: str
) -> None:
    run = waits(folder, restarts=restarts)
    with waiting(run):
        end(machines, machines.job_of(run, 1))
        eventually((folder / "1-1").exists, "rank 1 is started again")
        (folder / "go").touch()
    assert run.results() == [0, 1]
    assert [(e.kind, e.start, e.how, e.reason) for e in log_of(run)] == [("restart", {1: 1}, "launch", reason)]
    assert len(machines.jobs) == 3
    assert Attempt(view_of(run).store, run.run_id, 1).outcome().notice == ("SIGTERM" if end is give_notice else None)  # type: ignore[union-attr]


@pytest.mark.usefixtures("_time_after_a_notice")
def test_the_first_reason_that_a_service_gives_for_an_end_is_final(machines: Machines, folder: Path) -> None:
    run = waits(folder, detach=True)
    for rank, reason in enumerate(("preempted", "cancelled")):
        machines.end(machines.job_of(run, rank), reason, gently=True)  # type: ignore[arg-type]
    words = [
        ("preempted", "Replica 0 of 2 (attempt 0) was preempted: Fake took its machine back."),
        ("signal", "Replica 1 of 2 was terminated by SIGTERM, sent by Fake or its administrators."),
    ]
    assert [(end.reason, end.error) for end in attached().outcomes()] == words
    assert [row["reason"] for row in view_of(run).executor.collect(run.handles)] == ["preempted", "signal"]
    first = machines.job_of(run, 0)
    machines.start_again(first)
    assert first.process is not None
    assert first.process.wait(60) == 0
    assert "attempt 0 of rank 0 has ended; it is not started again" in first.log.read_text()
    for job in machines.jobs:
        job.is_forgotten = True
    assert [(end.reason, end.error) for end in attached().outcomes()] == words


@pytest.mark.usefixtures("_time_after_a_notice")
def test_an_end_and_the_reason_of_its_job_that_come_in_one_look_are_reported_together(
    machines: Machines, folder: Path
) -> None:
    run = waits(folder, 1, detach=True)
    machines.end(machines.job_of(run, 0), "preempted", gently=True)
    (seen,) = FakeExecutor().observe([PendingReplica(run.handles[0], 0)])
    assert seen.outcome is not None
    assert seen.outcome.reason == "preempted"


@pytest.mark.usefixtures("_time_after_a_notice")
def test_a_service_that_has_forgotten_a_job_takes_nothing_back(machines: Machines, folder: Path) -> None:
    run = waits(folder, 1, restarts="0", detach=True)
    machines.end(machines.job_of(run, 0), "preempted", gently=True)
    machines.jobs[0].is_forgotten = True
    (outcome,) = attached().outcomes()
    assert (outcome.reason, outcome.notice) == ("signal", "SIGTERM")


@pytest.mark.usefixtures("_time_after_a_notice")
def test_a_replica_that_was_cancelled_at_the_service_stays_cancelled(machines: Machines, folder: Path) -> None:
    run = waits(folder, restarts="5")
    with waiting(run):
        machines.end(machines.job_of(run, 1), "cancelled", gently=True)
        eventually(lambda: attached().status().replicas[1].status.is_terminal, "rank 1 has ended")
        (folder / "go").touch()
    assert [str(outcome.status) for outcome in run.outcomes()] == ["succeeded", "failed"]
    assert [(e.kind, e.rank, e.words) for e in log_of(run)] == [("cancel", 1, "cancelled at the backend 'fake'")]
    assert len(machines.jobs) == 2


def test_a_detached_run_waits_for_the_process_that_keeps_it(machines: Machines, folder: Path) -> None:
    run = waits(folder, restarts="2", detach=True)
    lose_container(machines, machines.job_of(run, 0))
    assert not run.wait(2)
    assert log_of(run) == []
    controller = attached()
    manager_of(controller).restart_here(
        start_specs_of(view_of(controller), trusted_task(view_of(controller)), detach=True), None
    )
    with waiting(controller):
        eventually((folder / "0-1").exists, "rank 0 is started again")
        (folder / "go").touch()
    assert run.results() == [1, 0]


def test_a_handle_that_names_the_job_of_another_rank_keeps_no_other_from_its_restart(
    machines: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.run.external_controller.LEAVE_S", 2.0)  # its supervisor counts as one that lives
    run = waits(folder, 3, restarts="2", detach=True)
    for rank in (0, 1):
        lose_container(machines, machines.job_of(run, rank))
    eventually(
        lambda: run.status() and all(view_of(run).newest_attempt(rank).outcome() for rank in (0, 1)),
        "both ranks have an outcome",
    )
    key = Attempt(view_of(run).store, "otter", 1).key("handle.json")
    handle = json.loads(bytes(view_of(run).store.get(key)))
    handle["metadata"]["job"] = view_of(run).reader.handles.of(2).metadata["job"]
    view_of(run).store.put(key, to_bytes(handle))
    controller, told = attached(), list[str]()
    manager_of(controller).restart_here(
        start_specs_of(view_of(controller), trusted_task(view_of(controller)), detach=True), None, told.append
    )
    with waiting(controller):
        eventually(lambda: all((folder / name).exists() for name in ("0-1", "1-1")), "both ranks are started again")
        (folder / "go").touch()
    assert run.results() == [1, 1, 0]
    assert told == [], "the process decides about both ends without a warning"


def test_a_store_or_service_that_fails_for_a_while_is_reported_once_and_ends_no_wait(
    machines: Machines, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = waits(folder, 1, restarts="3,backoff=0s")
    machines.fail("start", "rejected", times=1)
    with waiting(run):
        lose_container(machines, machines.job_of(run, 0))
        eventually((folder / "0-2").exists, "rank 0 is started again", within_s=60)
        (folder / "go").touch()
    assert run.results() == [2]
    assert [(e.kind, e.start, e.reason) for e in log_of(run)] == [
        ("restart", {0: 1}, "signal"),
        ("restart", {0: 2}, "start_failed"),
    ]


def test_starts_that_the_service_refuses_for_a_while_use_up_no_restarts(
    machines: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("executors.run.launch_starter.AGAIN_S", 0.1)
    run = waits(folder, 1, restarts="1,backoff=0s")
    machines.fail("start", "rejected", times=3)
    with waiting(run):
        preempt(machines, machines.job_of(run, 0))
        eventually((folder / "0-4").exists, "rank 0 is started again")
        (folder / "go").touch()
    assert run.results() == [4]
    assert [(e.kind, e.charged, e.reason) for e in log_of(run)] == [
        ("restart", False, "preempted"),
        *[("restart", False, "start_failed")] * 3,
    ]
    assert log_of(run)[-1].words == "start_failed, Rank 0 could not be started: Fake: rejected, as the test asked."
    assert "trying again" not in capsys.readouterr().err, "the process that decides prints no line of its own"


def test_a_rank_that_ends_again_does_not_wait_for_one_that_is_still_being_started(
    machines: Machines, folder: Path
) -> None:
    run = waits(folder, restarts="0,backoff=0s")
    comes = machines.hold(1)
    for rank in range(2):
        preempt(machines, machines.job_of(run, rank))
    with waiting(run):
        eventually((folder / "0-1").exists, "rank 0 is started again")
        preempt(machines, machines.job_of(attached(), 0))
        eventually((folder / "0-2").exists, "rank 0 is started once more")
        assert not (folder / "1-1").exists()
        comes.set()
        (folder / "go").touch()
    assert run.results() == [2, 1]


def test_an_attached_run_has_a_lease_which_its_launcher_renews_and_a_second_watcher_takes_over(
    machines: Machines, folder: Path
) -> None:
    run = waits(folder, 1)
    key = f"{run.run_id}/lease.json"
    lease = json.loads(bytes(view_of(run).store.get(key)))
    assert not lease["detached"]
    assert machines.jobs[0].job.env["REPLICA_LEASE_S"] == "900.0"
    second = LeaseHolder(view_of(run).store, run.run_id, yields=True, renew_s=0.2)
    second.renew()
    assert json.loads(bytes(view_of(run).store.get(key))) == lease  # another process renews the lease
    second.start()
    taken = eventually(
        lambda: (found := json.loads(bytes(view_of(run).store.get(key)))) != lease and found,
        "another process has taken the lease over",
    )
    assert taken["holder"] not in ("", lease["holder"])
    second.release()
    assert json.loads(bytes(view_of(run).store.get(key)))["detached"]
    (folder / "go").touch()
    assert run.results() == [0]


def renewed_last(run: Run, *, by: str, age_s: float = 0.0) -> None:
    """Let the lease look as if its launcher has ended."""
    view_of(run).store.put(
        f"{run.run_id}/lease.json", to_bytes({"holder": "gone", "by": by, "at": time.time() - age_s})
    )


def pid_of_the_dead() -> int:
    ended = subprocess.Popen(["true"])
    ended.wait()
    return ended.pid


@pytest.mark.parametrize("where", ["this machine", "another machine"])
def test_a_run_whose_jobs_and_launcher_have_ended_says_at_the_first_look_how_to_continue(
    machines: Machines, folder: Path, where: str
) -> None:
    run = waits(folder, 1, restarts="2,backoff=0s")
    if where == "this machine":
        renewed_last(run, by=f"{socket.gethostname()}:{pid_of_the_dead()}")
    else:
        renewed_last(run, by="elsewhere:4711", age_s=LEASE_S + 1)
    preempt(machines, machines.job_of(run, 0))
    (seen,) = attached().status().replicas
    assert (seen.status, seen.note) == ("failed", "the run ended with its launcher: replicas resume otter")
    assert attached().wait(10), "collect and wait return, because no process makes the restart"


def test_a_run_whose_launcher_may_still_renew_the_lease_waits_for_the_restart(machines: Machines, folder: Path) -> None:
    run = waits(folder, 1, restarts="2,backoff=0s")
    preempt(machines, machines.job_of(run, 0))
    renewed_last(run, by="elsewhere:4711", age_s=LEASE_S / 2)
    assert attached().status().counts == "1 pending"
    LeaseHolder(view_of(run).store, run.run_id).release()
    renewed_last(run, by="elsewhere:4711", age_s=LEASE_S + 1)
    release_lease(view_of(run).store, run.run_id)
    assert attached().status().counts == "1 pending", (
        "a run without a launcher is pending, because another process may watch it"
    )


def test_a_process_that_leaves_a_run_does_not_wait_for_a_bucket_that_does_not_answer(
    machines: Machines, s3: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    machines.is_held = True
    run = start(1, rendezvous=s3.url("runs"))
    s3.misbehave(unavailable=1.0)
    LeaseHolder(view_of(run).store, run.run_id).release()
    assert "run otter may end 15 min from now unless a process watches it" in caplog.text
    assert len(s3.requests("GET", "lease.json")) == 1, "tried once"
    s3.misbehave()
    run.cancel()


def test_a_detached_resume_lets_an_attached_run_go_and_its_own_lease_once_it_has_started_all(
    machines: Machines, folder: Path
) -> None:
    run = waits(folder, 1)
    run.cancel()
    Path(folder, "go").touch()
    assert resume(run, detach=True).results() == [1]
    assert json.loads(bytes(view_of(run).store.get(f"{run.run_id}/lease.json")))["detached"]
    name = machines.jobs[1].job.env["REPLICA_LEASE_NAME"]
    assert name.startswith("starts/"), "the detached resume has its own lease until the last handle is written"
    assert json.loads(bytes(view_of(run).store.get(f"{run.run_id}/{name}")))["detached"], (
        "the lease is released, so no process must renew it"
    )


def test_a_lease_does_not_bring_a_deleted_run_back(machines: Machines, folder: Path) -> None:
    run = waits(folder, 1)
    holder = LeaseHolder(view_of(run).store, run.run_id)
    run.cancel()
    run.remove()
    holder.renew()
    assert list(view_of(run).store.list(f"{run.run_id}/")) == []


def test_a_stop_cancels_replicas_that_do_not_end_in_time_and_a_resume_continues(
    machines: Machines, folder: Path
) -> None:
    run = waits(folder, 1, restarts="2")
    run.stop(within_s=1)
    assert [(str(o.status), o.error) for o in run.outcomes()] == [
        ("cancelled", "Replica 0 was ended: stopped by the user.")
    ]
    assert [(e.kind, e.why, e.within_s) for e in log_of(run)] == [("stop", "asked", 1)]
    assert machines.living() == []
    (folder / "go").touch()
    assert resume(run).results() == [1]


def test_a_closed_laptop_another_machine_brings_a_run_back_with_its_url_alone(hf: HubServer, tmp_path: Path) -> None:
    """The launcher is gone, and a container is lost. A machine that knows only the run's url makes a pass."""
    here = Folder(Path.cwd())
    where = ("--backend", "hf", "--run-id", "otter", "--detach", "--env", "WORDS=secret")
    Path("job.py").write_text(HANGS_ONCE)
    launched = here.replicas("launch", "job.py", "--n", 1, *where, "--restarts", 1)
    assert launched.code == 0, launched
    run = attach("otter")
    eventually(lambda: "hanging" in run.logs(rank=0), "the replica hangs")
    hf.kill(view_of(run).reader.handles.of(0).metadata["job"]["id"])
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "elsewhere"), "REPLICAS_RENDEZVOUS": ""}
    missing = here.replicas("watch", run.url, "--once", environ=elsewhere)
    assert (missing.code, "--task-digest" in missing.stderr) == (2, True), missing
    vouched = ("watch", run.url, "--once", "--task-digest", str(view_of(run).task_digest))
    missing = here.replicas(*vouched, environ=elsewhere)
    assert (missing.code, "--env WORDS=" in missing.stderr) == (2, True), missing
    assert log_of(run) == []
    kept = here.replicas(*vouched, "--env", "WORDS=secret", environ=elsewhere)
    assert kept.code == 0, kept
    assert "restarting rank 0 as attempt 1 (1 of 1): signal" in kept.stdout, kept
    assert run.results() == ["secret"]


# A request that hangs is left to its thread, with its connection.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_an_exit_does_not_wait_for_a_bucket_that_does_not_answer(
    machines: Machines, s3: S3Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    exits: list[Callable[[], None]] = []
    monkeypatch.setattr("atexit.register", exits.append)
    machines.is_held = True
    run = start(1, rendezvous=s3.url("runs"))
    s3.misbehave(unavailable=1.0)
    for told in exits:
        told()
    assert "run otter may still run, and its store does not answer. End it: replicas cancel" in capfd.readouterr().err
    assert len([row for row in s3.requests("HEAD", "run.json") if row["fault"]]) == 1, "tried once"
    s3.misbehave()
    run.cancel()


def test_a_start_whose_controller_died_before_the_service_heard_of_it_is_given_up_in_minutes(
    machines: Machines, folder: Path
) -> None:
    run = waits(folder, 1, restarts="2,backoff=0s", detach=True)
    lose_container(machines, machines.job_of(run, 0))
    next_one = Attempt(view_of(run).store, run.run_id, 0, 1)
    begun_at = time.time() - START_LIMIT_S - CLOCKS_DIFFER_S - 60
    begun = {"nonce": "n", "by": "a laptop", "at": begun_at, "takes_s": START_LIMIT_S}
    view_of(run).store.put(next_one.key("intent.json"), to_bytes(begun))
    controller = attached()
    manager_of(controller).restart_here(
        start_specs_of(view_of(controller), trusted_task(view_of(controller)), detach=True), None
    )
    with waiting(controller):
        eventually((folder / "0-2").exists, "rank 0 is started again", within_s=60)
        (folder / "go").touch()
    assert "Did a laptop die?" in str(next_one.outcome())
    intent = next_one.at(2).find("intent.json", Intent.parse)
    assert intent is not None
    assert intent.takes_s == START_LIMIT_S + LONGEST_PATIENCE_S + 1, (
        "the intent allows for the pauses that the service asks for"
    )
