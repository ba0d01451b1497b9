"""Watching a run to its end: a live table on a terminal, plain lines elsewhere; and what Ctrl-C does."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Protocol

from executors.cli.output import Output, inert, name_duration, name_ranks, one_line
from executors.errors import BackendError, CorruptObjectError, ReplicasError, StoreError
from executors.protocol import ReplicaStatus
from executors.run import Run
from executors.status import ReplicaState, RunStatus

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
PROGRESS_EVERY_S = 10.0  # between two plain lines of progress
PATIENCE_S = 60.0  # a store or a vendor that hiccups is no reason to end an attached run
SHOW_CURSOR = b"\x1b[?25h"


class View(Protocol):
    """Shows how a run fares."""

    def update(self, status: RunStatus) -> None: ...
    def say(self, text: str, style: str | None = None) -> None: ...
    def close(self) -> None: ...


def open_view(output: Output, run: Run, *, hint: str = "") -> View:
    """Choose a view: a live table for somebody who watches, lines for a file or a pipe."""
    return LiveView(output, run, hint) if output.is_live else PlainView(output, run)


class Interrupts:
    """Counts Ctrl-C, and SIGTERM as one, within the block.

    Until `count_on` it raises `KeyboardInterrupt`, as usual. From then on the first only counts, and the second
    leaves the process at once.
    """

    def __init__(self) -> None:
        self.count = 0
        self._run_id: str | None = None
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def count_on(self, run_id: str) -> None:
        """Stop raising: from here on the first interrupt asks for a cancellation."""
        self._run_id = run_id

    def sleep(self, seconds: float) -> None:
        """Sleep, but not past an interrupt."""
        if select.select([self._reader], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._run_id is None:
            raise KeyboardInterrupt
        if self.count > 1:
            where = f"\nLeft at once; what still runs of {self._run_id} is killed.\n".encode()
            with contextlib.suppress(OSError):
                os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + where)
            os._exit(130)


def follow(
    run: Run, view: View, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic
) -> RunStatus:
    """Show a run until every replica has ended. Ctrl-C is passed on and leaves the run alone.

    Raises:
        StoreError: the store could not be read for a minute.
        BackendError: the backend could not be asked for a minute, or never.
    """
    return _follow(run, view, sleep, lambda: None, clock)


def follow_and_cancel(run: Run, view: View, interrupts: Interrupts) -> RunStatus:
    """Show a run until every replica has ended; at the first interrupt cancel it, and go on showing its end."""
    canceller: list[threading.Thread] = []

    def cancel() -> None:
        try:
            run.cancel()
        except ReplicasError as error:
            view.say(f"Cancelling failed: {error} Ctrl-C again leaves at once.", "red")

    def look() -> None:
        if interrupts.count and not canceller:
            with contextlib.suppress(StoreError):
                run.ask_to_end()  # before a word is said: a second Ctrl-C leaves, and the markers make it a kill
            view.say("Cancelling; waiting for the replicas to end. Ctrl-C again leaves at once.", "yellow")
            canceller.append(threading.Thread(target=cancel, name="replicas-cancel", daemon=True))
            canceller[0].start()

    status = _follow(run, view, interrupts.sleep, look)
    for thread in canceller:
        thread.join()
    return status


def _follow(
    run: Run,
    view: View,
    sleep: Callable[[float], None],
    look: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> RunStatus:
    pause_s = FIRST_PAUSE_S
    was_read = False
    failing_since: dict[str, float] = {}
    failed_at = -math.inf
    while True:
        try:
            status = run.status()
        except (StoreError, BackendError) as error:
            what = "store" if isinstance(error, StoreError) else "backend"
            if not was_read and (what == "backend" or isinstance(error, CorruptObjectError)):
                raise  # no SDK or account, or records that nobody can read: waiting helps neither
            failed_at = clock()
            if what not in failing_since:
                failing_since[what] = failed_at
                view.say(f"The {what} does not work; trying on: {error}", "yellow")
            elif failed_at - failing_since[what] > PATIENCE_S:
                raise
        else:
            was_read = True
            failing_since.pop("store", None)
            if clock() - failed_at > PATIENCE_S:  # most looks at a run ask the store alone
                failing_since.pop("backend", None)
            view.update(status)
            if status.is_terminal:
                return status
        look()
        sleep(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)


class LiveView:
    """A table that is redrawn in place."""

    def __init__(self, output: Output, run: Run, hint: str) -> None:
        from rich.live import Live

        self._console = output.console
        self._created_at = run.record.created_at
        self._hint = hint
        self._live = Live(console=self._console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def update(self, status: RunStatus) -> None:
        from rich.console import Group
        from rich.text import Text

        from executors.cli.table import LINES_AROUND, replica_table, title

        over = status.is_terminal
        head = title(status, status.at - self._created_at)
        table = replica_table(status, None if over else self._console.height - LINES_AROUND)
        hint = [] if over or not self._hint else [Text(self._hint, style="dim")]
        self._live.update(Group(head, table, *hint), refresh=True)

    def say(self, text: str, style: str | None = None) -> None:
        self._hint = ""
        self._console.print(inert(text), style=style)

    def close(self) -> None:
        self._live.stop()


class PlainView:
    """A line for each change of state, and now and then one of progress."""

    def __init__(self, output: Output, run: Run, clock: Callable[[], float] = time.monotonic) -> None:
        self._output = output
        self._clock = clock
        self._created_at = run.record.created_at
        self._seen: dict[int, ReplicaStatus] = {}
        self._progress = ""
        self._progress_at = clock()

    def update(self, status: RunStatus) -> None:
        changed: dict[tuple[ReplicaStatus, str], list[int]] = {}
        for replica in status.replicas:
            if self._seen.get(replica.rank) is not replica.status:
                self._seen[replica.rank] = replica.status
                changed.setdefault((replica.status, one_line(replica.note)), []).append(replica.rank)
        for (state, note), ranks in changed.items():
            self._line(status.at, f"{name_ranks(ranks)} {state}" + (f" ({note})" if note else ""))
        if changed:
            return
        progress = progress_line(status)
        if progress != self._progress and self._clock() - self._progress_at >= PROGRESS_EVERY_S:
            self._progress, self._progress_at = progress, self._clock()
            self._line(status.at, progress)

    def say(self, text: str, style: str | None = None) -> None:
        self._output.say(text, style)
        self._flush()

    def close(self) -> None:
        self._flush()

    def _line(self, at: float, text: str) -> None:
        self.say(f"[{name_duration(at - self._created_at):>6}] {text}")

    def _flush(self) -> None:
        (sys.stderr if self._output.as_json else sys.stdout).flush()


def progress_line(status: RunStatus) -> str:
    """Say in one line how far a run is: `3 running, 1 failed: round 4, step 120-130, loss 2.31`."""
    parts = []
    for column in ("round", "step", "loss"):
        having = [replica for replica in status.replicas if replica.reported.get(column) is not None]
        if having:
            least, most = (choose(having, key=lambda r: float(r.reported[column])) for choose in (min, max))
            parts.append(_span(column, least, most))
    return status.counts + (f": {', '.join(parts)}" if parts else "")


def _span(column: str, least: ReplicaState, most: ReplicaState) -> str:
    texts = dict.fromkeys((least.cell(column), most.cell(column)))
    return f"{column} {'-'.join(texts)}"
