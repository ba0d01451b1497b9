"""The command on a laptop that is not Linux: replicas in this process and local replicas.

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
from support.processes import is_alive

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))

REFUSED = (
    "Error: Backend 'local' needs the package psutil on macOS, and it is not installed. Install it with pip install "
    "psutil, or use another backend.\n"
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


FLAKY = """
from executors import current_replica

def main():
    me = current_replica()
    print(f"attempt {me.attempt} of rank {me.rank}", flush=True)
    if (me.rank, me.attempt) == (0, 0):
        raise RuntimeError("the first attempt fails")
"""
LEAVES = """
import os, subprocess, sys
from pathlib import Path
from executors import current_replica

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]

def main(folder):
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.write(writer, str(subprocess.Popen(SLEEP).pid).encode())
        os._exit(0)
    daemon = os.read(reader, 100).decode()
    if os.fork() == 0:
        os.write(writer, str(subprocess.Popen(SLEEP, env={}).pid).encode())
        os._exit(0)
    orphan = os.read(reader, 100).decode()
    Path(folder, f"left-{current_replica().rank}").write_text(f"{daemon} {orphan}")
"""


@pytest.fixture
def mac(tmp_path: Path) -> MacFolder:
    (tmp_path / "work").mkdir()
    return MacFolder(tmp_path / "work")


def test_local_replicas_are_new_processes_and_a_failed_one_is_started_again(mac: MacFolder) -> None:
    (mac.path / "flaky.py").write_text(FLAKY)
    told = mac.replicas(
        "launch", "flaky.py:main", "--n", 2, "--restarts", 1, "--run-id", "two", "--option", "preload=[]"
    )
    assert told.code == 0, told
    rows = mac.replicas("status", "two", "--json").json["replicas"]
    assert [(row["attempt"], row["status"]) for row in rows] == [(1, "succeeded"), (0, "succeeded")]
    assert "attempt 1 of rank 0" in mac.replicas("logs", "two", "--rank", 0).stdout


def test_what_a_replica_leaves_behind_ends_with_it(mac: MacFolder, tmp_path: Path) -> None:
    """A daemon has left its session and lost its parent, and an orphan has an empty environment."""
    (mac.path / "leaves.py").write_text(LEAVES)
    arguments = ("--n", 2, "--arg", f"folder={tmp_path}", "--option", "preload=[]")
    told = mac.replicas("launch", "leaves.py:main", *arguments)
    assert told.code == 0, told
    pids = [int(pid) for path in sorted(tmp_path.glob("left-*")) for pid in path.read_text().split()]
    assert len(pids) == 4
    assert [pid for pid in pids if is_alive(pid)] == []


def test_without_psutil_local_replicas_are_refused_with_one_sentence(
    mac: MacFolder, state_home: Path, tmp_path: Path
) -> None:
    """A client and the backend `inline` need no psutil."""
    told = mac.replicas("launch", "job.py:main", "--n", 2, environ={"AS_MAC_LACKS": "psutil"})
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
    assert "os.pidfd_open" in here, "without the emulation, the same question finds the names"
