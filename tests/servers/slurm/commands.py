"""Wrappers of Slurm's commands that record each call, and can lose the answer of the next call."""

from __future__ import annotations

import shutil
from pathlib import Path

from servers.slurm.cluster import PATH

WATCHED = ("sbatch", "squeue", "scancel", "scontrol")
WRAPPER = """#!/bin/sh
echo {name} "$@" >> '{folder}/calls'
case "$*" in
*--test-only*) ;;
*)
    if mv '{folder}/lose-{name}' '{folder}/lost-{name}' 2> /dev/null; then
        {real} "$@" > /dev/null
        echo '{name}: error: Socket timed out on send/recv operation' >&2
        exit 1
    fi ;;
esac
exec {real} "$@"
"""


class Commands:
    """Wrappers of the commands in a folder, which comes first on `PATH`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        for name in WATCHED:
            wrapper = folder / name
            wrapper.write_text(WRAPPER.format(name=name, folder=folder, real=shutil.which(name, path=PATH)))
            wrapper.chmod(0o755)

    def calls(self, name: str) -> list[list[str]]:
        """Return the arguments of the calls of a command so far. For `sbatch`, only calls that start jobs count."""
        path = self._folder / "calls"
        lines = [line.split(" ") for line in path.read_text().splitlines()] if path.exists() else []
        return [words for command, *words in lines if command == name and "--test-only" not in words]

    def lose_reply(self, name: str = "sbatch") -> None:
        """Let the next call of a command act, and then fail as if its answer were lost."""
        (self._folder / f"lose-{name}").touch()
