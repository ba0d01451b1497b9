"""Reads the segments of a run. They are untrusted, so sizes are limited, and the result names bad lines."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from typing import Any, NamedTuple

from executors.errors import CorruptObjectError, StoreError
from executors.metrics.rows import KEY, LARGEST, MAX_NAME, MAX_SECONDS, Left, LeftOut, Numbers, Round, Row, parse_line
from executors.store import Entry, Store
from executors.store.parallel import at_store
from executors.store.records import get_at_most

MAX_SEGMENT_BYTES = 4 << 20  # a writer closes a segment at a quarter of this
MAX_BYTES = 1 << 30  # the most bytes of segments that are read for one run
MAX_NAMES = 1000  # different names of reported numbers in one attempt
MAX_SHOWN = 200  # characters of a key in a message
NUMBERS = frozenset((float, int))
READ_AT_ONCE = 256
MAX_LOOKED_BACK = 8  # segments and attempts that are searched backward for a round

AttemptKey = tuple[int, int]
"""The rank and the number of an attempt."""


class _Segment(NamedTuple):
    """A segment as it appears in the list of the store."""

    of: AttemptKey
    number: int
    entry: Entry


@dataclass
class Lines:
    """The content of the segments of one attempt."""

    rank: int
    attempt: int
    rows: list[Row] = field(default_factory=list)
    """The rows in the order of time."""
    left: list[Left] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _strange: Counter[str] = field(default_factory=Counter)
    _left_out: int = 0
    _names: set[str] = field(default_factory=set)
    _unnamed: set[str] = field(default_factory=set)
    _accepted: set[str] = field(default_factory=set)
    """The names of the numbers in the last line that had numbers."""

    def add(self, key: str, body: bytes) -> None:
        """Parse the lines of a segment, and add them to the rows. Name each line that is refused in `problems`.

        Args:
            key: the key of the segment, for messages.
            body: the bytes of the segment.
        """
        refused = [] if body else [f"{key!r} is empty."]  # a power cut may leave an empty segment
        for number, line in enumerate(_decoded(body), 1):
            if row_like := self._like_before(line):
                self.rows.append(row_like)
                continue
            try:
                if isinstance(line, ValueError | RecursionError):
                    raise CorruptObjectError(f"{key!r}, line {number}, is not JSON.")
                row = parse_line(line, self.rank, self.attempt, f"{key}, line {number}", self._strange)
            except StoreError as error:
                refused.append(str(error))
                continue
            if isinstance(row, Numbers):
                row = self._named(row)
                self.rows.append(row)
                self._accepted = {"t", *row.values}
            elif isinstance(row, Left):
                self.left.append(row)
            elif isinstance(row, LeftOut):
                self._left_out += row.left_out
            else:
                self.rows.append(row)
        if refused:
            more = f" The same holds for {len(refused) - 1} more of its lines." if refused[1:] else ""
            self.problems.append(f"{refused[0]}{more}")

    def finish(self, numbers: Iterable[int]) -> Lines:
        """Return the content with its rows in the order of time, and with missing segments in `problems`.

        More segments can be added to this object later.

        Args:
            numbers: the numbers of the segments that exist.
        """
        self.rows.sort(key=lambda row: row.t)
        return Lines(self.rank, self.attempt, self.rows, self.left, [*self.problems, *self._problems_of_all(numbers)])

    def _problems_of_all(self, numbers: Iterable[int]) -> Iterator[str]:
        """Yield the problems that only all segments together show."""
        whose = f"Rank {self.rank}, attempt {self.attempt}:"
        gap = next((number for number, there in enumerate(sorted({*numbers})) if number != there), None)
        if gap is not None:
            yield f"{whose} segments are missing, the first is number {gap}."
        if self._left_out:
            yield f"{whose} {self._left_out} lines were dropped, because no segment could be written."
        for name, n in sorted(self._strange.items())[:10]:
            yield f"{whose} {name!r} is not finite, or beyond {LARGEST:g}, in {n} lines."
        if self._unnamed:
            limits = f"beyond {MAX_NAMES}, or longer than {MAX_NAME} characters,"
            yield f"{whose} {len(self._unnamed)} names of numbers {limits} are left out."

    def _like_before(self, line: Any) -> Numbers | None:
        """Parse a line quickly if it has the same keys as the line before, as almost all lines do."""
        if line.__class__ is not dict or line.keys() != self._accepted:
            return None
        values = line.values()
        try:
            if not NUMBERS.issuperset(map(type, values)) or not 0 <= line["t"] <= MAX_SECONDS:
                return None
            if not math.fsum(map(abs, values)) < LARGEST:
                return None  # a value is not finite, or too large
        except OverflowError:  # the integer is too large for a float
            return None
        return Numbers(rank=self.rank, attempt=self.attempt, t=line.pop("t"), values=line)

    def _named(self, row: Numbers) -> Numbers:
        """Count the names of a row's numbers.

        Remove numbers whose names are too long, or of which there are too many.
        """
        for name in row.values:
            if name not in self._names:
                fits = len(self._names) < MAX_NAMES and len(name) <= MAX_NAME
                (self._names if fits else self._unnamed).add(name)
        if not self._unnamed:
            return row
        kept = {name: value for name, value in row.values.items() if name in self._names}
        return replace(row, values=kept)


@dataclass(frozen=True)
class Measured:
    """The parsed segments of all attempts of a run."""

    lines: Mapping[AttemptKey, Lines]
    problems: list[str]
    """A sentence for each object that is not a segment, and for each part that is left out."""
    is_whole: bool
    """True if all segments were read."""


class SegmentBudget:
    """The room for parsed segments in a process, in bytes of their text. Parsed, they take about six times as much.

    Args:
        n_bytes: the size of the room.

    Example:
        budget = SegmentBudget(64 << 20)
        budget.take(1 << 20)  # True
    """

    def __init__(self, n_bytes: int) -> None:
        self._left = n_bytes
        self._lock = threading.Lock()

    def take(self, n_bytes: int) -> bool:
        """Take a part of the room. Return False if it is not available.

        Args:
            n_bytes: the size of the part. A negative one gives a part back.
        """
        with self._lock:
            if n_bytes > self._left:
                return False
            self._left -= n_bytes
            return True


class ParsedSegments:
    """The parsed segments of one run, for a process that reads the run again and again. Segments never change.

    Args:
        budget: the room that all runs of the process share. Attempts that do not fit are parsed at each read.

    Example:
        parsed = ParsedSegments(SegmentBudget(64 << 20))
        read_segments(store, "brave-otter-7f3a", parsed=parsed)
    """

    def __init__(self, budget: SegmentBudget) -> None:
        self._budget = budget
        self._lock = threading.Lock()
        self._is_forgotten = False
        self._lines: dict[AttemptKey, tuple[list[int], int, Lines]] = {}
        """The numbers of the parsed segments of each attempt, the bytes of their text, and their lines."""

    def take(self, of: AttemptKey, numbers: Sequence[int]) -> tuple[Lines, int]:
        """Remove and return the lines of an attempt that begins with the parsed segments, and their number.

        Args:
            of: the attempt.
            numbers: the numbers of all its segments, in order.
        """
        with self._lock:
            known, n_bytes, lines = self._lines.pop(of, ([], 0, Lines(*of)))
        self._budget.take(-n_bytes)
        if known == [*numbers[: len(known)]]:
            return lines, len(known)
        return Lines(*of), 0

    def keep(self, of: AttemptKey, numbers: Sequence[int], n_bytes: int, lines: Lines) -> None:
        """Keep the lines of an attempt, if there is room.

        Args:
            of: the attempt.
            numbers: the numbers of its segments, in order.
            n_bytes: the bytes of their text.
            lines: the lines.
        """
        with self._lock:
            if not self._is_forgotten and self._budget.take(n_bytes):
                self._lines[of] = ([*numbers], n_bytes, lines)

    def forget(self) -> None:
        """Forget all segments, and keep none from now on. A read in another thread may continue."""
        with self._lock:
            self._is_forgotten = True
            self._budget.take(-sum(n_bytes for _, n_bytes, _ in self._lines.values()))
            self._lines.clear()


def read_segments(
    store: Store, run_id: str, kept: dict[str, memoryview] | None = None, parsed: ParsedSegments | None = None
) -> Measured:
    """Read the segments of a run. If they have more than `MAX_BYTES`, read a part of them, spread over the whole run.

    Args:
        store: the store of the run.
        run_id: the run.
        kept: the bytes of segments that were read before, by key. Segments never change. This call adds the segments
            that it reads, and removes the segments that it leaves out.
        parsed: the segments that earlier calls have parsed. Default: each segment is parsed.
    """
    listed, problems = _list(store, f"{run_id}/metrics/")
    chosen = _thin(listed)
    if is_thin := len(chosen) < len(listed):
        problems.append(
            f"{len(listed) - len(chosen)} of {len(listed)} segments are left out: together they have more than "
            f"{MAX_BYTES} bytes. Sums are of the others; goodput, and what became of the work, are not known."
        )
    if is_thin and kept is not None:
        for key in kept.keys() - {each.entry.key for each in chosen}:
            del kept[key]

    def read(segment: _Segment) -> memoryview | StoreError:
        key = segment.entry.key
        try:
            if kept is not None and key in kept:
                return kept[key]
            body = get_at_most(store, key, MAX_SEGMENT_BYTES)
            if kept is not None:
                kept[key] = body
            return body
        except StoreError as error:
            return error

    found, damaged = dict[AttemptKey, Lines](), set[AttemptKey]()
    its = dict[AttemptKey, list[_Segment]]()
    for segment in chosen:
        its.setdefault(segment.of, []).append(segment)
    new = chosen
    if parsed is not None:
        begun = {of: parsed.take(of, [each.number for each in some]) for of, some in its.items()}
        found = {of: lines for of, (lines, _) in begun.items()}
        known = {each.entry.key for of, some in its.items() for each in some[: begun[of][1]]}
        new = [each for each in chosen if each.entry.key not in known]
    for start in range(0, len(new), READ_AT_ONCE):
        part = new[start : start + READ_AT_ONCE]
        for segment, body in zip(part, at_store(store, read, part), strict=True):
            lines = found.setdefault(segment.of, Lines(*segment.of))
            if isinstance(body, StoreError):
                lines.problems.append(str(body))
                damaged.add(segment.of)  # the next read may succeed
            else:
                lines.add(segment.entry.key, bytes(body))
    if parsed is not None:
        for of in its.keys() - damaged:
            sizes = sum(each.entry.size_bytes for each in its[of])
            parsed.keep(of, [each.number for each in its[of]], sizes, found[of])
    numbers = dict[AttemptKey, list[int]]()
    for segment in listed:
        numbers.setdefault(segment.of, []).append(segment.number)
    return Measured({key: lines.finish(numbers[key]) for key, lines in found.items()}, problems, is_whole=not is_thin)


def newest_rounds(store: Store, run_id: str, newest: Sequence[AttemptKey], most: int) -> list[Round]:
    """Return the last rounds of some ranks, from the newest segment of each rank that has any.

    Only the segments of each rank's last attempts are listed, so the length of the run does not matter.

    Args:
        newest: each rank's newest attempt.
        most: the largest number of rounds of each rank.

    Raises:
        StoreError: the store does not answer.
    """

    def of_rank(key: AttemptKey) -> list[Round]:
        rank, last = key
        attempts = ((rank, number) for number in range(last, max(-1, last - MAX_LOOKED_BACK), -1))
        backwards = (segment for of in attempts for segment in reversed(_list_attempt(store, run_id, of)))
        for segment in islice(backwards, MAX_LOOKED_BACK):
            lines = Lines(*segment.of)
            lines.add(segment.entry.key, bytes(get_at_most(store, segment.entry.key, MAX_SEGMENT_BYTES)))
            if rounds := [row for row in lines.finish(()).rows if isinstance(row, Round)]:
                return rounds[-most:]
        return []

    return [row for rounds in at_store(store, of_rank, newest) for row in rounds]


def sample_numbers(store: Store, run_id: str, most: int) -> list[Numbers]:
    """Return numbers that one replica reported, from a few segments that are spread over the whole run.

    The replica is the one with the most segments.

    Args:
        store: the store of the run.
        run_id: the run.
        most: the largest number of segments to read.

    Raises:
        StoreError: the store does not answer.

    Example:
        losses = [row.values.get("loss") for row in sample_numbers(store, "brave-otter-7f3a", 12)]
    """
    listed, _ = _list(store, f"{run_id}/metrics/")
    counts = Counter(each.of[0] for each in listed)
    if not counts:
        return []
    rank = min(counts, key=lambda rank: (-counts[rank], rank))
    its = sorted((each for each in listed if each.of[0] == rank), key=lambda each: (each.of, each.number))
    places = sorted({round(at * (len(its) - 1) / max(1, most - 1)) for at in range(most)})

    def read(segment: _Segment) -> list[Row]:
        lines = Lines(*segment.of)
        with contextlib.suppress(StoreError):  # a damaged segment leaves a gap
            lines.add(segment.entry.key, bytes(get_at_most(store, segment.entry.key, MAX_SEGMENT_BYTES)))
        return lines.finish(()).rows

    found = at_store(store, read, [its[place] for place in places])
    return [row for rows in found for row in rows if isinstance(row, Numbers)]


def _list_attempt(store: Store, run_id: str, of: AttemptKey) -> list[_Segment]:
    """List the segments of one attempt, ordered by number."""
    listed, _ = _list(store, f"{run_id}/metrics/", "{:04d}/{}/".format(*of))
    return sorted(listed, key=lambda each: each.number)


def _list(store: Store, prefix: str, whose: str = "") -> tuple[list[_Segment], list[str]]:
    """List the segments of a run or of one attempt. Objects that are not segments are returned as problems."""
    found, foreign = list[_Segment](), list[str]()
    for entry in store.list(prefix + whose):
        if named := KEY.fullmatch(entry.key, len(prefix)):
            found.append(_Segment((int(named[1]), int(named[2])), int(named[3]), entry))
        else:
            foreign.append(entry.key)
    if not foreign:
        return found, []
    more = f", nor are {len(foreign) - 1} more objects" if foreign[1:] else ""
    return found, [f"{foreign[0][:MAX_SHOWN]!r} is not a segment{more}."]


def _thin(listed: Sequence[_Segment]) -> list[_Segment]:
    """Return the segments ordered by age, over all attempts.

    If they have too many bytes, return an evenly spread part.

    The part is every second segment of each attempt, or every fourth, and so on, and the last segment of each attempt.
    So a run that continues is read in the same way until it has twice as many segments. No segment that was left out
    before must be read.
    """
    chosen = sorted(listed, key=lambda each: (each.number, each.of))
    last = {each.of: each.number for each in chosen}
    every, most = 1, max(last.values(), default=0)
    while sum(each.entry.size_bytes for each in chosen) > MAX_BYTES and every <= most:
        every *= 2
        chosen = [each for each in chosen if each.number % every == 0 or each.number == last[each.of]]
    sizes = accumulate(each.entry.size_bytes for each in chosen)
    return [each for each, until_bytes in zip(chosen, sizes, strict=True) if until_bytes <= MAX_BYTES]


def _decoded(body: bytes) -> Iterator[Any]:
    """Yield the JSON value of each line of a segment, or the error for a line that is not JSON."""
    lines = body.splitlines()
    try:
        together = json.loads(b"[%b]" % b",".join(lines))  # faster than one call per line: a third of the time
    except (ValueError, RecursionError):
        together = []
    if len(together) == len(lines):  # otherwise a line has no value, or more than one
        yield from together
        return
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            yield error
