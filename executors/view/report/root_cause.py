"""Finds the root cause of several failures, and gives its headline and the user's part of its traceback."""

from __future__ import annotations

import re
from collections.abc import Sequence

from executors.errors import (
    ReplicaCancelledError,
    ReplicaError,
    ReplicaFailedError,
    ReplicaLostError,
    ReplicaTimeoutError,
)
from executors.protocol import Outcome, ReplicaStatus
from executors.settings.policy import NEVER_RESTARTED
from executors.status import name_ranks

MAX_CHARACTERS = 300  # the longest headline, in characters
MAX_FRAME_LINES = 12
FRAME = re.compile(r'^((?: +\| )?)  File "([^"\n]+)", line \d+.*\n(?:\1    .*\n?)*', re.MULTILINE)
OTHERS_OF_GROUP = re.compile(r"^ +\+-+ 2 -+$.*?^ +\+-+$", re.MULTILINE | re.DOTALL)
INSTALLED = re.compile(r"/(site|dist)-packages/|/lib/python3[^/]*/|^<frozen ")
_ERRORS: dict[str | None, type[ReplicaError]] = {
    **dict.fromkeys(("signal", "oom", "lost", "preempted"), ReplicaLostError),
    "timeout": ReplicaTimeoutError,
    **dict.fromkeys(("cancelled", "stopped"), ReplicaCancelledError),
}


def headline(outcome: Outcome, ranks: Sequence[int], world_size: int) -> str:
    """Return the error of an outcome with its ranks and its place: `ValueError: boom (rank 0 of 2, train.py:12)`.

    The text of a failure without an exception is returned unchanged, as in `Replica 3 of 8 ran into its time limit of
    60 s.`
    """
    if outcome.error_line is None:
        return outcome.headline
    line = outcome.error_line
    line = line if len(line) <= MAX_CHARACTERS else f"{line[: MAX_CHARACTERS - 1]}…"
    place = outcome.error_place
    return f"{line} ({name_ranks(ranks)} of {world_size}{f', {place}' if place else ''})"


def last_frames(outcome: Outcome) -> list[str]:
    """Return the traceback lines of the innermost frame in the user's code. If no frame is the user's, return all
    frames.

    A group of exceptions is represented by its first exception, which the headline also names.
    """
    text = OTHERS_OF_GROUP.sub("", outcome.error or "") if outcome.error_line is not None else ""
    frames = list(FRAME.finditer(text))
    theirs = [frame for frame in frames if not INSTALLED.search(frame[2])]
    lines: list[str] = []
    for frame in reversed(theirs or frames):
        of_frame = [line.removeprefix(frame[1]) for line in frame[0].splitlines()]
        if lines and len(lines) + len(of_frame) > MAX_FRAME_LINES:
            break
        lines = [*of_frame, *lines]
    return lines[:MAX_FRAME_LINES]


def raise_root_cause(outcomes: Sequence[Outcome]) -> None:
    """Raise the error of the earliest failure. Do nothing if every replica succeeded.

    A cancelled or fenced replica counts as the cause only if no other replica failed, because another process ended it.

    Raises:
        ReplicaError: the subclass for the reason of the failure. The message is the headline with the remote traceback.
            Other failures are added as notes.
    """
    bad = [outcome for outcome in outcomes if outcome.status is not ReplicaStatus.SUCCEEDED]
    if not bad:
        return
    cause, *others = sorted(bad, key=lambda outcome: (outcome.reason in NEVER_RESTARTED, outcome.finished_at))
    text = cause.error or f"Replica {cause.rank} is {cause.status}."
    if cause.error_line is not None:
        text = f"{headline(cause, [cause.rank], len(outcomes))}\n\n{text}"
    kind = _ERRORS.get(cause.reason, ReplicaFailedError)
    error = kind(text, rank=cause.rank, attempt=cause.attempt, outcome=cause)
    error.add_note(f"This is rank {cause.rank} of {len(outcomes)} (attempt {cause.attempt}), reason: {cause.reason}.")
    alike = [other.rank for other in others if (other.reason, other.error) == (cause.reason, cause.error)]
    if alike:
        error.add_note(f"The same happened to {name_ranks(alike)}.")
    for other in others:
        if other.rank not in alike:
            text = f"Rank {other.rank} (attempt {other.attempt}) {other.status}, {other.reason}: {other.headline}"
            error.add_note(text)
    raise error
