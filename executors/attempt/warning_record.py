"""The record `warnings.json`: the different warnings of one attempt, with the number of times that each came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from executors.attempt.outcome import MAX_WARNINGS
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    Record,
    checked,
    integer,
    list_of,
    nested,
    number,
    text,
    to_bytes,
)

NAME = "warnings.json"
MAX_CHARACTERS = 1000
"""The most characters of a text. 64 texts of 1000 characters, each escaped, are below the 1 MiB that a record may
have."""
MAX_COUNT = 2**53
MOMENT = number(LONG_AGO, FAR_AHEAD)


@dataclass(frozen=True, kw_only=True)
class RecordedWarning(Record):
    """One warning of an attempt, with the number of times that it came."""

    text: str = checked(text(MAX_CHARACTERS))
    at: float = checked(MOMENT)
    """The Unix time at which the warning first came, by the clock of the replica's host."""
    last_at: float = checked(MOMENT)
    """The Unix time at which the warning last came."""
    count: int = checked(integer(1, MAX_COUNT))
    """How often the warning came."""


def _some(value: Any) -> Sequence[RecordedWarning]:
    """Parse a list of at most `MAX_WARNINGS` warnings."""
    found = list_of(nested(RecordedWarning))(value)
    if len(found) > MAX_WARNINGS:
        raise ValueError(f"a list of at most {MAX_WARNINGS}")
    return found


@dataclass(frozen=True, kw_only=True)
class RecordedWarnings(Record):
    """The warnings of one attempt so far."""

    warnings: Sequence[RecordedWarning] = checked(_some)
    """The warnings, in the order in which their texts first appeared."""
    left_out: int = checked(integer(0, MAX_COUNT), 0)
    """The number of further warnings, whose texts are only in the log."""

    def to_bytes(self) -> bytes:
        """Return the record as it is stored: one line of JSON."""
        return to_bytes({"warnings": [asdict(each) for each in self.warnings], "left_out": self.left_out})
