"""Everything that differs between operating systems: processes, pipes, files without a name, cores and memory.

Only this folder calls functions that exist on one system alone, so a port to another system adds one file. `linux.py`
reads /proc. `macos.py` asks psutil, `ps` and `sysctl`. Both have the same names. This file offers the names of
the system that it runs on, with functions that are the same on both.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    # Before the imports below, which do not exist on Windows: the user gets a sentence instead of a traceback.
    sys.exit("replicas runs on Linux and macOS. On Windows, use WSL 2.")

import contextlib
import ctypes
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Collection
from functools import cache

from executors.process.counters import Activity, ActivitySample, ThreadTimes

if sys.platform == "linux":
    from executors.process.linux import (
        ADOPTS_ORPHANS,
        CAN_FORK,
        CAN_SUPERVISE,
        HANG_SIGNAL,
        LOCKS_NAME_HOLDERS,
        NVIDIA_DRIVER_FILE,
        OPENS_FILES_OF_OTHERS,
        SHARES_PORTS,
        STACKS_SIGNAL,
        SYSTEM,
        activity,
        be_killed_first,
        become_subreaper,
        children,
        close_shared_file,
        cores,
        cpu_quotas,
        descendants,
        die_with_parent,
        fork,
        gpu_of_system,
        ignores,
        inotify_limit,
        is_alive,
        is_hidden,
        killed_for_memory,
        lock_holder,
        make_lifeline,
        mark_child,
        marked,
        memory_file,
        memory_in_use,
        most_open_files,
        name_this_boot,
        oom_kills,
        oom_kills_in_group,
        oom_kills_in_own_group,
        open_file_of,
        open_inotify,
        open_paths,
        open_process,
        open_unnamed,
        openable_file,
        own_children,
        own_threads,
        parents,
        path_of_descriptor,
        private_file,
        remove_openable,
        shared_file,
        signal_open_process,
        start_time,
        thread_names,
        threads_lost_by_a_fork,
        watch_process,
    )
    from executors.process.linux_activity import take_sample
else:
    from executors.process.macos import (
        ADOPTS_ORPHANS,
        CAN_FORK,
        CAN_SUPERVISE,
        HANG_SIGNAL,
        LOCKS_NAME_HOLDERS,
        NVIDIA_DRIVER_FILE,
        OPENS_FILES_OF_OTHERS,
        SHARES_PORTS,
        STACKS_SIGNAL,
        SYSTEM,
        activity,
        be_killed_first,
        become_subreaper,
        children,
        close_shared_file,
        cores,
        cpu_quotas,
        descendants,
        die_with_parent,
        fork,
        gpu_of_system,
        ignores,
        inotify_limit,
        is_alive,
        is_hidden,
        killed_for_memory,
        lock_holder,
        make_lifeline,
        mark_child,
        marked,
        memory_file,
        memory_in_use,
        most_open_files,
        name_this_boot,
        oom_kills,
        oom_kills_in_group,
        oom_kills_in_own_group,
        open_file_of,
        open_inotify,
        open_paths,
        open_process,
        open_unnamed,
        openable_file,
        own_children,
        own_threads,
        parents,
        path_of_descriptor,
        private_file,
        remove_openable,
        shared_file,
        signal_open_process,
        start_time,
        take_sample,
        thread_names,
        threads_lost_by_a_fork,
        watch_process,
    )

__all__ = [
    "ADOPTS_ORPHANS",
    "CAN_FORK",
    "CAN_SUPERVISE",
    "HANG_SIGNAL",
    "IDENTITY",
    "LOCKS_NAME_HOLDERS",
    "NVIDIA_DRIVER_FILE",
    "OPENS_FILES_OF_OTHERS",
    "SHARES_PORTS",
    "STACKS_SIGNAL",
    "SYSTEM",
    "Activity",
    "ActivitySample",
    "DescriptorReserve",
    "ThreadTimes",
    "activity",
    "ask_children_to_end",
    "be_killed_first",
    "become_subreaper",
    "children",
    "close_shared_file",
    "cores",
    "cpu_quotas",
    "descendants",
    "die_with_parent",
    "flush_c_streams",
    "fork",
    "gpu_of_system",
    "has_ended",
    "identify_process",
    "ignores",
    "inotify_limit",
    "is_alive",
    "is_hidden",
    "kill_descendants",
    "killed_for_memory",
    "lock_holder",
    "make_lifeline",
    "mark_child",
    "marked",
    "may_live",
    "memory_file",
    "memory_in_use",
    "most_open_files",
    "name_this_boot",
    "oom_kills",
    "oom_kills_in_group",
    "oom_kills_in_own_group",
    "open_file_of",
    "open_inotify",
    "open_paths",
    "open_process",
    "open_unnamed",
    "openable_file",
    "own_children",
    "own_threads",
    "parents",
    "path_of_descriptor",
    "private_file",
    "raise_file_limit",
    "remove_openable",
    "shared_file",
    "signal_name",
    "signal_open_process",
    "start_time",
    "system_name",
    "take_sample",
    "this_machine",
    "this_process",
    "thread_names",
    "threads_lost_by_a_fork",
    "usable_cores",
    "wakeup_pipe",
    "watch_process",
]
IDENTITY = re.compile(r"(\S{1,300} \S{1,100} \S{1,100}) ([1-9][0-9]{0,9}) ([0-9]{1,19})", re.ASCII)
"""The text of `identify_process`: a machine, as `this_machine` names it, a pid and a start time."""
_libc = ctypes.CDLL(None, use_errno=True)


def system_name() -> str:
    """Return the name of this operating system for a message, as in "macOS"."""
    return SYSTEM


@cache
def this_machine() -> str:
    """Return a text that identifies this boot of the machine and this pid namespace.

    Within it, a pid names one process at a time.
    """
    try:
        boot, space = name_this_boot()
    except OSError:  # a sandbox that emulates /proc, or does not have these programs
        boot = space = "unknown"
    return f"{socket.gethostname()} {boot} {space}"


def this_process() -> str:
    """Return the name of this process for messages: its host and pid, as in `host:4711`."""
    return f"{socket.gethostname()}:{os.getpid()}"


def may_live(name: str) -> bool:
    """Return False only if the named process is known to have ended, because it was on this host and its pid is not
    in use.

    Args:
        name: the name from `this_process`, as in `host:4711`. For any other text the answer is True.
    """
    host, _, pid = name.rpartition(":")
    if host != socket.gethostname() or not pid.isdecimal():
        return True
    return start_time(int(pid)) is not None or is_hidden(int(pid))


def identify_process() -> str:
    """Return a text that identifies this process. A later process with the same pid has another text.

    Example:
        >>> has_ended(identify_process())
        False
    """
    return f"{this_machine()} {os.getpid()} {start_time(os.getpid()) or 0}"


def has_ended(identity: str) -> bool:
    """Return True if a process is known to have ended. False: it is alive, or this machine cannot find out.

    Args:
        identity: as `identify_process` returned it, perhaps on another machine. It may come from a foreign record.

    Example:
        >>> has_ended("another-machine boot pid:[1] 17 4711")
        False
    """
    if (found := IDENTITY.fullmatch(identity)) is None or found[1] != this_machine():
        return False
    # Without the boot's name, the same text may name a process of an earlier boot, or of another container.
    return " unknown " not in found[1] and int(found[2]) < 2**31 and not is_alive(int(found[2]), int(found[3]))


def signal_name(number: int) -> str:
    """Return the name of a signal, as in "SIGKILL".

    Args:
        number: the number of the signal.
    """
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal, such as 40
        return f"SIG{number}"


class DescriptorReserve:
    """Holds file descriptors in reserve, for the last work of a process that has reached its limit of open files.

    Args:
        n: the number of descriptors. Default 2: enough to read a log, and to write or send an object.
    """

    def __init__(self, n: int = 2) -> None:
        self._held = [os.open(os.devnull, os.O_RDONLY) for _ in range(n)]

    def release(self) -> None:
        """Free the descriptors, and raise the limit of open files as far as the system allows."""
        raise_file_limit()
        while self._held:
            os.close(self._held.pop())


def raise_file_limit() -> None:
    """Raise the limit of open files of this process as far as the system allows."""
    most = most_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    with contextlib.suppress(OSError, ValueError):  # some sandboxes refuse it
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def flush_c_streams() -> None:
    """Flush the output of C code, which `os._exit` does not do."""
    _libc.fflush(None)


def ask_children_to_end(limit_s: float, but_group: int | None = None) -> None:
    """Send SIGTERM once to each child of this process, and wait until all have ended.

    An orphan is asked, too, when it becomes a child of this process, if this process is a subreaper. There is no wait
    for children that ignore SIGTERM. The resource tracker of `multiprocessing` is such a child.

    Args:
        limit_s: the longest wait in seconds.
        but_group: a process group whose processes have got SIGTERM already, and get no second one. Default: none.
    """
    deadline = time.monotonic() + limit_s
    asked: set[int] = set()
    pause_s = 0.001
    while time.monotonic() < deadline:
        living = own_children()
        for pid in living:
            if pid not in asked:
                asked.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if but_group is None or os.getpgid(pid) != but_group:
                        os.kill(pid, signal.SIGTERM)
        if all(ignores(pid, signal.SIGTERM) for pid in living):
            return
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)


def kill_descendants(
    root: int, spare: Collection[int] = (), limit_s: float = 5.0, ended: Collection[int] = ()
) -> list[int]:
    """Kill all descendants of a process, and repeat that until none is left.

    One pass is not enough, because the children of a killed process become children of another process of the tree.

    Args:
        root: the process, which is not killed itself.
        spare: processes that are not killed, with their descendants. Default: none.
        limit_s: the longest time in seconds. Default 5.
        ended: leaders of sessions that have just ended, whose sessions have descendants of the process. Default: none.

    Returns: the pids of processes that still live, such as a process that is stuck in the kernel.
    """
    deadline = time.monotonic() + limit_s
    pause_s = 0.0005
    while left := descendants(root, spare, ended):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return left
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)
    return []


def usable_cores() -> int:
    """Return the number of cores that this process may use, from affinity, control groups and the variable
    CPU_CORES.
    """
    limits = [float(cores()), *cpu_quotas()]
    with contextlib.suppress(ValueError):
        limits.append(float(os.environ.get("CPU_CORES", "")))  # Hugging Face Jobs set this variable
    return max(1, int(min(limit for limit in limits if limit > 0)))


def wakeup_pipe() -> tuple[int, int]:
    """Return the two ends of a new pipe for `signal.set_wakeup_fd`. Neither end blocks.

    Programs that this process starts do not inherit them. `os.pipe2` would do the same, and macOS lacks it.
    """
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends
