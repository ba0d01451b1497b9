"""Turns SIGTERM into a `SystemExit` in the entrypoint, so that its `finally` blocks run.

Python ignores an exception that is raised in a finalizer, or in the callback of a weak reference, as in its import
locks. If it ignores our exception, the exception is raised again a moment later.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
from types import FrameType
from typing import Any

from executors.replica.shared_page import SharedPage

TERMINATED = 143  # 128 + SIGTERM, the exit code that a shell reports
AGAIN_AFTER_S = 0.01  # the callback that ignored the exception has ended by then

_arrived = False
_page: SharedPage | None = None


class Terminated(SystemExit):
    """SIGTERM arrived."""


def handle_sigterm(page: SharedPage | None) -> None:
    """Turn the first SIGTERM into SystemExit. A second one ends the process.

    Args:
        page: the page of the replica. The exception waits while the replica is in `atomic`. None: there is no page.
    """
    global _page
    _page = page
    signal.signal(signal.SIGTERM, _terminate)
    os.register_at_fork(after_in_child=_forget)
    sys.unraisablehook = _raise_again


def handle_sigterm_again() -> None:
    """Turn SIGTERM into SystemExit again, for the next attempt of the same process."""
    global _arrived
    _arrived = False
    signal.signal(signal.SIGTERM, _terminate)


def ignore_sigterm() -> None:
    """Ignore SIGTERM from now on, so that the worker can record the outcome."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def sigterm_arrived() -> bool:
    """Return True if this replica was asked to end."""
    return _arrived


def _terminate(signum: int, frame: FrameType | None) -> None:
    global _arrived
    _arrived = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if _page is not None and _page.n_atomic:
        _page.deferred = Terminated(TERMINATED)
        return
    raise Terminated(TERMINATED)


def _raise_again(ignored: Any) -> None:
    if not isinstance(ignored.exc_value, Terminated):
        sys.__unraisablehook__(ignored)
        return
    signal.signal(signal.SIGTERM, _terminate)
    _thread.start_new_thread(_send_again, ())  # Python would also ignore an exception that is raised in this hook


def _send_again() -> None:
    time.sleep(AGAIN_AFTER_S)
    # The handler differs if another SIGTERM came meanwhile, or if the entrypoint has ended.
    if signal.getsignal(signal.SIGTERM) is _terminate:
        os.kill(os.getpid(), signal.SIGTERM)


def _forget() -> None:
    """Restore the default of SIGTERM in a forked helper. A helper that survives it would block its pool forever."""
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
