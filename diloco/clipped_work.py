"""Warns if the work of one replica is much larger than the work of the others.

The usual reasons are gradients that explode, and a loss that is scaled in another way than in the other replicas. A
round with three contributions or more scales down such work, and its replica warns. With two contributions, nothing
shows which one is wrong. Then both count as they are, and the replica with the smaller one warns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from diloco.rendezvous.round import FAR, RoundReport, leads_far

log = logging.getLogger(__name__)

ROUNDS = 3
"""The number of rounds in a row after which a second warning reports that the finding lasts."""


class ClippedWorkCheck:
    """Reads in the reports of rounds whether work was much larger than other work.

    Args:
        rank: this replica.

    Example:
        ClippedWorkCheck(rank=2).check(reports)
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._in_a_row = 0
        self._larger_in_a_row = 0
        self._n_of_two = 0
        self._has_noted_two = False

    def check(self, reports: Iterable[RoundReport]) -> None:
        """Warn at the first of several such rounds in a row, and again after `ROUNDS` of them.

        Several rounds of two contributions in a row also cause a warning, because they compare nothing.

        Args:
            reports: the reports of new rounds.
        """
        for report in reports:
            if not report.counted:
                continue
            self._check_two(report)
            self._in_a_row = self._in_a_row + 1 if self._rank in report.clipped else 0
            if self._in_a_row in (1, ROUNDS):
                rounds = _name_rounds(self._in_a_row, report.round)
                log.warning(
                    "rank %s: %s scaled down the contribution of this replica, because it was much larger than the "
                    "others. Look for gradients that explode, and for a loss that is scaled differently in this "
                    "replica.",
                    self._rank, rounds,
                )  # fmt: skip

    def _check_two(self, report: RoundReport) -> None:
        """Warn about a round of two contributions, and about the larger one if this replica sent the smaller one."""
        others = [rank for rank in report.ranks if rank != self._rank]
        if len(report.ranks) != 2 or len(others) != 1:
            self._larger_in_a_row = self._n_of_two = 0
            return
        self._n_of_two += 1
        # One such round may only lack a late replica, so it causes no warning. The replica with the lower rank warns
        # for both.
        if self._n_of_two >= ROUNDS and not self._has_noted_two and self._rank < others[0]:
            self._has_noted_two = True
            log.warning(
                "rank %s: %s rounds up to %s had two contributions, and robust='clip' compares three or more. A "
                "contribution that is much larger counts as it is.",
                self._rank, ROUNDS, report.round,
            )  # fmt: skip
        self._larger_in_a_row = self._larger_in_a_row + 1 if leads_far(report) else 0
        if self._larger_in_a_row in (1, ROUNDS):
            rounds = _name_rounds(self._larger_in_a_row, report.round)
            log.warning(
                "rank %s: in %s, the contribution of rank %s was more than %g times as large as the one of this "
                "replica. Nothing shows which of the two is wrong, so both count: compare the losses of "
                "both ranks.",
                self._rank, rounds, others[0], FAR,
            )  # fmt: skip


def _name_rounds(n: int, last: int) -> str:
    """Return "round 7", or "3 rounds up to 7"."""
    return f"round {last}" if n == 1 else f"{n} rounds up to {last}"
