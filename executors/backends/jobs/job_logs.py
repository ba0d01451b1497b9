"""Reads the logs of jobs: RetryingLog repeats failed reads, and StreamedLog reads a stream of server-sent events."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from email.utils import parsedate_to_datetime
from itertools import chain, islice
from typing import Any, TypeVar

from executors.backends.jobs.service import JobServiceError, retrying
from executors.logs import EVERY_LINE
from executors.logs.gaps import BREAK
from executors.logs.log import KnowsTimes, Log

QUIET_S = 0.5  # a stream that is silent for this time has sent all lines that exist
FIRST_LINE_S = 2.0  # the longest time until the first line
LONGEST_S = 30.0  # the longest wait for the rest of a log
AGAIN_LINES = 10_000  # the lines to read again after a stream broke off
SPAN_LINES = 10_000  # the lines of the first request when lines of a time span are searched
PART_LINES = 5_000  # a whole log is passed on in parts of this size
LONGEST_PAUSE_S = 30.0  # before a stream is opened again
BROKEN = "lines may be missing: its stream broke off, or took too long"
JOB_STARTED = "===== Job started"  # the service adds this line to the output of the job

log = logging.getLogger(__name__)

T = TypeVar("T")


class RetryingLog:
    """A log that repeats failed reads. While a follower's read fails, the log has no new lines.

    Args:
        inner: the log of the service.
        who: the replica of the log, for messages.

    Example:
        RetryingLog(service.open_log(job_id), "rank 3").tail(100)
    """

    def __init__(self, inner: Log, who: str) -> None:
        self._inner = inner
        self._who = who
        self._has_failed = False
        self.note, self.may_lag = inner.note, inner.may_lag

    @property
    def pause_s(self) -> float:
        return self._inner.pause_s

    @property
    def cut(self) -> str:
        return self._inner.cut

    def tail(self, n_lines: int) -> str:
        return retrying()(self._inner.tail, n_lines)

    def pieces(self) -> Iterator[bytes]:
        return retrying()(lambda: _begun(self._inner.pieces()))

    def lines(self, n_first: int, *, has_ended: bool = False) -> Iterator[list[str]]:
        try:
            yield from self._inner.lines(n_first, has_ended=has_ended)
            self._has_failed = False
        except JobServiceError as error:
            if error.kind == "rejected":
                raise
            if not self._has_failed:
                log.warning("%s: its log cannot be read at the moment: %s", self._who, error)
            self._has_failed = True

    def between(self, since: float | None, until: float | None) -> Iterator[list[str]]:
        if not isinstance(self._inner, KnowsTimes):
            raise ValueError("its service does not report the times of its lines")
        return retrying()(lambda: _begun(self._inner.between(since, until)))  # type: ignore[attr-defined]

    def close(self) -> None:
        self._inner.close()


def _begun(parts: Iterator[T]) -> Iterator[T]:
    """Return the same parts after reading the first of them. So an error of the service is raised here."""
    return chain(list(islice(parts, 1)), parts)


class StreamedLog:
    """A log that arrives as server-sent events on an open connection. A thread reads the connection.

    If the stream breaks off, it is opened again, and the log continues after the last line that arrived.

    Args:
        connect: opens a stream that begins with the given number of last lines, as a response of httpx. It returns
            None for an unknown job, and raises JobServiceError.
        has_ended: returns True if the job has ended, so that the stream has an end. It raises JobServiceError. Default:
            the job has not ended.

    Example:
        StreamedLog(lambda n_lines: log_stream(endpoint, namespace, job_id, n_lines)).tail(100)
    """

    note = cut = ""
    may_lag = True
    pause_s = 0.2

    def __init__(
        self, connect: Callable[[int], AbstractContextManager[Any]], has_ended: Callable[[], bool] = lambda: False
    ) -> None:
        self._connect = connect
        self._has_ended = has_ended
        self._lines: deque[tuple[float, str]] = deque()
        self._n_lines: int | None = None
        """The number of lines in the first request. None before the first request."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._is_over = False
        """True if the stream has ended without a failure."""
        self._has_all = False
        """True if all lines have arrived that existed when the stream was opened."""
        self._error: JobServiceError | None = None
        self._heard_at = 0.0
        self._last: tuple[float, int] | None = None
        """The time of the last line, and the number of lines with that time."""
        self._response: Any = None
        self._span: StreamedLog | None = None
        """The stream in which lines of a time span are searched."""

    def tail(self, n_lines: int) -> str:
        lines = self._take(n_lines, waits=True) if n_lines > 0 else []
        return "".join(f"{line}\n" for _, line in lines[-n_lines:])

    def pieces(self) -> Iterator[bytes]:
        for part in self._whole(EVERY_LINE):
            yield "".join(f"{line}\n" for _, line in part).encode()

    def lines(self, n_first: int, *, has_ended: bool = False) -> Iterator[list[str]]:
        yield [f"{line}\n" for _, line in self._take(n_first, waits=has_ended)]

    def between(self, since: float | None, until: float | None) -> Iterator[list[str]]:
        """Yield the lines of a time span, by the service's clock.

        A request to the service cannot name a time. So each request asks for more of the last lines than the one
        before, until the first of them is older than the span.

        Args:
            since: the beginning of the span, in seconds since the epoch. None: the beginning of the log.
            until: the end of the span. None: the end of the log.
        """
        n_lines, is_all = (EVERY_LINE if since is None else SPAN_LINES), False
        while not is_all:
            with contextlib.closing(StreamedLog(self._connect, self._has_ended)) as self._span:
                parts, held, n_held = self._span._whole(n_lines), list[list[tuple[float, str]]](), 0
                for part in parts:
                    held += [part] if part else []  # before the first line arrives, parts are empty
                    n_held += len(part)
                    begins_before = since is None or (bool(held) and held[0][0][0] < since)
                    if begins_before or n_held >= n_lines:
                        break
                is_all = begins_before or n_held < n_lines
                for part in chain(held, parts) if is_all else ():
                    yield [
                        f"{line}\n"
                        for at, line in part
                        if (since is None or at >= since) and (until is None or at <= until)
                    ]
                self.cut = self._span.cut
            n_lines *= 10

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._span is not None:
            self._span.close()
        with contextlib.suppress(Exception):  # there is no connection, or it is closed already
            self._response.extensions["network_stream"].get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    def _take(self, n_lines: int, *, waits: bool) -> list[tuple[float, str]]:
        """Return the lines that have arrived, each with its time.

        The first call, and a call with `waits`, first wait until the stream has sent all lines that exist.
        """
        with self._changed:
            if self._n_lines is None:
                waits = True
                self._begin(n_lines)
            if waits and not self._wait():
                self.cut = BROKEN
            lines = list(self._lines)
            self._lines.clear()
            self._changed.notify_all()
            if self._error is not None and not lines:
                raise self._error
            return lines

    def _begin(self, n_lines: int) -> None:
        self._n_lines = n_lines
        self._heard_at = time.monotonic()
        threading.Thread(target=self._read, args=(n_lines,), name="replicas-log", daemon=True).start()

    def _whole(self, n_lines: int) -> Iterator[list[tuple[float, str]]]:
        """Yield the last lines in parts, for as long as lines arrive.

        A stream that falls silent has sent all lines that exist. If the job has ended, this waits for the end of the
        stream instead.
        """
        self.cut, has_ended, has_any, is_over = "", False, False, False
        if self._n_lines is None:
            self._begin(n_lines)
        while not is_over:
            with self._changed:
                has_part = self._has_part(LONGEST_S if has_ended else None)
                lines, is_over, error = list(self._lines), self._has_all or self._is_closed, self._error
                self._lines.clear()
                if has_part:
                    self._heard_at = time.monotonic()  # the time that the caller takes for this part must not count
                self._changed.notify_all()
            has_any = has_any or bool(lines)
            if error is not None and not has_any:
                raise error
            yield lines
            if is_over:
                return
            if error is not None or (has_ended and not has_part):
                self.cut, is_over = BROKEN, True
            elif not has_part:
                has_ended = self._may_have_ended()
                is_over = not has_ended

    def _has_part(self, patience_s: float | None) -> bool:
        """Wait for a part, the last line, or a failure. Return False if the stream is silent instead."""
        while not (self._has_all or self._error or self._is_closed) and len(self._lines) < PART_LINES:
            left_s = self._heard_at + (patience_s or (QUIET_S if self._last else FIRST_LINE_S)) - time.monotonic()
            if left_s <= 0:
                return False
            self._changed.wait(left_s)
        return True

    def _may_have_ended(self) -> bool:
        try:
            return self._has_ended()
        except JobServiceError:  # not known, so the caller waits for the end of the stream
            return True

    def _wait(self) -> bool:
        """Wait for the lines that exist. Return False if the stream broke off before it had sent them."""
        deadline = time.monotonic() + LONGEST_S
        self._has_all = self._is_over
        while not self._has_all and self._error is None and (now := time.monotonic()) < deadline:
            left_s = self._heard_at + (QUIET_S if self._last else FIRST_LINE_S) - now
            if left_s <= 0:
                return True
            self._changed.wait(left_s)
        return self._has_all

    def _read(self, n_lines: int) -> None:
        failures, pause_s = 0, 0.0
        while not self._is_closed:
            last, error = self._last, None
            try:
                with self._connect(n_lines) as response:
                    self._response = response
                    self._read_stream(response)
                failures = 0
            except JobServiceError as raised:
                error = raised
                failures += 1
            except Exception as raised:  # noqa: BLE001 - a connection that `close` shut down may raise any error
                error = JobServiceError(f"The stream of the log broke off: {raised!r}", "unavailable")
                failures += 1
            longer_s = max(1.0, 2 * pause_s) if last == self._last else 1.0
            # A stream that breaks off is opened again at once. Only the second failure in a row waits.
            pause_s = 0.0 if failures == 1 else min(longer_s, LONGEST_PAUSE_S)
            is_refused = error is not None and error.kind == "rejected"
            with self._changed:
                self._error = error if failures > 1 or is_refused else None
                self._is_over = self._has_all = error is None
                self._heard_at = time.monotonic()
                self._changed.notify_all()
                if is_refused:
                    return
                self._changed.wait_for(lambda: self._is_closed, pause_s)
                self._is_over = False
            n_lines = (
                n_lines if self._last is None else AGAIN_LINES
            )  # without a line yet, the first request is repeated

    def _read_stream(self, response: Any) -> None:
        if response is None:  # the service does not know the job
            return
        has_date = "date" in response.headers
        began_at = parsedate_to_datetime(response.headers["date"]).timestamp() if has_date else time.time()
        known, n_known, is_new = self._last, 0, self._last is None
        for line in response.iter_lines():
            if self._is_closed:
                return
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            text, at = str(event["data"]), _seconds(event.get("timestamp"))
            if text.startswith(JOB_STARTED):
                continue
            if known is not None and not is_new:
                if at < known[0] or (at == known[0] and n_known < known[1]):
                    n_known += at == known[0]
                    continue
                is_new = True
                if n_known == 0:
                    self.cut = BROKEN
                    self._add(BREAK, at)
            self._add(text, at, has_all=at > began_at + 1)

    def _add(self, line: str, at: float, has_all: bool = False) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._lines) < max(AGAIN_LINES, self._n_lines or 0))
            self._lines.append((at, line))
            self._last = (at, self._last[1] + 1 if self._last is not None and self._last[0] == at else 1)
            self._heard_at = time.monotonic()
            self._has_all = self._has_all or has_all
            self._changed.notify_all()


def _seconds(stamp: Any) -> float:
    try:
        return datetime.fromisoformat(stamp).timestamp()
    except (TypeError, ValueError):
        return 0.0
