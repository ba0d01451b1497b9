"""The time limit of a replica that no supervisor watches over: it ends itself, and so leaves an outcome."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

TIMED_OUT = 124  # as the command `timeout` leaves


class Deadline(threading.Thread):
    """Sends SIGTERM to its own process when the time is up, and ends it when that had no effect.

    Args:
        left_s: seconds from now on.
        grace_s: seconds between SIGTERM, which runs the entrypoint's `finally`, and the end.
        end: what is called then, in this thread; it ends the process.
    """

    def __init__(self, left_s: float, grace_s: float, end: Callable[[], None]) -> None:
        super().__init__(name="replicas-deadline", daemon=True)
        self._left_s = max(0.0, left_s)
        self._grace_s = grace_s
        self._end = end
        self._stopped = threading.Event()
        self.has_passed = False

    def run(self) -> None:
        if self._stopped.wait(self._left_s):
            return
        self.has_passed = True
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # else the user's code put it back: no outcome
            os.kill(os.getpid(), signal.SIGTERM)
        if not self._stopped.wait(self._grace_s):
            self._end()

    def stop(self) -> None:
        """Let the process go on: its entrypoint has ended."""
        self._stopped.set()
