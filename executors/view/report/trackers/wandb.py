"""The tracker for Weights & Biases. Configure it by `WANDB_PROJECT`, `WANDB_MODE`, and `WANDB_API_KEY` as a secret."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from executors.view.report.trackers import PROJECT, TrackedReplica


class Tracker:
    """Sends numbers to one W&B run per rank. A resumed rank continues its run."""

    def __init__(self, tracked: TrackedReplica) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            group=tracked.run,
            name=tracked.name,
            id=f"{tracked.run}-{tracked.rank}",
            resume="allow",
            config=dict(tracked.config),
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        # W&B refuses a step of its own that does not grow, and a resumed rank repeats some steps.
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("round/*", step_metric="entry")

    def log(self, numbers: Mapping[str, float], step: int | None, at: float) -> None:
        over = "entry" if any(name.startswith("round/") for name in numbers) else "step"
        self._run.log({**numbers, **({} if step is None else {over: step}), "_timestamp": at})

    def page(self, path: Path) -> None:
        self._run.log_artifact(str(path), name=path.stem, type="report")

    def finish(self, *, has_succeeded: bool) -> None:
        self._run.finish(exit_code=0 if has_succeeded else 1)
