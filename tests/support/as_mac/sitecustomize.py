"""Hides from Python the functions and constants that macOS does not have, if `AS_MAC` is set. Python imports this file
at its start, from PYTHONPATH.

The standard library's own choices by `sys.platform` stay those of Linux: the modules that make them are imported first.
`platform.system()` keeps its answer, because torch would look for libraries of macOS.
"""

from __future__ import annotations

import os
import sys
from typing import Any

HIDDEN = {
    "os": {
        "pipe2": "macOS makes a pipe and sets its flags in two calls",
        "pidfd_open P_PIDFD": "macOS has no descriptors of processes",
        "memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING": "macOS has no files in memory",
        "sched_getaffinity sched_setaffinity": "macOS binds no process to cores",
        "sched_getscheduler sched_setscheduler sched_getparam sched_setparam": "macOS has no policies of scheduling",
        "O_TMPFILE": "a new file of macOS has a name",
        "O_PATH O_DIRECT O_LARGEFILE O_NOATIME O_RSYNC": "open(2) of macOS lacks these flags",
        "eventfd eventfd_read eventfd_write EFD_CLOEXEC EFD_NONBLOCK": "macOS has kqueue instead",
        "timerfd_create timerfd_settime timerfd_gettime": "macOS has kqueue instead",
        "posix_fadvise posix_fallocate copy_file_range splice fdatasync": "macOS has other calls for it",
        "getxattr setxattr listxattr removexattr": "Python offers them on Linux alone",
        "getrandom GRND_NONBLOCK": "macOS has getentropy; os.urandom works on both",
        "getresuid getresgid setresuid setresgid": "macOS has no saved set-user-ID to be read",
        "setns unshare CLONE_NEWNS": "macOS has no namespaces",
        "waitid waitid_result": "Python does not offer it on macOS before 3.13",
    },
    "signal": {
        "SIGRTMIN SIGRTMAX": "macOS has no real-time signals",
        "sigtimedwait sigwaitinfo": "macOS lacks these calls",
        "SIGPWR SIGPOLL SIGSTKFLT": "macOS has no such signals",
        "pidfd_send_signal": "macOS has no descriptors of processes",
    },
    "select": {"epoll": "macOS has kqueue instead; asyncio keeps the selector that it chose, with its constants"},
    "socket": {
        "SO_PEERCRED AF_NETLINK AF_PACKET SO_BINDTODEVICE SO_MARK": "macOS has other ways",
        "SOCK_CLOEXEC SOCK_NONBLOCK": "socket(2) of macOS takes no flags",
        "TCP_USER_TIMEOUT TCP_KEEPIDLE TCP_QUICKACK": "macOS has TCP_KEEPALIVE",
    },
    "mmap": {"MAP_POPULATE MAP_STACK MADV_HUGEPAGE MADV_DONTFORK": "mmap(2) of macOS lacks them"},
    "resource": {"prlimit RUSAGE_THREAD": "a process of macOS changes its own limits alone"},
    "fcntl": {"F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS F_OFD_GETLK F_OFD_SETLK F_NOTIFY": "commands of Linux alone"},
    "time": {"CLOCK_BOOTTIME CLOCK_TAI pthread_getcpuclockid": "clocks of Linux alone"},
}
"""For each module: the names that it does not have on macOS, and the reason."""
GIVEN = {"signal": {"SIGINFO": 29, "SIGEMT": 16}, "fcntl": {"F_GETPATH": 50}}
"""For each module: the constants that it has on macOS alone. The signals have numbers that Linux hardly uses."""
NOT_INSTALLED = {"inotify_simple": "pyproject.toml asks for it on Linux alone", "_inotify_simple": "its other name"}


def give_get_path() -> None:
    """Make `fcntl` know F_GETPATH, which returns the path of an open file on macOS."""
    import fcntl

    original = fcntl.fcntl

    def answer(file: Any, command: int, argument: Any = 0) -> Any:
        if command != GIVEN["fcntl"]["F_GETPATH"]:
            return original(file, command, argument)
        number = file if isinstance(file, int) else file.fileno()
        return os.readlink(f"{os.environ['AS_MAC_PROC']}/self/fd/{number}").encode().ljust(len(argument), b"\0")

    vars(fcntl)["fcntl"] = answer


def hide() -> None:
    """Make this process's Python look like macOS's."""
    import asyncio
    import ctypes.util
    import importlib
    import multiprocessing
    import platform
    import selectors
    import shutil
    import ssl
    import subprocess
    import sysconfig
    import tempfile
    import urllib.request
    import uuid
    import webbrowser

    assert all((asyncio, ctypes.util, multiprocessing, selectors, shutil)), (
        "these modules are imported so that they choose their implementation"
    )
    assert all((ssl, subprocess, urllib.request, uuid, webbrowser)), (
        "these modules are imported so that they choose their implementation"
    )
    try:
        # psutil reads another /proc here. On a Mac it asks the kernel, and the answers are the same.
        import psutil

        vars(psutil)["PROCFS_PATH"] = os.environ["AS_MAC_PROC"]
    except ImportError:
        pass  # this Python is not the one of the tests
    sysconfig.get_config_vars()
    platform.system()
    vars(tempfile)["_O_TMPFILE_WORKS"] = False
    for module, reasons in HIDDEN.items():
        names = vars(importlib.import_module(module))
        for name in " ".join(reasons).split():
            names.pop(name, None)
    for module, constants in GIVEN.items():
        vars(importlib.import_module(module)).update(constants)
    give_get_path()
    for name in (*NOT_INSTALLED, *os.environ.get("AS_MAC_LACKS", "").split()):
        sys.modules[name] = None  # type: ignore[assignment]  # an import of it is an ImportError
    sys.platform = "darwin"


if os.environ.get("AS_MAC"):
    hide()
