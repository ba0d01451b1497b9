"""Combines the round measurements of all replicas: counted work, the latest rank, the cost of waiting, and drifting
ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from executors.metrics.metrics import Metrics
from executors.metrics.rows import Round
from executors.view.report.curves import Line, Point, max_points_of, thin
from executors.view.report.text import one_line

DRIFT = 2.0  # a norm differs if it is more than this many times the median, or less than its inverse
MIN_RANKS = 3  # with fewer ranks, the rank that is compared would decide the median
# A share of the median weight of a round: a rank with less work has a smaller pseudo-gradient, so it is not compared.
SAME_WEIGHT = 0.8
WIDE = 4.0  # standard deviations of the other ranks' norms: a small model near its optimum has noisy ones
MAD_TO_SIGMA = 1.4826  # turns the median absolute deviation of a normal distribution into its standard deviation
MIN_ROUNDS = 10  # the fewest rounds in which the norm of a rank was compared with others; fewer prove nothing
MIN_DRIFTING = 5  # rounds in which the norm differs; a tenth of the compared rounds must differ as well
# the share of these rounds on one side: a drifting norm is always too large or always too small, and noise changes
# sides
ONE_SIDE = 0.8
UNNOTICED = {"last": 0, "missing": 0, "drifting": 0, "cost_s": 0.0}
MAX_NAME = 40  # characters
MAX_SAME = 3  # the most groups of ranks
MAX_ROUNDS = 200  # the most rows of the table
SHARE = 0.25  # the share of a page's values that all curves of rounds may use


@dataclass(frozen=True)
class RunRound:
    """One round of a run, as all its replicas measured it. Its seconds are on the run's time line."""

    name: str
    """The name of the DiLoCo, because a run may have several."""
    entry: int
    rows: Mapping[int, Round]
    """The measurements of each rank that has adopted the round, by rank."""
    ended_s: float
    counted: tuple[int, ...]
    missing: Sequence[int]
    """The ranks that were alive during the round and whose work is not in the mean."""

    @property
    def waits(self) -> dict[int, float]:
        """The seconds that training waited in this round, for each replica whose contribution counted."""
        counted = {*self.counted}
        return {rank: row.wait_s * row.late_share for rank, row in self.rows.items() if rank in counted}

    @property
    def last(self) -> int | None:
        """The rank that arrived last, among the ranks whose work counts. It is the rank with the shortest wait.

        None if fewer than two ranks have a row.
        """
        # The sum includes waits in the background, while training continued.
        waits = {rank: self.rows[rank].wait_s for rank in self.waits}
        return min(waits, key=lambda rank: (waits[rank], rank)) if len(waits) > 1 else None

    def blamed(self, usual_s: float) -> dict[int, float]:
        """Return the seconds that other replicas waited for each rank that delayed them.

        Time that all replicas waited beyond `usual_s` is charged to the missing ranks. The additional wait of single
        replicas is charged to the last rank.

        Args:
            usual_s: the seconds that all replicas wait in a round without missing ranks.
        """
        waits, cost = self.waits, dict[int, float]()
        least = min(waits.values(), default=0.0)
        for rank in self.missing:
            cost[rank] = len(waits) * max(0.0, least - usual_s) / len(self.missing)
        if self.last is not None:
            cost[self.last] = sum(waits.values()) - len(waits) * least
        return cost

    @property
    def ratios(self) -> dict[int, float]:
        """The norm of each rank's pseudo-gradient divided by the median norm.

        Only ranks that did about the same work are compared.
        """
        rows = {rank: self.rows[rank] for rank in self.counted if rank in self.rows}
        usual = median(row.weight for row in rows.values()) if rows else 0.0
        norms = {
            rank: row.norm
            for rank, row in rows.items()
            if row.norm is not None and SAME_WEIGHT * usual <= row.weight <= usual / SAME_WEIGHT
        }
        middle = median(norms.values()) if len(norms) >= MIN_RANKS else 0.0
        return {rank: norm / middle for rank, norm in norms.items()} if middle > 0 else {}

    @property
    def drifting(self) -> dict[int, float]:
        """The ranks whose ratio is more than `DRIFT` or less than 1 / `DRIFT`, with this ratio."""
        return {rank: ratio for rank, ratio in self.ratios.items() if not 1 / DRIFT <= ratio <= DRIFT}


def rounds_of_run(metrics: Metrics) -> list[RunRound]:
    """Return the rounds of a run, ordered by the name of their DiLoCo and by their number."""
    by_entry: dict[tuple[str, int], dict[int, Round]] = defaultdict(dict)
    for row in metrics.rounds:
        by_entry[row.name, row.entry][row.rank] = row
    found, began_s, before = list[RunRound](), 0.0, ""
    for (name, entry), rows in sorted(by_entry.items()):
        began_s, before = began_s if name == before else 0.0, name
        ended_s = max(metrics.at(row) for row in rows.values())
        counted = next(iter(rows.values())).ranks
        alive = {
            span.rank
            for span in metrics.attempts
            if span.started_s < ended_s and (span.ended_s is None or span.ended_s > began_s)
        }
        found.append(RunRound(name, entry, rows, ended_s, counted, sorted(alive - {*counted})))
        began_s = ended_s
    return found


def drifting_ranks(found: Sequence[RunRound]) -> list[int]:
    """Return the ranks whose pseudo-gradients repeatedly differ in norm from the norms of the other ranks.

    A norm counts as far from the median if it is more than `DRIFT` times as large or small, and if it is farther away
    than `WIDE` standard deviations of the other ranks' norms. The deviation is estimated from the median absolute
    deviation, which a few extreme rounds do not change.

    Args:
        found: the rounds of a run.
    """
    logs: dict[int, list[float]] = defaultdict(list)
    for each in found:
        for rank, ratio in each.ratios.items():
            if ratio > 0:
                logs[rank].append(math.log(ratio))
    drifting = []
    ordered = sorted(abs(value) for values in logs.values() for value in values)
    for rank, own in sorted(logs.items()):
        if len(own) < MIN_ROUNDS or len(own) == len(ordered):
            continue
        of_others = median_without(ordered, [abs(value) for value in own])
        limit = max(math.log(DRIFT), WIDE * MAD_TO_SIGMA * of_others)
        above, below = sum(value > limit for value in own), sum(value < -limit for value in own)
        n_far = above + below
        if n_far >= max(MIN_DRIFTING, len(own) / 10) and max(above, below) >= ONE_SIDE * n_far:
            drifting.append(rank)
    return drifting


def median_without(ordered: Sequence[float], left_out: Sequence[float]) -> float:
    """Return the median of sorted values without some of them. This is quick if few values are left out.

    Args:
        ordered: the sorted values.
        left_out: the values to leave out. Each is one of `ordered`, and not all of these are left out.

    Example:
        median_without([1.0, 2.0, 2.0, 5.0], [2.0])  # 2.0
    """
    skipped, n_left = sorted(left_out), len(ordered) - len(left_out)
    places = list[int]()
    for number, value in enumerate(skipped):
        place = bisect_left(ordered, value)
        places.append(place if not number or place > places[-1] else places[-1] + 1)

    def left(index: int) -> float:
        for place in places:
            index += place <= index
        return ordered[index]

    return (left((n_left - 1) // 2) + left(n_left // 2)) / 2


def rounds_document(found: Sequence[RunRound]) -> dict[str, Any]:
    """Return the part of the page's document that describes rounds, as JSON."""
    whole = [min(each.waits.values()) for each in found if not each.missing and each.waits]
    usual_s = median(whole) if whole else 0.0
    by_rank: dict[int, dict[str, float]] = defaultdict(lambda: dict(UNNOTICED))
    charted = Counter(each.name for each in found).most_common(1)[0][0] if found else ""
    rows: list[dict[str, Any]] = []
    same = Counter(ranks for each in found for ranks in {tuple(row.same) for row in each.rows.values() if row.same})
    norms, mean_norms = defaultdict[int, list[Point]](list), list[Point]()
    for each in found:
        blamed, drifting, counted = each.blamed(usual_s), each.drifting, {*each.counted}
        for rank, cost_s in blamed.items():
            by_rank[rank]["cost_s"] += cost_s
        for rank in each.missing:
            by_rank[rank]["missing"] += 1
        for rank in drifting:
            by_rank[rank]["drifting"] += 1
        if each.last is not None:
            by_rank[each.last]["last"] += 1
        for rank, row in each.rows.items():
            if row.norm is not None and each.name == charted:
                norms[rank].append((each.entry + 1, row.norm))
        mean_norm = next((row.mean_norm for row in each.rows.values() if row.mean_norm is not None), None)
        mean_norms += [] if mean_norm is None or each.name != charted else [(each.entry + 1, mean_norm)]
        rows.append(
            {
                "name": one_line(each.name, MAX_NAME),
                "round": each.entry + 1,
                "ended_s": round(each.ended_s, 2),
                "fragment": next(iter(each.rows.values())).fragment,
                "counted": list(each.counted),
                "missing": list(each.missing),
                "last": each.last,
                "waited_s": round(sum(each.waits.values()), 3),
                "late_s": round(sum(row.round_s for row in each.rows.values()), 3),
                "hidden_s": round(sum(row.hidden_s for row in each.rows.values()), 3),
                "stale_steps": max(row.stale_steps for row in each.rows.values()),
                "wire_error": max((row.wire_error for row in each.rows.values() if row.wire_error), default=None),
                "weight": sum(row.weight for rank, row in each.rows.items() if rank in counted),
                "mean_norm": mean_norm,
                "drifting": {str(rank): round(ratio, 2) for rank, ratio in drifting.items()},
            }
        )
    kept = sorted(sorted(rows, key=lambda row: -row["waited_s"])[:MAX_ROUNDS], key=lambda row: row["ended_s"])
    bars = [row for row, each in zip(rows, found, strict=True) if each.name == charted]
    has_hidden = any(row["hidden_s"] and row["stale_steps"] for row in bars)
    numbers = [row["round"] for row in bars]
    drawn = [[row["late_s"] + row["hidden_s"], row["late_s"]] if has_hidden else [row["waited_s"]] for row in bars]
    return {
        "n": len(found),
        "names": sorted({row["name"] for row in rows}),
        "charted": one_line(charted, MAX_NAME),
        "by_rank": {rank: {**row, "cost_s": round(row["cost_s"], 3)} for rank, row in sorted(by_rank.items())},
        "drifting": drifting_ranks(found),
        "same": [{"ranks": list(ranks), "rounds": n} for ranks, n in same.most_common(MAX_SAME)],
        "usual_wait_s": round(usual_s, 3),
        "has_hidden": has_hidden,
        "waited": thin([Line.of(0, 0, zip(numbers, line, strict=True)) for line in zip(*drawn, strict=True)]),
        "norms": thin(
            # Each rank measures a round once, so its points form one line over all attempts.
            [Line.of(rank, 0, points) for rank, points in sorted(norms.items())],
            max_points_of(len(norms), SHARE),
            above={"the mean’s": mean_norms},
        ),
        "table": kept,
    }
