"""Everything that differs between operating systems: processes, pipes, files without a name, cores and memory.

Only this module calls functions that exist on one system alone, so a port to another system changes one file. On Linux
the answers come from /proc. On macOS they come from `ps` and `sysctl`, and only a client is supported: it launches,
watches and ends replicas on other machines. A supervisor of local processes needs Linux; see `CAN_SUPERVISE`.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    # This check comes before the imports below, which do not exist on Windows. So the user gets a sentence instead of a
    # traceback.
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
SAFE_THREADS = ("jemalloc_bg_thd",)  # a thread of pyarrow's jemalloc, which handles forks itself
FORGET_S = 5.0
PR_SET_PDEATHSIG = 1
FIRST_PID_NAMESPACE = 0xEFFFFFFC  # the inode of the first pid namespace of a machine, in every kernel
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
    """Return a text that identifies this boot of the machine and this pid namespace.

    Within it, a pid names one process at a time.
    """
    try:
        if sys.platform == "linux":
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            space = os.readlink("/proc/self/ns/pid")
        else:
            boot = "".join(_output_of("sysctl", "-n", "kern.bootsessionuuid")[1].split()) or "unknown"
            space = "one"  # macOS has no pid namespaces
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
    return start_time(int(pid)) is not None or _is_hidden(int(pid))


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


def start_time(pid: int) -> int | None:
    """Return the start time of a process. None: it has ended, is a zombie, or the system does not show it.

    The unit depends on the system: clock ticks since the boot on Linux, seconds of Unix time on macOS. So only compare
    it with another value for the same pid.

    Args:
        pid: the process.
    """
    if sys.platform != "linux":
        with contextlib.suppress(OSError):  # a sandbox may forbid `ps`
            return next((process.started for process in _listed("-p", str(pid))), None)
        return None
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
    if sys.platform != "linux":
        return _is_alive_by_ps(pid, started)
    with contextlib.suppress(PermissionError):
        if start_time(pid) == started:
            return True
    return _is_hidden(pid)


def _is_hidden(pid: int) -> bool:
    """Return True if the process exists and the system hides it from this user."""
    if os.access(f"/proc/{pid}/stat", os.R_OK):
        return False
    try:
        os.kill(pid, 0)  # 0 sends no signal, and fails if the process does not exist
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


def _is_alive_by_ps(pid: int, started: int) -> bool:
    # The cheap check comes first, because `ps` is a new process, and most processes that are asked about have ended.
    try:
        os.kill(pid, 0)
    except OSError as error:
        if not isinstance(error, PermissionError):
            return False
    try:
        found = [process.started for process in _listed("-p", str(pid))]
    except OSError:  # a sandbox forbids `ps`: an existing process counts as the right one
        return True
    return bool(found) and started in (0, *found)  # 0: the start time could not be read when it was noted


class _Listed(NamedTuple):
    """One live process, as `ps` lists it."""

    pid: int
    parent: int
    started: int


def _listed(*which: str) -> list[_Listed]:
    """List live processes by `ps` of BSD and macOS. Zombies are left out.

    Args:
        which: the processes, as arguments of `ps`: `-ax` for all, or `-p` and a pid.

    Raises:
        OSError: `ps` cannot be run here.
    """
    import calendar
    from email.utils import parsedate  # reads the format of `ctime` in every locale; `time.strptime` does not

    # Each column needs an option of its own, because `pid=,ppid=` would give the first column the heading ",ppid=".
    columns = [part for name in ("pid=", "ppid=", "stat=", "lstart=") for part in ("-o", name)]
    found = []
    of_ps, text = _output_of("ps", *which, *columns)
    for line in text.splitlines():
        pid, parent, state, started = line.split(None, 3)
        date = parsedate(started)
        # `ps` lists itself, but it has ended by now. Without this check, a caller that kills all descendants would
        # never finish.
        if date is not None and not state.startswith("Z") and int(pid) != of_ps:
            found.append(_Listed(int(pid), int(parent), calendar.timegm(date)))
    return found


def _output_of(*command: str) -> tuple[int, str]:
    """Run a program of the system. Return its pid and its output, which is empty if the program failed.

    Raises:
        OSError: the program cannot be run, or does not end.
    """
    # Not at the top, because it imports `threading`, which the process that forks replicas must not import.
    import subprocess

    # The locale and the time zone are fixed, because the same process must always have the same start time.
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
    """The activity of a live process, from the kernel: whether it is stopped, debugged or runnable, and its
    processor time.
    """

    is_stopped: bool
    is_traced: bool
    """True if a debugger is attached to the process."""
    cpu_s: float
    is_runnable: bool = False
    """True if the main thread of the process runs, or waits for a processor."""


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


def fork() -> int:
    """Fork, without the warning of Python 3.12 and later."""
    if sys.version_info < (3, 12):
        return os.fork()
    with warnings.catch_warnings():
        # Python warns if a library such as OpenBLAS has a thread. The zygote's threads are idle, so a fork is safe.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


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
    if sys.platform == "linux":
        descriptor = os.memfd_create("replicas")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:  # the signal number has no name on this system
            descriptor = os.dup(file.fileno())
    with open(descriptor, "wb", closefd=False) as writer:
        writer.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


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
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        if sys.platform == "darwin" and (most == resource.RLIM_INFINITY or most > MACOS_MAX_FILES):
            most = max(limit, MACOS_MAX_FILES)
        with contextlib.suppress(OSError, ValueError):  # some sandboxes refuse it
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        while self._held:
            os.close(self._held.pop())


def flush_c_streams() -> None:
    """Flush the output of C code, which `os._exit` does not do."""
    _libc.fflush(None)


def become_subreaper() -> None:
    """Become the parent of orphaned descendants, which otherwise become children of init."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that forked this process ends."""
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


def descendants(root: int, spare: Collection[int] = ()) -> list[int]:
    """List the pids of the live descendants of a process.

    Args:
        root: the process.
        spare: the processes that are left out, with their descendants. Default: none.
    """
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
    """Yield the pid of each live process with the pid of its parent."""
    if sys.platform != "linux":
        with contextlib.suppress(OSError):  # some sandboxes forbid `ps`; then no process is known
            yield from ((process.pid, process.parent) for process in _listed("-ax"))
        return
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


def ask_children_to_end(limit_s: float, but_group: int | None = None) -> None:
    """Send SIGTERM once to each child of this process, and wait until all have ended.

    If this process is a subreaper, an orphan that becomes its child also gets SIGTERM. Children that ignore SIGTERM are
    not waited for. The resource tracker of `multiprocessing` is such a child.

    Args:
        limit_s: the longest wait in seconds.
        but_group: a process group whose processes have got SIGTERM already, and get no second one. Default: none.
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
                    if but_group is None or os.getpgid(pid) != but_group:
                        os.kill(pid, signal.SIGTERM)
        if all(_ignores(pid, signal.SIGTERM) for pid in living):
            return
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, 0.05)


def _ignores(pid: int, number: signal.Signals) -> bool:
    """Return True if a process ignores a signal, or has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return True
    ignored = int(status.partition("SigIgn:")[2].split(None, 1)[0], 16)  # a bit per signal, from 1 on
    return bool(ignored >> (number - 1) & 1)


def kill_descendants(root: int, spare: Collection[int] = (), limit_s: float = 5.0) -> list[int]:
    """Kill all descendants of a process, and repeat that until none is left.

    One pass is not enough, because the children of a killed process become children of another process of the tree.

    Args:
        root: the process, which is not killed itself.
        spare: processes that are not killed, with their descendants. Default: none.
        limit_s: the longest time in seconds. Default 5.

    Returns: the pids of processes that still live, such as a process that is stuck in the kernel.
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
    """Return the number of cores that this process may use, from affinity, control groups and the variable
    CPU_CORES.
    """
    limits = [float(_cores()), *_cpu_quotas()]
    with contextlib.suppress(ValueError):
        limits.append(float(os.environ.get("CPU_CORES", "")))  # Hugging Face Jobs set this variable
    return max(1, int(min(limit for limit in limits if limit > 0)))


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity of processes


def _cpu_quotas(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[float]:
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
                # the parent folder does not exist if the container sees only its own group
                group_here = mount / group.strip("/")
                yield [folder for folder in (group_here, *group_here.parents) if folder.is_relative_to(mount)]


def _cpu_quota(group: Path) -> list[float]:
    with contextlib.suppress(OSError, ValueError):  # the file is missing, or has the text "max"
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


def wakeup_pipe() -> tuple[int, int]:
    """Return the two ends of a new pipe for `signal.set_wakeup_fd`. Neither end blocks.

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
    """Return the pid of the process that holds the POSIX lock of one byte of an open file. None: no process of this
    machine does.

    Args:
        descriptor: the file.
        byte: the position of the byte.

    Raises:
        OSError: the file system has no such locks, or this system cannot report their holder.
    """
    if sys.platform != "linux":
        raise _not_here("F_GETLK")
    asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    # the pid is negative if the process is on another machine
    return pid if kind != fcntl.F_UNLCK and pid > 0 else None


def memory_file(name: str) -> int:
    """Return the descriptor of a new file in memory, which another process opens with `open_file_of`.

    Args:
        name: a name for the file, by which `open_file_of` recognizes it.

    Raises:
        OSError: this system, or a sandbox, has no such files.
    """
    if sys.platform != "linux":
        raise _not_here("memfd_create")
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
    unnamed: int | None = getattr(os, "O_TMPFILE", None)
    if unnamed is None:
        raise _not_here("O_TMPFILE", errno.EOPNOTSUPP)
    descriptor = os.open(folder, unnamed | os.O_WRONLY | os.O_CLOEXEC, mode)
    return descriptor, f"/proc/self/fd/{descriptor}"


def open_inotify() -> Any:
    """Return an `inotify_simple.INotify`, with which the kernel reports changes in folders.

    Raises:
        OSError: this user has reached the limit of such objects, the package is missing, or this system has no inotify.
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
    """Return the bytes of memory that this process uses. On macOS, the largest number that it has used.

    Raises:
        OSError: a sandbox does not show it.
    """
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS reports bytes
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
    """List the names of this process's threads, including native threads that Python does not know.

    Raises:
        OSError: the system does not show them.
    """
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    return found


def shared_file(size_bytes: int) -> tuple[int, str]:
    """Return the descriptor of a new file in memory, and a path by which other processes of this machine open it.

    The file has no name, and exists as long as a process has it open or mapped.

    Args:
        size_bytes: the size of the file.

    Raises:
        OSError: the system has no such files, or too little memory.
    """
    if sys.platform != "linux":
        raise _not_here("memfd_create")
    descriptor = os.memfd_create("replicas")
    os.ftruncate(descriptor, size_bytes)
    return descriptor, f"/proc/{os.getpid()}/fd/{descriptor}"


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


def _not_here(call: str, number: int = errno.ENOSYS) -> OSError:
    return OSError(number, f"{system_name()} has no {call}")


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat of a live process, beginning with the state.

    The name of the process, which comes before the state, may contain any characters.
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
    if sys.platform != "linux":
        raise _not_here("prctl")
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
