"""Real processes for the contract suites, which end with the test that started them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

Helper: TypeAlias = "subprocess.Popen[str]"


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment, with its `sys.path` for a Python that is started with it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **more}


@contextlib.contextmanager
def python_process(script: Path, *args: str) -> Iterator[Helper]:
    """Run a script with pipes; kill it when the block is left."""
    command = [sys.executable, "-P", str(script), *args]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def heard(process: Helper) -> Any:
    """Wait for the next line of JSON that a process says."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"the process ended with {process.wait()} before it said anything"
    return json.loads(line)


def tell(process: Helper, line: str) -> None:
    """Send a line to a process."""
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
