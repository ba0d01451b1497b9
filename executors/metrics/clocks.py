"""Puts the attempts of a run on one time line, although the clocks of their hosts differ.

All replicas see the same seals, so the times at which two of them saw a seal show the difference of their clocks. Most
clocks are right, and a replica may see a seal late. So the smallest difference is the best estimate. If even this is
more than synchronized clocks differ, the median of the differences is used. Without common seals, the host's clock is
used unchanged.
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

WRONG_S = 2.0  # clocks that NTP synchronizes differ less
Seal = tuple[str, int]
"""The name of a DiLoCo, and the number of an entry in its log."""


@dataclass
class Lived:
    """The start and the end of an attempt, as far as they are known."""

    claimed_at: float | None = None
    """The Unix time of the start, by the clock of the attempt's host. None if it is not known."""
    host: str = ""
    last_t: float = 0.0
    """The end of the attempt, or its last sign of life, in seconds since the claim."""
    outcome: Outcome | None = None
    problem: str | None = None


def read_life(attempt: Attempt, records: Collection[str], rows: Sequence[Row]) -> Lived:
    """Read the start and the end of an attempt from its records.

    Args:
        records: the names of the attempt's records, such as `outcome`.
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
        # Not the outcome, because another process may have noticed the end much later.
        elif "heartbeat" in records and (beat := attempt.beat()):
            lived.last_t = max(lived.last_t, beat.at - lived.claimed_at)
    except StoreError as error:
        lived.problem = str(error)
    return lived


def sightings(rows: Sequence[Row], claimed_at: float) -> dict[Seal, float]:
    """Return the times at which an attempt saw seals, by its host's clock.

    Seals that count the attempt's work are preferred.
    """
    rounds = [row for row in rows if isinstance(row, Round)]
    counted = [row for row in rounds if row.verdict == "counted"]
    return {(row.name, row.entry): claimed_at + row.t - row.step_s - row.reduce_s for row in counted or rounds}


def clocks_ahead(
    seen: Mapping[AttemptKey, Mapping[Seal, float]], hosts: Mapping[AttemptKey, str]
) -> dict[AttemptKey, float]:
    """Return for each attempt the seconds by which its clock is ahead of a reference: the attempt that saw most
    seals.
    """
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
