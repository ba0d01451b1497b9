"""A store whose answers are hints: what the rendezvous loop looks through.

No decision is taken on an absence or on the answer of a write, so an error of the store means the same as "not yet":
look again. Only errors that go on for a while are worth an exception.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

from diloco.records import Buffer
from executors.errors import KeyNotFoundError, StoreError
from executors.store import Data, Produce, Store, StreamingStore


class PatientStore:
    """Asks a store, and raises its errors only when a kind of call has failed for `error_patience_s` on end.

    `look` may be called from several threads at once.
    """

    def __init__(self, store: Store, *, clock: Callable[[], float], error_patience_s: float) -> None:
        self.store = store
        self.read_bytes = 0
        self.written_bytes = 0
        self.answer_s = 0.0
        """How long the store took to say that nothing stands somewhere, the last time."""
        self._clock = clock
        self._patience_s = error_patience_s
        self._failing_since: dict[str, float] = {}
        self._counting = threading.Lock()
        self.streams = isinstance(store, StreamingStore)
        """Whether the store takes objects while they are being made."""

    def look(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview | None:
        """Return what stands there, or None: nothing, or no answer. An object that was cut off gives fewer bytes."""
        asked_s = self._clock()
        try:
            data = self._get(key, start, size)
        except KeyNotFoundError:
            data = None
            self.answer_s = self._clock() - asked_s
        except StoreError as error:
            self._failed("get", error)
            return None
        self._failing_since.pop("get", None)
        if data is not None:
            with self._counting:
                self.read_bytes += len(data)
        return data

    def _get(self, key: str, start: int, size: int | None) -> memoryview:
        try:
            return self.store.get(key, start=start, size=size)
        except KeyNotFoundError:
            raise
        except StoreError:
            if size is None:
                raise
        end = start + size  # perhaps there is no such range any more: that is not a failing store, but a rotten object
        return self.store.get(key)[start:end]

    def stands(self, key: str) -> bool:
        """Tell whether something stands there; False may be wrong."""
        return self.look(key) is not None

    def create(self, key: str, data: Data) -> None:
        """Create an object, perhaps. Who wants to know reads what stands."""
        try:
            self.store.put_if_absent(key, data)
        except StoreError as error:
            self._failed("put_if_absent", error)
        else:
            self._failing_since.pop("put_if_absent", None)
            self.written_bytes += size_of(data)

    def create_streamed(self, key: str, head_bytes: int, size_bytes: int, produce: Produce) -> None:
        """Create an object that is made on the way, perhaps; the store streams."""
        assert isinstance(self.store, StreamingStore)
        try:
            self.store.put_if_absent_streamed(key, head_bytes, produce)
        except StoreError as error:
            self._failed("put_if_absent", error)
        else:
            self._failing_since.pop("put_if_absent", None)
            self.written_bytes += size_bytes

    def write(self, key: str, data: Data) -> bool:
        """Write an object; True when the store says that it stands."""
        try:
            self.store.put(key, data)
        except StoreError as error:
            self._failed("put", error)
            return False
        self._failing_since.pop("put", None)
        self.written_bytes += size_of(data)
        return True

    def remove(self, key: str) -> None:
        """Delete an object, perhaps: what is left over is tidied up later."""
        try:
            self.store.delete(key)
        except StoreError as error:
            self._failed("delete", error)
        else:
            self._failing_since.pop("delete", None)

    def found(self, prefix: str) -> list[str]:
        """List the keys below a prefix; some may be missing, and some gone already."""
        try:
            return [entry.key for entry in self.store.list(prefix)]
        except StoreError as error:
            self._failed("list", error)
            return []

    def apart(self) -> PatientStore:
        """Return another such view of the same store, for another thread."""
        return PatientStore(self.store, clock=self._clock, error_patience_s=self._patience_s)

    def _failed(self, verb: str, error: StoreError) -> None:
        now = self._clock()
        if now - self._failing_since.setdefault(verb, now) >= self._patience_s:
            raise error


def size_of(data: Data) -> int:
    """Return the number of bytes of a buffer or of a sequence of them."""
    if isinstance(data, Buffer):
        return len(memoryview(data).cast("B"))
    return sum(len(memoryview(part).cast("B")) for part in data)


def backoff(rng: random.Random, first_s: float = 0.002, most_s: float = 1.0) -> Iterator[float]:
    """Yield pauses that grow from `first_s` to `most_s`, each shortened by up to half, so that replicas spread."""
    pause_s = first_s
    while True:
        yield pause_s * rng.uniform(0.5, 1.0)
        pause_s = min(pause_s * 1.6, most_s)
