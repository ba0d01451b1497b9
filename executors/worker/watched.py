"""The rank's part of the watchdog: it writes beats and ticks to the shared page, and handles the supervisor's two
signals. The process of a command that reports for its replica takes this part over from the worker.

If the supervisor asks for it, the thread that beats dumps the stacks of all threads. While a call holds the GIL, that
thread waits, and the supervisor sends the first signal: its handler dumps the stacks without the GIL. If other threads
run Python code at that time, such a dump reads memory that they change, and may end the process. So the signal is the
second choice. At the second signal, `HangError` is raised in the main thread.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
import sys
import time
from time import monotonic
from types import FrameType
from typing import Any

from executors.errors import HangError
from executors.process import HANG_SIGNAL, STACKS_SIGNAL, memory_file, own_threads, start_time
from executors.process.lasting_threads import start_lasting_thread
from executors.replica.shared_page import SharedPage

STACKS_NAME = "replicas-stacks"
BEAT_S, TICK_S = 0.25, 1.0
AGAIN_AFTER_S = 0.01  # a callback that ignored the exception has ended by then

_page: SharedPage | None = None
_TICK = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


def start_watch(page: SharedPage, *, is_speaker: bool = False) -> None:
    """Start to beat and to handle the signals. The main thread of a process that this project starts calls this
    function.

    Args:
        page: the page that the rank shares with its supervisor.
        is_speaker: True in a process of a command that reports in the place of its worker. Default False.
    """
    global _page
    if _page is page:  # in the next attempt of the same process, the thread and the file of the stacks exist already
        signal.signal(HANG_SIGNAL, _raise_hang)
        page.beat = page.tick = monotonic()
        page.ready = 1
        return
    _page = page
    signal.signal(HANG_SIGNAL, _raise_hang)
    file = -1
    page.stacks_file = file  # the page may name the file of a command's worker, until this process has its own file
    # some sandboxes have no files in memory; then there are no stacks
    with contextlib.suppress(OSError, AttributeError):
        opened = page.stacks_descriptor if page.stacks_descriptor >= 0 else memory_file(STACKS_NAME)
        fcntl.fcntl(opened, fcntl.F_SETFL, os.O_APPEND)  # the supervisor truncates the file
        faulthandler.register(STACKS_SIGNAL, file=opened, all_threads=True)
        page.stacks_file = file = opened
    os.register_at_fork(after_in_child=_end_watch_in_child)
    _raise_ignored_errors_again()
    page.main_thread = _thread.get_ident()
    page.beat = page.tick = monotonic()
    before = own_threads()
    start_lasting_thread(_beat, page, (file, _thread.get_ident()), is_speaker)
    # The new thread cannot set this itself: the entrypoint may hold the GIL before that thread runs for the first time.
    page.beat_thread = max(own_threads() - before, default=0)
    # Only the beating thread gets the signal for stacks, so that it does not interrupt a call of the main thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, (STACKS_SIGNAL,))
    page.ready = 1


def be_watched(page: SharedPage) -> bool:
    """Take over the rank's part of the watchdog from the worker, in the process of a command that reports.

    Args:
        page: the page of the replica.

    Returns: True if this process is watched. False: this is not its main thread, which alone can handle signals.
    """
    import threading  # only here, because a process that forks replicas must not import it

    if threading.current_thread() is not threading.main_thread():
        return False
    # This comes first, so that the worker stops its beats. The supervisor sends no signal until the file of the stacks
    # exists.
    page.watched = os.getpid()
    start_watch(page, is_speaker=True)
    return True


def end_watch(page: SharedPage) -> None:
    """End the watchdog's judgment, because the entrypoint has ended.

    Args:
        page: the page that the rank shares with its supervisor.
    """
    signal.signal(HANG_SIGNAL, signal.SIG_IGN)
    page.unwatched, page.ready = 1, 0


def _beat(page: SharedPage, own: tuple[int, int], is_speaker: bool) -> None:
    """Beat and look for a request several times a second, and ask the main thread to tick once a second.

    Args:
        page: the page that the rank shares with its supervisor.
        own: the file for the stacks of this process, and its main thread.
        is_speaker: True in a process of a command that reports in the place of its worker.
    """

    def tick(_: object) -> int:
        page.tick = monotonic()
        return 0

    # The heartbeat has a thread of its own, because a store that hangs would look like a held GIL here.
    pause, called, add = _thread.allocate_lock(), _TICK(tick), ctypes.pythonapi.Py_AddPendingCall
    pause.acquire()
    ticked_at, pid = -1.0, os.getpid()
    mine = None if page.stacks_descriptor < 0 else os.fstat(page.stacks_descriptor)
    while True:
        watched = int(page.watched)
        if watched not in (0, pid):
            # A process of the command beats. If it has ended, another one may have taken over during this look.
            if start_time(watched) is not None or page.watched != watched:
                pause.acquire(timeout=BEAT_S)
                continue
            page.stacks_file, page.main_thread = own
            page.watched = 0
        elif is_speaker and not watched:
            # The worker has found the end of the speaker before this one, and taken over at the same time as this one.
            page.stacks_file, page.main_thread = own
            page.watched = pid
        page.beat = now = monotonic()
        if mine is not None and not _is_file(page.stacks_descriptor, mine):
            # The supervisor cannot see that the descriptor is now another file. A dump would be written into that file.
            page.stacks_file, own, mine = -1, (-1, own[1]), None
        if page.stacks_wanted:
            with contextlib.suppress(ValueError):  # the number of the file is -1
                faulthandler.dump_traceback(int(page.stacks_file), all_threads=True)
            page.stacks_wanted = 0
        # No new call is added while the main thread has not made the last one.
        if page.tick != ticked_at and now - page.tick >= TICK_S:
            ticked_at = page.tick
            add(called, None)
        pause.acquire(timeout=BEAT_S)


def _is_file(descriptor: int, expected: os.stat_result) -> bool:
    """Return True if a descriptor still is the expected file, and not closed or another file by now."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), expected)
    return False


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


def _raise_ignored_errors_again() -> None:
    """Raise `HangError` again if Python ignores it, as in a finalizer that joins the processes of a data loader.

    Otherwise the entrypoint would continue without the error, and the supervisor would kill it after the grace.
    """
    before = sys.unraisablehook

    def hook(ignored: Any) -> None:
        if not isinstance(ignored.exc_value, HangError):
            before(ignored)
            return
        signal.signal(HANG_SIGNAL, _raise_hang)
        _thread.start_new_thread(_send_again, ())  # Python would also ignore an exception that is raised in this hook

    sys.unraisablehook = hook


def _send_again() -> None:
    time.sleep(AGAIN_AFTER_S)
    # The handler differs if the entrypoint has ended, or if the supervisor has sent the signal again.
    if signal.getsignal(HANG_SIGNAL) is _raise_hang:
        os.kill(os.getpid(), HANG_SIGNAL)


def _end_watch_in_child() -> None:
    """In a forked helper of the rank, detach from the page, and restore the defaults of the signals."""
    if _page is not None:
        _page.detach()
        faulthandler.unregister(STACKS_SIGNAL)
        signal.signal(HANG_SIGNAL, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (STACKS_SIGNAL,))
