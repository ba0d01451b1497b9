"""What only a bucket promises: its faults are survived, its ranges are whole, its secrets are kept."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from servers.s3_server import BUCKET, CREDENTIALS, S3Server

from executors.errors import KeyNotFoundError, StoreError
from executors.store import open_store
from executors.store.protocol import buffers_of
from executors.store.s3 import MAX_PUT_BYTES, S3Store
from executors.store.s3_body import BufferBody, is_made_of

MIB = 1 << 20


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(s3: S3Server, clock: Clock) -> S3Store:
    """A store that reads in ranges of 1 MiB and never really sleeps."""
    return S3Store(s3.url("runs"), range_bytes=MIB, parallel_ranges=3, sleep=clock.sleep, clock=clock)


# --- creating


@pytest.mark.parametrize("reply", ["lost", "dropped"])
def test_a_creation_whose_reply_was_lost_is_known_as_ones_own(s3: S3Server, store: S3Store, reply: str) -> None:
    s3.misbehave_once(reply, "PUT", "runs/claim")
    assert store.put_if_absent("claim", b"mine") is True
    assert [row["status"][:3] for row in s3.requests("PUT", "runs/claim")][1:] == ["412"]
    assert not store.put_if_absent("claim", b"mine"), "the same bytes, and no reply was lost: somebody else's"


def test_a_large_creation_whose_reply_was_lost_is_known_as_ones_own(s3: S3Server, store: S3Store) -> None:
    parts = [bytes([index]) * (MIB + index) for index in range(4)]
    s3.misbehave_once("lost", "PUT", "runs/large")
    assert store.put_if_absent("large", parts)
    assert store.get("large") == b"".join(parts)


@pytest.mark.parametrize("theirs", [b"them", b"longer than ours"])
def test_a_creation_that_failed_and_was_beaten_is_known_as_lost(s3: S3Server, theirs: bytes) -> None:
    def somebody_is_quicker(_: float) -> None:
        assert other.put_if_absent("claim", theirs)

    other = S3Store(s3.url())
    store = S3Store(s3.url(), sleep=somebody_is_quicker)
    s3.misbehave_once("unavailable", "PUT", "claim")
    assert store.put_if_absent("claim", b"ours") is False
    assert bytes(store.get("claim")) == theirs


def test_a_conflicting_creation_is_tried_again(s3: S3Server, store: S3Store, clock: Clock) -> None:
    for _ in range(3):
        s3.misbehave_once("conflict", "PUT", "runs/claim")
    assert store.put_if_absent("claim", b"mine")
    assert len(clock.slept_s) == 3


def test_a_server_that_stays_unavailable_is_given_up_at_the_deadline(
    s3: S3Server, store: S3Store, clock: Clock
) -> None:
    s3.misbehave(unavailable=1.0)
    with pytest.raises(StoreError, match=r"Cannot write 'a'.*SlowDown.*Try again later"):
        store.put("a", b"x")
    assert 60 < clock.now_s <= 120
    assert max(clock.slept_s) <= 5
    assert len({round(slept_s, 6) for slept_s in clock.slept_s}) > 5, "waits are random, so that replicas spread"


def test_the_jitter_leaves_the_users_random_numbers_alone(s3: S3Server, store: S3Store) -> None:
    import random

    random.seed(1)
    expected = random.Random(1).random()
    s3.misbehave_once("unavailable", "PUT")
    store.put("a", b"x")
    assert random.random() == expected


# --- writing


def test_an_object_larger_than_one_request_may_be_is_refused_before_it_is_sent(s3: S3Server, store: S3Store) -> None:
    parts = [bytes(MIB)] * (MAX_PUT_BYTES // MIB) + [b"x"]
    before = len(s3.requests())
    for verb in (store.put, store.put_if_absent):
        with pytest.raises(StoreError, match=rf"'big'.*{MAX_PUT_BYTES + 1} bytes.*in parts"):
            verb("big", parts)
    assert len(s3.requests()) == before


def test_a_large_write_goes_through_faults_whole(s3: S3Server, store: S3Store) -> None:
    parts = [os.urandom(MIB), os.urandom(17), os.urandom(MIB // 2)]
    for fault in ("dropped", "unavailable", "lost"):
        s3.misbehave_once(fault, "PUT", "runs/large")
    store.put("large", parts)
    assert store.get("large") == b"".join(parts)


def test_a_body_reads_like_a_file_of_its_buffers_joined() -> None:
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
    assert is_made_of(memoryview(whole), buffers_of(parts))
    assert not is_made_of(memoryview(whole + b"x"), buffers_of(parts))
    assert not is_made_of(memoryview(whole[:-1]), buffers_of(parts))


def test_only_a_large_body_is_announced_before_it_is_sent(s3: S3Server, store: S3Store) -> None:
    for size in (0, 100, MIB):
        store.put_if_absent(f"body/{size}", bytes(size))
    expects = {row["path"].rpartition("/")[2]: row["expect"] for row in s3.requests("PUT", "body")}
    assert expects == {"0": "", "100": "", str(MIB): "100-continue"}


# --- reading


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


@pytest.mark.parametrize("fault", ["truncated", "short", "unavailable", "dropped"])
@pytest.mark.parametrize("which", [0, 1, 3])
def test_a_reply_that_is_cut_off_is_read_again(s3: S3Server, store: S3Store, fault: str, which: int) -> None:
    value = os.urandom(4 * MIB)
    store.put("large", value)
    for _ in range(which):
        s3.misbehave_once("", "GET", "runs/large")  # this one is well
    s3.misbehave_once(fault, "GET", "runs/large")
    assert store.get("large") == value


def test_ranges_of_different_objects_are_never_joined(s3: S3Server, store: S3Store, clock: Clock) -> None:
    values = [bytes([filling]) * (3 * MIB) for filling in (1, 2)]
    store.put("model", values[0])
    other = S3Store(s3.url("runs"))
    s3.misbehave_once("", "GET", "runs/model")
    s3.misbehave_once("unavailable", "GET", "runs/model")  # makes the reader sleep between two of its ranges

    def replace(_: float) -> None:
        other.put("model", values[1])

    reader = S3Store(s3.url("runs"), range_bytes=MIB, parallel_ranges=1, sleep=replace)
    assert reader.get("model") == values[1]


def test_a_server_without_ranges_is_read_all_the_same(s3: S3Server, store: S3Store) -> None:
    value = os.urandom(3 * MIB)
    store.put("large", value)
    s3.misbehave(knows_no_ranges=True)
    assert store.get("large") == value
    assert store.get("large", start=5, size=7) == value[5:12]
    with pytest.raises(StoreError, match=f"{3 * MIB} bytes"):
        store.get("large", start=3 * MIB, size=1)


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


def test_connections_are_kept(s3: S3Server, store: S3Store) -> None:
    store.put("large", bytes(8 * MIB))
    for index in range(20):
        store.put_if_absent(f"small/{index}", b"x")
        store.get(f"small/{index}")
        store.get("large")
    assert len({row["connection"] for row in s3.requests(path="runs/")}) <= 4


# --- listing


def test_a_listing_of_many_pages_is_whole_and_goes_through_faults(
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


def test_a_prefix_holds_its_own_keys_and_no_others(s3: S3Server) -> None:
    first, second, root = S3Store(s3.url("a")), S3Store(s3.url("a b")), S3Store(s3.url())
    first.put("x", b"1")
    second.put("x", b"2")
    assert [entry.key for entry in first.list("")] == ["x"]
    assert [entry.key for entry in second.list("x")] == ["x"]
    assert [entry.key for entry in root.list("")] == ["a b/x", "a/x"]
    assert bytes(root.get("a b/x")) == b"2"


def test_a_folder_that_a_console_made_is_no_object(s3: S3Server, store: S3Store) -> None:
    for key in ("runs/", "runs/folder/"):
        store._client.put_object(Bucket=BUCKET, Key=key, Body=b"")
    store.put("folder/a", b"x")
    assert [entry.key for entry in store.list("")] == ["folder/a"]


def test_a_key_that_is_too_long_with_its_prefix_is_refused(store: S3Store) -> None:
    key = "/".join(["y" * 203] * 5)
    with pytest.raises(ValueError, match="with the prefix"):
        store.put(f"{key}/abc", b"")
    store.put(key[:-8], b"x")


# --- processes and secrets


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


@pytest.fixture
def failing_calls(s3: S3Server, clock: Clock) -> list[Callable[[], Any]]:
    store = S3Store(s3.url(), sleep=clock.sleep, clock=clock, retry_deadline_s=1.0)

    def forbidden() -> None:
        s3.misbehave(forbidden=["PUT", "GET", "DELETE", "HEAD"])
        store.get("a")

    def unavailable() -> None:
        s3.misbehave(unavailable=1.0)
        store.put("a", b"")

    return [
        forbidden,
        unavailable,
        lambda: S3Store(s3.url().replace(BUCKET, "no-such-bucket")),
        lambda: store.get("no"),
    ]


def test_credentials_are_never_seen(
    s3: S3Server, failing_calls: list[Callable[[], Any]], caplog: pytest.LogCaptureFixture
) -> None:
    import traceback

    caplog.set_level("INFO")
    shown = [repr(S3Store(s3.url())), S3Store(s3.url()).url]
    for call in failing_calls:
        with pytest.raises(StoreError) as caught:
            call()
        shown += [str(caught.value), repr(caught.value), "".join(traceback.format_exception(caught.value))]
    for text in (*shown, caplog.text):
        assert not [secret for secret in CREDENTIALS.values() if secret in text]


def test_a_missing_key_is_found_missing_beside_a_missing_bucket(s3: S3Server) -> None:
    store = open_store(s3.url())
    with pytest.raises(KeyNotFoundError):
        store.get("nothing")
