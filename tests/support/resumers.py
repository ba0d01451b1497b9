"""Processes that resume the runs they are told, all at the same moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from executors import Run
from executors.testing.helpers import Helper, python_process, receive, send
from support import launchers


@contextmanager
def resumers(n: int) -> Iterator[list[Helper]]:
    """Start processes that resume the runs they are told, and wait until they are ready for the first."""
    script = Path(launchers.__file__)
    with ExitStack() as stack:
        started = [stack.enter_context(python_process(script, "resume_each_that_is_named")) for _ in range(n)]
        assert [receive(process) for process in started] == ["ready"] * n
        yield started


def resume_at_once(started: list[Helper], run: Run) -> list[str]:
    """Tell all resumers at the same time to resume a run; return what each says."""
    for process in started:
        send(process, run.url)
    return [receive(process) for process in started]
