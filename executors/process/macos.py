"""The facts that macOS reports of processes, by psutil, `ps` and `sysctl`. `linux.py` has the same names.

macOS has no /proc, no descriptor of a process, no file in memory, no real-time signal, and no process that adopts the
orphans of its descendants. ADR 0082 has what takes their place. Without the package psutil only a client works.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from executors.process.counters import Activity, ActivitySample, not_here
from executors.process.lasting_threads import start_lasting_thread

assert sys.platform != "linux"  # so that a check of types for Linux leaves this file out

SYSTEM = {"darwin": "macOS"}.get(sys.platform, sys.platform)
"""The name of this system for messages."""
CAN_SUPERVISE = find_spec("psutil") is not None
"""True if this system has all that a supervisor of local replicas needs."""
CAN_FORK = False
"""True if a process that has imported torch may fork. Accelerate, Objective-C and dispatch queues do not survive it."""
ADOPTS_ORPHANS = False
"""True if a process can become the parent of its orphaned descendants, which are then found by their parents."""
OPENS_FILES_OF_OTHERS = False
"""True if an `open_file_of` leaves no file behind, so that a rank makes the file of its stacks by itself."""
LOCKS_NAME_HOLDERS = False
"""True if `lock_holder` works, so that the holder of a lock is known without a note."""
SHARES_PORTS = False
"""True if a socket that never listens can keep a port for torch's store, which binds the same port and listens."""
STACKS_SIGNAL: int = signal.SIGINFO
"""The signal at which a rank writes the stacks of its threads. Ctrl-T sends it to programs in a terminal alone."""
HANG_SIGNAL: int = signal.SIGEMT
"""The signal at which a rank raises `HangError`. No kernel of a Mac sends it."""
NVIDIA_DRIVER_FILE = Path("/nonexistent/nvidia/version")
"""The file in which a driver for Linux has its version."""
MOST_OPEN_FILES = 10_240  # OPEN_MAX: `setrlimit` refuses more, even if the hard limit is "unlimited"
TREE = "REPLICAS_TREE"
"""The variable by which orphans are found: the marks of the process and of its ancestors, joined by "/"."""
PS_LIMIT_S = 10.0
PARENT_LOOK_S = 0.5
RECENT_S = 0.5
MAX_PROCESSES = 256
"""A tree with more processes is measured in part: the rest could only make it look more active."""


def name_this_boot() -> tuple[str, str]:
    """Return texts that identify this boot of the machine, and its only space of pids.

    Raises:
        OSError: a sandbox does not show them.
    """
    boot = "".join(_output_of("sysctl", "-n", "kern.bootsessionuuid")[1].split()) or "unknown"
    return boot, "one"


def most_open_files(most: int) -> int:
    """Return the highest limit of open files that `setrlimit` takes.

    Args:
        most: the hard limit.
    """
    return MOST_OPEN_FILES if most == resource.RLIM_INFINITY or most > MOST_OPEN_FILES else most


# -- identity: `ps` has the start as the kernel noted it. psutil changes it when the clock is set.


class _Known(NamedTuple):
    """A process whose start `ps` has reported."""

    process: Any
    started: int


_known: dict[int, _Known] = {}
"""By pid, the processes that were looked up before. psutil checks them in microseconds, and `ps` would take 10 ms."""


def start_time(pid: int) -> int | None:
    """Return the start time of a process. None: it has ended, is a zombie, or the system does not show it.

    The unit depends on the system: clock ticks since the boot on Linux, seconds of Unix time on macOS. So only compare
    it with another value for the same pid.

    Args:
        pid: the process.
    """
    try:
        return _start_time(pid)
    except OSError:  # a sandbox that forbids `ps`
        return None


def _start_time(pid: int) -> int | None:
    """Return the start time of a process, like `start_time`. None: it has ended, or is a zombie.

    Raises:
        OSError: `ps` cannot be run here.
    """
    if (known := _known.get(pid)) is not None:
        if _lives(known.process):
            return known.started
        del _known[pid]
    process = _process(pid)  # before `ps` is asked, so that a later process with this pid is not taken for this one
    found = next((each.started for each in _listed("-p", str(pid))), None)
    if found is not None and process is not None and _lives(process):
        _known[pid] = _Known(process, found)
    return found


def is_alive(pid: int, started: int) -> bool:
    """Return True if the process with this pid and start time still runs.

    The system reuses a pid, but not both together. If a sandbox hides the process, the answer is True.

    Args:
        pid: the pid.
        started: the start time, from `start_time`.
    """
    # The cheap check comes first: `ps` is a new process, and most of the processes in question have ended.
    try:
        os.kill(pid, 0)
    except OSError as error:
        if not isinstance(error, PermissionError):
            return False
    try:
        found = _start_time(pid)
    except OSError:  # a sandbox forbids `ps`: an existing process counts as the right one
        return True
    return found is not None and started in (0, found)  # 0: the time could not be read when it was noted


def is_hidden(pid: int) -> bool:
    """Return True if the process exists and the system hides it from this user. macOS hides none.

    Args:
        pid: the process.
    """
    return False


class _Listed(NamedTuple):
    """One live process, as `ps` lists it."""

    pid: int
    parent: int
    state: str
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
            found.append(_Listed(int(pid), int(parent), state, calendar.timegm(date)))
    return found


def _output_of(*command: str) -> tuple[int, str]:
    """Run a program of the system. Return its pid and its output, which is empty if the program failed.

    Raises:
        OSError: the program cannot be run, or does not end.
    """
    # Not at the top, because it imports `threading`, and most processes never ask.
    import subprocess

    # With a fixed locale and time zone, because the same process must always have the same start time.
    environ = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdin=nothing, stdout=pipe, stderr=nothing, text=True) as process:
        try:
            printed, _ = process.communicate(timeout=PS_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise OSError(errno.ETIMEDOUT, f"{command[0]} did not answer in {PS_LIMIT_S:g} s") from error
    return process.pid, printed if process.returncode == 0 else ""


@cache
def _psutil() -> Any:
    """Return the package psutil. None: it is not installed, as on a machine that only launches."""
    try:
        import psutil
    except ImportError:
        return None
    return psutil


def _process(pid: int) -> Any:
    """Return the process of a pid for psutil. None: it has ended, or psutil is missing."""
    psutil = _psutil()
    if psutil is None:
        return None
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None


def _lives(process: Any) -> bool:
    psutil = _psutil()
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


# -- activity


def activity(pid: int) -> Activity | None:
    """Return the state of a process. None: it has ended, or the kernel does not show it.

    Args:
        pid: the process.
    """
    try:
        found = next(iter(_listed("-p", str(pid))), None)
    except OSError:
        return None
    seconds = _cpu_s(_process(pid))
    if found is None or seconds is None:
        return None
    # "X" behind the first letter: the process is debugged.
    return Activity(found.state[0] == "T", "X" in found.state[1:], seconds, found.state[0] == "R")


def _cpu_s(process: Any) -> float | None:
    """Return the processor time of a process. None: it has ended, or belongs to another user."""
    if process is None:
        return None
    try:
        times = process.cpu_times()
    except _psutil().Error:
        return None
    return float(times.user + times.system)


def take_sample(root: int, now: float, ignored_threads: Collection[int] = ()) -> ActivitySample | None:
    """Read the counters of a process and its descendants: the processor time, and their states from `ps`.

    macOS does not show the counters of threads, files and connections to other processes of the user. So an upload that
    needs less than a twentieth of a core looks idle.

    Args:
        root: its pid.
        now: the time that the sample gets.
        ignored_threads: native ids of threads that do not count. macOS shows no threads.

    Returns:
        The sample. None if the process has ended, or the kernel does not show it.

    Example:
        take_sample(os.getpid(), time.monotonic())
    """
    own = _cpu_s(_process(root))
    if own is None:
        return None
    living, states = _recent()
    mark = _mark_of(_process(root))
    pids = [root, *_below(living, {root}, [mark] if mark else [], spare=())][:MAX_PROCESSES]
    times = [own, *(_cpu_s(_process(pid)) for pid in pids[1:])]
    return ActivitySample(
        at=now,
        threads={},
        cpu_s=sum(each or 0.0 for each in times),
        io_bytes=0,
        tcp_bytes={},
        can_see_tcp=False,
        is_waiting_on_disk=any(states.get(pid) == "U" for pid in pids),
        runnable=frozenset(pid for pid in pids if states.get(pid) == "R"),
    )


class _Recent(NamedTuple):
    """All processes and their states at one time."""

    at: float
    living: dict[int, tuple[Any, int]]
    states: dict[int, str]


_last_listing: _Recent | None = None


def _recent() -> tuple[dict[int, tuple[Any, int]], dict[int, str]]:
    """Return the live processes with their parents, and the states from `ps`, as they were at most half a second ago.

    A supervisor takes samples of many ranks at the same time. A listing for each rank would delay the samples.
    """
    global _last_listing
    if _last_listing is None or time.monotonic() - _last_listing.at > RECENT_S:
        try:
            states = {each.pid: each.state[0] for each in _listed("-ax")}
        except OSError:
            states = {}
        _last_listing = _Recent(time.monotonic(), _all_living(), states)
    return _last_listing.living, _last_listing.states


# -- starting: never by a fork


def fork() -> int:
    """Refuse, because the frameworks of macOS do not survive a fork. Each process is a new Python.

    Raises:
        OSError: always.
    """
    raise not_here(SYSTEM, "fork that is safe")


def threads_lost_by_a_fork() -> list[str]:
    """Return nothing, because this system never forks."""
    return []


def private_file(data: bytes = b"") -> int:
    """Return a descriptor of a file without a name. A new process may inherit it, and no other process can open it.

    Args:
        data: the content of the file. The descriptor is at its beginning. Default: empty.
    """
    with tempfile.TemporaryFile(buffering=0) as file:  # it has no name now
        descriptor = os.dup(file.fileno())
    _write(descriptor, data)
    return descriptor


def openable_file(data: bytes) -> int:
    """Return a descriptor of a new file that other processes open by its `path_of_descriptor`.

    Args:
        data: the content of the file.
    """
    descriptor, _ = tempfile.mkstemp(prefix="replicas-")
    _write(descriptor, data)
    return descriptor


def _write(descriptor: int, data: bytes) -> None:
    with open(descriptor, "wb", closefd=False) as writer:
        writer.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)


def remove_openable(descriptor: int) -> None:
    """Remove the name of an `openable_file`.

    Args:
        descriptor: the file.
    """
    try:
        os.unlink(path_of_descriptor(descriptor))
    except OSError:
        return  # it has no name any more


def path_of_descriptor(descriptor: int) -> str:
    """Return a path by which other processes of this user open a file of this process, for as long as it has a name.

    Args:
        descriptor: the descriptor.

    Example:
        path_of_descriptor(file)  # "/private/var/folders/xy/T/replicas-ab12"
    """
    return os.fsdecode(fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))


def shared_file(size_bytes: int) -> tuple[int, str]:
    """Return the descriptor of a new file, and a path by which other processes of this machine open it.

    The file has a name until `close_shared_file`.

    Args:
        size_bytes: the size of the file.

    Raises:
        OSError: the disk of temporary files has too little room.
    """
    descriptor, path = tempfile.mkstemp(prefix="replicas-")
    os.ftruncate(descriptor, size_bytes)
    return descriptor, path


def close_shared_file(descriptor: int, path: str) -> None:
    """Close a `shared_file` that all processes have mapped.

    Args:
        descriptor: the descriptor of the file.
        path: the path of the file.
    """
    os.close(descriptor)
    os.unlink(path)


def memory_file(name: str) -> int:
    """Return the descriptor of a new temporary file of this process, which another process opens with `open_file_of`.

    The file has a name until this process ends. A killed process leaves it behind.

    Args:
        name: a name for the file.

    Raises:
        OSError: the folder of temporary files cannot be written to.
    """
    path = _path_of(os.getpid(), name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a killed process that had this pid
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    atexit.register(_remove_file_of, os.getpid(), path)
    return descriptor


def _path_of(pid: int, name: str) -> str:
    return os.path.join(tempfile.gettempdir(), f"{name}-{pid}")


def _remove_file_of(pid: int, path: str) -> None:
    if os.getpid() == pid:  # a forked helper runs the functions at exit, too
        with contextlib.suppress(OSError):
            os.unlink(path)


def open_file_of(pid: int, descriptor: int, name: str) -> int | None:
    """Open the `memory_file` of another process for reading and writing.

    Args:
        pid: the other process.
        descriptor: the descriptor of the file in that process.
        name: the name of the file, as for `memory_file`.

    Returns: a descriptor of this process. None: the file belongs to another user.

    Raises:
        OSError: the process has ended, or has no such file.
    """
    found = os.open(_path_of(pid, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    if os.fstat(found).st_uid != os.getuid():
        os.close(found)
        return None
    return found


def open_unnamed(folder: str, mode: int) -> tuple[int, str]:
    """Refuse, because a new file of macOS has a name.

    Args:
        folder: the folder, whose file system has the file.
        mode: the permissions of the file.

    Raises:
        OSError: always, with EOPNOTSUPP.
    """
    raise not_here(SYSTEM, "O_TMPFILE", errno.EOPNOTSUPP)


# -- the end of another process


def make_lifeline() -> tuple[int, int]:
    """Return the two ends of a pipe that shows the end of this process to another one.

    A process that this one forks keeps the pipe open. So the other process also checks now and then whether this
    process is alive.
    """
    return os.pipe()


def watch_process(pid: int, lifeline: int) -> int:
    """Return a descriptor that `poll` reports as readable when a process has ended.

    Args:
        pid: the process.
        lifeline: the reading end of a pipe that only this process writes to.

    Raises:
        OSError: the pipe does not exist.
    """
    if lifeline < 0:
        raise not_here(SYSTEM, "pidfd_open")
    return lifeline


def open_process(pid: int) -> int:
    """Refuse, because no descriptor stands for a process. See `watch_process`.

    Args:
        pid: the process.

    Raises:
        OSError: always.
    """
    raise not_here(SYSTEM, "pidfd_open")


def signal_open_process(descriptor: int, number: signal.Signals) -> None:
    """Refuse, because no descriptor stands for a process.

    Args:
        descriptor: the descriptor.
        number: the signal.

    Raises:
        OSError: always.
    """
    raise not_here(SYSTEM, "pidfd_send_signal")


def lock_holder(descriptor: int, byte: int) -> int | None:
    """Refuse, because the layout of the answer could not be tried without a Mac. See `LOCKS_NAME_HOLDERS`.

    Args:
        descriptor: the file.
        byte: the position of the byte.

    Raises:
        OSError: always.
    """
    raise not_here(SYSTEM, "tried F_GETLK")


def become_subreaper() -> None:
    """Refuse, because orphans of macOS become children of launchd. See `mark_child`.

    Raises:
        OSError: always.
    """
    raise not_here(SYSTEM, "subreaper")


def die_with_parent() -> None:
    """Watch the parent in a thread, which kills this process half a second after its parent has ended, or earlier."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_LOOK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    start_lasting_thread(watch)


# -- descendants: by parents, by sessions, and by the variable `TREE` of their environment


def children(pid: int) -> list[int]:
    """Return [-1], because the children of a process are not all of its descendants. Call `descendants` instead.

    Args:
        pid: the process.
    """
    return [-1]


def parents() -> Iterator[tuple[int, int]]:
    """Yield the pid of each live process with the pid of its parent."""
    for process, parent in _living():
        yield process.pid, parent


def _living() -> Iterator[tuple[Any, int]]:
    """Yield each live process of psutil with the pid of its parent. None of them if psutil is missing."""
    psutil = _psutil()
    if psutil is None:
        return
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                yield process, process.ppid()
        except psutil.Error:
            continue


def mark_child() -> dict[str, str]:
    """Return variables for a new child, by which its descendants are found after they have lost their parents."""
    own = _own_mark()
    return {TREE: f"{own}/{os.urandom(6).hex()}" if own else os.urandom(6).hex()}


def _own_mark() -> str:
    # The mark is read from the kernel, because code may have changed the variables of this process since its start.
    return _mark_of(_process(os.getpid()))


_marks: dict[Any, str] = {}
"""The marks of processes that were looked at before. A process keeps its mark when it starts another program."""


def _mark_of(process: Any) -> str:
    """Return the mark of a process. Empty: it has none, or its environment is not shown."""
    if process is None:
        return ""
    if process not in _marks:
        try:
            _marks[process] = process.environ().get(TREE, "")
        except (_psutil().Error, OSError):  # another user's process, or a program of Apple
            _marks[process] = ""
    return _marks[process]


def marked(marks: Mapping[str, str]) -> list[int]:
    """List the live processes below a child that has the variables of `mark_child`, with the child itself.

    Args:
        marks: the variables.
    """
    return _below(_all_living(), set(), [marks[TREE]], spare=())


def descendants(root: int, spare: Collection[int] = (), ended: Collection[int] = ()) -> list[int]:
    """List the pids of the live descendants of a process.

    A descendant has a parent, a leader of its session, or a mark in its environment that leads to the process.

    Args:
        root: the process.
        spare: processes that are left out, with their descendants. Default: none.
        ended: leaders of sessions that have just ended, whose sessions have descendants. Default: none.
    """
    mark = _mark_of(_process(root))
    return _below(_all_living(), {root, *ended}, [mark] if mark else [], spare)


def _all_living() -> dict[int, tuple[Any, int]]:
    """Return each live process and the pid of its parent, by pid."""
    return {process.pid: (process, parent) for process, parent in _living()}


def _below(
    living: Mapping[int, tuple[Any, int]], roots: set[int], marks: Iterable[str], spare: Collection[int]
) -> list[int]:
    """List the processes below some processes and some marks, but not those that are spared or below these."""
    for process in _marks.keys() - {process for process, _ in living.values()}:
        del _marks[process]
    spared_marks = [_mark_of(living[pid][0]) for pid in spare if pid in living]
    spared = _closure(living, set(spare), [mark for mark in spared_marks if mark])
    found = _closure(living, set(roots), list(marks))
    return sorted(found - spared - roots - {os.getpid()})


def _closure(living: Mapping[int, tuple[Any, int]], roots: set[int], marks: Collection[str]) -> set[int]:
    """Return some processes, with all processes that descend from them by parents, sessions or marks."""
    found = set(roots)
    for pid, (process, _) in living.items():
        mark = _mark_of(process)
        if mark and any(mark == each or mark.startswith(f"{each}/") for each in marks):
            found.add(pid)
    sessions = {pid: _session_of(pid) for pid in living}
    size = -1
    while size < len(found):
        size = len(found)
        found |= {pid for pid, (_, parent) in living.items() if parent in found or sessions[pid] in found}
    return found


def _session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except OSError:  # the process has ended, or the system does not report it
        return -1


def own_children() -> list[int]:
    """List the live children of this process, and the orphans among its descendants."""
    parent_of = dict(parents())
    return [pid for pid in descendants(os.getpid()) if parent_of.get(pid) in (os.getpid(), 1)]


def ignores(pid: int, number: signal.Signals) -> bool:
    """Return True if a process ignores a signal, or has ended.

    Args:
        pid: the process.
        number: the signal.
    """
    try:
        _, text = _output_of("ps", "-p", str(pid), "-o", "sigignore=")
        return not text.strip() or bool(int(text, 16) >> (number - 1) & 1)
    except (OSError, ValueError):
        return False


# -- cores, memory and files


def cores() -> int:
    """Return the number of cores. macOS binds no process to cores."""
    return os.cpu_count() or 1


def cpu_quotas() -> list[float]:
    """Return nothing, because macOS has no control groups."""
    return []


def killed_for_memory(pid: int, since: float) -> bool | None:
    """Return None, because macOS does not report why a process was killed.

    Args:
        pid: the process.
        since: the earliest time of the process's start, by `time.monotonic`.
    """
    return None


def oom_kills() -> int:
    """Return 0, because macOS reports no kills for memory."""
    return 0


def oom_kills_in_group() -> int:
    """Return 0, because macOS has no control groups."""
    return 0


def oom_kills_in_own_group() -> int | None:
    """Return None, because macOS has no control groups."""
    return None


def be_killed_first(by: int = 500) -> None:
    """Do nothing, because macOS has no order of such kills.

    Args:
        by: the change that Linux makes. Default 500.
    """


def open_inotify() -> Any:
    """Refuse, because macOS has no inotify, so that files are polled.

    Raises:
        OSError: always.
    """
    raise not_here(SYSTEM, "inotify")


def inotify_limit() -> int:
    """Refuse, because macOS has no inotify.

    Raises:
        OSError: always.
    """
    raise not_here(SYSTEM, "inotify")


def memory_in_use() -> int:
    """Return the bytes of memory that this process uses. Without psutil, the largest number that it has used."""
    process = _process(os.getpid())
    if process is not None:
        return int(process.memory_info().rss)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


def own_threads() -> set[int]:
    """Return the native ids of this process's threads. Empty, because macOS does not list them cheaply.

    Example:
        own_threads()
    """
    return set()


def thread_names() -> list[str]:
    """Refuse, because macOS does not list the names of threads.

    Raises:
        OSError: always.
    """
    raise not_here(SYSTEM, "/proc")


def gpu_of_system() -> str | None:
    """Return the name of the chip whose GPU torch calls mps, as in "Apple M2 (mps)". None: it has no such GPU."""
    try:
        chip = " ".join(_output_of("sysctl", "-n", "machdep.cpu.brand_string")[1].split())
    except OSError:
        return None
    return f"{chip} (mps)" if chip.startswith("Apple") else None  # Macs with a chip of Intel differ


def open_paths() -> list[str]:
    """List the paths of the files that this process has open. Devices of GPUs are never among them on macOS."""
    return []
