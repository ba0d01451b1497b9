"""A time limit for calls that have none: a connection that died silently would hold them for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Return what `call` returns or raises, if it does so in time; else it is left to itself, in a daemon thread.

    Raises:
        TimeoutError: the time is over.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            raised.append(error)

    thread = threading.Thread(target=run, name="replicas-call", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not returned:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return returned[0]
