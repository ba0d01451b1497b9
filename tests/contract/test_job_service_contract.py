"""Hugging Face Jobs, Modal and the fake service keep the contract of a job service, at local servers."""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
from servers.hub.server import HubServer
from servers.modal.server import ModalServer
from support.fake_jobs import FakeJobs, GroupingFakeJobs, ListingFakeJobs, Machines

from executors import HFJobsExecutor, ModalExecutor
from executors.backends.jobs.service import JobId, JobService
from executors.testing import JobServiceContract


class TestFakeJobs(JobServiceContract):
    service_class: ClassVar[type[FakeJobs]] = FakeJobs

    @pytest.fixture
    def service(self, machines: Machines) -> JobService:
        return self.service_class(machines)

    def another(self, service: JobService) -> JobService:
        assert isinstance(service, FakeJobs)
        return self.service_class(service.machines)

    def unknown(self, service: JobService) -> JobId:
        return {"id": "never-was", "url": "https://fake.example/never-was"}


class TestListingFakeJobs(TestFakeJobs):
    service_class: ClassVar[type[FakeJobs]] = ListingFakeJobs


class TestGroupingFakeJobs(TestFakeJobs):
    service_class: ClassVar[type[FakeJobs]] = GroupingFakeJobs


class TestHFJobs(JobServiceContract):
    @pytest.fixture
    def service(self, hf: HubServer) -> JobService:
        hf.jobs.term_grace_s = 0.1
        return HFJobsExecutor().service

    def another(self, service: JobService) -> JobService:
        return HFJobsExecutor(**service.options).service

    def unknown(self, service: JobService) -> JobId:
        found = {"id": "0" * 24, "namespace": "ada"}
        return {**found, "url": f"{os.environ['HF_ENDPOINT']}/jobs/ada/{found['id']}"}


class TestModalJobs(JobServiceContract):
    @pytest.fixture
    def service(self, modal_runs: ModalServer) -> JobService:
        return ModalExecutor().service

    def another(self, service: JobService) -> JobService:
        return ModalExecutor(**service.options).service

    def unknown(self, service: JobService) -> JobId:
        name = "sb-01234567890123456789AB" if self.gpu else "sb-2never"
        return {"sandbox_id": name, "url": f"https://modal.com/id/{name}"}


class TestModalJobsWithGpus(TestModalJobs):
    """The contract with sandboxes of the SDK's older back end."""

    gpu: ClassVar[str | None] = "H100"
    expected_failures: ClassVar[dict[str, str]] = {
        "test_a_job_that_has_ended_is_found": "Modal finds these by name only while they run",
    }
