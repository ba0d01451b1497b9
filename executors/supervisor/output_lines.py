"""Reads the lines of an attempt's output once each: from its log on this machine, or from its pages in a container."""

from __future__ import annotations

import os
import re
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from executors.replica.shared_page import SharedPage

MAX_LINE = 4096
"""The bytes of a line that are returned. The rest of a longer line is left out."""
READ_BYTES = 1 << 20
"""The most bytes of a file that are read in one look."""
MOST_BEHIND = 16 << 20
"""If more bytes of a file wait, the oldest are skipped, because the replica prints faster than they can be judged."""
OURS = "replicas: The rule "
"""The begin of the lines that the supervisor prints about broken rules. These lines are left out."""
_ENDS = re.compile(rb"[\r\n]+")


class OutputLines:
    """The lines of an attempt's output, each returned once.

    A carriage return also ends a line, so that each state of a progress bar is a line.

    Args:
        pages: the pages of the attempt's processes. They are read if the file does not exist.
        file: the log of the attempt. None: the service has the log, and the pages have the end of the output.

    Example:
        for line in OutputLines([page], None).lines():
            print(line)
    """

    def __init__(self, pages: Sequence[SharedPage], file: Path | None) -> None:
        self._pages = pages
        self._file = file
        self._n_read = [0] * (1 if file is not None else len(pages))
        self._parts = [b""] * len(self._n_read)
        """The unfinished last line of each source."""
        self._identity: int | None = None
        self._waiting = deque[bytes]()
        self._n_lost = self._n_earlier = 0
        self._is_behind = False
        """True if the file has more than was read."""

    @property
    def has_more(self) -> bool:
        """True if output waits that the last call of `lines` has not returned."""
        return bool(self._waiting) or self._is_behind

    def n_bytes(self) -> int:
        """Return the number of bytes that the attempt has printed so far."""
        if self._file is None:
            return sum(page.n_written for page in self._pages)
        try:
            return self._n_earlier + os.stat(self._file).st_size
        except OSError:
            return self._n_earlier

    def take_lost(self) -> int:
        """Return the number of bytes that were skipped since the last call."""
        lost, self._n_lost = self._n_lost, 0
        return lost

    def lines(self, *, is_last: bool = False) -> Iterator[str]:
        """Yield the new lines. The lines that the caller does not take stay for the next call.

        Args:
            is_last: True reads all of the output, and also yields the last line if it is not finished. Default False:
                one call reads at most 1 MiB.
        """
        if is_last or not self._waiting:
            self._read()
        yield from self._take()
        while is_last and self._is_behind:
            self._read()
            yield from self._take()
        for index, part in enumerate(self._parts) if is_last else ():
            self._parts[index] = b""
            self._waiting.append(part)
        yield from self._take()

    def _take(self) -> Iterator[str]:
        while self._waiting:
            line = self._waiting.popleft().decode(errors="replace")
            if line and OURS not in line:
                yield line

    def _read(self) -> None:
        """Read new output."""
        if self._file is not None:
            data, self._is_behind = self._read_file(self._file)
            self._add(0, data)
            return
        for index, page in enumerate(self._pages):
            data, self._n_read[index], lost = page.output_since(self._n_read[index])
            if lost:
                self._n_lost += lost
                self._parts[index] = b""
            self._add(index, data)

    def _read_file(self, path: Path) -> tuple[bytes, bool]:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return b"", False
        try:
            found = os.fstat(descriptor)
            if self._identity not in (None, found.st_ino) or found.st_size < self._n_read[0]:
                # The user's own tools have replaced or truncated the file, so its begin is new.
                self._n_earlier += self._n_read[0]
                self._n_read[0] = 0
            self._identity = found.st_ino
            behind = found.st_size - self._n_read[0]
            if behind > MOST_BEHIND:
                self._n_lost += behind - MOST_BEHIND
                self._n_read[0] += behind - MOST_BEHIND
                self._parts[0] = b""
            data = os.pread(descriptor, READ_BYTES, self._n_read[0])
            self._n_read[0] += len(data)
            return data, self._n_read[0] < found.st_size
        except OSError:
            return b"", False
        finally:
            os.close(descriptor)

    def _add(self, index: int, data: bytes) -> None:
        """Split new output of a source into lines."""
        first, *lines = _ENDS.split(data)
        pieces = [self._parts[index] + first, *lines]
        self._parts[index] = pieces.pop()[:MAX_LINE]
        self._waiting.extend(piece[:MAX_LINE] for piece in pieces)
