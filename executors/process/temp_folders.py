"""Temporary folders of worker processes, which their supervisor removes if a worker is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from executors.process import start_time


def temp_prefix() -> str:
    """Return the beginning of the names of this process's temporary folders. Its parent is its supervisor.

    Example:
        tempfile.mkdtemp(prefix=temp_prefix())
    """
    return _prefix(os.getppid(), os.getpid())


def remove_temp_folders(pid: int) -> None:
    """Remove the temporary folders of a process that this supervisor has started, and that has ended.

    Args:
        pid: the process.

    Example:
        remove_temp_folders(4711)
    """
    begins = _prefix(os.getpid(), pid)
    try:
        names = os.listdir(tempfile.gettempdir())
    except OSError:
        return
    for name in names:
        if name.startswith(begins):
            shutil.rmtree(Path(tempfile.gettempdir(), name), ignore_errors=True)


def _prefix(supervisor: int, pid: int) -> str:
    # Containers with pids of their own may share this folder. The start time tells their supervisors apart.
    return f"replicas-worker-{supervisor}-{start_time(supervisor)}-{pid}-"
