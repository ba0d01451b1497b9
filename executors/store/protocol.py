"""The `Store` protocol: what a rendezvous needs of a bucket or a directory, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from executors.errors import CorruptObjectError, StoreError

Buffer: TypeAlias = bytes | bytearray | memoryview
Data: TypeAlias = Buffer | Sequence[Buffer]
Produce: TypeAlias = Callable[[Callable[[Buffer], None]], Buffer]
"""Makes an object: hands all but its head to a callable, piece by piece, and returns the head."""

MAX_KEY_BYTES = 1024  # S3's limit for a whole key
MAX_SEGMENT_BYTES = 255  # NAME_MAX of every common file system


@dataclass(frozen=True, slots=True)
class Entry:
    """One object in a listing."""

    key: str
    size_bytes: int
    modified_at: float
    """Seconds since the epoch by the store's clock; no replica decides anything by it."""


@runtime_checkable
class Store(Protocol):
    """A flat map from keys to bytes.

        store = open_store("file:///tmp/runs")
        store.put_if_absent("greeting", b"hello")  # True: this call created the object
        bytes(store.get("greeting"))

    Keys are relative paths of one or more segments joined by `/`; `check_key` refuses others. Objects appear whole or
    not at all, at every reader, and an object that was written can be read at once by its writer. Every error is a
    `StoreError` that names key and url. All methods are safe to call from several threads.
    """

    @property
    def url(self) -> str:
        """The address that `open_store` opens this store with. Never holds credentials."""

    def put_if_absent(self, key: str, data: Data) -> bool:
        """Create an object unless the key is taken, atomically.

        If several calls for one key run at the same time, exactly one of them returns True.

        Args:
            key: the key of the object.
            data: its bytes. A sequence of buffers is written joined, not copied.

        Returns:
            True if this call created the object. False if an object exists already, which is not changed.
        """

    def put(self, key: str, data: Data) -> None:
        """Write an object, and replace an older one.

        Args:
            key: the key of the object.
            data: its bytes. A sequence of buffers is written joined, not copied.
        """

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        """Return an object, or `size` bytes of it from `start` on, read-only.

        The bytes do not change when the object is replaced or deleted later. A store that can map objects into memory
        does so, and makes no copy.

        Args:
            key: the key of the object.
            start: the first byte to read, counted from 0.
            size: the number of bytes to read. None: up to the end.

        Raises:
            KeyNotFoundError: there is no object.
            StoreError: the object ends before `start + size`.
        """

    def list(self, prefix: str) -> Iterator[Entry]:
        """List every object whose key starts with exactly `prefix`, sorted by key (code point order).

        Unfinished writes are never listed. The list may be stale, so no decision follows from a key that it lacks.

        Args:
            prefix: the beginning of the keys. An empty text lists every object.
        """

    def delete(self, key: str) -> None:
        """Remove an object. A missing object is not an error.

        Args:
            key: the key of the object.
        """


@runtime_checkable
class StreamingStore(Store, Protocol):
    """An optional ability: to take an object while it is being made, so that it is never in memory as a whole."""

    def put_if_absent_streamed(self, key: str, head_bytes: int, produce: Produce) -> bool:
        """Create an object unless the key is taken, as `put_if_absent` does.

        Args:
            head_bytes: size of the object's head, which is made last.
            produce: is not called when the key is known to be taken. The buffers that it hands on may be overwritten
                afterwards. Its exceptions are raised, and nothing was created.
        """


@runtime_checkable
class BoundedStore(Store, Protocol):
    """An optional ability: to refuse an object that is larger than its reader expects, before it is read."""

    def get_at_most(self, key: str, max_bytes: int) -> memoryview:
        """Return a whole object, copied.

        Raises:
            KeyNotFoundError: there is no object.
            CorruptObjectError: it has more than `max_bytes` bytes.
        """


@runtime_checkable
class FolderStore(Store, Protocol):
    """An optional ability: to list what lies at one level, and nothing of what is below."""

    def folders(self, prefix: str) -> Iterator[str]:
        """List, for each key below a prefix that is empty or ends with `/`, its next segment if more follow.

        Each once, sorted; as stale as `list`.
        """


@runtime_checkable
class LimitedStore(Store, Protocol):
    """The message of a store that accepts no object above a size."""

    max_object_bytes: int


def check_key(key: str, url: str) -> None:
    """Refuse keys that could escape the store or mean different things to different stores.

    Raises:
        ValueError: empty, absolute, too long, with an empty, `.` or `..` segment, or with a NUL or lone surrogate.
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
    """Return the size of an object.

    Raises:
        CorruptObjectError: it is more than `max_bytes`.
    """
    if object_bytes > max_bytes:
        raise CorruptObjectError(
            f"{key!r} in {url} has {object_bytes} bytes, at most {max_bytes} were expected.", key=key, url=url
        )
    return object_bytes


def check_range(key: str, url: str, object_bytes: int, start: int, size: int | None) -> int:
    """Return the end of a byte range of an object that has `object_bytes` bytes.

    Raises:
        ValueError: `start` or `size` is negative.
        StoreError: the range ends after the object.
    """
    if start < 0 or (size is not None and size < 0):
        raise ValueError(f"A byte range needs start and size of at least 0, got start={start}, size={size}.")
    end = object_bytes if size is None else start + size
    if max(start, end) > object_bytes:
        raise StoreError(
            f"Object {key!r} in {url} has {object_bytes} bytes; bytes {start} to {end} were asked for.",
            key=key,
            url=url,
        )
    return end
