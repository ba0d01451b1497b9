"""Waiting for replicas, over any executor's `poll`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from executors.protocol import ReplicaStatus

FIRST_PAUSE_S = 0.01
LONGEST_PAUSE_S = 0.5

H = TypeVar("H")


def as_status(text: Any) -> ReplicaStatus:
    """Read what an executor's `poll` said; a word of its own that is not ours counts as running, never as success."""
    try:
        return ReplicaStatus(str(text))
    except ValueError:
        return ReplicaStatus.RUNNING


def wait_until_terminal(
    poll: Callable[[H], Any],
    handles: Sequence[H],
    timeout_s: float | None,
    *,
    each: Callable[[Callable[[H], Any], Sequence[H]], Iterable[Any]] = map,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Poll with growing pauses until every handle's status is terminal; False if the time was over first.

    Args:
        each: polls several handles; a map.
    """
    deadline = None if timeout_s is None else clock() + timeout_s
    pause_s = FIRST_PAUSE_S
    waiting = list(handles)
    while True:
        told = zip(waiting, each(poll, waiting), strict=True)
        waiting = [handle for handle, status in told if not as_status(status).is_terminal]
        if not waiting:
            return True
        left_s = pause_s if deadline is None else deadline - clock()
        if left_s <= 0:
            return False
        sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
