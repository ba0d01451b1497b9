"""Judges the rules of a run for one attempt of a rank, from the things that its supervisor has anyway.

The numbers, the rounds and the progress come from the pages of the rank's processes, and the lines from its log. A rule
is broken at most once in an attempt. ADR 0086 has the meaning of each rule.
"""

from __future__ import annotations

import contextlib
import math
import re
import signal
import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from executors.replica.report_ring import CAPACITY
from executors.replica.shared_page import SharedPage
from executors.settings.durations import name_duration
from executors.settings.watch_rules import GPU, LOG, NUMBER, SILENCE, WatchRule, watched_numbers
from executors.supervisor.output_lines import OutputLines

LOOK_S = 1.0
SOON_S = 0.1  # the next look if not all lines are judged, or if a ring may overflow
N_MEDIAN, LEAST_MEDIAN = 100, 10
"""The reports of which a median is taken, and the least number of them for which it is known."""
ENOUGH_REPORTS = 100
"""The reports after which a number that was in none of them is probably mistyped."""
GPU_KNOWN_S = 180.0
"""The time by which the utilization of a GPU must have been measured, which happens every 30 s."""
GPU_STALE_S = 120.0
"""The age from which the last measurement of a GPU does not count."""
MATCH_CPU_S = 0.1
"""The longest processor time that a regular expression may take for one line."""
LINES_CPU_S = 0.1
"""The processor time for lines in one look. The supervisor has other ranks, and signals, to look after."""
LAST_CPU_S = 2.0
"""The processor time for the last lines of an attempt."""
MAX_SHOWN = 300


@dataclass(frozen=True)
class RuleVerdict:
    """The finding of a look about one rule."""

    number: int
    """The number of the rule, from 0."""
    rule: WatchRule
    evidence: str
    """The value, the line or the time. Or the reason why the rule is not judged."""
    member: int | None = None
    """The process of a replica that has several. None: the rule is about the whole replica."""
    is_broken: bool = True
    """False: the rule cannot be judged, or some reports or lines were not judged."""


class RollingMedian:
    """The median of the last 100 finite reports of a number.

    Example:
        median = RollingMedian()
        median.add(2.5)
    """

    def __init__(self) -> None:
        self._recent = deque[float]()
        self._sorted = list[float]()

    def add(self, value: float) -> None:
        """Add a report. A value that is not finite is left out.

        Args:
            value: the reported number.
        """
        if not math.isfinite(value):
            return
        if len(self._recent) == N_MEDIAN:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
        self._recent.append(value)
        insort(self._sorted, value)

    @property
    def value(self) -> float:
        """The median. nan before the tenth report."""
        known, n = self._sorted, len(self._sorted)
        if n < LEAST_MEDIAN:
            return math.nan
        return known[n // 2] if n % 2 else (known[n // 2 - 1] + known[n // 2]) / 2


@dataclass
class _Numbers:
    """The reports of one number by one process."""

    name: str
    n_values: int = 0
    """The number of reports of the number that were judged."""
    median: RollingMedian = field(default_factory=RollingMedian)
    in_a_row: dict[int, int] = field(default_factory=dict)
    """The number of consecutive reports that fit, by the number of the rule."""


class TooSlowError(Exception):
    """A regular expression took too much processor time for a line."""


class RuleWatch:
    """Judges the rules for one attempt.

    Args:
        rules: the rules of the run.
        pages: the pages of the processes of the attempt.
        output: the lines of the attempt's output.
        now: the time of the start, by `time.monotonic`.

    Example:
        watch = RuleWatch(rules, [page], OutputLines([page], None), time.monotonic())
        broken = [each for each in watch.look(time.monotonic()) if each.is_broken]
    """

    def __init__(
        self, rules: Sequence[WatchRule], pages: Sequence[SharedPage], output: OutputLines, now: float
    ) -> None:
        self._rules = list(enumerate(rules))
        self._pages = pages
        self._output = output
        self._began = now
        self._reports = [[_Numbers(name) for name in watched_numbers(rules)] for _ in pages]
        self._n_reports = [0] * len(pages)
        """The number of reports of each process that were read."""
        self._has_lost = False
        self._is_settled = set[int]()
        """The rules that are not judged any more in this attempt: they were broken, or cannot be judged."""
        self._was_told = set[int]()
        """The rules about which a reader knows already that they were not judged completely."""
        self._patterns = {number: re.compile(rule.pattern) for number, rule in self._rules if rule.kind == LOG}
        self._n_lines = dict.fromkeys(self._patterns, 0)
        self._round, self._round_at = -math.inf, now
        self._n_output, self._output_at = 0, now
        self._progress_at = now
        self._low_since: dict[int, float] = {}
        """For each rule about the GPU, the time of the first measurement in a row that fits."""
        self._gpu_at = 0.0
        self.next_look_at = now
        """The time of the next look, by `time.monotonic`."""

    def look(self, now: float, *, is_last: bool = False) -> list[RuleVerdict]:
        """Judge everything that is new since the last look. The call is cheap if nothing is new.

        Args:
            now: the time by `time.monotonic`.
            is_last: True if the attempt has ended, so that its reports and its output are complete. Default False.
        """
        if now < self.next_look_at and not is_last:
            return []
        self.next_look_at = now + LOOK_S
        found = [*self._judge_numbers(now, is_last=is_last), *self._judge_lines(now, is_last=is_last)]
        if not is_last:  # without the process nothing new can come, and another record has its end
            found += [*self._judge_silence(now), *self._judge_gpu(now)]
        return found

    def _open(self, kind: str) -> Iterator[tuple[int, WatchRule]]:
        """Yield the rules of a kind that are still judged."""
        return ((number, rule) for number, rule in self._rules if rule.kind == kind and number not in self._is_settled)

    def _break(self, number: int, rule: WatchRule, evidence: str, member: int | None = None) -> RuleVerdict:
        self._is_settled.add(number)
        return RuleVerdict(number, rule, evidence, member if len(self._pages) > 1 else None)

    def _tell(self, number: int, rule: WatchRule, reason: str) -> Iterator[RuleVerdict]:
        """Yield a verdict on a rule that is not judged completely, once."""
        if number not in self._was_told:
            self._was_told.add(number)
            yield RuleVerdict(number, rule, reason, is_broken=False)

    # Reported numbers

    def _judge_numbers(self, now: float, *, is_last: bool) -> Iterator[RuleVerdict]:
        for member, page in enumerate(self._pages):
            if page.reports is None:
                continue
            values, n, n_lost = page.reports.read(self._n_reports[member])
            if n - self._n_reports[member] > CAPACITY // 8:  # at this rate the ring would be full within seconds
                self.next_look_at = now + SOON_S
            self._n_reports[member] = n
            if n_lost:
                yield from self._note_lost(member, n_lost)
            for each in self._reports[member]:
                for value in values.get(each.name, ()):
                    each.n_values += 1
                    yield from self._judge_report(each, value, member)
        yield from self._note_unreported(is_last=is_last)

    def _judge_report(self, numbers: _Numbers, value: float, member: int) -> Iterator[RuleVerdict]:
        median = numbers.median.value
        for number, rule in self._rules:
            if rule.kind != NUMBER or rule.name != numbers.name or number in self._is_settled:
                continue
            row = numbers.in_a_row[number] = numbers.in_a_row.get(number, 0) + 1 if rule.fits(value, median) else 0
            if row >= rule.count:
                words = f"{rule.name} is {value:.6g} in report {numbers.n_values}"
                words += f", the median is {median:.6g}" if rule.of_median else ""
                words += f", after {row} such reports in a row" if row > 1 else ""
                yield self._break(number, rule, words, member)
        numbers.median.add(value)

    def _note_lost(self, member: int, n_lost: int) -> Iterator[RuleVerdict]:
        # An unseen report may not have fitted, so the count begins again: a rule is never broken by reports that no
        # process has seen.
        for each in self._reports[member]:
            each.in_a_row.clear()
        self._has_lost = True
        for number, rule in self._open(NUMBER):
            yield from self._tell(number, rule, f"{n_lost} reports came faster than the supervisor could read them")

    def _note_unreported(self, *, is_last: bool) -> Iterator[RuleVerdict]:
        n_reports = max(self._n_reports, default=0)
        if self._has_lost or (n_reports < ENOUGH_REPORTS and not is_last):
            return
        known = {each.name for numbers in self._reports for each in numbers if each.n_values}
        for number, rule in self._open(NUMBER):
            if rule.name not in known:
                some = f"in any of the {n_reports} reports" if n_reports else "because nothing was reported"
                yield from self._tell(number, rule, f"{rule.name!r} was not reported {some}")

    # Silence

    def _judge_silence(self, now: float) -> Iterator[RuleVerdict]:
        rounds = [page.round for page in self._pages if not math.isnan(page.round)]
        if max(rounds, default=-math.inf) > self._round:
            self._round, self._round_at = max(rounds), now
        if any(page.unwatched for page in self._pages):  # also after the entrypoint has ended
            self._progress_at = self._round_at = now
        if any(page.is_finished and page.progress_marks for page in self._pages):
            self._round_at = now  # the run has no further round
        self._progress_at = max(self._progress_at, *(page.mark for page in self._pages))
        if (n_output := self._output.n_bytes()) != self._n_output:
            self._n_output, self._output_at = n_output, now
        since = {"round": self._round_at, "output": self._output_at, "progress": self._progress_at}
        for number, rule in self._open(SILENCE):
            silent_s = now - since[rule.name]
            if silent_s >= rule.for_s:
                last = f" since round {self._round:.0f}" if rule.name == "round" and self._round > -math.inf else ""
                yield self._break(number, rule, f"no {rule.name} for {name_duration(silent_s)}{last}")
            else:
                self.next_look_at = min(self.next_look_at, now + max(SOON_S, rule.for_s - silent_s))

    # The GPU

    def _judge_gpu(self, now: float) -> Iterator[RuleVerdict]:
        rules = list(self._open(GPU))
        if not rules:
            return
        use, at = max(
            ((page.reports.gpu for page in self._pages if page.reports)), key=lambda each: each[1], default=(0, 0)
        )
        if not at and now - self._began > GPU_KNOWN_S:
            for number, rule in rules:
                reason = "no utilization is measured here: torch uses no GPU, or the package nvidia-ml-py is missing"
                yield from self._tell(number, rule, reason)
        if now - at > GPU_STALE_S:
            self._low_since.clear()
        elif at != self._gpu_at:
            self._gpu_at = at
            for number, rule in rules:
                if not rule.fits(use, math.nan):
                    self._low_since.pop(number, None)
                    continue
                since = self._low_since.setdefault(number, at)
                if at - since >= rule.for_s:
                    evidence = (
                        f"the utilization has fitted for {name_duration(at - since)}, the last is {100 * use:.0f}%"
                    )
                    yield self._break(number, rule, evidence)

    # Lines of output

    def _judge_lines(self, now: float, *, is_last: bool) -> Iterator[RuleVerdict]:
        if not any(True for _ in self._open(LOG)):
            return
        began = time.thread_time()
        with _interrupts_slow_matches():
            for line in self._output.lines(is_last=is_last):
                for number, rule in list(self._open(LOG)):
                    try:
                        fits = _fits(self._patterns[number], line)
                    except TooSlowError:
                        self._is_settled.add(number)
                        reason = f"the expression took more than {MATCH_CPU_S:g} s for the line {_shown(line)!r}"
                        yield from self._tell(number, rule, f"{reason}, so it is no longer used")
                        continue
                    self._n_lines[number] += fits
                    if fits and self._n_lines[number] >= rule.count:
                        count = f", after {rule.count} such lines" if rule.count > 1 else ""
                        yield self._break(number, rule, f"the line {_shown(line)!r}{count}")
                if time.thread_time() - began > (LAST_CPU_S if is_last else LINES_CPU_S):
                    break
        if self._output.has_more:
            self.next_look_at = now + SOON_S
        n_lost = self._output.take_lost()
        for number, rule in self._open(LOG) if n_lost or (is_last and self._output.has_more) else ():
            some = f"{n_lost} bytes of output" if n_lost else "the last lines"
            yield from self._tell(number, rule, f"{some} came faster than they could be judged")


def _fits(pattern: re.Pattern[str], line: str) -> bool:
    """Return True if an expression fits a line.

    Raises:
        TooSlowError: the expression took too much processor time. Python's matcher handles signals while it searches,
            so the timer interrupts it.
    """
    signal.setitimer(signal.ITIMER_VIRTUAL, MATCH_CPU_S)
    try:
        return pattern.search(line) is not None
    except RecursionError:
        raise TooSlowError from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)


def _raise_too_slow(signum: int, frame: FrameType | None) -> None:
    raise TooSlowError


@contextlib.contextmanager
def _interrupts_slow_matches() -> Iterator[None]:
    """Handle the signal of the timer within the block. Processes that are forked later do not get this handler."""
    before = signal.signal(signal.SIGVTALRM, _raise_too_slow)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _shown(line: str) -> str:
    """Return a line for a record: without characters that cannot be printed, and not too long."""
    shown = "".join(char if char.isprintable() else " " for char in line).strip()
    return shown if len(shown) <= MAX_SHOWN else f"{shown[: MAX_SHOWN - 1]}…"
