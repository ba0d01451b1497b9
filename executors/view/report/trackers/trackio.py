"""trackio, which writes to SQLite. `TRACKIO_SERVER_URL` or `TRACKIO_SPACE_ID` send the numbers elsewhere."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from executors.view.report.trackers import PROJECT, Tracked


class Tracker:
    """One run of trackio, which a resumed rank continues."""

    def __init__(self, tracked: Tracked) -> None:
        import trackio

        self._run = trackio.init(
            os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=tracked.name,
            group=tracked.run,
            config=dict(tracked.config),
            resume="allow",
            embed=False,
            auto_log_cpu=False,  # `usage/…` has it
            auto_log_gpu=False,
        )

    def log(self, numbers: Mapping[str, float], step: int | None, at: float) -> None:
        self._run.log(dict(numbers), step=step)

    def page(self, path: Path) -> None:
        self._run.log_artifact(path, name=path.stem, type="report")

    def finish(self, *, has_succeeded: bool) -> None:
        self._run.finish()
