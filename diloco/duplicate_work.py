"""Warns if replicas train on the same data, because they send the same work, bit for bit.

Such replicas add nothing, and nothing else shows the mistake. Work with equal bits comes from equal data. The reverse
does not hold: on different processors, or on GPUs whose kernels add in a random order, the same data gives different
bits. This check does not find that case.
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
"""The number of rounds in a row that prove the mistake.

One round may be chance, if a data set begins with the same batch everywhere.
"""
MOST_NAMED = 4
"""Most ranks that a message names.

With more, the advice would not fit in the one line that tables and summaries show.
"""
ADVICE = "Give each replica its own: replica.shard(dataset), or a seed that depends on current_replica().rank."


class DuplicateWorkCheck:
    """Compares this replica's work with the work of the other replicas, by the reports of rounds.

    Args:
        mode: the reaction: "raise", "warn" or "allow".
        rank: this replica.
        replica: the replica of this process, whose status shows the finding. None: this process is not a replica.
        had_moved: returns True if any parameter had changed when the work for an entry was sent. Work without any
            change proves nothing.

    Raises:
        DuplicateWorkError: by `check`.

    Example:
        check = DuplicateWorkCheck("raise", 0, find_replica(), model_state.had_moved)
        check.check(reports)
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
        self.needs_no_check = False
        """True after work with a change was seen. From then on, only reports with duplicate work need a check."""

    def expect_no_moves(self) -> None:
        """Do not warn if no value changes, because an averaged copy of the weights may begin to change later."""
        self._has_counted = True

    def check(self, reports: Iterable[RoundReport]) -> None:
        """Warn when replicas begin to send the same work, and show that in the replica's status as long as they do so.

        Args:
            reports: the reports of new rounds.

        Raises:
            DuplicateWorkError: replicas sent the same work in `ROUNDS` rounds in a row, and the mode is "raise".
        """
        for report in reports:
            if report.counted and not self._has_counted:
                self._has_counted = True
                self._check_it_moved(report)
            if not report.counted or self._is_empty(report) or self._mode == "allow":
                continue
            self._in_a_row = self._in_a_row + 1 if report.same else 0
            self.needs_no_check = not report.same
            self._show(next((rank for rank in report.same if rank != self._rank), None))
            if self._in_a_row == 1:
                log.warning("rank %s: %s", self._rank, _sentence(report, f"in round {report.round}"))
            elif self._in_a_row == ROUNDS and self._mode == "raise":
                sentence = _sentence(report, f"{ROUNDS} rounds in a row, up to round {report.round}")
                raise DuplicateWorkError(f'{sentence} If it is intended, pass same_data="allow".')

    def _check_it_moved(self, report: RoundReport) -> None:
        """Warn if the first counted work is empty, because no parameter has changed.

        Later rounds are not checked: parameters may be frozen on purpose.
        """
        if self._is_empty(report) and report.work > 0:
            log.warning(
                "rank %s: no parameter has changed before round %s, so there was nothing to average. Check that "
                "optimizer.step() runs, on the parameters of this model.",
                self._rank, report.round,
            )  # fmt: skip

    def _is_empty(self, report: RoundReport) -> bool:
        """Return True if this replica's work in a round was empty."""
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
