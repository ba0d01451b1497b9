"""The interface between those who can read a replica's log and those who show or follow it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Log(Protocol):
    """What one attempt of one rank writes, as it can be read from here. For one reader; any thread may close it."""

    @property
    def note(self) -> str:
        """Where it is read and how old that is, if it is not what the replica writes to; else empty."""

    @property
    def may_lag(self) -> bool:
        """Whether lines come late, so that the last may be missing when the replica has ended."""

    @property
    def pause_s(self) -> float:
        """The least time between two reads."""

    def tail(self, n_lines: int) -> str:
        """Return the last lines so far."""

    def lines(self, n_first: int, *, has_ended: bool = False) -> Iterator[list[str]]:
        """Yield whole lines in parts of bounded size: the last `n_first` in the first call, then what is new.

        Args:
            has_ended: the replica writes no more; the very last line may come without a newline.
        """

    def close(self) -> None:
        """Let go of connections, at once."""
