"""Decides whether a rank hangs: which limit applies, when it is reached, and the steps that then end the rank.

ADR 0043 has the table of states and limits, and the reasons. In short: each mark of progress shows that the rank works.
Without marks, an idle rank counts as hanging after a minute. An active rank counts as hanging after half an hour,
because it may be evaluating. A beat or a tick only shows that some code runs, and does not count as progress.
ADR 0089 adds the limit of a few seconds on a rank that is stuck: all its threads wait for its own locks, and no other
process can end that.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from executors.attempt.outcome import describe_end
from executors.patience import ROUND
from executors.process import HANG_SIGNAL, STACKS_SIGNAL, Activity, activity, start_time
from executors.replica.shared_page import ATOMIC_LIMIT_S, STEPS, SharedPage
from executors.settings.policy import DEFAULT_START_S, HangLimits
from executors.settings.run_spec import RunSpec
from executors.supervisor.activity import ActivityMeter
from executors.supervisor.stacks_request import StacksRequest, open_stacks_file
from executors.worker.failure import is_users_file

N_TO_LEARN = 6  # intervals of a section that are needed before its idle limit is learned from them
N_FOR_STUCK = 20  # intervals of a section that are needed before the limit on a stuck rank applies
LEARNED_FROM_STUCK_S = 12.0  # a rank that was ended as stuck learns at most this, so its limit grows up to the idle one
STUCK_AGAIN_S = 1.0  # after a sample that shows that the rank is not stuck, the next one is this much later
LONGEST_TIMES = 5.0  # a learned limit is this many times the longest interval so far
LATE_TICK_S = 15.0  # on a loaded machine a tick may be this late
LOOK_S = 1.0
OLD_S = 2.5  # a rank ticks once a second
# A dump takes milliseconds, and a second dump shows whether a call is stuck or slow.
READ_S, AGAIN_S = 0.1, 1.0
BUSY = 0.05  # the share of a core from which a rank counts as active
# the seconds of processor time from which a rank counts as active; they are counted in hundredths, and a dump of stacks
# takes one or two
LEAST_BUSY_S = 0.03
MAX_DUMPS = 20
_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


@dataclass(frozen=True)
class Defaults:
    """The limits, in seconds, if the user gave none. Tests inject shorter ones.

    Args:
        idle_s: the shortest idle limit between two marks.
        stuck_s: the shortest limit on a rank all of whose threads wait for its own locks, between two marks. It is also
            the time from that limit to SIGKILL.
        unknown_idle_s: the idle limit before any limit is learned: at the start, in a new section, and at the end.
        active_s: the shortest limit on an active rank between two marks, and from the opening of a DiLoCo to the first
            mark.
        call_s: the limit on one call in a rank that waits for others. A directory that does not answer is an outage, so
            it has no such limit.
        kill_after_s: seconds from one of these limits to SIGKILL.
    """

    idle_s: float = 60.0
    stuck_s: float = 4.0
    unknown_idle_s: float = DEFAULT_START_S
    active_s: float = 1800.0
    call_s: float = ROUND.seconds
    kill_after_s: float = 60.0

    def window_s(self, idle_limit_s: float) -> float:
        """Return the seconds of a window of activity: a sixth of the limit, so that six windows in a row must agree.

        A window is at most a minute, which is enough for every limit.

        Args:
            idle_limit_s: the idle limit in seconds.
        """
        return min(idle_limit_s / 6, 60.0)


@dataclass(frozen=True)
class Limit:
    """A limit that applies now.

    Args:
        kind: a key of `SEEN`.
        since: the time, by `time.monotonic`, from which it counts.
        soft_s: seconds until stacks are kept and `HangError` is raised.
        hard_s: seconds until SIGKILL.
        ends: True if the rank is ended at the limit. False if it is only reported.
        source: the option or state from which the limit comes, for the message.
    """

    kind: str
    since: float
    soft_s: float
    hard_s: float
    ends: bool
    source: str = ""


SEEN = {
    "idle": "was idle",
    "stuck": "waited for its own locks alone",
    "active": "worked without progress",
    "given": "made no progress",
    "section": "made no progress",
    "start": "made no first progress",
    "call": "waited in one call",
}
"""The observation that the sentence about a limit begins with, by the kind of the limit."""
REMEDIES = {
    "stuck": 'replica.section("evaluate", limit_s=…), replica.progress() or --hang-timeout allow more time.',
    "idle": 'replica.section("evaluate", limit_s=…), replica.progress() or --hang-timeout allow more time.',
    "active": 'replica.section("evaluate", limit_s=…), replica.progress() or --hang-timeout allow more time.',
    "given": 'A longer --hang-timeout, replica.section("evaluate", limit_s=…) or replica.progress() allow more time.',
    "section": "A larger limit_s allows more time.",
    "start": "--start-timeout allows more time.",
    "call": "",
}
"""The advice on how to allow more time, by the kind of the limit."""


@dataclass(frozen=True)
class WatchdogReport:
    """A state of a rank on which its supervisor must act."""

    sentence: str
    """The sentence about the hang, as in `Replica 3 of 8 was idle for 61 s after step 812 (limit 60 s, …): …`. It is
    also the error of an outcome.
    """
    stacks: str | None = None
    """The text for `keep_stacks` and the log: the sentence, followed by the stacks of the rank's threads."""
    is_kill: bool = False
    """True if the supervisor must end the rank and its descendants now by SIGKILL, with the outcome `failed`,
    `hang`."""


# More than 20 methods: the limits of a start, a section, an idle, a stuck and an active rank act on one progress, and
# each has its own sentence and its own end.
class Watchdog:
    """Checks the progress of one attempt's process, and acts when a limit is reached.

    It asks for stacks, asks again after a second, and then makes the rank raise `HangError`, each by a signal. Its
    supervisor acts on the reports: it records the stacks, and kills the rank.

    Args:
        page: the memory that the rank shares with its supervisor.
        pid: the rank's process.
        limits: the run's limits, as the user asked for them.
        ends: True if default limits also end the rank. A limit that the user gave always ends it.
        term_grace_s: the seconds that the rank has after it has raised `HangError`.
        spec: the run, for the sentences.
        rank: the rank, for the sentences.
        defaults: the limits that are used if `limits` has no number.

    Example:
        watchdog = Watchdog(page, pid, HangLimits(), ends=True, term_grace_s=5.0, spec=spec, rank=3)
        report = watchdog.look(monotonic())
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
        defaults: Defaults = Defaults(),
    ) -> None:
        self._page, self._pid, self.limits, self.ends, self._defaults = page, pid, limits, ends, defaults
        self._grace_s, self._spec, self._rank = term_grace_s, spec, rank
        self._floor = 0.0
        """Time before this moment does not count, because the machine slept or a debugger was attached."""
        self._started_at = page.since
        """The time of the attempt's start, moved by the time that does not count for its start."""
        self._mark = self._since = self._idle_since = page.since
        """The times of the rank's newest mark, of that mark moved by time that does not count, and of its last
        activity."""
        self._row = page.current_row
        self._meter = ActivityMeter(pid)
        self._stuck_meter = ActivityMeter(pid)
        """A second meter, whose short window fits the short limit on a stuck rank."""
        self._stuck_since: float | None = None
        """The time since which the rank only waits for its own locks. None: it does not, or that is not known."""
        self._was_idle = False
        """True if the rank was measured to be idle since `_idle_since`."""
        self._steps: Iterator[tuple[float, WatchdogReport | None]] | None = None
        self._limit: Limit | None = None
        """The limit that the rank has reached."""
        self._is_reported = False
        """True if the rank was reported to hang, and was not yet reported to work again."""
        self._now = page.since
        self._seen: tuple[float, float] | None = None
        """A time by `time.monotonic`, and the CPU time that the rank had used by then."""
        self._frame = ""
        self.others: list[Watchdog] = []
        """The watchdogs of the other processes of a replica that has several."""
        self.number = 0
        """The number of the process in its replica."""
        self.next_look_at = page.since + LOOK_S
        """The time of the next look, by `time.monotonic`."""

    def look(self, now: float) -> WatchdogReport | None:
        """Check the rank, and send it the signals that are due. The call is cheap if nothing is due.

        Args:
            now: the time by `time.monotonic`.

        Returns:
            The state on which the supervisor must act. None if it need not act.
        """
        page, late_s, passed_s = self._page, now - self.next_look_at, now - self._now
        if late_s < 0:
            return None
        if late_s > LOOK_S and self._steps is None:  # this machine was asleep, or a store delayed the supervisor
            self._floor = min(now, max(page.since, self._floor) + late_s)
            self._idle_since = min(now, self._idle_since + late_s)
            self._forget_stuck()
            self._started_at = min(now, self._started_at + late_s)
        # the time of waits, and of sections with a limit, is not part of the start
        elif page.unwatched or page.limit_s is not None:
            self._started_at = min(now, self._started_at + passed_s)
        self._now, self.next_look_at = now, now + LOOK_S
        self._note_mark()
        limit = self._next_limit()
        if self._steps is not None and not page.diagnosis and not self._is_same(limit):
            # The rank made a mark or became active, so no further steps are taken.
            self._steps = None
            if self._is_reported:
                return self._alive_again()
        if self._steps is None:
            if limit is None:
                return None
            if (left_s := limit.since + limit.soft_s - now) > 0:
                self.next_look_at = now + min(LOOK_S, left_s, self._meter.every_s)
                if self._now - self._since >= self._stuck_meter.window_s / 2 and self._may_be_stuck:
                    self.next_look_at = min(self.next_look_at, now + self._stuck_meter.every_s)
                if now - page.beat > OLD_S - LOOK_S:
                    self._measure(activity(self._judged_pid))
                return None
            if (seen := activity(self._judged_pid)) is not None and seen.is_traced:  # a user debugs the process
                self._floor = self._idle_since = now
                self._forget_stuck()
                self.next_look_at = now + min(LOOK_S, limit.soft_s)
                return None
            self._limit = limit
            self._steps = self._take_steps(limit)
        wait_s, report = next(self._steps)
        self.next_look_at = self._now + wait_s
        self._is_reported |= report is not None
        return report

    # -- which limit counts ------------------------------------------------------------------------------------------

    def _note_mark(self) -> None:
        """Begin a new interval after a mark of progress or a change of section. Leave out time that does not count."""
        mark = self._page.since
        self._since = max(mark, self._floor)
        if mark == self._mark:
            return
        if self._was_idle:  # it was idle for this long, and continued
            self._page.note_idle(self._row, max(0.0, mark - self._idle_since))
        self._mark, self._idle_since = mark, self._since
        self._row, self._was_idle = self._page.current_row, False
        self._meter.reset()
        self._forget_stuck()

    def _next_limit(self) -> Limit | None:
        """Return the limit that is reached first if nothing changes. None: no limit is in force."""
        if self._may_be_stuck:
            self._look_if_stuck()
        found = list(self._limits())
        for limit in found:
            if limit.kind == "idle" and self._is_active(limit):
                if self._was_idle:
                    self._page.note_idle(self._row, self._now - self._idle_since)
                self._idle_since, self._was_idle = self._now, False
                return self._next_limit_of(list(self._limits()))
        return self._next_limit_of(found)

    @staticmethod
    def _next_limit_of(limits: list[Limit]) -> Limit | None:
        return min(limits, key=lambda limit: limit.since + limit.soft_s, default=None)

    def _limits(self) -> Iterator[Limit]:
        """Yield the limits that apply now, in the order of the table of ADR 0043: limits of special states first."""
        page, limits, least = self._page, self.limits, self._defaults
        if not page.progress_marks and any(dog.number == 0 and dog._page.progress_marks for dog in self.others):
            return  # a member that never marks progress is not judged if member 0 marks it
        ends = self.ends or limits.are_explicit
        if page.unwatched or (limits.is_off and (limits.start_s is None or page.progress_marks)):
            return
        # the rank waits for other replicas, whose own limits apply; a tick shows that the rank lives
        if page.limit_s == math.inf:
            if not limits.is_off:
                call_s = least.call_s if limits.soft_s is None else max(limits.soft_s, LATE_TICK_S)
                hard_s = max(limits.hard_s or 0.0, 1.5 * call_s)
                yield Limit("call", max(self._since, page.tick), call_s, hard_s, ends)
        elif page.limit_s is not None:
            if not limits.is_off:
                source = f"limit_s of section {page.section!r}"
                yield Limit("section", self._since, page.limit_s, 1.5 * page.limit_s, True, source)
        elif (
            page.is_finished
            # This comes before the limits of the start, because a rank that restarts after its last step never makes a
            # mark.
        ):
            yield self._idle_limit(least.unknown_idle_s, "after the last round", ends=ends)
        elif not page.progress_marks:
            yield from self._limits_of_start(ends=ends)
        elif limits.soft_s is not None and limits.hard_s is not None:
            yield Limit("given", self._since, limits.soft_s, limits.hard_s, True, "--hang-timeout")
        else:
            n_intervals, longest_s = page.intervals
            idle_s, active_s = least.unknown_idle_s, max(least.active_s, LONGEST_TIMES * longest_s)
            if n_intervals >= N_TO_LEARN:
                idle_s = max(least.idle_s, LONGEST_TIMES * page.longest_idle_s)
            yield self._idle_limit(idle_s, ends=ends)
            yield from self._stuck_limit(ends=ends)
            yield Limit("active", self._since, active_s, active_s + least.kill_after_s, ends)

    @property
    def _stuck_s(self) -> float:
        """The limit on a stuck rank, in seconds.

        It is short between two marks of a loop that has made marks for a while. Then it grows with the longest idle
        time after which the rank continued.
        """
        least, page = self._defaults, self._page
        if not page.progress_marks or page.intervals[0] < N_FOR_STUCK:
            return least.idle_s
        return min(max(least.stuck_s, LONGEST_TIMES * page.longest_idle_s), max(least.idle_s, least.stuck_s))

    @property
    def _may_be_stuck(self) -> bool:
        """True if the limit on a stuck rank applies now. It never replaces a number that the user gave.

        A replica of several processes is left out, because a process may wait for a lock of another one.
        """
        page, limits = self._page, self.limits
        if self.others or page.unwatched or page.is_finished or page.limit_s is not None:
            return False
        return limits.soft_s is None and (page.progress_marks > 0 or limits.start_s is None) and not limits.is_off

    def _stuck_limit(self, *, ends: bool) -> Iterator[Limit]:
        if self._may_be_stuck and self._stuck_since is not None:
            hard_s = self._stuck_s + self._defaults.stuck_s
            yield Limit("stuck", self._stuck_since, self._stuck_s, hard_s, ends)

    def _look_if_stuck(self) -> None:
        """Take a sample if one is due, and note since when the rank only waits for its own locks."""
        meter = self._stuck_meter
        meter.window_s = self._defaults.window_s(self._stuck_s)
        if self._now - self._since < meter.window_s / 2:
            return
        is_active = meter.look(self._now, self._own_threads)
        if is_active is None:
            return
        if is_active or not meter.waits_inside:
            self._stuck_since = None
            meter.reset(self._now + STUCK_AGAIN_S)
        elif self._stuck_since is None:
            self._stuck_since = max(self._since, self._now - meter.window_s)

    def _forget_stuck(self) -> None:
        self._stuck_since = None
        self._stuck_meter.reset()

    @property
    def _own_threads(self) -> set[int]:
        """The native ids of the rank's threads that belong to this project, and beat also in a hung process."""
        return {int(self._page.beat_thread), int(self._page.heartbeat_thread)}

    def _limits_of_start(self, *, ends: bool) -> Iterator[Limit]:
        """Yield the limits before the first mark."""
        limits, least = self.limits, self._defaults
        if (start_s := limits.start_limit_s) is not None:
            source = "--start-timeout" if limits.start_s is not None else "implied by --hang-timeout"
            yield Limit("start", max(self._started_at, self._floor), start_s, 1.5 * start_s, True, source)
            return
        # A script that never reports is idle at times, and may compute for days.
        yield self._idle_limit(least.unknown_idle_s, "at the start", ends=ends)
        yield from self._stuck_limit(ends=ends)
        if self._page.opened_at:
            since = max(self._since, self._page.opened_at)
            yield Limit("start", since, least.active_s, least.active_s + least.kill_after_s, ends, "from DiLoCo(…) on")

    def _idle_limit(self, limit_s: float, source: str = "", *, ends: bool) -> Limit:
        return Limit("idle", self._idle_since, limit_s, limit_s + self._defaults.kill_after_s, ends, source)

    def _is_active(self, limit: Limit) -> bool:
        """Return True if the rank is measured to be active now. Soon after a mark it is not measured."""
        window_s = self._defaults.window_s(limit.soft_s)
        if self._now - self._since < window_s / 2:
            return False
        self._meter.window_s = window_s
        is_active = self._meter.look(self._now, self._own_threads)
        self._was_idle |= is_active is False
        return is_active is True

    def _is_same(self, limit: Limit | None) -> bool:
        """Return True if a limit is the limit that was reached before, and counts from the same time."""
        reached = self._limit
        return reached is not None and limit is not None and (reached.kind, reached.since) == (limit.kind, limit.since)

    # -- the steps against a rank that has reached its limit
    # -------------------------------------------------------------

    def _take_steps(self, limit: Limit) -> Iterator[tuple[float, WatchdogReport | None]]:
        """Yield the seconds until the next step, and a report or None, after each step."""
        for is_again in (False, True):
            dogs = (self, *self.others)
            asked = [(dog, request) for dog in dogs if (request := dog._ask_for_stacks()) is not None]
            dumps: dict[Watchdog, str] = {}
            try:
                while [request for _, request in asked if not request.is_complete(self._now)]:
                    yield READ_S, None
                dumps = {dog: request.read() for dog, request in asked}
            finally:
                for _, request in asked:
                    request.close()
            for dog in dumps:
                if dog is not self:
                    dog._meter.reset()
                dog._frame = _frame_of(dumps[dog], int(dog._page.main_thread)) or dog._frame
            stacks = self._joined(dumps)
            self._meter.reset()  # the dump itself must not count as activity of the rank
            self._stuck_meter.reset()
            sentence = self._sentence(limit)
            report = WatchdogReport(sentence, f"{sentence}\n{stacks}" if stacks else None)
            yield (0.0 if is_again else AGAIN_S), report
        if limit.ends:  # yielded after the stacks were kept, because the outcome that follows names them
            if limit.kind == "stuck":  # perhaps the wait would have ended, so the next attempt waits longer
                self._page.note_idle(self._row, min(limit.soft_s, LEARNED_FROM_STUCK_S))
            self._page.note_hang(sentence)
            self._signal(HANG_SIGNAL)
            yield LOOK_S, None
        while (wait_s := self._kill_at(limit) - self._now) > 0 or not limit.ends:
            yield (min(wait_s, LOOK_S) if limit.ends else LOOK_S), None
        sentence = self._sentence(limit)
        self._page.note_hang(sentence)
        while True:
            yield LOOK_S, WatchdogReport(sentence, is_kill=True)

    def _joined(self, dumps: Mapping[Watchdog, str]) -> str:
        """Return the dumps of all members as one text. The member that was reported usually waits for another
        member.
        """
        if not self.others:
            return dumps.get(self, "")
        n = len(self.others) + 1
        members = sorted(dumps, key=lambda dog: dog.number)
        return "\n".join(f"Member {dog.number} of {n}:\n{dumps[dog]}" for dog in members)

    def _kill_at(self, limit: Limit) -> float:
        """Return the time of the kill: the hard limit, or the end of the grace after the rank raised `HangError`."""
        page = self._page
        at = page.hang_raised_at + self._grace_s if page.hang_raised_at else limit.since + limit.hard_s
        return min(at, page.atomic_since) + ATOMIC_LIMIT_S if page.atomic_since else at

    def _alive_again(self) -> WatchdogReport:
        """Withdraw the report of a hang, so that a reader of the newest dump does not believe that the rank still
        hangs.
        """
        self._is_reported = False
        sentence = describe_end("alive", self._rank, self._spec.world_size)
        return WatchdogReport(sentence, sentence if self._page.n_stacks else None)

    def _ask_for_stacks(self) -> StacksRequest | None:
        """Ask the rank to dump its stacks. None: the rank cannot dump them."""
        pid = self._judged_pid
        seen = activity(pid)
        is_able = self._page.ready and self._page.stacks_file >= 0 and self._page.n_stacks < MAX_DUMPS
        if not is_able or (seen is not None and seen.is_stopped):
            return None
        try:
            file = open_stacks_file(self._page, pid, is_rank=pid == self._pid)
            if file is None:
                return None
            os.ftruncate(file, 0)
        except OSError:
            return None
        return StacksRequest(self._page, file, self._now, lambda: self._signal(STACKS_SIGNAL))

    @property
    def _judged_pid(self) -> int:
        """The process that beats and handles the signals: the rank's, or one of its command that reports for it."""
        pid = int(self._page.watched)
        return pid if pid > 0 and start_time(pid) is not None else self._pid

    def _signal(self, number: int) -> None:
        if not self._page.ready:
            return
        pid = self._judged_pid
        with contextlib.suppress(ProcessLookupError, OSError):
            if pid != self._pid:
                # It may have ended, and its pid may be another process's by now, which the signal would end.
                file = open_stacks_file(self._page, pid, is_rank=False)
                if file is None:
                    return
                os.close(file)
            os.kill(pid, number)

    # -- the description of a rank without progress
    # ----------------------------------------------------------------------

    def _diagnosis(self) -> str:
        """Describe the activity of the rank instead of progress, as in "the main thread waits in a call"."""
        seen, page = activity(self._judged_pid), self._page
        if seen is not None and seen.is_stopped:
            return "stopped by SIGSTOP"
        if self._now - page.beat > OLD_S:
            is_busy = self._measure(seen)
            return "the GIL is held by a call" + {True: " that computes", False: " that waits", None: ""}[is_busy]
        frame = f": {self._frame}" if self._frame else ""
        if self._now - page.tick > OLD_S:
            return f"the main thread waits in a call{frame}"
        return f"the main thread runs Python code{frame}"

    def _measure(self, seen: Activity | None) -> bool | None:
        """Return True if the rank has computed since the last look. None: unknown."""
        before, self._seen = self._seen, None if seen is None else (self._now, seen.cpu_s)
        if seen is None or before is None or self._now <= before[0]:
            return None
        if seen.is_runnable:  # on a loaded machine, its share of a core may be too small to be counted
            return True
        return seen.cpu_s - before[1] > max(LEAST_BUSY_S, BUSY * (self._now - before[0]))

    def _sentence(self, limit: Limit) -> str:
        # this member's page counts the dumps of all members
        leader = min((self, *self.others), key=lambda dog: dog.number)
        reached, n = self._page.reached or {}, int(leader._page.n_stacks)
        where = [f" after {name} {reached[name]:.0f}" for name in ("step", "round") if name in reached]
        stacks = f" All stacks: replicas logs {self._spec.run_id} -r {self._rank} --stacks." if n else ""
        if self._page.section != STEPS and limit.kind in ("idle", "active", "stuck"):
            where = [*where[:1], f" in section {self._page.section!r}"]
        sentence = describe_end(
            "hang",
            self._rank,
            self._spec.world_size,
            seen=SEEN[limit.kind],
            for_s=self._now - limit.since,
            where="".join(where[:2] if limit.kind in ("idle", "active", "stuck") else where[:1]),
            limit=f"{round(limit.soft_s, 1):g} s" + (limit.source and f", {limit.source}"),
            diagnosis=self._diagnosis(),
            remedy=REMEDIES[limit.kind] and f" {REMEDIES[limit.kind]}",
            stacks=stacks,
        )
        if not self.others:
            return sentence
        # The reported member usually waits for another member, so the sentence also describes the activity of the
        # others.
        others = [f" Member {dog.number}: {dog._diagnosis()}." for dog in self.others]
        return f"Member {self.number} of {len(self.others) + 1}: {sentence}{''.join(others)}"


def introduce(dogs: Sequence[Watchdog]) -> None:
    """Make the watchdogs of one replica's processes known to each other, in the order of the members.

    Args:
        dogs: the watchdogs.
    """
    for number, dog in enumerate(dogs):
        dog.number, dog.others = number, [each for each in dogs if each is not dog]


def _frame_of(stacks: str, main_thread: int) -> str | None:
    """Return the user's innermost frame in the main thread, as in `train.py:12 in main`, or else the innermost one."""
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
