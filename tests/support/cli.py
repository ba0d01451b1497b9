"""Runs the command as a user does: in a new process, in a folder with the user's file."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from executors.cli import main
from executors.testing import eventually
from support.documents import check_document

COMMAND = [sys.executable, "-m", "executors.cli"]
COMMAND_OF = cache(typer.main.get_command)
"""Cached, because typer reads the signatures of all verbs, which takes longer than most verbs themselves."""
SIZES = ("COLUMNS", "LINES")  # the test runner sets these variables, which would override the size of the terminal
# Options of a quick launch: no import of torch, and half a second between SIGTERM and SIGKILL.
FAST = ("--option", "preload=[]", "--option", "term_grace_s=0.5")

JOB = """
import os, signal, time
from pathlib import Path
from executors import current_replica

def main(say="hello", times=1, result=None):
    for number in range(times):
        print(say, number, "of rank", current_replica().rank, flush=True)
    return result if result is not None else {"rank": current_replica().rank}

def echo(**args):
    return args

def variable(name):
    return os.environ.get(name)

def report():
    current_replica().report(step=7, loss=0.5, round=3, round_s=1.25)
    return {"summary": f"Summary of rank {current_replica().rank}."}

def report_more():
    current_replica().report(step=1, lr=1e-4, gnorm=float("nan"), mfu=0.5, tokens=3e6)

def fail(ranks, message="it went wrong"):
    if current_replica().rank in ranks:
        print("last words", flush=True)
        raise RuntimeError(message)
    return "fine"

def die(rank):
    if current_replica().rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "fine"

def hang(ranks=None, deaf=False):
    if ranks is None or current_replica().rank in ranks:
        if deaf:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("hanging", flush=True)
        while True:
            time.sleep(60)

def keep():
    mine = Path(f"kept{current_replica().rank}.txt")
    mine.write_text("kept")
    current_replica().save_artifact("model/weights.txt", mine)
    print("saved", flush=True)
    return {"loss": float("nan")}
"""


class Result:
    """The output of one call of the command, and its exit code."""

    def __init__(self, code: int, stdout: str, stderr: str, verb: object = "") -> None:
        self.code = code
        self.verb = str(verb)
        self.stdout = stdout
        self.stderr = stderr

    @property
    def json(self) -> Any:
        """The one document on stdout, read strictly. Its schema must accept it."""
        document = json.loads(self.stdout, parse_constant=lambda name: 1 / 0)
        if self.verb != "events":  # one document on each line
            check_document(self.verb, document)
        return document

    def __repr__(self) -> str:
        return f"<exit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}>"


class Folder:
    """A user's folder, with `job.py` in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "job.py").write_text(JOB)

    def command(self, *arguments: object) -> list[str]:
        """Return the program and the arguments of one call of the command."""
        return [*COMMAND, *map(str, arguments)]

    def environment(self) -> dict[str, str]:
        """Return the environment in which the command is called."""
        return dict(os.environ)

    def replicas(self, *arguments: object, environ: dict[str, str] | None = None) -> Result:
        """Call the command and wait for its end."""
        done = subprocess.run(
            self.command(*arguments),
            cwd=self.path,
            env={**self.environment(), "COLUMNS": "120", **(environ or {})},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Result(
            done.returncode, done.stdout, re.sub(r"(?m)^Preparing .* …\n", "", done.stderr), *arguments[:1]
        )  # this line appears only on a slow machine

    def launch(self, entrypoint: str, *arguments: object, n: int = 2, **environ: str) -> Result:
        """Launch with the local backend, quickly."""
        return self.replicas("launch", entrypoint, "--n", n, *FAST, *arguments, environ=environ)

    @contextmanager
    def started(self, *arguments: object) -> Iterator[Started]:
        """Start the command, and return while it runs."""
        output = self.path / f"output-{os.urandom(4).hex()}"
        with open(output, "wb") as file:
            process = subprocess.Popen(
                self.command(*arguments),
                cwd=self.path,
                env=self.environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            yield Started(process, output)
        finally:
            process.kill()
            process.wait()


class Started:
    """A running call of the command."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output

    @property
    def output(self) -> str:
        """The output so far, on both streams."""
        return self._output.read_text()

    def prints(self, text: str) -> None:
        """Wait until the command has printed a text."""
        eventually(lambda: text in self.output or self._process.poll() is not None, text)
        assert text in self.output, self.output

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Send a signal to the command's process only, as a service manager does."""
        self._process.send_signal(number)

    def ends(self) -> int:
        """Wait for the end of the command, and return the exit code as a shell would.

        If a signal interrupts an `exec` of source code, as in the import of a dataclass, Python ends by that signal.
        The process's own exit code is then lost. A shell reports the same number in both cases.
        """
        code = self._process.wait(60)
        return 128 + signal.SIGINT if code == -signal.SIGINT else code


class Terminal:
    """The command on a new terminal."""

    def __init__(self, folder: Folder, *arguments: object, width: int = 90, height: int = 24) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self._process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            cwd=folder.path,
            env={**{k: v for k, v in os.environ.items() if k not in SIZES}, "TERM": "xterm-256color"},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(theirs, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.raw = ""

    def shows(self, text: str) -> None:
        """Wait until the terminal has shown a text."""
        eventually(lambda: text in self._read() or self._process.poll() is not None, text)
        assert text in self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def type(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def send(self, number: int) -> None:
        """Send a signal to the command alone."""
        self._process.send_signal(number)

    def ends(self) -> int:
        eventually(lambda: self._read() and self._process.poll() is not None)
        self._read()
        return self._process.wait()

    @property
    def lines(self) -> list[str]:
        """The lines that were shown, without the codes that redraw the screen."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.raw).replace("\r", "\n").split("\n")

    def _read(self) -> str:
        while select.select([self._ours], [], [], 0)[0]:
            try:
                self.raw += os.read(self._ours, 65536).decode(errors="replace")
            except OSError:  # EIO: the other side is closed
                break
        return "\n".join(self.lines)


class HereInstead:
    """The command, called in the process of the test. It is quicker, for tests without signals, streams and imports."""

    def __init__(self, folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.chdir(folder.path)
        # so that a slow machine prints no more lines than a quick one
        monkeypatch.setattr("executors.cli.output.QUIET_S", 600.0)

    def replicas(self, *arguments: object) -> Result:
        """Call the command."""
        with self._monkeypatch.context() as patch:
            patch.setattr("typer.main.get_command", COMMAND_OF)
            patch.setattr(sys, "argv", ["replicas", *map(str, arguments)])
            patch.setattr(sys, "path", [*sys.path])
            patch.setattr(warnings, "showwarning", warnings.showwarning)
            self._capsys.readouterr()
            code = main()
        return Result(code, *self._capsys.readouterr(), *arguments[:1])

    def launch(self, entrypoint: str, *arguments: object, n: int = 2) -> Result:
        """Launch with the local backend, quickly."""
        return self.replicas("launch", entrypoint, "--n", n, *FAST, *arguments)
