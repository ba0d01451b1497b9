"""Finds the processes that the tests started, by a mark that they inherit in their environment."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

MARK = "REPLICAS_TEST_PROCESS_OF"
PROC = Path(os.environ.get("AS_MAC_PROC", "/proc"))
"""The folder in which Linux shows its processes. Where macOS is emulated, tests find it in another place."""


def all_pids() -> set[int]:
    """Return the pids of all processes of this machine. On a machine without /proc, it is empty."""
    return {int(name) for name in os.listdir(PROC) if name.isdigit()} if (PROC / "self").is_dir() else set()


def left_over(before: set[int], within_s: float) -> dict[int, str]:
    """Wait for the processes started since `before` to end; return those that do not, with their command lines.

    This process's zygote may stay: there is one for each launcher process, and it ends with it.

    Args:
        before: All pids at the start. Only a new process can be left over, so no environment of an old one is read:
            that would take thousandths of a second for each of thousands of tests.
        within_s: How long to wait, in seconds.
    """
    deadline = time.monotonic() + within_s
    while survivors := {pid: command_of(pid) for pid in all_pids() - before if _is_ours(pid)}:
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
    return (PROC / f"{pid}").exists() and not is_zombie(pid)


def is_zombie(pid: int) -> bool:
    return _stat(pid)[:1] == ["Z"]


def parent_of(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def zygote_of(supervisor: int) -> int:
    """Return the pids of the zygote that forked a supervisor, and of the guard process between the two."""
    guard = parent_of(supervisor)
    assert guard is not None
    zygote = parent_of(guard)
    assert zygote is not None
    assert "zygote" in command_of(zygote)
    return zygote


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's live children."""
    everyone = [int(folder.name) for folder in PROC.glob("[0-9]*")]
    return [other for other in everyone if parent_of(other) == pid and is_alive(other)]


def environment_of(pid: int) -> dict[str, str]:
    """Return the environment with which a process was started. Empty: the process has ended."""
    with contextlib.suppress(OSError):
        entries = (PROC / f"{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return {name: value for name, _, value in (entry.partition("=") for entry in entries)}
    return {}


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (PROC / f"{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    return ""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat after the name: state, parent, …"""
    with contextlib.suppress(OSError):
        return (PROC / f"{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _is_our_zygote(pid: int) -> bool:
    return parent_of(pid) == os.getpid() and "zygote" in command_of(pid)


def _is_ours(pid: int) -> bool:
    """Return True if a live process descends from this test process and is not its zygote."""
    mark = f"{MARK}={os.getpid()}".encode()
    with contextlib.suppress(OSError):
        if mark in (PROC / f"{pid}/environ").read_bytes().split(b"\0") and pid != os.getpid():
            return not is_zombie(pid) and not _is_our_zygote(pid)
    return False
