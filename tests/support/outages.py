"""Outages of real stores: a directory that cannot be entered, a server that is stopped."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

RENAME_EXCHANGE, AT_FDCWD = 2, -100


@contextlib.contextmanager
def away(folder: Path) -> Iterator[None]:
    """Let a directory be away within the block: whatever is asked below it fails, also for root.

    A link to itself stands in its place, put there in one step: a directory that is missing for a moment is a deletion.
    """
    loop = folder.with_name(f"{folder.name}-away")
    loop.symlink_to(folder.name)
    _exchange(loop, folder)
    try:
        yield
    finally:
        _exchange(loop, folder)
        loop.unlink()


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Let a process be stopped within the block: it takes connections, and answers nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _exchange(first: Path, second: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(first))
