"""Opening a bucket: the check of exclusive creation, secrets that no message shows, and messages that help."""

from __future__ import annotations

import json
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from servers.s3.server import BUCKET, CREDENTIALS, S3Server
from support.stores import Clock

from executors.errors import MissingDependencyError, StoreError, UnsafeStoreError, UnwritableStoreError, install_command
from executors.store import open_store
from executors.store.s3.address import S3Address
from executors.store.s3.client import connect
from executors.store.s3.errors import explain
from executors.store.s3.store import S3Store
from executors.store.url import impatient_store, remote_access
from executors.testing.helpers import environment


@pytest.fixture
def s3(moto: S3Server) -> S3Server:
    return moto  # the tests of the store need more of a server than other tests do


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_store_is_opened_again_by_its_url(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_store(s3.url("a b/100%25/ä"))
    first.put("x", b"1")
    again = open_store(first.url)
    assert again.url == first.url
    assert bytes(again.get("x")) == b"1"
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    found = open_store(f"s3://{BUCKET}/x")
    found.put("a", b"1")
    assert found.url == f"s3://{BUCKET}/x"
    assert s3.requests("PUT", f"/{BUCKET}/x/a"), "the request has the bucket in its path"


def test_amazons_endpoint_is_not_addressed_in_path_style(s3: S3Server) -> None:
    client, _ = connect(S3Address.parse("s3://b?region=eu-west-1"), 8)
    assert client.meta.endpoint_url == "https://s3.eu-west-1.amazonaws.com"
    assert client.meta.config.s3["addressing_style"] == "auto"


def test_opening_leaves_no_object_costs_three_requests_and_survives_faults(s3: S3Server) -> None:
    store = S3Store(s3.url("runs"))
    assert [row["method"] for row in s3.requests(path="/runs/")] == ["PUT", "PUT", "DELETE"]
    assert "Contents" not in store._client.list_objects_v2(Bucket=BUCKET)
    for fault, method in (("lost", "PUT"), ("conflict", "PUT"), ("dropped", "PUT"), ("unavailable", "DELETE")):
        s3.misbehave_once(fault, method, "probe")
    assert list(open_store(s3.url("runs")).list("")) == []


@pytest.mark.parametrize(("latency_s", "says"), [(1.0, "Read timeout"), (0.0, "Connection was closed")])
def test_a_server_that_is_silent_or_hangs_up_is_an_error_of_the_store(
    s3: S3Server, latency_s: float, says: str
) -> None:
    store = impatient_store(s3.url("runs"), 0.05 if latency_s else 5.0)
    s3.misbehave(latency_s=latency_s)
    s3.misbehave_once("dropped", "GET")
    with pytest.raises(StoreError, match=says):
        store.get("x")
    s3.misbehave()


def test_a_server_that_does_not_create_exclusively_is_refused(s3: S3Server) -> None:
    for fault, says in (("ignores_condition", "ignores"), ("knows_no_condition", "does not know")):
        s3.misbehave(**{fault: True})
        with pytest.raises(UnsafeStoreError, match=rf"{says} 'If-None-Match.*another server") as caught:
            open_store(s3.url("runs"))
        assert caught.value.url == S3Address.parse(s3.url("runs")).url
        assert caught.value.url in str(caught.value)
    s3.misbehave()
    assert list(open_store(s3.url()).list("")) == []


def test_an_operation_that_the_credentials_do_not_allow_is_named(s3: S3Server) -> None:
    open_store(s3.url()).put("a", b"1")
    s3.misbehave(forbidden=["PUT", "DELETE"])
    store = open_store(s3.url())
    assert bytes(store.get("a")) == b"1"
    assert [entry.key for entry in store.list("")] == ["a"]
    with pytest.raises(StoreError, match="s3:PutObject"):
        store.put_if_absent("b", b"1")
    s3.misbehave(forbidden=["DELETE"])
    store = open_store(s3.url())
    assert [entry.key for entry in store.list("")] == ["a"]
    assert list(store.list(".probe")) == [], "an object of a probe that could not be deleted is listed"
    with pytest.raises(ValueError, match="reserved"):
        store.put(".probe~/x", b"")
    with pytest.raises(StoreError, match="s3:DeleteObject"):
        store.delete("a")
    s3.misbehave(forbidden=["GET", "HEAD"])
    for size in (None, 0):
        with pytest.raises(StoreError, match=r"Cannot read 'x'.*403.*s3:GetObject.*s3:ListBucket") as caught:
            store.get("x", size=size)
        assert (caught.value.key, caught.value.url) == ("x", store.url)
    with pytest.raises(StoreError, match=r"Cannot list .*s3:ListBucket"):
        store.list("")


def test_a_lifecycle_rule_that_archives_is_a_risk_and_one_that_removes_delete_markers_is_not(s3: S3Server) -> None:
    store = S3Store(s3.url("runs"))
    rules: list[dict[str, Any]] = [
        {"ID": "markers", "Filter": {"Prefix": ""}, "Expiration": {"ExpiredObjectDeleteMarker": True}},
        {"ID": "tagged", "Filter": {"Tag": {"Key": "a", "Value": "b"}}, "Expiration": {"Days": 3}},
        {
            "ID": "both",
            "Filter": {"And": {"Prefix": "runs/", "Tags": [{"Key": "a", "Value": "b"}]}},
            "Expiration": {"Days": 3},
        },
        {"ID": "warm", "Filter": {"Prefix": ""}, "Transitions": [{"Days": 30, "StorageClass": "GLACIER_IR"}]},
        {"ID": "dated", "Filter": {"Prefix": "runs/"}, "Expiration": {"Date": datetime(2030, 1, 1)}},
        {"ID": "large", "Filter": {"ObjectSizeGreaterThan": 1000}, "Expiration": {"Days": 3}},
        {"ID": "cold", "Filter": {"Prefix": ""}, "Transitions": [{"Days": 30, "StorageClass": "GLACIER"}]},
    ]
    store._client.put_bucket_lifecycle_configuration(
        Bucket=BUCKET, LifecycleConfiguration={"Rules": [{"Status": "Enabled", **rule} for rule in rules]}
    )
    assert [problem for what, problem, _ in store.risky_settings() if what == "lifecycle"] == [
        "rule 'dated' lets objects here expire",
        "rule 'large' lets objects here expire",
        "rule 'cold' moves objects here to an archive",
    ]
    store._client.put_object(Bucket=BUCKET, Key="runs/seal", Body=b"1", StorageClass="GLACIER")
    with pytest.raises(StoreError, match=r"InvalidObjectState.*Restore it, and exempt the prefix"):
        store.get("seal")


def test_a_server_that_does_not_accept_checksums_can_be_used(s3: S3Server) -> None:
    """Hugging Face's gateway, for example, does not parse the trailing checksums that boto3 sends by default."""
    s3.misbehave(refuses_checksums=True)
    plain = boto3.client("s3", endpoint_url=s3.endpoint_url, region_name="us-east-1")
    with pytest.raises(plain.exceptions.ClientError, match="Checksums"):
        plain.put_object(Bucket=BUCKET, Key="x", Body=b"x")
    store = open_store(s3.url())
    assert store.put_if_absent("a", [b"1" * 100_000] * 2)
    assert store.get("a") == b"1" * 200_000
    assert [entry.key for entry in store.list("")] == ["a"]
    store.delete("a")


def test_the_error_of_an_unusable_bucket_has_the_reason(
    s3: S3Server, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = {
        s3.url().replace(BUCKET, "no-such-bucket"): r"no bucket 'no-such-bucket'.*Create it",
        s3.url().replace(BUCKET, "no%20bucket"): "bucket",
        f"{s3.url()}&profile=nobody": r"nobody.*\?profile=",
        "s3://b?endpoint_url=http://127.0.0.1:1&region=us-east-1": "Check endpoint_url",
        "s3://b?endpoint_url=http://nowhere.invalid": r"nowhere\.invalid.*Check endpoint_url",
    }
    for url, says in refusals.items():
        clock.now_s = 0.0
        with pytest.raises(StoreError, match=says):
            S3Store(url, sleep=clock.sleep, clock=clock)
        assert clock.now_s <= 10, "a wrong address is reported soon"
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    with pytest.raises(StoreError, match="Set AWS_ACCESS_KEY_ID"):
        open_store(s3.url())


def test_without_boto3_the_error_explains_how_to_install_it(s3: S3Server) -> None:
    code = f"""
import sys
sys.modules["botocore"] = None
from executors import open_store
try:
    open_store({s3.url()!r})
except ImportError as error:
    print(type(error).__name__, error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=60, check=True)
    assert done.stdout.startswith(MissingDependencyError.__name__)
    assert f"needs boto3. Install it with: {install_command('s3')}" in done.stdout
    assert "pip install 'boto3>=" in done.stdout


def test_a_bucket_with_running_runs_is_checked_before_an_object_is_created_in_it(s3: S3Server) -> None:
    store = open_store(s3.url("checked"), is_known=True)
    assert s3.requests(path="/checked/") == []
    assert store.put_if_absent("a", b"")
    assert store.put_if_absent("b", b"")
    assert [row["method"] for row in s3.requests(path="/checked/")] == ["PUT", "PUT", "DELETE", "PUT", "PUT"]
    s3.misbehave(ignores_condition=True)
    with pytest.raises(UnsafeStoreError):
        open_store(s3.url("checked"), is_known=True).put_if_absent("c", b"")


def test_credentials_are_in_no_message_no_repr_and_no_log(
    s3: S3Server, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    store = S3Store(s3.url(), sleep=clock.sleep, clock=clock, retry_deadline_s=1.0)
    failing: dict[str, Callable[[], object]] = {
        "missing": lambda: store.get("no"),
        "no bucket": lambda: S3Store(s3.url().replace(BUCKET, "no-such-bucket")),
        "forbidden": lambda: store.get("a"),
        "unavailable": lambda: store.put("a", b""),
    }
    shown = [repr(store), store.url]
    for name, call in failing.items():
        s3.misbehave(
            forbidden=["PUT", "GET", "DELETE", "HEAD"] * (name == "forbidden"), unavailable=name == "unavailable"
        )
        with pytest.raises(StoreError) as caught:
            call()
        shown += [str(caught.value), repr(caught.value), "".join(traceback.format_exception(caught.value))]
    for text in (*shown, caplog.text):
        assert not [secret for secret in CREDENTIALS.values() if secret in text]


def test_another_machine_needs_no_profile_of_this_machine(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(
        f"[profile mine]\naws_access_key_id = key\naws_secret_access_key = hush\nendpoint_url = {s3.endpoint_url}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    url, variables = remote_access(open_store(f"s3://{BUCKET}/runs?profile=mine&region=eu-central-1"))
    there = S3Address.parse(url)
    assert (there.profile, there.endpoint_url, there.region) == (None, s3.endpoint_url, "eu-central-1")
    assert variables == {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "hush"}


@pytest.mark.parametrize(
    ("code", "status"),
    [("QuotaExceeded", 403), ("XMinioStorageFull", 507), ("XMinioAdminBucketQuotaExceeded", 400), ("", 507)],
)
def test_the_error_of_a_full_bucket_reports_that_it_is_full(code: str, status: int) -> None:
    reply: Any = {"Error": {"Code": code, "Message": "m"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = explain(ClientError(reply, "PutObject"), S3Address.parse("s3://b/p"), "k", "create")
    assert isinstance(error, UnwritableStoreError)
    assert str(error).endswith(
        f"{code}: m (HTTP {status}). The bucket is full. Delete old runs (`replicas rm`), or ask for a larger quota."
    )


class Helper:
    """A profile whose credentials come from a program, and the output of that program."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in CREDENTIALS:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "config"))
        monkeypatch.setenv("AWS_PROFILE", "mine")
        self.words, self.program, self.config = folder / "words", folder / "helper", folder / "config"
        self.program.write_text(f"#!/bin/sh\ncat {self.words}\n")
        self.program.chmod(0o755)
        self.config.write_text(f"[profile mine]\ncredential_process = {self.program}\n")

    def hands_out(self, *, expire_in_s: float) -> None:
        key, secret = CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
        at = (datetime.now(UTC) + timedelta(seconds=expire_in_s)).isoformat()
        words = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": secret, "SessionToken": "t", "Expiration": at}
        self.words.write_text(json.dumps(words))


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Helper:
    return Helper(tmp_path, monkeypatch)


NO_CREDENTIALS = r"its credentials are not available: .*Check the credential_process"


def test_credentials_that_are_stale_when_they_are_fetched_are_a_store_error(s3: S3Server, helper: Helper) -> None:
    helper.hands_out(expire_in_s=-60)
    with pytest.raises(StoreError, match=rf"Cannot use s3://.*{NO_CREDENTIALS}"):
        open_store(s3.url())
    helper.hands_out(expire_in_s=300)  # the credentials expire so soon that each request fetches new ones
    store = open_store(s3.url())
    store.put("a", b"1")
    acts: list[Callable[[], object]] = [
        lambda: store.put("a", b"2"),
        lambda: store.put_if_absent("b", b"2"),
        lambda: store.get("a"),
        lambda: list(store.list("")),
        lambda: store.delete("a"),
        lambda: remote_access(store),
    ]
    helper.hands_out(expire_in_s=-60)
    for act in acts:
        with pytest.raises(StoreError, match=NO_CREDENTIALS):
            act()
    helper.program.chmod(0o644)
    with pytest.raises(StoreError, match=NO_CREDENTIALS):
        store.get("a")
    helper.program.chmod(0o755)
    helper.hands_out(expire_in_s=300)
    assert bytes(store.get("a")) == b"1"


@pytest.mark.parametrize("words", ["Please log in", "", "[1]"])
def test_a_credential_process_that_prints_no_json_is_not_blamed_on_the_endpoint(
    s3: S3Server, helper: Helper, words: str
) -> None:
    helper.words.write_text(words)
    with pytest.raises(StoreError, match=NO_CREDENTIALS) as caught:
        open_store(s3.url())
    assert "Correct ?endpoint_url" not in str(caught.value)


def test_an_endpoint_that_is_not_a_url_is_named_in_the_error(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "nowhere")
    with pytest.raises(StoreError, match=r"nowhere.*Correct \?endpoint_url=, or AWS_ENDPOINT_URL"):
        open_store("s3://b")
