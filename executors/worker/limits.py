"""What a supervisor does about a rank that makes no progress: names the reason, keeps its stacks, ends it.

Nothing is judged by what cannot be seen: where the kernel does not show a process, the page alone counts.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

from executors.attempt.outcome import describe_end
from executors.native import RunSpec
from executors.process import Activity, activity
from executors.replica.shared_page import ATOMIC_LIMIT_S, SharedPage
from executors.task.policy import HangLimits
from executors.worker.failure import is_users_file
from executors.worker.watched import HANG_SIGNAL, STACKS_NAME, STACKS_SIGNAL

LEAST_S, LONGEST_INTERVALS = 60.0, 5.0  # a learned limit: five times the longest interval, from the sixth on
N_TO_LEARN = 6
UNKNOWN_S = 1800.0  # while nothing is learned
FIRST_TIMES = 10.0  # a limit that was given, before the first mark: imports, compiling, the first step
MOST_CALL_S, LATE_TICK_S = 300.0, 15.0  # one call of a store, and a tick on a loaded machine
LOOK_S = 1.0
OLD_S = 2.5  # a rank beats and ticks once a second
READ_S, AGAIN_S = 0.2, 1.0  # a dump takes milliseconds; a second one tells stuck from slow
BUSY = 0.05  # of a core
LEAST_BUSY_S = 0.03  # of processor time, which is counted in hundredths: to dump its stacks takes one or two
MAX_STACKS, MAX_DUMPS = 1 << 20, 20
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class Finding:
    """What a look at a rank came to."""

    sentence: str
    """As in `Replica 3 of 8 made no progress for 61 s (limit 60 s) after step 812: …`; the error of a kill."""
    stacks: str | None = None
    """The stacks of its threads, below the sentence: to be kept by `Running.keep_stacks`, and shown in the log."""
    is_kill: bool = False
    """Its supervisor ends the rank now: SIGKILL to it and all below; outcome `failed`, `hang`."""


class Watchdog:
    """Looks at the page of one attempt's process, again and again, and climbs the ladder when it makes no progress.

    It asks for stacks, asks again after a second, and has the rank raise `HangError`: by signals, which it sends. What
    is left to its supervisor are the findings: to keep stacks, and to kill.

    Args:
        limits: of the run.
        ends: whether a learned limit ends the rank. A number that was given always does.
        term_grace_s: how long the rank has, once it raised `HangError`.
        spec, rank: for the sentences.
    """

    def __init__(
        self,
        page: SharedPage,
        pid: int,
        limits: HangLimits,
        *,
        ends: bool,
        term_grace_s: float,
        spec: RunSpec,
        rank: int,
    ) -> None:
        self._page, self._pid, self.limits, self.ends = page, pid, limits, ends
        self._grace_s, self._spec, self._rank = term_grace_s, spec, rank
        self._floor = 0.0
        """What was before this counts for nothing: the machine stood still, or a debugger was attached."""
        self._ladder: Iterator[tuple[float, Finding | None]] | None = None
        self._began = self._now = 0.0
        """Since when the rank that is on the ladder made no progress; the time of this look."""
        self._seen: tuple[float, float] | None = None
        """A time, and the CPU time that the rank had used by then."""
        self._frame = ""
        self.next_look_at = page.since + LOOK_S
        """When to look next, by `time.monotonic`."""

    def look(self, now: float) -> Finding | None:
        """Look at the rank; send it what signals are due. Early looks cost nothing.

        Returns: what its supervisor has to do about it, if anything.
        """
        page, late_s = self._page, now - self.next_look_at
        if late_s < 0:
            return None
        if late_s > LOOK_S and self._ladder is None:  # nobody ran on this machine, or the store held the supervisor up
            self._floor = max(page.since, self._floor) + late_s
        self._now, self.next_look_at = now, now + LOOK_S
        is_waiting = page.limit_s == math.inf  # for others: then a tick is enough
        since = max(page.since, self._floor, page.tick if is_waiting else 0.0)
        if self._ladder is not None and since != self._began and not page.diagnosis:
            self._ladder = None  # it goes on
        if self._ladder is None:
            if self.limits.is_off or page.unwatched:
                return None
            soft_s, hard_s, ends = self._current_limits()
            if is_waiting:
                least_s = MOST_CALL_S if self.limits.soft_s is None else LATE_TICK_S
                soft_s, hard_s = max(soft_s, least_s), max(hard_s, 1.5 * least_s)
            left_s = since + soft_s - now
            if left_s > 0:
                self.next_look_at = now + min(LOOK_S, left_s)
                if now - page.beat > OLD_S - LOOK_S:
                    self._measure(activity(self._pid))
                return None
            self._began = since
            self._ladder = self._climb(soft_s, hard_s, ends=ends)
        wait_s, finding = next(self._ladder)
        self.next_look_at = now + wait_s
        return finding

    def _current_limits(self) -> tuple[float, float, bool]:
        """Return the soft and the hard limit where the rank is now, and whether they end it."""
        page, limits = self._page, self.limits
        if page.limit_s is not None and page.limit_s < math.inf:
            return page.limit_s, 1.5 * page.limit_s, True
        if limits.soft_s is not None and limits.hard_s is not None:
            times = 1.0 if page.marks else FIRST_TIMES
            return times * limits.soft_s, times * limits.hard_s, True
        if not page.marks:  # perhaps it never says anything
            return UNKNOWN_S, 2 * UNKNOWN_S, False
        n_intervals, longest_s = page.intervals
        soft_s = max(LEAST_S, LONGEST_INTERVALS * longest_s) if n_intervals >= N_TO_LEARN else UNKNOWN_S
        return soft_s, 2 * soft_s, self.ends

    def _climb(self, soft_s: float, hard_s: float, *, ends: bool) -> Iterator[tuple[float, Finding | None]]:
        """Go up the ladder, a rung each time: yield what was found, and how long to wait until the next."""
        sentence = ""
        while (seen := activity(self._pid)) is not None and seen.is_traced:
            self._floor = self._began = self._now  # somebody debugs it
            yield soft_s, None
        for is_again in (False, True):
            asked = self._ask_for_stacks()
            yield READ_S, None
            stacks = "" if asked is None else _read(asked)
            self._frame = _frame_of(stacks, int(self._page.main_thread)) or self._frame
            sentence = self._sentence(self._diagnosis(), soft_s)
            finding = Finding(sentence, f"{sentence}\n{stacks}" if stacks else None)
            yield (0.0 if is_again else AGAIN_S - READ_S), finding
        if ends:  # once the stacks are kept: the outcome that this brings about names them
            self._page.accuse(sentence)
            self._signal(HANG_SIGNAL)
            yield LOOK_S, None
        while (wait_s := self._kill_at(hard_s) - self._now) > 0 or not ends:
            yield (min(wait_s, LOOK_S) if ends else LOOK_S), None
        sentence = self._sentence(self._diagnosis(), soft_s)
        self._page.accuse(sentence)
        while True:
            yield LOOK_S, Finding(sentence, is_kill=True)

    def _kill_at(self, hard_s: float) -> float:
        """Return when the rank is killed: at the hard limit, or when it has raised and had its grace."""
        page = self._page
        at = page.hang_raised_at + self._grace_s if page.hang_raised_at else self._began + hard_s
        return min(at, page.atomic_since) + ATOMIC_LIMIT_S if page.atomic_since else at

    def _ask_for_stacks(self) -> int | None:
        """Have the rank dump its stacks; return the file that they come to. None: it cannot."""
        seen = activity(self._pid)
        is_able = self._page.ready and self._page.stacks_file >= 0 and self._page.n_stacks < MAX_DUMPS
        if not is_able or (seen is not None and seen.is_stopped):
            return None
        try:
            path = f"/proc/{self._pid}/fd/{int(self._page.stacks_file)}"
            if STACKS_NAME not in os.readlink(path):
                return None  # the user's code closed it, and has another one of that number
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            os.ftruncate(file, 0)
        except OSError:
            return None
        self._signal(STACKS_SIGNAL)
        return file

    def _signal(self, number: int) -> None:
        if self._page.ready:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)

    # -- what it looks like ------------------------------------------------------------------------------------------

    def _diagnosis(self) -> str:
        """Say what the rank does instead of making progress."""
        seen, page = activity(self._pid), self._page
        if seen is not None and seen.is_stopped:
            return "stopped by SIGSTOP"
        if self._now - page.beat > OLD_S:
            is_busy = self._measure(seen)
            return "the GIL is held by a call" + {True: " that computes", False: " that waits", None: ""}[is_busy]
        frame = f": {self._frame}" if self._frame else ""
        if self._now - page.tick > OLD_S:
            return f"the main thread waits in a call{frame}"
        return f"running, without progress{frame}"

    def _measure(self, seen: Activity | None) -> bool | None:
        """Return whether the rank computes, by what it used since the look before; None: nobody knows."""
        before, self._seen = self._seen, None if seen is None else (self._now, seen.cpu_s)
        if seen is None or before is None or self._now <= before[0]:
            return None
        return seen.cpu_s - before[1] > max(LEAST_BUSY_S, BUSY * (self._now - before[0]))

    def _sentence(self, diagnosis: str, limit_s: float) -> str:
        reached, n = self._page.reached or {}, int(self._page.n_stacks)
        where = [f" after {name} {reached[name]:.0f}" for name in ("step", "round") if name in reached]
        stacks = f" All stacks: replicas logs {self._spec.run_id} -r {self._rank} --stacks." if n else ""
        values = {"for_s": self._now - self._began, "limit_s": limit_s, "diagnosis": diagnosis, "stacks": stacks}
        return describe_end("hang", self._rank, self._spec.world_size, where="".join(where[:1]), **values)


def _read(file: int) -> str:
    try:
        return os.pread(file, MAX_STACKS, 0).decode(errors="replace")
    finally:
        os.close(file)


def _frame_of(stacks: str, main_thread: int) -> str | None:
    """Return the user's innermost frame in the main thread, as `train.py:12 in main`; else the innermost of all."""
    found, is_main = [], False
    for line in stacks.splitlines():
        if thread := _THREAD.match(line):
            is_main = int(thread[1], 16) == main_thread
        elif is_main and (frame := _FRAME.match(line)):
            found.append(frame)
    users = [frame for frame in found if is_users_file(frame[1])]
    for frame in (*users, *found):
        return f"{os.path.basename(frame[1])}:{frame[2]} in {frame[3]}"
    return None
