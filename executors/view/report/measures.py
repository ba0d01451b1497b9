"""Computes the six summary numbers of a run's page, and one table row for each replica."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from executors.metrics.ledger import FATES
from executors.metrics.metrics import Metrics
from executors.metrics.rows import Round
from executors.view.report.text import one_line

SHOWN = ("step", "loss")


@dataclass(frozen=True)
class Measures:
    """Sums and latest values of the measurements of a run's replicas."""

    metrics: Metrics

    @cached_property
    def rounds_of(self) -> Mapping[int, Sequence[Round]]:
        """The rounds of each rank, as measured by that rank."""
        found = defaultdict(list)
        for row in self.metrics.rounds:
            found[row.rank].append(row)
        return found

    @cached_property
    def counted(self) -> Counter[int]:
        """The number of rounds that include each rank's work.

        Rounds for which the rank has no row count as well: the rank was killed before it wrote the row.
        """
        ranks = {(row.name, row.entry): row.ranks for row in self.metrics.rounds}
        return Counter(rank for counted in ranks.values() for rank in counted)

    @cached_property
    def alive_s(self) -> dict[int, float]:
        """The seconds that each rank was running, over all its attempts."""
        found: dict[int, float] = defaultdict(float)
        for span in self.metrics.attempts:
            ended_s = self.metrics.as_of_s if span.ended_s is None else span.ended_s
            found[span.rank] += max(0.0, ended_s - span.started_s)
        return found

    @cached_property
    def newest_values(self) -> dict[int, dict[str, float]]:
        """The last reported step and loss of each rank."""
        found: dict[int, dict[str, float]] = defaultdict(dict)
        for row in reversed(self.metrics.numbers):
            if len(known := found[row.rank]) < len(SHOWN):
                known |= {name: row.values[name] for name in SHOWN if name in row.values and name not in known}
        return found

    @cached_property
    def not_finite(self) -> dict[int, float | None]:
        """The ranks whose last loss is infinite or NaN, with the step from which the loss is not finite.

        The step is None if the rank reported no step.
        """
        found: dict[int, float | None] = {}
        for row in self.metrics.numbers:
            if "loss" in row.not_finite:
                found.setdefault(row.rank, row.values.get("step"))
            elif "loss" in row.values:
                found.pop(row.rank, None)
        return found

    @property
    def restarts(self) -> dict[int, int]:
        """The number of restarts of each rank that was restarted."""
        counts: dict[int, int] = defaultdict(int)
        for span in self.metrics.attempts:
            counts[span.rank] += 1
        return {rank: count - 1 for rank, count in counts.items() if count > 1}

    @cached_property
    def data_parallel_bytes(self) -> float | None:
        """The bytes that one replica would have sent and received with plain data parallelism: float32 gradients
        averaged in every step.
        """
        sizes = {(row.name, row.fragment): 4 * row.elements for row in self.metrics.rounds if row.elements}
        steps = max((values.get("step", 0.0) for values in self.newest_values.values()), default=0.0)
        return sum(sizes.values()) * steps if sizes and steps > 0 else None

    def six(self) -> dict[str, Any]:
        """Return the six summary numbers of the page, as JSON. A number is None if there are no measurements for it.

        Shares are measured seconds divided by the seconds that replicas were running. So they are None unless all
        measurements were read.
        """
        rounds, ledger = self.metrics.rounds, self.metrics.ledger
        alive_s, n = sum(self.alive_s.values()), max(1, len(self.rounds_of))
        late_s, hidden_s = sum(row.round_s for row in rounds), sum(row.hidden_s for row in rounds)
        waiting_s = _waiting_s(rounds)
        errors = [row.wire_error for row in rounds if row.wire_error]
        moved = sum(row.up + row.down for row in rounds) / n
        is_known = bool(rounds) and self.metrics.is_whole
        has_rounds = is_known and alive_s > 0
        return {
            "goodput": ledger.goodput,
            "late": late_s / alive_s if has_rounds else None,
            "hidden": hidden_s / alive_s if has_rounds else None,
            "hidden_s": hidden_s,
            "in_rounds": (late_s - waiting_s) / alive_s if has_rounds else None,
            "in_rounds_s": late_s - waiting_s,
            "waiting": waiting_s / alive_s if has_rounds else None,
            "waiting_s": waiting_s,
            "alive_s": alive_s,
            "bytes_up": sum(row.up for row in rounds) / n if is_known else None,
            "bytes_down": sum(row.down for row in rounds) / n if is_known else None,
            "data_parallel_bytes": self.data_parallel_bytes,
            "wire": next((one_line(row.wire, 40) for row in rounds if row.wire), None),
            "wire_error": median(errors) if errors else None,
            "times_less": 2 * (self.data_parallel_bytes or 0.0) / moved if moved and is_known else None,
            "restarts": sum(self.restarts.values()),
            "restarts_by_rank": self.restarts,
            "work": {fate: getattr(ledger, fate) for fate in FATES} if is_known else None,
        }

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return the table row of one replica, as JSON."""
        rounds, values = self.rounds_of.get(rank, []), self.newest_values.get(rank, {})
        work = self.metrics.ledger.by_rank.get(rank)
        return {
            "step": values.get("step"),
            "loss": None if rank in self.not_finite else values.get("loss"),
            "alive_s": self.alive_s.get(rank, 0.0),
            "training_s": _training_s(rounds),
            "waiting_s": _waiting_s(rounds),
            "in_rounds_s": sum(row.round_s for row in rounds) - _waiting_s(rounds),
            "hidden_s": sum(row.hidden_s for row in rounds),
            "rounds": {
                "counted": self.counted[rank],
                **{verdict: sum(row.verdict == verdict for row in rounds) for verdict in ("carried", "dropped")},
            },
            "lost": work.lost if work is not None and self.metrics.is_whole else None,
            "bytes_up": sum(row.up for row in rounds) if self.metrics.is_whole else None,
            "bytes_down": sum(row.down for row in rounds) if self.metrics.is_whole else None,
        }


def _waiting_s(rounds: Sequence[Round]) -> float:
    """Return the seconds that training waited because other replicas were late."""
    return sum(row.wait_s * row.late_share for row in rounds)


def _training_s(rounds: Sequence[Round]) -> float:
    """Return the seconds of training of one replica.

    With several DiLoCos, the training time that one DiLoCo measures includes the rounds of the others. The time of
    these rounds is subtracted.
    """
    names = {row.name for row in rounds}
    return max([0.0, *(sum(row.train_s if row.name == name else -row.round_s for row in rounds) for name in names)])
