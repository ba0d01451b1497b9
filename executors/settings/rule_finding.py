"""The records `rules/<number>.json` of an attempt: a rule of the run that was broken, with its evidence.

`rules/<number>.unjudged.json` says that a rule cannot be judged, or was not judged for a while. The supervisor of the
rank creates each record once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TypedDict

from executors.settings.procs import MAX_PROCS
from executors.settings.watch_rules import ACTIONS, MAX_COUNT, MAX_RULE, NOTIFY
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    Record,
    checked,
    integer,
    nullable,
    number,
    one_of,
    text,
    to_bytes,
)

BROKEN, UNJUDGED = VERDICTS = ("broken", "unjudged")
MAX_EVIDENCE = 600


class RuleDocument(TypedDict):
    """A rule of the run that was broken or not judged, as plain JSON."""

    rule: str
    """The rule as the user gave it."""
    verdict: str
    """`broken` or `unjudged`."""
    evidence: str
    """The value, the line or the time that broke the rule, or the reason why it was not judged."""
    action: str
    """The action of the rule: `notify`, `stop` or `restart`."""
    rank: int
    """The rank."""
    attempt: int
    """The number of the attempt, from 0."""
    member: int | None
    """The process of a replica that has several. Null: the rule is about the whole replica."""
    at: float
    """The Unix time at which the rank's supervisor saw it."""


@dataclass(frozen=True, kw_only=True)
class RuleFinding(Record):
    """A rule that an attempt broke, or that could not be judged."""

    rank: int = checked(integer(0, 10**7))
    attempt: int = checked(integer(0, 10_000))
    index: int = checked(integer(0, MAX_COUNT))
    """The number of the rule among the rules of the run, from 0."""
    rule: str = checked(text(MAX_RULE))
    """The rule as the user gave it."""
    verdict: str = checked(one_of(*VERDICTS))
    """`broken` or `unjudged`."""
    evidence: str = checked(text(MAX_EVIDENCE))
    """The value, the line or the time that broke the rule, or the reason why it was not judged. It may contain foreign
    text.
    """
    action: str = checked(one_of(*ACTIONS), NOTIFY)
    member: int | None = checked(nullable(integer(0, MAX_PROCS - 1)), None)
    """The process of a replica that has several. None: the rule is about the whole replica."""
    at: float = checked(number(LONG_AGO, FAR_AHEAD))
    """The Unix time at which the supervisor saw it, by its clock."""

    @property
    def is_broken(self) -> bool:
        """True if the rule was broken. False: it was not judged."""
        return self.verdict == BROKEN

    @property
    def name(self) -> str:
        """The name of the record."""
        return rule_record_name(self.index, self.verdict)

    @property
    def sentence(self) -> str:
        """The finding as a sentence: `The rule 'loss > 8' is broken: loss is 9.3 in report 812.`"""
        if self.is_broken:
            return f"The rule {self.rule!r} is broken: {self._place}{self.evidence}."
        return f"The rule {self.rule!r} cannot be judged: {self._place}{self.evidence}."

    @property
    def _place(self) -> str:
        return "" if self.member is None else f"in member {self.member}, "

    def to_json(self) -> RuleDocument:
        """Return the finding for other programs, as plain JSON."""
        return {
            "rule": self.rule,
            "verdict": self.verdict,
            "evidence": self.evidence,
            "action": self.action,
            "rank": self.rank,
            "attempt": self.attempt,
            "member": self.member,
            "at": self.at,
        }

    def to_bytes(self) -> bytes:
        """Return the record as it is stored: one line of JSON."""
        return to_bytes(asdict(self))


def rule_record_name(index: int | str, verdict: str) -> str:
    """Return the name of a record within its attempt.

    Args:
        index: the number of the rule.
        verdict: `broken` or `unjudged`.

    Example:
        rule_record_name(0, BROKEN)  # "rules/0.json"
    """
    return f"rules/{index}.json" if verdict == BROKEN else f"rules/{index}.unjudged.json"
