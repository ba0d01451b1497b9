"""A directory store that somebody else can write into leads nowhere else, blocks nobody, and is read in bounds."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from servers.s3_server import S3Server

from executors.errors import CorruptObjectError, KeyNotFoundError, StoreError
from executors.records import get_at_most
from executors.store import MemoryStore, Store, no_links, open_store
from executors.store.protocol import BoundedStore


@pytest.fixture(params=["openat2", "step by step"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store as on Linux, and as where the kernel does not know `openat2`."""
    if request.param == "step by step":
        monkeypatch.setattr(no_links, "_has_openat2", False)
    elif not no_links._has_openat2:
        pytest.skip("this kernel has no openat2")
    return open_store(tmp_path / "store")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of the reader's own, with a file in it."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "mine").write_bytes(b"nobody else's business")
    return folder


def content_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_link_to_a_file_is_not_read(store: Store, elsewhere: Path, tmp_path: Path) -> None:
    (tmp_path / "store" / "key").symlink_to(elsewhere / "mine")
    with pytest.raises(StoreError, match="symbolic link"):
        store.get("key")
    with pytest.raises(StoreError, match="symbolic link"):
        store.get("key", size=0)


ACTS: list[Callable[[Store], object]] = [
    lambda store: store.get("linked/mine"),
    lambda store: store.put("linked/mine", b"overwritten"),
    lambda store: store.put("linked/new", b"made"),
    lambda store: store.put("linked/new/deeper", b"made"),
    lambda store: store.put_if_absent("linked/new", b"made"),
    lambda store: store.delete("linked/mine"),
    lambda store: list(store.list("linked/")),
    lambda store: list(store.list("linked/m")),
]


@pytest.mark.parametrize("number", range(len(ACTS)))
def test_a_link_to_a_folder_is_not_followed(store: Store, elsewhere: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "store" / "linked").symlink_to(elsewhere)
    before = content_of(elsewhere)
    with contextlib.suppress(StoreError):
        found = ACTS[number](store)
        assert not found
    assert content_of(elsewhere) == before


def test_a_link_is_listed_and_deleted_as_what_it_is(store: Store, elsewhere: Path, tmp_path: Path) -> None:
    store.put("run/real", b"")
    (tmp_path / "store" / "run" / "linked").symlink_to(elsewhere)
    (tmp_path / "store" / "run" / "file").symlink_to(elsewhere / "mine")
    keys = [entry.key for entry in store.list("run/")]
    assert keys == ["run/file", "run/linked", "run/real"]
    for key in keys:
        store.delete(key)
    assert list(store.list("")) == []
    assert content_of(elsewhere) == {"mine": b"nobody else's business"}


def test_a_link_is_replaced_and_not_written_through(store: Store, elsewhere: Path, tmp_path: Path) -> None:
    (tmp_path / "store" / "key").symlink_to(elsewhere / "mine")
    assert store.put_if_absent("key", b"created") is False
    store.put("key", b"replaced")
    assert bytes(store.get("key")) == b"replaced"
    assert content_of(elsewhere) == {"mine": b"nobody else's business"}


def test_the_stores_own_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = open_store(tmp_path / "link" / "runs")
    store.put("a/b", b"there")
    assert (tmp_path / "real" / "runs" / "a" / "b").read_bytes() == b"there"
    assert store.url == (tmp_path / "link" / "runs").as_uri()


def test_a_pipe_in_the_place_of_an_object_blocks_nobody(store: Store, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "store" / "pipe")
    with pytest.raises(KeyNotFoundError):
        store.get("pipe")


def test_folders_that_are_deeper_than_any_key_are_passed_over(store: Store, tmp_path: Path) -> None:
    store.put("run/real", b"")
    folder = os.open(tmp_path / "store", os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=folder)
        deeper = os.open("d", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = deeper
    os.close(folder)
    keys = [entry.key for entry in store.list("")]
    subprocess.run(["rm", "-r", tmp_path / "store" / "d"], check=True)  # which pytest would fail to remove
    assert keys == ["run/real"]


def bounded_stores(tmp_path: Path, s3: S3Server) -> list[Store]:
    return [open_store(tmp_path / "store"), open_store(s3.url("runs")), MemoryStore()]


def test_an_object_that_is_too_large_is_refused_by_every_store(tmp_path: Path, s3: S3Server) -> None:
    for store in bounded_stores(tmp_path, s3):
        for size in (0, 1, 9, 10):
            store.put("small", b"x" * size)
            assert bytes(get_at_most(store, "small", 10)) == b"x" * size
        store.put("large", b"x" * 11)
        with pytest.raises(CorruptObjectError, match=r"'large'.* 11 bytes, at most 10"):
            get_at_most(store, "large", 10)
        with pytest.raises(KeyNotFoundError):
            get_at_most(store, "missing", 10)


def test_a_bucket_and_a_directory_refuse_it_before_it_is_read(tmp_path: Path, s3: S3Server) -> None:
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)  # a terabyte, on paper
    directory = open_store(tmp_path)
    with pytest.raises(CorruptObjectError):
        get_at_most(directory, "sparse", 1000)
    bucket = open_store(s3.url("runs"))
    assert isinstance(bucket, BoundedStore)
    bucket.put("large", bytes(5000))
    with pytest.raises(CorruptObjectError):
        bucket.get_at_most("large", 1000)
    assert [row["range"] for row in s3.requests("GET", "runs/large")] == ["bytes=0-999"]
