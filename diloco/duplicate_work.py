"""Replicas that train on the same data: nothing is gained by their number, and everything looks well. So it is told.

Work of equal bits comes from equal data. On GPUs whose kernels add in any order, or on unlike processors, the same data
gives other bits, and is not found here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Literal

from diloco.errors import DuplicateWorkError
from diloco.rendezvous.round import RoundReport
from executors.replica import Replica

log = logging.getLogger(__name__)

SameDataMode = Literal["raise", "warn", "allow"]
ROUNDS = 3
"""One round may be chance, as of a dataset that begins with the same batch everywhere."""
MOST_NAMED = 4
"""Ranks; so that the advice is in the one line that tables and summaries show."""
ADVICE = "Give each its own: replica.shard(dataset), or a seed that depends on current_replica().rank."


class DuplicateWorkCheck:
    """What this replica knows of others that send the same work as it does.

    Args:
        had_moved: whether what this replica sent for an entry is work: where it is not, it says nothing.
    """

    def __init__(
        self, mode: SameDataMode, rank: int, replica: Replica | None, had_moved: Callable[[int], bool]
    ) -> None:
        self._mode = mode
        self._rank = rank
        self._replica = replica
        self._had_moved = had_moved
        self._in_a_row = 0
        self._has_counted = False
        self.is_calm = False
        """True if only a report of the same work can change anything, so that other reports need no check."""

    def expect_no_moves(self) -> None:
        """No warning if no value moves: an average of weights may not have begun yet."""
        self._has_counted = True

    def check(self, reports: Iterable[RoundReport]) -> None:
        """Warn when it begins; show it beside the replica's other numbers while it lasts.

        Raises: DuplicateWorkError: it goes on.
        """
        for report in reports:
            if report.counted and not self._has_counted:
                self._has_counted = True
                self._check_it_moved(report)
            if not report.counted or self._is_none(report) or self._mode == "allow":
                continue
            self._in_a_row = self._in_a_row + 1 if report.same else 0
            self.is_calm = not report.same
            self._show(next((rank for rank in report.same if rank != self._rank), None))
            if self._in_a_row == 1:
                log.warning("rank %s: %s", self._rank, _sentence(report, f"in round {report.round}"))
            elif self._in_a_row == ROUNDS and self._mode == "raise":
                said = _sentence(report, f"{ROUNDS} rounds in a row, up to round {report.round}")
                raise DuplicateWorkError(f'{said} Where it is meant: same_data="allow", or "warn".')

    def _check_it_moved(self, report: RoundReport) -> None:
        """Warn where the first work that counts is none. Later some parameters may be frozen."""
        if self._is_none(report) and report.work > 0:
            log.warning(
                "rank %s: no parameter had moved by round %s: there was nothing to average. Does optimizer.step() run, "
                "on the parameters of this model?",
                self._rank, report.round,
            )  # fmt: skip

    def _is_none(self, report: RoundReport) -> bool:
        return report.norm == 0.0 or not self._had_moved(report.round - 1)

    def _show(self, peer: int | None) -> None:
        if self._replica is not None and peer is not None:
            self._replica.report(same_data_as=peer)
        elif self._replica is not None:
            self._replica.reported.pop("same_data_as", None)


def _sentence(report: RoundReport, when: str) -> str:
    named, rest = report.same[:MOST_NAMED], len(report.same) - MOST_NAMED
    *others, last = [*map(str, named), f"{rest} more"] if rest > 0 else map(str, named)
    ranks = f"Ranks {', '.join(others)} and {last}"
    return f"{ranks} sent identical contributions {when}: they train on the same data. {ADVICE}"
