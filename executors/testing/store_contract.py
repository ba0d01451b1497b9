"""StoreContract: tests that every store must pass. Subclass it, supply a `store`, and inherit the tests.

    class TestMyStore(StoreContract):
        @pytest.fixture
        def store(self, tmp_path):
            return MyStore(tmp_path)

Some tests start other processes, which open the store by its url with the function `opener`. If your store keeps its
objects in the memory of one process, set `in_process = True`.
"""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from executors.errors import KeyNotFoundError, StoreError
from executors.store import Buffer, Entry, Store
from executors.testing.helpers import KnownGaps
from executors.testing.store_races import StoreRaces

MIB = 1 << 20
LARGE_BYTES = 64 * MIB

AWKWARD_KEYS = {
    "spaces": "a b/ c /d ",
    "single quote": "it's",
    "double quote": 'say "a"',
    "newline": "one\ntwo",
    "tab and carriage return": "a\tb\rc",
    "umlaut": "größe/ä",
    "emoji": "🦦/otter",
    "right to left": "שלום",
    "leading dot": ".hidden/.file",
    "three dots": ".../a",
    "percent": "100%/%2F/%2e%2e",
    "backslash": "a\\b",
    "question mark and hash": "a?b=c#d",
    "star and brackets": "*[a]?{b}",
    "colon": "c:/x",
    "leading hyphen": "-rf",
    "tilde": "~/x~",
    "plus and ampersand": "a+b&c",
    "dollar": "$HOME/${x}",
    "trailing dot": "a./b.",
    "longest segment": "x" * 255,
    "longest segment in UTF-8": "ä" * 127,
    "longest key": "/".join(["y" * 203] * 5) + "/zzzz",
    "deepest key": "/".join(["d"] * 512),
}

BAD_KEYS = {
    "empty": "",
    "absolute": "/etc/passwd",
    "parent": "..",
    "parent first": "../x",
    "parent within": "a/../../x",
    "dot": ".",
    "dot within": "a/./b",
    "empty segment": "a//b",
    "trailing slash": "a/",
    "NUL": "a\0b",
    "lone surrogate": "a\udcff",
    "segment too long": "x" * 256,
    "segment too long in UTF-8": "ä" * 128,
    "key too long": "/".join(["y" * 204] * 5) + "/z",
}


class StoreContract(StoreRaces, KnownGaps):
    """Tests of a store with one user. `StoreRaces` adds the tests with many users at the same time.

    The class has more than 20 methods, because each promise of `Store` is one test.

    Example:
        class TestMyStore(StoreContract):
            @pytest.fixture
            def store(self, tmp_path):
                return MyStore(tmp_path)
    """

    in_process: ClassVar[bool] = False
    """True if the store keeps its objects in the memory of this process, so that other processes cannot see them."""
    n_neighbours: ClassVar[int] = 2000
    """The number of keys in a large folder. Set a smaller number if each call is a request."""

    @pytest.fixture
    def store(self) -> Store:
        """An empty store."""
        raise NotImplementedError("Supply a `store` fixture that returns an empty store.")

    # --- values

    def test_it_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
        assert "://" in store.url

    def test_a_written_object_is_read_at_once(self, store: Store) -> None:
        for size in (0, 1, 4095, 4096, 128 * 1024 - 1, 128 * 1024, 128 * 1024 + 1):
            value = bytes(index * 31 % 251 for index in range(size))
            for verb in ("put", "put_if_absent"):
                getattr(store, verb)(f"runs/{verb}/{size}", value)
                assert bytes(store.get(f"runs/{verb}/{size}")) == value, (verb, size)

    def test_a_large_value_comes_back_whole(self, store: Store) -> None:
        value = bytes(range(256)) * (LARGE_BYTES // 256)
        store.put("large", value)
        view = store.get("large")
        assert len(view) == LARGE_BYTES
        assert view == value
        assert store.get("large", start=LARGE_BYTES - 3) == value[-3:]

    def test_buffers_of_any_kind_and_number_are_written_joined(self, store: Store) -> None:
        parts: list[Buffer] = [b"one", bytearray(b""), bytearray(b"two"), memoryview(b"-three-")[1:6], b""]
        assert store.put_if_absent("created", tuple(parts))
        assert bytes(store.get("created")) == b"onetwothree"
        numbers: Any = memoryview(bytes(range(64))).cast("f", (4, 4))
        more: Any = memoryview(bytes(8)).cast("d")
        many = [bytes([index % 251]) for index in range(20_000)]
        for data in (parts, [], [numbers, more], many):
            store.put("joined", data)
            assert bytes(store.get("joined")) == b"".join(map(bytes, data))

    def test_a_later_change_of_the_callers_buffer_does_not_reach_the_object(self, store: Store) -> None:
        buffer = bytearray(b"before")
        store.put("kept", buffer)
        store.put_if_absent("kept too", [buffer])
        buffer[:] = b"after!"
        assert bytes(store.get("kept")) == bytes(store.get("kept too")) == b"before"

    def test_text_is_refused(self, store: Store) -> None:
        with pytest.raises(TypeError):
            store.put("text", "not bytes")  # type: ignore[arg-type]
        with pytest.raises(KeyNotFoundError):
            store.get("text")

    def test_writing_a_large_sequence_of_buffers_copies_nothing(self, store: Store) -> None:
        if self.in_process:
            pytest.skip("this store keeps its objects in memory, so the test cannot measure copies")
        part = bytes(MIB)
        tracemalloc.start()
        try:
            store.put("parts", [part] * 64)
            store.put_if_absent("more parts", [part] * 64)
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak_bytes < 16 * MIB

    # --- ranges

    def test_a_range_is_exactly_the_bytes_asked_for(self, store: Store) -> None:
        for size_bytes in (1000, MIB):
            value = bytes(index * 7 % 251 for index in range(size_bytes))
            store.put("value", value)
            starts, sizes = (0, 1, 17, size_bytes // 2, size_bytes - 1, size_bytes), (0, 1, 300, size_bytes // 2)
            ranges = [(start, size) for start in starts for size in (*sizes, size_bytes, size_bytes - start)]
            pages = (4095, 4096, 4097, 8191, 65535, 65536)
            ranges += [(start, size) for start in pages for size in (131071, 131072, 131073, 262144)]
            for start, size in ranges:
                if start + size <= size_bytes:
                    assert store.get("value", start=start, size=size) == value[start : start + size], (start, size)
            for start in starts:
                assert store.get("value", start=start) == value[start:], start

    def test_an_object_is_read_as_a_read_only_view_of_bytes(self, store: Store) -> None:
        store.put("small", b"abc")
        store.put("large", bytes(MIB))
        for key, start, size in (("small", 0, None), ("small", 1, 1), ("large", 0, None), ("large", 5, None)):
            view = store.get(key, start=start, size=size)
            assert isinstance(view, memoryview)
            assert view.readonly
            assert (view.format, view.ndim, view.c_contiguous) == ("B", 1, True)
            with pytest.raises(TypeError):
                view[0] = 1

    def test_a_range_behind_the_end_says_how_long_the_object_is(self, store: Store) -> None:
        store.put("runs/short", b"abc")
        ranges: tuple[tuple[int, int | None], ...] = ((0, 4), (3, 1), (4, None), (4, 0), (1, 1 << 62))
        for start, size in ranges:
            with pytest.raises(StoreError, match=r"'runs/short'.*3 bytes") as caught:
                store.get("runs/short", start=start, size=size)
            assert not isinstance(caught.value, KeyNotFoundError), (start, size)
            assert (caught.value.key, caught.value.url) == ("runs/short", store.url)

    def test_a_negative_range_is_refused(self, store: Store) -> None:
        store.put("a", b"abc")
        for start, size in ((-1, None), (0, -1), (-3, 2)):
            with pytest.raises(ValueError, match=f"start={start}, size={size}"):
                store.get("a", start=start, size=size)

    def test_bytes_that_were_read_stay_when_the_object_is_replaced_or_deleted(self, store: Store) -> None:
        for size in (10, MIB):
            store.put("changing", b"a" * size)
            first = store.get("changing")
            store.put("changing", b"b" * size)
            second = store.get("changing")
            store.delete("changing")
            assert first == b"a" * size
            assert second == b"b" * size

    # --- absence, creation, deletion

    def test_a_missing_key_is_an_error_with_key_and_url(self, store: Store) -> None:
        for keywords in ({}, {"size": 0}, {"start": 5}, {"start": 1, "size": 0}):
            with pytest.raises(KeyNotFoundError, match="'runs/nothing'") as caught:
                store.get("runs/nothing", **keywords)
            assert (caught.value.key, caught.value.url) == ("runs/nothing", store.url)
            assert isinstance(caught.value, FileNotFoundError)

    def test_the_first_creation_wins_and_reports_that(self, store: Store) -> None:
        assert store.put_if_absent("seal", b"first") is True
        assert store.put_if_absent("seal", b"second") is False
        assert bytes(store.get("seal")) == b"first"
        store.put("written", b"1")
        assert not store.put_if_absent("written", b"2")

    def test_an_empty_object_counts_as_there(self, store: Store) -> None:
        assert store.put_if_absent("marker", b"")
        assert not store.put_if_absent("marker", b"x")
        assert bytes(store.get("marker", size=0)) == b""
        assert [entry.size_bytes for entry in store.list("marker")] == [0]

    def test_a_deleted_key_can_be_created_again(self, store: Store) -> None:
        store.put("a/b/c", b"1")
        store.delete("a/b/c")
        with pytest.raises(KeyNotFoundError):
            store.get("a/b/c")
        assert store.put_if_absent("a/b/c", b"2")
        assert bytes(store.get("a/b/c")) == b"2"

    def test_deleting_a_missing_object_is_not_an_error(self, store: Store) -> None:
        store.put("a/b", b"1")
        for key in ("nothing", "a/nothing", "a/b/nothing", "a"):
            store.delete(key)
        assert bytes(store.get("a/b")) == b"1"

    def test_deleting_leaves_the_neighbours(self, store: Store) -> None:
        for key in ("a/b/c", "a/b/d", "a/bb", "a/b.c"):
            store.put(key, key.encode())
        store.delete("a/b/c")
        assert [entry.key for entry in store.list("")] == ["a/b.c", "a/b/d", "a/bb"]

    def test_put_replaces_a_long_value_by_a_short_one(self, store: Store) -> None:
        store.put("heartbeat", b"x" * 300_000)
        store.put("heartbeat", b"short")
        assert bytes(store.get("heartbeat")) == b"short"
        assert [entry.size_bytes for entry in store.list("heartbeat")] == [5]

    def test_a_key_above_other_keys_either_works_or_is_refused_and_harms_nothing(self, store: Store) -> None:
        store.put("a/b", b"below")
        for verb in (store.put, store.put_if_absent):
            for key in ("a", "a/b/c"):
                with contextlib.suppress(StoreError):
                    verb(key, b"above")
                    assert bytes(store.get(key)) == b"above"
                assert bytes(store.get("a/b")) == b"below"

    def test_a_prefix_of_keys_is_not_an_object(self, store: Store) -> None:
        for index in range(self.n_neighbours):
            store.put_if_absent(f"folder/{index:0200d}", b"")
        for keywords in ({}, {"size": 0}, {"start": 1, "size": 0}, {"start": 1 << 40}):
            with pytest.raises(KeyNotFoundError):
                store.get("folder", **keywords)

    # --- keys

    def test_an_awkward_key_is_a_key_like_any_other(self, store: Store) -> None:
        for name, key in AWKWARD_KEYS.items():
            assert store.put_if_absent(key, b"one"), name
            assert not store.put_if_absent(key, b"two"), name
            store.put(key, b"three")
            assert bytes(store.get(key)) == b"three", name
            assert [entry.key for entry in store.list("")] == [key], name
            assert [entry.key for entry in store.list(key)] == [key], name
            store.delete(key)
            assert list(store.list("")) == [], name

    def test_a_key_that_could_escape_is_refused_by_every_verb(self, store: Store) -> None:
        calls: dict[str, Callable[[str], object]] = {
            "get": store.get,
            "delete": store.delete,
            "put": lambda key: store.put(key, b""),
            "put_if_absent": lambda key: store.put_if_absent(key, b""),
        }
        for name, key in BAD_KEYS.items():
            for verb, call in calls.items():
                said = ""
                try:
                    call(key)
                except ValueError as error:
                    said = str(error)
                assert "Bad key" in said, f"{verb} with a bad key: {name}"
        assert list(store.list("")) == []

    def test_keys_that_differ_a_little_are_different(self, store: Store) -> None:
        keys = ["a", "A", "a ", " a", "a.", "é", "e\u0301", "ﬁ", "fi"]
        for key in keys:
            assert store.put_if_absent(key, key.encode()), key
        for key in keys:
            assert bytes(store.get(key)) == key.encode()

    # --- listing

    def test_a_listing_is_sorted_by_code_point(self, store: Store) -> None:
        keys = ["a-b", "a.b", "a/b-", "a/b/c", "a0", "aa", "Z", "z", "ä", "a\U0001f9a6", "a\uffee", "a /x", "a!/x"]
        for key in reversed(keys):
            store.put(key, b"")
        assert [entry.key for entry in store.list("")] == sorted(keys)

    def test_a_listing_has_exactly_the_keys_with_the_prefix(self, store: Store) -> None:
        keys = ["run-1/a", "run-1/b/c", "run-10/a", "run-2/a", "ru", "abs"]
        for key in keys:
            store.put(key, b"")
        for prefix in ("", "r", "ru", "run", "run-1", "run-1/", "run-1/b", "run-1/b/", "run-1/b/c", "run-1/cc", "x/y"):
            listed = [entry.key for entry in store.list(prefix)]
            assert listed == sorted(key for key in keys if key.startswith(prefix)), prefix
        for prefix in ("/", "/abs", "../", "run-1/../", "run-1//", "./", "//"):
            with contextlib.suppress(ValueError):  # no key begins with this text
                assert list(store.list(prefix)) == [], prefix

    def test_an_entry_has_size_and_time(self, store: Store) -> None:
        store.put("a", b"12345")
        (entry,) = store.list("a")
        assert (entry.key, entry.size_bytes) == ("a", 5)
        assert isinstance(entry, Entry)
        assert abs(entry.modified_at - time.time()) < 3600
