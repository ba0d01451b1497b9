"""A launch and a restart enter only a number of files that a reader can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.floors import FLOORS
from support.start_walk import OUTPUT

from executors import LocalProcessExecutor, current_replica, launch

MOST_FILES_OF_A_LAUNCH = 47  # what differs between systems has a file for each of them
"""Files of `executors`, from the command line to the order to the process that forks the supervisor."""
MOST_FILES_OF_A_RESTART = 33
"""Files of `executors`, in the supervisor, from the end of a rank until the fork of its next attempt."""
GROUND = 4  # floors whose functions get parsers and other functions from above, and call them
CALLS_UP_OF_A_LAUNCH = {
    "launch.<locals>.make",  # makes an executor with the options of the command
    "LaunchPlan.start.<locals>.prepare",  # `StartPlan.prepare`: writes what must exist before the first replica starts
}
CALLS_UP_OF_A_RESTART = {
    "Supervisor._begin_next",  # the session decides, and the supervisor, which has the processes, begins the attempt
}
"""Functions that a lower floor gets as arguments and calls."""


def fail_once() -> None:
    if current_replica().attempt == 0:
        raise RuntimeError("This is the first attempt.")


def calls_up(calls: list[list[str]]) -> set[str]:
    """Return the functions that code on a lower floor calls, if that floor is above the ground.

    Backends are not counted, because lower floors call them through the interface `Backend` or `ProcessStarter`.
    """
    floors = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}

    def floor(file: str) -> int:
        return floors[file.split("/")[0].removesuffix(".py")]

    return {
        name
        for caller, called, name in calls
        if GROUND <= floor(caller) < floor(called) and not called.startswith("backends/")
    }


def test_a_launch_by_the_command_enters_few_files_and_calls_two_functions_above(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("def main(): pass\n")
    command = [
        sys.executable,
        "-m",
        "support.start_walk",
        "job.py:main",
        "--n",
        "2",
        "--detach",
        "--option",
        "preload=[]",
    ]
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {OUTPUT: str(tmp_path / "walk.json"), "PYTHONPATH": tests}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    files, calls = json.loads((tmp_path / "walk.json").read_text())
    assert len(files) <= MOST_FILES_OF_A_LAUNCH, files
    assert calls_up(calls) == CALLS_UP_OF_A_LAUNCH


def test_a_restart_enters_few_files_and_calls_one_function_above(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OUTPUT, str(tmp_path / "walk.json"))
    executor = LocalProcessExecutor(preload=["support.restart_walk"])
    run = launch(executor, fail_once, 1, restarts=1, rendezvous=tmp_path.as_uri())
    assert run.results() == [None]
    files, calls = json.loads((tmp_path / "walk.json").read_text())
    assert len(files) <= MOST_FILES_OF_A_RESTART, files
    assert calls_up(calls) == CALLS_UP_OF_A_RESTART
