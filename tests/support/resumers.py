"""Starts processes that all resume the same run at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from executors import Run
from executors.testing.helpers import Helper, python_process, receive, send
from support import launchers


@contextmanager
def resumers(n: int) -> Iterator[list[Helper]]:
    """Start processes that resume the runs whose addresses they read, and wait until they are ready."""
    script = Path(launchers.__file__)
    with ExitStack() as stack:
        started = [stack.enter_context(python_process(script, "resume_each_that_is_named")) for _ in range(n)]
        assert [receive(process) for process in started] == ["ready"] * n
        yield started


def resume_at_once(started: list[Helper], run: Run) -> list[str]:
    """Let all resumers resume a run at the same time, and return the answer of each."""
    for process in started:
        send(process, run.url)
    return [receive(process) for process in started]
