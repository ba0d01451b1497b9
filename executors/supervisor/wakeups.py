"""Lets a supervisor sleep until a signal arrives, the launcher of its run ends, or a deadline is reached."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable

from executors.process import wakeup_pipe

LONGEST_S = 60.0
LAUNCHER_LOOK_S = 2.0


class Wakeups:
    """Waits in the supervisor's only thread for signals and for the end of the launcher.

    Args:
        launcher_end: a descriptor that is readable when the launcher has ended, which wakes the supervisor. None: the
            run is detached.
        launcher_lives: returns False if the launcher has ended. It is called every two seconds, because a process that
            the launcher has forked may keep the descriptor from being readable. None, the default: that cannot happen.
    """

    def __init__(self, launcher_end: int | None, launcher_lives: Callable[[], bool] | None = None) -> None:
        self._launcher_end = launcher_end
        self._launcher_lives = launcher_lives
        self._look_at = time.monotonic() + LAUNCHER_LOOK_S
        self.signals: tuple[signal.Signals, ...] = (signal.SIGCHLD, signal.SIGUSR1)
        """The signals that wake the supervisor. Their handlers do nothing else."""
        self.descriptors = wakeup_pipe()
        """The pipe of the signals. A rank must close both ends."""

    def listen(self) -> None:
        """Receive the signals from now on. The caller is the only thread of its process."""
        signal.set_wakeup_fd(self.descriptors[1], warn_on_full_buffer=False)
        for number in self.signals:
            signal.signal(number, lambda *_: None)

    def wait(self, until: float) -> tuple[bytes, bool]:
        """Wait for a signal or the end of the launcher.

        Args:
            until: the longest wait, as a time of the monotonic clock.

        Returns: the numbers of the signals that arrived, and True if the launcher has ended since the last call.
        """
        reader, launcher = self.descriptors[0], self._launcher_end
        if self._launcher_lives is not None:
            until = min(until, self._look_at)
        poller = select.poll()
        for descriptor in (reader,) if launcher is None else (reader, launcher):
            poller.register(descriptor, select.POLLIN)
        left_s = min(max(0.0, until - time.monotonic()), LONGEST_S)
        ready = {descriptor for descriptor, _ in poller.poll(left_s * 1000)}
        signals = b""
        if reader in ready:
            with contextlib.suppress(BlockingIOError):
                signals = os.read(reader, 4096)
        has_ended = launcher is not None and launcher in ready
        if self._launcher_lives is not None and time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LAUNCHER_LOOK_S
            has_ended = has_ended or not self._launcher_lives()
        if has_ended:
            self._launcher_end = self._launcher_lives = None
        return signals, has_ended
