"""When a log grew: `output.times` beside it, pairs of a time and the log's size at that time, once a second."""

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
    """Return where the times of a log are kept."""
    return log.with_name(NAME)


class TimesWriter:
    """Notes when a log grows, while it is called. The log itself is not changed."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._size = -1
        self._noted_at = -math.inf

    def note(self, now: float, *, at_once: bool = False) -> None:
        """Add a pair if the log has grown, at most one each second. A pair that cannot be written is left out.

        Args:
            now: Unix time.
            at_once: the log is at its end.
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
    """Return where the first line of a log begins that may have been written after a time, to the second.

    Raises:
        FileNotFoundError: the times of the log were not kept.
    """
    data = times_of(log).read_bytes()
    pairs = list(PAIR.iter_unpack(data[: len(data) // PAIR.size * PAIR.size]))
    index = bisect_right(pairs, at, key=lambda pair: pair[0]) - 1
    return 0 if index < 0 else _start_of_line(log, pairs[index][1])


def _start_of_line(log: Path, offset: int) -> int:
    """Return where the line begins that an offset lies in."""
    with open(log, "rb") as file:
        start = max(0, offset - BLOCK_BYTES)
        file.seek(start)
        return start + file.read(offset - start).rfind(b"\n") + 1
