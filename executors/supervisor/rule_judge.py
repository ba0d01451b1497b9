"""Judges the rules of a run for all attempts of a supervisor, records those that are broken, and acts on them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

from executors.attempt import Attempt
from executors.attempt.outcome import describe_end
from executors.replica.shared_page import SharedPage
from executors.restarts.session import RestartSession
from executors.settings.rule_finding import BROKEN, MAX_EVIDENCE, UNJUDGED, RuleFinding
from executors.settings.run_spec import RunSpec
from executors.settings.watch_rules import RESTART, STOP, WatchRule, parse_rules, watched_numbers
from executors.supervisor.output_lines import OutputLines
from executors.supervisor.processes import NEVER, ProcessStarter, RunningAttempt
from executors.supervisor.rule_records import RuleRecords
from executors.supervisor.rule_watch import RuleVerdict, RuleWatch


class RuleJudge:
    """The rules of a run, at the supervisor of some of its ranks.

    Args:
        spec: the run.
        starter: has the logs of the attempts.
        session: has the rules that are in force, and takes the order to stop the run.
        term_grace_s: seconds between SIGTERM and SIGKILL for an attempt that a rule restarts.
        on_record: called after records of broken rules were written.

    Example:
        judge = RuleJudge(spec, starter, session, 30.0, on_record=notifier.look)
        watched = judge.begin(attempt.rank)
        running.rules = judge.watch(attempt, pages)
        look_at = judge.look(running, time.monotonic())
    """

    def __init__(
        self,
        spec: RunSpec,
        starter: ProcessStarter,
        session: RestartSession,
        term_grace_s: float,
        on_record: Callable[[], object],
    ) -> None:
        self._rules: dict[int, tuple[WatchRule, ...]] = {}
        """The rules of the process of each rank. Attempts in the same process share a page, so they share its rules."""
        self._world_size = spec.world_size
        self._starter = starter
        self._session = session
        self._term_grace_s = term_grace_s
        self._on_record = on_record
        self._records = RuleRecords()

    @property
    def next_at(self) -> float:
        """The time of the next try to write records, by `time.monotonic`."""
        return self._records.next_at

    def begin(self, rank: int) -> tuple[str, ...] | None:
        """Note the rules of a new process of a rank, and return the names of the numbers that they are about.

        Args:
            rank: the rank.

        Returns: the names. None: the process has no rules.
        """
        self._rules[rank] = parse_rules(self._session.rules)
        return watched_numbers(self._rules[rank]) if self._rules[rank] else None

    def watch(self, attempt: Attempt, pages: Sequence[SharedPage]) -> RuleWatch | None:
        """Return the object that judges the rules for one attempt. None: its process has no rules.

        Args:
            attempt: the attempt.
            pages: the pages of the processes of the attempt.
        """
        if not (rules := self._rules.get(attempt.rank, ())):
            return None
        return RuleWatch(rules, pages, OutputLines(pages, self._starter.output_file(attempt)), time.monotonic())

    def look(self, running: RunningAttempt, now: float, *, is_last: bool = False) -> float:
        """Judge the rules for an attempt, and act on those that are broken. Return the time of the next look.

        Args:
            running: the attempt.
            now: the time by `time.monotonic`.
            is_last: True if the attempt has ended, so that this is the last look. Default False.
        """
        watch = running.rules
        if watch is None:
            return NEVER
        if running.ending is None or is_last:  # a rank that was asked to end reports nothing that matters
            for verdict in watch.look(now, is_last=is_last):
                self._act_on(running, verdict, is_last=is_last)
            self.write()
        return watch.next_look_at if running.ending is None else NEVER

    def write(self) -> None:
        """Write the records that wait, if a try is due."""
        if self._records.write():
            self._on_record()

    def is_pending(self, *, is_busy: bool) -> bool:
        """Return True if records wait, and the longest wait for the store has not passed.

        Args:
            is_busy: True if the supervisor has other work. Time with other work does not count as waiting.
        """
        return self._records.is_pending(is_busy=is_busy)

    def _act_on(self, running: RunningAttempt, verdict: RuleVerdict, *, is_last: bool) -> None:
        """Record a broken rule, print it, and end the attempt or the run if that is its action."""
        rank = running.asked.rank
        finding = RuleFinding(
            rank=rank,
            attempt=running.attempt.number,
            index=verdict.number,
            rule=str(verdict.rule),
            verdict=BROKEN if verdict.is_broken else UNJUDGED,
            evidence=verdict.evidence[:MAX_EVIDENCE],
            action=verdict.rule.action,
            member=verdict.member,
            at=time.time(),
        )
        self._records.add(running.attempt, finding)
        with contextlib.suppress(OSError):  # the disk of the log may be full
            self._starter.write_log(running.asked, f"replicas: {finding.sentence}")
        if not verdict.is_broken:
            return
        if verdict.rule.action == STOP:
            self._session.order_stop(f"rank {rank} broke the rule {finding.rule!r}: {finding.evidence}")
        elif verdict.rule.action == RESTART and not is_last and running.terminate("rule", self._term_grace_s):
            running.error = describe_end("rule", rank, self._world_size, sentence=finding.sentence)
            running.error_line = finding.sentence
