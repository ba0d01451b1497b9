"""What became of the work that replicas did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from executors.metrics.rows import Round


@dataclass(frozen=True, kw_only=True)
class Work:
    """Units of work by their fate: inner steps, or what a callable `weight` counts."""

    counted: float = 0.0
    """A seal names it."""
    carried: float = 0.0
    """Goes with the next contribution: under way, or left at the end."""
    dropped: float = 0.0
    lost: float = 0.0
    """Died with its process."""

    @property
    def made(self) -> float:
        return self.counted + self.carried + self.dropped + self.lost


@dataclass(frozen=True, kw_only=True)
class Ledger(Work):
    """The work of all replicas."""

    goodput: float | None = None
    """Share of the work that undisturbed replicas would have had counted; None: there is no round to measure it by."""
    by_rank: Mapping[int, Work] = field(default_factory=dict)


def simple_ledger(rounds: Sequence[Round]) -> Ledger:
    n_fragments = 1 + max((row.fragment for row in rounds), default=0)

    def total(verdict: str) -> float:
        return sum(row.weight for row in rounds if row.verdict == verdict) / n_fragments

    return Ledger(counted=total("counted"), carried=total("carried"), dropped=total("dropped"))
