"""Asks git for the commit of the folder from which a run is launched, and for changes since that commit."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from executors.errors import EntrypointError

COMMIT = ("rev-parse", "--verify", "--quiet", "HEAD")
CHANGES = ("status", "--porcelain", "--", ".")
IS_IGNORED = ("check-ignore", "--quiet", ".")  # the commit does not describe a folder that git ignores
PATIENCE_S = 0.25  # a launch on this machine must not wait for a large repository
GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")


@dataclass(frozen=True)
class Checkout:
    """The state of a folder in git: its commit, and whether its files differ from the commit."""

    commit: str | None = None
    """The commit that is checked out, or None outside a git repository."""
    dirty: bool | None = None
    """True if the files differ from that commit. None if that is not known."""

    @property
    def about(self) -> dict[str, Any] | None:
        """The description of the code in `run.json`, for a launch that packs no code."""
        return asdict(self) if self.commit else None


class GitQuery:
    """Questions about a folder to git, which answers them in its own processes while the launch continues.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._asked: list[subprocess.Popen[bytes]] = []
        with contextlib.suppress(OSError):  # there is no git
            for command in (COMMIT, CHANGES, IS_IGNORED):
                self._asked.append(subprocess.Popen(["git", *command], cwd=root, env=_environment(), **quiet))

    def result(self, patience_s: float | None = PATIENCE_S) -> Checkout:
        """Return the answers of git. An answer that is missing after the wait is unknown.

        Args:
            patience_s: the longest wait in seconds, from now. None: there is no limit. Default 0.25.
        """
        until = math.inf if patience_s is None else monotonic() + patience_s
        commit, changes, ignored, *_ = *(_said(process, until) for process in self._asked), None, None, None
        if commit is None or ignored is not None:
            return Checkout()
        return Checkout(commit.decode().strip(), None if changes is None else bool(changes))

    def close(self) -> None:
        """End commands that still run."""
        for process in self._asked:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def git(root: Path, *command: str) -> bytes | None:
    """Return the output of a git command. None: there is no git, no repository or no commit.

    Args:
        root: the folder in which the command runs.
        command: the arguments of git.

    Raises:
        EntrypointError: git refuses to read the repository, because it belongs to another user or is damaged.
    """
    try:
        done = subprocess.run(["git", *command], cwd=root, env=_environment(), capture_output=True, check=False)
    except OSError:  # there is no git
        return None
    problem = done.stderr.decode(errors="replace").strip()
    if done.returncode == 0:
        return done.stdout
    if not problem or "not a git repository" in problem:
        return None
    raise EntrypointError(f"The workspace {str(root)!r} cannot be listed. git printed: {problem}")


def _said(process: subprocess.Popen[bytes], until: float) -> bytes | None:
    try:
        output, _ = process.communicate(timeout=None if until == math.inf else max(0.0, until - monotonic()))
    except subprocess.TimeoutExpired:
        return None
    return None if process.returncode else output


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in GIT_VARIABLES}
    return {**kept, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
