"""Runs a command as a local process that behaves much like a container at a vendor.

The command has its own session and no variables of the launcher. The `python` on its PATH has every package of this
environment except the project itself. When the first process ends, all processes that it started are ended, too, also
those that have left its process group. The same happens when the launcher is killed. It does not hide the file system,
the network and other processes, as a container does. A process that leaves the group, the directory and HOME at the
same time escapes.
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
    """Return the basic environment of a command: only PATH and HOME."""
    return {"PATH": f"{bin_folder}:{SYSTEM_PATH}", "HOME": str(directory)}


class IsolatedProcess:
    """A running command, with its own session, the given environment and the given directory.

    Args:
        argv: The command. Its first word is searched on the PATH of `env`.
        env: The whole environment. Begin with `container_environment`.
        directory: The directory in which the command runs, which is created. No other command may use it: each process
            that runs in it, or has it as HOME, counts as part of this command.
        on_line: Called in a thread with each line of stdout and stderr, which are one stream, without the line feed.

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
        """Wait until the command has ended, end all processes that it left, and return its exit code (137: SIGKILL).

        When it returns, `on_line` was called with every line of output.

        Raises:
            subprocess.TimeoutExpired: The command still runs after `timeout_s` seconds.
        """
        code = self._popen.wait(timeout_s)
        self._end_all()
        self._reader.join()
        return 128 - code if code < 0 else code

    def terminate(self) -> None:
        """Send SIGTERM only to the first process, as container runtimes do."""
        self._popen.terminate()

    def kill(self) -> None:
        """Kill the first process with SIGKILL. `wait` ends the others."""
        self._popen.kill()

    def stop(self, grace_s: float) -> int:
        """Send SIGTERM, and after `grace_s` seconds SIGKILL if the command still runs. Return its exit code."""
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
