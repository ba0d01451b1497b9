"""A command that runs as in a container of a vendor's, but as a local process.

It has its own session, nothing of the launcher's environment, and a `python` on its PATH that has every package of this
environment but the project's own. When its first process ends, all that it started ends too, also what left its group;
and so it does when the launcher is killed.
It does not hide the file system, the network and the other processes, as a container does. And who leaves the
group, the directory and HOME together, escapes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from servers.isolation.orphans import end_all_after_us, end_all_in, forget

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def container_environment(bin_folder: Path, directory: Path) -> dict[str, str]:
    """Return what the environment of a command starts from: PATH and HOME, and nothing else."""
    return {"PATH": f"{bin_folder}:{SYSTEM_PATH}", "HOME": str(directory)}


class IsolatedProcess:
    """A command in a session of its own, with exactly this environment, in this directory.

    Args:
        argv: The command; its first word is looked up on the PATH of `env`.
        env: The whole environment; start from `container_environment`.
        directory: Where it runs. It is created, and has to be this command's alone: what runs in it, or has it as its
            HOME, belongs to this command.
        on_line: Called for every line of both streams, which are one, without its line feed, from a thread.

    Raises:
        OSError: The command cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        directory: Path,
        *,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        end_all_after_us(directory)
        self._on_line = on_line
        self._popen = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._popen.pid
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait until the command has ended, end what it left running, and return its exit code (137: by SIGKILL).

        After it every line of output has been heard.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout_s` seconds.
        """
        code = self._popen.wait(timeout_s)
        self._end_all()
        self._reader.join()
        return 128 - code if code < 0 else code

    def terminate(self) -> None:
        """Send SIGTERM to the first process alone, as container runtimes do."""
        self._popen.terminate()

    def kill(self) -> None:
        """Kill the first process with SIGKILL. `wait` sees to the others."""
        self._popen.kill()

    def stop(self, grace_s: float) -> int:
        """Terminate the command, kill it when it still runs after `grace_s` seconds, and return its exit code."""
        self.terminate()
        try:
            return self.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()
            return self.wait()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as pipe:
            for line in pipe:
                self._on_line(line.decode(errors="replace").removesuffix("\n"))

    def _end_all(self) -> None:
        """Kill the command's group, and every process that left it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        end_all_in(self._directory)
        forget(self._directory)
