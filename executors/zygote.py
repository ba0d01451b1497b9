"""A clean process that imports what replicas need once, and forks it for every run.

Forking from the launcher itself is not safe: if it ever ran a multi-threaded torch operation, the child's first one
hangs for ever. So one child per launcher imports the preload list, nothing else, runs no user code, stays
single-threaded, and forks: a supervisor for each launch, and a throw-away child for each check of an entrypoint.

It keeps none of the launcher's descriptors but one socket, and ends with its launcher, which it watches by pidfd:
the socket's end would be hidden by any helper that the launcher forked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

from executors.entrypoint import check_call, load_entrypoint
from executors.errors import EntrypointArgumentsError, EntrypointError
from executors.local_launch import LocalLaunch
from executors.process import die_with_parent
from executors.supervisor import become_supervisor, fork

LENGTH = struct.Struct("!Q")


def send(connection: socket.socket, message: Any) -> None:
    """Send one JSON message."""
    data = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> Any:
    """Receive one JSON message.

    Raises:
        EOFError: the other side is gone.
    """
    (length,) = LENGTH.unpack(_receive_exactly(connection, LENGTH.size))
    return json.loads(_receive_exactly(connection, length))


def serve(descriptor: int, launcher: int, preload: list[str]) -> None:
    """Be the zygote: import, then answer requests until the launcher is gone."""
    connection = socket.socket(fileno=descriptor)
    launcher_pidfd = os.pidfd_open(launcher)
    if os.getppid() != launcher:
        return  # it ended before we could watch it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the launcher's business
    wakeup, wakeup_writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    problem = _import_all(preload)
    gc.freeze()  # what is shared with the children stays shared: their collector does not touch it
    private = [connection.fileno(), wakeup, wakeup_writer]
    poller = select.poll()
    for watched in (connection.fileno(), launcher_pidfd, wakeup):
        poller.register(watched, select.POLLIN)
    while True:
        ready = {number for number, _ in poller.poll()}
        if wakeup in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup, 4096)
            _reap()
        if launcher_pidfd in ready:
            return
        if connection.fileno() in ready:
            try:
                request = receive(connection)
                if problem is not None:
                    send(connection, {"error": problem, "rank": None})
                elif request["do"] == "launch":
                    send(connection, _launch(request["launch"], launcher_pidfd, private))
                elif request["do"] == "check":
                    send(connection, _check(request, [*private, launcher_pidfd]))
                else:
                    send(connection, {})
            except (EOFError, ConnectionError):
                return


def _launch(record: dict[str, Any], launcher_pidfd: int, private: list[int]) -> Any:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    if fork() == 0:
        _close([*private, reader])
        become_supervisor(LocalLaunch.from_json(record), launcher_pidfd, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    return json.loads(answer) if answer else {"error": "its supervisor ended before it could start it", "rank": None}


def _check(request: dict[str, Any], private: list[int]) -> Any:
    """Load an entrypoint and bind its arguments in a child that is thrown away with all that it started."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = fork()
    if pid == 0:
        _close([*private, reader])
        _be_check(request, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.readline()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    return (
        json.loads(answer)
        if answer
        else {
            "kind": "import",
            "error": f"Entrypoint {request['entrypoint']!r}: the process that imported it ended.",
        }
    )


def _be_check(request: dict[str, Any], writer: int) -> NoReturn:
    answer: dict[str, str] = {}
    try:
        os.setsid()
        die_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(request["environ"])
        sys.path[:] = request["sys_path"]
        os.chdir(request["cwd"])
        function = load_entrypoint(request["entrypoint"])
        check_call(function, request["args"], f"Entrypoint {request['entrypoint']!r}")
    except EntrypointArgumentsError as error:
        answer = {"kind": "arguments", "error": str(error)}
    except EntrypointError as error:
        answer = {"kind": "import", "error": str(error)}
    except BaseException as error:
        answer = {
            "kind": "import",
            "error": f"Entrypoint {request['entrypoint']!r} cannot be loaded. {_trace_of(error)}",
        }
    finally:
        os.write(writer, (json.dumps(answer) + "\n").encode())
        os._exit(0)


def _trace_of(error: BaseException) -> str:
    import traceback

    return "".join(traceback.format_exception(error)).rstrip()


def _import_all(preload: list[str]) -> str | None:
    """Import the preload list; return what went wrong, for the launcher to say."""
    for module in preload:
        try:
            importlib.import_module(module)
        except ImportError as error:
            return f"preload: cannot import {module!r}: {error}"
    return None


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _close(descriptors: list[int]) -> None:
    signal.set_wakeup_fd(-1)
    for descriptor in descriptors:
        os.close(descriptor)


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = connection.recv(min(length - len(received), 1 << 20))
        if not part:
            raise EOFError("The other side closed the connection.")
        received += part
    return bytes(received)
