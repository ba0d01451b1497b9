"""Runs the tests and measurements that need a GPU, each in a process of its own with a time limit.

    PYTHONPATH=.:tests python -m gpu.measure --out measured.json

The file has one JSON object with one entry for each part, and is written after each part. While a part is measured, its
figures so far are in a file of their own beside it, so a kill at any time loses none. A part that fails or takes too
long has an `error`, and the next part runs. REPLICAS_GPU_SMALL=1 uses small models on the CPU.

This module imports neither torch nor this project's packages, so it also reports that they cannot be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

PARTS: Mapping[str, float] = {
    "machine": 40.0,
    "checks": 110.0,
    "overlap": 90.0,
    "restart": 100.0,
    "training": 190.0,
}
"""The parts in their order, each with its time limit in seconds. The first ones are worth the most."""
LIMIT_S = 505.0
"""The time limit of all parts together, in seconds. `run.sh` needs the rest of nine minutes for the packages."""
IS_SMALL = os.environ.get("REPLICAS_GPU_SMALL") == "1"
STRETCH = 4 if IS_SMALL else 1
"""The factor of all time limits. On a busy CPU, starts of processes take long."""
END_S = 5.0
"""The time that a process has to end after SIGTERM, and again after SIGKILL, in seconds."""
COMMAND = (sys.executable, "-m", "gpu.parts")


def run_part(name: str, limit_s: float, file: Path, command: Sequence[str] = COMMAND) -> dict[str, Any]:
    """Run a part in a process of its own, and return its figures.

    Args:
        name: the part.
        limit_s: the time limit in seconds.
        file: the file into which the part writes its figures. It is removed at the end.
        command: the command, which gets the three values above as further arguments. Default: `gpu.parts`.
    """
    began = time.monotonic()
    file.unlink(missing_ok=True)
    process = subprocess.Popen([*command, name, str(file), f"{limit_s:g}"])
    problem = None
    try:
        code = process.wait(limit_s)
        if code:
            problem = f"The process of this part ended with code {code}. The log has the reason."
    except subprocess.TimeoutExpired:
        problem = f"This part did not end within {limit_s:g} s. The log has the stacks of its threads."
    finally:
        _end(process)  # its replicas end with it, because their run is attached
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    file.unlink(missing_ok=True)
    if problem is not None:
        found.setdefault("error", problem)
    return {**found, "part_s": time.monotonic() - began}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold a process for ever
                process.wait(END_S)


def _write(file: Path, found: Mapping[str, Any]) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(found, indent=1) + "\n")
    part.replace(file)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the tests and measurements that need a GPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file for the results")
    only = "only this part; the file keeps the others"
    parser.add_argument("--part", action="append", choices=list(PARTS), help=only)
    chosen = parser.parse_args()
    signal.signal(signal.SIGTERM, _leave)  # so that the process of a part ends, too
    deadline = time.monotonic() + STRETCH * LIMIT_S
    found: dict[str, Any] = json.loads(chosen.out.read_text()) if chosen.part and chosen.out.exists() else {}
    found["small"] = IS_SMALL
    for name in chosen.part or PARTS:
        limit_s = min(STRETCH * PARTS[name], deadline - time.monotonic() - 2 * END_S)
        if limit_s > 0:
            print(f"== {name}, for at most {limit_s:.0f} s", flush=True)
            found[name] = run_part(name, limit_s, chosen.out.with_name(f"{chosen.out.stem}.{name}.json"))
        else:
            found[name] = {"error": "No time was left for this part."}
        print(f"== {name}: {found[name].get('error', 'done')}", flush=True)
        _write(chosen.out, found)
    failed = [name for name in chosen.part or PARTS if "error" in found[name]]
    print(f"== failed: {', '.join(failed) or 'none'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
