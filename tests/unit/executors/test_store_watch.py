"""A watch wakes its caller when an object is new, and its wait always ends."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from executors.store import MemoryStore, Store, open_store
from executors.store.faulty import FaultyStore
from executors.store.watch import MAX_WATCHES, Watch, open_watch

FAR_S = 600.0  # beyond this test's own limit: only being woken ends such a wait


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


@pytest.fixture
def watch(store: Store) -> Iterator[Watch]:
    """A watch of a store inside two faulty stores, which do not hide new objects."""
    watch = open_watch(FaultyStore(FaultyStore(store, seed=0), seed=1))
    yield watch
    watch.close()


def start_watching(watch: Watch, *prefixes: str) -> None:
    watch.wait(FAR_S, prefixes)  # the first wait for a prefix only starts watching it


def test_an_object_below_any_of_the_prefixes_ends_a_wait(store: Store, watch: Watch) -> None:
    prefixes = ["run/a/", "run/b/", "run/c/"]
    start_watching(watch, *prefixes)
    for prefix in prefixes:
        for verb, name in (("put", "new"), ("put", "new"), ("put_if_absent", "created")):  # the second one replaces
            writer = threading.Thread(target=getattr(store, verb), args=(f"{prefix}{name}", b"x"))
            writer.start()
            watch.wait(FAR_S, prefixes)
            writer.join()


def test_an_object_that_comes_between_two_waits_is_not_missed(store: Store, watch: Watch) -> None:
    start_watching(watch, "run/seal/")
    store.put("run/seal/1", b"x")
    watch.wait(FAR_S, ["run/seal/"])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_wait_is_a_sleep_if_no_more_watches_are_available(
    store: Store, watch: Watch, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(path: Path, mask: int) -> int:
        raise OSError(code, os.strerror(code))

    slept: list[float] = []
    monkeypatch.setattr(watch._inotify, "add_watch", none_left)
    monkeypatch.setattr(time, "sleep", slept.append)
    for _ in range(2):
        watch.wait(FAR_S, ["run/a/", "run/b/"])
    assert slept == [FAR_S, FAR_S]
    monkeypatch.undo()
    start_watching(watch, "run/a/")
    monkeypatch.setattr(watch._inotify, "add_watch", none_left)
    store.put("run/a/new", b"x")
    watch.wait(FAR_S, ["run/a/", "run/b/"])  # the change in the watched folder ends the wait
    assert not slept[2:]


def test_a_wait_for_a_folder_that_cannot_be_made_is_a_sleep(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(root: str, folder: str) -> None:
        raise FileNotFoundError(errno.ENOENT, "an automount that went away")

    slept: list[float] = []
    monkeypatch.setattr("executors.store.watch.make_folder", gone)
    monkeypatch.setattr(time, "sleep", slept.append)
    watch.wait(FAR_S, ["run/a/"])
    assert slept == [FAR_S]


def test_a_folder_that_was_pruned_and_made_again_is_watched_again(store: Store, watch: Watch) -> None:
    start_watching(watch, "run/seal/")
    store.put("run/seal/1", b"x")
    store.delete("run/seal/1")
    done = threading.Event()

    def keep_writing() -> None:
        number = 1
        while not done.wait(0.001):
            number += 1
            store.put(f"run/seal/{number}", b"x")

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(keep_writing)
        try:
            for _ in range(10):
                watch.wait(FAR_S, ["run/seal/"])
        finally:
            done.set()
        writer.result()


def test_a_wait_ends_by_itself_and_watching_shows_in_no_listing(store: Store, watch: Watch) -> None:
    for _ in range(3):
        watch.wait(0.01, ["run/nothing/"])
    assert list(store.list("")) == []
    assert store.put_if_absent("run/nothing/1", b"x")
    other = open_watch(MemoryStore("test"))
    other.wait(0.01, ["run/"])
    other.close()


def test_more_prefixes_than_watches_still_wake(store: Store, watch: Watch) -> None:
    for number in range(MAX_WATCHES + 10):
        start_watching(watch, f"run/{number}/")
    last = f"run/{MAX_WATCHES + 9}/"
    writer = threading.Thread(target=store.put, args=(f"{last}x", b"x"))
    writer.start()
    watch.wait(FAR_S, [last])
    writer.join()
