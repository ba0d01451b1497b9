"""Tests promises that only S3Store makes: it survives faults, reads whole ranges, and shows no secrets."""

from __future__ import annotations

import hashlib
import os
import random
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse, HeadersDict
from servers.s3.server import BUCKET, S3Server
from support.stores import Clock

from executors.errors import CorruptObjectError, StoreError
from executors.store.protocol import BoundedStore, CheckingStore, FolderStore, LimitedStore, buffers_of
from executors.store.s3.store import MAX_PUT_BYTES, S3Store
from executors.store.s3.transfer import BufferBody, is_made_of

MIB = 1 << 20


@pytest.fixture
def s3(moto: S3Server) -> S3Server:
    return moto  # the tests of the store need more of a server than other tests do


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(s3: S3Server, clock: Clock) -> S3Store:
    """A store that reads in ranges of 1 MiB and never really sleeps."""
    return S3Store(s3.url("runs"), range_bytes=MIB, parallel_ranges=3, sleep=clock.sleep, clock=clock)


# --- creating and writing


def test_a_create_whose_reply_was_lost_is_recognized_as_this_writers_own(s3: S3Server, store: S3Store) -> None:
    small, large = [b"mine"], [bytes([index]) * (MIB + index) for index in range(4)]
    for fault, parts in (("lost", small), ("dropped", small), ("lost", large)):
        key = f"{fault}/{len(parts)}"
        s3.misbehave_once(fault, "PUT", f"runs/{key}")
        assert store.put_if_absent(key, parts) is True, key
        assert [row["status"][:3] for row in s3.requests("PUT", f"runs/{key}")][1:] == ["412"], key
        assert store.get(key) == b"".join(parts)
        assert not store.put_if_absent(key, parts), (
            "no reply was lost, so another writer created the object with the same bytes"
        )


def test_a_create_that_failed_while_another_writer_won_is_reported_as_lost(s3: S3Server) -> None:
    for theirs in (b"them", b"longer than ours"):
        s3.empty()
        other = S3Store(s3.url())
        store = S3Store(s3.url(), sleep=lambda _, theirs=theirs, other=other: other.put("claim", theirs))  # type: ignore[misc]
        s3.misbehave_once("unavailable", "PUT", "claim")
        assert store.put_if_absent("claim", b"ours") is False
        assert bytes(store.get("claim")) == theirs


def test_a_conflicting_creation_is_tried_again(s3: S3Server, store: S3Store, clock: Clock) -> None:
    for _ in range(3):
        s3.misbehave_once("conflict", "PUT", "runs/claim")
    random.seed(1)
    assert store.put_if_absent("claim", b"mine")
    assert len(clock.slept_s) == 3
    assert random.random() == random.Random(1).random(), "the jitter took the user's random numbers"


def test_requests_to_an_unavailable_server_are_given_up_at_the_deadline(
    s3: S3Server, store: S3Store, clock: Clock
) -> None:
    s3.misbehave(unavailable=1.0)
    with pytest.raises(StoreError, match=r"Cannot write 'a'.*SlowDown.*Try again later"):
        store.put("a", b"x")
    assert 60 < clock.now_s <= 120
    assert max(clock.slept_s) <= 5
    assert len({round(slept_s, 6) for slept_s in clock.slept_s}) > 5, "waits are random, so that replicas spread"


def test_a_write_that_was_cut_off_after_minutes_is_sent_again(
    s3: S3Server, store: S3Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_object = store._client.put_object

    def slow(**request: Any) -> Any:
        clock.now_s += 600
        return put_object(**request)

    monkeypatch.setattr(store._client, "put_object", slow)
    s3.misbehave_once("dropped", "PUT", "runs/large")
    store.put("large", b"x" * MIB)
    assert store.get("large") == b"x" * MIB
    assert clock.now_s < 1205


def test_an_object_larger_than_one_request_may_be_is_refused_before_it_is_sent(s3: S3Server, store: S3Store) -> None:
    parts = [bytes(MIB)] * (MAX_PUT_BYTES // MIB) + [b"x"]
    assert isinstance(store, LimitedStore)
    before = len(s3.requests())
    for verb in (store.put, store.put_if_absent):
        with pytest.raises(StoreError, match=rf"'big'.*{MAX_PUT_BYTES + 1} bytes.*as several objects"):
            verb("big", parts)
    assert len(s3.requests()) == before


def test_a_large_write_is_complete_in_spite_of_faults(s3: S3Server, store: S3Store) -> None:
    parts = [os.urandom(MIB), os.urandom(17), os.urandom(MIB // 2)]
    for fault in ("dropped", "unavailable", "lost"):
        s3.misbehave_once(fault, "PUT", "runs/large")
    store.put("large", parts)
    assert store.get("large") == b"".join(parts)


def test_the_server_can_check_every_upload_also_if_a_profile_disables_signed_bodies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`checks_uploads` promises this. An HTTPS endpoint is the case in which botocore may leave bodies unsigned."""
    config = tmp_path / "config"
    config.write_text("[default]\ns3 =\n  payload_signing_enabled = false\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    store = S3Store("s3://bucket?endpoint_url=https://127.0.0.1:1&region=here", checks_later=True)
    signed: list[str] = []

    class Empty:
        def stream(self) -> list[bytes]:
            return []

    def answer(request: AWSPreparedRequest, **options: Any) -> AWSResponse:
        signed.append(request.headers["X-Amz-Content-SHA256"].decode())
        return AWSResponse(request.url, 200, HeadersDict(), Empty())

    store._client.meta.events.register("before-send.s3.PutObject", answer)
    for parts in ([b"small"], [b"large" * MIB, b"and more"]):
        store.put("a", parts)
        assert signed.pop() == hashlib.sha256(b"".join(parts)).hexdigest()
    assert isinstance(store, CheckingStore)
    assert store.checks_uploads


def test_a_body_reads_like_a_file_of_its_buffers_joined_and_copies_none_of_them() -> None:
    parts = [b"abc", b"", b"d", b"efghij" * 100]
    whole = b"".join(parts)
    body = BufferBody(buffers_of(parts))
    assert len(body) == len(whole)
    for size in (1, 2, 3, 4, 5, 100, 1000, -1, None):
        assert body.seek(0) == 0
        pieces = list(iter(lambda size=size: bytes(body.read(size)), b""))  # type: ignore[misc]
        assert b"".join(pieces) == whole, size
        assert all(len(piece) == size for piece in pieces[:-1])
    for at in range(len(whole) + 1):
        assert body.seek(at) == body.tell() == at
        assert body.read() == whole[at:]
    assert body.seek(-5, os.SEEK_END) == len(whole) - 5
    view = body.read(3)
    assert isinstance(view, memoryview)
    assert view.obj is parts[3]
    assert is_made_of(memoryview(whole), buffers_of(parts))
    for other in (whole + b"x", whole[:-1], b"x" + whole[1:]):
        assert not is_made_of(memoryview(other), buffers_of(parts))


def test_only_a_large_body_is_announced_before_it_is_sent(s3: S3Server, store: S3Store) -> None:
    for size in (0, 100, MIB):
        store.put_if_absent(f"body/{size}", bytes(size))
    expects = {row["path"].rpartition("/")[2]: row["expect"] for row in s3.requests("PUT", "body")}
    assert expects == {"0": "", "100": "", str(MIB): "100-continue"}


# --- reading and listing


def test_a_large_object_is_read_as_ranges_and_never_twice(s3: S3Server, store: S3Store) -> None:
    value = os.urandom(5 * MIB + 17)
    store.put("large", value)
    assert store.get("large") == value
    assert len(s3.requests("GET", "runs/large")) == 6
    assert store.get("large", start=3, size=2 * MIB) == value[3 : 3 + 2 * MIB]
    assert sorted(row["range"] for row in s3.requests("GET", "runs/large")[6:]) == [
        f"bytes={MIB + 3}-{2 * MIB + 2}",
        f"bytes=3-{MIB + 2}",
    ]
    assert not s3.requests("HEAD")


def test_a_reply_that_is_cut_off_is_read_again(s3: S3Server, store: S3Store) -> None:
    value = os.urandom(4 * MIB)
    store.put("large", value)
    for fault in ("truncated", "short", "unavailable", "dropped"):
        for which in (0, 1, 3):
            for _ in range(which):
                s3.misbehave_once("", "GET", "runs/large")  # this reply is complete
            s3.misbehave_once(fault, "GET", "runs/large")
            assert store.get("large") == value, (fault, which)


def test_ranges_of_different_objects_are_never_joined(s3: S3Server, store: S3Store) -> None:
    values = [bytes([filling]) * (3 * MIB) for filling in (1, 2)]
    store.put("model", values[0])
    other = S3Store(s3.url("runs"))
    s3.misbehave_once("", "GET", "runs/model")
    s3.misbehave_once("unavailable", "GET", "runs/model")  # this fault makes the reader sleep between two ranges
    sleep: Callable[[float], None] = lambda _: other.put("model", values[1])  # noqa: E731
    reader = S3Store(s3.url("runs"), range_bytes=MIB, parallel_ranges=1, sleep=sleep)
    assert reader.get("model") == values[1]


def test_a_server_without_ranges_can_still_be_read(s3: S3Server, store: S3Store) -> None:
    value = os.urandom(3 * MIB)
    store.put("large", value)
    s3.misbehave(knows_no_ranges=True)
    assert store.get("large") == value
    assert store.get("large", start=5, size=7) == value[5:12]
    with pytest.raises(StoreError, match=f"{3 * MIB} bytes"):
        store.get("large", start=3 * MIB, size=1)


def test_an_object_that_is_too_large_is_refused_before_it_is_read(s3: S3Server, store: S3Store) -> None:
    assert isinstance(store, BoundedStore)
    store.put("large", bytes(5000))
    with pytest.raises(CorruptObjectError, match=r"'large'.* 5000 bytes; at most 1000"):
        store.get_at_most("large", 1000)
    assert [row["range"] for row in s3.requests("GET", "runs/large")] == ["bytes=0-999"]


def test_reading_needs_one_buffer_of_the_objects_size(s3: S3Server, store: S3Store) -> None:
    store.put("large", [bytes(MIB)] * 32)
    tracemalloc.start()
    try:
        view = store.get("large")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(view) == 32 * MIB
    assert peak_bytes < 40 * MIB


def test_a_listing_of_many_pages_is_complete_in_spite_of_faults(
    s3: S3Server, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [f"k/{index:03d}" for index in range(25)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda key: store.put(key, b"x"), reversed(keys)))
    client = store._client
    real = client.list_objects_v2
    monkeypatch.setattr(client, "list_objects_v2", lambda **request: real(**request, MaxKeys=10))
    for fault in ("truncated", "unavailable", "dropped"):
        s3.misbehave_once(fault, "GET")
    assert [entry.key for entry in store.list("k/")] == keys
    assert len(s3.requests("GET")) == 6


def test_a_listing_below_a_prefix_has_only_its_keys(s3: S3Server) -> None:
    first, second, root = S3Store(s3.url("a")), S3Store(s3.url("a b")), S3Store(s3.url())
    first.put("x", b"1")
    second.put("x", b"2")
    for key in ("a/", "a/folder/"):  # some consoles create such an object for a folder
        root._client.put_object(Bucket=BUCKET, Key=key, Body=b"")
    assert [entry.key for entry in first.list("")] == [entry.key for entry in second.list("x")] == ["x"]
    assert [entry.key for entry in root.list("")] == ["a b/x", "a/x"]
    assert bytes(root.get("a b/x")) == b"2"
    key = "/".join(["y" * 203] * 5)
    with pytest.raises(ValueError, match="with the prefix"):
        first.put(f"{key}/abcd", b"")
    first.put(key[:-8], b"x")


def test_folders_are_listed_once_without_listing_their_content(
    s3: S3Server, store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(store, FolderStore)
    other = S3Store(s3.url())
    for key in ("b/2", "a/1", "a/x/1", "a/x/2", "a/y/1", "file"):
        store.put(key, b"x")
    other.put("runs2/no", b"x")
    # objects that some consoles create, and one that opening the store creates for a moment
    for key in ("runs/", "runs/.probe~/x"):
        other._client.put_object(Bucket=BUCKET, Key=key, Body=b"")
    client = store._client
    real = client.list_objects_v2
    monkeypatch.setattr(client, "list_objects_v2", lambda **request: real(**request, MaxKeys=2))
    assert [*store.folders("")] == ["a", "b"]
    assert [*store.folders("a/")] == ["x", "y"]
    assert [*store.folders("none/")] == []


# --- connections


def test_connections_are_reused(s3: S3Server, store: S3Store) -> None:
    store.put("large", bytes(8 * MIB))
    for index in range(20):
        store.put_if_absent(f"small/{index}", b"x")
        store.get(f"small/{index}")
        store.get("large")
    assert len({row["connection"] for row in s3.requests(path="runs/")}) <= 4


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_has_connections_of_its_own(s3: S3Server, store: S3Store) -> None:
    store.put("before", b"x")
    pid = os.fork()
    if pid == 0:
        try:
            store.put("in the child", bytes(store.get("before")))
        finally:
            os._exit(0)
    store.put("in the parent", b"x")
    os.waitpid(pid, 0)
    (child,) = s3.requests("PUT", "in the child")
    assert child["connection"] not in {row["connection"] for row in s3.requests("PUT", "in the parent")}
    assert len([*store.list("")]) == 3
