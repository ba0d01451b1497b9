"""Measures the activity of a process and its descendants: processor time, disk and pipe traffic, TCP traffic.

A supervisor measures this only for a rank that has made no progress for some seconds. The answer distinguishes work
without reports (an evaluation, a compilation, an upload) from a hang.

The measure must not depend on the load of the machine. A thread that computes together with 20 others gets a twentieth
of its time, or less. So the activity of each thread is `run / (run + sleep)`, without the time that it waited for a
processor. That is the share of a core that it would use on an idle machine.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

BUSY_CORES = 0.05
"""A tree that wants this share of one core is active."""
BUSY_BYTES_PER_S = 32 * 1024
"""A tree that moves this many bytes per second is active."""
MIN_SAMPLES_WAITING_ON_DISK = 2
"""One sample in state D is chance; two samples of one window are a slow disk."""
MIN_MEASURED_S = 0.03
"""Processor time is reported in hundredths of a second: less than three of them is noise."""
N_SAMPLES = 5
"""Samples in a window."""
RUNNABLE_SHARE = 0.8
"""A tree that had something to run in this share of the samples is active."""
POLL_NS = 500_000
"""A thread with shorter turns on a processor counts as polling. A thread that computes has turns of some
milliseconds.
"""
STARVED = 0.99
"""A thread that waited for a processor for this share of a window counts as one that would use a whole core."""
CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MAX_PROCESSES = 256
"""The largest number of measured processes. A larger tree is measured in part, because more processes could only make
it look more active.
"""

_SOCK_DIAG_BY_FAMILY, _NLMSG_DONE, _NLMSG_ERROR = 20, 3, 2
_NETLINK_SOCK_DIAG = 4
AF_NETLINK: int = getattr(socket, "AF_NETLINK", 16)
_NLM_F_REQUEST_DUMP = 0x301
_INET_DIAG_INFO = 2
_ASK_FOR_INFO = 1 << (_INET_DIAG_INFO - 1)
_ALL_TCP_STATES = 0xFFF & ~(1 << 10)  # all states of TCP except LISTEN
_INODE_AT = 68  # the offsets in `struct inet_diag_msg`, which is 72 bytes long
_BYTES_ACKED_AT = 120  # the offset in `struct tcp_info`; bytes_received follows (Linux 4.1)


class ThreadTimes(NamedTuple):
    """Counters of one thread, since it began."""

    run_ns: int
    """The nanoseconds in which the thread ran on a processor."""
    wait_ns: int
    """The nanoseconds in which the thread was ready to run, and waited for a processor."""
    n_turns: int
    """The number of times that the thread was given a processor."""

    def since(self, before: ThreadTimes) -> ThreadTimes:
        return ThreadTimes(self.run_ns - before.run_ns, self.wait_ns - before.wait_ns, self.n_turns - before.n_turns)

    @property
    def polls(self) -> bool:
        """True if the thread only polls: it returns the processor at once, again and again.

        A thread that waits for the GIL polls every 5 ms. On a loaded machine such a thread is runnable nearly always.
        """
        return self.n_turns > 0 and self.run_ns < POLL_NS * self.n_turns


@dataclass(frozen=True)
class ActivitySample:
    """Counters of a process tree at one time. Only differences between two samples have a meaning."""

    at: float
    threads: dict[int, ThreadTimes]
    """The counters of each thread, by thread id. Empty if the kernel has no such counters."""
    cpu_s: float
    """Processor time of the tree, with processes that have ended."""
    io_bytes: int
    """Bytes read and written by system calls of the `read` and `write` families."""
    tcp_bytes: dict[int, int]
    """By socket inode: bytes received plus bytes sent that the other side has acknowledged. Empty if not available."""
    can_see_tcp: bool
    """False if the kernel did not report the sockets. Then the traffic of the next sample cannot be computed."""
    is_waiting_on_disk: bool
    """True if a thread is in state D: it waits for a disk, or for a page that is being read."""
    runnable: frozenset[int]
    """The threads in state R: they run, or wait for a processor."""


@dataclass(frozen=True)
class ProcessActivity:
    """The activity of a tree of processes between two samples.

    Args:
        cores: the number of cores that the tree would keep busy on an idle machine.
        bytes_per_s: bytes per second through files, pipes and TCP connections.
        is_waiting_on_disk: True if the tree was seen to wait for a disk.
        is_always_runnable: True if a thread was ready to run at every sample.
    """

    cores: float
    bytes_per_s: float = 0.0
    is_waiting_on_disk: bool = False
    is_always_runnable: bool = False

    @property
    def is_active(self) -> bool:
        """True if this is more activity than a process that only waits can have."""
        is_busy = self.cores >= BUSY_CORES or self.bytes_per_s >= BUSY_BYTES_PER_S
        return is_busy or self.is_waiting_on_disk or self.is_always_runnable


class ActivityMeter:
    """Samples one tree of processes and decides whether it is active.

    Args:
        pid: the process at the root of the tree, on this machine.
        window_s: the seconds that one answer covers, in `N_SAMPLES` samples. A short window depends on chance.

    Example:
        meter = ActivityMeter(pid)
        meter.look(monotonic())  # again every `meter.every_s` seconds
    """

    def __init__(self, pid: int, window_s: float = 10.0) -> None:
        self._pid, self.window_s = pid, window_s
        self._samples = deque[ActivitySample]()
        self._next_at = 0.0

    @property
    def every_s(self) -> float:
        """Seconds between two samples."""
        return self.window_s / N_SAMPLES

    def reset(self) -> None:
        """Forget the samples, so that activity before the next sample does not count."""
        self._samples.clear()
        self._next_at = 0.0

    def look(self, now: float, ignored_threads: Collection[int] = ()) -> bool | None:
        """Take a sample if one is due.

        Args:
            now: the time by `time.monotonic`.
            ignored_threads: native ids of threads that do not count: threads of this project, which also beat in a hung
                process.

        Returns:
            True if the tree is active now, and False if it is idle. None: no sample was due, or the first window is not
            complete. A tree that the kernel does not show counts as active.
        """
        if now < self._next_at:
            return None
        self._next_at = now + self.every_s
        taken = take_sample(self._pid, now, ignored_threads)
        if taken is None:
            self._samples.clear()
            return True
        samples = self._samples
        samples.append(taken)
        # Keep the newest sample that is old enough to begin a window, and those after it.
        while len(samples) > 1 and now - samples[1].at >= self.window_s:
            samples.popleft()
        if now - samples[0].at < self.window_s:
            return None
        if not usage_between(list(samples)).is_active:
            return False
        # A burst early in the window has ended. It must not make the time of the last activity later than it really
        # was.
        newest = usage_between([samples[-2], samples[-1]])
        return newest.is_active or taken.is_waiting_on_disk or _wants_to_run(samples[-2], taken)


NO_TIMES = ThreadTimes(0, 0, 0)


def usage_between(samples: Sequence[ActivitySample]) -> ProcessActivity:
    """Return the activity of a process tree between the first and the last of some samples.

    Args:
        samples: at least two, oldest first.

    Example:
        usage_between([before, after]).is_active
    """
    first, last, later = samples[0], samples[-1], samples[1:]
    span_s = max(last.at - first.at, 1e-3)
    cpu_s = last.cpu_s - first.cpu_s
    cores = cpu_s / span_s if cpu_s >= MIN_MEASURED_S else 0.0
    wanted = 0.0
    for thread, now in last.threads.items():
        times = now.since(first.threads.get(thread, NO_TIMES))
        if times.run_ns < 0:
            continue  # the id belongs to another thread by now
        run_s, wait_s = times.run_ns / 1e9, times.wait_ns / 1e9
        if wait_s >= STARVED * span_s:
            wanted += 0.0 if times.polls else 1.0
        else:
            wanted += run_s / max(run_s + max(0.0, span_s - run_s - wait_s), 1e-9)
    # The samples are compared in pairs, because the counters of a closed connection disappear, and each request may
    # open a new connection.
    tcp_bytes = sum(
        max(0, n_bytes - before.tcp_bytes.get(inode, 0))
        for before, after in itertools.pairwise(samples)
        if before.can_see_tcp
        for inode, n_bytes in after.tcp_bytes.items()
    )
    return ProcessActivity(
        cores=max(cores, wanted),
        bytes_per_s=max(0, last.io_bytes - first.io_bytes + tcp_bytes) / span_s,
        is_waiting_on_disk=sum(sample.is_waiting_on_disk for sample in later) >= MIN_SAMPLES_WAITING_ON_DISK,
        # The counters of a thread do not change while it waits for a processor during a whole window.
        is_always_runnable=sum(itertools.starmap(_wants_to_run, itertools.pairwise(samples)))
        >= max(3.0, RUNNABLE_SHARE * len(later)),
    )


def _wants_to_run(before: ActivitySample, after: ActivitySample) -> bool:
    """Return True if a thread was runnable at a sample and does not only poll."""
    for thread in after.runnable:
        now = after.threads.get(thread)
        if now is None or not now.since(before.threads.get(thread, NO_TIMES)).polls:
            return True
    return False


def take_sample(root: int, now: float, ignored_threads: Collection[int] = ()) -> ActivitySample | None:
    """Read the counters of a process and its descendants.

    Args:
        root: its pid.
        now: the time that the sample gets.
        ignored_threads: native ids of threads that do not count.

    Returns:
        The sample. None if the process has ended, or the kernel does not show it.

    Example:
        take_sample(os.getpid(), time.monotonic())
    """
    threads: dict[int, ThreadTimes] = {}
    cpu_s, io_bytes, inodes, states = 0.0, 0, set[int](), dict[int, str]()
    pending, n_processes = [root], 0
    while pending and n_processes < MAX_PROCESSES:
        pid = pending.pop()
        fields = _stat_fields(f"/proc/{pid}/stat")
        if fields is None:
            if pid == root:
                return None
            continue
        n_processes += 1
        # This includes children for which it has waited, so short processes that ended between two samples count, too.
        cpu_s += sum(map(int, fields[11:15])) / CLOCK_TICKS_PER_S
        io_bytes += _io_bytes(f"/proc/{pid}/io")
        inodes |= _socket_inodes(pid)
        for tid in _numbered(f"/proc/{pid}/task"):
            base = f"/proc/{pid}/task/{tid}"
            # Children of the ignored threads are not ignored.
            pending += [int(child) for child in _read(f"{base}/children").split()]
            own = _stat_fields(f"{base}/stat")
            if own is None:
                continue
            if tid in ignored_threads:
                cpu_s -= (int(own[11]) + int(own[12])) / CLOCK_TICKS_PER_S
                io_bytes -= _io_bytes(f"{base}/io")
                continue
            states[tid] = own[0]
            counters = _read(f"{base}/schedstat").split()
            if len(counters) == len(ThreadTimes._fields):
                threads[tid] = ThreadTimes(*map(int, counters))
    if not any(times.run_ns for times in threads.values()):
        threads = {}  # a kernel without these counters only shows zeros
    tcp_bytes = _tcp_bytes(inodes) if inodes else {}
    return ActivitySample(
        at=now,
        threads=threads,
        cpu_s=cpu_s,
        io_bytes=io_bytes,
        tcp_bytes=tcp_bytes or {},
        can_see_tcp=tcp_bytes is not None,
        is_waiting_on_disk="D" in states.values(),
        runnable=frozenset(tid for tid, state in states.items() if state == "R"),
    )


def _read(path: str) -> bytes:
    """Return the bytes of a small file of /proc. Return no bytes if the file is missing, or not readable."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, 65536)
        finally:
            os.close(descriptor)
    return b""


def _stat_fields(path: str) -> list[str] | None:
    """Return the fields of a `stat` file from the state on. A zombie has them, too. None: the file does not exist."""
    data = _read(path)
    return data.rpartition(b")")[2].decode().split() if data else None


def _io_bytes(path: str) -> int:
    found = 0
    for line in _read(path).splitlines()[:2]:  # the fields rchar and wchar
        found += int(line.partition(b":")[2])
    return found


def _numbered(folder: str) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(folder)]
    return []


def _socket_inodes(pid: int) -> set[int]:
    found = set[int]()
    for descriptor in _numbered(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError, ValueError):
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found


def _tcp_bytes(inodes: Collection[int]) -> dict[int, int] | None:
    """Return the bytes that passed through TCP sockets of this network namespace, by inode.

    None if they are unknown.

    Linux does not count `send` in `/proc/PID/io`, so only this shows an upload from memory (sock_diag(7)).
    """
    found: dict[int, int] = {}
    try:
        with socket.socket(AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
            netlink.settimeout(1.0)
            for family in (socket.AF_INET, socket.AF_INET6):
                wanted = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, _ASK_FOR_INFO, _ALL_TCP_STATES)
                header = struct.pack("=IHHII", 16 + len(wanted), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0)
                netlink.send(header + wanted)
                for message in _messages(netlink):
                    inode = struct.unpack_from("=I", message, _INODE_AT)[0]
                    if inode in inodes:
                        found[inode] = _bytes_of(message)
    except (OSError, struct.error):  # some sandboxes have no such socket
        return None
    return found


def _messages(netlink: socket.socket) -> Iterator[bytes]:
    while True:
        data = netlink.recv(1 << 18)
        at = 0
        while at + 16 <= len(data):
            size, kind = struct.unpack_from("=IH", data, at)
            if kind == _NLMSG_ERROR:
                raise OSError("sock_diag was refused")
            if kind == _NLMSG_DONE or size < 16:
                return
            yield data[at + 16 : at + size]
            at += (size + 3) & ~3


def _bytes_of(message: bytes) -> int:
    at = 72
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        if kind == _INET_DIAG_INFO and size >= 4 + _BYTES_ACKED_AT + 16:
            acked, received = struct.unpack_from("=QQ", message, at + 4 + _BYTES_ACKED_AT)
            return int(acked + received)
        at += max(4, (size + 3) & ~3)
    return 0
