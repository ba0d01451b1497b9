"""Finds out whether the kernel killed a process because memory ran out (the OOM killer)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from executors.process import killed_for_memory, oom_kills, oom_kills_in_group, oom_kills_in_own_group

# the kernel's clock may differ by this number of seconds, and by this share of the time since the boot
CLOCKS_S, CLOCKS_DRIFT = 5.0, 0.001
LOGGED_S = 0.02  # the kernel kills first, and logs the kill a moment later
RECENT_S = 10.0  # a victim with a lot of memory takes seconds to end


class MemoryKills:
    """Counts the kernel's kills for memory, and reports whether one of our processes was among them.

    Three sources exist. The kernel's log names each process, and only root may read it. The count of this process's own
    control group is proof enough, because it holds no processes of other users. The count of the whole machine rises
    with the kills of other users, too, so it proves nothing.

    Args:
        count_own: returns the number of kills in the own control group, or None if the kernel does not report it.
        count_all: returns the number of kills on this machine.
        clock: returns the seconds of a monotonic clock. Default: the system's clock.
    """

    def __init__(
        self,
        count_own: Callable[[], int | None],
        count_all: Callable[[], int] = oom_kills,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count_own = count_own
        self._count_all = count_all
        self._clock = clock
        self._is_own = count_own() is not None
        self._before = self._newest = self._count()
        """The count at a time between `RECENT_S` and twice `RECENT_S` ago, and the count at the last look."""
        self._looked_at = clock()

    def look(self) -> None:
        """Note the count every `RECENT_S` seconds, so that an old kill does not explain a later end."""
        now = self._clock()
        if now >= self._looked_at + RECENT_S:
            self._before, self._newest, self._looked_at = self._newest, self._count(), now

    def include(self, pid: int, began: float) -> bool | None:
        """Return True if the kernel killed a process, which ended by SIGKILL, because memory ran out. None: this is
        possible, but not known.

        Args:
            pid: the process.
            began: the time of the process's start, by `time.monotonic`. Its pid may have belonged to another process
                before.
        """
        if self._count() <= self._before:
            return False
        since = began - CLOCKS_S - time.monotonic() * CLOCKS_DRIFT
        is_named = killed_for_memory(pid, since)
        if is_named is False:
            time.sleep(LOGGED_S)
            is_named = killed_for_memory(pid, since)
        if is_named is False or (is_named is None and not self._is_own):
            return is_named
        self._before += 1  # each kill explains one end, because several ranks may have ended together
        self._newest = max(self._newest, self._before)
        return True

    def _count(self) -> int:
        return (self._count_own() or 0) if self._is_own else self._count_all()


def machine_memory_kills() -> MemoryKills:
    """Return the kills as a supervisor on a machine with several users counts them."""
    # Only root can move a replica into another control group, as `--chaos oom` does. So for root, the own group is not
    # enough, and root can usually read the kernel's log, which names the processes.
    return MemoryKills(oom_kills if os.geteuid() == 0 else oom_kills_in_own_group)


def container_memory_kills() -> MemoryKills:
    """Return the kills as a container's supervisor counts them. All control groups that it sees are its own."""
    return MemoryKills(oom_kills_in_group)
