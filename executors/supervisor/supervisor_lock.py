"""Which process of this machine supervises a replica, as its kernel knows it.

A supervisor holds a lock on one byte of a file for each of its ranks, in this user's own state directory. Pids in a
run's store are not believed: a writer of the store could have any process signalled.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
from pathlib import Path

from executors.process import lock_holder, open_process, signal_open_process

NAME = "supervisors.lock"
RANKS_PER_ATTEMPT = 1 << 20  # each attempt has a stretch of the file, which stays empty


def open_locks(folder: Path) -> int:
    """Open the file of the locks; return the descriptor, which stays open: closing it gives back what it holds."""
    return os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def hold(descriptor: int, rank: int, attempt: int) -> None:
    """Hold the lock of an attempt until this process ends. What it forks does not have the lock."""
    # Without a lock (on an odd file system) the cancel marker still counts.
    with contextlib.suppress(OSError):
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, attempt * RANKS_PER_ATTEMPT + rank)


def wake(folder: Path, rank: int, attempt: int) -> bool:
    """Have the supervisor of a replica look for news (SIGUSR1); False if no process of this machine holds its lock."""
    pid = holder(folder, rank, attempt)
    if pid is None:
        return False
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        descriptor = open_process(pid)
        try:
            if holder(folder, rank, attempt) == pid:  # else it ended, and the pid may be another's by now
                signal_open_process(descriptor, signal.SIGUSR1)
                return True
        finally:
            os.close(descriptor)
    return False


def holder(folder: Path, rank: int, attempt: int) -> int | None:
    """Return the pid of the process that holds the lock of a replica, if there is one in this pid namespace."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        return lock_holder(descriptor, attempt * RANKS_PER_ATTEMPT + rank)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        return None
    finally:
        os.close(descriptor)
