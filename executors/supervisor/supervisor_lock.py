"""Finds and wakes the process of this machine that supervises a replica. The process is known by a file lock.

A supervisor locks one byte of a file for each of its ranks. The file is in the user's own state directory. Where the
system does not tell the holder of a lock, the supervisor writes a line with its pid and start time into a second file.
Pids in a run's store are not used. Otherwise, any process that can write to the store could make this project send
signals to any process of the user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
from pathlib import Path

from executors.process import (
    LOCKS_NAME_HOLDERS,
    is_alive,
    lock_holder,
    open_process,
    signal_open_process,
    start_time,
)

NAME = "supervisors.lock"
NOTES = "supervisors.txt"
NOTE = re.compile(r"([0-9]{1,7}) ([0-9]{1,7}) ([1-9][0-9]{0,9}) ([0-9]{1,19})", re.ASCII)
MAX_NOTES_BYTES = 1 << 20
RANKS_PER_ATTEMPT = 1 << 20  # each attempt has its own range of bytes; the file itself stays empty


def open_locks(folder: Path) -> int:
    """Open the file of the locks, and return its descriptor. Closing the descriptor releases all its locks.

    Args:
        folder: the user's state directory.
    """
    return os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def hold(descriptor: int, rank: int, attempt: int, folder: Path | None = None) -> None:
    """Hold the lock of an attempt until this process ends. Forked children do not hold it.

    Args:
        descriptor: the file of the locks.
        rank: the rank.
        attempt: the number of the attempt.
        folder: the user's state directory, for a note where locks do not name their holder. None, the default: no note
            is written.
    """
    if not LOCKS_NAME_HOLDERS and folder is not None:
        line = f"{rank} {attempt} {os.getpid()} {start_time(os.getpid()) or 0}\n"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError), open(os.open(folder / NOTES, flags, 0o600), "w") as notes:
            notes.write(line)  # in one call, so that lines of several supervisors stay whole
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
    if not LOCKS_NAME_HOLDERS:
        # `holder` has just seen the process. macOS gives a pid again only after all others, so it is still the same.
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
            return True
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
    if not LOCKS_NAME_HOLDERS:
        return _noted_holder(folder, rank, attempt)
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


def _noted_holder(folder: Path, rank: int, attempt: int) -> int | None:
    """Return the pid of the live process that has noted that it supervises a replica."""
    try:
        with open(os.open(folder / NOTES, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)) as notes:
            lines = notes.read(MAX_NOTES_BYTES).splitlines()
    except (OSError, ValueError):
        return None
    for line in reversed(lines):
        found = NOTE.fullmatch(line)
        if found is not None and (int(found[1]), int(found[2])) == (rank, attempt):
            pid, started = int(found[3]), int(found[4])
            return pid if started and is_alive(pid, started) else None
    return None
