"""The rank's side of the page: it beats and ticks, and answers its supervisor's signals.

It answers one with the stacks of its threads, also where the GIL is held; and the other by raising `HangError`.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
from time import monotonic
from types import FrameType

from executors.errors import HangError
from executors.process import memory_file, own_threads
from executors.replica.shared_page import SharedPage

SIGRTMIN: int = getattr(signal, "SIGRTMIN", 34)  # macOS has none; there only `inline` runs, which is not watched
STACKS_SIGNAL = SIGRTMIN + 5
HANG_SIGNAL = SIGRTMIN + 6
STACKS_NAME = "replicas-stacks"
BEAT_S = 1.0

_page: SharedPage | None = None
_TICK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def be_watched(page: SharedPage) -> None:
    """Begin to beat, and to answer signals. Called by the main thread of a process of our own."""
    global _page
    _page = page
    with contextlib.suppress(OSError, AttributeError):  # a sandbox or a system without it: no stacks
        file = memory_file(STACKS_NAME)
        fcntl.fcntl(file, fcntl.F_SETFL, os.O_APPEND)  # the supervisor truncates it
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True)
        page.stacks_file = file
    signal.signal(HANG_SIGNAL, _raise_hang)
    os.register_at_fork(after_in_child=_be_unwatched)
    page.main_thread = _thread.get_ident()
    page.beat = page.tick = monotonic()
    before = own_threads()
    _thread.start_new_thread(_beat, (page,))
    # Not by that thread: the entrypoint may take the GIL for ever before the thread had its first turn.
    page.beat_thread = max(own_threads() - before, default=0)
    # That thread takes it: the call in which the main thread hangs is not to be interrupted by a look.
    signal.pthread_sigmask(signal.SIG_BLOCK, (STACKS_SIGNAL,))
    page.ready = 1


def end_watch(page: SharedPage) -> None:
    """Be judged no more: the entrypoint has ended."""
    signal.signal(HANG_SIGNAL, signal.SIG_IGN)
    page.unwatched, page.ready = 1, 0


def _beat(page: SharedPage) -> None:
    """Beat once a second, and have the main thread tick."""

    def tick(_: object) -> int:
        page.tick = monotonic()
        return 0

    # Not in the heartbeat's thread: a store that hangs would look like a held GIL.
    pause, called, add = _thread.allocate_lock(), _TICK(tick), ctypes.pythonapi.Py_AddPendingCall
    pause.acquire()
    ticked_at = -1.0
    while True:
        page.beat = monotonic()
        if page.tick != ticked_at:  # else the call before is still to be made
            ticked_at = page.tick
            add(called, None)
        pause.acquire(timeout=BEAT_S)


def _raise_hang(signum: int, frame: FrameType | None) -> None:
    page = _page
    if page is None:
        return
    signal.signal(HANG_SIGNAL, signal.SIG_IGN)
    error = HangError(page.diagnosis)
    if page.n_atomic:
        page.deferred = error
        return
    page.hang_raised_at = monotonic()
    raise error


def _be_unwatched() -> None:
    """Let a helper that the rank forks share nothing, and treat the signals as any process."""
    if _page is not None:
        _page.detach()
        faulthandler.unregister(STACKS_SIGNAL)
        signal.signal(HANG_SIGNAL, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (STACKS_SIGNAL,))
