"""Tests how a url leads to a store or to a helpful error, and how a store and a run id give the address of a run."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from executors.errors import RunNotFoundError, StoreError
from executors.store import MemoryStore, open_store, store_at
from executors.store.file import FileStore
from executors.store.record_names import run_folder_was_deleted
from executors.store.s3.address import S3Address
from executors.store.url import address_of, existing_store, split_address


def test_a_directory_is_opened_again_by_its_url(tmp_path: Path) -> None:
    for name in ("a/b", "with space", "100%", "a%20b", "q?x=1", "h#1", "ü", "new\nline", "it's", "a;b", "a\\b"):
        first = open_store(tmp_path / name)
        assert [path for path in (tmp_path / name).rglob("*") if path.is_file()] == [], "opening left a file"
        first.put("a", b"x")
        assert first.url.startswith("file:///")
        again = open_store(first.url)
        assert bytes(again.get("a")) == b"x", name
        assert again.url == first.url
        assert (tmp_path / name / "a").is_file()


def test_a_plain_path_is_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place in ("runs", "./runs", str(tmp_path / "runs"), Path("runs"), f"file://localhost{tmp_path}/runs"):
        store = open_store(place)
        assert isinstance(store, FileStore)
        assert store.url == (tmp_path / "runs").as_uri()


def test_a_path_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert store_at("~/runs") is store_at(tmp_path / "runs")
    assert not (tmp_path / "~").exists()


def test_a_memory_store_is_the_same_for_the_same_name_in_one_process() -> None:
    store = open_store("memory://one")
    assert isinstance(store, MemoryStore)
    store.put("a", b"1")
    assert bytes(open_store("memory://one").get("a")) == b"1"
    assert list(open_store("memory://other").list("")) == []
    assert store.url == "memory://one"


REFUSED = {
    "file://runs/a": "absolute path, as in 'file:///data/runs', got 'file://runs/a'",
    "file://server/share": "absolute path",
    "file://": "absolute path",
    "gopher://x/y": "No store has the scheme 'gopher' (in 'gopher://x/y'). Use one of file, memory, s3",
    "fiel:///tmp/x": "No store has the scheme 'fiel'",
    "http://localhost/x": "No store has the scheme 'http'",
    "https://somebody:hush@server/runs": "No store has the scheme 'https'. Use one of",
    "": "The url of a rendezvous is empty",
    "s3:/bucket/runs": "two slashes follow its scheme, as in 's3://bucket/runs'",
    "file:/data/runs": "as in 'file:///data/runs'",
    "s3://": "needs a bucket",
    "s3:///x": "needs a bucket",
    "s3://b/../x": "'..'",
    "s3://b//x//y": "segment",
    "s3://b/x?endpoint=http://x": "endpoint_url, region, profile",
    "s3://b/x?endpoint_url=localhost:9000": "http or https",
    "s3://b/x#y": "%23",
}
WITH_CREDENTIALS = (
    "s3://AKIASECRET:hush@bucket/x",
    "s3://AKIASECRET@bucket/x",
    "s3://bucket/x?aws_access_key_id=AKIASECRET",
    "s3://bucket/x?aws_secret_access_key=AKIASECRET&region=x",
    "s3://bucket/x?session_token=AKIASECRET",
    "s3://bucket/x?endpoint_url=http://AKIASECRET:hush@localhost:1",
    "s3://bucket/x?endpoint_url=http%3A%2F%2Flocalhost%3A1%2F%3FAKIASECRET",
    "s3://bucket/x?endpoint_url=http%3A%2F%2Flocalhost%3A1%2F%23AKIASECRET",
    "s3://bucket/x?endpoint_url=AKIASECRET:hush@localhost:1",
)


def test_a_url_that_is_wrong_is_refused_with_the_reason_and_without_its_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    credentials = dict.fromkeys(WITH_CREDENTIALS, "Credentials do not belong in a url")
    for url, says in {**REFUSED, **credentials}.items():
        with pytest.raises(ValueError) as caught:
            open_store(url)
        assert says in str(caught.value), url
        assert not [secret for secret in ("AKIASECRET", "hush") if secret in str(caught.value)], url
        assert "AWS_ACCESS_KEY_ID" in str(caught.value) or url not in credentials
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("url", [None, b"runs", 3])
def test_a_text_that_is_not_a_url_is_refused_before_a_folder_is_made(
    url: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError, match="The url of a rendezvous must be a string or a path, got"):
        open_store(url)  # such as the value of a variable that is not set
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_place_of_the_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for place in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(StoreError) as caught:
            open_store(place)
        assert place.as_uri() in str(caught.value)
        assert caught.value.url == place.as_uri()
    assert (tmp_path / "file").read_bytes() == b"x"


def test_a_directory_that_cannot_be_looked_at_is_not_reported_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    (tmp_path / "run").mkdir()

    def stat(path: Any, **_: Any) -> os.stat_result:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        assert not run_folder_was_deleted(store, "run"), "a folder that cannot be read does not count as deleted"
        with pytest.raises(StoreError, match=r"Cannot look at .*: Permission denied\.") as caught:
            existing_store(tmp_path)
    assert not isinstance(caught.value, RunNotFoundError)
    assert caught.value.url == tmp_path.as_uri()
    assert not run_folder_was_deleted(store, "run")
    (tmp_path / "run").rmdir()
    assert run_folder_was_deleted(store, "run")
    with pytest.raises(RunNotFoundError, match="there is no such directory"):
        existing_store(tmp_path / "run")


def test_the_address_of_a_bucket_is_read_again_from_its_url() -> None:
    urls = {
        "s3://b": ("b", ""),
        "s3://b/": ("b", ""),
        "s3://b/runs/mine/": ("b", "runs/mine/"),
        "s3://b/a%20b": ("b", "a b/"),
        "s3://b/a b": ("b", "a b/"),
        "s3://b/100%25/ä?region=eu-west-1": ("b", "100%/ä/"),
        "s3://b/p%3Fq%23r?endpoint_url=http://x:9/base&profile=p%26q": ("b", "p?q#r/"),
    }
    for url, expected in urls.items():
        address = S3Address.parse(url)
        assert (address.bucket, address.prefix) == expected
        assert S3Address.parse(address.url) == address
        assert S3Address.parse(address.url).url == address.url


def test_the_address_of_a_run_is_its_stores_url_and_its_id() -> None:
    addresses = {
        "s3://b/runs": "s3://b/runs/otter",
        "s3://b": "s3://b/otter",
        "s3://b/runs?endpoint_url=http://h:9/x&region=y": "s3://b/runs/otter?endpoint_url=http://h:9/x&region=y",
        "file:///data/runs": "file:///data/runs/otter",
        "file:///data/a%3Fb": "file:///data/a%3Fb/otter",
        "/data/what?/runs": "/data/what?/runs/otter",
    }
    for store_url, address in addresses.items():
        assert address_of(store_url, "otter") == address
        assert split_address(address) == (store_url, "otter")
    url = S3Address.parse("s3://b/runs?endpoint_url=http://127.0.0.1:9000&region=us-east-1").url
    assert f"{url}/otter".rpartition("/") == (url, "/", "otter"), "a run id may follow a url with options"
