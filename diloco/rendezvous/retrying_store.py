"""A store whose answers are hints: what the rendezvous looks through.

No decision depends on an absence or on the answer of a write, so an error of the store means the same as "not yet":
look again. Only errors that continue for a while become an exception.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from mmap import mmap
from typing import NamedTuple, Protocol, TypeVar

from xxhash import xxh3_128_digest

from diloco.rendezvous.envelope import Buffer
from diloco.rendezvous.frames import READ_TRIES
from executors.errors import KeyNotFoundError, StoreError
from executors.patience import ROUND, Outage, Patience, Waits
from executors.store import Data, MemoryStore, Produce, Store, StreamingStore
from executors.store.file import FileStore

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
FAILURES = 3
"""The number of calls of one kind that must have failed in a row before their error is raised. A round may take longer
than the patience lasts, and it deletes only once."""
WAITED_FOR = {
    "get": "the store to read of a round",
    "list": "the store to list what rounds left",
    "put": "the store to write for a round",
    "put_if_absent": "the store to write for a round",
    "delete": "the store to delete what a round left",
}
"""The words that name the wait while a kind of call fails."""
THREADS = 8
"""An S3 store reads large objects in parallel by itself, and its pool has connections for 8 such reads."""


class _Misread(NamedTuple):
    """The failed readings of one object, whose bytes were not the written ones."""

    n: int
    since_s: float
    """When it was first read as these bytes."""
    last_s: float
    digest: bytes


class RetryingStore:
    """Asks a store, and raises its errors only when a kind of call has failed for as long as the patience lasts.

    `peek` may be called from several threads at once.

    Args:
        store: the store.
        clock: returns seconds of a monotonic clock.
        patience: how long a kind of call may fail, again and again.
        waits: says once a minute that the store is waited for. None: nothing is said.
        copies: True: copy data that the store maps from a file. Another process may write to the file after the proof.
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float],
        patience: Patience = ROUND,
        waits: Waits | None = None,
        copies: bool = False,
    ) -> None:
        self.store = store
        self.read_bytes = 0
        self.written_bytes = 0
        self.answer_s = 0.0
        """How long the store last took to answer that a key does not exist."""
        self._clock = clock
        self._patience = patience
        self._waits = waits or Waits(lambda words: None, clock)
        self._copies = copies
        self._outages = {verb: Outage(patience, what, waits=self._waits) for verb, what in WAITED_FOR.items()}
        """By kind of call."""
        self._n_failed = dict.fromkeys(WAITED_FOR, 0)
        """By kind of call, how many have failed in a row."""
        self._bad: dict[str, _Misread] = {}
        self._counting = threading.Lock()
        self.last_error: StoreError | None = None
        """Why something was not written or deleted, the last time."""
        self.streams = isinstance(store, StreamingStore)
        """Whether the store takes objects while they are being made."""
        self.maps = self.streams and not copies
        """True if a streamed object can be read again without taking memory."""

    def peek(
        self, key: str, *, start: int = 0, size: int | None = None, moves: bool = True, is_copied: bool = False
    ) -> memoryview | None:
        """Return the object, or None: there is none, or no answer. An object that was cut off gives fewer bytes.

        Args:
            moves: count its bytes as read. An object that this process has streamed is still in this machine's memory.
            is_copied: it is copied piece by piece before it is proven.
        """
        asked_s = self._clock()
        data: memoryview | None
        try:
            try:
                data = self.store.get(key, start=start, size=size)
            except KeyNotFoundError:
                raise
            except StoreError:
                if size is None:
                    raise
                # The range may no longer exist. The object is then rotten, and the store works.
                data = self.store.get(key)[start : start + size]
        except KeyNotFoundError:
            data = None
            self.answer_s = self._clock() - asked_s
        except StoreError as error:
            self._failed("get", error)
            return None
        self._works("get")
        if data is not None and self._copies and not is_copied and isinstance(data.obj, mmap):
            data = memoryview(bytes(data))
        if data is not None and moves:
            with self._counting:
                self.read_bytes += len(data)
        return data

    def record_misread(self, key: str, data: Buffer) -> None:
        """Note a reading that is not what was written: the reading may be wrong, or the object."""
        found, now = xxh3_128_digest(data), self._clock()
        before = self._bad.get(key, _Misread(0, now, now, found))
        self._bad[key] = _Misread(before.n + 1, before.since_s if found == before.digest else now, now, found)
        if before.n + 1 == READ_TRIES:
            log.warning("%s in %s is not what was written, in %s readings.", key, self.store.url, READ_TRIES)

    def count_misreads(self, key: str) -> int:
        """Return how many readings of an object were not what was written."""
        found = self._bad.get(key)
        return 0 if found is None else found.n

    def is_damaged(self, key: str, for_s: float) -> bool:
        """Return whether an object was read as the same wrong bytes for so long, again and again."""
        found = self._bad.get(key)
        return found is not None and found.n >= READ_TRIES and found.last_s - found.since_s >= for_s

    def is_missing(self, key: str) -> bool:
        """Return True if the store has no such object, and False if it has one or does not answer."""
        try:
            try:
                self.store.get(key, start=0, size=0)
            except KeyNotFoundError:
                raise
            except StoreError:
                self.store.get(key)
        except StoreError as error:
            return isinstance(error, KeyNotFoundError)
        return False

    def exists(self, key: str) -> bool:
        """Return whether the object exists; False may be wrong."""
        return self.peek(key) is not None

    def create(self, key: str, data: Data) -> None:
        """Create an object, perhaps: read it to know."""
        if self._did("put_if_absent", lambda: self.store.put_if_absent(key, data)):
            self.written_bytes += size_of(data)

    def create_streamed(self, key: str, head_bytes: int, size_bytes: int, produce: Produce) -> None:
        """Create an object while it is being made, perhaps; only where the store streams."""
        store = self.store
        assert isinstance(store, StreamingStore)
        if self._did("put_if_absent", lambda: store.put_if_absent_streamed(key, head_bytes, produce)):
            self.written_bytes += size_bytes

    def write(self, key: str, data: Data) -> bool:
        """Write an object; True when the store has acknowledged it."""
        done = self._did("put", lambda: self.store.put(key, data))
        if done:
            self.written_bytes += size_of(data)
        return done

    def remove(self, key: str) -> None:
        """Delete an object, perhaps: what is left over is tidied up later."""
        self._did("delete", lambda: self.store.delete(key))

    def list_keys(self, prefix: str) -> list[str]:
        """List the keys below a prefix; some may be missing, and some gone already."""
        try:
            return [entry.key for entry in self.store.list(prefix)]
        except StoreError as error:
            self._failed("list", error)
            return []

    def for_thread(self) -> RetryingStore:
        """Return another such view of the same store, for another thread."""
        return RetryingStore(
            self.store, clock=self._clock, patience=self._patience, waits=self._waits, copies=self._copies
        )

    def _did(self, verb: str, act: Callable[[], object]) -> bool:
        try:
            act()
        except StoreError as error:
            self.last_error = error
            self._failed(verb, error)
            return False
        self._works(verb)
        return True

    def _failed(self, verb: str, error: StoreError) -> None:
        self._n_failed[verb] += 1
        if not self._outages[verb].bears(error) and self._n_failed[verb] >= FAILURES:
            raise error

    def _works(self, verb: str) -> None:
        """Note that a kind of call did not fail."""
        if self._n_failed[verb]:
            self._n_failed[verb] = 0
            self._outages[verb].end()


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


class Map(Protocol):
    """Applies a function to several things, as the builtin `map` does; perhaps in several threads."""

    def __call__(self, act: Callable[[T], R], things: Iterable[T], /) -> Iterator[R]: ...


class Ask(Protocol):
    """Asks the store a question, at once or while training continues."""

    def __call__(self, question: Callable[[], T], /) -> Future[T]: ...


def at_once(question: Callable[[], T]) -> Future[T]:
    """Ask now."""
    answer: Future[T] = Future()
    answer.set_result(question())
    return answer


class ParallelMap:
    """A `Map` of threads, which are started when they are first needed."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, act: Callable[[T], R], things: Iterable[T], /) -> Iterator[R]:
        listed = list(things)
        return map(act, listed) if len(listed) < 2 else self._threads().map(act, listed)

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Ask in another thread, while training continues."""
        return self._threads().submit(question)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "diloco reads")
        return self._pool

    def close(self) -> None:
        """Start nothing more; what is under way ends by itself."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def is_near(store: Store) -> bool:
    """Return whether the store answers at once, so that threads would cost more than they save."""
    return isinstance(store, (FileStore, MemoryStore))
