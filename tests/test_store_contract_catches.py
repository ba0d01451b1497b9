"""The contract of a store finds stores that do not keep it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from executors.errors import KeyNotFoundError
from executors.store import Entry, MemoryStore, open_store
from executors.store.protocol import Data, buffers_of
from executors.testing import StoreContract, store_contract
from executors.testing.known_gaps import KnownGaps


class LooksBeforeItWrites(MemoryStore):
    """Two steps where one is needed."""

    def put_if_absent(self, key: str, data: Data) -> bool:
        try:
            self.get(key)
        except KeyNotFoundError:
            time.sleep(0)
            self.put(key, data)
            return True
        return False


class HidesWhoWon(MemoryStore):
    def put_if_absent(self, key: str, data: Data) -> bool:
        super().put_if_absent(key, data)
        return True


class ListsAsItLikes(MemoryStore):
    def list(self, prefix: str) -> Iterator[Entry]:
        return reversed([*super().list(prefix)])


class ListsTooMuch(MemoryStore):
    def list(self, prefix: str) -> Iterator[Entry]:
        return super().list(prefix.rstrip("/"))


class CutsRanges(MemoryStore):
    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        with contextlib.suppress(KeyNotFoundError):
            return super().get(key)[start:][:size]
        return super().get(key, start=start, size=size)


class KeepsWhatItWasGiven(MemoryStore):
    """Keeps the caller's buffer instead of its bytes."""

    def put(self, key: str, data: Data) -> None:
        self.kept: Any = getattr(self, "kept", {})
        self.kept[key] = buffers_of(data)
        super().put(key, data)

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        super().get(key, start=start, size=size)
        return memoryview(b"".join(getattr(self, "kept", {}).get(key, [])))


class WritesInParts(MemoryStore):
    """Replaces an object by a part, and then by the whole."""

    def put(self, key: str, data: Data) -> None:
        whole = b"".join(buffers_of(data))
        super().put(key, whole[: len(whole) // 2])
        time.sleep(0)
        super().put(key, whole)


class TakesAnyKey(MemoryStore):
    def delete(self, key: str) -> None:
        with contextlib.suppress(ValueError):
            super().delete(key)


class GivesWritableViews(MemoryStore):
    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        return memoryview(bytearray(super().get(key, start=start, size=size)))


CONTRACT = StoreContract()
MUTANTS: list[tuple[type[MemoryStore], Callable[[Any], None]]] = [
    (LooksBeforeItWrites, CONTRACT.test_of_many_threads_exactly_one_creates_a_key),
    (HidesWhoWon, CONTRACT.test_the_first_creation_wins_and_says_so),
    (HidesWhoWon, CONTRACT.test_of_many_threads_exactly_one_creates_a_key),
    (ListsAsItLikes, CONTRACT.test_a_listing_is_sorted_by_code_point),
    (ListsTooMuch, CONTRACT.test_a_listing_has_exactly_the_keys_with_the_prefix),
    (CutsRanges, lambda store: CONTRACT.test_a_range_behind_the_end_says_how_long_the_object_is(store, 0, 4)),
    (KeepsWhatItWasGiven, CONTRACT.test_a_later_change_of_the_callers_buffer_does_not_reach_the_object),
    (WritesInParts, CONTRACT.test_readers_never_see_part_of_a_replaced_object),
    (TakesAnyKey, lambda store: CONTRACT.test_a_key_that_could_escape_is_refused_by_every_verb(store, "../x")),
    (GivesWritableViews, CONTRACT.test_what_is_read_is_a_read_only_view_of_bytes),
]


@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_store_that_breaks_a_promise_fails_its_test(mutant: type[MemoryStore], test: Callable[[Any], None]) -> None:
    test(MemoryStore("good"))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(mutant("bad"))


def test_a_known_gap_has_to_be_one_of_the_contracts_tests() -> None:
    with pytest.raises(TypeError, match="test_of_nothing"):
        type("TestMine", (StoreContract,), {"expected_failures": {"test_of_nothing": "why"}})


def test_a_known_gap_is_marked_in_its_own_suite_alone() -> None:
    name = "test_the_first_creation_wins_and_says_so"
    mine = type("TestMine", (StoreContract,), {"expected_failures": {name: "it does not"}})
    (mark,) = getattr(mine, name).pytestmark
    assert (mark.name, mark.kwargs) == ("xfail", {"reason": "it does not", "strict": True})
    assert not hasattr(getattr(StoreContract, name), "pytestmark")
    assert issubclass(mine, KnownGaps)


def test_the_awkward_keys_are_allowed_and_the_bad_ones_are_not(tmp_path: Path) -> None:
    assert not set(store_contract.AWKWARD_KEYS.values()) & set(store_contract.BAD_KEYS.values())
    longest = max(store_contract.AWKWARD_KEYS.values(), key=lambda key: len(key.encode()))
    assert len(longest.encode()) == 1024
    open_store(tmp_path / "store").put(longest, b"x")
