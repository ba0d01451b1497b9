"""Logs over any executor: the last lines, and following them: every later one, until the replicas have ended."""

from __future__ import annotations

import codecs
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from executors.late_logs import completed
from executors.protocol import ReplicaStatus, ServerlessExecutor

PAUSE_S = 0.3
MARK_CHARACTERS = 4096  # how much of what was seen is looked for in a window that moved on
LONGEST_LINE = 4 << 20  # characters; what has no newline for longer is cut there
WINDOW_LINES = 2000  # what is asked of an executor that can only give the last lines


def follow_logs(
    executor: ServerlessExecutor,
    poll: Callable[[int], ReplicaStatus],
    handles: Mapping[int, Any],
    tail: int,
    *,
    prefix: bool,
    kept: Callable[[int], str] = lambda rank: "",
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[str]:
    """Yield whole lines with their newline, led by `[rank]` if `prefix`; end when all have ended and are drained.

    Args:
        kept: returns the end of what a rank printed, after it has ended.
    """
    readers = {rank: _reader(executor, handle, tail) for rank, handle in handles.items() if handle is not None}
    while readers:
        found_any = False
        for rank, reader in list(readers.items()):
            ended = poll(rank).is_terminal  # before reading: what is written before the end is read after it
            for line in reader.read(kept(rank) if ended else None):
                found_any = True
                yield f"[{rank}] {line}" if prefix else line
            if ended:
                del readers[rank]
        if readers and not found_any:
            sleep(PAUSE_S)


def last_lines(executor: ServerlessExecutor, handle: Any, n_lines: int, kept: Callable[[], str]) -> str:
    """Return the last lines of a replica's log; `kept` tells what its outcome holds, if it has one."""
    log = "" if handle is None else executor.stream_logs(handle, n_lines=n_lines)
    if not log or n_lines <= 0 or hasattr(executor, "read_logs"):  # a file, which never lags
        return log
    return "".join(completed(log, kept(), n_lines).splitlines(keepends=True)[-n_lines:])


class _Lines:
    """Cuts a growing text into lines, and a line without end into pieces."""

    def __init__(self) -> None:
        self._rest = ""

    def feed(self, text: str, *, flush: bool) -> Iterator[str]:
        *lines, self._rest = (self._rest + text).split("\n")
        yield from (f"{line}\n" for line in lines)
        if len(self._rest) > LONGEST_LINE or (flush and self._rest):
            yield f"{self._rest}\n"
            self._rest = ""


class _OffsetReader:
    """Reads on where it stopped, for executors whose `read_logs` takes an offset: no line is missed."""

    def __init__(self, executor: Any, handle: Any, tail: int) -> None:
        self._read_logs = executor.read_logs
        self._handle = handle
        self._tail = tail
        self._offset: int | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may lie across two reads
        self._lines = _Lines()

    def read(self, kept: str | None) -> Iterator[str]:
        """Yield the lines that came since; `kept` is None while the replica runs."""
        while True:
            part, offset = self._read_logs(self._handle, offset=self._offset, n_lines=self._tail)
            if offset == self._offset or not (part or self._offset is None):
                break
            self._offset = offset
            yield from self._lines.feed(self._decoder.decode(part), flush=False)
        yield from self._lines.feed("", flush=kept is not None)


class _TailReader:
    """Compares the last lines with those seen before, for executors that offer nothing else.

    Exact while the log is shorter than the window; beyond, a program that prints the same lines over and over may
    have some of them left out.
    """

    def __init__(self, executor: ServerlessExecutor, handle: Any, tail: int) -> None:
        self._executor = executor
        self._handle = handle
        self._tail = tail
        self._seen: str | None = None
        self._lines = _Lines()

    def read(self, kept: str | None) -> Iterator[str]:
        """Yield the lines that came since; `kept` is None while the replica runs."""
        text = self._executor.stream_logs(self._handle, n_lines=WINDOW_LINES)
        if kept is not None:
            text = completed(text, kept, WINDOW_LINES)
        if self._seen is None:
            fresh = "".join(text.splitlines(keepends=True)[-self._tail :])
        elif text in self._seen:  # nothing new, or an answer that broke off before it
            fresh, text = "", self._seen
        elif text.startswith(self._seen):
            fresh = text[len(self._seen) :]
        else:
            mark = self._seen[-MARK_CHARACTERS:]
            at = text.rfind(mark)
            fresh = text if at < 0 else text[at + len(mark) :]
        self._seen = text
        yield from self._lines.feed(fresh, flush=kept is not None)


def _reader(executor: ServerlessExecutor, handle: Any, tail: int) -> _OffsetReader | _TailReader:
    return (_OffsetReader if hasattr(executor, "read_logs") else _TailReader)(executor, handle, tail)
