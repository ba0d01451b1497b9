"""In a directory that other users can write to, links lead nowhere else, and no object blocks a reader."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from executors.errors import KeyNotFoundError, StoreError
from executors.store import Store, no_links, open_store


@pytest.fixture(params=["openat2", "step by step"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store as on Linux, and as on a kernel without `openat2`."""
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


def test_a_link_is_not_followed(store: Store, elsewhere: Path, tmp_path: Path) -> None:
    (tmp_path / "store" / "key").symlink_to(elsewhere / "mine")
    (tmp_path / "store" / "linked").symlink_to(elsewhere)
    for size in (None, 0):
        with pytest.raises(StoreError, match="symbolic link"):
            store.get("key", size=size)
    acts: dict[str, Callable[[], object]] = {
        "get": lambda: store.get("linked/mine"),
        "put over": lambda: store.put("linked/mine", b"overwritten"),
        "put": lambda: store.put("linked/new", b"made"),
        "put below": lambda: store.put("linked/new/deeper", b"made"),
        "create": lambda: store.put_if_absent("linked/new", b"made"),
        "delete": lambda: store.delete("linked/mine"),
        "list": lambda: list(store.list("linked/")),
        "list some": lambda: list(store.list("linked/m")),
    }
    for name, act in acts.items():
        with contextlib.suppress(StoreError):
            assert not act(), name
        assert content_of(elsewhere) == {"mine": b"nobody else's business"}, name


def test_a_link_is_listed_replaced_and_deleted_as_a_link(store: Store, elsewhere: Path, tmp_path: Path) -> None:
    store.put("run/real", b"")
    (tmp_path / "store" / "run" / "linked").symlink_to(elsewhere)
    (tmp_path / "store" / "run" / "file").symlink_to(elsewhere / "mine")
    assert store.put_if_absent("run/file", b"created") is False
    keys = [entry.key for entry in store.list("run/")]
    assert keys == ["run/file", "run/linked", "run/real"]
    store.put("run/file", b"replaced")
    assert bytes(store.get("run/file")) == b"replaced"
    for key in keys:
        store.delete(key)
    assert list(store.list("")) == []
    assert content_of(elsewhere) == {"mine": b"nobody else's business"}


@pytest.mark.parametrize("has_anonymous_files", [True, False])
@pytest.mark.parametrize("what", ["a link", "a file", "a folder"])
def test_nothing_that_another_user_puts_in_the_way_of_a_write_stops_or_misleads_it(
    store: Store, elsewhere: Path, tmp_path: Path, what: str, has_anonymous_files: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished object has no fixed name in the directory, so no other user can take that name first."""
    if not has_anonymous_files:
        monkeypatch.delattr(os, "O_TMPFILE")
    in_the_way = tmp_path / "store" / ".unfinished~"
    if what == "a link":
        in_the_way.symlink_to(elsewhere)
    elif what == "a file":
        in_the_way.touch()
    else:
        in_the_way.mkdir()
        (in_the_way / "theirs").touch()
    store.put("run/a", b"x")
    assert store.put_if_absent("run/b", b"y")
    assert [entry.key for entry in open_store(tmp_path / "store").list("")] == ["run/a", "run/b"]
    assert content_of(elsewhere) == {"mine": b"nobody else's business"}
    if what == "a folder":
        assert [path.name for path in in_the_way.iterdir()] == ["theirs"]


def test_a_pipe_in_the_place_of_an_object_blocks_no_one(store: Store, tmp_path: Path) -> None:
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
    subprocess.run(["rm", "-r", tmp_path / "store" / "d"], check=True)  # pytest could not remove this
    assert keys == ["run/real"]
