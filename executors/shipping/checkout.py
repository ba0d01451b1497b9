"""The commit that git has checked out where a run is launched, for readers of the run."""

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
IS_IGNORED = ("check-ignore", "--quiet", ".")  # then the commit does not describe the folder
PATIENCE_S = 0.25  # a launch on this machine is not to wait for a large repository
GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY")


@dataclass(frozen=True)
class Checkout:
    """The state of a folder in git."""

    commit: str | None = None
    """The commit that is checked out, or None outside a git repository."""
    dirty: bool | None = None
    """Whether the files differ from that commit, or None if that is not known."""

    @property
    def about(self) -> dict[str, Any] | None:
        """The description of the code in `run.json`, if no archive of the code travels."""
        return asdict(self) if self.commit else None


class GitQuery:
    """A look at a folder, in processes beside this one."""

    def __init__(self, root: Path) -> None:
        quiet: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._asked: list[subprocess.Popen[bytes]] = []
        with contextlib.suppress(OSError):  # there is no git
            for command in (COMMIT, CHANGES, IS_IGNORED):
                self._asked.append(subprocess.Popen(["git", *command], cwd=root, env=_environment(), **quiet))

    def result(self, patience_s: float | None = PATIENCE_S) -> Checkout:
        """Return what was seen; what takes longer from now is unknown, as is what git refuses. None: wait for it."""
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
    """Return the output of git. None without git or a repository, or if there is no commit yet.

    Raises:
        EntrypointError: there is a repository, and git refuses, because it belongs to another user, or is broken.
    """
    try:
        done = subprocess.run(["git", *command], cwd=root, env=_environment(), capture_output=True, check=False)
    except OSError:  # there is no git
        return None
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode == 0:
        return done.stdout
    if not said or "not a git repository" in said:
        return None
    raise EntrypointError(f"The workspace {str(root)!r} cannot be listed: git says: {said}")


def _said(process: subprocess.Popen[bytes], until: float) -> bytes | None:
    try:
        output, _ = process.communicate(timeout=None if until == math.inf else max(0.0, until - monotonic()))
    except subprocess.TimeoutExpired:
        return None
    return None if process.returncode else output


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in GIT_VARIABLES}
    return {**kept, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}
