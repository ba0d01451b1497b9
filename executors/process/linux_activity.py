"""Reads the counters of a tree of processes from /proc, and the bytes of its TCP connections from the kernel."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct
import sys
from collections.abc import Collection, Iterator

from executors.process.counters import ActivitySample, ThreadTimes

assert sys.platform == "linux"  # so that a check of types for another system leaves this file out

CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
MAX_PROCESSES = 256
"""A tree with more processes is measured in part: the rest could only make it look more active."""

ENDED = ("Z", "X")
"""The states of a thread that has ended."""
_FUTEX, *_WAITS_FOR_CHILD = {"x86_64": (b"202", b"61", b"247"), "aarch64": (b"98", b"260", b"95")}.get(
    platform.machine(), (b"unknown",)
)
"""The numbers of the system calls futex, wait4 and waitid, by which a thread waits for a lock or for a child."""
_TIMEOUT_AT = 4  # the field of the call's time limit, after the call's number and three arguments

_SOCK_DIAG_BY_FAMILY, _NLMSG_DONE, _NLMSG_ERROR = 20, 3, 2
_NETLINK_SOCK_DIAG = 4
_NLM_F_REQUEST_DUMP = 0x301
_INET_DIAG_INFO = 2
_ASK_FOR_INFO = 1 << (_INET_DIAG_INFO - 1)
_ALL_TCP_STATES = 0xFFF & ~(1 << 10)  # all but LISTEN
_INODE_AT = 68  # of `struct inet_diag_msg`, which is 72 bytes long
_BYTES_ACKED_AT = 120  # of `struct tcp_info`; bytes_received follows (Linux 4.1)


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
    waits_inside, timed = True, set[int]()
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
            # One thread that waits for anything else is enough, so the calls of the others are not read.
            if waits_inside and own[0] not in ENDED:
                # A thread that waits for the GIL is often runnable. Later samples show whether it only polls.
                is_timed = True if own[0] == "R" else _waits_inside(f"{base}/syscall") if own[0] == "S" else None
                waits_inside = is_timed is not None
                if is_timed:
                    timed.add(tid)
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
        waits_inside=waits_inside and n_processes < MAX_PROCESSES,
        timed=frozenset(timed),
    )


def _waits_inside(path: str) -> bool | None:
    """Return True if a thread waits for a lock with a time limit, and False if it waits for a lock or a child without
    one.

    None: the thread waits for something else, or the kernel does not show its call (proc_pid_syscall(5)).

    Args:
        path: the thread's file `syscall` in /proc.
    """
    fields = _read(path).split()
    if len(fields) <= _TIMEOUT_AT or fields[0] not in (_FUTEX, *_WAITS_FOR_CHILD):
        return None
    return fields[0] == _FUTEX and fields[_TIMEOUT_AT] != b"0x0"


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
    for line in _read(path).splitlines()[:2]:  # rchar and wchar
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
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
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
