"""The tracker for MLflow.

Configure it by `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`, and credentials as secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from executors.view.report.trackers import PROJECT, TrackedReplica

FORBIDDEN = re.compile(r"[^\w\-. :/]")  # characters that MLflow refuses in names of metrics and parameters
MAX_NAME, MAX_VALUE = 250, 500
MAX_PARAMS = 100  # the most parameters in one call
RUN, LAUNCHED, RANK = "replicas.run", "replicas.launched", "replicas.rank"


class Tracker:
    """Sends numbers to one MLflow run per rank. A resumed rank finds its run again by tags."""

    def __init__(self, tracked: TrackedReplica) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        tags = {RUN: tracked.run_id, LAUNCHED: repr(tracked.launched_at), RANK: str(tracked.rank)}
        mine = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        if found := self._client.search_runs([experiment], mine, max_results=1):
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        self._run_id = self._client.create_run(experiment, tags=tags, run_name=tracked.name).info.run_id
        config = [Param(_name(name), str(value)[:MAX_VALUE]) for name, value in tracked.config.items()]
        self._client.log_batch(self._run_id, params=config[:MAX_PARAMS])

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        if found := self._client.get_experiment_by_name(name):
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name))
        except MlflowException:  # another rank has just created the experiment
            if found := self._client.get_experiment_by_name(name):
                return str(found.experiment_id)
            raise

    def log(self, numbers: Mapping[str, float], step: int | None, at: float) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(_name(name), value, int(1000 * at), step or 0) for name, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def page(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path))

    def finish(self, *, has_succeeded: bool) -> None:
        self._client.set_terminated(self._run_id, status="FINISHED" if has_succeeded else "FAILED")


def _name(text: str) -> str:
    return FORBIDDEN.sub("_", text)[:MAX_NAME]
