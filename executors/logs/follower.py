"""Follows the logs of many ranks at the same time, also into new attempts, until all ranks have ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import Queue
from typing import NamedTuple, Protocol

from executors.errors import BackendError, StoreError
from executors.logs.gaps import completed
from executors.logs.log import Log
from executors.patience import FOLLOWER, Outage

MAX_THREADS = 64
MAX_PARTS = 64  # parts that wait for the reader, besides one in each thread
LOOK_S = 1.0
LONGEST_PAUSE_S = 2.0  # between two reads of one rank, unless its log requires a longer pause
PAUSED_RANKS = 16  # with more ranks the pauses grow, so that the number of requests per second stays the same
# An outcome contains the end of its attempt's output. This end is searched in the shown text, so that no line is shown
# twice.
KEPT_CHARACTERS = 128 * 1024  # of shown text that are remembered: twice the length of the output in an outcome
WINDOW_LINES = 200  # lines from before this call, which are also remembered for this search
WHOLE = 20_000  # the largest number of lines to show of an attempt that began while its rank was followed


class LogPosition(NamedTuple):
    """The newest attempt of a rank that has a log, as the last look found it, and the earlier attempts that have
    one.
    """

    attempt: int
    """The newest attempt that has a log."""
    has_ended: bool
    earlier: tuple[int, ...] = ()
    """The earlier attempts that have a log, oldest first."""


class Logs(Protocol):
    """The logs of a run, as `follow_logs` needs them. Several threads call `open` and `kept`."""

    def look(self, ranks: Sequence[int] | None) -> Mapping[int, LogPosition]:
        """Return the newest attempt of each rank, or of all ranks if None is given."""

    def open(self, rank: int, attempt: int) -> Log | None:
        """Return the log of an attempt. None if it has no log yet."""

    def kept(self, rank: int, attempt: int) -> str:
        """Return the output tail in the outcome of an attempt."""


def begins(attempt: int) -> str:
    """Return the heading above the lines of an attempt, for a rank with several attempts.

    Args:
        attempt: the number of the attempt.
    """
    return f"=== attempt {attempt} ===\n"


def follow_logs(
    logs: Logs,
    ranks: Sequence[int] | None,
    tail: int,
    *,
    first: Mapping[int, int] | None = None,
    look_s: float = LOOK_S,
    selects: Mapping[int, Callable[[str], bool]] | None = None,
) -> Iterator[tuple[int, int, str]]:
    """Yield (rank, attempt, line) for each complete line, until all ranks have ended and their logs are read.

    Up to 64 threads read the logs, so that a slow log does not delay the logs of other ranks.

    Args:
        logs: the logs of the run.
        ranks: the ranks to follow. None: all ranks, also ranks that are added later.
        tail: the number of existing lines of each rank to show first.
        first: the attempt to begin with, by rank. Other ranks begin with their newest attempt, and ranks that are
            added later with their oldest.
        look_s: the time between two reads of the run's state, in seconds.
        selects: by rank, a function that returns True for lines that the reader shows. `tail` counts these lines, among
            the last 20,000 of the log. Later lines are yielded in any case. A rank that is missing: all lines count.
    """
    follower = _Follower(logs, ranks, tail, first or {}, selects or {})
    try:
        yield from follower.lines(look_s)
    finally:
        follower.stop()


class _Follower:
    def __init__(
        self,
        logs: Logs,
        ranks: Sequence[int] | None,
        tail: int,
        first: Mapping[int, int],
        selects: Mapping[int, Callable[[str], bool]],
    ) -> None:
        self._logs = logs
        self._selects = selects
        self._asked = ranks
        self._tail = tail
        self._first = first
        self._ranks: Mapping[int, RankFollower] = {}
        self._positions: Mapping[int, LogPosition] = {}
        self._parts: Queue[tuple[int, int, list[str]] | BaseException | None] = Queue()
        self._room = threading.Semaphore(MAX_PARTS)
        self._changed = threading.Condition()
        self._is_stopped = False

    def lines(self, look_s: float) -> Iterator[tuple[int, int, str]]:
        self._positions = self._logs.look(self._asked)
        firsts = {rank: self._first.get(rank, position.attempt) for rank, position in self._positions.items()}
        self._ranks = {
            rank: RankFollower(self._logs, rank, self._tail, first, self._selects.get(rank))
            for rank, first in firsts.items()
        }
        each = list(self._ranks.values())
        for place in range(min(MAX_THREADS, len(each))):
            self._start(lambda mine=each[place::MAX_THREADS]: self._read(mine))  # type: ignore[misc]
        self._start(lambda: self._look(look_s))
        while self._ranks:
            part = self._parts.get()
            if isinstance(part, BaseException):
                raise part
            if part is not None:
                self._room.release()
                rank, attempt, lines = part
                yield from ((rank, attempt, line) for line in lines)
            elif self._parts.empty() and all(each.is_done(self._positions[rank]) for rank, each in self._ranks.items()):
                return

    def stop(self) -> None:
        """Ask the threads to end, and do not wait for them."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        self._room.release(MAX_THREADS)
        for each in self._ranks.values():
            each.close()

    def _start(self, act: Callable[[], None]) -> None:
        def run() -> None:
            try:
                act()
            except BaseException as error:  # noqa: BLE001 - raised in the reader's thread
                self._parts.put(error)

        threading.Thread(target=run, name="replicas-logs", daemon=True).start()

    def _look(self, look_s: float) -> None:
        store, backend = Outage(FOLLOWER, "the rendezvous"), Outage(FOLLOWER, "the backend")
        while not self._waited(look_s):
            try:
                positions, before = self._logs.look(self._asked), self._positions
            except StoreError as error:
                if not store.tolerates(error):
                    raise
                continue
            except BackendError as error:
                if not backend.tolerates(error):
                    raise
                continue
            store.end()
            backend.end()
            firsts = {rank: (*seen.earlier, seen.attempt)[0] for rank, seen in positions.items() if rank not in before}
            added = {rank: RankFollower(self._logs, rank, WHOLE, first) for rank, first in firsts.items()}
            with self._changed:
                self._positions, self._ranks = positions, {**self._ranks, **added}
                self._changed.notify_all()
            for new in added.values():
                self._start(lambda new=new: self._read([new]))  # type: ignore[misc]
            if positions != before:
                self._parts.put(
                    None
                )  # if all ranks have ended, the follower ends, although a rank may have continued in its old log

    def _read(self, ranks: Sequence[RankFollower]) -> None:
        outage = Outage(FOLLOWER, "the logs")
        while not self._is_stopped:
            positions = (
                self._positions
            )  # taken before the read, so that a read after the end of the rank gets everything that it wrote
            for each in ranks:
                was_done = each.is_done(positions[each.rank])
                try:
                    for lines in each.read(positions[each.rank]):
                        self._room.acquire()
                        if self._is_stopped:
                            return
                        self._parts.put((each.rank, each.attempt, lines))
                    outage.end()
                except StoreError as error:  # the next read continues at the same position
                    if not outage.tolerates(error):
                        raise
                    break
                if not was_done and each.is_done(positions[each.rank]):
                    self._parts.put(None)
            pause_s = max(each.pause_s for each in ranks)
            pause_s = max(pause_s, min(LONGEST_PAUSE_S, pause_s * len(self._ranks) / PAUSED_RANKS))
            news = [(each.rank, positions[each.rank]) for each in ranks]
            self._waited(pause_s, lambda: any(self._positions[rank] != position for rank, position in news))  # noqa: B023

    def _waited(self, pause_s: float, has_news: Callable[[], bool] = lambda: False) -> bool:
        """Wait for the pause to pass or for news. Return True if the follower was stopped."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or has_news(), pause_s)
            return self._is_stopped


class RankFollower:
    """The reader of one rank's logs, from one attempt to the next. Only one thread at a time uses it.

    Args:
        logs: the logs of the run.
        rank: the rank.
        tail: the number of existing lines to read first.
        first: the attempt to begin with.
        selects: returns True for lines that count for `tail`. None: all lines count.

    Example:
        follower = RankFollower(logs, 0, 200, first=0)
        for lines in follower.read(logs.look([0])[0]): print("".join(lines))
    """

    def __init__(
        self, logs: Logs, rank: int, tail: int, first: int, selects: Callable[[str], bool] | None = None
    ) -> None:
        self.rank = rank
        self._selects = selects
        self._logs = logs
        self._tail = tail
        self._has_ended = False
        self._begin(first)

    @property
    def pause_s(self) -> float:
        return self._log.pause_s if self._log is not None else LOOK_S

    def is_done(self, position: LogPosition) -> bool:
        """Return True if the rank has ended, and its newest known attempt was read to the end."""
        return self._has_ended and position.has_ended and position.attempt == self.attempt

    def read(self, position: LogPosition) -> Iterator[list[str]]:
        """Yield the lines since the last call. This includes attempts that began and ended since then.

        Args:
            position: the newest attempt of the rank.
        """
        for number in (*position.earlier, position.attempt):
            if self.attempt < number <= position.attempt:
                if not self._has_ended:
                    yield from self._fresh(True)
                self.close()
                self._begin(number)
                yield [begins(number)]
                self._tail = WHOLE
        if self._has_ended:
            return
        yield from self._fresh(position.has_ended)
        if position.has_ended:
            self._has_ended = True
            self.close()

    def close(self) -> None:
        if (log := self._log) is not None:
            log.close()

    def _begin(self, attempt: int) -> None:
        self.attempt, self._has_ended = attempt, False
        self._log: Log | None = None
        self._shown: deque[str] = deque()
        self._partial = ""
        self._n_shown = 0

    def _fresh(self, has_ended: bool) -> Iterator[list[str]]:
        """Yield the new lines. If the attempt has ended, yield all remaining lines."""
        is_first = self._log is None
        self._log = self._log or self._logs.open(self.rank, self.attempt)
        if self._log is None or (is_first and (self._log.may_lag or self._selects is not None)):
            # More lines are read than shown, because `_missing` searches them for the output tail of the outcome, and
            # because only some of them may be of the process that the user asked for.
            n = max(self._tail, WINDOW_LINES if self._selects is None else WHOLE)
            parts = () if self._log is None else self._log.lines(n, has_ended=has_ended)
            before = [line for part in parts for line in self._remembered(part)]
            before += self._missing() if has_ended else []
            before = [line for line in before if self._selects is None or self._selects(line)]
            yield before[max(0, len(before) - self._tail) :]
            return
        for lines in self._log.lines(self._tail, has_ended=has_ended):
            yield self._remembered(lines)
        if has_ended:
            yield self._missing()

    def _remembered(self, lines: list[str]) -> list[str]:
        """Remember the last shown lines, up to the length of the output in an outcome, and the beginning of an
        incomplete line.
        """
        if lines and not lines[-1].endswith("\n"):
            *lines, self._partial = lines
        self._shown.extend(lines)
        self._n_shown += sum(map(len, lines))
        while self._n_shown > KEPT_CHARACTERS and len(self._shown) > 1:
            self._n_shown -= len(self._shown.popleft())
        return lines

    def _missing(self) -> list[str]:
        """Return the last lines of an ended attempt that its outcome has and its log does not have."""
        missing = self._partial
        if self._log is None or self._log.may_lag:
            shown = "".join(self._shown)
            kept = self._logs.kept(self.rank, self.attempt)
            missing = completed(f"{shown}{self._partial}", kept)[len(shown) :]
        return [f"{line}\n" for line in missing.removesuffix("\n").split("\n")] if missing else []
