"""Everything in which operating systems differ: processes, pipes, files without a name, cores and memory.

The product calls what only one system has through this module alone, so that a port is a change of one file. Linux
answers from /proc. macOS answers through `ps` and `sysctl`, and offers what a client needs: it launches, watches and
ends replicas elsewhere. A supervisor of local processes needs Linux, see `CAN_SUPERVISE`.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    # Before the imports below, which Windows does not have: the user gets a sentence instead of a traceback.
    sys.exit("replicas runs on Linux and macOS. On Windows, use WSL 2.")

import contextlib
import ctypes
import errno
import fcntl
import itertools
import math
import os
import re
import resource
import signal
import socket
import struct
import time
import warnings
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_libc = ctypes.CDLL(None, use_errno=True)
SAFE_THREADS = ("jemalloc_bg_thd",)  # of pyarrow: jemalloc sees to it at a fork
FORGET_S = 5.0
PR_SET_PDEATHSIG = 1
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the inode of the one that a machine boots with, in every kernel
PR_SET_CHILD_SUBREAPER = 36
FLOCK = "hhqqi4x"  # struct flock of 64-bit Linux: type, whence, start, length, pid
MACOS_MAX_FILES = 10_240  # OPEN_MAX: `setrlimit` refuses more there, even if the hard limit is "unlimited"
PS_LIMIT_S = 10.0
IDENTITY = re.compile(r"(\S{1,300} \S{1,100} \S{1,100}) ([1-9][0-9]{0,9}) ([0-9]{1,19})", re.ASCII)
"""The text of `identify_process`: a machine, as `this_machine` names it, a pid and a start time."""
NVIDIA_DRIVER_FILE = Path("/proc/driver/nvidia/version")
"""The file in which a driver for Linux has its version."""
CAN_SUPERVISE = sys.platform == "linux"
"""True if this system has all that a supervisor of replicas needs: pidfd, /proc and adopted orphans."""
_NAMES = {"linux": "Linux", "darwin": "macOS"}


def system_name() -> str:
    """Return the name of this operating system for a message, as in "macOS"."""
    return _NAMES.get(sys.platform, sys.platform)


@cache
def this_machine() -> str:
    """Name this boot and process namespace: where a pid means what it means here."""
    try:
        if sys.platform == "linux":
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            space = os.readlink("/proc/self/ns/pid")
        else:
            boot = "".join(_output_of("sysctl", "-n", "kern.bootsessionuuid")[1].split()) or "unknown"
            space = "one"  # macOS has no namespaces of processes
    except OSError:  # sandboxes with an emulated /proc, or without these programs
        boot = space = "unknown"
    return f"{socket.gethostname()} {boot} {space}"


def this_process() -> str:
    """Name this process for people: its host and pid."""
    return f"{socket.gethostname()}:{os.getpid()}"


def may_live(name: str) -> bool:
    """Tell whether the process that `this_process` named may live: it is on another host, or its pid is in use here.

    Args:
        name: as in `host:4711`. A name that is not one may be any process's.
    """
    host, _, pid = name.rpartition(":")
    if host != socket.gethostname() or not pid.isdecimal():
        return True
    return start_time(int(pid)) is not None or _is_hidden(int(pid))


def identify_process() -> str:
    """Return text that names this process on this machine, and no later process with the same pid.

    Example:
        >>> has_ended(identify_process())
        False
    """
    return f"{this_machine()} {os.getpid()} {start_time(os.getpid()) or 0}"


def has_ended(identity: str) -> bool:
    """Return whether a process is known to have ended: False where this machine cannot know.

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


def start_time(pid: int) -> int | None:
    """Return when a process started; None when it has ended, is a zombie, or the system does not show it.

    The unit is the system's: clock ticks since the boot on Linux, seconds of Unix time on macOS. A value only serves to
    be compared with another one of the same process identifier.
    """
    if sys.platform != "linux":
        with contextlib.suppress(OSError):  # a sandbox that forbids `ps`
            return next((process.started for process in _listed("-p", str(pid))), None)
        return None
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Tell whether the process that had this pid and start time still runs. Pids are used again; the pair is not.

    A process that this user is not shown (/proc has an option for it, `hidepid`) may be that one, and counts as it.
    """
    if sys.platform != "linux":
        return _is_alive_by_ps(pid, started)
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


def _is_alive_by_ps(pid: int, started: int) -> bool:
    # The cheap check comes first: `ps` is a new process, and most of the processes in question have ended.
    try:
        os.kill(pid, 0)
    except OSError as error:
        if not isinstance(error, PermissionError):
            return False
    try:
        found = [process.started for process in _listed("-p", str(pid))]
    except OSError:  # a sandbox forbids `ps`: an existing process counts as the right one
        return True
    return bool(found) and started in (0, *found)  # 0: the time could not be read when it was noted


class _Listed(NamedTuple):
    """One living process, as `ps` lists it."""

    pid: int
    parent: int
    started: int


def _listed(*which: str) -> list[_Listed]:
    """List living processes through `ps` of BSD and macOS, without zombies.

    Args:
        which: the processes, as arguments of `ps`: `-ax` for all, or `-p` and a pid.

    Raises:
        OSError: `ps` cannot be run here.
    """
    import calendar
    from email.utils import parsedate  # reads the format of `ctime` in every locale; `time.strptime` does not

    # One column an option: in `pid=,ppid=` the heading of the first column would be ",ppid=".
    columns = [part for name in ("pid=", "ppid=", "stat=", "lstart=") for part in ("-o", name)]
    found = []
    of_ps, text = _output_of("ps", *which, *columns)
    for line in text.splitlines():
        pid, parent, state, started = line.split(None, 3)
        date = parsedate(started)
        # `ps` lists itself, which has ended by now. A caller who kills all descendants would never be done with them.
        if date is not None and not state.startswith("Z") and int(pid) != of_ps:
            found.append(_Listed(int(pid), int(parent), calendar.timegm(date)))
    return found


def _output_of(*command: str) -> tuple[int, str]:
    """Run a program of the system; return its pid and what it printed, which is nothing if it failed.

    Raises:
        OSError: the program cannot be run, or does not end.
    """
    import subprocess  # here: it imports `threading`, which the process that forks replicas does without

    # In C and UTC: the same process must have the same start after the user has changed the locale or the time zone.
    environ = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdin=nothing, stdout=pipe, stderr=nothing, text=True) as process:
        try:
            printed, _ = process.communicate(timeout=PS_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise OSError(errno.ETIMEDOUT, f"{command[0]} did not answer in {PS_LIMIT_S:g} s") from error
    return process.pid, printed if process.returncode == 0 else ""


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


def threads_lost_by_a_fork() -> list[str]:
    """Return the names of this process's other threads, native ones too, that a forked child would miss.

    OpenBLAS ends its threads before a fork and starts them again when they are needed, so one fork is made and thrown
    away before they are counted. Where the system shows no threads, Python's own are counted.
    """
    try:
        if len(thread_names()) > 1:
            _fork_and_forget()
        _, *others = thread_names()  # the first is the main thread
    except OSError:
        return ["of Python"] * (len(sys._current_frames()) - 1)
    return [name for name in others if name not in SAFE_THREADS]


def _fork_and_forget() -> None:
    """Fork a child that leaves at once. Handlers of libraries may hang at a fork, so the wait is limited."""
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
    """Return a descriptor of a file without a name, which a new process can be given and no other can open.

    Args:
        data: what it holds; the descriptor is then at its beginning.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create("replicas")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:  # it has no name now
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
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if sys.platform == "darwin" and (most == resource.RLIM_INFINITY or most > MACOS_MAX_FILES):
            most = max(limit, MACOS_MAX_FILES)
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
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    pending = [root]
    while pending:
        for pid in children.get(pending.pop(), ()):
            if pid not in spare:
                found.append(pid)
                pending.append(pid)
    return found


def _parents() -> Iterator[tuple[int, int]]:
    """Yield the pid of each living process, and its parent's."""
    if sys.platform != "linux":
        with contextlib.suppress(OSError):  # a sandbox that forbids `ps`: nothing is known
            yield from ((process.pid, process.parent) for process in _listed("-ax"))
        return
    for name in os.listdir("/proc"):
        if name.isdigit() and (fields := _stat(int(name))) is not None:
            yield int(name), int(fields[1])


def ask_children_to_end(limit_s: float) -> None:
    """Send each child of this process one SIGTERM, and wait until all have ended.

    An orphan is asked as well when it becomes a child of this process, which has to be a subreaper for that. Children
    that ignore SIGTERM are not waited for: the resource tracker of `multiprocessing` is one in every such program.

    Args:
        limit_s: seconds to wait at most.
    """
    deadline = time.monotonic() + limit_s
    asked: set[int] = set()
    pause_s = 0.001
    while time.monotonic() < deadline:
        living = [pid for pid, parent in _parents() if parent == os.getpid()]
        for pid in living:
            if pid not in asked:
                asked.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGTERM)
        if all(_ignores(pid, signal.SIGTERM) for pid in living):
            return
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)


def _ignores(pid: int, number: signal.Signals) -> bool:
    """Tell whether a process ignores a signal, or has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return True
    ignored = int(status.partition("SigIgn:")[2].split(None, 1)[0], 16)  # a bit per signal, from 1 on
    return bool(ignored >> (number - 1) & 1)


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
    limits = [float(_cores()), *_cpu_quotas()]
    with contextlib.suppress(ValueError):
        limits.append(float(os.environ.get("CPU_CORES", "")))  # as Hugging Face Jobs say it
    return max(1, int(min(limit for limit in limits if limit > 0)))


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS binds no process to cores


def _cpu_quotas(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[float]:
    """Return the processor quotas, in cores, of this process's control groups and those around them."""
    return [quota for folder in _groups("cpu", root, own) for quota in _cpu_quota(folder)]


def _groups(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups that may have a controller, and of those around them."""
    return itertools.chain.from_iterable(_groups_by_mount(controller, root, own))


def _groups_by_mount(controller: str, root: Path, own: Path) -> Iterator[list[Path]]:
    """Yield the same by where they are mounted, the innermost group first. Not all of the folders exist."""
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            for mount in (root, root / "unified") if not controllers else (root / controllers, root / controller):
                group_here = mount / group.strip("/")  # of another mount where the container sees its own group alone
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
    counts = (_oom_kills_of(folder) for folder in _groups("memory", root, own))
    return next((count for count in counts if count is not None), 0)


def oom_kills_in_own_group(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | None:
    """Count those that it killed in this process's innermost control group; None: the kernel does not report that.

    Groups around it hold processes of others as well.
    """
    for folders in _groups_by_mount("memory", root, own):
        # A container may not see its group by name, but as the root of all that it sees.
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
    """Let the kernel, when memory is short, end this process and what it starts before others, where that can be."""
    file = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):
        file.write_text(str(min(1000, int(file.read_text()) + by)))


def wakeup_pipe() -> tuple[int, int]:
    """Return a new pipe's reading and writing end, as `signal.set_wakeup_fd` needs them: neither blocks.

    Programs that this process starts do not inherit them. `os.pipe2` would do the same, and macOS lacks it.
    """
    ends = os.pipe()
    for end in ends:
        os.set_blocking(end, False)
    return ends


def open_process(pid: int) -> int:
    """Return a descriptor of a process, which `poll` reports as readable when the process has ended.

    Raises:
        OSError: there is no such process, or this system has no such descriptors.
    """
    if sys.platform != "linux":
        raise _not_here("pidfd_open")
    return os.pidfd_open(pid)


def signal_open_process(descriptor: int, number: signal.Signals) -> None:
    """Send a signal to the process of a descriptor, and never to a later process of the same pid.

    Raises:
        OSError: the process has ended, or is another user's.
    """
    if sys.platform != "linux":
        raise _not_here("pidfd_send_signal")
    signal.pidfd_send_signal(descriptor, number)


def lock_holder(descriptor: int, byte: int) -> int | None:
    """Return the pid of the process that holds the POSIX lock of one byte of an open file; None if there is none.

    Raises:
        OSError: the file system knows no such locks, or this system lays the question out differently.
    """
    if sys.platform != "linux":
        raise _not_here("F_GETLK")
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None  # of another machine on a network file system: negative


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory, which `open_file_of` finds from another process.

    Raises:
        OSError: this system, or a sandbox, has no such files.
    """
    if sys.platform != "linux":
        raise _not_here("memfd_create")
    return os.memfd_create(name)


def open_file_of(pid: int, descriptor: int, name: str) -> int | None:
    """Open, for reading and writing, the file in memory that another process has under a descriptor.

    Args:
        name: as given to `memory_file`.

    Returns: a descriptor of this process; None if the process has another file there by now.

    Raises:
        OSError: the process has ended, or has no such descriptor.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    return os.open(path, os.O_RDWR | os.O_CLOEXEC) if name in os.readlink(path) else None


def open_unnamed(folder: str, mode: int) -> tuple[int, str]:
    """Create a file for writing that has no name yet; return its descriptor, and a path from which to link it.

    Raises:
        OSError: the folder's file system has no such files (EOPNOTSUPP, EISDIR, EINVAL or ENOENT), or this system.
    """
    unnamed: int | None = getattr(os, "O_TMPFILE", None)
    if unnamed is None:
        raise _not_here("O_TMPFILE", errno.EOPNOTSUPP)
    descriptor = os.open(folder, unnamed | os.O_WRONLY | os.O_CLOEXEC, mode)
    return descriptor, f"/proc/self/fd/{descriptor}"


def open_inotify() -> Any:
    """Return an `inotify_simple.INotify`, with which the kernel reports changes in folders.

    Raises:
        OSError: this user has no more of them, the package is missing, or this system has none.
    """
    if sys.platform != "linux":
        raise _not_here("inotify")
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
    """Return the bytes of memory that this process holds; on macOS, the most that it ever held.

    Raises:
        OSError: a sandbox does not show it.
    """
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def own_threads() -> set[int]:
    """Return the native ids of this process's threads; none if the kernel does not list them.

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
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            found.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    return found


def open_paths() -> list[str]:
    """List the paths of the files that this process has open.

    Raises:
        OSError: the system does not show them.
    """
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # it was the list's
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return found


def _not_here(call: str, number: int = errno.ENOSYS) -> OSError:
    return OSError(number, f"{system_name()} has no {call}")


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
    if sys.platform != "linux":
        raise _not_here("prctl")
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
