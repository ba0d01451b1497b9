"""Measures the activity of a process and its descendants: processor time, disk and pipe traffic, TCP traffic.

A supervisor measures this only for a rank that has made no progress for some seconds. The answer distinguishes work
without reports (an evaluation, a compilation, an upload) from a hang.

The measure must not depend on the load of the machine. A thread that computes together with 20 others gets a twentieth
of its time, or less. So the activity of each thread is `run / (run + sleep)`, without the time that it waited for a
processor. That is the share of a core that it would use on an idle machine.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from executors.process import ActivitySample, ThreadTimes, take_sample

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
TURNS_PER_S_FOR_GIL = 20.0
"""A thread that waits for the GIL gets more turns than this, 200 on an idle machine."""
STARVED = 0.99
"""A thread that waited for a processor for this share of a window counts as one that would use a whole core."""


@dataclass(frozen=True)
class ProcessActivity:
    """The activity of a tree of processes between two samples.

    Args:
        cores: the number of cores that the tree would keep busy on an idle machine.
        bytes_per_s: bytes per second through files, pipes and TCP connections.
        is_waiting_on_disk: True if the tree was seen to wait for a disk.
        is_always_runnable: True if a thread was ready to run at every sample.
        waits_inside: True if at every sample all threads waited for a lock of the tree, and none for anything that can
            come from outside, such as a file, a connection or a timer. Default False: not known.
    """

    cores: float
    bytes_per_s: float = 0.0
    is_waiting_on_disk: bool = False
    is_always_runnable: bool = False
    waits_inside: bool = False

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
        self.waits_inside = False
        """True if the newest window was idle, and the tree only waited for its own locks in it."""

    @property
    def every_s(self) -> float:
        """Seconds between two samples."""
        return self.window_s / N_SAMPLES

    def reset(self, next_at: float = 0.0) -> None:
        """Forget the samples, so that activity before the next sample does not count.

        Args:
            next_at: the earliest time of the next sample, by `time.monotonic`. Default 0: at the next look.
        """
        self._samples.clear()
        self._next_at = next_at

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
        self._next_at, self.waits_inside = now + self.every_s, False
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
        usage = usage_between(list(samples))
        self.waits_inside = not usage.is_active and usage.waits_inside
        if not usage.is_active:
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
        waits_inside=all(sample.waits_inside for sample in samples) and not _waits_for_a_timer(samples),
    )


def _waits_for_a_timer(samples: Sequence[ActivitySample]) -> bool:
    """Return True if a thread waited for a lock with a time limit, other than for the GIL.

    The end of the time limit may be what the tree waits for, as in `Event().wait(30)` between two attempts of a
    download. A thread that waits for the GIL has a limit of 5 ms, so it gets a turn many times a second.
    """
    first, last = samples[0], samples[-1]
    for thread in frozenset().union(*(sample.timed for sample in samples)):
        times = last.threads.get(thread, NO_TIMES).since(first.threads.get(thread, NO_TIMES))
        if not times.polls or times.n_turns < TURNS_PER_S_FOR_GIL * (last.at - first.at):
            return True
    return False


def _wants_to_run(before: ActivitySample, after: ActivitySample) -> bool:
    """Return True if a thread was runnable at a sample and does not only poll."""
    for thread in after.runnable:
        now = after.threads.get(thread)
        if now is None or not now.since(before.threads.get(thread, NO_TIMES)).polls:
            return True
    return False
