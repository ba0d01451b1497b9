"""A replica starts with the values of its launch or addition, whichever process on whichever machine starts it."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.fake_jobs import Machines
from support.placements import (
    MAIN,
    AnyFakeExecutor,
    come,
    folder,
    is_kept,
    launched,
    local,
    others,
)

from executors import LocalProcessExecutor, attach
from executors.attempt import Attempt
from executors.errors import BackendError, LaunchError, UntrustedTaskError
from executors.registry import run_index
from executors.registry.run_index import Note, noted_at_launch, noted_options, remember, remember_added
from executors.replica import LEASE_S
from executors.restarts.decision_log import DecisionLog
from executors.run.resume import resume
from executors.run.run import manager_of, view_of
from executors.run.start_spec import start_specs_of, trusted_task
from executors.task.addition_record import Addition, take_ranks
from executors.testing import eventually

__all__ = ["folder", "others"]  # fixtures


def test_two_additions_at_once_are_both_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    where, names = "s3://bucket/runs", ["added:0", "added:1"]
    remember("otter", where, "0" * 64, {"a": 1}, ["token"])
    find_note, both_read = run_index._find_note, threading.Barrier(2)

    def slowly(run_id: str) -> Note | None:
        note = find_note(run_id)
        with contextlib.suppress(threading.BrokenBarrierError):  # one start at a time
            both_read.wait(0.2)
        return note

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(run_index, "locate", lambda run_id: where)
        patch.setattr(run_index, "_find_note", slowly)
        list(pool.map(lambda name: remember_added("otter", where, name, {"n": name}), names))
    assert [noted_options("otter", where, name) for name in names] == [{"n": name} for name in names]
    launched = noted_at_launch("otter", where)
    assert launched is not None
    assert (launched.task_digest, launched.executor_options, launched.secrets) == ("0" * 64, {"a": 1}, ("token",))


def test_the_launching_process_does_not_start_ranks_that_another_process_added(
    machines: Machines, folder: Path
) -> None:
    run = launched(folder, AnyFakeExecutor(), restarts="3,backoff=0s", timeout=500, env={"WORD": "launch"})
    there = attach("otter", executor=AnyFakeExecutor())
    assert there.add(AnyFakeExecutor(), 1, timeout=50, env={"WORD": "added", "MORE": "yes"}) == [1]
    come(folder, "1-0")
    machines.end(machines.job_of(there, 1), "preempted")
    machines.end(machines.job_of(run, 0), "preempted")
    waiting = is_kept(run)
    come(folder, "0-1")
    assert (folder / "0-1").read_text() == "launch -"
    assert [(job.job.key.rank, job.job.key.attempt) for job in machines.jobs] == [(0, 0), (1, 0), (0, 1)]
    also_waiting = is_kept(there)
    come(folder, "1-1")
    assert (folder / "1-1").read_text() == "added yes"
    limits = {job.job.key.rank: job.job.limit_s for job in machines.jobs[:2]}
    assert limits[0] != limits[1] == machines.jobs[-1].job.limit_s
    (folder / "go").touch()
    waiting.join()
    also_waiting.join()
    assert run.results() == [[0, 1], [1, 1]]


def test_an_addition_does_not_change_how_the_launchs_ranks_are_started(machines: Machines, folder: Path) -> None:
    def holders() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "replicas-lease"]

    before = {*holders()}
    run = launched(folder, AnyFakeExecutor(), restarts="3,backoff=0s", env={"WORD": "launch"})
    lease = bytes(view_of(run).store.get("otter/lease.json"))
    assert run.add(local(), 1, env={"WORD": "added", "MORE": "yes"}) == [1]
    assert run.add(AnyFakeExecutor(), 1, env={"WORD": "added"}) == [2]
    come(folder, "1-0", "2-0")
    waiting = is_kept(run)
    machines.end(machines.jobs[0], "preempted")
    come(folder, "0-1")
    assert (folder / "0-1").read_text() == "launch -"
    assert len({job.job.env[LEASE_S] for job in machines.jobs}) == 1
    assert bytes(view_of(run).store.get("otter/lease.json")) == lease, (
        "the lease has not changed: the launcher holds it"
    )
    (folder / "go").touch()
    waiting.join()
    assert run.results() == [[0, 1], [1, 0], [2, 0]]
    eventually(lambda: {*holders()} <= before, "no thread renews the lease of the run")


def test_each_rank_goes_by_the_executor_that_started_it_also_of_two_of_one_backend(
    machines: Machines, others: Machines, folder: Path
) -> None:
    run = launched(folder, AnyFakeExecutor(), detach=True)
    there = attach("otter", executor=AnyFakeExecutor())
    assert there.add(AnyFakeExecutor("other"), 1, detach=True) == [1]
    come(folder, "1-0")
    assert [str(each.status) for each in run.status().replicas] == ["running"] * 2
    run.cancel(1)
    assert (machines.living(), others.living()) == ([(0, 0)], [])
    again = resume(there, ranks=[1], detach=True)
    come(folder, "1-1")
    assert (machines.living(), others.living()) == ([(0, 0)], [(1, 1)])
    again.cancel(1)
    resume(again, ranks=[1], detach=True)
    come(folder, "1-2")
    assert (machines.living(), others.living()) == ([(0, 0)], [(1, 2)])
    (folder / "go").touch()
    assert run.results() == [[0, 0], [1, 2]]


def test_a_cancel_ends_every_job_that_it_can_before_it_reports_the_others(
    machines: Machines, folder: Path, state_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.store.parallel.MAX_THREADS", 1)
    run = launched(folder, AnyFakeExecutor(), detach=True)
    assert run.add(local(), 1, detach=True) == [1]
    come(folder, "1-0")
    machines.fail("verify", "rejected", times=None)
    handle = Attempt(view_of(run).store, "otter", 0).key("handle.json")
    view_of(run).store.put(handle, bytes(view_of(run).store.get(handle)).replace(b"job-0", b"job-9"))
    (state_home / "replicas" / "otter" / "jobs.jsonl").unlink()  # otherwise this machine would know the started job
    with pytest.raises(BackendError):
        attach("otter").cancel()
    assert str(run.status().replicas[1].status) == "cancelled"
    machines.forgive()


@pytest.mark.usefixtures("quick_tries")
def test_no_controller_continues_with_an_addition_that_failed(machines: Machines, folder: Path) -> None:
    run = launched(folder, local(), restarts="3,backoff=0s", detach=True)
    machines.fail("start", "rejected", times=None)
    with pytest.raises(LaunchError, match="Fake: rejected, as the test asked"):
        run.add(AnyFakeExecutor(), 1)
    machines.forgive()
    controller = attach("otter")
    manager_of(controller).restart_here(
        start_specs_of(view_of(controller), trusted_task(view_of(controller)), detach=True), None
    )
    manager_of(controller).advance(controller.status().replicas)
    log = DecisionLog(view_of(run).store, "otter").read()
    assert [(entry.kind, entry.rank) for entry in log] == [("cancel", 1)]
    (folder / "go").touch()
    assert run.wait(60)
    assert not machines.jobs


def test_a_cancel_after_a_resume_blocks_an_addition_that_is_under_way(
    folder: Path, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launched(folder, local(), detach=True)
    run.cancel()
    resume(run, detach=True)
    come(folder, "0-1")
    take = take_ranks

    def cancelled(*args: Any) -> Addition:
        manager_of(run).canceller.request()
        return take(*args)

    monkeypatch.setattr("executors.run.addition.take_ranks", cancelled)
    with pytest.raises(LaunchError, match="Run 'otter' was ended meanwhile: nothing is added to it"):
        run.add(AnyFakeExecutor(), 1)
    assert not machines.jobs


def test_later_attempts_of_an_added_rank_run_the_code_of_its_first_attempt(
    machines: Machines, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = launched(folder, local(), restarts="3,backoff=0s", rendezvous=str(tmp_path / "shared"))
    assert run.add(AnyFakeExecutor(), 1) == [1]
    come(folder, "1-0")
    Path("job.py").write_text(MAIN.replace("said =", "said = 'changed' +"))
    monkeypatch.chdir(folder)
    waiting = is_kept(run)
    machines.end(machines.jobs[0], "preempted")
    come(folder, "1-1")
    run.cancel()
    waiting.join()
    resume(attach("otter"), ranks=[1], detach=True)
    come(folder, "1-2")
    assert [(folder / name).read_text() for name in ("1-0", "1-1", "1-2")] == ["- -"] * 3
    assert len({entry.key.split("/")[1] for entry in view_of(run).store.list("otter/task-")}) == 1
    run.cancel()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    with pytest.raises(UntrustedTaskError, match=r"Rank 1 .* code of its own"):
        resume(attach(run.url), ranks=[1], task_digest=view_of(run).record.task_digest)
    resume(attach(run.url), ranks=[1], trust_bucket=True, detach=True)
    come(folder, "1-3")
    assert (folder / "1-3").read_text() == "- -"


def test_replicas_are_added_to_a_run_whose_executor_is_not_known_here(folder: Path) -> None:
    class Unregistered(LocalProcessExecutor):
        pass

    launched(folder, Unregistered(preload=(), term_grace_s=0.5), detach=True)
    assert attach("otter").add(local(), 1, detach=True) == [1]
    come(folder, "1-0")
    (folder / "go").touch()
