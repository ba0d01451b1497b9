"""How attempts become processes: what a supervisor needs from whoever starts them, and what it keeps of each."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from executors.attempt import Attempt
from executors.protocol import Reason

NEVER = float("inf")


class Ranks(Protocol):
    """How the attempts of one launch's ranks, the first and those after it, become processes of this machine."""

    def prepare(self, attempt: Attempt) -> None:
        """Do what an attempt needs, as far as it can be done before the first process is started."""

    def begin(self, attempt: Attempt) -> bool:
        """Begin an attempt, or find that this process has; False if it is another process's."""

    def start(self, attempt: Attempt, place: int, page: Any, close: Iterable[int]) -> int:
        """Start an attempt's process at one of the places; return its pid.

        Args:
            page: the memory that it shares with its supervisor.
            close: descriptors that it must not keep.
        """

    def output_tail(self, attempt: Attempt) -> str:
        """Return the end of an attempt's output, for its outcome."""

    def copy_log(self, asked: Attempt, claimed: Attempt) -> int | None:
        """Begin to copy the end of an attempt's output into the run's store, if it is to be there.

        Args:
            asked: the attempt that was started, which has the output.
            claimed: the attempt that its process claimed, which gets the copy.

        Returns: the pid of the process that does, and ends soon; None: there is nothing to copy.
        """


@dataclass
class Running:
    """The process of an attempt."""

    pid: int
    asked: Attempt
    """The attempt asked for; the process may have claimed a later one."""
    place: int
    started_at: float
    deadline: float
    ending: Reason | None = None
    """Why the supervisor ended it."""
    kill_at: float = NEVER

    def terminate(self, why: Reason, grace_s: float) -> None:
        """Ask the rank to end; only the rank: its helpers are part of how it cleans up."""
        self.ending, self.deadline, self.kill_at = why, NEVER, time.monotonic() + grace_s
        os.kill(self.pid, signal.SIGTERM)
