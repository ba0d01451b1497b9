"""Shows a run in a notebook cell, and updates the cell until the run has ended."""

from __future__ import annotations

import contextlib
import html
import math
import sys
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any

from executors.errors import ReplicasError
from executors.metrics.metrics import Metrics, read_metrics
from executors.patience import FOLLOWER, Outage, Waits
from executors.status import MAX_STEPS, RunStatus
from executors.view.report.text import inert
from executors.view.run_view import RunView

EVERY_S = 1.0  # seconds between two updates; longer for a bucket
SETTLE_S = 10.0
MAX_POINTS = 500  # the largest number of points of a curve
MAX_POINTS_OF_ALL = 20_000  # about 250 kB an update: notebooks disconnect a kernel that sends more each second
Point = tuple[float, float]
"""A step, and the loss at that step."""
LEFT, TOP, WIDTH, HEIGHT = 60, 10, 560, 160  # the size of the curves, in units of the SVG


def in_notebook() -> bool:
    """True if this process is the kernel of a notebook. It looks only at modules that are already imported."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookView:
    """The notebook cells that show one run."""

    def __init__(self) -> None:
        self._cells: list[Any] = []
        self._curves = Curves()
        self._fragment = self._shown = ""
        self.head = ""
        """HTML that is shown above a run that has ended."""

    def begin(self, metrics: Metrics) -> None:
        """Start the curves with everything that was measured before now."""
        self._curves.begin(metrics)

    def open(self, status: RunStatus) -> None:
        """Show the run in the current cell. Other cells that show it stay."""
        self._draw(status)
        self._show(self._fragment)
        kit = _kit()
        self._cells.append(kit.display(kit.HTML(self._fragment), display_id=True))

    def update(self, status: RunStatus) -> None:
        """Update all cells that show the run. If there is none, show it in the current cell."""
        if not self._cells:
            self.open(status)
            return
        self._draw(status)
        self._show(self._fragment)

    def say(self, text: str) -> None:
        """Show a line of text below the run."""
        self._show(f"{self._fragment}<p>{html.escape(inert(text))}</p>")

    def close(self) -> None:
        """Do nothing, because a cell holds no resource."""

    def _draw(self, status: RunStatus) -> None:
        self._curves.add(status)
        self._fragment = self.head if status.is_terminal else ""
        self._fragment += status.to_html(between=bar(status) + self._curves.to_svg())

    def _show(self, fragment: str) -> None:
        """Update all cells with this HTML, unless they show it already."""
        if fragment == self._shown:
            return
        self._shown = fragment
        for cell in self._cells:
            cell.update(_kit().HTML(fragment))


def _kit() -> Any:
    from IPython import display  # IPython has no type annotations

    return display


class Display:
    """Updates the cells that show a run, in a thread that ends with the run."""

    def __init__(self, run: RunView, view: NotebookView | None = None) -> None:
        self._run = run
        self._view = view or NotebookView()
        self._has_begun = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._look_now = threading.Event()

    def show(self) -> None:
        """Show the run in the current cell, and keep the cell updated."""
        status = self._run.status()
        with self._lock:
            if not self._has_begun:
                self._view.begin(read_metrics(self._run.store, self._run.run_id, self._run.record))
                self._has_begun = True  # only once, because reading the measurements of a long run takes many requests
            if status.is_terminal:
                self._view.head = self._head()
            self._view.open(status)
            if self._thread is None and not status.is_terminal:
                self._thread = threading.Thread(target=self._renew, name="replicas-show", daemon=True)
                self._thread.start()

    def _head(self) -> str:
        from executors.view.report.page import head
        from executors.view.run_page import report_document

        with contextlib.suppress(ReplicasError):  # if the curves fail, the table is still shown
            return head(report_document(self._run))
        return ""

    def settle(self) -> None:
        """Wait until all cells show the end of a run that has ended, and the thread has ended."""
        thread = self._thread
        if thread is not None:
            self._look_now.set()
            thread.join(SETTLE_S)

    def _renew(self) -> None:
        outage = Outage(FOLLOWER, "the run", waits=Waits(lambda words: None))  # the cell shows the outage
        for pause_s in self._run.reader.pauses():
            self._look_now.wait(max(EVERY_S, pause_s))
            self._look_now.clear()
            try:
                status = self._run.status()
            except ReplicasError as error:
                is_over = not outage.tolerates(error)
                words = "No longer shown; call show() again" if is_over else "Looking again"
                show = partial(self._view.say, f"{words}: {error}")
            else:
                outage.end()
                if is_over := status.is_terminal:
                    self._view.head = self._head()
                show = partial(self._view.update, status)
            with self._lock:
                show()
                if is_over:
                    self._thread = None
                    return


class Curve:
    """The loss of one rank by step, with a limited number of points: evenly spread points, and the newest one."""

    def __init__(self) -> None:
        self._kept: list[Point] = []
        self._newest: Point | None = None
        self._n, self._every = 0, 1

    def add(self, step: float, loss: float) -> None:
        """Add a point, unless the last point has the same step."""
        if self._newest is not None and self._newest[0] == step:
            return
        self._newest = (step, loss)
        if self._n % self._every == 0:
            self._kept.append(self._newest)
        self._n += 1
        if len(self._kept) > MAX_POINTS:
            del self._kept[1::2]
            self._every *= 2

    def __len__(self) -> int:
        return len(self._kept)

    def lines(self, every: int) -> list[list[Point]]:
        """Return every n-th point (n = `every`), as lines.

        A line ends where a later attempt returned to an earlier step.
        """
        lines: list[list[Point]] = []
        kept = self._kept[::every]
        for point in kept if kept[-1:] == [self._newest] else [*kept, self._newest]:
            if point is not None and lines and lines[-1][-1][0] < point[0]:
                lines[-1].append(point)
            elif point is not None:
                lines.append([point])
        return [line for line in lines if len(line) > 1]


class Curves:
    """The loss by step of each rank, over all its attempts."""

    def __init__(self) -> None:
        self._curves: dict[int, Curve] = {}

    def add(self, status: RunStatus) -> None:
        """Add the last reported loss of each replica."""
        for replica in status.replicas:
            self._add(replica.rank, replica.reported)

    def begin(self, metrics: Metrics) -> None:
        """Add everything that the replicas reported before now."""
        for row in metrics.numbers:
            self._add(row.rank, row.values)

    def _add(self, rank: int, reported: Mapping[str, float]) -> None:
        step, loss = (reported.get(name, math.nan) for name in ("step", "loss"))
        if abs(step) < MAX_STEPS and math.isfinite(loss):
            self._curves.setdefault(rank, Curve()).add(step, loss)

    def to_svg(self) -> str:
        """Return the curves as SVG. Empty if there is no line yet."""
        every = max(1, math.ceil(sum(map(len, self._curves.values())) / MAX_POINTS_OF_ALL))
        found = {rank: lines for rank, curve in self._curves.items() if (lines := curve.lines(every))}
        points = [point for lines in found.values() for line in lines for point in line]
        if not points:
            return ""
        across, up = zip(*points, strict=True)
        (first, last), (low, high) = (min(across), max(across)), (min(up), max(up))

        def place(step: float, loss: float) -> str:
            return f"{LEFT + scaled(step, first, last) * WIDTH:.1f},{TOP + (1 - scaled(loss, low, high)) * HEIGHT:.1f}"

        bottom, right = TOP + HEIGHT, LEFT + WIDTH
        drawn = [
            f'<path d="M{LEFT},{TOP}V{bottom}H{right}" fill="none" stroke="currentColor" opacity="0.3"/>',
            label(LEFT - 6, TOP + 8, "end", f"{high:.3g}"),
            label(LEFT - 6, TOP + HEIGHT / 2, "end", "loss"),
            label(LEFT - 6, bottom, "end", f"{low:.3g}"),
            label(LEFT, bottom + 18, "start", f"step {first:.0f}"),
            label(right, bottom + 18, "end", f"{last:.0f}"),
        ]
        for rank, lines in found.items():
            ways = (" ".join(place(*point) for point in line) for line in lines)
            paths = "".join(f'<polyline points="{way}"/>' for way in ways)
            stroke = f'fill="none" stroke="hsl({rank * 137 % 360} 60% 50%)" stroke-width="1.5"'
            drawn.append(f"<g {stroke}><title>rank {rank}</title>{paths}</g>")
        size = f'viewBox="0 0 {right + LEFT} {bottom + 26}" style="width: 100%; max-width: {right + LEFT}px"'
        return f'<svg {size} role="img" aria-label="loss by step">{"".join(drawn)}</svg>'


def label(x: float, y: float, anchor: str, text: str) -> str:
    """Return a text label as SVG."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="currentColor" font-size="12">{text}</text>'


def scaled(value: float, least: float, most: float) -> float:
    """Return the position of a value between `least` and `most`, from 0 to 1."""
    return (value - least) / (most - least) if most > least else 0.5


def bar(status: RunStatus) -> str:
    """Return the progress bar of a run as HTML. Empty if its replicas do not report their total number of steps."""
    progress = status.progress
    if progress is None:
        return ""
    words = [f"{progress.share:.0%}", f"step {progress.step:.0f} of {progress.total_steps:.0f}", progress.describe()]
    drawn = f'<progress value="{progress.share:.4f}" max="1" style="width: 20em"></progress>'
    return f"<p>{drawn} {html.escape(', '.join(filter(None, words)))}</p>"
