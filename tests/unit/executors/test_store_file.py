"""Tests promises that only a directory store makes: plain files, mapped reads, writes without a name, and streamed
objects.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import stat
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from executors.errors import CorruptObjectError, KeyNotFoundError, StoreError
from executors.store import Buffer, MemoryStore, StreamingStore, open_store
from executors.store.file import FileStore
from executors.store.records import get_at_most

MIB = 1 << 20


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(params=[True, False], ids=["anonymous files", "hidden files"])
def either(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    """A store that writes anonymous files, and one where there are none."""
    if not request.param:
        monkeypatch.delattr(os, "O_TMPFILE")
    return FileStore(root)


def test_an_object_is_the_file_under_its_key(root: Path) -> None:
    store = open_store(root)
    store.put("runs/a/seal.json", b"{}")
    assert (root / "runs/a/seal.json").read_bytes() == b"{}"
    assert files_below(root) == ["runs/a/seal.json"]
    (root / "by").mkdir()
    (root / "by/hand").write_bytes(b"x")
    assert bytes(store.get("by/hand")) == b"x"
    assert [entry.key for entry in store.list("by")] == ["by/hand"]
    assert not store.put_if_absent("by/hand", b"y")


def test_two_stores_on_one_directory_are_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = FileStore(Path("here"))
    (tmp_path / "link").symlink_to(tmp_path / "here")
    assert open_store(tmp_path / "link").url == (tmp_path / "link").as_uri()
    monkeypatch.chdir("/")  # a relative root does not follow a change of the working directory
    assert first.url == (tmp_path / "here").as_uri()
    assert first.put_if_absent("a/b", b"1")
    for place in (tmp_path / "here", first.url, tmp_path / "link"):
        assert not open_store(place).put_if_absent("a/b", b"2"), place


def test_a_large_object_is_mapped_and_not_read(root: Path) -> None:
    store = open_store(root)
    store.put("large", [bytes(MIB)] * 64)
    tracemalloc.start()
    try:
        views = [store.get("large"), store.get("large", start=12345), store.get("large", start=MIB, size=32 * MIB)]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(isinstance(view.obj, mmap.mmap) for view in views)
    assert peak_bytes < MIB


def test_an_object_that_is_too_large_is_refused_before_it_is_read(root: Path) -> None:
    for store in (open_store(root), MemoryStore()):
        for size in (0, 1, 9, 10):
            store.put("small", b"x" * size)
            assert bytes(get_at_most(store, "small", 10)) == b"x" * size
        store.put("large", b"x" * 11)
        with pytest.raises(CorruptObjectError, match=r"'large'.* 11 bytes; at most 10"):
            get_at_most(store, "large", 10)
        with pytest.raises(KeyNotFoundError):
            get_at_most(store, "missing", 10)
    with (root / "sparse").open("wb") as file:
        file.truncate(1 << 40)  # a terabyte, on paper
    with pytest.raises(CorruptObjectError):
        get_at_most(open_store(root), "sparse", 1000)


@pytest.mark.parametrize(
    ("mode", "folder_mode"), [(0o755, 0o700), (0o700, 0o700), (0o1777, 0o700), (0o775, 0o755), (0o2770, 0o2755)]
)
def test_the_folder_of_a_run_is_for_its_user_alone_unless_a_group_shares_the_directory(
    root: Path, mode: int, folder_mode: int
) -> None:
    root.mkdir(exist_ok=True)
    root.chmod(mode)
    before = os.umask(0o022)
    try:
        FileStore(root).put("run/replicas/0000/0/log", b"secret")
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "run").stat().st_mode) == folder_mode


def test_the_users_umask_decides_who_can_read_objects(root: Path) -> None:
    before = os.umask(0o027)
    try:
        store = open_store(root)
        store.put("a", b"x")
        store.put_if_absent("b", b"x")
    finally:
        os.umask(before)
    assert {stat.S_IMODE((root / name).stat().st_mode) for name in "ab"} == {0o640}


def test_deleting_the_last_object_of_a_folder_leaves_no_folder(root: Path) -> None:
    store = open_store(root)
    store.put("a/b/c", b"x")
    store.put("a/d", b"x")
    store.delete("a/b/c")
    assert not (root / "a/b").exists()
    store.delete("a/d")
    assert not (root / "a").exists()
    assert root.is_dir()


def test_an_object_below_an_object_is_refused_with_the_reason_and_leaves_no_file(either: FileStore) -> None:
    either.put("a", b"x")
    either.put("c/d", b"x")
    for verb in (either.put, either.put_if_absent):
        for key in ("a/b", "c"):
            with pytest.raises(StoreError, match="both a key and keys below it"):
                verb(key, b"y")
    assert not either.put_if_absent("c/d", b"y")
    assert files_below(either.root) == ["a", "c/d"]


def test_unfinished_files_are_never_objects(root: Path) -> None:
    store = open_store(root)
    (root / ".unfinished~leftover").write_bytes(b"half")
    (root / ".unfinished~").mkdir()
    (root / ".unfinished~/leftover").write_bytes(b"half")
    for prefix in ("", ".", ".unfinished", ".unfinished~", ".unfinished~left", ".unfinished~/", ".unfinished~/left"):
        with contextlib.suppress(ValueError):  # an error is acceptable, too
            assert list(store.list(prefix)) == [], prefix
    for key in (".unfinished~leftover", ".unfinished~/leftover", ".unfinished~x/y"):
        with pytest.raises(ValueError, match="reserved"):
            store.get(key)
        with pytest.raises(ValueError, match="reserved"):
            store.put(key, b"")
    store.put("run/.unfinished~", b"x")
    assert [entry.key for entry in store.list("")] == ["run/.unfinished~"], "only names at the top are hidden"


def test_a_directory_has_only_its_objects_after_they_are_written(either: FileStore) -> None:
    """A folder for hidden files would belong to the first writer, and other users could not write there."""
    either.put("run/a", b"x")
    assert either.put_if_absent("run/b", b"x")
    with pytest.raises(StoreError):
        either.put("run", b"x")
    assert sorted(str(path.relative_to(either.root)) for path in either.root.rglob("*")) == ["run", "run/a", "run/b"]


def test_a_store_whose_directory_was_moved_is_empty_and_bytes_that_were_read_stay(root: Path) -> None:
    store = open_store(root)
    store.put("a", b"x")
    view = store.get("a")
    os.rename(root, root.with_name("moved"))
    assert bytes(view) == b"x"
    assert list(store.list("")) == []
    with pytest.raises(StoreError):
        store.get("a")


def in_pieces(write: Callable[[Buffer], None]) -> bytes:
    piece = bytearray(b"one ")
    write(piece)
    piece[:] = b"two "  # the store must have written the first piece by now
    write(piece)
    return b"head"


def test_an_object_can_be_made_on_the_way_unless_its_key_is_taken(either: FileStore) -> None:
    assert isinstance(either, StreamingStore)
    assert either.put_if_absent_streamed("a/b", 4, in_pieces) is True
    assert bytes(either.get("a/b")) == b"headone two "
    assert either.put_if_absent_streamed("a/b", 4, lambda write: pytest.fail("made for nothing")) is False

    def overtaken(write: Callable[[Buffer], None]) -> bytes:
        either.put("c", b"first")
        return in_pieces(write)

    assert either.put_if_absent_streamed("c", 4, overtaken) is False
    assert bytes(either.get("c")) == b"first"
    assert files_below(either.root) == ["a/b", "c"]


def test_an_object_that_could_not_be_made_leaves_nothing(either: FileStore) -> None:
    def fails(write: Callable[[Buffer], None]) -> bytes:
        write(b"something")
        raise ArithmeticError("not finite")

    with pytest.raises(ArithmeticError, match="not finite"):
        either.put_if_absent_streamed("a", 4, fails)
    with pytest.raises(ValueError, match="The head of 'a' has 4 bytes, but head_bytes is 5"):
        either.put_if_absent_streamed("a", 5, in_pieces)
    assert files_below(either.root) == []


def test_pieces_of_any_size_are_stored_as_they_were_handed_on(root: Path) -> None:
    store, rng = FileStore(root), random.Random(0)
    ways = [(4 << 20, 4 << 20, 1000), (1, 2, 3), (1 << 20,) * 5, (2 << 20, 0, 1, 5 << 20, 7), (3_000_001,) * 2, ()]
    for head_bytes in (0, 4, 20_928, (2 << 20) + 1):
        for number, sizes in enumerate(ways):
            head, pieces = rng.randbytes(head_bytes), [rng.randbytes(size) for size in sizes]

            def make(write: Callable[[Buffer], None], head: bytes = head, pieces: list[bytes] = pieces) -> bytes:
                reused = bytearray(max(map(len, pieces), default=0))
                for piece in pieces:
                    reused[: len(piece)] = piece
                    with memoryview(reused) as view:
                        write(view[: len(piece)])
                return head

            key = f"{head_bytes}/{number}"
            assert store.put_if_absent_streamed(key, head_bytes, make)
            assert store.get(key) == head + b"".join(pieces), (head_bytes, sizes)
