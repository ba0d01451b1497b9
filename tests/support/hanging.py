"""Ways in which a process can hang, and ranks that hang in each of them under a watchdog like a supervisor's."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import math
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from executors.process import OPENS_FILES_OF_OTHERS, descendants, kill_descendants, private_file
from executors.replica import Replica
from executors.replica.shared_page import SharedPage
from executors.settings.policy import HangLimits
from executors.supervisor.watchdog import Defaults, Watchdog, WatchdogReport
from executors.worker.watched import start_watch
from support.new_runs import run_spec

GRACE_S = 1.0


def sleep_with_the_gil() -> None:
    ctypes.PyDLL(None).sleep(600)


def search_back_and_forth() -> None:
    re.match("(a+)+$", "a" * 50 + "b")


def take_a_lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def take_a_mutex_twice(lib: ctypes.CDLL) -> None:
    mutex = ctypes.create_string_buffer(64)
    lib.pthread_mutex_init(mutex, None)
    lib.pthread_mutex_lock(mutex)
    lib.pthread_mutex_lock(mutex)


def loop_for_ever() -> None:
    while True:
        pass


def receive_nothing() -> None:
    here, _there = socket.socketpair()
    here.recv(1)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def poll_for_ever() -> None:
    while True:
        time.sleep(0.01)


def wait_for_a_child_that_waits() -> None:
    """Fork while another thread holds a lock.

    The child waits for the lock forever, as happens in libraries with threads.
    """
    lock = threading.Lock()
    lock.acquire()
    pid = os.fork()
    if pid == 0:
        lock.acquire()
    os.waitpid(pid, 0)


def wait_for_a_worker_that_waits() -> None:
    """Hang like a data loader whose worker process reads from a pipe without a writer."""
    asked, answered = multiprocessing.Pipe(), multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=asked[1].recv, daemon=True)
    worker.start()
    answered[0].recv()


def import_a_module_that_waits() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "waits_at_import.py").write_text("import time\ntime.sleep(600)\n")
        sys.path.insert(0, folder)
        importlib.import_module("waits_at_import")


HANGS: Mapping[str, Callable[[], None]] = {
    "sleep with the GIL": sleep_with_the_gil,
    "regular expression": search_back_and_forth,
    "lock": take_a_lock_twice,
    "mutex with the GIL": lambda: take_a_mutex_twice(ctypes.PyDLL(None)),
    "mutex": lambda: take_a_mutex_twice(ctypes.CDLL(None)),
    "loop": loop_for_ever,
    "recv": receive_nothing,
    "stopped": stop,
    "poll": poll_for_ever,
    "fork": wait_for_a_child_that_waits,
    "data loader": wait_for_a_worker_that_waits,
    "import": import_a_module_that_waits,
}
COMPUTES = ("regular expression", "loop")
"""The hangs that keep a processor busy, so they look like work from outside."""
SHORT = Defaults(idle_s=4.0, unknown_idle_s=8.0, active_s=14.0, call_s=4.0, kill_after_s=2.0)
"""Shortened defaults: an active rank may continue for longer than an idle rank."""


@dataclass
class Watched:
    """A rank in a separate process, and the observations of its supervisor."""

    page: SharedPage
    pid: int
    watchdog: Watchdog
    reports: list[WatchdogReport] = field(default_factory=list)
    exit_code: int | None = None
    ended_at: float = math.inf
    """The time of the end, by `time.monotonic`."""


def start(entrypoint: Callable[[Replica], None], limits: str, defaults: Defaults = SHORT) -> Watched:
    """Fork a watched rank. Its exit code is 3 after HangError, and 4 after another exception."""
    page = SharedPage()
    if not OPENS_FILES_OF_OTHERS:
        page.stacks_descriptor = private_file()
    pid = os.fork()
    if pid == 0:
        code = 4
        try:
            start_watch(page)
            entrypoint(Replica(3, 8, "RUN", 0, "memory://hanging", page=page))
            code = 0
        except BaseException as error:  # noqa: BLE001 - of a process that ends here
            code = 3 if type(error).__name__ == "HangError" and str(error) == page.diagnosis else 4
        finally:
            kill_descendants(os.getpid())  # the worker does the same when it ends
            os._exit(code)
    watchdog = Watchdog(
        page,
        pid,
        HangLimits.parse(limits),
        ends=True,
        term_grace_s=GRACE_S,
        spec=run_spec("RUN", "memory://hanging", "00", 8, (3,)),
        rank=3,
        defaults=defaults,
    )
    return Watched(page, pid, watchdog)


def watch(ranks: list[Watched], *, for_s: float = 60.0) -> None:
    """Act as the supervisor of some ranks until all have ended, or until a time limit."""
    began = time.monotonic()
    while time.monotonic() - began < for_s and (living := [rank for rank in ranks if rank.exit_code is None]):
        time.sleep(0.01)
        for rank in living:
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid:
                rank.exit_code, rank.ended_at = os.waitstatus_to_exitcode(status), time.monotonic()
            elif (report := rank.watchdog.look(time.monotonic())) is not None:
                rank.reports.append(report)
                rank.page.n_stacks += report.stacks is not None
                if report.is_kill:
                    kill(rank)


def kill(rank: Watched) -> None:
    """End a rank as its supervisor does, with the processes that it started."""
    below = descendants(rank.pid)
    os.kill(rank.pid, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
