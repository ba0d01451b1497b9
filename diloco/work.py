"""What a rendezvous moves: the interface between the protocol and the training state.

The rendezvous decides, the work computes. `diloco.training.Training` is the real one, over torch; the simulation in
the tests has one of a few integers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from diloco.contract import Contract
from diloco.snapshot import Arrays


class Settled(StrEnum):
    """What became of the local work of a fragment in an entry."""

    COUNTED = "counted"
    """The seal names this process: what it sent, if anything, is in the mean."""
    KEPT = "kept"
    """The seal does not name this rank: its work goes with its next contribution."""
    DROPPED = "dropped"
    """The seal names another copy of this rank: counting this one's work too would count it twice."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A payload as it is sent, or as it was."""

    blocks: tuple[str, ...]
    norms: tuple[float, ...]
    kept: memoryview
    """The part of it that is in memory still, writable, until the next one is packed."""
    start: int = 0
    """Where in the payload that part begins, in bytes."""

    def part(self, start: int, size_bytes: int) -> memoryview | None:
        """Return a range of the payload, or None where it was not kept."""
        at = start - self.start
        return self.kept[at : at + size_bytes] if at >= 0 and at + size_bytes <= len(self.kept) else None


class Work(Protocol):
    """The anchor, the outer optimizer's state and the live work of one replica, by fragment."""

    carries: bool
    """Whether work that came too late for its round goes with the next one."""

    def sizes(self) -> Sequence[int]:
        """Return the payload bytes of each fragment."""

    def contract(self) -> Contract:
        """Return what every replica must have in common."""

    def arrays(self) -> Arrays:
        """Return the anchor and whatever outer state differs from the initial one."""

    def load(self, arrays: Arrays) -> None:
        """Replace anchor and outer state (by the initial one where `arrays` has none). Leaves live work alone."""

    def digest(self, fragment: int) -> str:
        """Digest anchor and outer state of a fragment."""

    def capture(self) -> tuple[Arrays, tuple[str, ...]]:
        """Return a copy of what `arrays` returns, and the digest of each fragment, made from memory as it is now.

        Raises: TypeError: the outer optimizer's state is more than tensors and JSON.
        """

    def pack(
        self, entry: int, write: Callable[[memoryview], object] | None = None, keep: tuple[int, int] | None = None
    ) -> Packed:
        """Pack the work of the entry's fragment that no mean contains yet: anchor - live.

        Args:
            write: is handed the payload in pieces, in order; a piece is good during the call only.
            keep: first byte, and the one after the last, of what is to stay in memory; None: all of it.

        Raises: ContributionError: it is not finite, or a parameter has changed its shape.
        """

    def apply(
        self, entry: int, mean: Sequence[memoryview], settled: Settled, part: Sequence[memoryview] | None = None
    ) -> None:
        """Step the anchor by a mean, given as consecutive byte ranges, and merge it into the live parameters.

        Args:
            mean: empty: there is none, and the anchor stays.
            part: the part of the live work that was counted or is to be dropped, as a payload in consecutive ranges,
                where the rest is to stay; empty: none of it; None: all of it.
        """

    def replay(self, entry: int, mean: Sequence[memoryview]) -> None:
        """Step the anchor by a mean, unless that is empty, and leave the live parameters alone."""

    def progress(self) -> Any:
        """Return a copy of all live work, as distances from the anchor."""

    def payload(self, entry: int) -> memoryview:
        """Return a copy of what would be packed now."""

    def restore(self, progress: Any, settled: Sequence[Settled | None] = ()) -> None:
        """Set the live parameters to the anchor less `progress`; None: to the anchor.

        Args:
            settled: by fragment, what became of that work in the entries which the anchor has jumped over; None: there
                were none. Merges accordingly, as `apply` does.
        """
