"""S3Store: a bucket as a store, over boto3. The server must honor `If-None-Match: *` on a PUT.

AWS, Cloudflare R2, Ceph and Hugging Face's gateway do. An object is written by one `put_object`, so it appears whole or
not at all. The condition makes creation exclusive, and opening the store checks that. Large objects are read as
parallel ranges, all of one version of the object.

This file repeats failed requests, and boto3 does not. So the store knows when a reply was lost. If the key is taken
after a lost reply, the store may have created the object itself. It compares the object with the bytes that it sent.

One case is not covered. If two processes create a key with the same bytes, and both lose a reply, both may get True.
Callers for which that matters put a random number into the bytes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from executors.errors import StoreError, UnsafeStoreError
from executors.patience import OPENING, REQUEST, waits
from executors.store.protocol import MAX_KEY_BYTES, Data, Entry, buffers_of, check_key, check_range, check_size
from executors.store.s3.address import S3Address
from executors.store.s3.client import READ_TIMEOUT_S, Problem, bucket_access, connect, risky_settings
from executors.store.s3.errors import code_of, explain, is_request_failure, retried, status_of
from executors.store.s3.transfer import BufferBody, RangeReader, is_made_of

PROBES = ".probe~"  # the folder of the objects that the check at opening creates; no key may begin with it
MAX_PUT_BYTES = 5 << 30  # S3's limit for an object in one request
JOIN_BELOW_BYTES = 64 * 1024  # a smaller body is copied and sent as one piece

T = TypeVar("T")


class S3Store:
    """The store that `open_store("s3://bucket/prefix?endpoint_url=&region=&profile=")` opens.

    The credentials are those that boto3 finds in variables, profiles and roles. They are never in the url.

    The class has more than 20 methods: five of `Store`, five of optional abilities, and one private function for each
    kind of request. All of them share the client, the address and the rules for repeated requests.

    Args:
        url: the bucket, the prefix, and how to reach them. A server other than AWS is addressed in path style.
        range_bytes: a larger object is read as ranges of this size. Default 16 MiB.
        parallel_ranges: the number of ranges that are read at the same time, besides the first. Default 8.
        retry_deadline_s: for how many seconds after its first failure a request is repeated. Default: the limit of
            `executors.patience.REQUEST`.
        read_timeout_s: how long the server may be silent, in seconds. Default 60.
        checks_later: True: check that the bucket creates exclusively before the first object is created. False, the
            default: check it now.
        sleep: waits for the given number of seconds between two tries.
        clock: returns seconds of a monotonic clock.

    Raises:
        ValueError: the url is wrong or has credentials, or a number is below 1.
        MissingDependencyError: boto3 is not installed.
        UnsafeStoreError: the server does not honor the condition of a create.
        StoreError: the bucket cannot be used. The message has the cause and an advice.

    Example:
        S3Store("s3://bucket/runs?region=eu-west-1")
    """

    max_object_bytes = MAX_PUT_BYTES
    checks_uploads = True
    """Each request is signed with the SHA-256 of its body, and the server refuses another body."""

    def __init__(
        self,
        url: str,
        *,
        range_bytes: int = 16 << 20,
        parallel_ranges: int = 8,
        retry_deadline_s: float | None = None,
        read_timeout_s: float = READ_TIMEOUT_S,
        checks_later: bool = False,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if range_bytes < 1 or parallel_ranges < 1:
            raise ValueError(
                f"range_bytes and parallel_ranges must be at least 1, got {range_bytes} and {parallel_ranges}."
            )
        self.address = S3Address.parse(url)
        self._range_bytes = range_bytes
        self._parallel_ranges = parallel_ranges
        self._deadline_s = retry_deadline_s
        self._read_timeout_s = read_timeout_s
        self._sleep = sleep
        self._clock = clock
        self._clients: dict[int, tuple[Any, tuple[str, ...]]] = {}
        self._is_checked = False
        if not checks_later:
            self._check_exclusive_creation()

    def __repr__(self) -> str:
        return f"<S3Store {self.url!r}>"

    @property
    def url(self) -> str:
        return self.address.url

    @property
    def _place(self) -> str:
        """The url without its options, for messages."""
        return self.url.partition("?")[0]

    def put_if_absent(self, key: str, data: Data) -> bool:
        if not self._is_checked:
            self._check_exclusive_creation()
        return self._create(key, self._name(key), data, self._retry_deadline_s)

    def put(self, key: str, data: Data) -> None:
        name, buffers = self._name(key), self._buffers(key, data)
        self._request("write", key, lambda: self._client.put_object(**name, Body=_body(buffers)))

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        if start < 0 or (size is not None and size < 0):
            check_range(key, self.url, 0, start, size)  # raises
        return self._read(key, start, size, lambda total: check_range(key, self.url, total, start, size))

    def get_at_most(self, key: str, max_bytes: int) -> memoryview:
        return self._read(key, 0, max_bytes, lambda total: check_size(key, self.url, total, max_bytes))

    def list(self, prefix: str) -> Iterator[Entry]:
        found: list[Entry] = []
        for row in self._rows("Contents", Prefix=prefix):
            key = row["Key"].removeprefix(self.address.prefix)
            # Some consoles create an empty object `folder/`, which cannot be a key. It is hidden, like the probes.
            if key and not key.endswith("/") and not key.startswith(f"{PROBES}/"):
                found.append(Entry(key, row["Size"], row["LastModified"].timestamp()))
        return iter(sorted(found, key=lambda entry: entry.key))  # AWS sorts; not every server does

    def folders(self, prefix: str) -> Iterator[str]:
        root = self.address.prefix + prefix
        rows = self._rows("CommonPrefixes", Prefix=prefix, Delimiter="/")
        names = {row["Prefix"].removeprefix(root).rstrip("/") for row in rows}
        return iter(sorted(names - {"", PROBES}))

    def _rows(self, kind: str, **asked: str) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of one kind in a listing. Each page is one request."""
        request = {"Bucket": self.address.bucket, **asked, "Prefix": self.address.prefix + asked["Prefix"]}
        while True:
            page = self._request("list", None, lambda: self._client.list_objects_v2(**request))
            yield from page.get(kind, ())
            if not page.get("IsTruncated"):
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, key: str) -> None:
        self._delete(key, self._name(key))

    def remote_access(self) -> tuple[str, dict[str, str]]:
        """Return a url and environment variables with which another machine can open this store.

        Temporary credentials also expire on the other machine.

        Raises:
            StoreError: this machine has no credentials for the bucket.
        """
        return self._request("use", None, lambda: bucket_access(self.address, self._client), deadline_s=0.0)

    def risky_settings(self) -> Sequence[Problem]:
        """Return the settings of the bucket that would harm a run, as far as the credentials may read them.

        Raises:
            StoreError: the bucket cannot be used.
        """
        return self._request("use", None, lambda: [*risky_settings(self._client, self.address)], deadline_s=0.0)

    def _create(self, key: str, name: Mapping[str, str], data: Data, deadline_s: float) -> bool:
        buffers = self._buffers(key, data)
        n_sent = 0

        def create() -> bool | None:
            nonlocal n_sent
            n_sent += 1
            try:
                self._client.put_object(**name, Body=_body(buffers), IfNoneMatch="*")
            except self._client.exceptions.ClientError as error:
                if status_of(error) != 412:
                    raise
                sent_before = n_sent > 1 or error.response["ResponseMetadata"].get("RetryAttempts", 0) > 0
                return None if sent_before else False
            return True

        created = self._request("create", key, create, deadline_s)
        # None: the key is taken, and the reply to an earlier try was lost. The object's bytes show who created it.
        return self._request("create", key, lambda: self._holds(name, buffers)) if created is None else created

    def _holds(self, name: Mapping[str, str], buffers: Sequence[memoryview]) -> bool:
        """Return True if an object has exactly the bytes that were sent."""
        reader, size = self._reader(), sum(map(len, buffers))
        try:
            return reader.size_of(name) == size and is_made_of(reader.read(name, 0, None, int), buffers)
        except self._client.exceptions.ClientError as error:
            if status_of(error) != 404:
                raise
            return False  # the object was deleted after it was created, so it must not be created again

    def _read(self, key: str, start: int, size: int | None, end_of: Callable[[int], int]) -> memoryview:
        name = self._name(key)
        return self._request("read", key, lambda: self._reader().read(name, start, size, end_of))

    def _delete(self, key: str, name: Mapping[str, str]) -> None:
        def delete() -> None:
            try:
                self._client.delete_object(**name)
            except self._client.exceptions.ClientError as error:
                if code_of(error) != "NoSuchKey":
                    raise

        self._request("delete", key, delete)

    def _check_exclusive_creation(self) -> None:
        """Create one key twice, and check that the server refuses the second request.

        A bucket that may only be read passes the check. The first write raises the error.

        Raises:
            UnsafeStoreError: the server created the key twice, or does not know the condition.
        """
        key = f"{PROBES}/{secrets.token_hex(12)}"
        name = {"Bucket": self.address.bucket, "Key": self.address.prefix + key}
        try:
            created = [self._create(key, name, data, OPENING.limit_s) for data in (b"first", b"second")]
        except StoreError as error:
            code = code_of(error.__cause__) if error.__cause__ else ""
            if code in ("AccessDenied", "403"):
                self._is_checked = True
                return
            if code == "NotImplemented":
                raise self._unsafe("does not know") from error
            raise
        with contextlib.suppress(StoreError):  # a deletion may be forbidden; listings hide the object in any case
            self._delete(key, name)
        if created != [True, False]:
            raise self._unsafe("ignores")
        self._is_checked = True

    def _unsafe(self, verb: str) -> UnsafeStoreError:
        return UnsafeStoreError(
            f"The server of {self.url} {verb} 'If-None-Match: *', so two replicas could both create the same object. "
            "Use a newer version of it, or another server: AWS S3, Cloudflare R2, Ceph and Hugging Face's S3 "
            "gateway honor it.",
            url=self.url,
        )

    @property
    def _client(self) -> Any:
        return self._connection[0]

    @property
    def _connection(self) -> tuple[Any, tuple[str, ...]]:
        """The client of this process, because a forked process must not use the connections of its parent."""
        pid = os.getpid()
        if pid not in self._clients:  # without a lock, because a fork could copy a lock that is held
            self._clients.setdefault(pid, connect(self.address, 8 * self._parallel_ranges, self._read_timeout_s))
        return self._clients[pid]

    def _reader(self) -> RangeReader:
        return RangeReader(self._client, self._range_bytes, self._parallel_ranges, self._retried)

    @property
    def _retry_deadline_s(self) -> float:
        return REQUEST.limit_s if self._deadline_s is None else self._deadline_s

    def _retried(
        self,
        act: Callable[[], T],
        deadline_s: float | None = None,
        failed: Callable[[Exception], None] = lambda error: None,
    ) -> T:
        deadline_s = self._retry_deadline_s if deadline_s is None else deadline_s
        return retried(act, deadline_s=deadline_s, sleep=self._sleep, clock=self._clock, failed=failed)

    def _request(self, verb: str, key: str | None, act: Callable[[], T], deadline_s: float | None = None) -> T:
        """Make a request, repeat it while its errors may pass, and turn errors of boto3 into errors of a store."""
        _, credentials = self._connection
        failed_at = list[float]()

        def failed(error: Exception) -> None:
            failed_at.append(self._clock())
            waits.failed(self._place, explain(error, self.address, key, verb, credentials))

        try:
            with waits.asking(self._place):
                return self._retried(act, deadline_s, failed)
        except Exception as error:
            if not is_request_failure(error):
                raise
            has_secret = any(secret in str(error) for secret in credentials)
            explained = explain(error, self.address, key, verb, credentials)
            explained.failing_since = failed_at[0] if failed_at else None
            raise explained from (None if has_secret else error)  # a traceback shows the cause, too

    def _name(self, key: str) -> dict[str, str]:
        check_key(key, self.url)
        name = self.address.prefix + key
        if len(name.encode()) > MAX_KEY_BYTES:
            raise ValueError(f"Bad key {key!r} for {self.url}: with the prefix it has more than {MAX_KEY_BYTES} bytes.")
        if key.split("/", 1)[0] == PROBES:
            raise ValueError(f"Bad key {key!r} for {self.url}: the name {PROBES!r} is reserved.")
        return {"Bucket": self.address.bucket, "Key": name}

    def _buffers(self, key: str, data: Data) -> Sequence[memoryview]:
        buffers = buffers_of(data)
        size = sum(map(len, buffers))
        if size > MAX_PUT_BYTES:
            raise StoreError(
                f"Cannot write {key!r} in {self.url}: it has {size} bytes, and S3 takes at most {MAX_PUT_BYTES} in "
                "one request. Write it as several objects (with DiLoCo: use more fragments).",
                key=key,
                url=self.url,
            )
        return buffers


def _body(buffers: Sequence[memoryview]) -> bytes | BufferBody:
    return b"".join(buffers) if sum(map(len, buffers)) < JOIN_BELOW_BYTES else BufferBody(buffers)
