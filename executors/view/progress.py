"""Draws the progress of a run while a process waits: bars on a terminal or in a notebook, otherwise lines of text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from executors.status import MAX_DECIDED, MAX_LINE, Progress, RunStatus
from executors.view.notebook import NotebookView, in_notebook
from executors.view.report.text import one_line

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

EVERY_S = 10.0  # seconds between two lines
BAR_WIDTH = 30
MAX_BARS = 16  # one bar per rank; a run with more ranks has only one bar
LINES_AROUND = 4  # rows of a terminal that are not for ranks: two of the run, one above, and the prompt below


class View(Protocol):
    """The interface of a display that shows the state of a run again and again."""

    def update(self, status: RunStatus) -> None:
        """Show this state of the run."""

    def close(self) -> None:
        """Stop drawing, so that other output can follow. A later `update` draws again."""


def open_view(run_id: str) -> View:
    """Return a display of a run: bars on a terminal, cells in a notebook, otherwise lines."""
    if in_notebook():
        return NotebookView()
    from rich.console import Console

    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    if sys.stderr.isatty() and console.is_terminal and not console.is_dumb_terminal:
        return ProgressBars(run_id, console)
    return ProgressLines(run_id)


class ProgressLines:
    """Prints a line on stderr when a replica has started or ended, and a line of progress every ten seconds."""

    def __init__(self, run_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_id = run_id
        self._clock = clock
        self._counts = self._text = ""
        self._at = 0.0
        self._n_decided = 0

    def update(self, status: RunStatus) -> None:
        new, self._n_decided = status.decided[self._n_decided :], len(status.decided)
        for each in new[-MAX_DECIDED:]:
            print(f"replicas: {self._run_id}: {one_line(each.line, MAX_LINE)}", file=sys.stderr, flush=True)
        text, now = status.describe_progress(), self._clock()
        if status.counts != self._counts or (text != self._text and now - self._at >= EVERY_S):
            self._counts, self._text, self._at = status.counts, text, now
            print(f"replicas: {self._run_id}: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing, because printed lines hold no resource."""


class ProgressBars:
    """Bars that are redrawn in place. They stay on the screen after the end of the run."""

    def __init__(self, run_id: str, console: Console) -> None:
        self._run_id = run_id
        self._console = console
        self._live: Any = None
        self._n_decided = 0

    def update(self, status: RunStatus) -> None:
        from rich.console import Group
        from rich.live import Live
        from rich.text import Text

        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()
        new, self._n_decided = status.decided[self._n_decided :], len(status.decided)
        for each in new[-MAX_DECIDED:]:
            self._console.print(one_line(each.line, MAX_LINE), style="yellow")
        drawn = bars(status, min(MAX_BARS, self._console.height - LINES_AROUND))
        words = status.describe_progress() if drawn is None else status.counts
        self._live.transient = not status.is_terminal
        self._live.update(Group(Text(f"{self._run_id}: {words}"), *([drawn] if drawn else [])), refresh=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def bars(status: RunStatus, max_ranks: int = 0) -> RenderableType | None:
    """Return the bar of a run, and a bar for each rank if there are at most `max_ranks`.

    None if no rank reports a total.
    """
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))

    def add(name: str, progress: Progress, words: str) -> None:
        bar = ProgressBar(total=1.0, completed=progress.share, width=BAR_WIDTH)
        steps = f"{progress.step:.0f}/{progress.total_steps:.0f}"
        table.add_row(name, bar, Text(f"{progress.share:.0%}", justify="right"), Text(steps, justify="right"), words)

    if status.progress is not None:
        add("run", status.progress, status.progress.describe())
    if len(status.replicas) <= max_ranks:
        for replica in status.replicas:
            if (progress := replica.progress) is not None:
                add(
                    f"rank {replica.rank}",
                    progress,
                    str(replica.status) if replica.status.is_terminal else progress.describe(),
                )
    return table if table.row_count else None
