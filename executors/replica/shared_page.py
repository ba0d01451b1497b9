"""A page of memory that a rank shares with its supervisor: its progress, its sections, and the end of its output.

The rank writes and the supervisor reads, except for `announce` and `note_hang`. Neither side waits or locks. A value
may be read while it is half written, but each is written so often that the next read is right. All times are from
`time.monotonic`, which both processes share. The rank uses the page only in the thread that runs the entrypoint, except
for beats and output.
"""

from __future__ import annotations

import math
import mmap
import os
import signal
from collections.abc import Iterator, Sequence
from time import monotonic
from typing import Any

from executors.process import openable_file, private_file, remove_openable
from executors.replica.report_ring import ReportRing, ring_bytes

TAIL_BYTES = 64 * 1024
ATOMIC_LIMIT_S = 60.0  # `atomic` delays the end of a rank by at most this time
HEAD_BYTES = 4096
STEPS = "steps"
"""The section of a rank outside of any named section."""
OTHERS = "others"
"""The section that stands for all names for which the page has no space."""
# The slot of each value in the page, in doubles.
(
    READY, BEAT, TICK, MARK, PROGRESS_MARKS, SAVED_MARKS, SINCE, ROW, LIMIT, UNWATCHED, ATOMIC_SINCE, ATOMIC_LEFT,
    ENDING_AT, NOTICE, STEP, ROUND, MAIN_THREAD, STACKS_FILE, N_STACKS, WRITTEN, HANG_RAISED_AT, CLAIMED,
    N_DECISIONS, BEATEN, LEFT_AT, LEFT_WITH, HAS_RESULT, STORE_FAILED,
    OPENED_AT, FINISHED_AFTER, BEAT_THREAD, HEARTBEAT_THREAD, RAISED_AT, SPEAKER, BEGAN,
    WAITS_FOR, GO_ON, STRIKE, WATCHED, STACKS_WANTED,
) = range(40)  # fmt: skip
OF_PROCESS = (MAIN_THREAD, STACKS_FILE, BEAT_THREAD)
"""The slots that stay when the process of the page runs its next attempt."""
# For each section: a name of 48 bytes, its longest interval, the number of intervals, its longest idle stretch.
ROWS, ROW_SIZE, N_ROWS = 40, 9, 24
LONGEST, COUNT, IDLE = 6, 7, 8
NAME_BYTES = LONGEST * 8
DIAGNOSIS = (ROWS + N_ROWS * ROW_SIZE) * 8  # the other parts of the head of the page
FIRST_ROW = ROWS + LONGEST
NAN = math.nan


class _Number:
    """A number of the page, as an attribute of `SharedPage`."""

    def __init__(self, slot: int) -> None:
        self._slot = slot

    def __get__(self, page: SharedPage, owner: Any = None) -> float:
        return page._numbers[self._slot]

    def __set__(self, page: SharedPage, value: float) -> None:
        page._numbers[self._slot] = value


# More than 20 methods: each field of the page has one place that writes or reads it, and the layout of the memory stays
# in this class. The rank uses one half of the methods, and the supervisor the other half.
class SharedPage:
    """The page of one attempt. The supervisor creates it before it starts the process of the attempt.

    Args:
        after: the page of the attempt before, whose learned intervals are copied. None, the default: there was no
            attempt before.
        watched: the names of the reported numbers that rules are about. None, the default: the run has no rules.
    """

    ready = _Number(READY)
    """1 if the rank has its signal handlers, so that the supervisor may send it their signals."""
    beat = _Number(BEAT)
    """The last time at which a thread of the rank had the GIL."""
    beaten = _Number(BEATEN)
    """The time of the rank's last `heartbeat.json` in the store. Infinity: no more heartbeats come."""
    tick = _Number(TICK)
    """The last time at which the rank's main thread executed bytecode."""
    step = _Number(STEP)
    """The step that the rank has reached. nan if the rank has reported none."""
    round = _Number(ROUND)
    """The round that the rank has reached. nan if the rank has reported none."""
    mark = _Number(MARK)
    """The time of the rank's last progress. 0 if there was none."""
    progress_marks = _Number(PROGRESS_MARKS)
    """The number of the rank's marks of progress."""
    saved_marks = _Number(SAVED_MARKS)
    """The number of times that the rank saved work that its next attempt need not repeat."""
    since = _Number(SINCE)
    """The beginning of the present interval without progress, moved forward by the time in inner sections that have
    ended.
    """
    unwatched = _Number(UNWATCHED)
    """The number of blocks without a watchdog that the rank is in. If it is more than 0, no limit applies."""
    atomic_since = _Number(ATOMIC_SINCE)
    """The time at which the rank entered a block that must not be interrupted, or 0."""
    atomic_left = _Number(ATOMIC_LEFT)
    opened_at = _Number(OPENED_AT)
    """The time at which the rank last opened a DiLoCo. 0 if the rank has opened none."""
    finished_after = _Number(FINISHED_AFTER)
    """The number of marks when the rank's last DiLoCo finished, plus 1. 0 if no DiLoCo has finished."""
    beat_thread = _Number(BEAT_THREAD)
    """The native id of the thread that writes beats into the page. Its activity does not count as activity of the
    rank.
    """
    heartbeat_thread = _Number(HEARTBEAT_THREAD)
    """The native id of the thread that writes heartbeats and measurements. Its activity does not count as activity of
    the rank.
    """
    main_thread = _Number(MAIN_THREAD)
    """The identifier of the main thread, as a dump of the stacks names it."""
    stacks_file = _Number(STACKS_FILE)
    """The descriptor, in the rank, of the file for its stacks, or -1."""
    stacks_wanted = _Number(STACKS_WANTED)
    """1 from the supervisor's request for stacks until the rank has dumped them, or until the supervisor asks by a
    signal instead.
    """
    n_stacks = _Number(N_STACKS)
    """The number of dumps that the supervisor has written to the store."""
    hang_raised_at = _Number(HANG_RAISED_AT)
    """The time at which the rank raised `HangError`, or 0 if it has not."""
    claimed = _Number(CLAIMED)
    """The number of the attempt that the rank has claimed, plus 1. 0 before the claim."""
    n_decisions = _Number(N_DECISIONS)
    """The number of entries of the decision log that the supervisor had read when it started the rank. These entries do
    not block the rank.
    """
    left_at = _Number(LEFT_AT)
    """The time from which the rank only runs its exit functions, or 0."""
    left_with = _Number(LEFT_WITH)
    """The exit code of the rank, set together with `left_at`."""
    has_result = _Number(HAS_RESULT)
    """1 if the entrypoint of the rank has returned a result."""
    store_failed = _Number(STORE_FAILED)
    """1 if the process could not begin, or could not record its outcome, because the run's store failed."""

    raised_at = _Number(RAISED_AT)
    """The time at which an exception of the entrypoint reached the worker, or 0."""
    speaker = _Number(SPEAKER)
    """The pid of the process of a command that reports for the replica, or 0 if there was none."""
    began = _Number(BEGAN)
    """For a process that waits for its next attempt: the time of that attempt's claim, from which measurements
    count.
    """
    waits_for = _Number(WAITS_FOR)
    """The number of the attempt for which the process of a failed attempt waits, or 0."""
    go_on = _Number(GO_ON)
    """The supervisor's answer to the process: the number of the attempt that it must run, -1 if it must end, or 0
    before the answer.
    """
    watched = _Number(WATCHED)
    """The pid of the process of a command that beats and handles the watchdog's signals in the place of the worker, or
    0."""
    strike = _Number(STRIKE)
    """In the page of member 0: the number of the injected fault that another member must trigger now, plus 1. 0: none.
    That member sets it to 0 when it begins.
    """

    reports: ReportRing | None
    """The reports that the rules of the run are about. None: the run has no rules."""

    def __init__(self, after: SharedPage | None = None, watched: Sequence[str] | None = None) -> None:
        n_more = 0 if watched is None else ring_bytes(watched)
        self._use(mmap.mmap(-1, HEAD_BYTES + TAIL_BYTES + n_more))  # shared with forked children
        if watched is not None:
            self.reports = ReportRing.make(memoryview(self._memory)[HEAD_BYTES + TAIL_BYTES :], watched)
        self._rows: dict[str, int] = {}
        self._file = -1
        """The descriptor of the page's file, by which further processes open the page. -1: no file is open."""
        if after is not None:
            rows = slice(ROWS * 8, DIAGNOSIS)
            self._memory[rows] = after._memory[rows]
            self._rows = {name: row for name, row in after._read_rows() if name}
        self._row_of(STEPS)
        self._open = list[tuple[int, float, float]]()
        """The sections around the innermost one: row, limit, and `since` relative to the entry of the next section."""
        self._row = FIRST_ROW
        self._written = self.n_atomic = 0
        # Only the rank's process uses these two.
        self.deferred: BaseException | None = None
        """An exception that the rank raises when it leaves `atomic`."""
        self.knows_of_end = False
        """True if the rank has read that it must end."""
        self.stacks_descriptor = -1
        """This process's descriptor of the file for the rank's stacks, if both sides got it before the start. -1: the
        rank makes the file, and its supervisor opens the file when it needs it."""
        self.stacks_file = -1
        self._begin()

    def _use(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._numbers = memoryview(memory)[:HEAD_BYTES].cast("d")
        more = memoryview(memory)[HEAD_BYTES + TAIL_BYTES :]
        self.reports = ReportRing(more) if len(more) else None

    def _begin(self) -> None:
        self._numbers[ROW], self._numbers[LIMIT] = FIRST_ROW, math.nan
        self._numbers[STEP] = self._numbers[ROUND] = math.nan
        self.since = self.beat = self.beaten = self.tick = monotonic()

    def renew(self) -> None:
        """Begin the page of the next attempt of the same process. The supervisor calls this while the process waits.

        Learned intervals stay, and everything else begins again.
        """
        kept = {slot: self._numbers[slot] for slot in OF_PROCESS}
        for slot in range(ROWS):
            self._numbers[slot] = kept.get(slot, 0.0)
        if self.reports is not None:
            self.reports.clear()
        self.note_hang("")
        self._begin()

    def follow_renewal(self) -> None:
        """Forget the previous attempt of this process, after the supervisor has renewed the page."""
        self._open.clear()
        self._row = FIRST_ROW
        self._written = self.n_atomic = 0
        self.deferred, self.knows_of_end = None, False

    def share(self) -> int:
        """Move the page into a file without a name. Return a descriptor, by which a new process opens the page."""
        if self._file >= 0:
            return os.dup(self._file)
        return self._move(private_file(self._memory[:]))

    def _move(self, file: int) -> int:
        self._use(mmap.mmap(file, len(self._memory)))
        self._file = os.dup(file)  # for the other members of a replica, which open this page, too
        return file

    @property
    def file(self) -> int:
        """The descriptor of the page's file. -1: no file is open."""
        return self._file

    def keep_file(self) -> None:
        """Move the page into a file without a name that stays open, so that other processes can open the page."""
        if self._file < 0:
            os.close(self._move(openable_file(self._memory[:])))

    def remove_name(self) -> None:
        """Remove the name that `keep_file` gave to the page's file, because no further process will open it by name."""
        if self._file >= 0:
            remove_openable(self._file)

    def close_stacks(self) -> None:
        """Close the supervisor's descriptor of the file for the stacks of an ended process."""
        if self.stacks_descriptor >= 0:
            os.close(self.stacks_descriptor)
            self.stacks_descriptor = -1

    def close_file(self) -> None:
        """Close the descriptor of a page that no further process will open."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    @classmethod
    def open(cls, file: int, *, keeps: bool = False) -> SharedPage:
        """Open the page that another process shares, and close the descriptor.

        Args:
            file: the descriptor from `share`.
            keeps: True keeps the descriptor until `close_file`. Default False.
        """
        page = cls()
        page._use(mmap.mmap(file, os.fstat(file).st_size))
        page._rows = {name: row for name, row in page._read_rows() if name}
        if keeps:
            page._file = file
        else:
            os.close(file)
        return page

    def detach(self) -> None:
        """Use a private copy of the page in this process from now on, as in a forked helper of the rank."""
        head = self._memory[:HEAD_BYTES]
        self._use(mmap.mmap(-1, HEAD_BYTES + TAIL_BYTES))  # without the ring: the reports of a helper are not judged
        self._memory[:HEAD_BYTES] = head

    # -- progress, written by the rank
    # -----------------------------------------------------------------------------------

    def progress(self, saved: int = 0, *, step: float | None = None, round_: float | None = None) -> None:
        """Note a mark of progress.

        Args:
            saved: the number of new saves that the next attempt need not repeat. Default 0.
            step: the step that the rank has reached. None, the default: unchanged.
            round_: the round that the rank has reached. None, the default: unchanged.
        """
        numbers, now, row = self._numbers, monotonic(), self._row
        gap = now - numbers[SINCE]
        is_start = row == FIRST_ROW and not numbers[PROGRESS_MARKS]
        if gap > numbers[row] and not is_start:  # the time before the first mark is not an interval without progress
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
        """Note that the rank has opened a DiLoCo. From now on the supervisor expects marks of progress."""
        self._numbers[OPENED_AT] = monotonic()
        self._numbers[FINISHED_AFTER] = 0

    def finish_training(self) -> None:
        """Note that every DiLoCo of the rank has ended. The supervisor expects no marks until the next mark comes."""
        self._numbers[FINISHED_AFTER] = self._numbers[PROGRESS_MARKS] + 1

    def enter(self, name: str, limit_s: float | None = None) -> None:
        """Begin a section, with a limit of its own instead of the limit between steps.

        Args:
            name: the name of the section.
            limit_s: the longest time without progress, in seconds. None, the default: learned by the name.
        """
        numbers, now = self._numbers, monotonic()
        self._open.append((self._row, numbers[LIMIT], numbers[SINCE] - now))
        self._row = row = self._rows.get(name) or self._row_of(name)
        numbers[LIMIT] = NAN if limit_s is None else limit_s
        numbers[SINCE] = now
        numbers[ROW] = row

    def leave(self, *, learns: bool = True) -> None:
        """End the innermost section.

        Args:
            learns: True to learn the limit from the time that the section took. Default True.
        """
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
        """Append output to the tail, which has the last 64 KiB.

        Args:
            data: the bytes that were printed.
        """
        given = memoryview(data).cast("B")
        data = given[-TAIL_BYTES:]
        # Two threads may print at once: each reserves its part of the ring first, and then writes.
        start = max(self._written, int(self._numbers[WRITTEN]))  # the supervisor adds lines, too
        start += len(given) - len(data)
        self._written = end = start + len(data)
        at = start % TAIL_BYTES
        n_first = min(len(data), TAIL_BYTES - at)
        self._memory[HEAD_BYTES + at : HEAD_BYTES + at + n_first] = data[:n_first]
        self._memory[HEAD_BYTES : HEAD_BYTES + len(data) - n_first] = data[n_first:]
        self._numbers[WRITTEN] = end

    # -- read by the supervisor --------------------------------------------------------------------------------------

    def tail(self) -> str:
        """Return the end of the rank's output."""
        written = int(self._numbers[WRITTEN])
        at = written % TAIL_BYTES
        ring = self._memory[HEAD_BYTES : HEAD_BYTES + TAIL_BYTES]
        kept = ring[:at] if written < TAIL_BYTES else ring[at:] + ring[:at]
        return kept.decode(errors="replace")

    @property
    def n_written(self) -> int:
        """The number of bytes of output that the rank has appended to the tail."""
        return int(self._numbers[WRITTEN])

    def output_since(self, n_read: int) -> tuple[bytes, int, int]:
        """Return the output since an earlier look, the number of all bytes so far, and the number of lost ones.

        Args:
            n_read: the number of bytes that were read before.
        """
        written = self.n_written
        n_lost = max(0, written - TAIL_BYTES - n_read)
        first, last = (n_read + n_lost) % TAIL_BYTES, written % TAIL_BYTES
        if written <= n_read:
            return b"", n_read, 0
        ring = self._memory[HEAD_BYTES : HEAD_BYTES + TAIL_BYTES]
        return (ring[first:last] if first < last else ring[first:] + ring[:last]), written, n_lost

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
        """The number of intervals without progress in the section, and the longest in seconds, of all attempts so far.

        A section that waits for other replicas has no intervals. For it, the intervals between steps are returned.
        """
        row = FIRST_ROW if self.limit_s == math.inf else self.current_row
        return int(self._numbers[row + 1]), self._numbers[row]

    @property
    def is_finished(self) -> bool:
        """True if every DiLoCo of the rank has ended, and the rank has made no mark since."""
        return self._numbers[FINISHED_AFTER] == self._numbers[PROGRESS_MARKS] + 1

    @property
    def longest_idle_s(self) -> float:
        """The longest idle time in seconds after which the section still continued, over all attempts so far."""
        return self._numbers[self.current_row - LONGEST + IDLE]

    def note_idle(self, row: int, idle_s: float) -> None:
        """Record that a section was idle and then continued. Only the supervisor calls this.

        Args:
            row: the slot of the section, from `current_row`.
            idle_s: the idle time in seconds.
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
        """Return the fields of an outcome that this page knows, such as `progress_marks` and `reached`."""
        return {
            "progress_marks": int(self.progress_marks),
            "saved_marks": int(self.saved_marks),
            "reached": self.reached,
            "notice": self.notice,
            "stacks": tuple(f"stacks/{number}.txt" for number in range(int(self.n_stacks))),
        }

    def kill_at(self, asked_at: float, grace_s: float) -> float:
        """Return the time at which a rank that was asked to end must be killed.

        A rank within `atomic` gets up to 60 s more.

        Args:
            asked_at: the time of SIGTERM, by `time.monotonic`.
            grace_s: seconds between SIGTERM and SIGKILL.
        """
        latest = asked_at + ATOMIC_LIMIT_S
        since = latest if self.atomic_since else min(max(asked_at, self.atomic_left), latest)
        return since + grace_s

    # -- written by the supervisor -----------------------------------------------------------------------------------

    def announce(self, at: float, notice: int = 0) -> None:
        """Tell the rank the time by which it must have ended.

        Args:
            at: the time by `time.monotonic`.
            notice: the signal that announced the end of its machine. 0, the default: the user stopped the run.
        """
        self._numbers[NOTICE] = notice
        self._numbers[ENDING_AT] = at

    @property
    def ending_at(self) -> float | None:
        """The time by which the rank must have ended, by `time.monotonic`. None: it was not asked to end."""
        return self._numbers[ENDING_AT] or None

    @property
    def notice(self) -> str | None:
        """The name of the signal that announced the end of the machine."""
        number = int(self._numbers[NOTICE])
        return signal.Signals(number).name if number else None

    @property
    def is_stopping(self) -> bool:
        """True if the user stopped the run, so that the rank ends at its next round."""
        return bool(self._numbers[ENDING_AT]) and not self._numbers[NOTICE]

    @property
    def diagnosis(self) -> str:
        """The supervisor's sentence about the hang of the rank. Empty: the rank does not hang."""
        return self._memory[DIAGNOSIS:HEAD_BYTES].rstrip(b"\0").decode(errors="replace")

    def note_hang(self, diagnosis: str) -> None:
        """Note that the rank hangs.

        Args:
            diagnosis: a sentence for the error of the rank. It is cut to the space in the page.
        """
        size = HEAD_BYTES - DIAGNOSIS
        self._memory[DIAGNOSIS:HEAD_BYTES] = diagnosis.encode()[:size].ljust(size, b"\0")

    # -- the rows ----------------------------------------------------------------------------------------------------

    @property
    def current_row(self) -> int:
        """The slot of the intervals of the section that the rank is in."""
        row = self._numbers[ROW]
        # A value outside the rows was read while it was half written.
        return int(row) if FIRST_ROW <= row < FIRST_ROW + N_ROWS * ROW_SIZE else FIRST_ROW

    def _row_of(self, name: str) -> int:
        """Return the slot of a section's intervals. A new section gets a new row."""
        if name not in self._rows:
            n = len(self._rows)
            row_name = name if n < N_ROWS - 1 else OTHERS
            if row_name not in self._rows:
                at = (ROWS + n * ROW_SIZE) * 8
                self._memory[at : at + NAME_BYTES] = row_name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
                self._rows[row_name] = ROWS + n * ROW_SIZE + LONGEST
            return self._rows[row_name]
        return self._rows[name]

    def _read_rows(self) -> Iterator[tuple[str, int]]:
        for row in range(FIRST_ROW, FIRST_ROW + N_ROWS * ROW_SIZE, ROW_SIZE):
            yield self._name_at(row), row

    def _name_at(self, row: int) -> str:
        at = (row - LONGEST) * 8
        return self._memory[at : at + NAME_BYTES].rstrip(b"\0").decode(errors="replace")


class Section:
    """A context manager for a section of a rank's work; see `SharedPage.enter`.

    Args:
        page: the page of the rank.
        name: the name of the section.
        limit_s: the longest time without progress, in seconds. None: learned by the name.
    """

    __slots__ = ("_limit_s", "_name", "_page")

    def __init__(self, page: SharedPage, name: str, limit_s: float | None) -> None:
        self._page, self._name, self._limit_s = page, name, limit_s

    def __enter__(self) -> None:
        self._page.enter(self._name, self._limit_s)

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._page.leave(learns=kind is None)


class Unwatched(Section):
    """A context manager for work without a watchdog. Sections inside it are not watched either.

    Args:
        page: the page of the rank.
    """

    def __init__(self, page: SharedPage) -> None:
        super().__init__(page, "unwatched", math.inf)

    def __enter__(self) -> None:
        super().__enter__()
        self._page.unwatched += 1

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._page.unwatched -= 1
        self._page.leave(learns=False)


class Atomic:
    """A context manager for work that the supervisor must not interrupt, for at most 60 s.

    Args:
        page: the page of the rank.
    """

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
