"""The zygote: a clean process that imports the preloaded modules once, and is forked for each launch.

The launcher itself cannot be forked safely. If it ever ran a torch operation in several threads, the first such
operation in the child would hang for ever. So each launcher has one child, the zygote. It imports the preload list and
runs no code of the user. It forks a supervisor for each launch, and a short-lived child for each check of an
entrypoint. If an imported module keeps a thread, a fork would lose the thread, and the child would hang. Then each
child is a new Python process instead. On a system where no process may fork, the zygote imports nothing, and each
child is a new Python process, too.

The zygote keeps one socket of the launcher, and on some systems the launcher's lifeline. It watches its launcher by a
descriptor, and ends with it. The end of the socket would not be enough, because a process that the launcher forked may
keep it open.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any, NoReturn

from executors.backends.local.preload import import_named, measure_imports
from executors.backends.local.rank import GUARD_S, become_supervisor
from executors.backends.local.request import LocalLaunch, adopt, receive_json, send_json
from executors.errors import EntrypointArgumentsError, EntrypointError, MissingDependencyError
from executors.module_search import reserve_names
from executors.process import (
    ADOPTS_ORPHANS,
    CAN_FORK,
    die_with_parent,
    fork,
    mark_child,
    private_file,
    threads_lost_by_a_fork,
    wakeup_pipe,
    watch_process,
)
from executors.replica import leave_process_group
from executors.supervisor.new_process import describe_threads, receive_message, start_python
from executors.task.arguments import check_call
from executors.task.entrypoint import command_for, load_entrypoint
from executors.worker.failure import last_error

SUPERVISE = "from executors.backends.local.rank import supervise; supervise()"
BE_CHECK = "from executors.backends.local.zygote import be_check; be_check()"
BE_GUARD = "from executors.backends.local.guard import be_guard; be_guard()"
PARENT_LOOK_MS = 1000
MAX_PRINTED = 1 << 16  # the bytes that are read of the output of an entrypoint that is checked


def main() -> None:
    """Run the zygote that the first argument of this process describes.

    Example:
        python -c "from executors.backends.local.zygote import main; main()" '[3, -1, 4711, [], [], ["torch"]]'
    """
    descriptor, lifeline, launcher, paths, users, preload = json.loads(sys.argv[1])
    sys.argv = [""]  # modules that are imported later must not see our arguments
    reserve_names(users)
    sys.path[:] = paths
    serve(descriptor, lifeline, launcher, preload)


def serve(descriptor: int, lifeline: int, launcher: int, preload: list[str]) -> None:
    """Import the preload list, and then answer requests until the launcher has ended.

    Args:
        descriptor: the socket to the launcher.
        lifeline: the reading end of the launcher's lifeline. -1: this system needs none.
        launcher: the pid of the launcher.
        preload: the modules to import.

    Example:
        serve(3, -1, os.getppid(), ["torch"])
    """
    connection = socket.socket(fileno=descriptor)
    if lifeline >= 0:
        os.set_inheritable(lifeline, False)
    launcher_end = watch_process(launcher, lifeline)
    if os.getppid() != launcher:
        return  # the launcher ended before this process could watch it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C in the terminal is handled by the launcher
    wakeup, wakeup_writer = wakeup_pipe()
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    leave_process_group()  # a preloaded library may read these variables once, when it is imported
    problem = _import_all(preload) if CAN_FORK else _find_all(preload)
    gc.freeze()  # so that the collectors of children do not write to shared pages, which would copy them
    private = [connection.fileno(), wakeup, wakeup_writer]
    poller = select.poll()
    for watched in (connection.fileno(), launcher_end, wakeup):
        poller.register(watched, select.POLLIN)
    while True:
        # A process that the launcher forked keeps a lifeline open. So without pidfds, the parent is asked as well.
        ready = {number for number, _ in poller.poll(None if CAN_FORK else PARENT_LOOK_MS)}
        if os.getppid() != launcher:
            return
        if wakeup in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wakeup, 4096)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        if launcher_end in ready:
            return
        if connection.fileno() in ready:
            try:
                request = receive_json(connection)
                if problem is not None:
                    send_json(connection, {"error": problem, "rank": None})
                    return  # the next request starts a new zygote, in case the problem is solved by then
                send_json(connection, _Starter(launcher_end, private, preload).answer(request))
            except (EOFError, ConnectionError):
                return


def _import_all(preload: list[str]) -> str | None:
    """Import the preload list. Return the message of an error, which the launcher raises."""
    for name in preload:
        try:
            import_named(name)
        except BaseException as error:  # any error: a missing shared library, for example, is an OSError
            return f"preload: cannot import {name!r}: {type(error).__name__}: {error}"
    return None


def _find_all(preload: list[str]) -> str | None:
    """Find the preload list, which replicas will import. Return the message of an error, which the launcher raises."""
    for name in preload:
        if find_spec(name.partition(":")[0].partition(".")[0]) is None:
            return f"preload: cannot import {name!r}: it is not installed"
    return None


class _Starter:
    """Starts supervisors and checks for a launcher. They are forks, or new Pythons if a fork is not safe.

    Args:
        launcher_end: a descriptor that is readable when the launcher has ended.
        private: other descriptors of this process, which a child must close.
        preload: the modules that this process has imported.
    """

    def __init__(self, launcher_end: int, private: list[int], preload: list[str]) -> None:
        self._launcher_end = launcher_end
        self._private = private
        self._preload = preload
        # Counted at each request, because a library may start its threads some time after its import.
        self._threads = threads_lost_by_a_fork()
        self._forks = CAN_FORK and not self._threads

    def answer(self, request: dict[str, Any]) -> Any:
        """Carry out a request, and return the answer for the launcher.

        Args:
            request: the request. `do` is "launch", "check" or "answer".
        """
        try:
            if request["do"] == "launch":
                return self._launch(request["launch"])
            if request["do"] == "check":
                return self._check(request)
        except BlockingIOError as error:  # fork raises it if the limit on processes is reached
            return {"error": f"{error}: `ulimit -u` or its container allows no more processes", "rank": None}
        except OSError as error:
            return {"error": str(error), "rank": None}
        return {}

    def _launch(self, record: dict[str, Any]) -> Any:
        def be(reply: int) -> NoReturn:
            become_supervisor(LocalLaunch.from_json(record), self._launcher_end, reply)

        marks, message = mark_child(), {"launch": {**record, "preload": self._preload}}
        reader, writer = (-1, -1) if ADOPTS_ORPHANS else os.pipe()
        try:
            if not ADOPTS_ORPHANS:
                wait_s = LocalLaunch.from_json(record).term_grace_s + GUARD_S
                start_python(BE_GUARD, {"marks": marks, "wait_s": wait_s}, {"supervisor": reader})
            _, answer = self._start(be, [], SUPERVISE, message, marks, keeps=() if writer < 0 else (writer,))
        finally:
            for end in (reader, writer):
                if end >= 0:
                    os.close(end)
        answer = answer or {"error": "its supervisor ended before it could start it", "rank": None}
        return {**answer, "note": describe_threads(self._threads, self._preload)} if self._threads else answer

    def _check(self, request: dict[str, Any]) -> Any:
        """Load an entrypoint and bind its arguments in a child. Then kill the child and the processes in its group."""
        pid, answer = self._start(
            lambda reply: _be_check(request, reply), [self._launcher_end], BE_CHECK, {"request": request}
        )
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        ended = f"Entrypoint {request['entrypoint']!r}: the process that imported it ended."
        return {"kind": "import", "error": ended} if answer is None else answer

    def _start(
        self,
        be: Callable[[int], NoReturn],
        close: list[int],
        code: str,
        message: dict[str, Any],
        marks: Mapping[str, str] | None = None,
        keeps: Iterable[int] = (),
    ) -> tuple[int, Any]:
        """Start a child that answers with one line of JSON.

        Args:
            be: is called in a forked child with the descriptor for its answer.
            close: more descriptors that a forked child must close.
            code: the code that a new Python process runs instead.
            message: the input of this code.
            marks: the variables from `mark_child` for a new Python. None, the default: it gets none.
            keeps: descriptors that a new Python only holds open. Default: none.

        Returns:
            The pid of the child, and its answer. The answer is None if the child ended without one, or if the launcher
            has ended.

        Raises:
            OSError: this machine cannot run another process.
        """
        reader, writer = os.pipe()
        try:
            if self._forks:
                pid = fork()
            else:
                shares = {"reply": writer, "launcher": self._launcher_end}
                pid = start_python(code, message, shares, keeps=keeps, marks=marks)
        except OSError:
            os.close(reader)
            os.close(writer)
            raise
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for descriptor in (*self._private, *close, reader):
                os.close(descriptor)
            be(writer)
        os.close(writer)
        poller = select.poll()
        for watched in (reader, self._launcher_end):
            poller.register(watched, select.POLLIN)
        has_answered = reader in {number for number, _ in poller.poll()}  # a user's module may take hours to import
        with os.fdopen(reader) as pipe:
            # One line is read, and not to the end, because a process of the user may keep the other side open.
            line = pipe.readline() if has_answered else ""
        return pid, json.loads(line) if line else None


def be_check() -> NoReturn:
    """Check an entrypoint in this newly started Python process, and end the process.

    Example:
        python -c "from executors.backends.local.zygote import be_check; be_check()"
    """
    message, shares = receive_message()
    os.close(shares["launcher"])
    _be_check(message["request"], shares["reply"])


def _be_check(request: dict[str, Any], reply: int) -> NoReturn:
    name = f"Entrypoint {request['entrypoint']!r}"
    answer: dict[str, Any] = {}
    printed = -1
    try:
        os.setsid()
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        adopt(request["cwd"], request["sys_path"], request["user_folders"], request["environ"])
        measured = measure_imports(request["imports"])
        printed = private_file()
        os.dup2(printed, 2)  # argparse prints its errors to stderr
        check_call(load_entrypoint(request["entrypoint"]), request["args"], name)
        answer = {"measured": measured}
    except EntrypointArgumentsError as error:
        answer = {"kind": "arguments", "error": str(error)}
    except EntrypointError as error:
        answer = {"kind": "import", "error": str(error)}
    except MissingDependencyError as error:
        # The message has the command that helps. A traceback of our own import would hide it.
        answer = {"kind": "import", "error": f"{name} cannot be loaded. {error}"}
    except SystemExit as left:
        sys.stderr.flush()
        printed_error = last_error(os.pread(printed, MAX_PRINTED, 0).decode(errors="replace"))
        where = f"{command_for(request['entrypoint'])} -- …"
        answer = {
            "kind": "import",
            "error": f"{name}: importing it ended the process with exit code {left.code!r}, and printed: "
            f"{printed_error} If it parses options, give them after --, which runs it as a script: {where}",
        }
    except BaseException as error:
        import traceback

        trace = "".join(traceback.format_exception(error)).rstrip()
        answer = {"kind": "import", "error": f"{name} cannot be loaded. {trace}"}
    finally:
        os.write(reply, (json.dumps(answer) + "\n").encode())
        os._exit(0)
