"""The store of one run as a dashboard reads it: one list for each look, and each object that never changes once."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator

from executors.attempt.warning_record import NAME as WARNINGS
from executors.errors import KeyNotFoundError
from executors.store import Data, Entry, Store
from executors.store.record_names import BEGINNINGS, HEARTBEAT, RUN_RECORD
from executors.store.records import get_at_most

KEYS_PER_REQUEST = 1000  # keys of one answer to a list, at every known service
AGAIN_S = 30.0
"""Seconds after which an object is asked for again that did not exist, or that may be overwritten.

A new record of an attempt also ends this time, because other records follow it.
"""
ANY_SIZE = 1 << 30
WRITE_ONCE = re.compile(
    rf"[^/]+/(?:{re.escape(RUN_RECORD)}|task(?:/.*|\.\w+)|metrics/.+|decisions/\d+\.json|replicas/\d+/\d+/(?:"
    + "|".join(rf"{name.removesuffix('.json')}(?:-[0-9a-f]{{16}})?\.json" for name in BEGINNINGS)
    + "))"
)
"""Matches the keys of objects that no process overwrites."""


class RunStore:
    """A store that answers a look at one run with few requests.

    Between two calls of `begin_look`, each list is made once. An object that is written only once is read only once.
    Heartbeats are read in turns, so that a look at many replicas costs few requests. A write goes to the store itself.

    Args:
        store: the store.
        clock: returns seconds of a monotonic clock.

    Example:
        store = RunStore(open_store("s3://bucket/runs"))
        view = RunView(store, "brave-otter-7f3a")
        store.begin_look(n_heartbeats=1)
        view.status()
    """

    def __init__(self, store: Store, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._lists = dict[str, list[Entry]]()
        self._objects = dict[str, memoryview]()
        self._entries = dict[str, Entry]()
        """The entries of the records of warnings in the last list. They show whether a record has changed."""
        self._recent = dict[str, tuple[float, memoryview | None]]()
        """Objects that may change, and None for objects that do not exist, each with the time of the read."""
        self._beats = dict[str, tuple[int, memoryview]]()
        """The heartbeats, each with the number of the look that has read it."""
        self._due = set[str]()
        self._n_looks = 0
        self._n_records = 0
        self.n_requests = 0
        """The number of requests to the store so far."""

    @property
    def url(self) -> str:
        return self._store.url

    def begin_look(self, n_heartbeats: int | None = None) -> None:
        """Begin another look: lists are made again, and some heartbeats are read again.

        Args:
            n_heartbeats: the most known heartbeats that this look reads again, those with the oldest copies first.
                None: all.
        """
        with self._lock:
            self._n_looks += 1
            self._lists.clear()
            oldest = sorted(self._beats, key=lambda key: self._beats[key][0])
            self._due = {*oldest[:n_heartbeats]}

    def forget_measurements(self) -> None:
        """Forget the segments of measurements, which take most of the memory."""
        with self._lock:
            self._objects = {key: data for key, data in self._objects.items() if "/metrics/" not in key}

    def list(self, prefix: str) -> Iterator[Entry]:
        """List the objects with a prefix, as of the current look."""
        with self._lock:
            found = self._lists.get(prefix)
        if found is None:
            found = [*self._store.list(prefix)]
            with self._lock:
                self.n_requests += 1 + len(found) // KEYS_PER_REQUEST
                self._lists[prefix] = found
                if prefix.endswith("/replicas/") and len(found) != self._n_records:
                    self._n_records = len(found)
                    self._recent.clear()
                # A reader that knows an object or its version from the list must not get an older answer.
                for entry in found:
                    if entry.key.endswith(f"/{WARNINGS}") and self._entries.get(entry.key) != entry:
                        self._entries[entry.key] = entry
                        self._recent.pop(entry.key, None)
                    elif (recent := self._recent.get(entry.key)) is not None and recent[1] is None:
                        del self._recent[entry.key]
        return iter(found)

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        """Return an object or a part of it, as the store does."""
        if start or size is not None:
            self._count()
            return self._store.get(key, start=start, size=size)
        return self.get_at_most(key, ANY_SIZE)

    def get_at_most(self, key: str, max_bytes: int) -> memoryview:
        """Return a whole object, from memory if it cannot have changed or was read a short time ago."""
        is_beat, now = key.endswith(f"/{HEARTBEAT}"), self._clock()
        with self._lock:
            if (kept := self._objects.get(key)) is not None:
                return kept
            if is_beat and key in self._beats and key not in self._due:
                return self._beats[key][1]
            at, recent = self._recent.get(key, (0.0, None))
            is_recent = key in self._recent and now - at < AGAIN_S
        if is_recent and recent is None:
            raise KeyNotFoundError(f"{key!r} does not exist in {self.url}.", key=key, url=self.url)
        if is_recent and recent is not None:
            return recent
        self._count()
        try:
            data = get_at_most(self._store, key, max_bytes)
        except KeyNotFoundError:
            with self._lock:
                self._recent[key] = (now, None)
            raise
        with self._lock:
            if is_beat:
                self._beats[key] = (self._n_looks, data)
                self._due.discard(key)
            elif WRITE_ONCE.fullmatch(key):
                self._objects[key] = data
            else:
                self._recent[key] = (now, data)
        return data

    def put_if_absent(self, key: str, data: Data) -> bool:
        """Create an object in the store itself."""
        self._changed(key)
        return self._store.put_if_absent(key, data)

    def put(self, key: str, data: Data) -> None:
        """Write an object in the store itself."""
        self._changed(key)
        self._store.put(key, data)

    def delete(self, key: str) -> None:
        """Remove an object from the store itself."""
        self._changed(key)
        self._store.delete(key)

    def _count(self) -> None:
        with self._lock:
            self.n_requests += 1

    def _changed(self, key: str) -> None:
        with self._lock:
            self.n_requests += 1
            self._recent.pop(key, None)
            self._lists.clear()
