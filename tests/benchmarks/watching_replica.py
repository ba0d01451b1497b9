"""What replicas do in the benchmarks of watching. Also a script: `watching_replica.py SECONDS WATCHED`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from executors import current_replica


def hold_gil(folder: str) -> None:
    """Make progress, say when, and hold the GIL."""
    from executors.worker.chaos import HANGS

    replica = current_replica()
    replica.report(step=1)
    Path(folder, str(replica.rank)).write_text(str(time.time()))
    HANGS["gil"]()


def step_for(seconds: float) -> None:
    """Make progress for a while."""
    until = time.monotonic() + seconds
    step = 0
    while time.monotonic() < until:
        step += 1
        current_replica().report(step=step)
        time.sleep(0.05)


def beat_for(seconds: float, is_watched: bool) -> float:
    """Return the processor time that this process uses while it waits."""
    if is_watched:
        from executors.replica.shared_page import SharedPage
        from executors.worker.watched import be_watched

        be_watched(SharedPage())
    began, until = time.process_time(), time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.25)
    return time.process_time() - began


if __name__ == "__main__":
    print(beat_for(float(sys.argv[1]), bool(int(sys.argv[2]))))
