"""Real runs whose directory, disk or bucket fails for a while. The outage costs no replica, no restart and no
controller.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from servers.s3.server import running_server
from support.cli import Folder, HereInstead
from support.outages import away, stopped
from support.processes import is_alive
from support.runs import launcher, said

from diloco import DiLoCo
from diloco.testing import run_replicas
from executors import attach
from executors.errors import StoreError
from executors.protocol import ReplicaStatus
from executors.store import open_store
from executors.testing import eventually

FIVE_MINUTES_S = 300.0
SPEED = 200.0  # the factor of the clock by which replicas measure their waits


class QuickClock:
    """A clock that runs faster than the real one, so that an outage of minutes takes seconds."""

    def __call__(self) -> float:
        return time.monotonic() * SPEED


def test_a_directory_that_is_away_for_five_minutes_costs_no_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failing call is in a round, where a directory store itself makes no retries."""
    clock, results, is_under_way = QuickClock(), list[Any](), threading.Event()
    monkeypatch.setattr("diloco.outer.monotonic", clock)
    store = open_store(tmp_path / "runs")
    goes_on = threading.Event()

    def body(where: Mapping[str, Any]) -> list[float]:
        model = torch.nn.Linear(2, 1)
        with DiLoCo(model, inner_steps=2, total_steps=8, **where) as diloco:
            for step in diloco.steps():
                if step == 4:
                    is_under_way.set()
                    assert goes_on.wait(60)
                diloco.step()
            return [float(values.sum()) for values in diloco.anchor().values()]

    def train() -> None:
        results.append(run_replicas(2, body, store=store))

    thread = threading.Thread(target=train)
    thread.start()
    assert is_under_way.wait(60)
    with away(tmp_path / "runs"):
        goes_on.set()
        lost_at = clock()
        eventually(lambda: clock() > lost_at + FIVE_MINUTES_S, "five minutes by the clock of the replicas")
        assert thread.is_alive()
    thread.join(60)
    (anchors,) = results
    assert anchors[0] == anchors[1]


def test_commands_that_follow_a_run_report_that_its_directory_is_away_and_end_with_the_run(folder: Folder) -> None:
    place = folder.path / "runs"
    (folder.path / "waits.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def main():\n    print('begun', flush=True)\n    while not Path('go').exists():\n        time.sleep(0.05)\n"
    )
    options = ("--rendezvous", place)
    assert folder.launch("waits.py:main", "--run-id", "otter", "--detach", *options, n=1).code == 0
    with (
        folder.started("wait", "otter", *options) as waits,
        folder.started("logs", "-f", "otter", *options) as follows,
    ):
        follows.prints("begun")
        waits.prints("running")
        with away(place):
            waits.prints("Waiting for the rendezvous, ")
            follows.prints("waiting for the rendezvous, ")
        (folder.path / "go").touch()
        assert (waits.ends(), follows.ends()) == (0, 0)


@pytest.mark.parametrize("command", ["wait", "watch"])
def test_a_command_that_has_waited_too_long_for_a_store_does_not_blame_its_command_line(
    here: HereInstead, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    options = ("--restarts", 1, "--detach") if command == "watch" else ("--detach",)
    assert here.launch("job:hang", "--run-id", "otter", *options, n=1).code == 0

    def fail(*_: object, **__: object) -> None:
        raise StoreError("The store is away.")

    with monkeypatch.context() as patch:
        patch.setattr("executors.patience.SCALE", 0.0)
        patch.setattr("executors.view.run_state_reader.RunStateReader.look", fail)
        done = here.replicas(command, "otter")
    assert done.code == 1, done
    assert "The store is away." in done.stderr
    assert here.replicas("cancel", "otter").code == 0


def test_a_command_says_after_seconds_that_its_bucket_does_not_answer(folder: Folder, s3_credentials: None) -> None:
    with running_server() as server:
        url = server.url("runs")
        assert folder.launch("job:main", "--run-id", "otter", "--rendezvous", url, n=1).code == 0
        with stopped(server.pid), folder.started("status", "otter", "--rendezvous", url) as command:
            command.prints("waiting for s3://bucket/runs")


def test_a_run_whose_launcher_and_supervisor_are_gone_has_ended_at_the_first_look(tmp_path: Path) -> None:
    with launcher("restart_attached", str(tmp_path)) as process:
        launched = said(tmp_path / "launched")
        run = attach(launched["run_id"])
        eventually(lambda: "restarts in" in run.status().replicas[0].note, "a restart waits")
        supervisor = run.handles[0].metadata["supervisor_pid"]
        for pid in (supervisor, process.pid):
            os.kill(pid, signal.SIGKILL)
        process.wait(60)
        eventually(lambda: not is_alive(supervisor))
    run = attach(launched["run_id"])
    eventually(lambda: run.status().is_terminal, "the run has ended, because launcher and supervisor are gone")
    assert run.status().replicas[0].status is ReplicaStatus.FAILED
    assert run.status().replicas[0].note.startswith("the run ended with its launcher: replicas resume ")
    assert run.wait(timeout=0)
