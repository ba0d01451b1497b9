"""Trackers for tests, and a task that reports numbers to them."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executors import current_replica
from executors.view.report.trackers import TrackedReplica


def train(steps: int = 3, fails_at: int | None = None, sleep_s: float = 0.0) -> int:
    """Report steps. The first attempt fails at one of them."""
    me = current_replica()
    for step in range(1, steps + 1):
        me.report(step=step, loss=1.0 / step, total_steps=steps)
        if step == fails_at and not me.attempt:
            raise RuntimeError("it went wrong")
        time.sleep(sleep_s)
    return os.getpid()


class Notes:
    """A tracker that writes each call into a file of its rank and attempt, in the folder `NOTES`."""

    def __init__(self, tracked: TrackedReplica) -> None:
        self._file = Path(os.environ["NOTES"], f"{tracked.rank}-{tracked.attempt}")
        self._note({"begin": dict(tracked.config), "name": tracked.name, "of": tracked.world_size})

    def log(self, numbers: Mapping[str, float], step: int | None, at: float) -> None:
        import threading

        self._note({"step": step, **numbers, "thread": threading.current_thread().name})

    def finish(self, *, has_succeeded: bool) -> None:
        self._note({"finish": has_succeeded})

    def _note(self, noted: dict[str, Any]) -> None:
        with self._file.open("a") as file:
            file.write(f"{json.dumps(noted)}\n")


class KeepsPage(Notes):
    def page(self, path: Path) -> None:
        self._note({"page": path.name})
        shutil.copy(path, os.environ["NOTES"])


class FailsToBegin(Notes):
    def __init__(self, tracked: TrackedReplica) -> None:
        raise SystemExit("no such project")


class FailsToLog(Notes):
    def log(self, numbers: Mapping[str, float], step: int | None, at: float) -> None:
        raise OSError("the service is away")


class FailsToFinish(Notes):
    def finish(self, *, has_succeeded: bool) -> None:
        raise OSError("the service is away")


class Hangs(Notes):
    def __init__(self, tracked: TrackedReplica) -> None:
        from executors.worker import tracking

        tracking.FINISH_S = 0.1
        time.sleep(600)
