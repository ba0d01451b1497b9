"""Starts one of our processes as a new Python interpreter, because a fork is not always safe.

A fork copies only one thread of a process. A lock that another thread held stays locked in the copy forever, and thread
pools of libraries have no threads there. So a process with several threads starts other processes as new Python
interpreters. A forked process inherits the data of its parent. A new interpreter gets data in two ways: as a message in
a file without a name, and as open descriptors, such as the page that a replica shares with its supervisor.
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
    code: str,
    message: Mapping[str, Any],
    shares: Mapping[str, int],
    *,
    keeps: Iterable[int] = (),
    output: int = -1,
    marks: Mapping[str, str] | None = None,
) -> int:
    """Start a new Python process that runs our code; return its pid.

    `os.posix_spawn` is safe while other threads run, and needs no thread that waits for the process.

    Args:
        code: the Python code that it runs. The code begins by calling `receive_message`.
        message: the data that it needs, as JSON. It may hold secrets, because no other process can read it.
        shares: descriptors that it uses, by name.
        keeps: descriptors that it only holds open, such as locks. Default: none.
        output: the descriptor for its stdout and stderr. -1, the default: stdout and stderr of this process.
        marks: the variables from `mark_child`, if its descendants must be found. None, the default: it gets none.

    Raises:
        OSError: this machine cannot run another process.

    Example:
        start_python("from executors.backends.local.rank import supervise; supervise()", {…}, {"reply": pipe})
    """
    here = {"sys_path": [os.path.abspath(entry) for entry in sys.path], "user_folders": user_folders()}
    message_file = private_file(json.dumps({**message, "shares": dict(shares), "here": here}).encode())
    passed = [message_file, *shares.values(), *keeps]
    actions: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, output, stream) for stream in (1, 2) if output >= 0]
    command = new_python(code, str(message_file))
    try:
        for descriptor in passed:
            os.set_inheritable(descriptor, True)
        environ = {**os.environ, **(marks or {})}
        return os.posix_spawn(sys.executable, command, environ, file_actions=actions, setsigmask=())
    finally:
        for descriptor in passed:  # otherwise the next process that this process starts would inherit the descriptors
            os.set_inheritable(descriptor, False)
        os.close(message_file)


def receive_message() -> tuple[dict[str, Any], dict[str, int]]:
    """Return the message and the descriptors that the starter has passed to this new process.

    Afterwards `sys.path` is the starter's, so that imports find the user's modules, and `sys.argv` is empty.
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
    """Return the sentence that explains why replicas are started as new processes.

    Args:
        threads: names of the threads that a fork would lose.
        imports: the names of the modules that were imported before.
    """
    many = "a thread" if len(threads) == 1 else f"{len(threads)} threads"
    return (
        f"importing {', '.join(imports) or 'our packages'} started {many} ({', '.join(sorted({*threads}))}), which a "
        "fork would lose. So each replica is a new process and imports by itself."
    )
