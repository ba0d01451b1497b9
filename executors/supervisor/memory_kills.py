"""Whether the kernel killed a process because memory ran out, as far as this process may know."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from executors.process import killed_for_memory, oom_kills, oom_kills_in_group, oom_kills_in_own_group

CLOCKS_S, CLOCKS_DRIFT = 5.0, 0.001  # how far the kernel's clock may be apart, and a share of the time since the boot
LOGGED_S = 0.02  # the kernel kills first, and then says so
RECENT_S = 10.0  # a victim with a lot of memory takes seconds to end


class MemoryKills:
    """Counts what the kernel killed because memory ran out, and says whether a process of ours was among it.

    The kernel's log names the processes, and only root may read it. A count of this process's own control group tells
    enough: nobody else's processes are in there. The count of the whole machine, which is all that is left elsewhere,
    rises with the kills of strangers as well, and proves nothing.

    Args:
        count_own: counts the kills in the own control group. None: it is not reported here.
        count_all: counts the kills on this machine.
        clock: seconds, as `time.monotonic`.
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
        """The counts between `RECENT_S` and twice that ago, and at the last look. A kill before is no recent one."""
        self._looked_at = clock()

    def look(self) -> None:
        """Note the count from time to time, so that a later end is not explained by a kill long before it."""
        now = self._clock()
        if now >= self._looked_at + RECENT_S:
            self._before, self._newest, self._looked_at = self._newest, self._count(), now

    def include(self, pid: int, began: float) -> bool | None:
        """Return whether a process that ended by SIGKILL was killed for memory; None: perhaps.

        Args:
            pid: the process.
            began: when it was started, by `time.monotonic`: its pid may have been another's before.
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
        self._before += 1  # one at a time: two ranks may have ended at once
        self._newest = max(self._newest, self._before)
        return True

    def _count(self) -> int:
        return (self._count_own() or 0) if self._is_own else self._count_all()


def of_this_machine() -> MemoryKills:
    """Return the kills as a supervisor on a machine of several users counts them."""
    # Root alone can move a replica into any control group, as `--chaos oom` does. And it mostly reads the kernel's log,
    # which names the processes.
    return MemoryKills(oom_kills if os.geteuid() == 0 else oom_kills_in_own_group)


def of_this_container() -> MemoryKills:
    """Return the kills as a container's supervisor counts them: every control group that it sees is its own."""
    return MemoryKills(oom_kills_in_group)
