"""Ends all processes that run in a directory, at once or when this process has ended, even by SIGKILL.

A test run that is killed cannot end the processes that it started. So a small helper process runs a moment longer and
ends them. This file, run as a program, is that helper: it reads names of directories from stdin, and acts when stdin
ends.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def end_all_in(directory: Path) -> None:
    """Kill every process that has the directory as its HOME or runs in it, until there is none."""
    while pids := _processes_in(directory):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def end_all_after_us(directory: Path) -> None:
    """Let the helper end the processes in a directory when this process has ended."""
    _tell(b"+", directory)


def forget(directory: Path) -> None:
    """Report to the helper that no process is left in a directory."""
    _tell(b"-", directory)


def _tell(sign: bytes, directory: Path) -> None:
    guard = _guard()
    assert guard.stdin is not None
    guard.stdin.write(sign + os.fsencode(directory) + b"\0")


def _processes_in(directory: Path) -> list[int]:
    if sys.platform != "linux":
        return []
    home = os.fsencode(f"HOME={directory}")
    real = directory.resolve()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            inside = Path(os.readlink(folder / "cwd")).is_relative_to(real)  # a zombie has no directory
            if inside or home in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


@functools.cache
def _guard() -> subprocess.Popen[bytes]:
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        cwd="/",
        env={},
        start_new_session=True,
    )
    atexit.register(guard.communicate)
    return guard


def main() -> None:
    remembered: dict[bytes, None] = {}
    for told in sys.stdin.buffer.read().split(b"\0")[:-1]:
        if told.startswith(b"+"):
            remembered[told[1:]] = None
        else:
            remembered.pop(told[1:], None)
    for directory in remembered:
        end_all_in(Path(os.fsdecode(directory)))


if __name__ == "__main__":
    main()
