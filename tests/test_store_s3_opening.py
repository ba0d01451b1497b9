"""Opening a bucket: its url, its probe, and sentences that help when it cannot be used."""

from __future__ import annotations

import subprocess
import sys

import boto3
import pytest
from servers.s3_server import BUCKET, S3Server

from executors.errors import MissingDependencyError, StoreError, UnsafeStoreError
from executors.store import open_store
from executors.store.s3 import S3Store
from executors.store.s3_address import S3Address
from executors.testing.processes import environment


@pytest.mark.parametrize(
    ("url", "bucket", "prefix"),
    [
        ("s3://b", "b", ""),
        ("s3://b/", "b", ""),
        ("s3://b/runs/mine/", "b", "runs/mine/"),
        ("s3://b/a%20b", "b", "a b/"),
        ("s3://b/a b", "b", "a b/"),
        ("s3://b/100%25/ä?region=eu-west-1", "b", "100%/ä/"),
        ("s3://b/p%3Fq%23r?endpoint_url=http://x:9/base&profile=p%26q", "b", "p?q#r/"),
    ],
)
def test_an_address_is_read_again_from_its_url(url: str, bucket: str, prefix: str) -> None:
    address = S3Address.parse(url)
    assert (address.bucket, address.prefix) == (bucket, prefix)
    assert S3Address.parse(address.url) == address
    assert S3Address.parse(address.url).url == address.url


def test_a_run_id_may_follow_a_stores_url() -> None:
    url = S3Address.parse("s3://b/runs?endpoint_url=http://127.0.0.1:9000&region=us-east-1").url
    assert f"{url}/brave-otter".rpartition("/") == (url, "/", "brave-otter")


@pytest.mark.parametrize(
    "url",
    [
        "s3://AKIAVERYSECRET:hush@bucket/x",
        "s3://AKIAVERYSECRET@bucket/x",
        "s3://bucket/x?aws_access_key_id=AKIAVERYSECRET",
        "s3://bucket/x?aws_secret_access_key=AKIAVERYSECRET&region=x",
        "s3://bucket/x?session_token=AKIAVERYSECRET",
        "s3://bucket/x?endpoint_url=http://AKIAVERYSECRET:hush@localhost:1",
        "s3://bucket/x?endpoint_url=http%3A%2F%2Flocalhost%3A1%2F%3FAKIAVERYSECRET",
        "s3://bucket/x?endpoint_url=http%3A%2F%2Flocalhost%3A1%2F%23AKIAVERYSECRET",
        "s3://bucket/x?endpoint_url=AKIAVERYSECRET:hush@localhost:1",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match=r"Credentials do not belong in a url.*AWS_ACCESS_KEY_ID") as caught:
        open_store(url)
    assert "AKIAVERYSECRET" not in str(caught.value)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://", "needs a bucket"),
        ("s3:///x", "needs a bucket"),
        ("s3://b/../x", "'..'"),
        ("s3://b//x//y", "segment"),
        ("s3://b/x?endpoint=http://x", "endpoint_url, region, profile"),
        ("s3://b/x?endpoint_url=localhost:9000", "http or https"),
        ("s3://b/x#y", "%23"),
    ],
)
def test_a_url_that_is_wrong_says_how(url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace(".", r"\.")):
        open_store(url)


def test_a_store_is_opened_again_by_its_url(s3: S3Server) -> None:
    first = open_store(s3.url("a b/100%25/ä"))
    first.put("x", b"1")
    again = open_store(first.url)
    assert again.url == first.url
    assert bytes(again.get("x")) == b"1"


def test_the_endpoint_may_come_from_the_environment(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    store = open_store(f"s3://{BUCKET}/x")
    store.put("a", b"1")
    assert store.url == f"s3://{BUCKET}/x"
    assert s3.requests("PUT", f"/{BUCKET}/x/a"), "in path style"


def test_amazons_own_endpoint_is_addressed_in_its_own_style(monkeypatch: pytest.MonkeyPatch, s3: S3Server) -> None:
    from executors.store.s3_client import connect

    client, _ = connect(S3Address.parse("s3://b?region=eu-west-1"), 8)
    assert client.meta.endpoint_url == "https://s3.eu-west-1.amazonaws.com"
    assert client.meta.config.s3["addressing_style"] == "auto"


def test_opening_leaves_no_object_and_costs_three_requests(s3: S3Server) -> None:
    store = open_store(s3.url("runs"))
    assert [row["method"] for row in s3.requests(path="/runs/")] == ["PUT", "PUT", "DELETE"]
    assert list(store.list("")) == []
    assert "Contents" not in store._client.list_objects_v2(Bucket=BUCKET)  # type: ignore[attr-defined]


def test_opening_succeeds_behind_a_server_that_stumbles(s3: S3Server) -> None:
    for fault, method in (("lost", "PUT"), ("conflict", "PUT"), ("dropped", "PUT"), ("unavailable", "DELETE")):
        s3.misbehave_once(fault, method, "probe")
    assert list(open_store(s3.url("runs")).list("")) == []


def test_a_server_that_ignores_the_condition_is_refused(s3: S3Server) -> None:
    s3.misbehave(ignores_condition=True)
    with pytest.raises(UnsafeStoreError, match=r"ignores 'If-None-Match.*another server") as caught:
        open_store(s3.url("runs"))
    assert caught.value.url == S3Address.parse(s3.url("runs")).url
    assert caught.value.url in str(caught.value)
    s3.misbehave()
    assert list(open_store(s3.url()).list("")) == []


def test_a_server_that_does_not_know_the_condition_is_refused(s3: S3Server) -> None:
    s3.misbehave(knows_no_condition=True)
    with pytest.raises(UnsafeStoreError, match="does not know 'If-None"):
        open_store(s3.url())


def test_a_bucket_that_may_only_be_read_can_be_read(s3: S3Server) -> None:
    open_store(s3.url()).put("a", b"1")
    s3.misbehave(forbidden=["PUT", "DELETE"])
    store = open_store(s3.url())
    assert bytes(store.get("a")) == b"1"
    assert [entry.key for entry in store.list("")] == ["a"]
    with pytest.raises(StoreError, match="s3:PutObject"):
        store.put_if_absent("b", b"1")


def test_probes_that_could_not_be_deleted_do_not_show(s3: S3Server) -> None:
    s3.misbehave(forbidden=["DELETE"])
    store = open_store(s3.url())
    assert list(store.list("")) == list(store.list(".probe")) == []
    with pytest.raises(ValueError, match="reserved"):
        store.put(".probe~/x", b"")
    with pytest.raises(StoreError, match="s3:DeleteObject"):
        store.delete("a")


def test_a_forbidden_read_says_that_the_key_may_only_be_missing(s3: S3Server) -> None:
    store = open_store(s3.url())
    s3.misbehave(forbidden=["GET", "HEAD"])
    for size in (None, 0):
        with pytest.raises(StoreError, match=r"Cannot read 'x'.*403.*s3:GetObject.*s3:ListBucket") as caught:
            store.get("x", size=size)
    assert (caught.value.key, caught.value.url) == ("x", store.url)
    with pytest.raises(StoreError, match=r"Cannot list .*s3:ListBucket"):
        store.list("")


def test_a_server_that_takes_no_checksums_is_served(s3: S3Server) -> None:
    """As Hugging Face's gateway, which does not parse the trailing checksums that boto3 sends by itself."""
    s3.misbehave(refuses_checksums=True)
    plain = boto3.client("s3", endpoint_url=s3.endpoint_url, region_name="us-east-1")
    with pytest.raises(plain.exceptions.ClientError, match="Checksums"):
        plain.put_object(Bucket=BUCKET, Key="x", Body=b"x")
    store = open_store(s3.url())
    assert store.put_if_absent("a", [b"1" * 100_000] * 2)
    assert store.get("a") == b"1" * 200_000
    assert [entry.key for entry in store.list("")] == ["a"]
    store.delete("a")


def test_a_missing_bucket_is_named(s3: S3Server) -> None:
    with pytest.raises(StoreError, match=r"no bucket 'no-such-bucket'.*Create it"):
        open_store(s3.url().replace(BUCKET, "no-such-bucket"))


def test_a_server_that_does_not_run_is_told_soon(s3: S3Server) -> None:
    slept_s: list[float] = []
    with pytest.raises(StoreError, match="Check endpoint_url"):
        S3Store(
            "s3://b?endpoint_url=http://127.0.0.1:1&region=us-east-1", sleep=slept_s.append, clock=lambda: sum(slept_s)
        )
    assert sum(slept_s) <= 10


def test_a_host_that_does_not_exist_is_told(s3: S3Server) -> None:
    slept_s: list[float] = []
    with pytest.raises(StoreError, match=r"nowhere\.invalid.*Check endpoint_url"):
        S3Store("s3://b?endpoint_url=http://nowhere.invalid", sleep=slept_s.append, clock=lambda: sum(slept_s))


def test_missing_credentials_say_where_they_go(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match="Set AWS_ACCESS_KEY_ID"):
        open_store(s3.url())


def test_an_unknown_profile_is_named(s3: S3Server) -> None:
    with pytest.raises(StoreError, match=r"nobody.*\?profile="):
        open_store(f"{s3.url()}&profile=nobody")


def test_a_bad_bucket_name_is_told(s3: S3Server) -> None:
    with pytest.raises(StoreError, match="bucket"):
        open_store(s3.url().replace(BUCKET, "no%20bucket"))


def test_without_boto3_it_is_said_how_to_install_it(s3: S3Server) -> None:
    code = f"""
import sys
sys.modules["boto3"] = None
from executors import open_store
try:
    open_store({s3.url()!r})
except ImportError as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), timeout=60, check=True
    )
    assert done.stdout.startswith(MissingDependencyError.__name__)
    assert "needs boto3. Install it with: pip install 'serverless-replicas[s3]'" in done.stdout
