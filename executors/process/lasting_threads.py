"""Threads that run as long as their process, such as the thread that beats for the supervisor."""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import Any

_idents = set[int]()


def start_lasting_thread(run: Callable[..., Any], *args: Any) -> int:
    """Start a thread that never ends, and return its ident.

    Python lists a thread only after it has run for the first time, which may be seconds later on a loaded machine.
    `lasting_threads` has it from the start.

    Args:
        run: the function of the thread, which does not return.
        args: the arguments of the function.

    Example:
        start_lasting_thread(watch, os.getppid())
    """
    ident = _thread.start_new_thread(run, args)
    _idents.add(ident)
    return ident


def lasting_threads() -> frozenset[int]:
    """Return the idents of all threads that `start_lasting_thread` has started.

    Example:
        lasting_threads() <= running_threads()  # True
    """
    return frozenset(_idents)
