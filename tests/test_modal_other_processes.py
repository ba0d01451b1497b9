"""A run on Modal, seen by processes that did not launch it."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from cli_of_tests import Folder
from grpclib import Status
from modal_of_tests import create_of, of_backend
from sandboxes_of_tests import gpu
from servers.modal_server import ModalServer
from servers.s3_server import S3Server

from executors import ModalExecutor, attach, launch
from executors.errors import RunExistsError
from executors.testing import eventually
from executors.testing.executor_endings import task
from executors.testing.processes import environment

pytestmark = pytest.mark.slow

__all__ = ["gpu"]  # a fixture

DIES_BEFORE_THE_HANDLE = """
import os, signal, sys
from executors import ModalExecutor, launch

ask = ModalExecutor.start_job

def ask_and_die(self, job):
    ask(self, job)
    os.kill(os.getpid(), signal.SIGKILL)

ModalExecutor.start_job = ask_and_die
executor = ModalExecutor(app_name="of-the-dead")
launch(executor, "executors.testing.tasks:echo", 1, run_id="otter", gpu=sys.argv[1] or None)
"""

LOOKS = """
import json, sys
from executors import attach

run = attach(sys.argv[1])
print(json.dumps([[state.status for state in run.status().replicas], run.logs(rank=1)]))
run.cancel()
rows = run.executor.collect(run.handles)
print(json.dumps([[row["status"], row["result"]] for row in rows]))
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
def elsewhere(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python as on another machine: none of this one's runs is known there."""
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


def test_a_sandbox_whose_launcher_was_killed_before_it_left_the_handle_is_found_by_its_name(
    modal_runs: ModalServer, s3: S3Server, gpu: str | None
) -> None:
    done = subprocess.run([sys.executable, "-c", DIES_BEFORE_THE_HANDLE, gpu or ""], env=environment(), check=False)
    assert done.returncode == -signal.SIGKILL
    run = attach("otter", rendezvous=s3.url("runs"))
    assert not [entry for entry in run.store.list("otter/") if entry.key.endswith("/handle.json")]
    assert [result["rank"] for result in run.results()] == [0]
    assert [handle.metadata["job"]["sandbox_id"] for handle in run.handles] == [
        sandbox.sandbox_id for sandbox in modal_runs.sandboxes
    ]


def test_another_process_does_everything_with_nothing_but_the_url(
    modal_runs: ModalServer, gpu: str | None, elsewhere: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    run = launch(ModalExecutor(app_name="mine"), task("hang_on"), 2, args={"rank": 1}, gpu=gpu)
    eventually(lambda: run.status().replicas[0].status == "succeeded", "rank 0 is done")
    eventually(lambda: "hanging" in run.logs(rank=1), "rank 1 hangs")
    done = elsewhere("-c", LOOKS, run.url)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        [["succeeded", "running"], "hanging\n"],
        [["succeeded", "done"], ["cancelled", None]],
    ]
    assert [sandbox.result is not None for sandbox in modal_runs.sandboxes] == [True, True]


def test_what_failed_is_resumed_from_elsewhere_with_the_recorded_options(
    modal_runs: ModalServer, gpu: str | None, elsewhere: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    Path("train.py").write_text(SECOND_TIME_LUCKY)
    modal_runs.secrets["wandb"] = {"WANDB_KEY": "the key"}
    executor = ModalExecutor(app_name="mine", region="us-east", memory_mb=256)
    run = launch(executor, "train.py", 3, gpu=gpu, timeout=500, secrets=["wandb"])
    assert run.wait(60)
    assert [str(row.status) for row in run.outcomes()] == ["succeeded", "failed", "failed"]
    command = ["-m", "executors.cli", "resume", run.url]
    refused = elsewhere(*command)
    assert (refused.returncode, "only its store says what it is" in refused.stderr) == (2, True), refused.stderr
    command += ["--task-digest", str(run.task_digest)]
    refused = elsewhere(*command)
    assert (refused.returncode, "Name it again: --secret wandb" in refused.stderr) == (2, True), refused.stderr
    done = elsewhere(*command, "--secret", "wandb")
    assert done.returncode == 0, done.stderr
    assert attach(run.url).results() == [[0, 0], [1, 1], [2, 1]]
    first, *again = (call.request for call in modal_runs.calls_of(create_of(gpu)))
    assert len(again) == 4
    for request in again:
        asked, before = request.definition, first.definition
        assert request.app_id == first.app_id
        assert (asked.timeout_secs, asked.resources) == (before.timeout_secs, before.resources)
        assert asked.scheduler_placement == before.scheduler_placement
    names = [request.definition.name for request in again]
    assert sorted(name.rpartition("-r")[2] for name in names[-2:]) == ["0001-a1", "0002-a1"]


def test_one_run_id_launched_twice_at_once_is_one_set_of_replicas(modal_runs: ModalServer, gpu: str | None) -> None:
    barrier = threading.Barrier(2)

    def once(_: int) -> Any:
        barrier.wait()
        try:
            return launch("modal", task("echo"), 2, run_id="otter", gpu=gpu)
        except RunExistsError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        runs = sorted(pool.map(once, range(2)), key=lambda run: isinstance(run, RunExistsError))
    assert isinstance(runs[1], RunExistsError)
    assert [result["rank"] for result in runs[0].results()] == [0, 1]
    with pytest.raises(RunExistsError):
        launch("modal", task("echo"), 2, run_id="otter", gpu=gpu)
    assert len(modal_runs.sandboxes) == 2


@pytest.mark.parametrize("answered_before", [2, 0])
def test_a_launcher_whose_token_is_refused_while_it_watches_goes_on_or_says_that_the_run_does(
    modal_runs: ModalServer, gpu: str | None, answered_before: int, tmp_path: Path
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

    modal_runs.fail(of_backend("SandboxWait", gpu), Status.UNAUTHENTICATED, when=comes_late)
    options = ["--n", 1, "--backend", "modal", "--run-id", "otter", "--arg", f"path={gate}"]
    told = here.replicas("launch", "until.py", *options, *(["--gpu", gpu] if gpu else []))
    if answered_before:
        assert told.code == 0, told
        assert told.stdout.count("The backend does not work; trying on: Modal: ") == 1
    else:
        assert told.code == 1, told
        assert "goes on without this command (replicas wait otter): Modal: UNAUTHENTICATED" in told.stdout
        assert attach("otter").wait(60)


def test_a_launch_that_is_cancelled_elsewhere_before_it_has_its_machines_ends_as_cancelled(
    modal_runs: ModalServer, s3: S3Server
) -> None:
    modal_runs.capacity = 0

    def cancel() -> None:
        modal_runs.wait_for("SandboxGetTaskId")  # so it has been created, and waits
        attach("otter", rendezvous=s3.url("runs")).cancel()

    with ThreadPoolExecutor() as pool:
        cancelling = pool.submit(cancel)
        command = (
            "launch",
            "executors.testing.tasks:hang",
            "--n",
            "1",
            "--backend",
            "modal",
            "--gpu",
            "H100",
            "--run-id",
            "otter",
        )
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
