"""Writes the progress of an installation into the store, so that a launch can show it instead of "pending".

The bootstrap runs this file by its path, from the unpacked code, before anything is installed. So this file imports
only the standard library, and no module imports it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable

# uv prints these lines on stderr, with sizes as they are downloaded, for each package of more than 1 MiB.
STEP = re.compile(r"\s*Download(?:ing|ed) (?P<name>\S+)(?: \((?P<size>[0-9.]+)(?P<unit>[KMGT])iB\))?\s*")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
MAX_NAME = 100
Put = Callable[[str, bytes], object]


def begin(put: Put, missing: list[str]) -> Callable[[list[str]], int]:
    """Note the begin of an installation. Return a function that runs uv and notes the downloaded bytes.

    Args:
        put: writes an object of the run, by its name below the run.
        missing: the requirements to install.

    Example:
        begin(put, ["torch==2.13.0"])(["uv", "pip", "install", "--quiet", "torch==2.13.0"])
    """
    room = "spares" if os.environ.get("REPLICA_SPARE") else "replicas"
    attempt = f"{room}/{int(os.environ.get('REPLICA_RANK', 0)):04d}/{os.environ.get('REPLICA_ATTEMPT', 0)}"
    # One name is enough for a line of a launch. Nearly all of the time and the money goes into torch.
    named = next((each for each in missing if each.startswith("torch==")), next(iter(missing), ""))
    boot = {"at": time.time(), "doing": "installing", "what": named[:MAX_NAME]}

    def note(**sizes: int) -> None:
        with contextlib.suppress(Exception):  # users read it and nothing depends on it, so it is not tried twice
            put(f"{attempt}/boot.json", json.dumps({**boot, **sizes}).encode())

    note()
    return lambda command: _run(command, note)


def _run(command: list[str], note: Callable[..., None]) -> int:
    """Run uv, note each downloaded package, and return the exit code. If uv fails, print its output."""
    sizes, others, done = dict[str, int](), list[str](), 0
    loud = [word for word in command if word != "--quiet"]  # with --quiet, uv does not print the packages
    uv = subprocess.Popen(loud, stderr=subprocess.PIPE, text=True, encoding="utf-8", errors="replace")
    try:
        assert uv.stderr is not None
        for line in uv.stderr:
            step = STEP.fullmatch(line)
            if step is None:
                others.append(line)
            elif step["size"]:
                sizes[step["name"]] = int(float(step["size"]) * UNITS[step["unit"]])
            elif step["name"] in sizes:
                done += sizes.pop(step["name"])
                note(n_bytes=done, of_bytes=done + sum(sizes.values()))
        code = uv.wait()
    except BaseException:  # a service that ends the container raises here; without this, uv would continue
        uv.kill()
        uv.wait()
        raise
    if code != 0:
        sys.stderr.writelines(others)
    return code
