"""A bucket keeps the contract of a store, also when its server stumbles."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from servers.s3_server import S3Server

from executors.store import Store, open_store
from executors.testing import StoreContract


class S3Contract(StoreContract):
    faults: ClassVar[dict[str, Any]] = {}
    n_threads = 8
    n_processes = 4
    n_times = 20
    n_neighbours = 20

    @pytest.fixture
    def store(self, s3: S3Server) -> Store:
        store = open_store(s3.url())
        s3.misbehave(seed=1, **self.faults)
        return store


class TestS3Store(S3Contract):
    pass


@pytest.mark.slow
class TestS3StoreBehindStumblingServer(S3Contract):
    faults: ClassVar[dict[str, Any]] = {
        "unavailable": 0.05,
        "conflict": 0.05,
        "lost": 0.02,
        "truncated": 0.01,
        "delay_s": 0.005,
    }
