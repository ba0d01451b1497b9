"""Follows the log of one rank for all tabs that show it, and searches logs."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from executors.dashboard.run_feed import RunFeed
from executors.errors import ReplicasError
from executors.logs.follower import RankFollower, begins
from executors.view.report.text import inert, one_line
from executors.view.run_logs import EVERYTHING, LineFilter, RunLogs, logs_by_rank, stacks_of
from executors.view.run_view import RunView

MAX_LINES = 2000  # of a log that are kept and sent
MAX_CHARACTERS = 2000  # of a line
MAX_STACKS, MAX_STACK_CHARACTERS = 20, 100_000
EVERY_S = 1.5  # the shortest time between two reads of a log
IDLE_S = 30.0  # after the last request, a log is not followed any more
MAX_FOLLOWED = 16
MAX_SEARCHED = 200  # characters of a text to search
BUSY = "Too many logs are open. Close another tab, and try again."


class LogFeed:
    """The last lines of one rank's log, with a number for each line, from which a page asks for later ones.

    Args:
        view: the run.
        rank: the rank.
        clock: returns seconds of a monotonic clock.

    Raises:
        ValueError: the run has no such rank.

    Example:
        feed = LogFeed(view, 0)
        feed.lines_after(0)["lines"]
    """

    def __init__(self, view: RunView, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rank = view.check_rank(rank)
        self._note = self._problem = ""
        self._logs = RunLogs(view.reader, None, EVERYTHING, self._keep_note, is_one=True)
        first = self._logs.look([rank])[rank].attempt
        self._follower = RankFollower(self._logs, rank, MAX_LINES, first)
        self._lines = deque[str](maxlen=MAX_LINES)
        if first:
            self._lines.append(begins(first).rstrip())
        self._n_lines = len(self._lines)
        """The number of lines so far. The last line has this number."""
        self._clock = clock
        self._read_at = -EVERY_S
        self._lock = threading.Lock()

    def lines_after(self, number: int) -> dict[str, Any]:
        """Return the lines after a line, the number of the last line, and a note about the log.

        Args:
            number: the number of the last line that the page has. 0: it has none.
        """
        with self._lock:
            if self._clock() - self._read_at >= max(EVERY_S, self._follower.pause_s):
                self._read()
                self._read_at = self._clock()
            n_new = min(len(self._lines), max(0, self._n_lines - number))
            # A page of an earlier server may have a larger number, and gets everything.
            n_new = len(self._lines) if number > self._n_lines else n_new
            lines = [*islice(self._lines, len(self._lines) - n_new, None)]
            is_gap, note = n_new < self._n_lines - number, self._problem or self._note
            return {"lines": lines, "last": self._n_lines, "is_gap": is_gap, "note": note}

    def close(self) -> None:
        """Close the log."""
        with self._lock:
            self._follower.close()

    def _read(self) -> None:
        try:
            for lines in self._follower.read(self._logs.look([self._rank])[self._rank]):
                self._n_lines += len(lines)
                self._lines.extend(map(page_line, lines))
            self._problem = ""
        except ReplicasError as error:
            self._problem = one_line(f"The log cannot be read: {error}")

    def _keep_note(self, words: str) -> None:
        self._note = one_line(words)


class LogFeeds:
    """The logs that pages follow. A log that no page asks for is closed.

    Example:
        LogFeeds().lines(feed, rank=0, after=0)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open = dict[tuple[str, int], LogFeed]()
        self._asked_at = dict[tuple[str, int], float]()
        self._lock = threading.Lock()
        self._searches = threading.Semaphore(2)

    def lines(self, feed: RunFeed, rank: int, after: int) -> dict[str, Any]:
        """Return the lines of a rank after a line; see `LogFeed.lines_after`.

        Args:
            feed: the run.
            rank: the rank.
            after: the number of the last line that the page has.

        Raises:
            ValueError: the run has no such rank, or too many logs are open.
            StoreError, BackendError: the state of the run cannot be read.
        """
        key, now = (feed.key, rank), self._clock()
        with self._lock:
            for old in [each for each, at in self._asked_at.items() if now - at > IDLE_S]:
                del self._asked_at[old]
                if (idle := self._open.pop(old, None)) is not None:
                    idle.close()
            if key not in self._open:
                if len(self._open) >= MAX_FOLLOWED:
                    raise ValueError(BUSY)
                # Not the view of the feed, because another thread uses that one.
                self._open[key] = LogFeed(RunView(feed.store, feed.view.run_id), rank, self._clock)
            self._asked_at[key] = now
            found = self._open[key]
        return found.lines_after(after)

    def search(self, feed: RunFeed, rank: int, text: str) -> dict[str, Any]:
        """Return the last lines of a rank that have a text, in all its attempts. Upper and lower case are the same.

        Args:
            feed: the run.
            rank: the rank.
            text: the text.

        Raises:
            ValueError: the run has no such rank, or other searches take place.
            BackendError: the log cannot be read.
        """
        if not self._searches.acquire(blocking=False):
            raise ValueError("Two other searches take place. Try again.")
        notes: list[str] = []
        try:
            # The text is not a regular expression, because some of these take hours for one line.
            chosen = LineFilter(grep=re.compile(re.escape(text[:MAX_SEARCHED]), re.IGNORECASE), clean=inert)
            view = RunView(feed.store, feed.view.run_id)
            found = logs_by_rank(view, [rank], MAX_LINES, "all", chosen, notes.append)
        finally:
            self._searches.release()
        lines = [page_line(line) for line in found.get(rank, "").splitlines() if line]
        return {"lines": lines[-MAX_LINES:], "note": one_line(" ".join(notes))}


def stacks_text(feed: RunFeed, rank: int) -> list[str]:
    """Return the lines of the last stacks of a rank.

    Args:
        feed: the run.
        rank: the rank.

    Raises:
        StoreError: the store cannot be read.
    """
    view = RunView(feed.store, feed.view.run_id)
    found = deque(stacks_of(view, [view.check_rank(rank)], "all"), MAX_STACKS)
    lines = [f"=== attempt {each.attempt} ===\n{each.text[:MAX_STACK_CHARACTERS]}" for each in found]
    return [page_line(line) for text in lines for line in text.split("\n")][-MAX_LINES:]


def page_line(line: str) -> str:
    """Return a line as a page shows it: without control characters, and cut.

    Args:
        line: the line.
    """
    text = inert(line.rstrip("\r\n")[: 2 * MAX_CHARACTERS].rpartition("\r")[2])
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"
