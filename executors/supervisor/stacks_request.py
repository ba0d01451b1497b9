"""Asks a rank to dump the stacks of its threads into a file that its supervisor reads."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from executors.process import open_file_of
from executors.replica.shared_page import SharedPage
from executors.worker.watched import STACKS_NAME

HELD_S = 1.0
"""If a rank has not beaten for this long, a call probably holds the GIL. It beats four times a second."""
READ_LIMIT_S = 3.0  # a dump takes milliseconds, and begins late on a loaded machine
MAX_STACKS = 1 << 20


def open_stacks_file(page: SharedPage, pid: int, *, is_rank: bool) -> int | None:
    """Open the file into which a process dumps its stacks.

    Args:
        page: the page of the rank.
        pid: the process that dumps.
        is_rank: True if this is the rank itself. It may have got its file from this process before it started.

    Returns: a new descriptor. None: the user's code has closed the file, and opened another under the same number.

    Raises:
        OSError: the process has ended, or has no such file.
    """
    if is_rank and page.stacks_descriptor >= 0:
        return os.dup(page.stacks_descriptor)
    return open_file_of(pid, int(page.stacks_file), STACKS_NAME)


class StacksRequest:
    """A request to a rank to dump the stacks of its threads.

    First the page asks the thread of the rank that beats. It has the GIL while it dumps, so no thread changes what it
    reads. If it does not beat, a call holds the GIL, and a signal asks it. A handler without the GIL may crash the
    process if another thread executes bytecode at that time.

    Args:
        page: the page of the rank.
        file: a descriptor of the file for the stacks. This object closes it.
        now: the time by `time.monotonic`.
        send_signal: sends the signal.
    """

    def __init__(self, page: SharedPage, file: int, now: float, send_signal: Callable[[], object]) -> None:
        self._page, self._file, self._send_signal = page, file, send_signal
        self._asked_at = now if now - page.beat <= HELD_S else -math.inf
        self._signalled_at: float | None = None
        self._size = -1
        page.stacks_wanted = 1

    def is_complete(self, now: float) -> bool:
        """Return True if the file has the stacks, or will not get them. Call this several times a second.

        Args:
            now: the time by `time.monotonic`.
        """
        page = self._page
        if self._signalled_at is None:
            if not page.stacks_wanted:
                return True
            if now - max(page.beat, self._asked_at) > HELD_S:
                page.stacks_wanted = 0
                os.ftruncate(self._file, 0)
                self._send_signal()
                self._signalled_at = now
            return False
        if now - self._signalled_at >= READ_LIMIT_S:
            return True
        # A dump grows while it is written. On a loaded machine it begins late.
        before, self._size = self._size, os.fstat(self._file).st_size
        return self._size > 0 and self._size == before

    def read(self) -> str:
        """Return the stacks. Empty: the rank has dumped none."""
        return os.pread(self._file, MAX_STACKS, 0).decode(errors="replace")

    def close(self) -> None:
        """Close the file, and withdraw a request that was not met."""
        self._page.stacks_wanted = 0
        os.close(self._file)
