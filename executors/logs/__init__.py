"""Log files that may be huge and still growing; and the logs of replicas on any executor, read and followed."""

from __future__ import annotations

import codecs
import os
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from executors.protocol import OffsetReader, ReplicaStatus, ServerlessExecutor

BLOCK_BYTES = 64 * 1024
MAX_READ_BYTES = 4 * 1024 * 1024  # what a reader holds at most, whatever the lines' length
PAUSE_S = 0.3
LONGEST_LINE = 4 << 20  # characters; a text without a newline is cut there
WINDOW_LINES = 2000  # what is asked of an executor that can only give the last lines


def tail_text(path: Path, n_bytes: int) -> str:
    """Return the last bytes of a file as text; empty when the file does not exist."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - n_bytes))
            return file.read(n_bytes).decode(errors="replace")
    except FileNotFoundError:
        return ""


def tail_lines(path: Path, n_lines: int) -> tuple[bytes, int]:
    """Return the last lines of a file, at most 4 MiB of them, and the offset behind them. Reads backwards."""
    try:
        with open(path, "rb") as file:
            start = end = file.seek(0, os.SEEK_END)
            newlines = 0
            while start > 0 and newlines <= n_lines and end - start < MAX_READ_BYTES:
                step = min(BLOCK_BYTES, start)
                start -= step
                file.seek(start)
                newlines += file.read(step).count(b"\n")
            file.seek(start)
            data = file.read(end - start)
    except FileNotFoundError:
        return b"", 0
    lines = data.split(b"\n")  # not splitlines(): the \r of a progress bar does not end a line
    unfinished = 0 if lines[-1] else 1
    return b"\n".join(lines[max(0, len(lines) - n_lines - unfinished) :]) if n_lines > 0 else b"", end


def read_from(path: Path, offset: int) -> tuple[bytes, int]:
    """Return what a growing file holds from `offset` on, at most 4 MiB, and the offset behind it."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(MAX_READ_BYTES)
    except FileNotFoundError:
        return b"", offset
    return data, offset + len(data)


def last_lines(executor: ServerlessExecutor, handle: Any, n_lines: int, kept: Callable[[], str]) -> str:
    """Return the last lines of a replica's log; `kept` returns what its outcome holds of it, if there is one."""
    log = "" if handle is None else executor.stream_logs(handle, n_lines=n_lines)
    if not log or n_lines <= 0 or isinstance(executor, OffsetReader):  # a file, which never lags
        return log
    return "".join(completed(log, kept()).splitlines(keepends=True)[-n_lines:])


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
    """Yield whole lines with their newline, led by `[rank]` if `prefix`, until all have ended and are read to the end.

    Args:
        kept: returns the end of what a rank printed, after the rank has ended.
    """
    kind = _OffsetReader if isinstance(executor, OffsetReader) else _TailReader
    readers = {rank: kind(executor, handle, tail) for rank, handle in handles.items() if handle is not None}
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


class _OffsetReader:
    """Continues where the last read ended, so that no line is missed."""

    def __init__(self, executor: Any, handle: Any, tail: int) -> None:
        self._executor = executor
        self._handle = handle
        self._tail = tail
        self._offset: int | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may lie across two reads
        self._rest = ""

    def read(self, kept: str | None) -> Iterator[str]:
        """Yield the lines since the last call; `kept` is None while the replica runs."""
        while True:
            part, offset = self._executor.read_logs(self._handle, offset=self._offset, n_lines=self._tail)
            if offset == self._offset or not (part or self._offset is None):
                break
            self._offset = offset
            *lines, self._rest = (self._rest + self._decoder.decode(part)).split("\n")
            yield from (f"{line}\n" for line in lines)
            if len(self._rest) > LONGEST_LINE:
                yield f"{self._rest}\n"
                self._rest = ""
        if kept is not None and self._rest:
            yield f"{self._rest}\n"


class _TailReader:
    """Compares the last lines with those seen before, for executors that offer nothing else.

    Exact while the log is shorter than the window. Beyond it, some lines of a program that prints the same ones over
    and over may be left out.
    """

    def __init__(self, executor: Any, handle: Any, tail: int) -> None:
        self._executor = executor
        self._handle = handle
        self._tail = tail
        self._seen: list[str] | None = None

    def read(self, kept: str | None) -> Iterator[str]:
        """Yield the lines since the last call; `kept` is None while the replica runs."""
        text = self._executor.stream_logs(self._handle, n_lines=WINDOW_LINES)
        if kept is not None:
            text = completed(text, kept)
        *lines, rest = text.split("\n")
        if kept is not None and rest:
            lines.append(rest)
        if self._seen is None:
            fresh = lines[max(0, len(lines) - self._tail) :]
            self._seen = lines
        elif "\n".join(["", *lines, ""]) in "\n".join(["", *self._seen, ""]):  # a response that was cut off
            fresh = []
        else:
            fresh = lines[_place_after(self._seen, lines) :]
            self._seen = [*self._seen, *fresh][-WINDOW_LINES:]
        yield from (f"{line}\n" for line in fresh)


def completed(log: str, kept: str) -> str:
    """Return a log with the lines that its replica kept and printed after the last one that both hold.

    Services deliver lines seconds late, and responses get cut off. The log may also hold lines of other processes. A
    line that is printed over and over may show twice.

    Args:
        log: the last lines, as the service gives them.
        kept: the end of what the replica printed, from its outcome.
    """
    whole, newline, partial = log.rpartition("\n")
    lines = kept.removesuffix("\n").split("\n")
    numbers = [number for number, line in enumerate(lines) if _key(line)]
    place = _place_after(list(map(_key, whole.split("\n"))), [_key(lines[number]) for number in numbers])
    missing = lines[numbers[place - 1] + 1 if place else 0 :]
    if not any(map(_key, missing)):
        return log
    if partial and not _key(missing[0]).startswith(_key(partial)):
        partial += "\n"
    else:
        partial = ""  # the beginning of the first missing line
    return f"{whole}{newline}{partial}" + "\n".join(missing) + "\n"


def _place_after(seen: Sequence[str], lines: Sequence[str]) -> int:
    """Return the number of `lines` up to the last ones that were seen.

    Of the seen lines that occur in `lines` at all, as many of the last ones count as lie together there; of several
    such places the first one.
    """
    known = set(lines)
    common = [line for line in seen if line in known]
    text = "\n".join(["", *lines, ""])

    def ending(n: int) -> str:
        return "\n".join(["", *common[len(common) - n :], ""])

    n = bisect(range(1, len(common) + 1), False, key=lambda n: ending(n) not in text)
    return text[: text.index(ending(n))].count("\n") + n if n else 0


def _key(line: str) -> str:
    """Return what of a line comes through: a service may cut within a character, or a progress bar at each `\\r`."""
    last = line.rstrip("\r").rpartition("\r")[2].strip()
    return last.encode("ascii", "ignore").decode() or last
