"""Slurm keeps the contract of a job service, at a real cluster on loopback."""

from __future__ import annotations

import pytest
from servers.slurm.cluster import Cluster

from executors import SlurmExecutor
from executors.backends.jobs.service import JobId, JobService
from executors.testing import JobServiceContract

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(240)]


class TestSlurmJobs(JobServiceContract):
    patience_s = 150.0  # a limit is at least one minute, and Slurm checks it every 30 s

    @pytest.fixture
    def service(self, slurm: Cluster) -> JobService:
        return SlurmExecutor().service

    def another(self, service: JobService) -> JobService:
        return SlurmExecutor(**service.options).service

    def unknown(self, service: JobService) -> JobId:
        return {"id": "99999999", "task": 3, "cluster": "replicas"}
