"""Reading the segments of a run: anybody may have written them, so all is bounded, and what does not fit is named."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from executors.errors import CorruptObjectError, StoreError
from executors.metrics.rows import KEY, LARGEST, MAX_NAME, MAX_SECONDS, Left, LeftOut, Numbers, Round, Row, parse_line
from executors.store import Entry, Store
from executors.store.parallel import at_store
from executors.store.records import get_at_most

MAX_SEGMENT_BYTES = 4 << 20  # a writer closes one at a quarter of it
MAX_BYTES = 1 << 30  # of a run
MAX_NAMES = 1000  # of reported numbers, in an attempt
MAX_SHOWN = 200  # characters of a key
NUMBERS = frozenset((float, int))
READ_AT_ONCE = 256
MAX_LOOKED_BACK = 8  # segments, for a round

AttemptKey = tuple[int, int]
"""Rank and attempt."""


@dataclass
class Lines:
    """What the segments of one attempt hold."""

    rank: int
    attempt: int
    rows: list[Row] = field(default_factory=list)
    """In the order of time."""
    left: list[Left] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    _strange: Counter[str] = field(default_factory=Counter)
    _left_out: int = 0
    _names: set[str] = field(default_factory=set)
    _unnamed: set[str] = field(default_factory=set)
    _accepted: set[str] = field(default_factory=set)
    """The keys of the last line of numbers."""

    def add(self, key: str, body: bytes) -> None:
        """Take a segment's lines."""
        refused = [] if body else [f"{key!r} is empty."]  # as after a power cut
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
            more = f" So it is with {len(refused) - 1} more of its lines." if refused[1:] else ""
            self.problems.append(f"{refused[0]}{more}")

    def finish(self, numbers: Iterable[int]) -> Lines:
        """Put the rows into the order of time, and name what is missing; `numbers` are those of the segments."""
        self.rows.sort(key=lambda row: row.t)
        whose = f"Rank {self.rank}, attempt {self.attempt}:"
        gap = next((number for number, there in enumerate(sorted({*numbers})) if number != there), None)
        if gap is not None:
            self.problems.append(f"{whose} segments are missing, the first is number {gap}.")
        if self._left_out:
            self.problems.append(f"{whose} {self._left_out} lines were dropped, because no segment could be written.")
        for name, n in sorted(self._strange.items())[:10]:
            self.problems.append(f"{whose} {name!r} is not finite, or beyond {LARGEST:g}, in {n} lines.")
        if self._unnamed:
            limits = f"beyond {MAX_NAMES}, or longer than {MAX_NAME} characters,"
            self.problems.append(f"{whose} {len(self._unnamed)} names of numbers {limits} are left out.")
        return self

    def _like_before(self, line: Any) -> Numbers | None:
        """Return the row that a line is, if its keys are those of the last one, as it is with almost all; quickly."""
        if line.__class__ is not dict or line.keys() != self._accepted:
            return None
        values = line.values()
        try:
            if not NUMBERS.issuperset(map(type, values)) or not 0 <= line["t"] <= MAX_SECONDS:
                return None
            if not math.fsum(map(abs, values)) < LARGEST:
                return None  # a value is not finite, or too large
        except OverflowError:  # an integer beyond all floats
            return None
        return Numbers(rank=self.rank, attempt=self.attempt, t=line.pop("t"), values=line)

    def _named(self, row: Numbers) -> Numbers:
        """Note the names of a row's numbers; leave those out that are too many or too long."""
        for name in row.values:
            if name not in self._names:
                fits = len(self._names) < MAX_NAMES and len(name) <= MAX_NAME
                (self._names if fits else self._unnamed).add(name)
        if not self._unnamed:
            return row
        kept = {name: value for name, value in row.values.items() if name in self._names}
        return replace(row, values=kept)


def read_segments(
    store: Store, run_id: str, kept: dict[str, memoryview] | None = None
) -> tuple[dict[AttemptKey, Lines], list[str]]:
    """Read all segments of a run; return the lines of each attempt, and problems with what is no segment.

    Args:
        kept: segments that were read before, by key: they never change. Those that are read now are added.
    """
    chosen, problems = _choose(store, run_id)

    def read(entry: Entry) -> memoryview | StoreError:
        try:
            if kept is not None and entry.key in kept:
                return kept[entry.key]
            body = get_at_most(store, entry.key, MAX_SEGMENT_BYTES)
            if kept is not None:
                kept[entry.key] = body
            return body
        except StoreError as error:
            return error

    found, numbers = dict[AttemptKey, Lines](), dict[AttemptKey, list[int]]()
    for start in range(0, len(chosen), READ_AT_ONCE):
        part = chosen[start : start + READ_AT_ONCE]
        bodies = at_store(store, read, [entry for _, _, entry in part])
        for (key, number, entry), body in zip(part, bodies, strict=True):
            lines = found.setdefault(key, Lines(*key))
            numbers.setdefault(key, []).append(number)
            if isinstance(body, StoreError):
                lines.problems.append(str(body))
            else:
                lines.add(entry.key, bytes(body))
    return {key: lines.finish(numbers[key]) for key, lines in found.items()}, problems


def newest_rounds(store: Store, run_id: str, most_ranks: int, most_rounds: int) -> list[Round]:
    """Return the last rounds of the first ranks: those in the newest segment of each that has any.

    Raises:
        StoreError: the store does not answer.
    """
    chosen, _ = _choose(store, run_id)
    by_rank = dict[int, list[tuple[int, Entry]]]()
    for (rank, attempt), _, entry in sorted(chosen, key=lambda each: each[:2]):
        by_rank.setdefault(rank, []).append((attempt, entry))
    found: list[Round] = []
    for rank, entries in [*by_rank.items()][:most_ranks]:
        for attempt, entry in entries[: -1 - MAX_LOOKED_BACK : -1]:
            lines = Lines(rank, attempt)
            lines.add(entry.key, bytes(get_at_most(store, entry.key, MAX_SEGMENT_BYTES)))
            if rounds := [row for row in lines.finish(()).rows if isinstance(row, Round)]:
                found += rounds[-most_rounds:]
                break
    return found


def _choose(store: Store, run_id: str) -> tuple[list[tuple[AttemptKey, int, Entry]], list[str]]:
    """List the segments: the early ones of all attempts before the late ones, up to a number of bytes."""
    prefix, chosen, foreign = f"{run_id}/metrics/", list[tuple[AttemptKey, int, Entry]](), list[str]()
    for entry in store.list(prefix):
        if named := KEY.fullmatch(entry.key, len(prefix)):
            chosen.append(((int(named[1]), int(named[2])), int(named[3]), entry))
        else:
            foreign.append(entry.key)
    problems = []
    if foreign:
        more = f", nor are {len(foreign) - 1} more objects" if foreign[1:] else ""
        problems.append(f"{foreign[0][:MAX_SHOWN]!r} is not a segment{more}.")
    chosen.sort(key=lambda each: (each[1], each[0]))
    size_bytes = 0
    for n, (_, _, entry) in enumerate(chosen):
        size_bytes += entry.size_bytes
        if size_bytes > MAX_BYTES:
            problems.append(f"{len(chosen) - n} segments are left out: together they have more than {MAX_BYTES} bytes.")
            return chosen[:n], problems
    return chosen, problems


def _decoded(body: bytes) -> Iterator[Any]:
    """Yield the lines of a segment as JSON values; an error in the place of one that is none."""
    lines = body.splitlines()
    try:
        together = json.loads(b"[%b]" % b",".join(lines))  # a third of the time
    except (ValueError, RecursionError):
        together = []
    if len(together) == len(lines):  # else a line is more or less than a value
        yield from together
        return
    for line in lines:
        try:
            yield json.loads(line)
        except (ValueError, RecursionError) as error:
            yield error
