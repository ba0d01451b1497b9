"""`open_store`: from a url to a store, or to a sentence that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from executors.errors import StoreError
from executors.store import MemoryStore, open_store
from executors.store.file import FileStore
from executors.store.opening import address_of, split_address


@pytest.mark.parametrize(
    "name", ["plain", "with space", "100%", "a%20b", "q?x=1", "h#1", "ü", "new\nline", "it's", "a;b", "a\\b"]
)
def test_a_directory_is_opened_again_by_its_url(tmp_path: Path, name: str) -> None:
    first = open_store(tmp_path / name)
    first.put("a", b"x")
    assert first.url.startswith("file:///")
    again = open_store(first.url)
    assert bytes(again.get("a")) == b"x"
    assert again.url == first.url
    assert (tmp_path / name / "a").is_file()


def test_opening_creates_the_directory_and_what_is_above_it(tmp_path: Path) -> None:
    open_store(tmp_path / "a/b/c")
    assert (tmp_path / "a/b/c").is_dir()


def test_opening_leaves_no_object_behind(tmp_path: Path) -> None:
    assert list(open_store(tmp_path / "new").list("")) == []
    assert [path for path in (tmp_path / "new").rglob("*") if path.is_file()] == []


def test_a_plain_path_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("runs", "./runs", str(tmp_path / "runs"), Path("runs")):
        store = open_store(place)
        assert isinstance(store, FileStore)
        assert store.url == (tmp_path / "runs").as_uri()


def test_localhost_in_a_file_url_is_this_machine(tmp_path: Path) -> None:
    assert open_store(f"file://localhost{tmp_path}/x").url == (tmp_path / "x").as_uri()


@pytest.mark.parametrize("url", ["file://runs/a", "file://server/share", "file:///"[:7]])
def test_a_file_url_with_a_host_says_what_it_needs(url: str) -> None:
    with pytest.raises(ValueError, match=r"absolute path.*file:///") as caught:
        open_store(url)
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize("url", ["gopher://x/y", "fiel:///tmp/x", "http://localhost/x"])
def test_an_unknown_scheme_names_the_known_ones(url: str) -> None:
    with pytest.raises(ValueError, match=r"Known schemes: .*file.*memory") as caught:
        open_store(url)
    assert repr(url) in str(caught.value)
    assert repr(url.partition(":")[0]) in str(caught.value)


def test_what_may_be_a_password_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="No store serves 'https'") as caught:
        open_store("https://somebody:hush@server/runs")
    assert "hush" not in str(caught.value)


def test_an_empty_url_is_not_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError):
        open_store("")
    assert list(tmp_path.iterdir()) in ([], [tmp_path / "state"])


def test_a_file_in_the_place_of_the_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for place in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(StoreError) as caught:
            open_store(place)
        assert place.as_uri() in str(caught.value)
        assert caught.value.url == place.as_uri()
    assert (tmp_path / "file").read_bytes() == b"x"


def test_a_memory_url_opens_a_memory_store() -> None:
    assert isinstance(open_store("memory://x"), MemoryStore)


@pytest.mark.parametrize(
    ("store_url", "address"),
    [
        ("s3://b/runs", "s3://b/runs/otter"),
        ("s3://b", "s3://b/otter"),
        ("s3://b/runs?endpoint_url=http://h:9/x&region=y", "s3://b/runs/otter?endpoint_url=http://h:9/x&region=y"),
        ("file:///data/runs", "file:///data/runs/otter"),
        ("file:///data/a%3Fb", "file:///data/a%3Fb/otter"),
        ("/data/what?/runs", "/data/what?/runs/otter"),
    ],
)
def test_a_run_is_named_by_its_stores_url_and_its_id(store_url: str, address: str) -> None:
    assert address_of(store_url, "otter") == address
    assert split_address(address) == (store_url, "otter")
    assert split_address(address_of(store_url, "otter")) == (store_url, "otter")
