"""The contract suites: what every store and every executor, ours or yours, has to keep.

Subclass in a test file, supply the fixtures, and inherit every test:

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path)

Needs pytest, and is imported by tests alone. `tasks` needs nothing: replicas import it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from executors.testing.executor_contract import ExecutorContract
    from executors.testing.store_contract import StoreContract
    from executors.testing.waiting import eventually

__all__ = ["ExecutorContract", "StoreContract", "eventually"]

_HOMES = {"ExecutorContract": "executor_contract", "StoreContract": "store_contract", "eventually": "waiting"}
_WITH_ASSERTIONS = ("executor_contract", "executor_endings", "store_contract", "store_races", "waiting")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest  # not at the top: a replica that imports `tasks` may have none

    pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _WITH_ASSERTIONS))
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
