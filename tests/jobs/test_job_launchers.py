"""Tests launchers of jobs as separate processes: killed, interrupted, two at the same time, on other machines."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from grpclib import Status
from servers.hub.faults import Request
from servers.hub.server import HubServer
from servers.modal.server import ModalServer
from servers.s3.server import S3Server
from support.cli import Folder
from support.modal import create_of
from support.resumers import resume_at_once, resumers
from support.sandboxes import gpu

from executors import HFJobsExecutor, ModalExecutor, attach, launch
from executors.run.run import view_of
from executors.testing import eventually
from executors.testing.helpers import environment

pytestmark = pytest.mark.slow

__all__ = ["gpu"]  # a fixture

CPU = "cpu-basic"
ROUNDS = 5


DIES_BEFORE_THE_HANDLE = """
import os, signal, sys
from executors import ModalExecutor, launch
from executors.backends.modal import ModalJobs

ask = ModalJobs.start

def ask_and_die(self, job):
    ask(self, job)
    os.kill(os.getpid(), signal.SIGKILL)

ModalJobs.start = ask_and_die
executor = ModalExecutor(app_name="of-the-dead")
launch(executor, "executors.testing.tasks:echo", 1, run_id="otter", gpu=sys.argv[1] or None)
"""


SECOND_TIME_LUCKY = """
from executors import current_replica

def main():
    me = current_replica()
    if me.rank and not me.attempt:
        raise RuntimeError("not yet")
    return [me.rank, me.attempt]
"""


UNTIL = """
import os, time

def main(path):
    while not os.path.exists(path):
        time.sleep(0.05)
"""


@pytest.fixture
def folder(hf: HubServer) -> Folder:
    return Folder(Path.cwd())


def living(hub: HubServer) -> list[tuple[str, str]]:
    """Return rank and attempt of the jobs that run or wait."""
    labels = [job.labels for job in hub.jobs.newest_first() if not job.is_over]
    return sorted((label["replicas-rank"], label["replicas-attempt"]) for label in labels)


def is_of_rank_1(request: Request) -> bool:
    return bool(request.json["labels"]["replicas-rank"] == "1")


def detached(n: int) -> list[Any]:
    return ["launch", "job.py:main", "--backend", "hf", "--n", n, "--run-id", "otter", "--detach"]


# Killed


def test_a_job_whose_launcher_was_killed_before_the_answer_is_found_by_its_labels(
    hf: HubServer, folder: Folder
) -> None:
    hf.hold(CPU)
    hf.fail("create", "silent", after_applying=True, when=is_of_rank_1)
    with folder.started(*detached(2)) as launcher:
        eventually(lambda: living(hf) == [("0", "0"), ("1", "0")])
        launcher.interrupt(signal.SIGKILL)
        launcher.ends()
    hf.forgive()
    run = attach("otter")
    ids = [handle.metadata["job"]["id"] for handle in run.handles]
    assert [hf.job(job_id).labels["replicas-rank"] for job_id in ids] == ["0", "1"]
    assert run.status().counts == "2 pending"
    hf.release(CPU)
    assert run.results() == [{"rank": 0}, {"rank": 1}]
    assert hf.count("create") == 2


def test_a_launcher_killed_before_the_service_heard_of_a_rank_leaves_a_run_that_can_be_ended_and_resumed(
    hf: HubServer, folder: Folder
) -> None:
    hf.hold(CPU)
    hf.fail("create", "silent", when=is_of_rank_1)
    with folder.started(*detached(2)) as launcher:
        eventually(lambda: hf.count("create") == 2 and living(hf) == [("0", "0")])
        launcher.interrupt(signal.SIGKILL)
        launcher.ends()
    hf.forgive()
    assert "2 pending" in folder.replicas("status", "otter").stdout
    told = folder.replicas("cancel", "otter")
    assert told.code == 0, told
    assert [(outcome.status, outcome.reason) for outcome in attach("otter").outcomes()] == [
        ("cancelled", "cancelled")
    ] * 2
    assert living(hf) == []
    hf.release(CPU)
    resumed = folder.replicas("resume", "otter", "--json")
    assert resumed.code == 0, resumed
    assert [outcome.attempt for outcome in attach("otter").outcomes()] == [1, 1]


def test_a_sandbox_whose_launcher_was_killed_before_it_left_the_handle_is_found_by_its_name(
    modal_runs: ModalServer, s3: S3Server, gpu: str | None
) -> None:
    done = subprocess.run([sys.executable, "-c", DIES_BEFORE_THE_HANDLE, gpu or ""], env=environment(), check=False)
    assert done.returncode == -signal.SIGKILL
    run = attach("otter", rendezvous=s3.url("runs"))
    assert not [entry for entry in view_of(run).store.list("otter/") if entry.key.endswith("/handle.json")]
    assert [result["rank"] for result in run.results()] == [0]
    assert [handle.metadata["job"]["sandbox_id"] for handle in run.handles] == [
        sandbox.sandbox_id for sandbox in modal_runs.sandboxes
    ]


# Interrupted


def test_an_interrupt_in_the_middle_of_a_launch_ends_the_started_jobs(hf: HubServer, folder: Folder) -> None:
    hf.hold(CPU)
    hf.fail("create", "silent", after_applying=True, when=is_of_rank_1)
    with folder.started(*detached(4)) as launcher:
        eventually(lambda: len(living(hf)) == 4)
        launcher.interrupt()
        eventually(lambda: living(hf) == [])
        hf.forgive()
        assert launcher.ends() == 130, launcher.output
    assert living(hf) == []
    assert {outcome.status for outcome in attach("otter").outcomes()} == {"cancelled"}
    assert hf.count("create") == 4


def test_a_launch_that_is_cancelled_elsewhere_before_it_has_its_machines_ends_as_cancelled(
    modal_runs: ModalServer, s3: S3Server
) -> None:
    modal_runs.capacity = 0

    def cancel() -> None:
        modal_runs.wait_for("SandboxGetTaskId")  # so the job was created, and waits
        attach("otter", rendezvous=s3.url("runs")).cancel()

    with ThreadPoolExecutor() as pool:
        cancelling = pool.submit(cancel)
        entrypoint, where = "executors.testing.tasks:hang", ("--backend", "modal", "--gpu", "H100")
        command = ("launch", entrypoint, "--n", "1", *where, "--run-id", "otter")
        done = subprocess.run(
            [sys.executable, "-m", "executors.cli", *command],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        cancelling.result()
    assert (done.returncode, done.stdout) == (130, "")
    assert "it was cancelled while it was being started" in done.stderr


@pytest.mark.parametrize("answered_before", [2, 0])
def test_a_launcher_whose_token_is_refused_while_it_watches_continues_or_reports_that_the_run_does(
    modal_runs: ModalServer, answered_before: int, tmp_path: Path
) -> None:
    here = Folder(Path.cwd())
    (here.path / "until.py").write_text(UNTIL)
    calls = itertools.count()
    gate = tmp_path / "gate"

    def comes_late(request: Any) -> bool:
        if next(calls) < answered_before:
            return False
        gate.touch()  # only now may the replica end
        return True

    modal_runs.fail("SandboxListV2", Status.UNAUTHENTICATED, when=comes_late)
    options = ["--n", 1, "--backend", "modal", "--run-id", "otter", "--arg", f"path={gate}"]
    told = here.replicas("launch", "until.py", *options)
    if answered_before:
        assert told.code == 0, told
    else:
        assert told.code == 1, told
        assert "cannot be read any more: Modal: UNAUTHENTICATED" in told.stdout
        assert "The run continues for 15 min. To keep it longer, watch it: replicas watch otter" in told.stdout
        assert attach("otter").wait(60)


# --- two launchers at the same time


def test_one_run_launched_twice_at_the_same_time_is_started_once(hf: HubServer, folder: Folder) -> None:
    hf.hold(CPU)
    with ExitStack() as stack:
        launchers = [stack.enter_context(folder.started(*detached(2))) for _ in range(2)]
        assert sorted(launcher.ends() for launcher in launchers) == [0, 2]
        assert sum("Run 'otter' exists" in launcher.output for launcher in launchers) == 1
    assert living(hf) == [("0", "0"), ("1", "0")]
    assert hf.count("create") == 2
    third = folder.replicas(*detached(2))
    assert (third.code, hf.count("create")) == (2, 2)
    attach("otter").cancel()


def test_ranks_that_two_processes_resume_at_once_have_one_job_more(hf: HubServer) -> None:
    hf.hold(CPU)
    told: list[list[str]] = []
    with resumers(2) as started:
        for _ in range(ROUNDS):
            run = launch("hf", "job.py:main", 3)
            run.cancel()
            told.append(resume_at_once(started, run))
            assert living(hf) == [(str(rank), "1") for rank in range(3)], told[-1]
            assert [state.status for state in attach(run.url).status().replicas] == ["pending"] * 3
            run.cancel()
    assert hf.count("create") == 2 * 3 * ROUNDS
    assert all("resumed" in said for said in told)
    assert any("AlreadyResumedError" in line for said in told for line in said), (
        "the two resumes did not run at the same time, so nothing was tested"
    )


# --- a launcher on another machine


def test_another_machine_follows_cancels_and_collects_with_the_url_alone(
    hf: HubServer, folder: Folder, tmp_path: Path
) -> None:
    run = launch("hf", "job.py:hang", 2, args={"ranks": [1]})
    eventually(lambda: "hanging" in run.logs(rank=1))
    elsewhere = {"XDG_STATE_HOME": str(tmp_path / "elsewhere"), "REPLICAS_RENDEZVOUS": ""}
    eventually(lambda: run.status().counts == "1 running, 1 succeeded")
    status = folder.replicas("status", run.url, "--json", environ=elsewhere).json
    assert [row["status"] for row in status["replicas"]] == ["succeeded", "running"]
    assert folder.replicas("logs", run.url, environ=elsewhere).stdout == "[1] hanging\n"
    assert folder.replicas("cancel", run.url, "--rank", 1, environ=elsewhere).code == 0
    collected = folder.replicas("collect", run.url, "--json", environ=elsewhere)
    assert [row["status"] for row in collected.json["replicas"]] == ["succeeded", "cancelled"], collected


def test_a_run_is_resumed_as_it_was_launched(hf: HubServer, folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALWAYS", "a secret")
    monkeypatch.setenv("ONCE", "another")
    options: dict[str, Any] = {"flavor": "cpu-upgrade", "labels": {"team": "ml"}, "image": "python:3.11-slim"}
    executor = HFJobsExecutor(secrets=["ALWAYS"], **options)
    run = launch(executor, "job.py:fail", 2, args={"ranks": [1]}, secrets=["ONCE"], timeout=500, run_id="otter")
    assert run.wait(60)
    (folder.path / "job.py").write_text("raise ImportError('what was launched is run again, not this')")
    resumed = folder.replicas("resume", "otter", "--json")
    assert resumed.code == 1, resumed
    assert [(outcome.attempt, outcome.reason) for outcome in attach("otter").outcomes()] == [
        (0, None),
        (1, "exception"),
    ]
    second, *first = hf.jobs.newest_first()
    assert [job.labels["replicas-rank"] for job in (second, *first)].count("1") == 2
    one = next(job for job in first if job.labels["replicas-rank"] == "1")
    changing = {"labels", "environment"}
    assert {k: v for k, v in second.spec.items() if k not in changing} == {
        k: v for k, v in one.spec.items() if k not in changing
    }
    assert second.spec["secrets"].items() >= {"ALWAYS": "a secret", "ONCE": "another"}.items()
    assert second.labels == {**one.labels, "replicas-attempt": "1", "name": one.labels["name"].replace("-a0", "-a1")}
    again = launch(
        executor,
        "job.py:fail",
        2,
        run_id="otter",
        rendezvous=view_of(run).store.url,
        timeout=500,
        secrets=["ONCE"],
        resume=True,
    )
    assert again.wait(60)
    assert [outcome.attempt for outcome in again.outcomes()] == [0, 2]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python as on another machine, which does not know the runs of this machine."""
    (tmp_path / "elsewhere").mkdir()

    def python(*arguments: str) -> subprocess.CompletedProcess[str]:
        surroundings = environment(XDG_STATE_HOME=str(tmp_path / "elsewhere"))
        surroundings.pop("REPLICAS_RENDEZVOUS")
        return subprocess.run(
            [sys.executable, "-P", *arguments],
            env=surroundings,
            cwd=tmp_path / "elsewhere",
            capture_output=True,
            text=True,
            check=False,
        )

    return python


def test_failed_ranks_are_resumed_from_another_machine_with_the_recorded_options(
    modal_runs: ModalServer, elsewhere: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    Path("train.py").write_text(SECOND_TIME_LUCKY)
    modal_runs.secrets["wandb"] = {"WANDB_KEY": "the key"}
    executor = ModalExecutor(app_name="mine", region="us-east", memory_mb=256)
    run = launch(executor, "train.py", 3, timeout=500, secrets=["wandb"])
    assert run.wait(60)
    assert [str(row.status) for row in run.outcomes()] == ["succeeded", "failed", "failed"]
    command = ["-m", "executors.cli", "resume", run.url]
    refused = elsewhere(*command)
    assert (refused.returncode, "its task is not proven" in refused.stderr) == (2, True), refused.stderr
    command += ["--task-digest", str(view_of(run).task_digest)]
    refused = elsewhere(*command)
    assert (refused.returncode, "Name it again: --secret wandb" in refused.stderr) == (2, True), refused.stderr
    done = elsewhere(*command, "--secret", "wandb")
    assert done.returncode == 0, done.stderr
    assert attach(run.url).results() == [[0, 0], [1, 1], [2, 1]]
    first, *again = (call.request for call in modal_runs.calls_of(create_of(None)))
    assert len(again) == 4
    for request in again:
        asked, before = request.definition, first.definition
        assert request.app_id == first.app_id
        assert (asked.timeout_secs, asked.resources) == (before.timeout_secs, before.resources)
        assert asked.scheduler_placement == before.scheduler_placement
    names = [request.definition.name for request in again]
    assert sorted(name.rpartition("-r")[2] for name in names[-2:]) == ["0001-a1", "0002-a1"]
