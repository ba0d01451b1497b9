"""Finds and wakes the process of this machine that supervises a replica. The process is known by a file lock.

A supervisor locks one byte of a file for each of its ranks. The file is in the user's own state directory. Pids in a
run's store are not used. Otherwise, any process that can write to the store could make this project send signals to any
process of the user.
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
RANKS_PER_ATTEMPT = 1 << 20  # each attempt has its own range of bytes; the file itself stays empty


def open_locks(folder: Path) -> int:
    """Open the file of the locks, and return its descriptor. Closing the descriptor releases all its locks.

    Args:
        folder: the user's state directory.
    """
    return os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def hold(descriptor: int, rank: int, attempt: int) -> None:
    """Hold the lock of an attempt until this process ends. Forked children do not hold it.

    Args:
        descriptor: the file of the locks.
        rank: the rank.
        attempt: the number of the attempt.
    """
    # Some file systems have no locks. Then nothing wakes the supervisor, and it finds a cancel marker a second later.
    with contextlib.suppress(OSError):
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, attempt * RANKS_PER_ATTEMPT + rank)


def wake(folder: Path, rank: int, attempt: int) -> bool:
    """Send SIGUSR1 to the supervisor of a replica, so that it reads the store at once.

    Args:
        folder: the user's state directory.
        rank: the rank.
        attempt: the number of the attempt.

    Returns: False if no process of this machine holds the lock of the replica.
    """
    pid = holder(folder, rank, attempt)
    if pid is None:
        return False
    with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
        descriptor = open_process(pid)
        try:
            # Otherwise the process has ended, and another one may have its pid.
            if holder(folder, rank, attempt) == pid:
                signal_open_process(descriptor, signal.SIGUSR1)
                return True
        finally:
            os.close(descriptor)
    return False


def holder(folder: Path, rank: int, attempt: int) -> int | None:
    """Return the pid of the process that holds the lock of a replica. None: no process of this pid namespace does.

    Args:
        folder: the user's state directory.
        rank: the rank.
        attempt: the number of the attempt.
    """
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
