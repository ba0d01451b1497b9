"""Reads, filters and follows the logs of a run: one rank or several, the newest attempt, an earlier one or all."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import string
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from queue import Queue
from typing import Generic, Literal, TypeVar

from executors.attempt import Attempt
from executors.attempt.outcome import OUTPUT_TAIL_BYTES, OUTPUT_TAIL_LINES
from executors.errors import BackendError, CorruptObjectError, unknown_name
from executors.logs import LIMITED, MAX_READ_BYTES, last_of
from executors.logs.follower import WHOLE, LogPosition, begins, follow_logs
from executors.logs.gaps import completed, completed_bytes
from executors.logs.log import KnowsTimes, Log
from executors.logs.readers import lines_of
from executors.protocol import Outcome
from executors.settings.procs import MAX_PROCS
from executors.store.inventory import Inventory
from executors.store.record_names import OUTCOME
from executors.view.replica_records import unreadable
from executors.view.report.event_reader import read_stacks
from executors.view.report.text import inert
from executors.view.run_state_reader import RunStateReader
from executors.view.run_view import RunView, known_members

LOOK_S, FAR_LOOK_S = 1.0, 4.0  # seconds between two looks at a run: in a directory, and in a bucket
Which = int | Literal["all"] | None
"""The selected attempt of each rank: its number, "all", or None for the newest."""
Ranks = int | Sequence[int] | None
Note = Callable[[str], None]
OnUnread = Callable[[int, BackendError], None]
"""A function that is called with each rank whose log cannot be read, and with the error."""
MAX_THREADS = 16
MAX_PARTS = 16  # items of a rank that a thread reads before they are needed
KEPT_BYTES = 2 * OUTPUT_TAIL_BYTES  # the size of the end of a log in which the output tail of an outcome is searched
FIELDS = ("rank", "attempt", "run_id")
"""The names that the prefix of a line may contain."""

OF_MEMBER = re.compile(r"\[([1-9]\d{0,3})\] ")
"""The beginning of a line that a process of a replica has printed, unless it is process 0."""

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemberLines:
    """Selects the lines of some processes of a replica that has several.

    Example:
        MemberLines(frozenset({1}), 2).include("[1] step 7")  # True
    """

    chosen: frozenset[int]
    """The numbers of the processes."""
    n: int | None
    """The number of processes of the replica. None: it is not known."""

    def include(self, line: str) -> bool:
        """Return True if one of the processes has printed the line. A line without a number is process 0's.

        Args:
            line: the line as it is in the log.
        """
        found = OF_MEMBER.match(line)
        number = 0 if found is None else int(found[1])
        # Process 0 may print such a text itself, and no process has that number then.
        return (0 if self.n is not None and number >= self.n else number) in self.chosen


@dataclass(frozen=True, kw_only=True)
class LineFilter:
    """Selects lines of logs, and formats them.

    Raises:
        ValueError: the prefix has a field that is not in `FIELDS`.
    """

    grep: re.Pattern[str] | None = None
    """Only lines in which this expression is found are selected. None: all lines."""
    since: float | None = None
    """Only lines that were written at this Unix time or later are selected. None: no limit."""
    until: float | None = None
    prefix: str | None = None
    """A template of the text before each line. None: the rank in brackets, if there are several ranks."""
    clean: Callable[[str], str] = str
    """Returns a line in the form that is shown."""
    members: Mapping[int, MemberLines] = field(default_factory=dict)
    """By rank, the processes whose lines are chosen. A rank that is missing: all its processes."""

    def __post_init__(self) -> None:
        if self.prefix is None:
            return
        try:
            names = [name for _, name, _, _ in string.Formatter().parse(self.prefix) if name is not None]
            if wrong := next((name for name in names if name not in FIELDS), None):
                raise ValueError(unknown_name("field", wrong, FIELDS))
            self.prefix.format(rank=0, attempt=0, run_id="")
        except (ValueError, IndexError) as error:
            raise ValueError(f"The prefix {self.prefix!r}: {error}") from None

    @property
    def is_search(self) -> bool:
        """True if the whole log must be read to find the lines."""
        return self.grep is not None or self.since is not None or self.until is not None

    def selects(self, rank: int, line: str) -> bool:
        """Return True if the filter includes a line, whose time is not checked.

        Args:
            rank: the rank whose log has the line.
            line: the line as it is in the log.
        """
        if rank in self.members and not self.members[rank].include(line):
            return False
        return self.grep is None or self.grep.search(self.clean(line).removesuffix("\n")) is not None

    def shown(self, attempt: Attempt, line: str, *, is_one: bool) -> str:
        """Return a line with its prefix and newline. Empty if the filter excludes the line."""
        if not self.selects(attempt.rank, line):
            return ""
        text = self.clean(line)
        if self.prefix is None:
            return text if is_one else f"[{attempt.rank}] {text}"
        return self.prefix.format(rank=attempt.rank, attempt=attempt.number, run_id=attempt.run_id) + text


EVERYTHING = LineFilter()


def lines_of_members(view: RunView, chosen: Mapping[int, Collection[int]]) -> dict[int, MemberLines]:
    """Return the filter for the lines of some processes of replicas, after a check that the processes exist.

    Args:
        view: the run.
        chosen: by rank, the numbers of the processes.

    Raises:
        ValueError: the run has no such rank, or the rank has no such process.

    Example:
        LineFilter(members=lines_of_members(view, {2: [1]}))
    """
    found = {}
    for rank, members in chosen.items():
        n = known_members(view, view.check_rank(rank))
        limit = MAX_PROCS if n is None else n
        if wrong := [member for member in members if not 0 <= member < limit]:
            has = "one process, 0" if limit == 1 else f"the processes 0 to {limit - 1}"
            raise ValueError(f"Rank {rank} has {has}, got process {wrong[0]} of rank {rank}.")
        found[rank] = MemberLines(frozenset(members), n)
    return found


def log_pieces(
    view: RunView,
    rank: Ranks,
    tail: int | None,
    follow: bool,
    attempt: Which = None,
    lines: LineFilter = EVERYTHING,
    note: Note = log.warning,
    on_unread: OnUnread | None = None,
) -> Iterator[str]:
    """Yield the lines of logs, one rank after the other. Followed logs are yielded line by line, from all ranks.

    Args:
        view: the run.
        rank: one rank, or several. None: all ranks.
        tail: the number of last lines of each rank. None: all lines, or the last 20,000 of followed logs.
        follow: True: continue with later lines, until the run has ended.
        attempt: the number of an attempt, or "all". None: the newest attempt of each rank.
        lines: which lines to yield, and how they are shown. Default: every line.
        note: called with a message for each log that is read from another place than usual, or only in part.
        on_unread: called with each rank whose log cannot be read while other logs can. None: `note` is called.

    Raises:
        ValueError: the run has no such rank or attempt.
        BackendError: no log could be read.

    Example:
        print("".join(log_pieces(view, 0, 200, follow=False)))
    """
    logs = RunLogs(view.reader, attempt, lines, note, is_one=isinstance(rank, int))
    chosen = view.ranks if rank is None else [rank] if isinstance(rank, int) else rank
    ranks = [view.check_rank(each) for each in chosen]
    if follow:
        return logs.followed(ranks, WHOLE if tail is None else tail, grows=rank is None)
    return (text for _, text in logs.tails(ranks, tail, on_unread))


def logs_by_rank(
    view: RunView,
    ranks: Sequence[int],
    tail: int | None,
    attempt: Which,
    lines: LineFilter,
    note: Note,
    on_unread: OnUnread | None = None,
) -> dict[int, str]:
    """Return the lines of each rank that has the attempt. The lines have no rank in front.

    Args:
        view: the run.
        ranks: the ranks.
        tail: the number of last lines of each rank. None: all lines.
        attempt: the number of an attempt, or "all". None: the newest attempt of each rank.
        lines: which lines to return, and how they are shown.
        note: called with a message for each log that is read from another place than usual, or only in part.
        on_unread: called with each rank whose log cannot be read while other logs can. None: `note` is called.

    Raises:
        ValueError: the run has no such rank or attempt.
        BackendError: no log could be read.

    Example:
        logs_by_rank(view, [0, 1], 200, None, EVERYTHING, print)
    """
    logs = RunLogs(view.reader, attempt, lines, note, is_one=True)
    texts: dict[int, list[str]] = {}
    for rank, text in logs.tails([view.check_rank(rank) for rank in ranks], tail, on_unread):
        texts.setdefault(rank, []).append(text)
    return {rank: "".join(pieces) for rank, pieces in texts.items()}


def whole_log(view: RunView, attempt: Attempt, note: Note) -> Iterator[bytes]:
    """Yield all available output of an attempt as bytes, in pieces.

    Args:
        view: the run.
        attempt: the attempt.
        note: called with the reason if some of the output is not available.

    Example:
        b"".join(whole_log(view, view.newest_attempt(0), print))
    """
    logs = RunLogs(view.reader, attempt.number, EVERYTHING, lambda words: None, is_one=True)
    return logs.whole(attempt, note)


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """The stacks of all threads of a replica at one time."""

    rank: int
    attempt: int
    number: int
    """The number of the dump within the attempt, from 0."""
    at: float
    """The time of the dump, in Unix time by the clock of the store."""
    text: str
    """The stacks without control characters. The first line is the diagnosis."""


def stacks_of(view: RunView, ranks: Collection[int], attempt: Which = None) -> Iterator[Stacks]:
    """Yield the stacks that replicas left when they hung, ordered by rank and time.

    Args:
        view: the run.
        ranks: the ranks.
        attempt: the number of an attempt, or "all". None: the newest attempt of each rank that has stacks.

    Raises:
        StoreError: the store cannot be read.

    Example:
        for stacks in stacks_of(view_of(attach("first-try")), [0]):
            print(stacks.text)
    """
    dumps = sorted(dump for dump in Inventory.of(view.store, view.run_id).stacks if dump[0] in ranks)
    newest = {rank: number for rank, number, _, _ in dumps}
    for rank, its, number, at in dumps:
        if attempt in ("all", its) or (attempt is None and its == newest[rank]):
            text = inert(read_stacks(view.newest_attempt(rank).at(its), number))
            yield Stacks(rank=rank, attempt=its, number=number, at=at, text=text)


class RunLogs:
    """Reads the logs of a run's ranks.

    Args:
        reader: reads the state of the run.
        which: the attempt to read of each rank: a number, "all", or None for the newest.
        chosen: the filter for the lines.
        note: called with a message for each log that is read from another place than usual, or only in part.
        is_one: True if the user asked for one rank only. Then lines do not begin with the rank.
    """

    def __init__(self, reader: RunStateReader, which: Which, chosen: LineFilter, note: Note, *, is_one: bool) -> None:
        self._reader = reader
        self._records = reader.records
        self._which = which
        self._chosen = chosen
        self._note = note
        self._is_one = is_one
        self._said = set[tuple[Attempt, str]]()

    def whole(self, attempt: Attempt, on_cut: Note) -> Iterator[bytes]:
        """Yield all available output of an attempt as bytes, in pieces of limited size.

        Args:
            attempt: the attempt.
            on_cut: called with the reason if some of the output is not available.
        """
        problem = self._records.problem(attempt.rank)
        end, cut, may_lag, note = b"", problem.error or "" if problem else "", True, ""
        if (handle := self._reader.handles.at(attempt)) is not None:
            with contextlib.closing(self._records.placements.open_log(handle)) as opened:
                for piece in opened.pieces():
                    end += piece
                    yield end[:-KEPT_BYTES]
                    end = end[-KEPT_BYTES:]
                cut, may_lag, note = opened.cut, opened.may_lag, opened.note
            if end and note:
                self._say(attempt, note)
        outcome = self._outcome(attempt) if may_lag or not end else None
        kept = outcome.output_tail if outcome is not None else ""
        if end:
            yield completed_bytes(end, kept)
        elif outcome is not None:
            yield (kept or outcome.error or "").encode()
            is_full = len(kept.encode()) >= OUTPUT_TAIL_BYTES or len(_split(kept)) == OUTPUT_TAIL_LINES
            if cut or is_full:
                cut = f"{cut or self._has_none(attempt)}; this is the end that its outcome kept"
        else:
            cut = cut or note.removesuffix(".")
        if cut:
            on_cut(cut)

    def tails(
        self, ranks: Sequence[int], n_lines: int | None, on_unread: OnUnread | None = None
    ) -> Iterator[tuple[int, str]]:
        """Yield the last lines of each rank, one rank after the other, as texts of one or more lines.

        Several ranks are read in parallel. If one log cannot be read, for example because a machine is not reachable,
        the logs of the other ranks are still yielded.

        Args:
            ranks: the ranks to read.
            n_lines: the number of last lines of each rank. None: all lines.
            on_unread: called with each rank whose log cannot be read. None: a message about it is passed to `note`.

        Raises:
            BackendError: no log could be read. It is the error of the first rank.
        """
        self._reader.look(ranks)
        chosen, unread = self._that_have_it(ranks), dict[int, BackendError]()

        def read(rank: int) -> Iterator[str]:
            try:
                yield from self._tails(rank, n_lines)
            except BackendError as error:
                unread[rank] = error
                if len(unread) == len(chosen):
                    raise unread[chosen[0]] from None
                if on_unread is not None:
                    on_unread(rank, error)
                else:
                    self._note(f"Rank {rank}: its log cannot be read: {error}")

        return in_order(read, chosen)

    def followed(self, ranks: Sequence[int], n_lines: int, *, grows: bool) -> Iterator[str]:
        """Yield the last lines and all later lines, until the selected attempts have ended.

        Args:
            grows: True to follow also ranks that are added later.

        Raises:
            ValueError: the filter has a time, which a followed log does not support.
        """
        if self._chosen.since is not None or self._chosen.until is not None:
            raise ValueError("A followed log begins with its last lines. Remove since and until.")
        self._records.update()
        lines = self._follow(self._that_have_it(ranks), n_lines, grows=grows and not isinstance(self._which, int))
        return (text for rank, number, line in lines if (text := self._shown(rank, number, line)))

    def _shown(self, rank: int, number: int, line: str) -> str:
        attempt = self._records.attempt(rank).at(number)
        if line == begins(number):  # the first line of an attempt gets the rank, and no other prefix
            return "" if self._chosen.grep else EVERYTHING.shown(attempt, line, is_one=self._is_one)
        return self._chosen.shown(attempt, line, is_one=self._is_one)

    def _that_have_it(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return the ranks that have the attempt that the user asked for.

        Raises:
            ValueError: no rank has this attempt.
        """
        if not isinstance(self._which, int) or not ranks:
            return ranks
        newest = {rank: self._records.attempt(rank).number for rank in ranks}
        if found := [rank for rank in ranks if 0 <= self._which <= newest[rank]]:
            return found
        most = max(newest.values())
        raise ValueError(f"attempt must be {'0' if most == 0 else f'from 0 to {most}'}, or 'all', got {self._which}.")

    def _attempts(self, rank: int) -> list[Attempt]:
        """Return the attempts of a rank that the user asked for, oldest first."""
        if isinstance(self._which, int):
            return [self._records.attempt(rank).at(self._which)]
        launched = self._records.launched(rank)
        return launched if self._which == "all" else launched[-1:]

    def _tails(self, rank: int, n_lines: int | None) -> Iterator[str]:
        for attempt in self._attempts(rank):
            if self._which == "all":
                yield self._shown(rank, attempt.number, begins(attempt.number))
            parts = map(functools.partial(self._chosen_of, attempt), self._parts(attempt, n_lines))
            if n_lines is None:
                yield from chain([""], map("".join, parts))
            else:
                yield "".join(self._last_of(attempt, parts, n_lines))

    def _chosen_of(self, attempt: Attempt, lines: Iterable[str]) -> Iterable[str]:
        """Return the lines that the filter selects, in their printed form."""
        is_led = self._chosen.prefix is not None or not self._is_one
        for line in lines:
            if is_led and not line.strip("\n"):
                continue
            is_open = (is_led or self._which == "all") and not line.endswith("\n")
            if text := self._chosen.shown(attempt, f"{line}\n" if is_open else line, is_one=self._is_one):
                yield text

    def _last_of(self, attempt: Attempt, parts: Iterable[Iterable[str]], n_lines: int) -> Iterable[str]:
        """Return the last `n_lines` lines, but at most 4 MiB."""
        kept, size, is_limited = deque[str](), 0, False
        for text in chain.from_iterable(parts):
            kept.append(text)
            size += len(text)
            while len(kept) > n_lines or (size > MAX_READ_BYTES and len(kept) > 1):
                is_limited = is_limited or len(kept) <= n_lines
                size -= len(kept.popleft())
        if is_limited:
            found = f"these are the last {MAX_READ_BYTES >> 20} MiB of what was found"
            self._say(attempt, f"{found if self._chosen.is_search else LIMITED}.")
        return kept

    def _parts(self, attempt: Attempt, n_lines: int | None) -> Iterator[Sequence[str]]:
        """Yield lines of an attempt in parts.

        Only the last lines are read, unless the filter searches the whole log.

        Raises:
            ValueError: the filter has a time, but the log has no times.
        """
        chosen = self._chosen
        if chosen.since is not None or chosen.until is not None:
            yield from self._between(attempt)
        elif chosen.grep is not None or n_lines is None or attempt.rank in chosen.members:
            yield from lines_of(self.whole(attempt, lambda why: self._say(attempt, f"{why}.")))
        else:
            yield _split(self._tail(attempt, n_lines))

    def _between(self, attempt: Attempt) -> Iterator[list[str]]:
        if (handle := self._reader.handles.at(attempt)) is None:
            return
        with contextlib.closing(self._records.placements.open_log(handle)) as opened:
            try:
                if not isinstance(opened, KnowsTimes):
                    raise ValueError(opened.note or "its log has no times of lines")
                yield from opened.between(self._chosen.since, self._chosen.until)
            except ValueError as error:
                raise ValueError(f"Rank {attempt.rank} has no times of its lines: {error}.") from None
            if opened.cut:
                self._say(attempt, f"{opened.cut}.")

    def _say(self, attempt: Attempt, words: str) -> None:
        if (attempt, words) not in self._said:
            self._said.add((attempt, words))
            self._note(f"Rank {attempt.rank}: {words}")

    def _has_none(self, attempt: Attempt) -> str:
        return f"{self._records.backend(attempt.rank)} has no log of it"

    def _tail(self, attempt: Attempt, n_lines: int) -> str:
        text, note, handle = "", "", self._reader.handles.at(attempt)
        if problem := self._records.problem(attempt.rank):
            self._say(attempt, problem.error or "")
        if handle is not None:
            with contextlib.closing(self._records.placements.open_log(handle)) as opened:
                text, note = opened.tail(n_lines), opened.note
            if text and note:
                self._say(attempt, note)
            if opened.cut:
                self._say(attempt, f"{opened.cut}.")
            if text and not opened.may_lag:
                return text
        outcome = self._outcome(attempt)
        if outcome is None and note and not text:
            self._say(attempt, note)  # without the message, an empty log would look as if the replica printed nothing
        if outcome is None or n_lines <= 0:
            return text
        if text:
            return last_of(completed(text, outcome.output_tail), n_lines)
        if outcome.output_tail:
            key = attempt.key(OUTCOME)
            self._say(attempt, f"{self._has_none(attempt)}. This was kept by its outcome, {key!r}.")
        return last_of(outcome.output_tail or outcome.error or "", n_lines)

    def _outcome(self, attempt: Attempt) -> Outcome | None:
        known = self._records.outcome(attempt.rank)
        if known is not None and known.attempt == attempt.number:
            return known
        try:
            return attempt.outcome()
        except CorruptObjectError as error:
            return unreadable(attempt, error)

    def _follow(self, ranks: Sequence[int], n_lines: int, *, grows: bool) -> Iterator[tuple[int, int, str]]:
        first = dict[int, int]()
        if self._which == "all":
            for rank in ranks:
                *earlier, newest = self._attempts(rank)
                for attempt in earlier:
                    yield rank, attempt.number, begins(attempt.number)
                    read = chain.from_iterable(self._parts(attempt, n_lines))
                    lines = deque((line for line in read if self._chosen.selects(rank, line)), n_lines)
                    yield from ((rank, attempt.number, line.removesuffix("\n") + "\n") for line in lines)
                yield rank, newest.number, begins(newest.number)
                first[rank] = newest.number
        look_s = LOOK_S if self._records.is_near else FAR_LOOK_S
        # Otherwise `tail` would count lines of other processes, or without the text, and fewer lines would be shown.
        filtered = ranks if self._chosen.grep is not None else [rank for rank in ranks if rank in self._chosen.members]
        selects = {rank: functools.partial(self._chosen.selects, rank) for rank in filtered}
        yield from follow_logs(self, None if grows else ranks, n_lines, first=first, look_s=look_s, selects=selects)

    # `follow_logs` calls the next three methods.

    def look(self, ranks: Sequence[int] | None) -> dict[int, LogPosition]:
        """Return the attempt to follow of each rank: the selected attempt, or the newest attempt that has a log.

        Args:
            ranks: the ranks. None: all.
        """
        positions = {}
        for state in self._reader.look(ranks):
            *earlier, newest = (attempt.number for attempt in self._records.launched(state.rank))
            number = self._which if isinstance(self._which, int) else newest
            positions[state.rank] = LogPosition(number, state.is_over or number < newest, tuple(earlier))
        return positions

    def open(self, rank: int, attempt: int) -> Log | None:
        """Return the log of an attempt. None if it has no log yet."""
        handle = self._reader.handles.at(self._records.attempt(rank).at(attempt))
        if handle is None:
            return None
        opened = self._records.placements.open_log(handle)
        if opened.note:
            self._note(f"Rank {rank}: {opened.note}")
        return opened

    def kept(self, rank: int, attempt: int) -> str:
        """Return the output tail that the outcome of an attempt contains."""
        outcome = self._outcome(self._records.attempt(rank).at(attempt))
        return outcome.output_tail if outcome else ""


def _split(text: str) -> list[str]:
    """Return the lines of a text, each with its newline."""
    *lines, last = text.split("\n")  # not splitlines(), because the \r of a progress bar does not end a line
    return [*(f"{line}\n" for line in lines), *([last] if last else [])]


def in_order(act: Callable[[int], Iterable[T]], ranks: Iterable[int]) -> Iterator[tuple[int, T]]:
    """Yield (rank, item) for each item of `act(rank)`, one rank after the other. Several ranks are read in parallel.

    The reading threads are daemons, so Ctrl-C ends the process at once.
    """
    left = iter(ranks)
    waiting: deque[tuple[int, _Ahead[T]]] = deque()
    try:
        while True:
            waiting.extend((rank, _Ahead(act, rank)) for rank in islice(left, MAX_THREADS - len(waiting)))
            if not waiting:
                return
            rank, ahead = waiting[0]
            yield from ((rank, item) for item in ahead)
            waiting.popleft()
    finally:
        for _, ahead in waiting:
            ahead.stop()


class _Ahead(Generic[T]):
    """Yields the items of one rank. A thread reads a few items before they are needed."""

    def __init__(self, act: Callable[[int], Iterable[T]], rank: int) -> None:
        self._ready: Queue[T | BaseException | None] = Queue()
        self._room = threading.Semaphore(MAX_PARTS)
        self._is_stopped = False
        threading.Thread(target=self._read, args=(act, rank), name="replicas-logs", daemon=True).start()

    def __iter__(self) -> Iterator[T]:
        while (item := self._ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            self._room.release()
            yield item

    def stop(self) -> None:
        """Ask the thread to end. The call does not wait for the item that the thread reads now."""
        self._is_stopped = True
        self._room.release()

    def _read(self, act: Callable[[int], Iterable[T]], rank: int) -> None:
        try:
            for item in act(rank):
                self._room.acquire()
                if self._is_stopped:
                    return
                self._ready.put(item)
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the reader's thread
            self._ready.put(error)
