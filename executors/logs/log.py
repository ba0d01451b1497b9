"""The log of one attempt, as every backend offers it to those who read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, runtime_checkable


class Log(Protocol):
    """The output of one attempt of one rank, as it can be read from this machine.

    A log has one reader. Any thread may close it.
    """

    @property
    def note(self) -> str:
        """Where the log is read and how old that is, if it is not what the replica writes to; else empty."""

    @property
    def may_lag(self) -> bool:
        """True if lines come late, so that the last may be missing when the replica has ended."""

    @property
    def cut(self) -> str:
        """Why `tail`, `pieces` or `between` gave less than was asked for, as a sentence; empty if they gave all."""

    @property
    def pause_s(self) -> float:
        """The least time between two reads, in seconds."""

    def tail(self, n_lines: int) -> str:
        """Return the last lines so far.

        Args:
            n_lines: how many, at most.
        """

    def pieces(self) -> Iterator[bytes]:
        """Yield all that is available, as it was written, from the beginning or from the place that `cut` names."""

    def lines(self, n_first: int, *, has_ended: bool = False) -> Iterator[list[str]]:
        """Yield whole lines in parts of bounded size: the last `n_first` in the first call, then what is new.

        Args:
            n_first: how many lines the first call yields, at most.
            has_ended: True if the replica writes no more. The very last line may come without a newline.
        """

    def close(self) -> None:
        """Close connections, at once."""


@runtime_checkable
class KnowsTimes(Protocol):
    """A log that knows when its lines came."""

    def between(self, since: float | None, until: float | None) -> Iterator[list[str]]:
        """Yield the lines of a span of time, in parts of bounded size.

        Args:
            since: begin of the span in Unix time, to the second. None: the beginning of the log.
            until: end of the span in Unix time, to the second. None: the end of the log.

        Raises:
            ValueError: no process has kept when the lines of this log came.
        """
