"""Processes that resume the runs they are told, all at the same moment."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import launcher_scripts

from executors import Run
from executors.testing.processes import environment


@contextmanager
def resumers(n: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes that resume the runs they are told, and wait until they are ready for the first."""
    with ExitStack() as stack:
        started = []
        for _ in range(n):
            command = [sys.executable, launcher_scripts.__file__, "resume_each_that_is_named"]
            process = subprocess.Popen(
                command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        yield started


def resume_at_once(started: list[subprocess.Popen[str]], run: Run) -> list[str]:
    """Tell all resumers at the same time to resume a run; return what each says."""
    for process in started:
        assert process.stdin is not None
        process.stdin.write(f"{run.url}\n")
    for process in started:
        assert process.stdin is not None
        process.stdin.flush()
    return [process.stdout.readline().strip() for process in started if process.stdout is not None]
