"""Watch a run to its end, with a live table on a terminal and plain lines elsewhere, and handle Ctrl-C."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from executors.attempt.pauses import LONGEST_PAUSE_S, pauses
from executors.backend import Backend
from executors.cli.output import (
    CANCELLED,
    PROGRESS_EVERY_S,
    Output,
    inert,
    name_duration,
    name_ranks,
    note,
    one_line,
    without_unwritable_lines,
)
from executors.cli.summary import reference
from executors.cli.tee import Tee
from executors.errors import ReplicasError, StoreError, unknown_name
from executors.patience import Waits
from executors.patience import waits as process_waits
from executors.process import wakeup_pipe
from executors.protocol import ReplicaStatus
from executors.run.run import Run, manager_of, view_of
from executors.run.waiter import ReadTolerance
from executors.status import COLUMNS, MAX_DECIDED, MAX_LINE, ReplicaState, RunStatus
from executors.store.parallel import within

CLOCKS_APART_S = 300.0  # the largest expected difference, in seconds, between the wall clocks of two machines
WAKE_S = 0.5  # the longest wait, in seconds, before signals are handled
REQUEST_S = 5.0  # seconds that Ctrl-C waits for the store before it ends local replicas
MAX_LINES = 200  # the number of lines of output below the table
SHOW_CURSOR = b"\x1b[?25h"


class EndedWithoutStore(Exception):
    """The run was cancelled at its service. Its store does not answer, so the states of its replicas are unknown."""


class Interrupts:
    """Counts Ctrl-C within a `with` block. SIGTERM and a closed terminal count as well.

    Before the call of `count_on`, each interrupt raises `KeyboardInterrupt`. After that call, the first interrupt is
    only counted, and the second ends the process.

    Example:
        with Interrupts() as interrupts:
            interrupts.count_on(run.run_id)
    """

    def __init__(self) -> None:
        self.count = 0
        self.events: SimpleQueue[str] = SimpleQueue()
        """Receives "interrupt" for each counted Ctrl-C. A signal handler may put into a `SimpleQueue` at any time."""
        self.on_exit: Callable[[], str] = str
        """Returns a sentence on the replicas that continue when the second Ctrl-C ends this process."""
        self._run_id: str | None = None
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        self._reader, self._writer = wakeup_pipe()
        self._old_wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` ignores SIGHUP, and that must stay so
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        os.close(self._reader)
        os.close(self._writer)

    def count_on(self, run_id: str) -> None:
        """Stop raising. From now on the first interrupt is counted, and the caller cancels the run.

        Args:
            run_id: the run.
        """
        self._run_id = run_id

    def sleep(self, seconds: float) -> None:
        """Sleep until the time has passed or an interrupt arrives.

        Args:
            seconds: the longest time.
        """
        if select.select([self._reader], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._reader, 4096)

    def next_event(self) -> str:
        """Wait for the next event, and return it.

        A signal that arrives just before a wait does not end the wait, and its handler runs only after the wait. So
        each wait is short.
        """
        while True:
            with contextlib.suppress(Empty):
                return self.events.get(timeout=WAKE_S)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._run_id is None:
            raise KeyboardInterrupt
        self.events.put("interrupt")
        if self.count > 1:
            text = f"\nExiting now. {self.on_exit()}\n".encode()
            with contextlib.suppress(OSError):
                os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + text)
            os._exit(CANCELLED)


@without_unwritable_lines()
def watch(
    run: Run,
    output: Output,
    *,
    interrupts: Interrupts | None = None,
    interrupt_ends: str = "",
    timeout_s: float | None = None,
    columns: Sequence[str] | None = None,
    tee: Sequence[int] = (),
) -> bool:
    """Show a run until every replica has ended. Return False if the time limit was reached first.

    Args:
        run: the run.
        output: the output of the verb.
        interrupts: counts Ctrl-C. The first Ctrl-C cancels the run, and `watch` shows its end. None: Ctrl-C stops
            watching.
        interrupt_ends: text that names the replicas that the caller ends at Ctrl-C. Empty: none.
        timeout_s: the longest time, in seconds. None: no limit.
        columns: the names of reported numbers to show besides the usual ones.
        tee: the ranks whose output is shown as well.

    Raises:
        StoreError: the store could not be read for as long as `manager.tolerance`.
        BackendError: the backend did not answer for as long as `manager.tolerance`, or refused the first request.
        EndedWithoutStore: the run was cancelled, and its store does not answer.
        KeyboardInterrupt: Ctrl-C, if `interrupts` is None.

    Example:
        watch(attach("brave-otter-7f3a"), Output(), timeout_s=60.0)
    """
    hint = "Ctrl-C stops watching; the run continues." if interrupts is None else "Ctrl-C cancels the run."
    hint = f"Ctrl-C ends {interrupt_ends}." if interrupt_ends else hint
    view = LiveView(output, run, hint, columns) if output.is_live else PlainView(output, run, columns=columns)
    note = ""
    shown = Tee(run, tee, view.print_output) if tee else None
    try:
        if interrupts is not None:
            _follow_and_cancel(run, view, interrupts)
        elif not follow(run, view, timeout_s=timeout_s):
            note = f"Not finished after {timeout_s:g} s."
        if shown is not None:
            shown.finish()
    except KeyboardInterrupt:
        note = "" if interrupt_ends else "Stopped watching."
        raise
    finally:
        view.close()
        if note:
            output.print(f"{note} The run continues: replicas wait {reference(run)}", "yellow")
    if columns:
        warn_of_unknown_columns(columns, run.status())
    return not note


def warn_of_unknown_columns(columns: Sequence[str], status: RunStatus) -> None:
    """Print a note on stderr for each wanted column that no replica has reported.

    Args:
        columns: the names that the user gave.
        status: the state of the run.
    """
    known = {*COLUMNS, *(name for replica in status.replicas for name in replica.reported)}
    for name in columns:
        if name not in known:
            note(unknown_name("column", name, known))


def _follow_and_cancel(run: Run, view: PlainView, interrupts: Interrupts) -> None:
    """Show a run until its end, and cancel it at the first interrupt.

    One thread reads the run and another cancels it. A read may wait for minutes if the store does not answer, and
    replicas that cost money must not run that long.
    """
    problems: list[BaseException] = []
    is_cancelling, was_announced = threading.Event(), threading.Event()

    def has_begun_to_cancel() -> bool:
        is_first = is_cancelling.is_set() and not was_announced.is_set()
        if is_first:
            was_announced.set()
        return is_first

    def look() -> None:
        try:
            follow(run, view, sleep=interrupts.sleep, after_each=has_begun_to_cancel)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            problems.append(error)
        interrupts.events.put("looked")

    def cancel(is_requested: bool) -> None:
        try:
            if is_requested:
                manager_of(run).finish_cancel()
            else:
                run.cancel()
        except ReplicasError as error:
            view.print_line(f"The run could not be cancelled: {error} To exit now, press Ctrl-C again.", "red")
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            problems.append(error)
        interrupts.events.put("cancelled")

    is_of_service = _service_of(run) is not None
    interrupts.on_exit = lambda: describe_exit(run)
    threading.Thread(target=look, name="replicas-look", daemon=True).start()
    has_looked = has_cancelled = False
    while not has_looked or (is_cancelling.is_set() and not has_cancelled):
        news = interrupts.next_event()
        has_looked, has_cancelled = has_looked or news == "looked", has_cancelled or news == "cancelled"
        # Also handle an interrupt that came during the last read: a run that cannot be read can still be cancelled.
        if interrupts.count and not is_cancelling.is_set() and (not has_looked or problems):
            is_requested = not is_of_service and _request_cancel(run)
            view.print_line(
                "Cancelling, and waiting for the replicas to end. To exit now, press Ctrl-C again.", "yellow"
            )
            is_cancelling.set()
            threading.Thread(target=cancel, args=(is_requested,), name="replicas-cancel", daemon=True).start()
        # Do not read the run again, because the store does not answer.
        if has_cancelled and manager_of(run).canceller.is_store_silent:
            raise EndedWithoutStore
    for error in problems:
        raise error


def describe_exit(run: Run) -> str:
    """Return a sentence on the replicas that continue when this process exits while it cancels the run.

    Args:
        run: an attached run, which this process launched.

    Example:
        describe_exit(attach("brave-otter-7f3a"))
    """
    service = _service_of(run)
    if service is None:
        return f"The remaining replicas of {run.run_id} are killed."
    lease_s = service.lease_s
    lease = "" if lease_s is None else f", or {lease_s / 60:.0f} min after the last command that watches the run"
    return (
        f"The remaining jobs of {run.run_id} end when they find the cancel marker{lease}. "
        f"To end them now: replicas cancel {reference(run)}   or: {service.commands_to_end(run.run_id)}"
    )


def _service_of(run: Run) -> Backend | None:
    """Return the backends of a run whose jobs run at a service.

    None: they run here, or a backend is not installed here.
    """
    view = view_of(run)
    with contextlib.suppress(ReplicasError):
        return view.placements if view.placements.ends_jobs else None
    return None


def _request_cancel(run: Run) -> bool:
    """Write the cancel markers of local replicas. Return True if the store accepted them soon.

    Call this before the line about the cancellation is printed. If a second Ctrl-C ends this process after that line,
    the supervisor finds a marker and kills the replicas at once.
    """
    with contextlib.suppress(StoreError):
        within(REQUEST_S, manager_of(run).canceller.request, view_of(run).store.url)
        return True
    return False


def follow(
    run: Run,
    view: PlainView,
    *,
    timeout_s: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
    after_each: Callable[[], bool] = lambda: False,
    waits: Waits = process_waits,
) -> bool:
    """Show a run until every replica has ended. Return False if the time limit was reached first.

    Args:
        run: the run.
        view: shows the states.
        timeout_s: the longest time, in seconds. None: no limit.
        sleep: called with seconds between two reads of the run.
        clock: returns seconds of a monotonic clock.
        after_each: called between two reads. If it returns True, the following reads come quickly.
        waits: records waits for the store or the backend, which the view shows.

    Raises:
        StoreError: the store could not be read for as long as `manager.tolerance`.
        BackendError: the backend did not answer for as long as `manager.tolerance`, or refused the first request.

    Example:
        follow(run, PlainView(Output(), run), timeout_s=60.0)
    """

    manager = manager_of(run)

    def has_ended() -> bool:
        status = run.status()
        # read again, because the restart took time and other replicas may have ended
        while manager.advance(status.replicas):
            status = run.status()
        view.update(status)
        if status.failed_early and (line := manager.end_early(status, "--fail-fast")):
            view.print_line(line[:1].upper() + line[1:], "yellow")
        return status.is_terminal

    end = math.inf if timeout_s is None else clock() + timeout_s
    tolerance = ReadTolerance(lambda: manager.tolerance, waits)
    is_over, between = tolerance.tolerant(has_ended), manager.view.reader.pauses()
    with waits.reporting_to(lambda words: view.print_line(f"{words[:1].upper()}{words[1:]}", "yellow")):
        try:
            while not is_over():
                if after_each():
                    # use short pauses, also for a bucket, because the user waits for the end
                    between = pauses(LONGEST_PAUSE_S)
                left_s = end - clock()
                if left_s <= 0:
                    return False
                sleep(min(next(between), left_s))
        finally:
            tolerance.rest()
    return True


class PlainView:
    """Prints a line for each change of status, and a line of progress every ten seconds.

    Args:
        output: the output of the verb.
        run: the run.
        clock: returns seconds of a monotonic clock.
        columns: the names of reported numbers to show besides the usual ones.

    Example:
        PlainView(Output(), run).update(run.status())
    """

    def __init__(
        self,
        output: Output,
        run: Run,
        clock: Callable[[], float] = time.monotonic,
        columns: Sequence[str] | None = None,
    ) -> None:
        self._output = output
        self._columns = columns
        self._clock = clock
        self._created_at = view_of(run).record.created_at
        self._shown_from = clock() - max(0.0, time.time() - self._created_at)
        """The time of the launch, by the clock of this view."""
        self._seen: dict[int, ReplicaStatus] = {}
        self._waits: dict[int, str] = {}
        """For each rank, the reason for its wait as text, from the last update."""
        self._printed_notes: set[str] = set()
        self._n_decided = 0
        self._standstills: set[str] = set()
        """The lines about rounds that wait for a damaged object, from the last update."""
        self._progress = ""
        self._progress_at = clock()

    def update(self, status: RunStatus) -> None:
        """Print the changes since the last update.

        Args:
            status: the new state of the run.
        """
        last_at = max(status.last_at, *(each.at for each in status.decided[-1:]), 0.0)
        elapsed = self._elapsed(last_at)
        self._print_decisions(status)
        changed: dict[tuple[ReplicaStatus, str], list[int]] = {}
        for replica in status.replicas:
            # The reason for a wait often comes after the status: a quota, an image, a node that does not answer.
            waits = "" if replica.status.is_terminal else replica.doing
            has_news = bool(waits) and self._waits.get(replica.rank) != waits
            self._waits[replica.rank] = waits
            if self._seen.get(replica.rank) is not replica.status or has_news:
                self._seen[replica.rank] = replica.status
                # Skip decisions, which were printed already, and the progress of an installation, which would print a
                # line for each rank.
                note = "" if replica.restart.decision else self._note(replace(replica, installation=None))
                changed.setdefault((replica.status, note), []).append(replica.rank)
        for (state, note), ranks in changed.items():
            self._printed_notes.add(note)
            self.print_line(f"{elapsed} {name_ranks(ranks)} {state}" + (f" ({note})" if note else ""))
        progress = status.describe_progress(self._columns or ())
        is_due = self._clock() - self._progress_at >= PROGRESS_EVERY_S
        if not changed and is_due and progress != self._progress:
            self._progress, self._progress_at = progress, self._clock()
            self.print_line(f"{elapsed} {progress}")

    def _elapsed(self, at: float) -> str:
        return f"[{name_duration(self._elapsed_s(at)):>6}]"

    def _elapsed_s(self, at: float) -> float:
        """Return the seconds from the launch to a time, by the wall clock.

        If the wall clock was changed, use the monotonic clock of this view.
        """
        by_wall_s, since_s = at - self._created_at, self._clock() - self._shown_from
        return by_wall_s if 0.0 <= by_wall_s <= since_s + CLOCKS_APART_S else since_s

    def _print_decisions(self, status: RunStatus) -> None:
        """Print the new decisions, and the rounds that began to wait for a damaged object."""
        standstills = status.standstills
        for line in standstills:
            if line not in self._standstills:
                self._print(f"{self._elapsed(status.at)} {one_line(line, MAX_LINE)}", "red")
        self._standstills = {*standstills}
        new, self._n_decided = status.decided[self._n_decided :], len(status.decided)
        for each in new[-MAX_DECIDED:]:
            self._print(f"{self._elapsed(each.at)} {one_line(each.line, MAX_LINE)}", "yellow")

    def print_output(self, line: str) -> None:
        """Show a line of the output of a replica.

        Args:
            line: the line.
        """
        self._print(line, None)

    def _note(self, replica: ReplicaState) -> str:
        """Return the full text of a failure the first time, and only its reason after that."""
        note = one_line(replica.note)
        reason = replica.outcome and replica.outcome.reason
        return reason if reason and replica.status is ReplicaStatus.FAILED and note in self._printed_notes else note

    def print_line(self, text: str, style: str | None = None) -> None:
        self._print(text, style)

    def _print(self, text: str, style: str | None) -> None:
        self._output.print(text, style)
        self._output.console.file.flush()

    def close(self) -> None:
        self._output.console.file.flush()


class LiveView(PlainView):
    """Shows a table that is redrawn in place.

    Args:
        output: the output of the verb, which is a terminal.
        run: the run.
        hint: a line below the table.
        columns: the names of reported numbers to show besides the usual ones.

    Example:
        LiveView(Output(), run, "Ctrl-C stops watching.").update(run.status())
    """

    def __init__(self, output: Output, run: Run, hint: str, columns: Sequence[str] | None = None) -> None:
        from rich.live import Live

        super().__init__(output, run, columns=columns)
        self._hint = hint
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._draw: Callable[[], None] = lambda: None
        self._live = Live(console=output.console, auto_refresh=False, vertical_overflow="crop")
        self._live.start()

    def update(self, status: RunStatus) -> None:
        from rich.console import Group
        from rich.text import Text

        from executors.cli.table import LINES_AROUND, cut, replica_table, title
        from executors.view.progress import bars

        console, bar = self._output.console, bars(status)
        self._print_decisions(status)
        room = console.height - LINES_AROUND - bool(bar)
        n_rows = max(1, room - min(len(self._lines), max(room // 3, room - len(status.replicas))))
        max_rows = None if status.is_terminal else n_rows
        hint = [Text(self._hint, style="dim")] if self._hint and not status.is_terminal else []
        head = title(status, self._elapsed_s(status.last_at))
        table = replica_table(status, max_rows, width=console.width, more=self._columns)
        parts = [head, *([bar] if bar else []), table, *hint]

        def draw() -> None:
            n_lines = max(0, room - min(n_rows, len(status.replicas)))
            lines = [cut(line) for line in list(self._lines)[-n_lines:]] if n_lines else []
            self._live.update(Group(*parts, *lines), refresh=True)

        self._draw = draw
        draw()

    def print_output(self, line: str) -> None:
        self._lines.append(line)

    def print_line(self, text: str, style: str | None = None) -> None:
        self._hint = ""
        self._print(text, style)

    def _print(self, text: str, style: str | None) -> None:
        self._output.console.print(inert(text), style=style)

    def close(self) -> None:
        self._draw()
        self._live.stop()
