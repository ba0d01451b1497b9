"""Tests runs with a stand-in for Ray that keeps ended jobs and runs nothing. contract/test_ray tests a real head."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from support.cli import Folder

from executors import RayExecutor, Run, attach, launch
from executors.attempt import Attempt
from executors.backends.jobs.service import JobServiceError
from executors.backends.ray_client import RayClient, RayJob
from executors.protocol import ReplicaStatus
from executors.run.run import view_of


class KeepsJobs(RayClient):
    """A head that keeps ended jobs under their names, as Ray does, and refuses to start them again."""

    kept: ClassVar[dict[str, RayJob]] = {}

    def check(self) -> None:
        pass

    def provide(self, script: str) -> None:
        pass

    def job(self, name: str) -> RayJob | None:
        return self.kept.get(name)

    def jobs(self, names: Collection[str]) -> dict[str, RayJob]:
        return {name: self.kept[name] for name in names if name in self.kept}

    def submit(self, request: Mapping[str, Any]) -> None:
        name = request["submission_id"]
        if name in self.kept:
            raise JobServiceError(f"ValueError: Job with submission_id {name} already exists (HTTP 500).", "unknown")
        self.kept[name] = RayJob(submission_id=name, status="RUNNING", metadata=request["metadata"])

    def log(self, name: str) -> str:
        return f"of {name}"


def test_a_run_id_that_was_removed_and_launched_again_does_not_get_the_old_runs_jobs(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.backends.ray.RayClient", KeepsJobs)
    monkeypatch.setattr(KeepsJobs, "kept", {})

    def launched() -> tuple[Run, str]:
        run = launch(RayExecutor(shared_disk=True), "job.py:main", 1, run_id="otter", detach=True)
        return run, view_of(run).reader.handles.of(0).metadata["job"]["id"]

    old, old_name = launched()
    attempt = Attempt(view_of(old).store, "otter", 0)
    attempt.record(attempt.new_outcome(ReplicaStatus.SUCCEEDED))
    KeepsJobs.kept[old_name] = replace(KeepsJobs.kept[old_name], status="SUCCEEDED", driver_exit_code=0)
    old.remove()
    new, new_name = launched()
    assert [*KeepsJobs.kept] == [old_name, new_name]
    assert new.status().replicas[0].outcome is None
    assert attach("otter").logs(0) == f"of {new_name}"
