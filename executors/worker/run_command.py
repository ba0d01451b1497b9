"""Runs the command of a replica as a child of its worker: its environment, its end, and the error that it leaves.

The worker claims the attempt, writes heartbeats and leaves the outcome, as it does for a function.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from executors.errors import ReplicasError
from executors.process import path_of_descriptor, signal_name
from executors.process.temp_folders import temp_prefix
from executors.replica import PAGE, Replica
from executors.task.command import search_path
from executors.task.stored import installed_version
from executors.worker.failure import fingerprint_of, last_error
from executors.worker.printed_error import before_report, place_in, printed_traceback, root_cause

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
MAX_ERROR_FILE_BYTES = 1 << 20
MAX_NOTED = 20_000  # the longest text of the error file that an outcome contains
RENDEZVOUS_OF_TORCHRUN = {"PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "localhost:0"}
"""The options that make torchrun choose a free port. Without them, torchrun before torch 2.13 takes port 29500, which a
second replica on the machine cannot take.
"""
FREE_PORT_SINCE = (2, 13)
REST_S = 2.0  # the longest wait for the rest of the output of a command that has ended
MAX_PART_BYTES = 64 << 10

_asked_group: int | None = None


class CommandFailedError(ReplicasError):
    """The command of a replica could not be started, or ended with another exit code than 0.

    Args:
        words: the command.
        exit_code: the exit code of the command, or -N if signal N ended it. None: the command could not be started.
        noted: the error that the command wrote into the file that `TORCHELASTIC_ERROR_FILE` names. None: it wrote none.
        why: the reason why the command could not be started. Default: it was started.
    """

    def __init__(self, words: Sequence[str], exit_code: int | None, noted: str | None, why: str = "") -> None:
        self.exit_code = exit_code
        self.noted = noted
        name = f"The command {shlex.join(words)!r}"
        if exit_code is None:
            text = f"{name} cannot be started: {why}."
        elif exit_code < 0:
            text = f"{name} was ended by signal {-exit_code} ({signal_name(-exit_code)})."
        else:
            text = f"{name} ended with exit code {exit_code}."
        super().__init__(text)


def outcome_fields(error: CommandFailedError, output_tail: Callable[[], str]) -> dict[str, Any]:
    """Return the fields of an outcome for this failure: `reason`, `error`, `exit_code` and others.

    Args:
        error: the failure.
        output_tail: returns the end of the output, for a command that left no error in its file. The error is then the
            traceback that a process printed, or its last lines.

    Example:
        outcome_fields(error, lambda: "Error: no such file")["reason"]  # "no_result"
    """
    code, text = error.exit_code, str(error)
    alike = fingerprint_of(error)
    if code is None:
        return {"reason": "start_failed", "error": text, "exit_code": 1, "fingerprint": alike}
    found = {"exit_code": code, "signal": signal_name(-code) if code < 0 else None}
    tail = output_tail()
    # A process that a signal ended left no traceback. Its siblings print one, because they lose their connection to it.
    if error.noted is None and (cause := root_cause(tail)) is not None:
        return {**found, "reason": "no_result", "error": f"{text} {cause}", "error_line": cause, "fingerprint": alike}
    # After the error of its process, torchrun prints a traceback of its own and a table without a reason.
    tail = before_report(tail).strip()
    if (noted := error.noted or printed_traceback(tail)) is not None:
        line, place = noted.rpartition("\n")[2], place_in(noted)
        text = f"{text}\n{noted}"
        # Without the frames, because processes that fail together print tracebacks of different depth.
        alike = fingerprint_of(ReplicasError(f"{place}: {line}"))
        return {**found, "reason": "exception", "error": text, "error_line": line, "error_place": place,
                "fingerprint": alike}  # fmt: skip
    if tail:
        text += f" It printed: {last_error(tail)}"
    return {**found, "reason": "no_result", "error": text, "fingerprint": alike}


def asked_group() -> int | None:
    """Return the process group of the command that got SIGTERM. None: no command was asked to end."""
    return _asked_group


def run_command(words: Sequence[str], replica: Replica, copy: Callable[[bytes], object] | None = None) -> None:
    """Run a command to its end. An exception in this thread, such as that of SIGTERM, asks the command to end first.

    Args:
        words: the command, with its placeholders replaced.
        replica: the replica.
        copy: called with each part of the output, after it was printed. None, the default: a file has the output.

    Raises:
        CommandFailedError: the command cannot be started, or does not end with exit code 0.

    Example:
        run_command(["torchrun", "train.py"], current_replica())
    """
    global _asked_group
    folder = Path(tempfile.mkdtemp(prefix=temp_prefix()))  # the supervisor removes it if this process is killed
    process: subprocess.Popen[bytes] | None = None
    output = None if copy is None else CopiedOutput(copy)
    try:
        error_file = folder / "error.json"
        # A SIGTERM between the start of the child and the assignment would leave a command that gets no request to end.
        with replica.atomic():
            try:
                # The command gets a session of its own, so that SIGTERM to its process group does not reach the worker.
                process = subprocess.Popen(
                    words,
                    env=environment_of(error_file, replica),
                    start_new_session=True,
                    stdout=None if output is None else output.writer,
                    stderr=None if output is None else output.writer,
                )
            except OSError as error:
                why = error.strerror or str(error)
                raise CommandFailedError(words, None, None, f"{why} ({error.filename or words[0]})") from None
        code = process.wait()
        if output is not None:
            output.finish()
        if code != 0:
            raise CommandFailedError(words, code, read_error(error_file))
    except CommandFailedError:
        raise
    except BaseException:
        if process is not None and process.returncode is None:
            _asked_group = process.pid
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait()  # the loop ends when the supervisor kills this process after the grace
        raise
    finally:
        if output is not None:
            output.finish()
        if replica.page is not None:
            replica.page.remove_name()
        shutil.rmtree(folder, ignore_errors=True)


class CopiedOutput:
    """A pipe for the output of a command. A thread prints the output, and passes a copy of it on.

    Args:
        copy: called with each part of the output.

    Example:
        CopiedOutput(page.write_tail).writer
    """

    def __init__(self, copy: Callable[[bytes], object]) -> None:
        self._copy = copy
        self._reader, self.writer = os.pipe()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="replicas-output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Close this process's end of the pipe, and wait for the rest of the output.

        A process that the command left behind may keep its end open. So the wait is limited.
        """
        if self._is_open:
            self._is_open = False
            os.close(self.writer)
            self._thread.join(REST_S)

    def _run(self) -> None:
        is_printed = True
        while data := os.read(self._reader, MAX_PART_BYTES):
            if is_printed:
                # The service may have closed its end. The command continues, so its output is still read.
                is_printed = _print_all(data)
            self._copy(data)


def _print_all(data: bytes) -> bool:
    """Write bytes to stdout. Return False if that is closed."""
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(1, rest) :]
    except OSError:
        return False
    return True


def environment_of(error_file: Path, replica: Replica) -> dict[str, str]:
    """Return the environment of a command.

    Args:
        error_file: the file in which torchrun leaves the first failure of its processes.
        replica: the replica.

    Example:
        environment_of(Path("/tmp/error.json"), current_replica())["TORCHELASTIC_ERROR_FILE"]
    """
    environ = {**os.environ, ERROR_FILE: str(error_file), "PATH": search_path()}
    environ.setdefault("PYTHONUNBUFFERED", "1")  # so that the log of a killed command has all its output
    # The records of a replica have one writer, so the commands of other members report nothing.
    if replica.page is not None and replica.page.file >= 0 and replica.member == 0:
        environ[PAGE] = path_of_descriptor(replica.page.file)
    if _torch_version() < FREE_PORT_SINCE:
        environ = {**RENDEZVOUS_OF_TORCHRUN, **environ}
    return environ


def _torch_version() -> tuple[int, ...]:
    parts = (installed_version("torch") or "0").split(".")[:2]
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)


def read_error(file: Path) -> str | None:
    """Return the error in the file that a process with torch's `@record` leaves. None: there is none.

    The content of the file is untrusted. Its message is a text, or an object with a message and the stack of the call.

    Args:
        file: the path.

    Example:
        read_error(Path("/tmp/error.json"))  # "Traceback (most recent call last):…"
    """
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_ERROR_FILE_BYTES + 1)
        found: Any = json.loads(data) if len(data) <= MAX_ERROR_FILE_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    message = found.get("message") if isinstance(found, dict) else None
    if isinstance(message, dict):
        extra = message.get("extraInfo")
        stack = extra.get("py_callstack") if isinstance(extra, dict) else None
        message = stack if isinstance(stack, str) and stack.strip() else message.get("message")
    if not isinstance(message, str) or not message.strip():
        return None
    return message.strip().encode(errors="replace").decode()[-MAX_NOTED:]
