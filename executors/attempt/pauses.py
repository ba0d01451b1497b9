"""Waits for a condition by checking it repeatedly, with growing pauses."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from executors.protocol import as_status

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.5
H = TypeVar("H")


def pauses(first_s: float = FIRST_PAUSE_S, longest_s: float = LONGEST_PAUSE_S) -> Iterator[float]:
    """Yield the seconds between one check and the next, which grow from the first to the longest pause.

    Args:
        first_s: the first pause. Default 0.01.
        longest_s: the longest pause. Default 0.5.
    """
    pause_s = first_s
    while True:
        yield pause_s
        pause_s = min(pause_s * 1.5, longest_s)


def wait_until_terminal(poll: Callable[[H], Any], handles: Sequence[H], timeout_s: float | None) -> bool:
    """Poll with growing pauses until the status of every handle is terminal.

    Args:
        poll: returns the status of a handle.
        handles: the handles.
        timeout_s: the longest wait in seconds. None: there is none.

    Returns: False if the time passed first.
    """
    waiting = list(handles)

    def all_have_ended() -> bool:
        waiting[:] = [handle for handle in waiting if not as_status(poll(handle)).is_terminal]
        return not waiting

    return wait_until(all_have_ended, timeout_s, pauses())


def wait_until(is_over: Callable[[], bool], timeout_s: float | None, pauses: Iterator[float]) -> bool:
    """Check a condition, again after each pause, until it is true.

    Args:
        is_over: the condition.
        timeout_s: the longest wait in seconds. None: there is none.
        pauses: the pauses in seconds, without end.

    Returns: False if the time passed first.
    """
    end = math.inf if timeout_s is None else time.monotonic() + timeout_s
    for pause_s in pauses:
        if is_over():
            return True
        left_s = end - time.monotonic()
        if left_s <= 0:
            return False
        time.sleep(min(pause_s, left_s))
    raise AssertionError("pauses never end")
