"""All stores keep the contract of a store, and behave as a dictionary; the contract finds stores that do not."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from servers.s3.server import S3Server

from executors.errors import KeyNotFoundError, StoreError
from executors.store import Entry, MemoryStore, Store, open_store
from executors.store.faulty import FaultyStore
from executors.store.file import FileStore
from executors.store.protocol import Data, buffers_of
from executors.testing import StoreContract, eventually, store_contract, store_process
from executors.testing.helpers import python_process, receive
from executors.testing.store_races import StoreRaces


@pytest.fixture
def s3(moto: S3Server) -> S3Server:
    return moto  # the tests of the store need more of a server than other tests do


class TestMemoryStore(StoreContract):
    in_process = True

    @pytest.fixture
    def store(self) -> Store:
        return MemoryStore("test")


class TestFaultyStoreWithoutFaults(StoreContract):
    in_process = True

    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore("test"), seed=0)


class TestFileStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(tmp_path / "it's a store, 100% ä\n#?")


class TestFileStoreWithoutAnonymousFiles(StoreRaces):
    """The store as on macOS, and on file systems without O_TMPFILE, where a new object gets its name in another way."""

    opener = "support.stores:open_without_anonymous_files"

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.delattr(os, "O_TMPFILE")
        return open_store(tmp_path / "store")


def test_an_unfinished_file_in_a_directory_has_no_name(tmp_path: Path) -> None:
    root = tmp_path / "store"
    store = open_store(root)
    args = ["executors.store:open_store", store.url, "write_one", "put_if_absent", "half", "2048"]
    with python_process(Path(store_process.__file__), *args) as writer:
        assert receive(writer) == "ready"
        written = eventually(lambda: bytes_being_written(writer.pid, root), "the writer has begun to write", every_s=0)
        writer.kill()
        writer.wait()
    assert 0 < written < 2048 << 20, "the writer is killed in the middle of the object"
    assert [path for path in root.rglob("*") if path.is_file()] == []


def test_a_hidden_file_of_a_killed_writer_is_deleted_when_the_store_is_opened_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    root = tmp_path / "store"
    store = open_store(root)
    args = ["support.stores:open_without_anonymous_files", store.url, "write_one", "put", "half", "2048"]
    with python_process(Path(store_process.__file__), *args) as writer:
        assert receive(writer) == "ready"
        eventually(lambda: bytes_being_written(writer.pid, root), "the writer has begun to write", every_s=0)
        writer.kill()
        writer.wait()
    (left,) = root.iterdir()
    open_store(root)
    assert left.exists(), "a recent hidden file may belong to another writer, so it stays"
    os.utime(left, (0, time.time() - 2 * 86400))
    FileStore(root)
    assert list(root.iterdir()) == []


def test_no_file_in_another_place_is_deleted_as_the_rest_of_a_killed_writer(tmp_path: Path) -> None:
    (elsewhere := tmp_path / "elsewhere").mkdir()
    (theirs := elsewhere / "old").touch()
    os.utime(theirs, (0, 0))
    store = FileStore(tmp_path / "store")
    (store.root / ".unfinished~").symlink_to(elsewhere)
    (store.root / ".unfinished~1").symlink_to(theirs)
    store.put("old", b"x")
    os.utime(store.root / "old", (0, 0))
    FileStore(store.root)
    assert theirs.exists()
    assert bytes(store.get("old")) == b"x"


def bytes_being_written(pid: int, root: Path) -> int:
    """Return the size of the unfinished file that a process holds open below the store."""
    for number in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(number).startswith(str(root)) and stat.S_ISREG(number.stat().st_mode):
                return number.stat().st_size
    return 0


class TestS3Store(StoreContract):
    faults: ClassVar[dict[str, Any]] = {}
    n_threads = 8
    n_processes = 2
    n_times = 20
    n_readings = 20
    n_neighbours = 20

    @pytest.fixture
    def store(self, s3: S3Server) -> Store:
        store = open_store(s3.url())
        s3.misbehave(seed=1, **self.faults)
        return store


@pytest.mark.slow
class TestS3StoreBehindStumblingServer(TestS3Store):
    faults: ClassVar[dict[str, Any]] = {
        "unavailable": 0.05,
        "conflict": 0.05,
        "lost": 0.02,
        "truncated": 0.01,
        "delay_s": 0.005,
    }


# There are few names, so that keys collide. Some of them sort next to "/", and some only look like a folder.
SEGMENTS = st.sampled_from(["a", "aa", "a.", "a-", "a0", "b", ".a", " ", "é", "ä b", "%2F", "A"])
KEYS = st.lists(SEGMENTS, min_size=1, max_size=3).map("/".join)
VALUES = st.binary(max_size=20) | st.integers(1, 3).map(lambda n: bytes([n]) * 140_000)


class StoreLikeADictionary(RuleBasedStateMachine):
    """The rules run against a store and a dictionary, and the two are compared after each."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.model: dict[str, bytes] = {}

    def can_hold(self, key: str) -> bool:
        """A directory cannot hold both a key and keys below it."""
        above = [key[:at] for at in range(len(key)) if key[at] == "/"]
        return not any(path in self.model for path in above) and not any(k.startswith(f"{key}/") for k in self.model)

    @rule(key=KEYS, value=VALUES)
    def put(self, key: str, value: bytes) -> None:
        try:
            self.store.put(key, [value[:7], value[7:]])
            self.model[key] = value
        except StoreError:
            assert not self.can_hold(key)

    @rule(key=KEYS, value=VALUES)
    def put_if_absent(self, key: str, value: bytes) -> None:
        try:
            assert self.store.put_if_absent(key, value) is (key not in self.model)
            self.model.setdefault(key, value)
        except StoreError:
            assert not self.can_hold(key)

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.store.delete(key)
        self.model.pop(key, None)

    @rule(key=KEYS, start=st.integers(0, 25), size=st.none() | st.integers(0, 25))
    def get(self, key: str, start: int, size: int | None) -> None:
        value = self.model.get(key)
        try:
            read = bytes(self.store.get(key, start=start, size=size))
        except KeyNotFoundError:
            assert value is None
        except StoreError:
            assert value is not None
            assert len(value) < start + (size or 0)
        else:
            assert value is not None
            assert read == value[start : None if size is None else start + size]

    @rule(prefix=st.just("") | KEYS | KEYS.map(lambda key: f"{key}/"))
    def list(self, prefix: str) -> None:
        listed = [(entry.key, entry.size_bytes) for entry in self.store.list(prefix)]
        assert listed == sorted((key, len(value)) for key, value in self.model.items() if key.startswith(prefix))

    @invariant()
    def everything_is_there(self) -> None:
        assert {entry.key: bytes(self.store.get(entry.key)) for entry in self.store.list("")} == self.model


class FileStoreLikeADictionary(StoreLikeADictionary):
    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        super().__init__(FileStore(Path(self.folder.name)))

    def teardown(self) -> None:
        self.folder.cleanup()


class MemoryStoreLikeADictionary(StoreLikeADictionary):
    def __init__(self) -> None:
        super().__init__(MemoryStore())


TestFileStoreLikeADictionary = FileStoreLikeADictionary.TestCase
TestMemoryStoreLikeADictionary = MemoryStoreLikeADictionary.TestCase
TestFileStoreLikeADictionary.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestMemoryStoreLikeADictionary.settings = TestFileStoreLikeADictionary.settings


class LooksBeforeItWrites(MemoryStore):
    """A mutant that first looks for the key and then writes, in two steps instead of one."""

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
    """A mutant that keeps the caller's buffer instead of a copy of its bytes."""

    def put(self, key: str, data: Data) -> None:
        self.kept: Any = getattr(self, "kept", {})
        self.kept[key] = buffers_of(data)
        super().put(key, data)

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        super().get(key, start=start, size=size)
        return memoryview(b"".join(getattr(self, "kept", {}).get(key, [])))


class WritesInParts(MemoryStore):
    """A mutant that first replaces an object by a part of the new bytes, and then by all of them."""

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
MUTANTS: list[tuple[type[MemoryStore], Callable[[Store], None]]] = [
    (LooksBeforeItWrites, CONTRACT.test_of_many_threads_exactly_one_creates_a_key),
    (HidesWhoWon, CONTRACT.test_the_first_creation_wins_and_reports_that),
    (HidesWhoWon, CONTRACT.test_of_many_threads_exactly_one_creates_a_key),
    (ListsAsItLikes, CONTRACT.test_a_listing_is_sorted_by_code_point),
    (ListsTooMuch, CONTRACT.test_a_listing_has_exactly_the_keys_with_the_prefix),
    (CutsRanges, CONTRACT.test_a_range_behind_the_end_says_how_long_the_object_is),
    (KeepsWhatItWasGiven, CONTRACT.test_a_later_change_of_the_callers_buffer_does_not_reach_the_object),
    (WritesInParts, CONTRACT.test_readers_never_see_part_of_a_replaced_object),
    (TakesAnyKey, CONTRACT.test_a_key_that_could_escape_is_refused_by_every_verb),
    (GivesWritableViews, CONTRACT.test_an_object_is_read_as_a_read_only_view_of_bytes),
]


def test_a_store_that_breaks_a_promise_fails_its_test() -> None:
    for mutant, test in MUTANTS:
        test(MemoryStore("good"))
        try:
            test(mutant("bad"))
        except (AssertionError, pytest.fail.Exception):
            continue
        pytest.fail(f"{mutant.__name__} passes {test.__name__}")


def test_a_known_gap_names_a_test_of_the_contract_and_is_marked_only_in_its_own_suite() -> None:
    with pytest.raises(TypeError, match="test_of_nothing"):
        type("TestMine", (StoreContract,), {"expected_failures": {"test_of_nothing": "why"}})
    name = "test_the_first_creation_wins_and_reports_that"
    mine = type("TestMine", (StoreContract,), {"expected_failures": {name: "it does not"}})
    (mark,) = getattr(mine, name).pytestmark
    assert (mark.name, mark.kwargs) == ("xfail", {"reason": "it does not", "strict": True})
    assert not hasattr(getattr(StoreContract, name), "pytestmark")


def test_each_awkward_key_is_legal_and_one_has_the_maximum_length() -> None:
    assert not set(store_contract.AWKWARD_KEYS.values()) & set(store_contract.BAD_KEYS.values())
    longest = max(store_contract.AWKWARD_KEYS.values(), key=lambda key: len(key.encode()))
    assert len(longest.encode()) == 1024
