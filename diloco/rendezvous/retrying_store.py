"""Wraps a store for the rendezvous: `RetryingStore` hides errors of the store until they have continued for a while.

The rendezvous treats an error of the store like an object that does not exist yet: the caller looks again later. This
is safe, because no decision depends on a missing object or on the answer to a write. This file also has the pauses
between looks, and parallel reads.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from mmap import mmap
from typing import NamedTuple, Protocol, TypeVar

from xxhash import xxh3_128_digest

from diloco.rendezvous.envelope import Buffer
from diloco.rendezvous.frames import READ_TRIES
from executors.errors import KeyNotFoundError, StoreError
from executors.patience import ROUND, Outage, OutageTolerance, Waits
from executors.store import Data, MemoryStore, Produce, Store, StreamingStore
from executors.store.file import FileStore
from executors.store.protocol import CheckingStore

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
FAILURES = 3
"""The number of calls of one kind that must have failed in a row before their error is raised.

A round may take longer than the tolerance, and deletes only once. Without this number, one failed deletion could end
the round.
"""
WAITED_FOR = {
    "get": "the store to read of a round",
    "list": "the store to list what rounds left",
    "put": "the store to write for a round",
    "put_if_absent": "the store to write for a round",
    "delete": "the store to delete what a round left",
}
"""For each kind of call, the text that names the wait while such calls fail."""
THREADS = 8
"""The number of parallel reads. The connection pool of the S3 store has room for 8 large reads at a time."""
READS_AHEAD = 2
"""The number of parts of a state that are read while another part is used. Each of them needs memory."""


class _Misread(NamedTuple):
    """The wrong readings of one object."""

    n: int
    since_s: float
    """The time of the first reading of the bytes that were read last."""
    last_s: float
    """The time of the last reading."""
    digest: bytes
    """The digest of the bytes of the last reading."""


class RetryingStore:
    """Calls a store, and raises an error only if one kind of call has failed for longer than the tolerance.

    Several threads may call `peek` at once.

    Args:
        store: the store.
        clock: returns seconds of a monotonic clock.
        tolerance: the longest time for which one kind of call may fail.
        waits: reports once a minute that the replica waits for the store. None: there is no report.
        copies: True: copy data that the store maps from a file, because another process may write to the file after
            the data was checked.

    Example:
        RetryingStore(store, clock=monotonic).peek(key)
    """

    def __init__(
        self,
        store: Store,
        *,
        clock: Callable[[], float],
        tolerance: OutageTolerance = ROUND,
        waits: Waits | None = None,
        copies: bool = False,
    ) -> None:
        self.store = store
        self.read_bytes = 0
        self.written_bytes = 0
        self.answer_s = 0.0
        """Seconds that the store last took to answer that a key does not exist."""
        self._clock = clock
        self._tolerance = tolerance
        self._waits = waits or Waits(lambda words: None, clock)
        self._copies = copies
        self._outages = {verb: Outage(tolerance, what, waits=self._waits) for verb, what in WAITED_FOR.items()}
        """The current outage of each kind of call."""
        self._n_failed = dict.fromkeys(WAITED_FOR, 0)
        """The number of failures in a row of each kind of call."""
        self._bad: dict[str, _Misread] = {}
        self._counting = threading.Lock()
        self.last_error: StoreError | None = None
        """The error of the last write or deletion that failed."""
        self.streams = isinstance(store, StreamingStore)
        """True if the store can write an object while its content is being computed."""
        self.maps = self.streams and not copies
        """True if a streamed object can be read again without using memory."""
        self.checks_uploads = isinstance(store, CheckingStore) and store.checks_uploads
        """True if an acknowledged object has the bytes that were sent."""

    def peek(
        self, key: str, *, start: int = 0, size: int | None = None, moves: bool = True, is_copied: bool = False
    ) -> memoryview | None:
        """Return an object, or a range of it. None: it does not exist, or the store failed.

        If the object ends before the range does, the result is shorter than the range.

        Args:
            key: the key of the object.
            start: the first byte of the range.
            size: the size of the range. None: to the end of the object.
            moves: True: count the bytes as read. False is for an object that this process has written into a directory
                before: its bytes are still in the memory of this machine.
            is_copied: True if the caller copies the data piece by piece before it checks them.
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
                # If the object is shorter than the range, the object is damaged, but the store works.
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
        """Record a wrong reading of an object. Either the reading is wrong, or the object is damaged.

        Args:
            key: the key of the object.
            data: the bytes that were read.
        """
        found, now = xxh3_128_digest(data), self._clock()
        before = self._bad.get(key, _Misread(0, now, now, found))
        self._bad[key] = _Misread(before.n + 1, before.since_s if found == before.digest else now, now, found)
        if before.n + 1 == READ_TRIES:
            log.warning("%s in %s was damaged in each of %s readings.", key, self.store.url, READ_TRIES)

    def count_misreads(self, key: str) -> int:
        """Return the number of wrong readings of an object."""
        found = self._bad.get(key)
        return 0 if found is None else found.n

    def is_damaged(self, key: str, for_s: float) -> bool:
        """Return True if all readings of an object in the last seconds gave the same wrong bytes."""
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
        """Return True if the object exists. False may be wrong, because the store may have failed."""
        return self.peek(key) is not None

    def create(self, key: str, data: Data) -> None:
        """Try to create an object. Read the key to find out which object exists now.

        Args:
            key: the key of the object.
            data: the bytes, as one buffer or several.
        """
        if self._did("put_if_absent", lambda: self.store.put_if_absent(key, data)):
            self.written_bytes += size_of(data)

    def create_streamed(self, key: str, head_bytes: int, size_bytes: int, produce: Produce) -> None:
        """Try to create an object while its content is being computed. The store must be able to stream.

        Args:
            key: the key of the object.
            head_bytes: the size of the head, which is written last.
            size_bytes: the size of the whole object.
            produce: passes the payload piece by piece to the function that it gets, and returns the head.
        """
        store = self.store
        assert isinstance(store, StreamingStore)
        if self._did("put_if_absent", lambda: store.put_if_absent_streamed(key, head_bytes, produce)):
            self.written_bytes += size_bytes

    def write(self, key: str, data: Data) -> bool:
        """Write an object, and return True if the store has acknowledged it.

        Args:
            key: the key of the object.
            data: the bytes, as one buffer or several.
        """
        done = self._did("put", lambda: self.store.put(key, data))
        if done:
            self.written_bytes += size_of(data)
        return done

    def remove(self, key: str) -> None:
        """Try to delete an object. If that fails, a later garbage collection deletes it."""
        self._did("delete", lambda: self.store.delete(key))

    def list_keys(self, prefix: str) -> list[str]:
        """Return the keys below a prefix. The list may miss new keys and contain deleted ones."""
        try:
            return [entry.key for entry in self.store.list(prefix)]
        except StoreError as error:
            self._failed("list", error)
            return []

    def for_thread(self) -> RetryingStore:
        """Return another `RetryingStore` for the same store, with counts of its own, for use in another thread."""
        return RetryingStore(
            self.store, clock=self._clock, tolerance=self._tolerance, waits=self._waits, copies=self._copies
        )

    def _did(self, verb: str, act: Callable[[], object]) -> bool:
        """Call a function that writes or deletes, and return True if it did not fail."""
        try:
            act()
        except StoreError as error:
            self.last_error = error
            self._failed(verb, error)
            return False
        self._works(verb)
        return True

    def _failed(self, verb: str, error: StoreError) -> None:
        """Record a failed call. Raise the error if calls of this kind have failed for longer than the tolerance."""
        self._n_failed[verb] += 1
        if not self._outages[verb].tolerates(error) and self._n_failed[verb] >= FAILURES:
            raise error

    def _works(self, verb: str) -> None:
        """Record that a call did not fail."""
        if self._n_failed[verb]:
            self._n_failed[verb] = 0
            self._outages[verb].end()


def size_of(data: Data) -> int:
    """Return the number of bytes of a buffer, or of a sequence of buffers."""
    if isinstance(data, Buffer):
        return len(memoryview(data).cast("B"))
    return sum(len(memoryview(part).cast("B")) for part in data)


def backoff(rng: random.Random, first_s: float = 0.002, most_s: float = 1.0) -> Iterator[float]:
    """Yield growing pauses in seconds. Each pause is shortened at random, so that not all replicas ask at the same
    time.

    Args:
        rng: shortens each pause by up to half.
        first_s: the first pause.
        most_s: the longest pause.
    """
    pause_s = first_s
    while True:
        yield pause_s * rng.uniform(0.5, 1.0)
        pause_s = min(pause_s * 1.6, most_s)


class Map(Protocol):
    """Applies a function to several arguments, as the builtin `map` does, and perhaps in several threads."""

    def __call__(self, act: Callable[[T], R], things: Iterable[T], /) -> Iterator[R]: ...


class Ask(Protocol):
    """Calls a function that asks the store, at once or in another thread while training continues."""

    def __call__(self, question: Callable[[], T], /) -> Future[T]: ...


def at_once(question: Callable[[], T]) -> Future[T]:
    """Call a function that asks the store now, and return its answer as a completed future."""
    answer: Future[T] = Future()
    answer.set_result(question())
    return answer


class ParallelMap:
    """A `Map` that uses several threads. They start when they are first needed.

    Example:
        list(ParallelMap()(store.peek, keys))
    """

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def __call__(self, act: Callable[[T], R], things: Iterable[T], /) -> Iterator[R]:
        listed = list(things)
        return map(act, listed) if len(listed) < 2 else self._threads().map(act, listed)

    def ask(self, question: Callable[[], T]) -> Future[T]:
        """Call a function that asks the store in another thread, while training continues."""
        return self._threads().submit(question)

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(THREADS, "diloco reads")
        return self._pool

    def close(self) -> None:
        """Start no more calls. Calls that are already running end normally."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def read_ahead(store: RetryingStore, read: Callable[[T], R], things: Sequence[T]) -> Iterator[R]:
    """Yield what a function reads for each thing, in order. If the store is remote, the next things are read in other
    threads while the caller works on one.

    Args:
        store: the store from which the function reads.
        read: the function.
        things: its arguments.

    Example:
        for part in read_ahead(store, store.peek, keys): ...
    """
    if is_local_store(store.store) or len(things) < 2:
        yield from map(read, things)
        return
    with ThreadPoolExecutor(READS_AHEAD, "diloco reads ahead") as pool:
        following = iter(things)
        ahead = deque(pool.submit(read, thing) for thing in islice(following, READS_AHEAD))
        while ahead:
            found = ahead.popleft().result()
            ahead.extend(pool.submit(read, thing) for thing in islice(following, 1))
            yield found


def is_local_store(store: Store) -> bool:
    """Return True if the store is on this machine.

    Such a store answers at once, so threads would cost more than they save.
    """
    return isinstance(store, (FileStore, MemoryStore))
