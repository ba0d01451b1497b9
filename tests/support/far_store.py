"""FarStore: a store with the latency and the speed of a slow link, which all threads of the process share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from executors.store import Buffer, Data, Entry, Produce, Store, StreamingStore
from executors.store.protocol import buffers_of

PIECE_BYTES = 128 << 10
"""Bytes of one piece. Transfers at the same time take turns after each piece."""

T = TypeVar("T")


class Line:
    """One direction of a link. Transfers take turns, a piece at a time, and only one piece passes at a time."""

    def __init__(self, bytes_per_s: float) -> None:
        self.n_bytes = 0
        """The bytes that have passed or are passing."""
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def take(self, n_bytes: int, from_s: float) -> float:
        """Occupy the line for some bytes as soon as it is free, and return the time at which they have passed."""
        with self._lock:
            self.n_bytes += n_bytes
            self._free_s = max(self._free_s, from_s) + n_bytes / self._bytes_per_s
            return self._free_s

    def pieces(self, n_bytes: int, from_s: float) -> Iterator[float]:
        """Yield the time at which each piece of a transfer has passed. A caller that wakes up late loses no time."""
        for start in range(0, n_bytes, PIECE_BYTES):
            from_s = self.take(min(PIECE_BYTES, n_bytes - start), from_s)
            yield from_s


class FarStore:
    """A store behind a link. Each process has its own link. If replicas are threads, each of them has its own link,
    too.

    An answer begins after `latency_s`, and then its bytes pass. An object exists when its last byte has passed. The
    store is not a `FileStore`, so DiLoCo reads several objects at a time, and polls instead of waiting for changes.
    """

    def __init__(
        self,
        store: Store,
        latency_s: float,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self.up, self.down = Line(bytes_per_s), Line(bytes_per_s)
        self._latency_s = latency_s
        self._clock = clock
        self._sleep = sleep

    @property
    def url(self) -> str:
        return self.store.url

    def put_if_absent(self, key: str, data: Data) -> bool:
        self._send(data)
        return self.store.put_if_absent(key, data)

    def put(self, key: str, data: Data) -> None:
        self._send(data)
        self.store.put(key, data)

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        self._ask()
        data = self.store.get(key, start=start, size=size)
        self._pass(self.down, len(data))
        return data

    def list(self, prefix: str) -> Iterator[Entry]:
        self._ask()
        return self.store.list(prefix)

    def delete(self, key: str) -> None:
        self._ask()
        self.store.delete(key)

    def _send(self, data: Data) -> None:
        self._ask()
        self._pass(self.up, sum(map(len, buffers_of(data))))

    def _ask(self) -> None:
        self._sleep(self._latency_s)

    def _pass(self, line: Line, n_bytes: int) -> None:
        for through_s in line.pieces(n_bytes, self._clock()):
            self._wait_until(through_s)

    def _wait_until(self, time_s: float) -> None:
        left_s = time_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)


class FarStreamingStore(FarStore):
    """A `FarStore` that streams: a piece of an object is sent while the next piece is computed."""

    store: StreamingStore

    def put_if_absent_streamed(self, key: str, head_bytes: int, produce: Produce) -> bool:
        self._ask()

        def send(write: Callable[[Buffer], None]) -> Buffer:
            through_s = 0.0

            def send_piece(piece: Buffer) -> None:
                nonlocal through_s
                write(piece)
                self._wait_until(through_s)
                through_s = self.up.take(len(piece), self._clock())

            head = produce(send_piece)
            self._wait_until(self.up.take(len(head), through_s))
            return head

        return self.store.put_if_absent_streamed(key, head_bytes, send)
