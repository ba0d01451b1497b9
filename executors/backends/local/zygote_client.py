"""ZygoteClient: the launcher's side of the zygote. It starts the zygote, sends requests, and replaces a dead one."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

from executors.backends.local.request import receive_json, send_json
from executors.errors import BackendError
from executors.module_search import new_python, user_folders
from executors.process import make_lifeline, signal_name

EXIT_S = 5.0  # the longest time between the end of its connection and the end of the process

_START = """
import gc
gc.disable()  # importing torch makes a million objects and no garbage; collections would take a quarter of the time
from executors.backends.local.zygote import main
main()
"""


class ZygoteClient:
    """A connection to one zygote, which is started when it is first needed. It is safe for threads.

    Args:
        preload: the modules that the zygote imports.

    Example:
        zygote(("torch",)).request({"do": "launch", "launch": launch.to_json()})
    """

    def __init__(self, preload: tuple[str, ...]) -> None:
        self._preload = preload
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._environ: dict[str, str] | None = None

    @property
    def has_this_environment(self) -> bool:
        """True if the zygote made its imports in the environment that this process has now."""
        return self._environ in (None, dict(os.environ))

    def start(self) -> None:
        """Start the zygote, and do not wait for its imports."""
        with self._lock:
            self._connected()

    def request(self, message: dict[str, Any]) -> Any:
        """Send a request, and return the answer.

        Args:
            message: the request, as JSON values.

        Raises:
            BackendError: the zygote cannot be started, or ended before it answered.
        """
        with self._lock:
            if message["do"] == "launch":
                # A launch may have begun when its answer is lost, so it is never sent twice. A zygote that was just
                # killed may still accept a message. So a question that may be sent twice comes first.
                answer = self._ask({"do": "answer"}, tries=2)
                return answer if "error" in answer else self._ask(message, tries=1)
            return self._ask(message, tries=2)

    def _ask(self, message: dict[str, Any], tries: int) -> Any:
        connection = self._connected()
        try:
            send_json(connection, message)
            return receive_json(connection)
        except (EOFError, ConnectionError) as error:
            if tries > 1:
                self._drop()
                return self._ask(message, tries - 1)
            ended = self._ended()
            self._drop()
            raise BackendError(f"The process that forks replicas {ended}.") from error
        except BaseException:
            self._drop()  # after a Ctrl-C in the middle of an answer, the next request must not read its rest
            raise

    def _ended(self) -> str:
        """Return a text on how the zygote ended. It has closed its side of the connection."""
        assert self._process is not None
        try:
            code = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code == -signal.SIGKILL:
            return "was killed by SIGKILL. Perhaps memory ran out"
        how = f"ended with exit code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
        imports = ", ".join(self._preload)
        return f"{how}. Perhaps by what it imports: {imports}" if imports else how

    def _connected(self) -> socket.socket:
        forked = self._owner != os.getpid()  # a forked process shares its parent's socket, and must not use it
        dead = self._process is None or (not forked and self._process.poll() is not None)
        if self._connection is None or forked or dead:
            self._drop()
            self._spawn()
        assert self._connection is not None
        return self._connection

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            paths = [os.path.abspath(path) for path in sys.path]  # an empty path is the working directory of now
            self._environ = dict(os.environ)
            reader = _own_lifeline()
            argument = json.dumps([theirs.fileno(), reader, os.getpid(), paths, user_folders(), list(self._preload)])
            try:
                self._process = subprocess.Popen(
                    new_python(_START, argument),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *([] if reader < 0 else [reader])],
                )
            except OSError as error:  # for example, the limit on processes is reached
                ours.close()
                raise BackendError(f"The process that forks replicas cannot be started: {error}.") from error
        self._connection = ours
        self._owner = os.getpid()
        atexit.register(self._drop)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
        if self._process is not None and self._owner == os.getpid():
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process.wait()
        self._connection = self._process = None


_lifeline: tuple[int, int, int] = (0, -1, -1)
"""The process that made it, and the two ends of a pipe whose end shows the end of that process to others."""


def _own_lifeline() -> int:
    """Return the reading end of this process's lifeline. -1: this system needs none.

    The lifeline stays when a zygote is replaced, because the supervisors that the old one has started watch it.
    """
    global _lifeline
    owner, *ends = _lifeline
    if owner != os.getpid():
        for end in ends:  # this process is a fork, which must not keep its parent's lifeline
            if end >= 0:
                os.close(end)
        _lifeline = (os.getpid(), *make_lifeline())
    return _lifeline[1]


_clients: dict[tuple[str, ...], ZygoteClient] = {}
_clients_lock = threading.Lock()


def zygote(preload: tuple[str, ...]) -> ZygoteClient:
    """Return the zygote of this process that has a preload list.

    Args:
        preload: the modules that the zygote imports.

    Example:
        zygote(("torch",)).start()
    """
    with _clients_lock:
        return _clients.setdefault(preload, ZygoteClient(preload))
