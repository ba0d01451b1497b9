"""The tracker for trackio, which writes to SQLite.

`TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID` send numbers elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from executors.view.report.trackers import PROJECT, TrackedReplica


class Tracker:
    """Sends numbers to one trackio run per rank. A resumed rank continues its run."""

    def __init__(self, tracked: TrackedReplica) -> None:
        import trackio

        self._run = trackio.init(
            os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=tracked.name,
            group=tracked.run,
            config=dict(tracked.config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,  # the numbers `usage/…` already contain it
            auto_log_gpu=False,
        )

    def log(self, numbers: Mapping[str, float], step: int | None, at: float) -> None:
        self._run.log(dict(numbers), step=step)

    def page(self, path: Path) -> None:
        self._run.log_artifact(path, name=path.stem, type="report")

    def finish(self, *, has_succeeded: bool) -> None:
        self._run.finish()
