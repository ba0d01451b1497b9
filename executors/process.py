"""Processes on this machine, seen through /proc: their identity, their descendants, and ending them all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import signal
import socket
import sys
import time
import warnings
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the inode of the one that a machine boots with, in every kernel
PR_SET_CHILD_SUBREAPER = 36


@cache
def this_machine() -> str:
    """Name this boot and process namespace: where a pid means what it means here."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # sandboxes with a /proc of their own making
        boot = space = "unknown"
    return f"{socket.gethostname()} {boot} {space}"


def this_process() -> str:
    """Name this process for people: its host and pid."""
    return f"{socket.gethostname()}:{os.getpid()}"


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since the boot; None when it has ended, or is a zombie."""
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Tell whether the process that had this pid and start time still runs. Pids are used again; the pair is not.

    A process that this user is not shown (/proc has an option for it, `hidepid`) may be that one, and counts as it.
    """
    with contextlib.suppress(PermissionError):
        if start_time(pid) == started:
            return True
    return _is_hidden(pid)


def _is_hidden(pid: int) -> bool:
    """Tell whether there is a process of which this user is shown nothing."""
    if os.access(f"/proc/{pid}/stat", os.R_OK):
        return False
    try:
        os.kill(pid, 0)  # no signal: the kernel says whether there could be one
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


class Activity(NamedTuple):
    """What the kernel shows of a living process."""

    is_stopped: bool
    is_traced: bool
    """Whether a debugger is attached."""
    cpu_s: float
    is_runnable: bool = False
    """Whether its main thread runs, or waits for a processor."""


def activity(pid: int) -> Activity | None:
    """Return what a process does; None when it has ended, or the kernel does not show it."""
    fields = _stat(pid)
    if fields is None:
        return None
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return None
    tracer = status.partition("TracerPid:")[2].partition("\n")[0].strip()
    ticks = int(fields[11]) + int(fields[12])
    return Activity(
        is_stopped=fields[0] == "T",
        is_traced=tracer not in ("", "0"),
        cpu_s=ticks / os.sysconf("SC_CLK_TCK"),
        is_runnable=fields[0] == "R",
    )


def fork() -> int:
    """Fork, without the warning of Python 3.12 and later."""
    if sys.version_info < (3, 12):
        return os.fork()
    with warnings.catch_warnings():
        # Python warns when a library such as OpenBLAS keeps a thread; the zygote's are idle and survive a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def private_file(data: bytes = b"") -> int:
    """Return a descriptor of a file without a name, which a new process can be given and no other can open.

    Args:
        data: what it holds; the descriptor is then at its beginning.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("replicas")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:  # it has no name any more
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as writer:
        writer.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def signal_name(number: int) -> str:
    """Name a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal, as 40
        return f"SIG{number}"


class DescriptorReserve:
    """Descriptors for what a process has still to do when it has used up all that it may have.

    Args:
        n: how many: a log is read, or an object written or sent.
    """

    def __init__(self, n: int = 2) -> None:
        self._held = [os.open(os.devnull, os.O_RDONLY) for _ in range(n)]

    def release(self) -> None:
        """Let them be used, and as many more as this process may ask for."""
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # a sandbox that refuses it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        while self._held:
            os.close(self._held.pop())


def flush_c_streams() -> None:
    """Flush what C code printed: `os._exit` does not."""
    _libc.fflush(None)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process instead of init's."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """List a process's children, zombies too; -1 means unknown: the kernel does not report it."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return [-1]


def descendants(root: int, spare: Collection[int] = ()) -> list[int]:
    """List the living processes below `root`, without those in `spare` and what is below them."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) is not None:
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    pending = [root]
    while pending:
        for pid in children.get(pending.pop(), ()):
            if pid not in spare:
                found.append(pid)
                pending.append(pid)
    return found


def kill_descendants(root: int, spare: Collection[int] = (), limit_s: float = 5.0) -> list[int]:
    """Kill everything below `root`, again until nothing is left: a killed parent's children only move up to us.

    Returns: what still lives after `limit_s`, as a process stuck in the kernel does.
    """
    deadline = time.monotonic() + limit_s
    pause_s = 0.0005
    while left := descendants(root, spare):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return left
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)
    return []


def usable_cores() -> int:
    """Return how many cores this process may keep busy: of its affinity, its control groups' quotas, `CPU_CORES`."""
    limits = [float(len(os.sched_getaffinity(0))), *_cpu_quotas()]
    with contextlib.suppress(ValueError):
        limits.append(float(os.environ.get("CPU_CORES", "")))  # as Hugging Face Jobs say it
    return max(1, int(min(limit for limit in limits if limit > 0)))


def _cpu_quotas(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[float]:
    """Return the processor quotas, in cores, of this process's control groups and those around them."""
    return [quota for folder in _groups("cpu", root, own) for quota in _cpu_quota(folder)]


def _groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups that may have a controller, and of those around them."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            for mount in (root, root / "unified") if not controllers else (root / controllers, root / controller):
                group_here = mount / group.strip("/")  # of another mount where the container sees its own group alone
                yield from (folder for folder in (group_here, *group_here.parents) if folder.is_relative_to(mount))


def _cpu_quota(group: Path) -> list[float]:
    with contextlib.suppress(OSError, ValueError):  # not there, or "max"
        if (group / "cpu.max").exists():
            quota, period = map(int, (group / "cpu.max").read_text().split())
        else:
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return [quota / period] if quota > 0 < period else []
    return []


def killed_for_memory(pid: int, since: float) -> bool | None:
    """Return whether the kernel's log names a process as killed for want of memory; None: it cannot be read here.

    Args:
        since: when the process began, at the earliest, by `time.monotonic`: its pid may have been another's before.
    """
    try:
        if os.stat("/proc/self/ns/pid").st_ino != FIRST_PID_NAMESPACE:  # the log has other numbers for processes here
            return None
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    named = re.compile(rb"\d+,\d+,(\d+),[^;]*;[^\n]*Killed process %d " % pid)
    try:
        while True:
            try:
                record = named.match(os.read(log, 8192))
            except BrokenPipeError:  # records were overwritten; the next read goes on
                continue
            except OSError:  # there are no more
                return False
            if record is not None and int(record[1]) / 1e6 >= since:
                return True
    finally:
        os.close(log)


def oom_kills() -> int:
    """Count the processes this machine's kernel has killed for want of memory, 0 when it does not report that."""
    return _oom_kills(Path("/proc/vmstat")) or 0


def oom_kills_in_group(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Count those that it killed in this process's control group, as a container has one, as far as it reports that."""
    for folder in _groups("memory", root, own):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _oom_kills(folder / name)) is not None:
                return count
    return 0


def _oom_kills(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def be_killed_first(by: int = 500) -> None:
    """Let the kernel, when memory is short, end this process and what it starts before others, where that can be."""
    file = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        file.write_text(str(min(1000, int(file.read_text()) + by)))


def _stat(pid: int) -> list[str] | None:
    """Return a living process's fields of /proc/<pid>/stat, from the state on; the name before may hold anything."""
    try:
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)  # a quarter of the time of a Path
        try:
            fields = os.read(descriptor, 4096).rpartition(b")")[2].decode().split()
        finally:
            os.close(descriptor)
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else fields


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
