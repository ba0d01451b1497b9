"""Parses the lines of a segment, `<run>/metrics/<rank>/<attempt>/<number>.jsonl`, into typed rows.

A line with a `verdict` describes a round. A line with `rss` has the resources of the process. A line with `left_with`
has the work that was in no round at the end. A line with `left_out` has the number of lines that were dropped because
no segment could be written. Most other lines hold the values of `report()`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from executors.store.records import (
    Fields,
    Record,
    checked,
    integer,
    list_of,
    nullable,
    number,
    one_of,
    text,
)

Verdict = Literal["counted", "carried", "dropped"]
MAX_SECONDS = 1e10
MAX_NAME = 200  # characters of a reported number's name
MAX_ENTRY = 2**53
LARGEST = 1e300  # the largest value of a number, so that a sum of several numbers is finite
KEY = re.compile(r"([0-9]{4}|[1-9][0-9]{4,6})/(0|[1-9][0-9]{0,3})/([0-9]{6,9})\.jsonl")
"""Matches the rank, the attempt and the number of a segment in the part of its key after `<run>/metrics/`."""
RESERVED = ("t", "verdict", "rss", "left_with", "left_out", "kind", "rank", "attempt", "s")
"""The names that have another meaning in a line or in a table. A reported number with such a name, as `t`, is kept as
`t_`.
"""
SECONDS = number(0.0, MAX_SECONDS)
RANK = integer(0, 10**7)
ATTEMPT = integer(0, 10**4)
AMOUNT = number(0.0, LARGEST)
NORM = nullable(AMOUNT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """The numbers of one `report()` call, as one line of a segment."""

    rank: int
    attempt: int
    t: float
    """Seconds since the attempt's claim, by the clock of the replica."""
    values: Mapping[str, float]
    """The reported numbers by name, without numbers that are not finite or above `LARGEST`."""
    not_finite: tuple[str, ...] = ()
    """The names of the numbers that are not finite or too large."""

    @classmethod
    def of(cls, line: Mapping[str, Any], rank: int, attempt: int, where: str, strange: Counter[str]) -> Numbers:
        """Parse a line. Numbers that are not finite or too large are left out, and counted in `strange`.

        Raises:
            CorruptObjectError: a value is not a number.
        """
        values, refused, refusal = {}, list[str](), Fields(dict(line), where)
        for name, value in line.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                refusal.take(name, number())
            shown = name.encode(errors="replace").decode()
            if abs(value) < LARGEST:
                values[shown] = value
            else:
                refused.append(shown[:MAX_NAME])
        strange.update(refused)
        values.pop("t", None)
        t = refusal.take("t", SECONDS)
        return cls(rank=rank, attempt=attempt, t=t, values=values, not_finite=tuple(refused))


@dataclass(frozen=True, kw_only=True, slots=True)
class Round(Record):
    """One round, as one replica measured it.

    The measured seconds cover the time from the replica's last round to `t`, except for pauses in between.
    """

    rank: int = checked(RANK)
    attempt: int = checked(ATTEMPT)
    t: float = checked(SECONDS, unit="s")
    """The time of the outer step, in seconds since the attempt's claim."""
    entry: int = checked(integer(0, MAX_ENTRY))
    """The number of the round in the log, from 0."""
    fragment: int = checked(integer(0, 10**6))
    """The number of the fragment that the round averaged, from 0."""
    ranks: tuple[int, ...] = checked(list_of(RANK))
    """The ranks whose work is in the mean."""
    verdict: Verdict = checked(one_of("counted", "carried", "dropped"))
    """The fate of this replica's work: `counted`, `carried` to the next round, or `dropped`."""
    weight: float = checked(AMOUNT, unit="inner steps, or the unit of `weight`")
    """The amount of this replica's work."""
    up: int = checked(integer(0, MAX_ENTRY), unit="bytes")
    """The bytes that the replica wrote to the store."""
    down: int = checked(integer(0, MAX_ENTRY), unit="bytes")
    """The bytes that the replica read from the store."""
    train_s: float = checked(SECONDS, unit="s")
    """How long the replica trained since its previous round."""
    wait_s: float = checked(SECONDS, unit="s")
    """How long the round waited for other replicas."""
    move_s: float = checked(SECONDS, unit="s")
    """How long packing, sending and reading took."""
    reduce_s: float = checked(SECONDS, unit="s")
    """How long the replica computed its shard of the mean."""
    step_s: float = checked(SECONDS, unit="s")
    """How long the outer step took."""
    name: str = checked(text(MAX_NAME), "main")
    """The name of the DiLoCo."""
    norm: float | None = checked(NORM, None)
    """The norm of this replica's pseudo-gradient. None if it sent none."""
    mean_norm: float | None = checked(NORM, None)
    """The norm of the mean. None if there was no mean."""
    late_s: float | None = checked(nullable(SECONDS), None, unit="s")
    """How long training waited. None if it is not recorded: then training waited for the whole round."""
    busy_s: float | None = checked(nullable(SECONDS), None, unit="s")
    """How long the round took, including the parts that ran while training continued."""
    elements: int | None = checked(nullable(integer(0, MAX_ENTRY)), None)
    """The number of values in the fragment. None if it is not recorded."""
    wire: str | None = checked(nullable(text(MAX_NAME)), None)
    """The encoding of contributions. None if it is not recorded."""
    mean_wire: str | None = checked(nullable(text(MAX_NAME)), None)
    """The encoding of the mean. None if it is not recorded."""
    stale_steps: int = checked(integer(0, MAX_ENTRY), 0, unit="inner steps")
    """The inner steps between sending the work and applying the mean."""
    wire_error: float | None = checked(NORM, None, unit="share")
    """The part of the contribution that is rounding error of the wire. None if it was not measured."""
    same: tuple[int, ...] = checked(list_of(RANK), ())
    """The ranks that sent the same work as this replica, with its own rank. They train on the same data."""
    clipped: tuple[int, ...] = checked(list_of(RANK), ())
    """The ranks whose work was scaled down in the mean, because it was much larger than the others' work."""

    @property
    def round_s(self) -> float:
        """The seconds in which the replica did not train."""
        return self._parts_s if self.late_s is None else self.late_s

    @property
    def hidden_s(self) -> float:
        """The seconds of the round during which training continued."""
        return 0.0 if self.late_s is None or self.busy_s is None else max(0.0, self.busy_s - self.late_s)

    @property
    def late_share(self) -> float:
        """The share of `wait_s`, `move_s`, `reduce_s` and `step_s` in which training waited."""
        return min(1.0, self.round_s / self._parts_s) if self._parts_s else 0.0

    @property
    def _parts_s(self) -> float:
        return self.wait_s + self.move_s + self.reduce_s + self.step_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage(Record):
    """The resources that the process used."""

    rank: int = checked(RANK)
    attempt: int = checked(ATTEMPT)
    t: float = checked(SECONDS, unit="s")
    """The time of the measurement, in seconds since the attempt's claim."""
    cpu: float = checked(number(0.0, 1e6), unit="cores")
    """The average number of busy processor cores since the previous row."""
    rss: int = checked(integer(0, MAX_ENTRY), unit="bytes")
    """The memory that the process used."""
    gpu_mem: int | None = checked(nullable(integer(0, MAX_ENTRY)), None, unit="bytes")
    """The memory of the GPUs that torch has taken. None without a GPU."""
    gpu_use: float | None = checked(nullable(number(0.0, 1.0)), None, unit="share")
    """The part of the time in which the GPU was busy. None if it is not known."""


Row: TypeAlias = Numbers | Round | Usage


@dataclass(frozen=True, kw_only=True, slots=True)
class Left(Record):
    """The work that was in no round when a DiLoCo was closed."""

    rank: int = checked(RANK)
    attempt: int = checked(ATTEMPT)
    name: str = checked(text(MAX_NAME))
    left_with: float = checked(AMOUNT)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut(Record):
    """The number of lines that are missing, because no segment could be written."""

    rank: int = checked(RANK)
    attempt: int = checked(ATTEMPT)
    left_out: int = checked(integer(1, MAX_ENTRY))


KINDS: Mapping[str, type[Round | Usage | Left | LeftOut]] = {
    "verdict": Round,
    "rss": Usage,
    "left_with": Left,
    "left_out": LeftOut,
}


def parse_line(line: Any, rank: int, attempt: int, where: str, strange: Counter[str]) -> Row | Left | LeftOut:
    """Return the row of a decoded line. Numbers that are not finite are counted in `strange`.

    Raises:
        CorruptObjectError: the line is not a valid row. The message names the field.
    """
    if not isinstance(line, dict):
        raise Fields({}, where).refusal("it is not a JSON object")
    for name, kind in KINDS.items():
        if name in line:
            return kind.parse({**line, "rank": rank, "attempt": attempt}, where)
    return Numbers.of(line, rank, attempt, where, strange)
