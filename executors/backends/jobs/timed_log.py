"""Reads logs that a service stores as entries with times: the log of one job, or of all jobs in one request.

If there are many followers, each would need many requests. So each first uses `SharedLog`, which makes one request for
all jobs.
"""

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

LATE_S = 5.0  # an entry may arrive this much later than entries that were written after it
KNOWN_S = 45.0  # entries that are at most this much older than the newest are remembered, so that none is yielded twice
MAX_KNOWN = 20_000
SKEW = timedelta(minutes=10)  # the most that the clocks of the service and of this machine differ
SHARED_EVERY_S = 1.0  # between two requests for all jobs
CHECK_EVERY_S = 30.0  # between two requests for one job that check the requests for all jobs
DISTRUST_S = 600.0  # after the requests for all jobs have missed an entry, they are not made for this time
ANSWER_S = 10.0  # an answer for all jobs is used again for this time


FULL = f"these are the last {MAX_KNOWN:,} entries, and its service gives no more"
OLDEST = datetime.min.replace(tzinfo=UTC)


class LogEntry(NamedTuple):
    """A text that a job wrote in one call: a line, a part of a line, or several lines.

    Example:
        LogEntry(datetime.now(UTC), "stdout", "step 3\\n", "ta-01")
    """

    at: datetime
    """The time of the entry, by the service's clock."""
    source: str
    """The stream, such as "stdout"."""
    text: str
    container: str
    """The id of the job's container."""


class _Deduplicator:
    """Removes entries that were read before. Entries may be late, so each request asks again for the last seconds."""

    def __init__(self, since: datetime) -> None:
        self.since = since
        """The time from which the next request asks for entries."""
        self.floor = OLDEST
        """Entries before this time are not remembered, so a request must not ask for them."""
        self._known: Counter[LogEntry] = Counter()
        self._spoke_at = time.monotonic()

    def new_of(self, entries: Sequence[LogEntry]) -> list[LogEntry]:
        counts: Counter[LogEntry] = Counter()
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
            is_quiet = time.monotonic() - self._spoke_at > LATE_S  # after this time no late entry arrives
            since = newest + timedelta(microseconds=1) if is_quiet else newest - timedelta(seconds=LATE_S)
            self.since = max(since, self.floor)
        return new


class SharedLog:
    """The output of all jobs of the service. The followers of several jobs use one `SharedLog`.

    It is trusted after it has shown an entry of a job that is followed here, until it misses one.

    Args:
        fetch: returns the entries of all jobs since a time, oldest first.

    Example:
        shared = SharedLog(fetch)
        log = TimedLog(fetch_one, shared)
    """

    def __init__(self, fetch: Callable[[datetime], Sequence[LogEntry]]) -> None:
        self._fetch = fetch
        self._new_entries = _Deduplicator(datetime.now(UTC) - timedelta(seconds=LATE_S))
        self._boxes: dict[str, list[LogEntry]] = {}
        self._unclaimed: deque[LogEntry] = deque(maxlen=MAX_KNOWN)
        """The entries of containers that have not joined yet."""
        self._lock = threading.Lock()  # the entries of the containers
        self._asking = threading.Lock()
        self._asked_at = self._answered_at = -ANSWER_S
        self._distrusted_until = 0.0
        self._has_proof = False

    @property
    def is_trusted(self) -> bool:
        """True if a follower may rely on it instead of asking for its own job."""
        return self._has_proof and time.monotonic() < self._answered_at + ANSWER_S

    def join(self, container: str) -> None:
        """Collect the entries of a container from now on, with its entries since the first request.

        Args:
            container: the id of the container.
        """
        with self._lock:
            found = [entry for entry in self._unclaimed if entry.container == container]
            self._boxes.setdefault(container, []).extend(found)
            self._has_proof = self._has_proof or bool(found)

    def leave(self, container: str) -> None:
        """Keep the entries of a container no longer.

        Args:
            container: the id of the container.
        """
        with self._lock:
            self._boxes.pop(container, None)

    def distrust(self) -> None:
        """Stop its requests for ten minutes, because it missed an entry or failed."""
        self._has_proof, self._distrusted_until = False, time.monotonic() + DISTRUST_S

    def take(self, container: str) -> list[LogEntry]:
        """Return the entries of a container since the last call, as far as they are known.

        Args:
            container: the id of the container.
        """
        self.ask()
        with self._lock:
            entries = self._boxes.get(container, [])
            if entries:
                self._boxes[container] = []
        return entries

    def ask(self) -> None:
        """Ask the service for new entries if that is due and no other thread does so."""
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
        except JobServiceError:  # each follower then asks for its own job, and raises if that fails, too
            self.distrust()
        finally:
            self._asking.release()


class TimedLog:
    """The log of one job, read as entries with times. Entries that arrive late are included.

    Args:
        fetch: returns the entries of the job since a time, oldest first. If the time is None, it returns the given
            number of last entries.
        shared: the output of all jobs. None: the service does not give it.

    Example:
        TimedLog(fetch, None).tail(100)
    """

    note = cut = ""
    may_lag = True

    def __init__(self, fetch: Callable[[datetime | None, int], Sequence[LogEntry]], shared: SharedLog | None) -> None:
        self._fetch = fetch
        self._shared = shared or SharedLog(lambda since: ())
        self._new_entries: _Deduplicator | None = None
        self._oldest = OLDEST
        """Earlier entries are not wanted."""
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
            self._shared.ask()  # Before the next request: then no entry that is written after that request is missed.
            self._new_entries = _Deduplicator(datetime.now(UTC) - SKEW)
            new = self._new_entries.new_of(self._last(n_first))
            self._met(new, self._new_entries)
        else:
            new = self._new(self._new_entries, has_ended)
        yield [line for entry in new for line in self._lines.add(entry.text)]
        if has_ended:
            yield self._lines.last()

    def between(self, since: float | None, until: float | None) -> Iterator[list[str]]:
        """Yield the lines of a time span, by the service's clock.

        Args:
            since: the beginning of the span, in seconds since the epoch. None: the last 20,000 entries.
            until: the end of the span. None: the end of the log.
        """
        lines = LineBuffer()
        found = self._last(MAX_KNOWN) if since is None else self._fetch(datetime.fromtimestamp(since, UTC), 0)
        self.cut = FULL if since is None and len(found) >= MAX_KNOWN else ""
        last = None if until is None else datetime.fromtimestamp(until, UTC)
        yield [line for entry in found if last is None or entry.at <= last for line in lines.add(entry.text)]
        yield lines.last()

    def close(self) -> None:
        self._shared.leave(self._container)

    def _new(self, once: _Deduplicator, has_ended: bool) -> list[LogEntry]:
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

    def _met(self, entries: Sequence[LogEntry], once: _Deduplicator) -> None:
        """Note that the service was asked for this job alone."""
        if not self._container and entries:
            self._container = entries[-1].container
            self._shared.join(self._container)
        self._is_shared = bool(self._container) and self._shared.is_trusted
        # The random part spreads the checks of many followers over time.
        self._checked_at = time.monotonic() + random.uniform(-0.5, 0) * CHECK_EVERY_S
        self._check_since = once.since

    def _text(self, n_lines: int) -> str:
        entries = self._last(n_lines)
        self.cut = FULL if len(entries) >= MAX_KNOWN else ""
        return "".join(entry.text for entry in entries)

    def _last(self, n_lines: int) -> Sequence[LogEntry]:
        n_entries = n_lines + 50  # an entry may be only a part of a line
        entries = self._fetch(None, n_entries)
        if len(entries) >= n_entries:
            self._oldest = entries[0].at
        return entries
