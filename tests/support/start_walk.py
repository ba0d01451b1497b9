"""Traces a launch and a restart: the files of `executors` that each enters, and the calls between them.

The launch is traced in the process of the command, up to the order to the zygote, which forks the supervisor. The
restart is traced in the supervisor, from the end of a rank until the fork of its next attempt; see `restart_walk.py`.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PRODUCT = f"{ROOT / 'executors'}/"
OUTPUT = "REPLICAS_START_WALK"
"""The variable of the file that gets the walk of a restart."""


class StartWalk:
    """The files that a part of a run enters, and the calls between them.

    Args:
        begin: file and function whose call begins the walk.
        end: file and function whose call ends it.
    """

    def __init__(self, begin: tuple[str, str], end: tuple[str, str]) -> None:
        self._begin, self._end = begin, end
        self.is_on = self.is_over = False
        self.files: set[str] = set()
        self.calls: set[tuple[str, str, str]] = set()
        """The file of the caller, the file of the function, and the name of the function."""

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Record a call; this is a profile function of `sys.setprofile`."""
        code = frame.f_code
        if event != "call" or self.is_over or not _is_function(code):
            return
        file, name = code.co_filename.removeprefix(PRODUCT), code.co_name
        if (file, name) == self._begin and not self.is_on:
            self.is_on = True
        if not self.is_on:
            return
        if (file, name) == self._end and self.ends_here(frame):
            self.is_over = True
            self.write()
            return
        self.files.add(file)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PRODUCT):
            caller = caller.f_back
        if caller is not None and _is_function(caller.f_code):
            self.calls.add((caller.f_code.co_filename.removeprefix(PRODUCT), file, code.co_qualname))

    def ends_here(self, frame: FrameType) -> bool:
        """Return True if this call of the last function ends the walk."""
        message = frame.f_locals.get("message")
        return message is None or message.get("do") == "launch"

    def write(self) -> None:
        """Write the walk into the file that the environment names."""
        Path(os.environ[OUTPUT]).write_text(json.dumps([sorted(self.files), sorted(self.calls)]))


def _is_function(code: CodeType) -> bool:
    """Return True for a function, and False for the code of modules and classes, which imports run."""
    return (
        code.co_filename.startswith(PRODUCT)
        and bool(code.co_flags & inspect.CO_NEWLOCALS)
        and code.co_name != "<module>"
    )


def trace_launch() -> None:
    """Run `replicas launch` with the arguments of this process, and write its walk."""
    import executors.backends.local.executor
    import executors.cli.launch
    import executors.launcher.launch_settings
    import executors.run.run
    import executors.store.file  # noqa: F401 - a walk does not count imports
    from executors.cli import main

    walk = StartWalk(("cli/__init__.py", "main"), ("backends/local/zygote_client.py", "request"))
    sys.argv = ["replicas", "launch", *sys.argv[1:]]
    threading.setprofile(walk.profile)
    sys.setprofile(walk.profile)
    sys.exit(main())


if __name__ == "__main__":
    trace_launch()
