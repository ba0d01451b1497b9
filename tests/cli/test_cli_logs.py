"""`replicas logs`: earlier attempts, progress bars, and where a log is read when it is not this machine's."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import HereInstead

from executors import LocalProcessExecutor, Run, attach, launch
from executors.resume import resume

BARS = """
import sys
from executors import current_replica

def bar():
    for percent in range(0, 101, 10):
        print(f"\\r{percent} %", end="")
    print()
    print("[0] \\rover\\r\\n", end="")

def fail_once():
    print("attempt", current_replica().attempt, "of rank", current_replica().rank, flush=True)
    if current_replica().rank == 1 and current_replica().attempt == 0:
        raise RuntimeError("not yet")
"""


@pytest.fixture
def bars(here: HereInstead) -> HereInstead:
    (here.folder.path / "bars.py").write_text(BARS)
    return here


def resumed(local: LocalProcessExecutor) -> Run:
    """A run of two ranks, of which rank 1 was begun twice."""
    run = launch(local, "bars:fail_once", 2, run_id="mine")
    assert run.wait(60)
    run = resume(run)
    assert run.wait(60)
    return run


def test_earlier_attempts_are_shown_by_number_or_all_with_a_line_before_each(
    bars: HereInstead, local: LocalProcessExecutor
) -> None:
    resumed(local)
    cases: dict[tuple[object, ...], str] = {
        (): "[0] attempt 0 of rank 0\n[1] attempt 1 of rank 1\n",
        ("--attempt", 1): "[1] attempt 1 of rank 1\n",
        ("--attempt", 0, "-r", 1, "-n", 99): "attempt 0 of rank 1\nTraceback",
        ("--attempt", "all", "-r", 0): "=== attempt 0 ===\nattempt 0 of rank 0\n",
        (
            "--attempt",
            "all",
            "-r",
            1,
            "-n",
            1,
        ): "=== attempt 0 ===\nRuntimeError: not yet\n=== attempt 1 ===\nattempt 1",
        ("-f", "--attempt", "all", "-r", 1, "-n", 1): "=== attempt 0 ===\nRuntimeError: not yet\n=== attempt 1 ===\nat",
        ("-f", "--attempt", 0, "-r", 1): "attempt 0 of rank 1\nTraceback",
    }
    for arguments, beginning in cases.items():
        shown = bars.replicas("logs", "mine", *arguments)
        assert (shown.code, shown.stdout.startswith(beginning)) == (0, True), (arguments, shown)
    for wrong, message in (
        (2, "attempt must be from 0 to 1, or 'all', got 2."),
        ("x", "is a number or 'all', got 'x'"),
    ):
        refused = bars.replicas("logs", "mine", "--attempt", wrong)
        assert (refused.code, message in refused.stderr) == (2, True), refused


def test_a_progress_bar_is_shown_as_a_terminal_shows_it_in_the_end_and_raw_on_demand(
    bars: HereInstead, local: LocalProcessExecutor
) -> None:
    assert launch(local, "bars:bar", 2, run_id="mine").wait(60)
    for follow in ([], ["-f"]):
        shown = bars.replicas("logs", "mine", *follow).stdout.splitlines()
        assert sorted(shown) == ["[0] 100 %", "[0] over", "[1] 100 %", "[1] over"]
        assert bars.replicas("logs", "mine", "-r", 1, *follow).stdout == "100 %\nover\r\n"
        assert "\r90 %\r100 %\n" in bars.replicas("logs", "mine", "-r", 1, "--raw", *follow).stdout
    assert "\r90 %" in attach("mine").logs(rank=1)


def test_elsewhere_a_log_is_read_in_the_rendezvous_and_that_is_said(
    bars: HereInstead, local: LocalProcessExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = launch(local, "bars:fail_once", 1, run_id="mine", rendezvous=tmp_path / "there")
    assert run.wait(60)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another user"))
    copy = tmp_path / "there" / "mine" / "replicas" / "0000" / "0" / "output.log"
    for follow in ([], ["-f"]):
        shown = bars.replicas("logs", run.url, "-r", 0, *follow)
        assert (shown.code, shown.stdout) == (0, "attempt 0 of rank 0\n")
        assert "Note: Rank 0: read from 'mine/replicas/0000/0/output.log' in file://" in shown.stderr
        assert shown.stderr.endswith(" s old.\n")
    copy.unlink()
    shown = bars.replicas("logs", run.url, "-r", 0)
    assert shown.stdout == "attempt 0 of rank 0\n"
    assert "local has no log of it. This was kept by its outcome, 'mine/replicas/0000/0/outcome.json'." in shown.stderr


def test_a_file_that_cannot_be_read_is_named(
    bars: HereInstead, local: LocalProcessExecutor, tmp_path: Path, state_home: Path
) -> None:
    assert launch(local, "bars:fail_once", 1, run_id="mine", rendezvous=tmp_path / "there").wait(60)
    log = state_home / "replicas" / "mine" / "replicas" / "0000" / "0" / "output.log"
    log.unlink()
    log.mkdir()  # unreadable also for root
    shown = bars.replicas("logs", "mine", "-r", 0)
    assert shown.stdout == "attempt 0 of rank 0\n"
    assert f"{log} cannot be read (Is a directory); read from 'mine/replicas/0000/0/output.log'" in shown.stderr
