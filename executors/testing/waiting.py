"""Waiting for something to become true, the only way these tests wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(look: Callable[[], T], what: str = "", *, within_s: float = 60.0, every_s: float = 0.02) -> T:
    """Look again and again until something true comes back, and return it.

    Raises:
        AssertionError: it did not come true in time; names `what`, or what was seen last.
    """
    deadline = time.monotonic() + within_s
    while not (seen := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"Not within {within_s:g} s: {what or getattr(look, '__name__', look)} (saw {seen!r})")
        time.sleep(every_s)
    return seen
