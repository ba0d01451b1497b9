"""MemoryStore: a store in the memory of this process, for tests and simulations. Other processes cannot see it."""

from __future__ import annotations

import time
from _thread import allocate_lock
from collections.abc import Iterator

from executors.errors import KeyNotFoundError
from executors.store.protocol import Data, Entry, buffers_of, check_key, check_range

_named: dict[str, MemoryStore] = {}


class MemoryStore:
    """A dictionary with a lock that keeps every promise of `Store`.

    Args:
        name: the name in the url. Default: an empty name. Use `named` to share a store by its name.

    Example:
        MemoryStore().put_if_absent("greeting", b"hello")
    """

    checks_uploads = True
    """A write is a copy in memory, so nothing can damage it on the way."""

    def __init__(self, name: str = "") -> None:
        self._url = f"memory://{name}"
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = allocate_lock()

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """Return the memory store that this process has under a name.

        Args:
            name: the name.

        Example:
            MemoryStore.named("test") is MemoryStore.named("test")
        """
        return _named.setdefault(name, cls(name))

    @property
    def url(self) -> str:
        return self._url

    def put_if_absent(self, key: str, data: Data) -> bool:
        check_key(key, self.url)
        value = b"".join(buffers_of(data))
        with self._lock:
            return self._objects.setdefault(key, entry := (value, time.time())) is entry

    def put(self, key: str, data: Data) -> None:
        check_key(key, self.url)
        value = b"".join(buffers_of(data))
        with self._lock:
            self._objects[key] = (value, time.time())

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        check_key(key, self.url)
        try:
            value, _ = self._objects[key]
        except KeyError:
            raise KeyNotFoundError(f"No object {key!r} in {self.url}.", key=key, url=self.url) from None
        end = check_range(key, self.url, len(value), start, size)
        return memoryview(value)[start:end]

    def list(self, prefix: str) -> Iterator[Entry]:
        with self._lock:
            found = sorted((key, len(v), at) for key, (v, at) in self._objects.items() if key.startswith(prefix))
        return iter([Entry(*row) for row in found])

    def delete(self, key: str) -> None:
        check_key(key, self.url)
        with self._lock:
            self._objects.pop(key, None)
