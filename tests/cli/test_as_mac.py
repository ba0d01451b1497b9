"""The command on a laptop that is not Linux: it runs in this process, and refuses the backend `local`.

`support.as_mac` describes the emulation of macOS. `tests/jobs/test_as_mac_on_clouds.py` has the clouds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.as_mac import MacFolder, as_mac, environment_as_mac, why_not
from support.as_mac.sitecustomize import HIDDEN

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

REFUSED = (
    "Error: Backend 'local' needs Linux, and this machine runs macOS. Use the backend inline for one replica in this "
    "process, or a cloud backend such as modal or hf for several.\n"
)
PROCESSES = """
import os, subprocess, sys
from executors import process

child = subprocess.Popen(["sleep", "600"])
started = process.start_time(child.pid)
assert sys.platform == "darwin" and not os.path.exists("/proc/self")
assert process.is_alive(child.pid, started) and not process.is_alive(child.pid, started - 5)
assert process.descendants(os.getpid()) == [child.pid]
assert process.kill_descendants(os.getpid()) == []
assert child.wait() == -9 and not process.is_alive(child.pid, started)
assert process.usable_cores() >= 1 and process.memory_in_use() > 0
assert len(process.this_machine().split(" ")) == 3 and "unknown" not in process.this_machine()
"""


@pytest.fixture
def mac(tmp_path: Path) -> MacFolder:
    (tmp_path / "work").mkdir()
    return MacFolder(tmp_path / "work")


def test_one_replica_in_this_process_runs_and_several_are_refused_with_one_sentence(
    mac: MacFolder, state_home: Path
) -> None:
    for n in (2, 1):
        told = mac.replicas("launch", "job.py:main", "--n", n)
        assert (told.code, told.stdout, told.stderr) == (2, "", REFUSED)
    assert [path for path in state_home.rglob("*") if path.is_file() and path.parent.name != ".preparing"] == []
    told = mac.replicas("launch", "job.py:report_more", "--backend", "inline", "--n", 1, "--run-id", "mine")
    assert told.code == 0, told
    assert mac.replicas("status", "mine", "--json").json["status"] == "succeeded"


def test_processes_are_found_compared_and_ended_without_proc(mac: MacFolder) -> None:
    mac.python(PROCESSES)


def test_another_process_sees_that_an_inline_run_lives_and_that_it_was_killed(mac: MacFolder) -> None:
    with mac.started("launch", "job.py:hang", "--backend", "inline", "--n", 1, "--run-id", "mine") as command:
        command.prints("hanging")
        assert mac.replicas("status", "mine", "--json").json["status"] == "running"
        command.interrupt(signal.SIGKILL)
        command.ends()
    status = mac.replicas("status", "mine", "--json").json
    assert status["status"] == "failed"
    assert "its process is gone" in status["replicas"][0]["note"]


def test_names_that_the_emulation_hides_exist_on_linux_and_not_in_it(tmp_path: Path) -> None:
    hidden = [f"{module}.{name}" for module, reasons in HIDDEN.items() for name in " ".join(reasons).split()]
    there = "import sys; print(*(n for n in sys.argv[1:] if hasattr(__import__(n.split('.')[0]), n.split('.')[1])))"
    command = [sys.executable, "-c", there, *hidden]
    environ = environment_as_mac(os.environ, tmp_path / "proc")
    here = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    acted = subprocess.run(as_mac(command), env=environ, capture_output=True, text=True, check=True).stdout.split()
    assert acted == []
    assert "os.pidfd_open" in here, "the same question finds them if nothing is hidden"
