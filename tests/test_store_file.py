"""A directory keeps the contract of a store, and what only a directory promises."""

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
from processes_of_tests import is_alive

from executors.errors import StoreError
from executors.store import Buffer, Store, StreamingStore, open_store
from executors.store.file import FileStore
from executors.testing import StoreContract, eventually, store_process
from executors.testing.processes import heard, python_process

MIB = 1 << 20


class TestFileStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(tmp_path / "it's a store, 100% ä\n#?")


class TestFileStoreWithoutAnonymousFiles(StoreContract):
    """As on macOS, and on file systems that have no O_TMPFILE."""

    opener = "store_openers:open_without_anonymous_files"

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.delattr(os, "O_TMPFILE")
        return open_store(tmp_path / "store")


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def test_an_object_is_the_file_under_its_key(root: Path) -> None:
    open_store(root).put("runs/a/seal.json", b"{}")
    assert (root / "runs/a/seal.json").read_bytes() == b"{}"
    assert files_below(root) == ["runs/a/seal.json"]


def test_a_file_placed_by_hand_is_an_object(root: Path) -> None:
    store = open_store(root)
    (root / "by").mkdir()
    (root / "by/hand").write_bytes(b"x")
    assert bytes(store.get("by/hand")) == b"x"
    assert [entry.key for entry in store.list("")] == ["by/hand"]
    assert not store.put_if_absent("by/hand", b"y")


def test_two_stores_on_one_directory_are_one_store(root: Path) -> None:
    assert open_store(root).put_if_absent("a", b"1")
    assert not open_store(root.as_uri()).put_if_absent("a", b"2")


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


def test_objects_are_readable_as_the_users_umask_says(root: Path) -> None:
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


def test_an_object_below_an_object_is_refused_with_the_reason(root: Path) -> None:
    store = open_store(root)
    store.put("a", b"x")
    for verb in (store.put, store.put_if_absent):
        with pytest.raises(StoreError, match="both a key and keys below it"):
            verb("a/b", b"y")
    store.put("c/d", b"x")
    for verb in (store.put, store.put_if_absent):
        with pytest.raises(StoreError, match="both a key and keys below it"):
            verb("c", b"y")
    assert files_below(root) == ["a", "c/d"]


def test_what_is_being_written_has_no_name_yet(root: Path) -> None:
    store = open_store(root)
    args = ["executors.store:open_store", store.url, "write_one", "put_if_absent", "half", "2048"]
    with python_process(Path(store_process.__file__), *args) as writer:
        assert heard(writer) == "ready"
        written = eventually(lambda: bytes_being_written(writer.pid, root), "the writer writes", every_s=0)
        writer.kill()
        writer.wait()
    assert 0 < written < 2048 * MIB, "caught in the middle"
    assert not is_alive(writer.pid)
    assert files_below(root) == []
    assert list(store.list("")) == []


def bytes_being_written(pid: int, root: Path) -> int:
    """Return the size of the unfinished file that a process holds open below the store."""
    for number in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(number).startswith(str(root)) and stat.S_ISREG(number.stat().st_mode):
                return number.stat().st_size
        except OSError:
            continue
    return 0


def test_unfinished_files_are_never_objects(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    store = open_store(root)
    (root / ".unfinished~").mkdir(exist_ok=True)
    (root / ".unfinished~/leftover").write_bytes(b"half")
    assert list(store.list("")) == list(store.list(".")) == list(store.list(".unfinished")) == []
    for prefix in (".unfinished~/", ".unfinished~/left"):
        with contextlib.suppress(ValueError):  # refused is as good
            assert list(store.list(prefix)) == []
    with pytest.raises(ValueError, match="reserved"):
        store.get(".unfinished~/leftover")
    with pytest.raises(ValueError, match="reserved"):
        store.put(".unfinished~/x", b"")


def test_a_write_that_cannot_be_named_leaves_no_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for without in (False, True):
        if without:
            monkeypatch.delattr(os, "O_TMPFILE")
        store = open_store(root)
        store.put("a/b", b"x")
        for verb in (store.put, store.put_if_absent):
            with pytest.raises(StoreError):
                verb("a", b"y")
        assert not store.put_if_absent("a/b", b"y")
        assert files_below(root) == ["a/b"]


def test_a_store_can_be_used_after_its_directory_moved_on(root: Path) -> None:
    store = open_store(root)
    store.put("a", b"x")
    view = store.get("a")
    os.rename(root, root.with_name("moved"))
    assert bytes(view) == b"x"
    assert list(store.list("")) == []
    with pytest.raises(StoreError):
        store.get("a")


def test_a_relative_root_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = FileStore(Path("here"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    store.put("a", b"x")
    assert (tmp_path / "here/a").read_bytes() == b"x"
    assert store.url == (tmp_path / "here").as_uri()


@pytest.fixture(params=[True, False], ids=["anonymous files", "hidden files"])
def streaming(request: pytest.FixtureRequest, root: Path, monkeypatch: pytest.MonkeyPatch) -> FileStore:
    if not request.param:
        monkeypatch.delattr(os, "O_TMPFILE")
    return FileStore(root)


def in_pieces(write: Callable[[Buffer], None]) -> bytes:
    piece = bytearray(b"one ")
    write(piece)
    piece[:] = b"two "  # what was handed on is written, not remembered
    write(piece)
    return b"head"


def test_an_object_can_be_made_on_the_way(streaming: FileStore, root: Path) -> None:
    assert isinstance(streaming, StreamingStore)
    assert streaming.put_if_absent_streamed("a/b", 4, in_pieces) is True
    assert bytes(streaming.get("a/b")) == b"headone two "
    assert files_below(root) == ["a/b"]


def test_nothing_is_made_for_a_key_that_is_taken(streaming: FileStore) -> None:
    streaming.put("a", b"first")
    assert streaming.put_if_absent_streamed("a", 4, lambda write: pytest.fail("nobody needs it")) is False
    assert bytes(streaming.get("a")) == b"first"


def test_who_is_overtaken_while_making_an_object_is_told(streaming: FileStore, root: Path) -> None:
    def overtaken(write: Callable[[Buffer], None]) -> bytes:
        streaming.put("a", b"first")
        return in_pieces(write)

    assert streaming.put_if_absent_streamed("a", 4, overtaken) is False
    assert bytes(streaming.get("a")) == b"first"
    assert files_below(root) == ["a"]


def test_an_object_that_could_not_be_made_leaves_nothing(streaming: FileStore, root: Path) -> None:
    def fails(write: Callable[[Buffer], None]) -> bytes:
        write(b"something")
        raise ArithmeticError("not finite")

    with pytest.raises(ArithmeticError, match="not finite"):
        streaming.put_if_absent_streamed("a", 4, fails)
    with pytest.raises(ValueError, match="The head of 'a' has 4 bytes, 5 were announced"):
        streaming.put_if_absent_streamed("a", 5, in_pieces)
    assert files_below(root) == []


@pytest.mark.parametrize("head_bytes", [0, 4, 20_928, (2 << 20) + 1])
@pytest.mark.parametrize(
    "sizes",
    [(4 << 20, 4 << 20, 1000), (1, 2, 3), (1 << 20,) * 5, (2 << 20, 0, 1, 5 << 20, 7), (3_000_001, 3_000_001), ()],
)
def test_pieces_of_any_size_stand_as_they_were_handed_on(root: Path, head_bytes: int, sizes: tuple[int, ...]) -> None:
    store = FileStore(root)
    rng = random.Random(0)
    head, pieces = rng.randbytes(head_bytes), [rng.randbytes(size) for size in sizes]

    def make(write: Callable[[Buffer], None]) -> bytes:
        reused = bytearray(max(sizes, default=0))
        for piece in pieces:
            reused[: len(piece)] = piece
            with memoryview(reused) as view:
                write(view[: len(piece)])
        return head

    assert store.put_if_absent_streamed("a", head_bytes, make)
    assert store.get("a") == head + b"".join(pieces)
