"""Runs a command on Linux as if on macOS, as far as that can be emulated, to test the project for laptops.

The command runs in a mount namespace without /proc and /sys. Its Python does not have the names that exist only on
Linux, and reports macOS as its platform: see `sitecustomize`. Fakes of `ps` and `sysctl` take the arguments of BSD.
psutil reads the real /proc at another place, because on a Mac it asks the kernel.

The emulation does not show a fork after an import of torch, numbers of signals, file names without case, and `/tmp` as
a symbolic link. It does not show socket paths of at most 104 bytes, times of files, pages of 16 KiB, 256 open files,
and sleep either.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from support.cli import Folder

HERE = Path(__file__).parent
# The real /proc stays available to the fake of `ps`, because macOS's `ps` has the kernel's answers, too.
HIDE = """
mount --rbind /proc "$AS_MAC_PROC" && mount -t tmpfs none /proc && mount -t tmpfs none /sys && exec "$@"
"""


def as_mac(command: Sequence[str]) -> list[str]:
    """Return the command that runs another command as on macOS; its process keeps its pid.

    Args:
        command: the program and its arguments.

    Example:
        subprocess.run(as_mac([sys.executable, "train.py"]), env=environment_as_mac(os.environ, tmp_path / "proc"))
    """
    return ["unshare", "--mount", "--map-root-user", "sh", "-c", HIDE, "sh", *command]


def environment_as_mac(environ: Mapping[str, str], proc: Path) -> dict[str, str]:
    """Return the environment for a command of `as_mac`.

    Args:
        environ: the environment that the command would have on Linux.
        proc: an empty folder, created if it is missing, in which the fake of `ps` finds the processes.
    """
    proc.mkdir(exist_ok=True)
    paths = [str(HERE), *filter(None, [environ.get("PYTHONPATH")])]
    return {
        **environ,
        "AS_MAC": "1",
        "AS_MAC_PROC": str(proc),
        "AS_MAC_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(paths),
        "PATH": f"{HERE / 'bin'}{os.pathsep}{environ['PATH']}",
    }


@cache
def why_not() -> str | None:
    """Return the reason why this machine cannot emulate macOS, for a skipped test. None: it can."""
    try:
        tried = subprocess.run(
            ["unshare", "--mount", "--map-root-user", "mount", "-t", "tmpfs", "none", "/proc"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        return f"there is no unshare(1): {error}"
    return f"no mount namespace for this user: {tried.stderr.strip()}" if tried.returncode else None


class MacFolder(Folder):
    """A user's folder on a machine that emulates macOS."""

    def command(self, *arguments: object) -> list[str]:
        return as_mac(super().command(*arguments))

    def environment(self) -> dict[str, str]:
        return environment_as_mac(super().environment(), self.path.parent / "proc")

    def python(self, code: str) -> str:
        """Run a script of the user's, and return what it prints."""
        command = as_mac([sys.executable, "-c", code])
        done = subprocess.run(
            command, cwd=self.path, env=self.environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout
