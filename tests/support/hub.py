"""Short forms of the most common requests to the local Hub, through the real client."""

from __future__ import annotations

from typing import Any

from huggingface_hub import HfApi, JobInfo
from servers.hub.server import HubServer


class Client:
    """The real client, with a token and a namespace."""

    def __init__(self, hub: HubServer) -> None:
        self.api = HfApi(endpoint=hub.endpoint, token=hub.token)
        self.namespace = hub.namespace

    def run(self, code: str = "pass", **options: Any) -> JobInfo:
        """Run Python code as a job."""
        return self.run_command(["python", "-u", "-c", code], **options)

    def run_command(self, command: list[str], **options: Any) -> JobInfo:
        options = {"timeout": 600, "namespace": self.namespace, **options}
        return self.api.run_job(image="python:3.12", command=command, **options)

    def look(self, job: JobInfo) -> JobInfo:
        return self.api.inspect_job(job_id=job.id, namespace=self.namespace)

    def ended(self, job: JobInfo) -> JobInfo:
        """Wait for a job to end."""
        return self.api.wait_for_job(job_id=job.id, namespace=self.namespace, timeout=60, poll_interval=0.02)

    def logs(self, job: JobInfo, **options: Any) -> list[str]:
        return list(self.api.fetch_job_logs(job_id=job.id, namespace=self.namespace, **options))

    def cancel(self, job: JobInfo) -> None:
        self.api.cancel_job(job_id=job.id, namespace=self.namespace)

    def listed(self, **options: Any) -> list[str]:
        """Return the ids of the jobs in a listing."""
        return [job.id for job in self.api.list_jobs(namespace=self.namespace, **options)]
