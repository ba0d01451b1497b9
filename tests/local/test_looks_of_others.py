"""A user who reads another user's run changes nothing, and sees everything that is readable."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.processes import is_alive

from executors import LocalProcessExecutor, Run, attach, launch
from executors.attempt import Claim
from executors.process import start_time
from executors.run.run import view_of
from executors.testing import eventually
from executors.testing.executor_contract import task
from executors.testing.helpers import environment

NOBODY = 65534
SEES = """
import os, sys
from executors.process import is_alive
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print([is_alive(int(pid), int(started)) for pid, started in (each.split(":") for each in sys.argv[1:])])
"""


@pytest.fixture
def run(local: LocalProcessExecutor, tmp_path: Path) -> Iterator[Run]:
    """A running replica in a rendezvous that every user may read."""
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs").chmod(0o775)  # otherwise only its user may read a run's folder
    with launch(local, task("hang"), 1, rendezvous=tmp_path / "runs") as run:
        eventually(lambda: "hanging" in run.logs(rank=0))
        yield run


def status(run: Run) -> tuple[str, str]:
    (replica,) = attach(run.url).status().replicas
    return replica.status, replica.note


@contextmanager
def somebody_else(home: Path) -> Iterator[None]:
    home.mkdir()
    home.chmod(0o777)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(home))
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)


def test_a_look_from_another_machine_of_the_same_name_leaves_a_run_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_the_same_name = f"{socket.gethostname()} 11111111-2222-3333-4444-555555555555 pid:[1]"
    monkeypatch.setattr("executors.backends.local.executor.this_machine", lambda: of_the_same_name)
    with monkeypatch.context() as there:
        there.setenv("XDG_STATE_HOME", str(tmp_path / "another-machine"))
        assert status(run) == ("running", "")
    assert "its supervisor is gone" in status(run)[1], "the launching machine was restarted, so the supervisor is gone"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount /proc and start a process of another user")
@pytest.mark.parametrize("hidepid", [1, 2])
def test_a_process_that_is_not_shown_the_processes_of_others_takes_none_of_them_for_ended(hidepid: int) -> None:
    ended = subprocess.Popen(["true"])
    started = start_time(ended.pid) or 0
    ended.wait()
    asked = [f"{os.getpid()}:{start_time(os.getpid())}", f"{ended.pid}:{started}"]
    mount = f'mount -t proc -o hidepid={hidepid} proc /proc && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", SEES, *asked]
    told = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    if "mount" in told.stderr:
        pytest.skip(f"/proc cannot be mounted here: {told.stderr}")
    assert told.stdout.strip() == "[True, False]", told.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_a_lost_run_is_shown_to_the_process_that_may_only_read_it(run: Run, tmp_path: Path) -> None:
    (handle,) = run.handles
    claim = view_of(run).newest_attempt(0).find("started.json", Claim.parse)
    assert claim is not None
    assert claim.pid is not None
    for pid in (handle.metadata["supervisor_pid"], claim.pid):
        os.kill(pid, signal.SIGKILL)
        eventually(lambda pid=pid: not is_alive(pid))  # type: ignore[misc]
    with somebody_else(tmp_path / "home"):
        for _ in range(2):
            state, note = status(run)
            assert state == "failed"
            assert "was lost: its supervisor is gone" in note
        assert "was lost" in attach(run.url).logs(rank=0)
        assert [end.reason for end in attach(run.url).outcomes()] == ["lost"]
        assert not view_of(run).newest_attempt(0).has("outcome.json")
    status(run)
    assert view_of(run).newest_attempt(0).has("outcome.json"), "a process that may write records the outcome"
