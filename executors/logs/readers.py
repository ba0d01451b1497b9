"""Reads the log of one attempt: by offset from a file, or by its last lines if an executor offers only these."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from executors.logs import EVERY_LINE, LIMITED, MAX_READ_BYTES, read_from, tail_lines
from executors.logs.gaps import BREAK, come_late, goes_on, place_after
from executors.logs.times import offset_at

LONGEST_LINE = 4 << 20  # characters; a longer text without a newline is cut
PART_BYTES = 256 * 1024
WINDOW_LINES = 2000  # the number of lines to request from an executor that only returns the last lines


class LineBuffer:
    """Joins pieces of text into whole lines."""

    def __init__(self) -> None:
        self.rest = ""
        """The beginning of a line whose end has not come yet."""

    def add(self, text: str) -> list[str]:
        """Return the lines that are complete after this piece, with their newlines."""
        *lines, self.rest = (self.rest + text).split("\n")
        if len(self.rest) > LONGEST_LINE:
            lines.append(self.rest)
            self.rest = ""
        return [f"{line}\n" for line in lines]

    def last(self) -> list[str]:
        """Return the last line if it has no newline, as a list."""
        rest, self.rest = self.rest, ""
        return [rest] if rest else []


def lines_of(pieces: Iterable[bytes]) -> Iterator[list[str]]:
    """Yield the lines of a log that is read in pieces. Each part has about the size of a piece."""
    decoder, lines = codecs.getincrementaldecoder("utf-8")(errors="replace"), LineBuffer()
    for piece in pieces:
        yield lines.add(decoder.decode(piece))
    yield lines.last()


class OffsetLog:
    """Reads a log by offset. Each read continues where the last one ended, so no line is missed.

    Args:
        read: returns bytes and the offset after them. It is called with an offset, or with a number of last lines.
    """

    note = cut = ""
    may_lag = False
    pause_s = 0.3
    reads_all = False
    """True if one read returns all new output."""

    def __init__(self, read: Callable[[int | None, int], tuple[bytes, int]]) -> None:
        self._read = read
        self._offset: int | None = None
        # A character may be divided between two reads.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._lines = LineBuffer()

    def tail(self, n_lines: int) -> str:
        data, _ = self._read(None, n_lines)
        self.cut = LIMITED if len(data) >= MAX_READ_BYTES and data.count(b"\n") < n_lines else ""
        return data.decode(errors="replace")

    def pieces(self) -> Iterator[bytes]:
        self.cut = ""
        yield from self._bytes(0, None)

    def lines(self, n_first: int, *, has_ended: bool = False) -> Iterator[list[str]]:
        while True:
            part, offset = self._read(self._offset, n_first)
            if offset == self._offset or not (part or self._offset is None):
                break
            self._offset = offset
            yield self._lines.add(self._decoder.decode(part))
            if self.reads_all:
                break
        if has_ended:
            yield self._lines.last()

    def between(self, since: float | None, until: float | None) -> Iterator[list[str]]:
        yield from lines_of(self._bytes(*self._span(since, until)))

    def _bytes(self, offset: int, end: int | None) -> Iterator[bytes]:
        while end is None or offset < end:
            part, behind = self._read(offset, 0)
            if not part:
                break
            yield part if end is None else part[: end - offset]
            offset = behind
            if self.reads_all:
                break

    def _span(self, since: float | None, until: float | None) -> tuple[int, int | None]:
        """Return the offsets at which the lines of a time span begin and end."""
        if since is not None or until is not None:
            raise ValueError("the times of its lines are not kept")
        return 0, None

    def close(self) -> None:
        """Do nothing, because no file stays open."""


class FileLog(OffsetLog):
    """The log in a file of this machine. It is empty if the file does not exist."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            lambda offset, n_lines: tail_lines(path, n_lines) if offset is None else read_from(path, offset, PART_BYTES)
        )
        self._path = path

    def _span(self, since: float | None, until: float | None) -> tuple[int, int | None]:
        if (since is None and until is None) or not self._path.exists():
            return 0, None
        try:
            start = 0 if since is None else offset_at(self._path, since)
            return start, None if until is None else offset_at(self._path, until)
        except OSError:
            raise ValueError(f"the times of the lines of {self._path} were not kept") from None


class TailedLog:
    """Reads a log of which only the last lines are available, and finds the new ones by comparison.

    The result is exact while the log is shorter than the window. After that, some lines may be missing if a program
    prints the same lines repeatedly. An additional line then says that lines may be missing.

    Args:
        read: returns the last lines, up to a given number.
        window: the number of lines to request.
    """

    may_lag = True
    pause_s = 0.5
    cut = ""

    def __init__(self, read: Callable[[int], str], window: int = WINDOW_LINES) -> None:
        self._read = read
        self._window = window
        self._seen: list[str] | None = None

    @property
    def note(self) -> str:
        return ""

    def tail(self, n_lines: int) -> str:
        return self._read(n_lines)

    def pieces(self) -> Iterator[bytes]:
        yield self._read(EVERY_LINE).encode()

    def lines(self, n_first: int, *, has_ended: bool = False) -> Iterator[list[str]]:
        *lines, rest = self._read(self._window).split("\n")
        is_stale = False
        if self._seen is None:
            fresh = lines[max(0, len(lines) - n_first) :]
            self._seen = lines
        # The answer was cut off, or has no new line.
        elif self._seen and "\n".join(["", *lines, ""]) in "\n".join(["", *self._seen, ""]):
            fresh = []
            is_stale = not lines or lines[-1] != self._seen[-1]
        else:
            if goes_on(self._seen, lines):
                fresh = lines[place_after(self._seen, lines) :]
            elif (late := come_late(self._seen, lines)) is not None:
                fresh = late
            else:
                fresh, self._seen = [BREAK, *lines], []
            self._seen = [*self._seen, *fresh][-max(WINDOW_LINES, len(lines)) :]
        yield [f"{line}\n" for line in fresh]
        if has_ended and rest and not is_stale:
            yield [rest]

    def close(self) -> None:
        """Do nothing, because no file stays open."""
