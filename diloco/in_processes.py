"""Calls a function with several arguments, in processes that end with this one. The examples that measure use it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def in_processes(act: Callable[[T], R], arguments: Iterable[T], processes: int) -> Iterator[R]:
    """Call a function with each argument, and yield each result as soon as it is there.

    The processes end with this one, however it ends, and Ctrl-C ends them at once. A call that fails does not keep the
    others from being made: its error is printed, and raised after the last one.

    Args:
        act: the function, which another process can import.
        arguments: its arguments, in the order in which calls begin.
        processes: the number of calls at a time, at least 1.

    Raises:
        BrokenProcessPool: one of the processes was killed. No further call is made.

    Example:
        for loss in in_processes(train, plans, processes=2): …
    """
    errors: list[BaseException] = []
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_end_with_the_parent)
    try:
        calls = {pool.submit(act, argument): argument for argument in arguments}
        for call in as_completed(calls):
            error = call.exception()
            if isinstance(error, BrokenExecutor):
                raise error
            if error is None:
                yield call.result()
            else:
                errors.append(error)
                print(f"{calls[call]} failed, and the others continue: {error!r}", file=sys.stderr, flush=True)
    finally:  # after an interruption or an error, no further call begins
        pool.shutdown(cancel_futures=True)
    if errors:
        raise errors[0]


def _end_with_the_parent() -> None:
    """Let Ctrl-C end this worker without a traceback, and end it when its parent has ended."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    Thread(target=_watch_the_parent, name="watches the parent", daemon=True).start()


def _watch_the_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
