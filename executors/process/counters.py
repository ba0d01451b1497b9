"""The values that systems measure of processes, and the error for a call that a system does not have."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import NamedTuple

POLL_NS = 500_000
"""A thread whose turns on a processor are shorter than this polls. A thread that computes has turns of some ms."""


class Activity(NamedTuple):
    """The activity of a live process, from the kernel: whether it is stopped, debugged or runnable, and its
    processor time.
    """

    is_stopped: bool
    is_traced: bool
    """Whether a debugger is attached."""
    cpu_s: float
    is_runnable: bool = False
    """Whether the main thread of the process runs, or waits for a processor."""


class ThreadTimes(NamedTuple):
    """Counters of one thread, since it began."""

    run_ns: int
    """Nanoseconds on a processor."""
    wait_ns: int
    """Nanoseconds in which the thread could have run, and waited for a processor."""
    n_turns: int
    """The number of turns that the thread had on a processor."""

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
    """By thread id; empty if the kernel has no such counters."""
    cpu_s: float
    """Processor time of the tree, with processes that have ended."""
    io_bytes: int
    """Bytes read and written by system calls of the `read` and `write` families."""
    tcp_bytes: dict[int, int]
    """By socket inode: bytes received plus bytes sent that the other side has acknowledged. Empty if not available."""
    can_see_tcp: bool
    """False if the kernel did not answer for the sockets: then the next sample has nothing to be compared with."""
    is_waiting_on_disk: bool
    """True if a thread is in state D: it waits for a disk, or for a page that is being read."""
    runnable: frozenset[int]
    """The threads in state R: they run, or wait for a processor."""
    waits_inside: bool = False
    """True if every thread waits for a lock or a child of the tree, or is in `timed`. So no other program, file,
    connection or timer can end the wait. False if that is not known.
    """
    timed: frozenset[int] = frozenset()
    """The threads that wait for a lock with a time limit, or are runnable. A thread that waits for the GIL is one of
    them, and has such a wait every 5 ms.
    """


def not_here(system: str, call: str, number: int = errno.ENOSYS) -> OSError:
    """Return the error of a function that needs a system call that this system does not have.

    Args:
        system: the name of the system.
        call: the name of the system call.
        number: the number of the error. Default ENOSYS.

    Example:
        raise not_here("macOS", "memfd_create")
    """
    return OSError(number, f"{system} has no {call}")
