"""A page of memory that a rank shares with its supervisor: what it does, for how long, and what it printed last.

The rank writes and the supervisor reads, but for `announce` and `note_hang`. No side waits or locks: each value is
written whole, again and again, so that one that was torn is soon repaired. Times are of `time.monotonic`, one clock for
both. Everything that the rank does with it is done in the thread that runs the entrypoint, but for beats and output.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
from collections.abc import Iterator
from time import monotonic
from typing import Any

from executors.process import private_file

TAIL_BYTES = 64 * 1024
ATOMIC_LIMIT_S = 60.0  # how long `atomic` keeps off what ends a rank
HEAD_BYTES = 4096
STEPS = "steps"
"""The section that a rank is in when it is in none."""
OTHERS = "others"
"""The section of all names for which there was no room."""
# The slot of each value in the page, in doubles.
(
    READY, BEAT, TICK, MARK, PROGRESS_MARKS, SAVED_MARKS, SINCE, ROW, LIMIT, UNWATCHED, ATOMIC_SINCE, ATOMIC_LEFT,
    ENDING_AT, NOTICE, STEP, ROUND, MAIN_THREAD, STACKS_FILE, N_STACKS, WRITTEN, HANG_RAISED_AT, CLAIMED,
    N_DECISIONS, BEATEN, LEFT_AT, LEFT_WITH, HAS_RESULT, STORE_FAILED,
    OPENED_AT, FINISHED_AFTER, BEAT_THREAD, HEARTBEAT_THREAD,
) = range(32)  # fmt: skip
# For each section: a name of 48 bytes, its longest interval, the number of intervals, its longest idle stretch.
ROWS, ROW_SIZE, N_ROWS = 40, 9, 24
LONGEST, COUNT, IDLE = 6, 7, 8
NAME_BYTES = LONGEST * 8
DIAGNOSIS = (ROWS + N_ROWS * ROW_SIZE) * 8  # the rest of the head
FIRST_ROW = ROWS + LONGEST
NAN = math.nan


class _Number:
    """A double of the page."""

    def __init__(self, slot: int) -> None:
        self._slot = slot

    def __get__(self, page: SharedPage, owner: Any = None) -> float:
        return page._numbers[self._slot]

    def __set__(self, page: SharedPage, value: float) -> None:
        page._numbers[self._slot] = value


class SharedPage:
    """Made before the fork of an attempt's process; both sides have it from then on.

    Args:
        after: the page of the attempt before, whose intervals are kept.
    """

    ready = _Number(READY)
    """1: the rank has its signal handlers, so that it may be sent their signals."""
    beat = _Number(BEAT)
    """When a thread of the rank last had the GIL."""
    beaten = _Number(BEATEN)
    """When the rank's last `heartbeat.json` was in the store. Infinity: no more heartbeats come."""
    tick = _Number(TICK)
    """When the rank's main thread last executed bytecode."""
    step = _Number(STEP)
    """The step that the rank has reached; nan if it has reported none."""
    mark = _Number(MARK)
    """When the rank last made progress, or 0 if it never did."""
    progress_marks = _Number(PROGRESS_MARKS)
    saved_marks = _Number(SAVED_MARKS)
    """How often it left something that its next attempt need not do again."""
    since = _Number(SINCE)
    """Since when it has made no progress in this section: from the last mark on, without the sections between."""
    unwatched = _Number(UNWATCHED)
    """If it is more than 0, no limit applies."""
    atomic_since = _Number(ATOMIC_SINCE)
    """Since when it is in a section that must not be interrupted, or 0."""
    atomic_left = _Number(ATOMIC_LEFT)
    opened_at = _Number(OPENED_AT)
    """The time when the rank last opened a DiLoCo; 0 if it has opened none."""
    finished_after = _Number(FINISHED_AFTER)
    """One more than the number of marks when the rank's last DiLoCo finished; 0 if none has."""
    beat_thread = _Number(BEAT_THREAD)
    """The native id of the thread that beats: its work is not the rank's."""
    heartbeat_thread = _Number(HEARTBEAT_THREAD)
    """The native id of the thread that writes heartbeats and measurements to the store: as `beat_thread`."""
    main_thread = _Number(MAIN_THREAD)
    """The main thread's ident, by which a dump of the stacks names it."""
    stacks_file = _Number(STACKS_FILE)
    """The descriptor, in the rank, of the file for its stacks, or -1."""
    n_stacks = _Number(N_STACKS)
    """How many dumps its supervisor has kept."""
    hang_raised_at = _Number(HANG_RAISED_AT)
    """When the rank raised `HangError`, or 0 if it has not."""
    claimed = _Number(CLAIMED)
    """One more than the number of the attempt that the rank has claimed, or 0."""
    n_decisions = _Number(N_DECISIONS)
    """How many entries of the run's log its supervisor had read when it started the rank, which they do not bar."""
    left_at = _Number(LEFT_AT)
    """When the rank had only to run its functions at exit, or 0 while it has more to do."""
    left_with = _Number(LEFT_WITH)
    """The exit code that it then leaves with."""
    has_result = _Number(HAS_RESULT)
    """1: its entrypoint has returned a result."""
    store_failed = _Number(STORE_FAILED)
    """1 if the run's store failed, so that its process could not begin, or could not record its end."""

    def __init__(self, after: SharedPage | None = None) -> None:
        self._memory = mmap.mmap(-1, HEAD_BYTES + TAIL_BYTES)  # shared with what is forked from here
        self._numbers = memoryview(self._memory)[:HEAD_BYTES].cast("d")
        self._rows: dict[str, int] = {}
        if after is not None:
            rows = slice(ROWS * 8, DIAGNOSIS)
            self._memory[rows] = after._memory[rows]
            self._rows = {name: row for name, row in after._read_rows() if name}
        self._row_of(STEPS)
        self._open = list[tuple[int, float, float]]()
        """The sections around the innermost one: row and limit, and since, from when the one in it was entered on."""
        self._row = FIRST_ROW
        self._written = self.n_atomic = 0
        # Used in the rank's process alone.
        self.deferred: BaseException | None = None
        """Raised when it leaves `atomic`."""
        self.knows_of_end = False
        """Whether it has read that it must end."""
        self._numbers[ROW], self._numbers[LIMIT] = FIRST_ROW, math.nan
        self._numbers[STEP] = self._numbers[ROUND] = math.nan
        self.stacks_file = -1
        self.since = self.beat = self.beaten = self.tick = monotonic()

    def share(self) -> int:
        """Move the page into a file without a name; return its descriptor, with which a new process opens the page."""
        file = private_file(self._memory[:])
        self._memory = mmap.mmap(file, HEAD_BYTES + TAIL_BYTES)
        self._numbers = memoryview(self._memory)[:HEAD_BYTES].cast("d")
        return file

    @classmethod
    def open(cls, file: int) -> SharedPage:
        """Return the page that another process shares by a descriptor, with all that is in it; close the descriptor."""
        page = cls()
        page._memory = mmap.mmap(file, HEAD_BYTES + TAIL_BYTES)
        page._numbers = memoryview(page._memory)[:HEAD_BYTES].cast("d")
        page._rows = {name: row for name, row in page._read_rows() if name}
        os.close(file)
        return page

    def detach(self) -> None:
        """Share nothing any more, in this process: what is written from here on is its own."""
        head = self._memory[:HEAD_BYTES]
        self._memory = mmap.mmap(-1, HEAD_BYTES + TAIL_BYTES)
        self._memory[:HEAD_BYTES] = head
        self._numbers = memoryview(self._memory)[:HEAD_BYTES].cast("d")

    # -- progress, by the rank ---------------------------------------------------------------------------------------

    def progress(self, saved: int = 0, *, step: float | None = None, round_: float | None = None) -> None:
        """Note that the rank made progress, how far it is, and what of it the next attempt need not do again."""
        numbers, now, row = self._numbers, monotonic(), self._row
        gap = now - numbers[SINCE]
        is_start = row == FIRST_ROW and not numbers[PROGRESS_MARKS]
        if gap > numbers[row] and not is_start:  # the time before the first mark does not count
            numbers[row] = gap
        numbers[row + 1] += 1
        numbers[PROGRESS_MARKS] += 1
        numbers[MARK] = numbers[SINCE] = now
        if saved:
            numbers[SAVED_MARKS] += saved
        if step is not None:
            numbers[STEP] = step
        if round_ is not None:
            numbers[ROUND] = round_

    def open_training(self) -> None:
        """Note that the rank has opened a DiLoCo: from here on it owes marks of progress."""
        self._numbers[OPENED_AT] = monotonic()
        self._numbers[FINISHED_AFTER] = 0

    def finish_training(self) -> None:
        """Note that every DiLoCo of the rank has ended. It owes no more marks; the next mark undoes this."""
        self._numbers[FINISHED_AFTER] = self._numbers[PROGRESS_MARKS] + 1

    def enter(self, name: str, limit_s: float | None = None) -> None:
        """Begin a section, in which its limit counts instead of the steps' limit.

        Args:
            limit_s: how long it may continue without progress. None: learned.
        """
        numbers, now = self._numbers, monotonic()
        self._open.append((self._row, numbers[LIMIT], numbers[SINCE] - now))
        self._row = row = self._rows.get(name) or self._row_of(name)
        numbers[LIMIT] = NAN if limit_s is None else limit_s
        numbers[SINCE] = now
        numbers[ROW] = row

    def leave(self, *, learns: bool = True) -> None:
        """End the innermost section: how long it took tells how long it may take."""
        numbers, now, row = self._numbers, monotonic(), self._row
        if learns:
            gap = now - numbers[SINCE]
            if gap > numbers[row]:
                numbers[row] = gap
            numbers[row + 1] += 1
        self._row, limit, since = self._open.pop()
        since, mark = since + now, numbers[MARK]
        numbers[SINCE] = since if since > mark else mark
        numbers[LIMIT] = limit
        numbers[ROW] = self._row

    def write_tail(self, data: Any) -> None:
        """Keep the end of what is printed."""
        data = memoryview(data).cast("B")[-TAIL_BYTES:]
        # In one go between two threads: reserved first, then written.
        start = max(self._written, int(self._numbers[WRITTEN]))  # its supervisor adds how it ended
        self._written = end = start + len(data)
        at = start % TAIL_BYTES
        n_first = min(len(data), TAIL_BYTES - at)
        self._memory[HEAD_BYTES + at : HEAD_BYTES + at + n_first] = data[:n_first]
        self._memory[HEAD_BYTES : HEAD_BYTES + len(data) - n_first] = data[n_first:]
        self._numbers[WRITTEN] = end

    # -- read by the supervisor --------------------------------------------------------------------------------------

    def tail(self) -> str:
        """Return the end of what the rank printed."""
        written = int(self._numbers[WRITTEN])
        at = written % TAIL_BYTES
        ring = self._memory[HEAD_BYTES:]
        kept = ring[:at] if written < TAIL_BYTES else ring[at:] + ring[:at]
        return kept.decode(errors="replace")

    @property
    def section(self) -> str:
        """The innermost section that the rank is in."""
        return self._name_at(self.current_row)

    @property
    def limit_s(self) -> float | None:
        """The limit that was given for the section. None if it is learned, infinity if the section waits for others."""
        limit = self._numbers[LIMIT]
        return None if math.isnan(limit) else limit

    @property
    def intervals(self) -> tuple[int, float]:
        """How many intervals without progress there were in the section, and the longest, in the attempts so far.

        In a section that waits for others, the steps' limits count.
        """
        row = FIRST_ROW if self.limit_s == math.inf else self.current_row
        return int(self._numbers[row + 1]), self._numbers[row]

    @property
    def is_finished(self) -> bool:
        """True if every DiLoCo of the rank has ended, and the rank has made no mark since."""
        return self._numbers[FINISHED_AFTER] == self._numbers[PROGRESS_MARKS] + 1

    @property
    def longest_idle_s(self) -> float:
        """The longest time in seconds for which a section was idle before it continued, in the attempts so far."""
        return self._numbers[self.current_row - LONGEST + IDLE]

    def note_idle(self, row: int, idle_s: float) -> None:
        """Record that a section was idle and then continued. Called by the supervisor alone, which measures it.

        Args:
            row: the section, by `current_row`.
            idle_s: for how long, in seconds.
        """
        at = row - LONGEST + IDLE
        if idle_s > self._numbers[at]:
            self._numbers[at] = idle_s

    @property
    def reached(self) -> dict[str, float] | None:
        """The `round` and `step` of the rank's last report."""
        found = {"round": self._numbers[ROUND], "step": self._numbers[STEP]}
        return {name: value for name, value in found.items() if not math.isnan(value)} or None

    def outcome_fields(self) -> dict[str, Any]:
        """Return the fields of an outcome that the page has, as in `progress_marks` and `reached`."""
        return {
            "progress_marks": int(self.progress_marks),
            "saved_marks": int(self.saved_marks),
            "reached": self.reached,
            "notice": self.notice,
            "stacks": tuple(f"stacks/{number}.txt" for number in range(int(self.n_stacks))),
        }

    def kill_at(self, asked_at: float, grace_s: float) -> float:
        """Return when a rank that was asked to end is killed: what it does in `atomic` keeps that off for 60 s."""
        latest = asked_at + ATOMIC_LIMIT_S
        since = latest if self.atomic_since else min(max(asked_at, self.atomic_left), latest)
        return since + grace_s

    # -- written by the supervisor -----------------------------------------------------------------------------------

    def announce(self, at: float, notice: int = 0) -> None:
        """Say when the rank is to have ended.

        Args:
            at: by `time.monotonic`.
            notice: the signal that announced the end of its machine, or 0 if the user stopped the run.
        """
        self._numbers[NOTICE] = notice
        self._numbers[ENDING_AT] = at

    @property
    def ending_at(self) -> float | None:
        """When the rank is to have ended, by `time.monotonic`."""
        return self._numbers[ENDING_AT] or None

    @property
    def notice(self) -> str | None:
        """The name of the signal that announced the end of the machine."""
        number = int(self._numbers[NOTICE])
        return signal.Signals(number).name if number else None

    @property
    def is_stopping(self) -> bool:
        """Whether the user stopped the run, so that it ends at its next round."""
        return bool(self._numbers[ENDING_AT]) and not self._numbers[NOTICE]

    @property
    def diagnosis(self) -> str:
        """Why the supervisor takes the rank for one that hangs."""
        return self._memory[DIAGNOSIS:HEAD_BYTES].rstrip(b"\0").decode(errors="replace")

    def note_hang(self, diagnosis: str) -> None:
        """Say why the rank is taken for one that hangs."""
        size = HEAD_BYTES - DIAGNOSIS
        self._memory[DIAGNOSIS:HEAD_BYTES] = diagnosis.encode()[:size].ljust(size, b"\0")

    # -- the rows ----------------------------------------------------------------------------------------------------

    @property
    def current_row(self) -> int:
        """Where the page keeps the intervals of the section that the rank is in."""
        row = self._numbers[ROW]
        return int(row) if FIRST_ROW <= row < FIRST_ROW + N_ROWS * ROW_SIZE else FIRST_ROW  # torn

    def _row_of(self, name: str) -> int:
        """Return where a section's intervals are, having made a row for it."""
        if name not in self._rows:
            n = len(self._rows)
            kept = name if n < N_ROWS - 1 else OTHERS
            if kept not in self._rows:
                at = (ROWS + n * ROW_SIZE) * 8
                self._memory[at : at + NAME_BYTES] = kept.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
                self._rows[kept] = ROWS + n * ROW_SIZE + LONGEST
            return self._rows[kept]
        return self._rows[name]

    def _read_rows(self) -> Iterator[tuple[str, int]]:
        for row in range(FIRST_ROW, FIRST_ROW + N_ROWS * ROW_SIZE, ROW_SIZE):
            yield self._name_at(row), row

    def _name_at(self, row: int) -> str:
        at = (row - LONGEST) * 8
        return self._memory[at : at + NAME_BYTES].rstrip(b"\0").decode(errors="replace")


class Section:
    """A section of a rank's work, as a context."""

    __slots__ = ("_limit_s", "_name", "_page")

    def __init__(self, page: SharedPage, name: str, limit_s: float | None) -> None:
        self._page, self._name, self._limit_s = page, name, limit_s

    def __enter__(self) -> None:
        self._page.enter(self._name, self._limit_s)

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._page.leave(learns=kind is None)


class Unwatched(Section):
    """A section in which the rank is not judged, nor in those inside it."""

    def __init__(self, page: SharedPage) -> None:
        super().__init__(page, "unwatched", math.inf)

    def __enter__(self) -> None:
        super().__enter__()
        self._page.unwatched += 1

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._page.unwatched -= 1
        self._page.leave(learns=False)


class Atomic:
    """A context that must not be interrupted."""

    def __init__(self, page: SharedPage) -> None:
        self._page = page

    def __enter__(self) -> None:
        page = self._page
        page.n_atomic += 1
        if page.n_atomic == 1:
            page.atomic_since = monotonic()

    def __exit__(self, *_: Any) -> None:
        page = self._page
        page.n_atomic -= 1
        if page.n_atomic:
            return
        page.atomic_left, page.atomic_since = monotonic(), 0.0
        error, page.deferred = page.deferred, None
        if error is not None:
            page.hang_raised_at = page.atomic_left
            raise error
