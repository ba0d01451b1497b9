"""What SIGTERM does to a replica: it raises `SystemExit` in the entrypoint, so that `finally` runs, until that arrives.

Python ignores what is raised in a finalizer or the callback of a weak reference, as its import locks have one. Where
it ignores ours, it is raised again.
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

TERMINATED = 143  # 128 + SIGTERM, as a shell says it
AGAIN_AFTER_S = 0.01  # seconds in which a callback ends

_arrived = False
_page: SharedPage | None = None


class Terminated(SystemExit):
    """SIGTERM arrived."""


def handle_sigterm(page: SharedPage | None) -> None:
    """Turn the first SIGTERM into SystemExit; a second one ends the process.

    Args:
        page: says when that has to wait.
    """
    global _page
    _page = page
    signal.signal(signal.SIGTERM, _terminate)
    os.register_at_fork(after_in_child=_forget)
    sys.unraisablehook = _raise_again


def ignore_sigterm() -> None:
    """Let the worker finish: what the entrypoint did is worth writing down."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def sigterm_arrived() -> bool:
    """Whether this replica was asked to end."""
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
    _thread.start_new_thread(_send_again, ())  # what is raised in this hook would be ignored as well


def _send_again() -> None:
    time.sleep(AGAIN_AFTER_S)
    if signal.getsignal(signal.SIGTERM) is _terminate:  # else another one came meanwhile, or the entrypoint has ended
        os.kill(os.getpid(), signal.SIGTERM)


def _forget() -> None:
    """Let a helper that the replica forks die of SIGTERM as any process: its pool would wait for it for ever."""
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
