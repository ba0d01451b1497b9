"""What `DiLoCo.step` tells of a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from diloco.rounds import Adopted


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round was, and what it cost this replica."""

    round: int
    """The entry of the log: 0, 1, 2, … over all fragments."""
    fragment: int
    ranks: tuple[int, ...]
    """Whose work is in the mean."""
    counted: bool
    """Whether this replica's is; if not, it goes with its next contribution."""
    bytes_up: int
    bytes_down: int
    wait_s: float
    """Waiting for others."""
    move_s: float
    """Packing, sending and reading."""
    reduce_s: float
    step_s: float

    @classmethod
    def of(cls, adopted: Sequence[Adopted]) -> Self:
        """Tell of the last of some entries that were gone through together, and what all of them cost."""
        last = adopted[-1]
        return cls(
            round=last.entry,
            fragment=last.fragment,
            ranks=tuple(rank for rank in last.ranks if rank not in last.left_out),
            counted=last.counted,
            bytes_up=sum(entry.bytes_up for entry in adopted),
            bytes_down=sum(entry.bytes_down for entry in adopted),
            wait_s=sum(entry.wait_s for entry in adopted),
            move_s=sum(entry.move_s for entry in adopted),
            reduce_s=sum(entry.reduce_s for entry in adopted),
            step_s=sum(entry.step_s for entry in adopted),
        )
