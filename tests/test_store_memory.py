"""The memory store keeps the contract of a store."""

from __future__ import annotations

import pytest

from executors.store import MemoryStore, Store, open_store
from executors.testing import StoreContract


class TestMemoryStore(StoreContract):
    in_process = True

    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore("test")


def test_a_memory_store_is_the_same_for_the_same_name_in_one_process() -> None:
    open_store("memory://one").put("a", b"1")
    assert bytes(open_store("memory://one").get("a")) == b"1"
    assert list(open_store("memory://other").list("")) == []
    assert open_store("memory://one").url == "memory://one"
