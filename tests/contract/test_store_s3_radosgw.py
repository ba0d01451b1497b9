"""The S3 store at a real Ceph: `make test-radosgw` starts one, with a user whose signatures it checks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from urllib.parse import quote

import boto3
import pytest

from executors.errors import StoreError
from executors.store import Store, open_store
from executors.store.s3.store import S3Store
from executors.testing import StoreContract

ENDPOINT_URL = os.environ.get("RADOSGW_ENDPOINT_URL", "")
if not ENDPOINT_URL:
    pytest.skip("no radosgw runs; `make test-radosgw` starts one", allow_module_level=True)


@pytest.fixture
def url() -> Iterator[str]:
    """The url of a new bucket."""
    bucket = boto3.resource("s3", endpoint_url=ENDPOINT_URL, region_name="us-east-1").Bucket(
        f"bucket-{secrets.token_hex(8)}"
    )
    bucket.create()
    yield f"s3://{bucket.name}?endpoint_url={quote(ENDPOINT_URL, safe='')}&region=us-east-1"
    bucket.objects.delete()  # the bucket stays: a killed writer's last object may still arrive


class TestS3StoreAtRadosgw(StoreContract):
    n_processes = 4
    n_times = 20
    n_neighbours = 200

    @pytest.fixture
    def store(self, url: str) -> Store:
        return open_store(url)


def test_wrong_credentials_and_a_missing_bucket_are_named_and_not_shown(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match="no bucket 'no-such-bucket'"):
        open_store(f"s3://no-such-bucket?{url.partition('?')[2]}")
    wrong = {
        "AWS_SECRET_ACCESS_KEY": ("never/to/be+seen/secret/of/the/tests/0000", "SignatureDoesNotMatch"),
        "AWS_ACCESS_KEY_ID": ("AKIANOBODYNOBODY", "InvalidAccessKeyId"),
    }
    for name, (value, code) in wrong.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(StoreError, match=rf"{code}.*{name}") as caught:
                open_store(url)
        assert value not in str(caught.value)


def test_a_large_object_is_read_in_parallel_ranges(url: str) -> None:
    store = S3Store(url, range_bytes=1 << 20)
    value = os.urandom((9 << 20) + 5)
    store.put("large", value)
    assert store.get("large") == value
    assert store.get("large", start=12345, size=5 << 20) == value[12345 : 12345 + (5 << 20)]
