"""The seconds before a run has a record: the output of the launch, and of `status` during that time and afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from servers.s3.server import S3Server
from support.cli import COMMAND, FAST, Folder, HereInstead, Terminal

from executors import attach, launch, list_runs
from executors.cli import output as output_module
from executors.cli.output import Output
from executors.errors import NO_DIRECTORY, ReplicasError, RunNotFoundError
from executors.registry.run_index import FORGOTTEN_S, Preparation, find_preparation, preparing
from executors.store.url import address_of
from executors.testing import eventually
from executors.testing.helpers import environment

SLOW = """
import time
from pathlib import Path

while not Path("go").exists():
    time.sleep(0.01)

def main():
    return 1
"""
LAUNCH = ("launch", "slow_to_import.py", "--n", 1, *FAST)


@pytest.fixture
def slow(folder: Folder) -> Folder:
    """A folder with an entrypoint whose import ends when a file `go` exists."""
    (folder.path / "slow_to_import.py").write_text(SLOW)
    return folder


def test_status_knows_a_run_from_the_moment_its_id_is_chosen(slow: Folder, here: HereInstead) -> None:
    with slow.started(*LAUNCH, "--run-id", "mine") as command:
        eventually(lambda: find_preparation("mine"))
        result = here.replicas("status", "mine")
        assert result.code == 0
        assert re.fullmatch(r"Run 'mine' is being prepared: process \d+ has checked it for \d+ s\.\n", result.stdout)
        assert here.replicas("status", "mine", "--json").json["status"] == "preparing"
        with pytest.raises(RunNotFoundError, match="is being prepared"):
            attach("mine")
        assert list_runs() == [], "a launch that is being prepared is not listed as a run"
        (slow.path / "go").write_text("")
        assert command.ends() == 0
    assert here.replicas("status", "mine", "--json").json["status"] == "succeeded"
    assert find_preparation("mine") is None


def test_a_launch_that_this_machine_prepared_is_not_reported_as_a_run_of_another_store(
    here: HereInstead, s3: S3Server, tmp_path: Path
) -> None:
    assert here.launch("job:mian", "--run-id", "mine").code == 2
    for elsewhere in ((tmp_path / "mine",), (address_of(s3.url("runs"), "mine"),), ("mine", "--rendezvous", tmp_path)):
        result = here.replicas("status", *elsewhere)
        assert (result.code, result.stdout) == (2, ""), result
        assert result.stderr.startswith("Error: No run 'mine' at "), result
    assert "never started" in here.replicas("status", "mine/").stdout


def test_a_launch_that_came_to_nothing_reports_the_reason_and_is_not_listed(
    here: HereInstead, state_home: Path
) -> None:
    assert here.launch("job:mian", "--run-id", "mine").code == 2
    result = here.replicas("status", "mine")
    assert result.code == 0
    assert result.stdout.startswith("Run 'mine' was never started: Entrypoint 'job:mian': 'mian' does not exist in it.")
    assert here.replicas("status", "mine", "--json").json["status"] == "never started"
    assert "No runs." in here.replicas("ls").stdout
    folder = state_home / "replicas" / ".preparing"
    old = folder / "mine.json"
    os.utime(old, (old.stat().st_atime, old.stat().st_mtime - FORGOTTEN_S - 60))
    assert here.launch("job:main", "--run-id", "other").code == 0
    assert list(folder.iterdir()) == [], "the note is deleted after a day"
    assert here.replicas("status", "mine").code == 2


def test_a_launch_under_a_taken_id_leaves_no_record_after_that_run_was_removed(here: HereInstead) -> None:
    assert here.launch("job:main", "--run-id", "mine").code == 0
    assert "Run 'mine' exists" in here.launch("job:main", "--run-id", "mine").stderr
    assert here.replicas("rm", "mine").code == 0
    assert here.replicas("status", "mine").stderr.startswith("Error: No run 'mine' is known")


def test_a_launch_that_was_killed_meanwhile_was_never_started(slow: Folder, here: HereInstead) -> None:
    with slow.started(*LAUNCH, "--run-id", "mine") as command:
        eventually(lambda: find_preparation("mine"))
        command.interrupt(signal.SIGKILL)
        command.ends()
    assert re.match(r"Run 'mine' was never started: process \d+, which ", here.replicas("status", "mine").stdout)


def test_a_dry_run_notes_no_launch_in_preparation(here: HereInstead) -> None:
    assert here.launch("job:main", "--run-id", "mine", "--dry-run").code == 0
    assert find_preparation("mine") is None


def test_a_terminal_shows_the_id_and_the_seconds(slow: Folder) -> None:
    terminal = Terminal(slow, *LAUNCH)
    try:
        terminal.shows("Preparing ")
        terminal.shows(" … 1 s")
        (slow.path / "go").write_text("")
        assert terminal.ends() == 0
    finally:
        terminal.close()
    (run,) = list_runs()
    assert f"Preparing {run.run_id} … 1 s" in "\n".join(terminal.lines)


def test_elsewhere_one_line_comes_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with Output().busy("Preparing soon"):
        pass
    monkeypatch.setattr(output_module, "QUIET_S", 0.01)
    with Output().busy("Preparing late"):
        eventually(lambda: "Preparing late …\n" in capfd.readouterr().err)


def test_a_note_shows_the_progress_of_a_launch() -> None:
    with preparing("mine"):
        note = find_preparation("mine")
        assert note is not None
        assert note.is_going_on
    assert find_preparation("mine") is None
    assert Preparation(time.time(), os.getpid(), 1).describe("mine").endswith("was about to, has ended.")


UNWAITED = """
import sys
from executors import LocalProcessExecutor, launch
from support.tasks import hang, rank

run = launch(LocalProcessExecutor(preload=(), term_grace_s=0.5), hang, 1, run_id="mine", detach="detach" in sys.argv)
if "cancel" in sys.argv:
    run.cancel()
if "wait" in sys.argv:
    launch(LocalProcessExecutor(preload=()), rank, 1).wait()
    run.cancel()
"""


@pytest.mark.parametrize(("how", "is_told"), [("", True), ("cancel", False), ("wait", False), ("detach", False)])
def test_a_run_that_ends_with_its_script_reports_that(how: str, is_told: bool, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNWAITED)
    command = [sys.executable, str(tmp_path / "script.py"), how]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    told = "replicas: run mine ends with this process. Wait for it with run.wait(), or start it with launch(…, "
    assert done.stderr == (told + "detach=True).\n" if is_told else "")
    attach("mine").cancel()


DELETED = """
from executors import LocalProcessExecutor, attach, launch
from support.tasks import rank

run = launch(LocalProcessExecutor(preload=()), rank, 1)
run.status()
other = attach(run.run_id)
other.wait()
other.remove()
"""


def test_a_run_that_was_deleted_meanwhile_is_not_a_traceback_at_the_end_of_its_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(DELETED)
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    assert done.stderr == ""


@pytest.mark.parametrize("verb", [("launch", "job:main", "--n", "1"), ("ls",), ("status", "mine"), ("backends",)])
def test_a_deleted_working_directory_is_one_sentence(verb: tuple[str, ...], tmp_path: Path, state_home: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    line = f"cd {gone} && rmdir {gone} && exec {' '.join([*COMMAND, *verb])}"
    done = subprocess.run(["sh", "-c", line], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"Error: {NO_DIRECTORY}\n")
    assert not state_home.exists()


def test_launch_refuses_a_deleted_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ReplicasError, match="The working directory was deleted"):
        launch("local", "job:main", 1)
