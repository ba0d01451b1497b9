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
    """Make a directory unreachable during the block. Every access below it fails, also for root.

    A symbolic link to itself replaces it in one step, because a directory that is missing for a moment counts as
    deleted.
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
    """Stop a process during the block. It then accepts connections and does not answer."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _exchange(first: Path, second: Path) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(first))
