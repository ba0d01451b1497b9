"""Groups equal failures of replicas for the page: the error, its ranks, the place in the code, and the last output."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from executors.protocol import Outcome, ReplicaStatus
from executors.status import name_ranks
from executors.view.report.root_cause import headline, last_frames
from executors.view.report.text import last_lines, one_line

# Removed from a headline, because the sentence begins with the ranks.
SUBJECT = re.compile(r"^Replica \d+( of \d+)?( \(attempt \d+\))? ")
# The same of a process of a replica that has several. Its number stays.
SUBJECT_OF_MEMBER = re.compile(r"^(Member \d+ of \d+): Replica \d+( of \d+)?( \(attempt \d+\))? ")
MAX_GROUPS = 12
MAX_WORDS = 500
MAX_OUTPUT_LINES, MAX_STACK_LINES = 60, 80


def failure_text(outcome: Outcome) -> str:
    """Return the error of an outcome in one line, without its rank, so that equal failures have equal texts."""
    return one_line(SUBJECT_OF_MEMBER.sub(r"\1 ", SUBJECT.sub("", headline(outcome, [], 0))))


def group_failures(outcomes: Iterable[Outcome]) -> list[list[Outcome]]:
    """Return the failed outcomes in groups of the same failure, ordered by time.

    Attempts that ended because a newer attempt replaced them are left out.
    """
    groups: dict[tuple[str | None, str], list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.finished_at):
        if outcome.status is ReplicaStatus.FAILED and outcome.reason != "fenced":
            groups.setdefault((outcome.reason, failure_text(outcome)), []).append(outcome)
    return list(groups.values())


def failures_document(outcomes: Iterable[Outcome], newest: Mapping[int, int], n: int) -> list[dict[str, Any]]:
    """Return the failures as JSON. The earliest failure comes first, because it usually caused the others. Failures
    that a restart has repaired come last.

    Args:
        newest: the number of each rank's newest attempt. A failure of an earlier attempt is marked as resumed.
        n: the number of replicas of the run.
    """
    found, resumed = list[Outcome](), list[Outcome]()
    for outcome in outcomes:
        is_resumed = outcome.attempt < newest.get(outcome.rank, 0)
        (resumed if is_resumed else found).append(outcome)
    groups = [
        *((group, False) for group in group_failures(found)),
        *((group, True) for group in group_failures(resumed)),
    ]
    return [
        {
            "words": _sentence(group, n),
            "reason": group[0].reason,
            "replicas": [{"rank": each.rank, "attempt": each.attempt} for each in group],
            "resumed": is_resumed,
            "exit_code": group[0].exit_code,
            "finished_at": group[0].finished_at,
            "frames": last_lines("\n".join(last_frames(group[0])), 20),
            "stack": last_lines(group[0].error or "", MAX_STACK_LINES) if group[0].error_line is not None else "",
            "output": last_lines(group[0].output_tail, MAX_OUTPUT_LINES),
            "members": [one_line(line, MAX_WORDS) for line in group[0].describe_members()],
        }
        for group, is_resumed in groups[:MAX_GROUPS]
    ]


def _sentence(group: Sequence[Outcome], world_size: int) -> str:
    ranks, first = sorted({outcome.rank for outcome in group}), group[0]
    if first.error_line is not None:
        return one_line(headline(first, ranks, world_size), MAX_WORDS)
    names = name_ranks(ranks).capitalize()
    return f"{names}{'' if SUBJECT.match(first.headline) and len(ranks) == 1 else ':'} {failure_text(first)}"
