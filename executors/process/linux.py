"""The facts that Linux reports of processes, mostly in /proc. `macos.py` has the same names."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import math
import os
import re
import signal
import struct
import sys
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from executors.process.counters import Activity, not_here

assert sys.platform == "linux"  # so that a check of types for another system leaves this file out

SYSTEM = "Linux"
"""The name of this system for messages."""
CAN_SUPERVISE = True
"""True if this system has all that a supervisor of local replicas needs."""
CAN_FORK = True
"""True if a process that has imported torch may fork."""
ADOPTS_ORPHANS = True
"""True if a process can become the parent of its orphaned descendants, which are then found by their parents."""
OPENS_FILES_OF_OTHERS = True
"""True if `open_file_of` works, so that a supervisor opens the file of a rank's stacks when it needs the file."""
LOCKS_NAME_HOLDERS = True
"""True if `lock_holder` works, so that the holder of a lock is known without a note."""
SHARES_PORTS = True
"""True if a socket that never listens can keep a port for torch's store, which binds the same port and listens."""
STACKS_SIGNAL: int = signal.SIGRTMIN + 5
"""The signal at which a rank writes the stacks of its threads. No program uses it for something else."""
HANG_SIGNAL: int = signal.SIGRTMIN + 6
"""The signal at which a rank raises `HangError`."""
NVIDIA_DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""The file in which a driver for Linux has its version."""
SAFE_THREADS = ("jemalloc_bg_thd",)  # a thread of pyarrow's jemalloc, which handles forks itself
FORGET_S = 5.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the inode of the first pid namespace of a machine, in every kernel
FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid
_libc = ctypes.CDLL(None, use_errno=True)


def name_this_boot() -> tuple[str, str]:
    """Return texts that identify this boot of the machine and this pid namespace.

    Raises:
        OSError: a sandbox does not show them.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")


def most_open_files(most: int) -> int:
    """Return the highest limit of open files that `setrlimit` takes.

    Args:
        most: the hard limit.
    """
    return most


def fork() -> int:
    """Fork, without the warning of Python 3.12 and later."""
    if sys.version_info < (3, 12):
        return os.fork()
    with warnings.catch_warnings():
        # Python warns if a library such as OpenBLAS has a thread. The zygote's threads are idle, so a fork is safe.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def start_time(pid: int) -> int | None:
    """Return the start time of a process. None: it has ended, is a zombie, or the system does not show it.

    The unit depends on the system: clock ticks since the boot on Linux, seconds of Unix time on macOS. So only compare
    it with another value for the same pid.

    Args:
        pid: the process.
    """
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Return True if the process with this pid and start time still runs.

    The system reuses a pid, but not both together.

    If the system hides the process from this user (option `hidepid` of /proc), the answer is True.

    Args:
        pid: the pid.
        started: the start time, from `start_time`.
    """
    with contextlib.suppress(PermissionError):
        if start_time(pid) == started:
            return True
    return is_hidden(pid)


def is_hidden(pid: int) -> bool:
    """Return True if the process exists and the system hides it from this user."""
    if os.access(f"/proc/{pid}/stat", os.R_OK):
        return False
    try:
        os.kill(pid, 0)  # 0 sends no signal, and fails if the process does not exist
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def activity(pid: int) -> Activity | None:
    """Return the state of a process. None: it has ended, or the kernel does not show it.

    Args:
        pid: the process.
    """
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


def threads_lost_by_a_fork() -> list[str]:
    """Return the names of this process's other threads, including native ones, which a forked child would not have.

    OpenBLAS ends its threads at a fork, and starts them again when it needs them. So this function makes one fork, and
    then counts the threads. If the system does not show threads, the threads of Python are counted.
    """
    try:
        if len(thread_names()) > 1:
            _fork_and_forget()
        _, *others = thread_names()  # the first is the main thread
    except OSError:
        return ["of Python"] * (len(sys._current_frames()) - 1)
    return [name for name in others if name not in SAFE_THREADS]


def _fork_and_forget() -> None:
    """Fork a child that exits at once. Handlers of libraries may hang at a fork, so the wait for it is limited."""
    pid = fork()
    if pid == 0:
        os._exit(0)
    deadline = time.monotonic() + FORGET_S
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            deadline = math.inf
        time.sleep(0.001)


def private_file(data: bytes = b"") -> int:
    """Return a descriptor of a file without a name. A new process may inherit it, and no other process can open it.

    Args:
        data: the content of the file. The descriptor is at its beginning. Default: empty.
    """
    descriptor = os.memfd_create("replicas")
    with open(descriptor, "wb", closefd=False) as writer:
        writer.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def become_subreaper() -> None:
    """Become the parent of orphaned descendants, which otherwise become children of init."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that forked it ends."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """List the pids of a process's children, with zombies. [-1]: the kernel does not report them.

    Args:
        pid: the process.
    """
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return [-1]


def descendants(root: int, spare: Collection[int] = (), ended: Collection[int] = ()) -> list[int]:
    """List the pids of the live descendants of a process.

    Args:
        root: the process.
        spare: processes that are left out, with their descendants. Default: none.
        ended: leaders of sessions that have just ended. Linux does not need them. Default: none.
    """
    children: dict[int, list[int]] = {}
    for pid, parent in parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    pending = [root]
    while pending:
        for pid in children.get(pending.pop(), ()):
            if pid not in spare:
                found.append(pid)
                pending.append(pid)
    return found


def own_children() -> list[int]:
    """List the live children of this process, with the orphans that it has adopted."""
    return [pid for pid, parent in parents() if parent == os.getpid()]


def mark_child() -> dict[str, str]:
    """Return variables by which the descendants of a new child are found. Linux needs none: parents lead to them."""
    return {}


def marked(marks: Mapping[str, str]) -> list[int]:
    """List the live processes that have the variables of `mark_child`, or begin with their values. Linux has none.

    Args:
        marks: the variables.
    """
    return []


def parents() -> Iterator[tuple[int, int]]:
    """Yield the pid of each live process with the pid of its parent."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) is not None:
            yield int(name), int(fields[1])


def path_of_descriptor(descriptor: int) -> str:
    """Return a path by which other processes of this user open a file of this process, for as long as it is open.

    Args:
        descriptor: the descriptor.

    Example:
        path_of_descriptor(file)  # "/proc/4711/fd/7"
    """
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def make_lifeline() -> tuple[int, int]:
    """Return the two ends of a pipe that shows the end of this process to another one. Linux needs none: (-1, -1)."""
    return -1, -1


def watch_process(pid: int, lifeline: int) -> int:
    """Return a descriptor that `poll` reports as readable when a process has ended.

    Args:
        pid: the process.
        lifeline: the reading end of a pipe that only this process writes to. Linux does not need it.

    Raises:
        OSError: there is no such process.
    """
    return open_process(pid)


def ignores(pid: int, number: signal.Signals) -> bool:
    """Return True if a process ignores a signal, or has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return True
    ignored = int(status.partition("SigIgn:")[2].split(None, 1)[0], 16)  # a bit per signal, from 1 on
    return bool(ignored >> (number - 1) & 1)


def cores() -> int:
    """Return the number of cores that this process may use by its affinity."""
    return len(os.sched_getaffinity(0))


def cpu_quotas(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[float]:
    """Return the processor quotas, in cores, of this process's control groups and of their parent groups."""
    return [quota for folder in _groups("cpu", root, own) for quota in _cpu_quota(folder)]


def _groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and of their parents that may have a controller."""
    return itertools.chain.from_iterable(_groups_by_mount(controller, root, own))


def _groups_by_mount(controller: str, root: Path, own: Path) -> Iterator[list[Path]]:
    """Yield the folders of `_groups`, one list for each mount, the innermost group first. Some do not exist."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            for mount in (root, root / "unified") if not controllers else (root / controllers, root / controller):
                group_here = mount / group.strip("/")  # does not exist if the container sees only its own group
                yield [folder for folder in (group_here, *group_here.parents) if folder.is_relative_to(mount)]


def _cpu_quota(group: Path) -> list[float]:
    with contextlib.suppress(OSError, ValueError):  # not there, or "max"
        if (group / "cpu.max").exists():
            quota, period = map(int, (group / "cpu.max").read_text().split())
        else:
            quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return [quota / period] if quota > 0 < period else []
    return []


def killed_for_memory(pid: int, since: float) -> bool | None:
    """Return True if the kernel's log names a process as killed because memory ran out. None: the log is not readable.

    Args:
        pid: the process.
        since: the earliest time of the process's start, by `time.monotonic`. Older entries are about other processes.
    """
    try:
        if os.stat("/proc/self/ns/pid").st_ino != FIRST_PID_NAMESPACE:  # the log has the pids of the first namespace
            return None
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    named = re.compile(rb"\d+,\d+,(\d+),[^;]*;[^\n]*Killed process %d " % pid)
    try:
        while True:
            try:
                record = named.match(os.read(log, 8192))
            except BrokenPipeError:  # records were overwritten; the next read continues after them
                continue
            except OSError:  # there are no more records
                return False
            if record is not None and int(record[1]) / 1e6 >= since:
                return True
    finally:
        os.close(log)


def oom_kills() -> int:
    """Return the number of this machine's processes that the kernel killed because memory ran out. 0: not reported."""
    return _oom_kills(Path("/proc/vmstat")) or 0


def oom_kills_in_group(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of kills for memory in this process's control group, as in a container. 0: not reported.

    Args:
        root: the folder of the control groups.
        own: the file with the control groups of this process.
    """
    counts = (_oom_kills_of(folder) for folder in _groups("memory", root, own))
    return next((count for count in counts if count is not None), 0)


def oom_kills_in_own_group(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Return the number of kills for memory in this process's innermost control group. None: not reported.

    The groups around it may have processes of other users.

    Args:
        root: the folder of the control groups.
        own: the file with the control groups of this process.
    """
    for folders in _groups_by_mount("memory", root, own):
        # A container may see its own group only as the root of the folder.
        innermost = next((folder for folder in folders if folder.is_dir()), None)
        if innermost is not None and (count := _oom_kills_of(innermost)) is not None:
            return count
    return None


def _oom_kills_of(group: Path) -> int | None:
    counts = (_oom_kills(group / name) for name in ("memory.events", "memory.oom_control"))
    return next((count for count in counts if count is not None), None)


def _oom_kills(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def be_killed_first(by: int = 500) -> None:
    """Make the kernel kill this process and its children first if memory runs out.

    Args:
        by: the increase of `oom_score_adj`. Default 500. Systems without this file are left as they are.
    """
    file = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        file.write_text(str(min(1000, int(file.read_text()) + by)))


def open_process(pid: int) -> int:
    """Return a descriptor of a process, which `poll` reports as readable when the process has ended.

    Raises:
        OSError: there is no such process, or this system has no such descriptors.
    """
    return os.pidfd_open(pid)


def signal_open_process(descriptor: int, number: signal.Signals) -> None:
    """Send a signal to the process of a descriptor, and never to a later process of the same pid.

    Raises:
        OSError: the process has ended, or is another user's.
    """
    signal.pidfd_send_signal(descriptor, number)


def lock_holder(descriptor: int, byte: int) -> int | None:
    """Return the pid of the process that holds the POSIX lock of one byte of an open file. None: no process of this
    machine does.

    Args:
        descriptor: the file.
        byte: the position of the byte.

    Raises:
        OSError: the file system has no such locks, or this system cannot report their holder.
    """
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None  # negative for another machine


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory, which another process opens with `open_file_of`.

    Args:
        name: a name for the file, by which `open_file_of` recognizes it.

    Raises:
        OSError: this system, or a sandbox, has no such files.
    """
    return os.memfd_create(name)


def open_file_of(pid: int, descriptor: int, name: str) -> int | None:
    """Open the memory file of another process for reading and writing.

    Args:
        pid: the other process.
        descriptor: the descriptor of the file in that process.
        name: the name of the file, as for `memory_file`.

    Returns: a descriptor of this process. None: the other process has another file under that descriptor by now.

    Raises:
        OSError: the process has ended, or has no such descriptor.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    return os.open(path, os.O_RDWR | os.O_CLOEXEC) if name in os.readlink(path) else None


def open_unnamed(folder: str, mode: int) -> tuple[int, str]:
    """Create a file for writing that has no name yet. Return its descriptor, and a path from which to link it.

    Args:
        folder: the folder, whose file system has the file.
        mode: the permissions of the file.

    Raises:
        OSError: the file system or this system has no such files (EOPNOTSUPP, EISDIR, EINVAL or ENOENT).
    """
    unnamed: int | None = getattr(os, "O_TMPFILE", None)  # a Python that was built for an old kernel lacks it
    if unnamed is None:
        raise not_here(SYSTEM, "O_TMPFILE", errno.EOPNOTSUPP)
    descriptor = os.open(folder, unnamed | os.O_WRONLY | os.O_CLOEXEC, mode)
    return descriptor, f"/proc/self/fd/{descriptor}"


def open_inotify() -> Any:
    """Return an `inotify_simple.INotify`, with which the kernel reports changes in folders.

    Raises:
        OSError: this user has no more of them, the package is missing, or this system has none.
    """
    try:
        from inotify_simple import INotify
    except ImportError as error:
        raise OSError(errno.ENOSYS, str(error)) from error
    return INotify()


def inotify_limit() -> int:
    """Return the number of folders that the kernel may watch for this user.

    Raises:
        OSError: the system does not show it.
    """
    return int(Path("/proc/sys/fs/inotify/max_user_watches").read_text())


def memory_in_use() -> int:
    """Return the bytes of memory that this process uses. On macOS, the largest number that it has used.

    Raises:
        OSError: a sandbox does not show it.
    """
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def own_threads() -> set[int]:
    """Return the native ids of this process's threads. Empty if the kernel does not list them.

    Example:
        own_threads()
    """
    with contextlib.suppress(OSError):
        return set(map(int, os.listdir("/proc/self/task")))
    return set()


def thread_names() -> list[str]:
    """List the names of this process's threads, including threads that Python does not know.

    Raises:
        OSError: the system does not show them.
    """
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    return found


def openable_file(data: bytes) -> int:
    """Return a descriptor of a new file that other processes open by its `path_of_descriptor`.

    Args:
        data: the content of the file.
    """
    return private_file(data)


def remove_openable(descriptor: int) -> None:
    """Remove the name of an `openable_file`. On Linux it has none.

    Args:
        descriptor: the file.
    """


def close_shared_file(descriptor: int, path: str) -> None:
    """Close a `shared_file` that all processes have mapped.

    Args:
        descriptor: the descriptor of the file.
        path: the path of the file.
    """
    os.close(descriptor)


def shared_file(size_bytes: int) -> tuple[int, str]:
    """Return the descriptor of a new file in memory, and a path by which other processes of this machine open it.

    The file has no name, and exists as long as a process has it open or mapped.

    Args:
        size_bytes: the size of the file.

    Raises:
        OSError: the system has no such files, or too little memory.
    """
    descriptor = os.memfd_create("replicas")
    os.ftruncate(descriptor, size_bytes)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


def gpu_of_system() -> str | None:
    """Return the name of a GPU that belongs to the system itself. Linux has none: `nvidia-smi` lists its GPUs."""
    return None


def open_paths() -> list[str]:
    """List the paths of the files that this process has open.

    Raises:
        OSError: the system does not show them.
    """
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself, which is closed by now
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the state on, for a live process.

    The name before them may contain anything.
    """
    try:
        # Faster than Path.read_bytes: a quarter of the time.
        descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
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
