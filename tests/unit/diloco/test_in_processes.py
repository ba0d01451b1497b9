"""`in_processes` loses no result, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from threading import Event

import pytest

from diloco.in_processes import in_processes

HANGS = """
import sys
from diloco.in_processes import in_processes
from unit.diloco.test_in_processes import hang

if __name__ == "__main__":
    print(list(in_processes(hang, [sys.argv[1]] * 2, processes=1)))
"""


def hang(pipe: str) -> None:
    """Write a line into a named pipe, and keep the pipe open for as long as this process lives."""
    with open(pipe, "w") as file:
        print("begun", file=file, flush=True)
        Event().wait()


def half(number: int) -> int:
    """Return half of an even number."""
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


def test_a_call_that_fails_loses_no_result_of_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    calls = in_processes(half, (2, 3, 4), processes=1)
    assert [next(calls), next(calls)] == [1, 2]
    with pytest.raises(ValueError, match="3 is odd"):
        next(calls)
    assert "3 failed, and the others continue: ValueError('3 is odd')" in capsys.readouterr().err


def test_a_killed_process_ends_the_calls_with_one_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BrokenProcessPool):
        list(in_processes(os._exit, (9, 9, 9), processes=1))
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda sent: str(sent.name))
def test_the_processes_end_with_the_one_that_started_them(sent: signal.Signals, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [sys.executable, "-c", HANGS, str(pipe)]
    with subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, process_group=0) as parent:
        with open(pipe) as begun:
            assert begun.readline() == "begun\n"
            # Ctrl-C of a terminal reaches the whole group, and other signals reach the one process
            (os.killpg if sent is signal.SIGINT else os.kill)(parent.pid, sent)
            assert begun.read() == "", "the worker has ended, and no other call has begun"
        _, errors = parent.communicate()
    assert parent.returncode == -sent
    assert errors.count(b"Traceback") <= (sent is signal.SIGINT)
