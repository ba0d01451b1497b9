"""Records when a log grew, in the file `output.times` next to it: once a second, the time and the size of the log."""

from __future__ import annotations

import contextlib
import math
import os
import struct
from bisect import bisect_right
from pathlib import Path

from executors.logs import BLOCK_BYTES

NAME = "output.times"
PAIR = struct.Struct("<dq")
EVERY_S = 1.0


def times_of(log: Path) -> Path:
    """Return the path of the file with the times of a log."""
    return log.with_name(NAME)


class TimesWriter:
    """Records the size of a log repeatedly while the log grows. The log itself is not changed."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._size = -1
        self._noted_at = -math.inf

    def note(self, now: float, *, at_once: bool = False) -> None:
        """Record the time and the size if the log has grown, at most once a second. Errors of writing are ignored.

        Args:
            now: Unix time.
            at_once: True to record now, because the log is complete.
        """
        if now - self._noted_at < EVERY_S and not at_once:
            return
        with contextlib.suppress(OSError):
            size = os.stat(self._log).st_size
            if size != self._size:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
                file = os.open(times_of(self._log), flags, 0o600)
                try:
                    os.write(file, PAIR.pack(now, size))
                finally:
                    os.close(file)
                self._size, self._noted_at = size, now


def offset_at(log: Path, at: float) -> int:
    """Return the offset of the first line that may have been written after a time. The precision is one second.

    Raises:
        FileNotFoundError: no times were recorded for this log.
    """
    data = times_of(log).read_bytes()
    pairs = list(PAIR.iter_unpack(data[: len(data) // PAIR.size * PAIR.size]))
    index = bisect_right(pairs, at, key=lambda pair: pair[0]) - 1
    return 0 if index < 0 else _start_of_line(log, pairs[index][1])


def _start_of_line(log: Path, offset: int) -> int:
    """Return the offset at which the line around an offset begins."""
    with open(log, "rb") as file:
        start = max(0, offset - BLOCK_BYTES)
        file.seek(start)
        return start + file.read(offset - start).rfind(b"\n") + 1
