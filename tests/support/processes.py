"""Finds the processes that the tests started, by a mark that they inherit in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import psutil

MARK = "REPLICAS_TEST_PROCESS_OF"
PROC = Path(os.environ.get("AS_MAC_PROC", "/proc"))
"""The folder in which Linux shows its processes. Where macOS is emulated, tests find it in another place."""


def all_pids() -> set[int]:
    """Return the pids of all processes of this machine."""
    return set(psutil.pids())


def left_over(before: set[int], within_s: float) -> dict[int, str]:
    """Wait for the processes started since `before` to end; return those that do not, with their command lines.

    This process's zygote may stay: there is one for each launcher process, and it ends with it. The same is true of the
    resource tracker of `multiprocessing`, which the first process that is spawned starts.

    Args:
        before: All pids at the start. Only a new process can be left over, so the environments of old ones are not
            read. Reading them would take a millisecond in each of thousands of tests.
        within_s: How long to wait, in seconds.
    """
    deadline = time.monotonic() + within_s
    while survivors := {pid: command_of(pid) for pid in all_pids() - before if is_ours(pid)}:
        if time.monotonic() > deadline:
            return survivors
        time.sleep(0.02)
    return {}


def end(pids: dict[int, str]) -> None:
    """Kill processes that a test left behind."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    """Return True if a process runs. A zombie does not run."""
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def is_zombie(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return False


def parent_of(pid: int) -> int | None:
    with contextlib.suppress(psutil.Error):
        return int(psutil.Process(pid).ppid())
    return None


def zygote_of(supervisor: int) -> int:
    """Return the pid of the zygote that started a supervisor, perhaps with a guard between the two.

    A forked supervisor has the command line of its zygote, so the zygote is the highest process with it.
    """
    found, pid = None, parent_of(supervisor)
    while pid is not None and "zygote" in command_of(pid):
        found, pid = pid, parent_of(pid)
    assert found is not None
    return found


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's live children."""
    return [other for other in psutil.pids() if parent_of(other) == pid and is_alive(other)]


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started. Empty: the process has ended."""
    with contextlib.suppress(psutil.Error, OSError):
        return dict(psutil.Process(pid).environ())
    return {}


def command_of(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline()).strip()
    return ""


def _lasts_as_long_as_we_do(pid: int) -> bool:
    command = command_of(pid)
    return parent_of(pid) == os.getpid() and ("zygote" in command or "multiprocessing.resource_tracker" in command)


def is_ours(pid: int) -> bool:
    """Return True if a live process descends from this test process and does not last as long as it."""
    if pid == os.getpid() or environment_of(pid).get(MARK) != str(os.getpid()):
        return False
    return is_alive(pid) and not _lasts_as_long_as_we_do(pid)
