"""Makes Kubernetes jobs for tests, and waits for them."""

from __future__ import annotations

from typing import Any

from executors.backends.jobs.service import JobKey, JobSpec, JobState
from executors.backends.kubernetes import KubernetesJobs
from executors.testing import eventually

SLEEP = "echo hanging; exec sleep 600"


def job(script: str = "true", rank: int = 0, **more: Any) -> JobSpec:
    usual: dict[str, Any] = {"env": {"MINE": "my-own-value"}, "credentials": {"KEY": "hush"}, "limit_s": 300, **more}
    return JobSpec(JobKey("s3://bucket/runs", "otter", rank, 1), ("sh", "-c", script), (), **usual)


def state(service: KubernetesJobs, job_id: dict[str, Any]) -> JobState:
    """Wait for the end of a job."""
    eventually(lambda: service.state(job_id).has_ended)
    return service.state(job_id)


def started(service: KubernetesJobs, *jobs: JobSpec) -> list[dict[str, Any]]:
    """Start a group, and wait until each job has printed a line."""
    ids = service.start_jobs(jobs)
    for job_id in ids:
        eventually(lambda job_id=job_id: service.logs(job_id, 1) == "hanging\n")  # type: ignore[misc]
    return ids
