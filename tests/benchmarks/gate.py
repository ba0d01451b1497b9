"""Notices when all replicas have started: the benchmark's side of `replica_tasks`, the same for every launcher."""

from __future__ import annotations

import os
import select
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from .replica_tasks import ARRIVAL


class Gate:
    """Two named pipes: replicas write their arrival into one, and wait at the other until they are released."""

    def __enter__(self) -> Gate:
        self._folder = tempfile.TemporaryDirectory(prefix="gate-")
        self.arrivals, self.release_path = (str(Path(self._folder.name) / name) for name in ("arrivals", "release"))
        os.mkfifo(self.arrivals)
        os.mkfifo(self.release_path)
        # Open both sides of each pipe, so that no replica waits when it opens a pipe, and none reads an end of file
        # before the release.
        self._arrivals = os.open(self.arrivals, os.O_RDWR | os.O_CLOEXEC)
        self._release = os.open(self.release_path, os.O_RDWR | os.O_CLOEXEC)
        self._held = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        os.close(self._arrivals)
        self._folder.cleanup()

    def last_arrival_s(self, n: int, *, within_s: float, give_up_when_ready: int | None = None) -> float:
        """Wait for n arrivals and return the time of the last, in seconds of CLOCK_MONOTONIC.

        Args:
            give_up_when_ready: a pidfd of the launcher. Without the launcher, no replica arrives.
        """
        deadline = time.monotonic() + within_s
        poller = select.poll()
        poller.register(self._arrivals, select.POLLIN)
        if give_up_when_ready is not None:
            poller.register(give_up_when_ready, select.POLLIN)
        arrived: list[int] = []
        self.pids: list[int] = []
        """The pids of the replicas that have arrived."""
        while len(arrived) < n:
            ready = {descriptor for descriptor, _ in poller.poll(max(0.0, deadline - time.monotonic()) * 1000)}
            if self._arrivals in ready:
                records = os.read(self._arrivals, ARRIVAL.size * n)
                arrived += [at_ns for at_ns, _ in ARRIVAL.iter_unpack(records)]
                self.pids += [pid for _, pid in ARRIVAL.iter_unpack(records)]
            elif give_up_when_ready in ready:
                raise RuntimeError(f"{len(arrived)} of {n} replicas came, then their launcher ended.")
            elif not ready:
                raise TimeoutError(f"{len(arrived)} of {n} replicas came within {within_s:g} s.")
        return max(arrived) / 1e9

    def release(self) -> None:
        """Let the replicas end."""
        if self._held:
            os.close(self._release)
            self._held = False

    def wait_until_gone(self, within_s: float) -> None:
        """Wait until every replica's process has ended, so that none disturbs the next measurement."""
        reader = os.open(self.arrivals, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.close(self._arrivals)  # this process was the last other writer, so only replicas still have the pipe open
        self._arrivals = reader
        poller = select.poll()
        poller.register(reader, 0)  # POLLHUP is always reported
        if not poller.poll(within_s * 1000):
            raise TimeoutError(f"Replicas were still there {within_s:g} s after their release.")


@dataclass(frozen=True)
class Footprint:
    """The memory and processor time of a family of processes."""

    cpu_s: float
    pss_mib: float


def pss_mib(pids: Sequence[int]) -> float:
    """Return the proportional set size of processes, in MiB."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("Pss:")) / 1024


def footprint(mark: str) -> Footprint:
    """Add up all processes whose environment has `mark`, and the processor time of their ended children."""
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    cpu_s, pss_kib = 0.0, 0
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if mark.encode() not in (folder / "environ").read_bytes():
                continue
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            rollup = (folder / "smaps_rollup").read_text()
            # Ticks round a short process down to zero, and the nanoseconds do not include threads that ended. So use
            # the larger value.
            threads_ns = sum(int(task.read_text().split()[0]) for task in folder.glob("task/*/schedstat"))
        except OSError:
            continue  # the process has ended, or belongs to another user
        own, children = (sum(int(field) for field in fields[at : at + 2]) / ticks_per_s for at in (11, 13))
        cpu_s += max(own, threads_ns / 1e9) + children
        pss_kib += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return Footprint(cpu_s, pss_kib / 1024)
