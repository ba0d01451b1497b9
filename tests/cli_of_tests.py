"""Running the command as a user does: a process of its own, in a folder that holds the user's file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from executors.cli import main
from executors.testing import eventually

COMMAND = [sys.executable, "-m", "executors.cli"]
FAST = ("--option", "preload=[]", "--option", "term_grace_s=0.5")  # without torch, and patient for half a second

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
    Path("kept.txt").write_text("kept")
    current_replica().save_artifact("model/weights.txt", "kept.txt")
    print("saved", flush=True)
    return {"loss": float("nan")}
"""


class Result:
    """What one call of the command printed, and its exit code."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code = code
        self.stdout = stdout
        self.stderr = stderr

    @property
    def json(self) -> Any:
        """The one document on stdout, read strictly."""
        return json.loads(self.stdout, parse_constant=lambda name: 1 / 0)

    def __repr__(self) -> str:
        return f"<exit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}>"


class Folder:
    """A user's folder, with `job.py` in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "job.py").write_text(JOB)

    def replicas(self, *arguments: object, environ: dict[str, str] | None = None) -> Result:
        """Call the command and wait for its end."""
        done = subprocess.run(
            [*COMMAND, *map(str, arguments)],
            cwd=self.path,
            env={**os.environ, "COLUMNS": "120", **(environ or {})},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        return Result(done.returncode, done.stdout, done.stderr)

    def launch(self, entrypoint: str, *arguments: object, n: int = 2, **environ: str) -> Result:
        """Launch with the local backend, quickly."""
        return self.replicas("launch", entrypoint, "--n", n, *FAST, *arguments, environ=environ)

    @contextmanager
    def started(self, *arguments: object) -> Iterator[Started]:
        """Call the command and go on beside it."""
        output = self.path / f"output-{os.urandom(4).hex()}"
        with open(output, "wb") as file:
            process = subprocess.Popen(
                [*COMMAND, *map(str, arguments)],
                cwd=self.path,
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
    """A call of the command that goes on."""

    def __init__(self, process: subprocess.Popen[bytes], output: Path) -> None:
        self._process = process
        self._output = output

    @property
    def output(self) -> str:
        """What it has printed so far, on both streams."""
        return self._output.read_text()

    def prints(self, text: str) -> None:
        """Wait until it has printed a text."""
        eventually(lambda: text in self.output or self._process.poll() is not None, text)
        assert text in self.output, self.output

    def interrupt(self, number: int = signal.SIGINT) -> None:
        """Send a signal to the command alone, as a terminal's Ctrl-C or a service manager does."""
        self._process.send_signal(number)

    def ends(self) -> int:
        """Wait for its end and return the exit code."""
        return self._process.wait(60)


class HereInstead:
    """The command called inside the test's process: for what ends before anything starts, it is as good and quick."""

    def __init__(self, folder: Folder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        monkeypatch.chdir(folder.path)

    def replicas(self, *arguments: object) -> Result:
        """Call the command."""
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["replicas", *map(str, arguments)])
            patch.setattr(sys, "path", [*sys.path])
            patch.setattr(warnings, "showwarning", warnings.showwarning)
            self._capsys.readouterr()
            code = main()
        return Result(code, *self._capsys.readouterr())
