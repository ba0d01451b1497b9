"""Warns if rounds scale down the work of this replica, because it is much larger than the work of the others.

The usual reasons are gradients that explode, and a loss that is scaled in another way than in the other replicas.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from diloco.rendezvous.round import RoundReport

log = logging.getLogger(__name__)

ROUNDS = 3
"""The number of rounds in a row after which a second warning reports that the finding lasts."""


class ClippedWorkCheck:
    """Reads in the reports of rounds whether the work of this replica was scaled down.

    Args:
        rank: this replica.

    Example:
        ClippedWorkCheck(rank=2).check(reports)
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._in_a_row = 0

    def check(self, reports: Iterable[RoundReport]) -> None:
        """Warn at the first of several such rounds in a row, and again after `ROUNDS` of them.

        Args:
            reports: the reports of new rounds.
        """
        for report in reports:
            if not report.counted:
                continue
            self._in_a_row = self._in_a_row + 1 if self._rank in report.clipped else 0
            if self._in_a_row in (1, ROUNDS):
                rounds = f"round {report.round}" if self._in_a_row == 1 else f"{ROUNDS} rounds up to {report.round}"
                log.warning(
                    "rank %s: %s scaled down the contribution of this replica, because it was much larger than the "
                    "others. Look for gradients that explode, and for a loss that is scaled differently in this "
                    "replica.",
                    self._rank, rounds,
                )  # fmt: skip
