"""The interface of the log of one attempt, which every backend returns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable


class Log(Protocol):
    """The output of one attempt of one rank, as this machine can read it.

    Each log object has one reader. Any thread may close it.
    """

    @property
    def note(self) -> str:
        """The place where the log is read and its age, if this is a copy.

        Empty if it is the file that the replica writes.
        """

    @property
    def may_lag(self) -> bool:
        """True if lines arrive late, so that the last lines may be missing when the replica has ended."""

    @property
    def cut(self) -> str:
        """A sentence on why `tail`, `pieces` or `between` returned less than requested. Empty if nothing is missing."""

    @property
    def pause_s(self) -> float:
        """The shortest allowed time between two reads, in seconds."""

    def tail(self, n_lines: int) -> str:
        """Return the last lines so far.

        Args:
            n_lines: the largest number of lines.
        """

    def pieces(self) -> Iterator[bytes]:
        """Yield all available output unchanged, from its begin or from the place that `cut` names."""

    def lines(self, n_first: int, *, has_ended: bool = False) -> Iterator[list[str]]:
        """Yield whole lines in parts of limited size.

        The first call begins with the last `n_first` lines, and later calls yield new lines.

        Args:
            n_first: the largest number of lines of the first call.
            has_ended: True if the replica writes no more. Then the last line may have no newline.
        """

    def close(self) -> None:
        """Close all connections immediately."""


@runtime_checkable
class KnowsTimes(Protocol):
    """The interface of a log that knows the time of each line."""

    def between(self, since: float | None, until: float | None) -> Iterator[list[str]]:
        """Yield the lines of a span of time, in parts of bounded size.

        Args:
            since: begin of the span in Unix time, to the second. None: the beginning of the log.
            until: end of the span in Unix time, to the second. None: the end of the log.

        Raises:
            ValueError: the times of the lines were not recorded.
        """
