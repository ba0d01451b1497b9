"""Logs that a service keeps as entries by time: asked for one by one, or for all jobs at once where that works."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from executors.backends.jobs.service import JobServiceError
from executors.logs import last_of
from executors.logs.readers import LineBuffer

LATE_S = 5.0  # entries may come so much later than others that were written after them
KNOWN_S = 45.0  # how long before the newest an entry is known again
MAX_KNOWN = 20_000
SKEW = timedelta(minutes=10)  # between the clocks of the service and of this machine
SHARED_EVERY_S = 1.0  # between two requests for all jobs
CHECK_EVERY_S = 30.0  # each job is asked for itself, too
DISTRUST_S = 600.0
ANSWER_S = 10.0  # an answer for all jobs is good for so long


FULL = f"these are the last {MAX_KNOWN:,} entries, and its service gives no more"
OLDEST = datetime.min.replace(tzinfo=UTC)


class Entry(NamedTuple):
    """A line of a job, or a part of one, that it wrote at once."""

    at: datetime
    source: str
    text: str
    container: str
    """The container of the job."""


class _Deduplicator:
    """Gives each entry once, though it is asked for again: entries may come late."""

    def __init__(self, since: datetime) -> None:
        self.since = since
        """From when on to ask."""
        self.floor = OLDEST
        """Older lines would not be recognized."""
        self._known: Counter[Entry] = Counter()
        self._spoke_at = time.monotonic()

    def new_of(self, entries: Sequence[Entry]) -> list[Entry]:
        counts: Counter[Entry] = Counter()
        new = []
        for entry in entries:
            counts[entry] += 1
            if counts[entry] > self._known[entry]:
                new.append(entry)
        if new:
            self._spoke_at = time.monotonic()
        self._known |= counts
        if self._known:
            newest = max(entry.at for entry in self._known)
            self.floor = max(self.floor, newest - timedelta(seconds=KNOWN_S))
            if len(self._known) > MAX_KNOWN:
                self.floor = sorted(entry.at for entry in self._known)[-MAX_KNOWN // 2]
            self._known = Counter({entry: n for entry, n in self._known.items() if entry.at >= self.floor})
            is_quiet = time.monotonic() - self._spoke_at > LATE_S  # so nothing older will come
            since = newest + timedelta(microseconds=1) if is_quiet else newest - timedelta(seconds=LATE_S)
            self.since = max(since, self.floor)
        return new


class SharedLog:
    """The output of all jobs, which the reader of any of them requests at once.

    It is trusted once it has given an entry of one that is read here, until it misses one.

    Args:
        fetch: returns the entries of all jobs since a time, oldest first.
    """

    def __init__(self, fetch: Callable[[datetime], Sequence[Entry]]) -> None:
        self._fetch = fetch
        self._new_entries = _Deduplicator(datetime.now(UTC) - timedelta(seconds=LATE_S))
        self._boxes: dict[str, list[Entry]] = {}
        self._unclaimed: deque[Entry] = deque(maxlen=MAX_KNOWN)
        """The lines of containers that have not joined yet."""
        self._lock = threading.Lock()  # of the boxes
        self._asking = threading.Lock()
        self._asked_at = self._answered_at = -ANSWER_S
        self._distrusted_until = 0.0
        self._has_proof = False

    @property
    def is_trusted(self) -> bool:
        return self._has_proof and time.monotonic() < self._answered_at + ANSWER_S

    def join(self, container: str) -> None:
        """Keep what this container writes, also what it wrote since the first request."""
        with self._lock:
            found = [entry for entry in self._unclaimed if entry.container == container]
            self._boxes.setdefault(container, []).extend(found)
            self._has_proof = self._has_proof or bool(found)

    def leave(self, container: str) -> None:
        with self._lock:
            self._boxes.pop(container, None)

    def distrust(self) -> None:
        """Use it no more for a while."""
        self._has_proof, self._distrusted_until = False, time.monotonic() + DISTRUST_S

    def take(self, container: str) -> list[Entry]:
        """Return what a container wrote since the last call, as far as this is known."""
        self.ask()
        with self._lock:
            entries = self._boxes.get(container, [])
            if entries:
                self._boxes[container] = []
        return entries

    def ask(self) -> None:
        """Ask the service, if that is due and no other thread does it."""
        now = time.monotonic()
        if now < max(self._asked_at + SHARED_EVERY_S, self._distrusted_until) or not self._asking.acquire(False):
            return
        try:
            self._asked_at = now
            entries = self._new_entries.new_of(self._fetch(self._new_entries.since))
            with self._lock:
                for entry in entries:
                    if (box := self._boxes.get(entry.container)) is not None:
                        box.append(entry)
                        self._has_proof = True
                    else:
                        self._unclaimed.append(entry)
            self._answered_at = time.monotonic()
        except JobServiceError:  # each job is asked for alone, which raises if it fails, too
            self.distrust()
        finally:
            self._asking.release()


class TimedLog:
    """The log of one job: what came since the last entry, with what came late.

    Args:
        fetch: returns its entries since a time, oldest first; the last so many if that is None.
        shared: where entries of its container come, too.
    """

    note = cut = ""
    may_lag = True

    def __init__(self, fetch: Callable[[datetime | None, int], Sequence[Entry]], shared: SharedLog | None) -> None:
        self._fetch = fetch
        self._shared = shared or SharedLog(lambda since: ())
        self._new_entries: _Deduplicator | None = None
        self._oldest = OLDEST
        """Earlier lines are not wanted."""
        self._container = ""
        self._checked_at = 0.0
        self._check_since = self._oldest
        self._is_shared = False
        self._lines = LineBuffer()

    @property
    def pause_s(self) -> float:
        return 0.1 if self._is_shared else 0.5

    def tail(self, n_lines: int) -> str:
        if n_lines <= 0:
            return ""
        text = self._text(2 * n_lines)
        self.cut = self.cut if text.count("\n") < n_lines else ""
        return last_of(text, n_lines)

    def pieces(self) -> Iterator[bytes]:
        yield self._text(MAX_KNOWN).encode()

    def lines(self, n_first: int, *, has_ended: bool = False) -> Iterator[list[str]]:
        if self._new_entries is None:
            self._shared.ask()  # so that it misses nothing of what comes after the first entries
            self._new_entries = _Deduplicator(datetime.now(UTC) - SKEW)
            new = self._new_entries.new_of(self._last(n_first))
            self._met(new, self._new_entries)
        else:
            new = self._new(self._new_entries, has_ended)
        yield [line for entry in new for line in self._lines.add(entry.text)]
        if has_ended:
            yield self._lines.last()

    def between(self, since: float | None, until: float | None) -> Iterator[list[str]]:
        """Yield the lines of a span, by the service's clock; of the last `MAX_KNOWN` entries where it has no start."""
        lines = LineBuffer()
        found = self._last(MAX_KNOWN) if since is None else self._fetch(datetime.fromtimestamp(since, UTC), 0)
        self.cut = FULL if since is None and len(found) >= MAX_KNOWN else ""
        last = None if until is None else datetime.fromtimestamp(until, UTC)
        yield [line for entry in found if last is None or entry.at <= last for line in lines.add(entry.text)]
        yield lines.last()

    def close(self) -> None:
        self._shared.leave(self._container)

    def _new(self, once: _Deduplicator, has_ended: bool) -> list[Entry]:
        new = once.new_of(self._shared.take(self._container)) if self._container else []
        was_shared, is_trusted, now = self._is_shared, self._shared.is_trusted, time.monotonic()
        if was_shared and is_trusted and not has_ended and now < self._checked_at + CHECK_EVERY_S:
            return new
        since = self._check_since if was_shared else once.since
        missed = once.new_of(self._fetch(max(since, once.floor, self._oldest), 0))
        if was_shared and any(entry.at < datetime.now(UTC) - timedelta(seconds=2 * LATE_S) for entry in missed):
            self._shared.distrust()
        self._met(missed, once)
        return new + missed

    def _met(self, entries: Sequence[Entry], once: _Deduplicator) -> None:
        """Note that the job was asked for itself."""
        if not self._container and entries:
            self._container = entries[-1].container
            self._shared.join(self._container)
        self._is_shared = bool(self._container) and self._shared.is_trusted
        self._checked_at = time.monotonic() + random.uniform(-0.5, 0) * CHECK_EVERY_S  # not all at once
        self._check_since = once.since

    def _text(self, n_lines: int) -> str:
        entries = self._last(n_lines)
        self.cut = FULL if len(entries) >= MAX_KNOWN else ""
        return "".join(entry.text for entry in entries)

    def _last(self, n_lines: int) -> Sequence[Entry]:
        n_entries = n_lines + 50  # one may be a part of a line
        entries = self._fetch(None, n_entries)
        if len(entries) >= n_entries:
            self._oldest = entries[0].at
        return entries
