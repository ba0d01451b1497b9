"""The `Store` protocol: the five methods that replicas need of a bucket or a directory, and optional abilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from executors.errors import CorruptObjectError, StoreError

Buffer: TypeAlias = bytes | bytearray | memoryview
Data: TypeAlias = Buffer | Sequence[Buffer]
Produce: TypeAlias = Callable[[Callable[[Buffer], None]], Buffer]
"""A function that makes an object. It passes everything after the head to its argument, in pieces, and returns the
head."""

MAX_KEY_BYTES = 1024  # S3's limit for a whole key
MAX_SEGMENT_BYTES = 255  # NAME_MAX of every common file system


@dataclass(frozen=True, slots=True)
class Entry:
    """One object in a listing.

    Example:
        sum(entry.size_bytes for entry in store.list("otter/"))
    """

    key: str
    size_bytes: int
    modified_at: float
    """The Unix time of the last write, by the store's clock. No replica bases a decision on this time."""


@runtime_checkable
class Store(Protocol):
    """A flat map from keys to bytes.

        store = open_store("file:///tmp/runs")
        store.put_if_absent("greeting", b"hello")  # True: this call created the object
        bytes(store.get("greeting"))

    A key is a relative path of one or more segments joined by `/`. `check_key` refuses any other text. Every reader
    sees the whole object or no object. A writer can read its object at once. Every error is a `StoreError` that names
    the key and the url. All methods may be called from several threads at the same time.
    """

    @property
    def url(self) -> str:
        """The address that `open_store` opens this store with. Never holds credentials."""

    def put_if_absent(self, key: str, data: Data) -> bool:
        """Create an object unless the key is taken, atomically.

        If several calls for one key run at the same time, exactly one of them returns True.

        Args:
            key: the key of the object.
            data: the bytes of the object. A sequence of buffers is written as one object, without a copy in memory.

        Returns:
            True if this call created the object. False if the key has an object already, which stays as it is.
        """

    def put(self, key: str, data: Data) -> None:
        """Write an object, and replace an older one.

        Args:
            key: the key of the object.
            data: the bytes of the object. A sequence of buffers is written as one object, without a copy in memory.
        """

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        """Return an object, or `size` bytes of it from `start` on, read-only.

        The bytes do not change when the object is replaced or deleted later. A store that can map objects into memory
        does so instead of copying them.

        Args:
            key: the key of the object.
            start: the first byte to read, counted from 0.
            size: the number of bytes to read. Default: up to the end of the object.

        Raises:
            KeyNotFoundError: the key has no object.
            StoreError: the object ends before `start + size`.
        """

    def list(self, prefix: str) -> Iterator[Entry]:
        """List every object whose key starts with exactly `prefix`, sorted by key (code point order).

        Unfinished writes are never listed. The list may be out of date. So callers do not conclude from a missing key
        that the object does not exist.

        Args:
            prefix: the beginning of the keys. An empty string lists every object.
        """

    def delete(self, key: str) -> None:
        """Remove an object. A missing object is not an error.

        Args:
            key: the key of the object.
        """


@runtime_checkable
class StreamingStore(Store, Protocol):
    """An optional ability: to write an object while it is being made, so that it is never in memory as a whole."""

    def put_if_absent_streamed(self, key: str, head_bytes: int, produce: Produce) -> bool:
        """Create an object unless the key is taken, as `put_if_absent` does.

        Args:
            key: the key of the object.
            head_bytes: the size of the object's head, which is made last.
            produce: the function that makes the object. It is not called if the key is known to be taken. It may
                overwrite a buffer after it has passed the buffer on. If it raises an error, this method raises that
                error and creates nothing.
        """


@runtime_checkable
class BoundedStore(Store, Protocol):
    """An optional ability: to refuse an object that is larger than its reader expects, before it is read."""

    def get_at_most(self, key: str, max_bytes: int) -> memoryview:
        """Return a copy of a whole object.

        Args:
            key: the key of the object.
            max_bytes: the largest size that the caller accepts.

        Raises:
            KeyNotFoundError: the key has no object.
            CorruptObjectError: the object has more than `max_bytes` bytes.
        """


@runtime_checkable
class FolderStore(Store, Protocol):
    """An optional ability: to list the folders of one level without the keys below them."""

    def folders(self, prefix: str) -> Iterator[str]:
        """List the names of the folders directly below a prefix, each once, sorted.

        For the keys `a/b/1`, `a/b/2` and `a/c` the folder below `a/` is `b`. Like `list`, it may be out of date.

        Args:
            prefix: an empty string, or the beginning of keys up to a `/`.
        """


@runtime_checkable
class LimitedStore(Store, Protocol):
    """A store that accepts no object above a size."""

    max_object_bytes: int
    """The size of the largest object that it accepts."""


@runtime_checkable
class CheckingStore(Store, Protocol):
    """A store that may promise to refuse an upload that was damaged on its way."""

    checks_uploads: bool
    """True if every object that the store has acknowledged has the bytes that its writer sent.

    Then a replica does not read its own contribution again before the other replicas rely on it.
    """


def check_key(key: str, url: str) -> None:
    """Refuse a key that could lead out of a store, or that different stores would understand differently.

    Args:
        key: the key.
        url: the store's url, for the message.

    Raises:
        ValueError: the key is empty, absolute or too long. Or it has an empty, `.` or `..` segment, a NUL character or
            a lone surrogate.

    Example:
        check_key("runs/otter/1", store.url)
    """
    segments = key.split("/")
    try:
        longest = max(len(segment.encode()) for segment in segments)
    except UnicodeEncodeError:
        problem = "it is not valid Unicode"
    else:
        if not key:
            problem = "it is empty"
        elif "\0" in key:
            problem = "it contains a NUL character"
        elif any(segment in ("", ".", "..") for segment in segments):
            problem = "it has an empty, '.' or '..' segment"
        elif len(key.encode()) > MAX_KEY_BYTES:
            problem = f"it has {len(key.encode())} bytes, more than {MAX_KEY_BYTES}"
        elif longest > MAX_SEGMENT_BYTES:
            problem = f"one of its segments has more than {MAX_SEGMENT_BYTES} bytes"
        else:
            return
    raise ValueError(f"Bad key {key!r} for {url}: {problem}. Use a relative path such as 'runs/a/1'.")


def buffers_of(data: Data) -> list[memoryview]:
    """Return views of the data as flat byte buffers, without copying."""
    parts: Iterable[Buffer] = (data,) if isinstance(data, (bytes, bytearray, memoryview)) else data
    return [memoryview(part).cast("B") for part in parts if len(part)]


def check_size(key: str, url: str, object_bytes: int, max_bytes: int) -> int:
    """Return the size of an object, after checking that it is not larger than its reader accepts.

    Args:
        key: the key of the object, for the message.
        url: the store's url, for the message.
        object_bytes: the size of the object.
        max_bytes: the largest size that the reader accepts.

    Raises:
        CorruptObjectError: the object has more than `max_bytes` bytes.
    """
    if object_bytes > max_bytes:
        raise CorruptObjectError(
            f"{key!r} in {url} has {object_bytes} bytes; at most {max_bytes} were expected.", key=key, url=url
        )
    return object_bytes


def check_range(key: str, url: str, object_bytes: int, start: int, size: int | None) -> int:
    """Return the end of a byte range, after checking that the object has the whole range.

    Args:
        key: the key of the object, for the message.
        url: the store's url, for the message.
        object_bytes: the size of the object.
        start: the first byte of the range, counted from 0.
        size: the number of bytes in the range. None: up to the end of the object.

    Raises:
        ValueError: `start` or `size` is negative.
        StoreError: the range ends after the object.
    """
    if start < 0 or (size is not None and size < 0):
        raise ValueError(f"A byte range needs start and size of at least 0, got start={start}, size={size}.")
    end = object_bytes if size is None else start + size
    if max(start, end) > object_bytes:
        raise StoreError(
            f"Object {key!r} in {url} has {object_bytes} bytes, so it has no bytes {start} to {end}.",
            key=key,
            url=url,
        )
    return end
