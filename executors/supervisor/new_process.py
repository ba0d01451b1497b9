"""Starts one of our processes as a new Python, because a fork is not always safe.

A fork copies one thread of a process. A lock that another thread held stays locked in the copy forever, and a pool of
threads that a library started has no threads there. So a process that has more than one thread starts others as new
Pythons. A forked process inherits data from its parent. A new process gets them in two ways: as a message in a file
without a name, and as open descriptors, such as the page that a replica shares with its supervisor.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from executors.module_search import new_python, reserve_names, user_folders
from executors.process import private_file


def start_python(
    code: str, message: Mapping[str, Any], shares: Mapping[str, int], *, keeps: Iterable[int] = (), output: int = -1
) -> int:
    """Start a new Python that runs our code; return its pid.

    `os.posix_spawn` is safe where other threads run, and leaves nothing behind that would wait for the process.

    Args:
        code: what it runs. It begins by calling `received`.
        message: what it needs to know, as JSON. It may hold secrets: no other process can read it.
        shares: descriptors that it uses, by name.
        keeps: descriptors that it only holds open, such as locks.
        output: where its stdout and stderr go. -1: where ours do.

    Raises:
        OSError: this machine cannot run another process.

    Example:
        start_python("from executors.backends.local.rank import supervise; supervise()", {…}, {"reply": pipe})
    """
    here = {"sys_path": [os.path.abspath(entry) for entry in sys.path], "user_folders": user_folders()}
    told = private_file(json.dumps({**message, "shares": dict(shares), "here": here}).encode())
    passed = [told, *shares.values(), *keeps]
    actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, output, stream) for stream in (1, 2) if output >= 0]
    command = new_python(code, str(told))
    try:
        for descriptor in passed:
            os.set_inheritable(descriptor, True)
        return os.posix_spawn(sys.executable, command, os.environ, file_actions=actions, setsigmask=())
    finally:
        for descriptor in passed:  # or the next process would have them, too
            os.set_inheritable(descriptor, False)
        os.close(told)


def received() -> tuple[dict[str, Any], dict[str, int]]:
    """Return the message and the descriptors that this new process was started with; `sys.path` is the starter's.

    Later imports find the user's modules, and see none of our arguments in `sys.argv`.
    """
    with open(int(sys.argv[1]), "rb") as file:
        message = json.load(file)
    sys.argv = [""]
    here, shares = message.pop("here"), message.pop("shares")
    for descriptor in shares.values():
        os.set_inheritable(descriptor, False)
    reserve_names(here["user_folders"])
    sys.path[:] = here["sys_path"]
    return message, shares


def describe_threads(threads: list[str], imports: Iterable[str]) -> str:
    """Say why replicas are started as new processes.

    Args:
        threads: names of the threads that a fork would lose.
        imports: what was imported before.
    """
    many = "a thread" if len(threads) == 1 else f"{len(threads)} threads"
    return (
        f"importing {', '.join(imports) or 'our packages'} started {many} ({', '.join(sorted({*threads}))}), which a "
        "fork would lose. So each replica is a new process and imports by itself."
    )
