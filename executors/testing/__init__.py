"""Contract suites: tests that check a store, executor or job service against its interface, also your own.

Subclass a suite in a test file, supply its fixtures, and inherit its tests:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path)

The suites need pytest, so only tests import them. Replicas import `tasks`, which needs only Python.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executors.testing.executor_contract import ExecutorContract
    from executors.testing.helpers import eventually
    from executors.testing.job_service_contract import JobServiceContract
    from executors.testing.store_contract import StoreContract

__all__ = ["ExecutorContract", "JobServiceContract", "StoreContract", "eventually"]

_HOMES = {
    "ExecutorContract": "executor_contract",
    "JobServiceContract": "job_service_contract",
    "StoreContract": "store_contract",
    "eventually": "helpers",
}
_WITH_ASSERTIONS = ("executor_contract", "job_service_contract", "store_contract", "store_races")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest  # not at the top: a replica that imports `tasks` may have no pytest

    pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _WITH_ASSERTIONS))
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
