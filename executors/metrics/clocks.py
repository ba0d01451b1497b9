"""When the attempts of a run lived, by clocks that differ, and how these are put on one time line.

Every replica sees the same seals. So by how much one clock is ahead of another shows in the moments at which both saw a
seal. Hosts' clocks are mostly right: the smallest difference has the least of what either of two was late. Where even
that is more than clocks differ that are kept right, the median of the differences is taken: either may have been late
now and then. Where no seal tells, a host's clock is believed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from executors.attempt import Attempt, Claim
from executors.errors import StoreError
from executors.metrics.rows import Round, Row
from executors.metrics.segments import AttemptKey
from executors.protocol import Outcome
from executors.store.record_names import CLAIM

WRONG_S = 2.0  # a clock that is kept right by NTP differs less
Seal = tuple[str, int]
"""The name of a DiLoCo, and an entry of its log."""


@dataclass
class Lived:
    """The times in the life of an attempt, as far as they are known."""

    claimed_at: float | None = None
    """By its host's clock. None if it is not known."""
    host: str = ""
    last_t: float = 0.0
    """Its end, or the last sign of life: seconds since the claim."""
    outcome: Outcome | None = None
    problem: str | None = None


def read_life(attempt: Attempt, records: Collection[str], rows: Sequence[Row]) -> Lived:
    """Read when an attempt began and ended.

    Args:
        records: the names of those that it has left, as `outcome`.
    """
    lived = Lived(last_t=rows[-1].t if rows else 0.0)
    try:
        if "started" in records and (claim := attempt.find(CLAIM, Claim.parse)):
            lived.claimed_at, lived.host = claim.at, claim.host
        if "outcome" in records:
            lived.outcome = attempt.outcome()
        if lived.claimed_at is None:
            return lived
        if lived.outcome is not None and lived.outcome.host == lived.host:
            lived.last_t = max(lived.last_t, lived.outcome.finished_at - lived.claimed_at)
        elif "heartbeat" in records and (beat := attempt.beat()):  # another process may have found its end much later
            lived.last_t = max(lived.last_t, beat.at - lived.claimed_at)
    except StoreError as error:
        lived.problem = str(error)
    return lived


def sightings(rows: Sequence[Row], claimed_at: float) -> dict[Seal, float]:
    """Return when an attempt saw seals, by its host's clock. If no seal counts the attempt, all its seals are used."""
    rounds = [row for row in rows if isinstance(row, Round)]
    counted = [row for row in rounds if row.verdict == "counted"]
    return {(row.name, row.entry): claimed_at + row.t - row.step_s - row.reduce_s for row in counted or rounds}


def clocks_ahead(
    seen: Mapping[AttemptKey, Mapping[Seal, float]], hosts: Mapping[AttemptKey, str]
) -> dict[AttemptKey, float]:
    """Return the seconds by which each attempt's clock is ahead of the clock of the attempt that saw most seals."""
    ahead = dict[AttemptKey, float]()
    placed = dict[Seal, float]()
    by_host = dict[str, float]()
    for key in sorted(seen, key=lambda key: (-len(seen[key]), key)):
        both = seen[key].keys() & placed.keys()
        if placed and not both:
            continue
        differences = [seen[key][seal] - placed[seal] for seal in both]
        by = min(differences, key=abs, default=0.0)
        ahead[key] = by = by if abs(by) < WRONG_S else median(differences)
        by_host.setdefault(hosts[key], by)
        for seal, at in seen[key].items():
            placed[seal] = min(placed.get(seal, at - by), at - by)
    return {key: ahead[key] if key in ahead else by_host.get(hosts[key], 0.0) for key in seen}
