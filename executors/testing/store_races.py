"""StoreRaces: tests of a store that threads and processes use at the same time, and whose writers are killed."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeAlias

import pytest

from executors.errors import KeyNotFoundError
from executors.store import Store
from executors.testing import store_process
from executors.testing.helpers import Helper, eventually, python_process, receive, send

N_KEYS = 100
MIB = 1 << 20
Start: TypeAlias = Callable[..., contextlib.AbstractContextManager[Helper]]


class StoreRaces:
    """The tests of `StoreContract` that need several users.

    Example:
        class TestMyStore(StoreContract):
            n_times = 20  # each call is a request
    """

    in_process: ClassVar[bool] = False
    """True if the store keeps its objects in the memory of this process, so that other processes cannot see them."""
    opener: ClassVar[str] = "executors.store:open_store"
    """The function with which another process opens the store's url, as `module:function`."""
    n_threads: ClassVar[int] = 16
    """The number of threads that create the same keys."""
    n_processes: ClassVar[int] = 4
    """The number of processes that create the same keys."""
    n_times: ClassVar[int] = 250
    """The number of times that each thread creates and deletes a key. Set a smaller number if each call is a
    request.
    """
    n_readings: ClassVar[int] = 50
    """The number of reads of a changing object. Set a smaller number if each call is a request."""

    @pytest.fixture
    def others(self, store: Store) -> Start:
        """Return a function that starts another process with this store, and waits until the process is ready.

        Args:
            store: the store that the other process also opens.
        """
        if self.in_process:
            pytest.skip("other processes cannot open this store")

        @contextlib.contextmanager
        def start(*role: str) -> Iterator[Helper]:
            with python_process(Path(store_process.__file__), self.opener, store.url, *role) as process:
                assert receive(process) == "ready"
                yield process

        return start

    def test_of_many_threads_exactly_one_creates_a_key(self, store: Store) -> None:
        barrier = threading.Barrier(self.n_threads)

        def race(name: int) -> list[int]:
            won = []
            for index in range(N_KEYS):
                barrier.wait()
                if store.put_if_absent(f"race/{index}", str(name).encode()):
                    won.append(index)
            return won

        with ThreadPoolExecutor(self.n_threads) as pool:
            wins = list(pool.map(race, range(self.n_threads)))
        _check_winners(store, {str(name): won for name, won in enumerate(wins)})

    def test_of_many_processes_exactly_one_creates_a_key(self, store: Store, others: Start) -> None:
        with contextlib.ExitStack() as stack:
            racers = {
                name: stack.enter_context(others("race", name, "race/", str(N_KEYS)))
                for name in (f"process-{number}" for number in range(self.n_processes))
            }
            for racer in racers.values():
                send(racer, "go")
            _check_winners(store, {name: receive(racer) for name, racer in racers.items()})

    def test_readers_never_see_part_of_a_replaced_object(self, store: Store) -> None:
        store.put("model", bytes(2 * MIB))
        stop = threading.Event()

        def replace() -> None:
            filling = 0
            while not stop.is_set():
                filling = (filling + 1) % 251
                store.put("model", [bytes([filling]) * MIB] * 2)

        with _beside(stop, replace, replace), ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(_read_whole_objects, store, "model", 2 * MIB, self.n_readings) for _ in range(2)]
            assert all(reader.result() for reader in readers)

    def test_readers_never_see_part_of_an_object_that_another_process_replaces(
        self, store: Store, others: Start
    ) -> None:
        store.put("model", bytes(4 * MIB))
        with others("replace", "model", "4") as writer:
            assert receive(writer) == "replaced"
            fillings = _read_whole_objects(store, "model", 4 * MIB, self.n_readings)
        assert len(fillings) > 1, "the readers saw only one version, so the writer did not write meanwhile"

    def test_a_created_object_appears_whole(self, store: Store, others: Start) -> None:
        with others("create", "shard/", "8"):
            for number in range(12):
                find = functools.partial(_find, store, f"shard/{number}")
                assert eventually(find, "the writer's next object", every_s=0) == bytes([number]) * (8 * MIB)

    def test_a_killed_writer_leaves_no_visible_object(self, store: Store, others: Start) -> None:
        for verb in ("put", "put_if_absent"):
            with others("write_one", verb, "half", "1024") as writer:
                writer.kill()
                assert writer.wait() != 0, "the writer ended before it was killed"
            assert list(store.list("")) == [], verb
            assert store.put_if_absent("half", b"whole"), verb
            store.delete("half")

    def test_a_writer_killed_between_objects_leaves_whole_ones(self, store: Store, others: Start) -> None:
        for attempt in range(3):
            with others("create", f"{attempt}/", "8") as writer:
                assert receive(writer) == 0
                writer.kill()
                writer.wait()
            entries = list(store.list(f"{attempt}/"))
            assert entries
            for entry in entries:
                number = int(entry.key.rpartition("/")[2])
                assert entry.size_bytes == 8 * MIB
                assert store.get(entry.key) == bytes([number]) * (8 * MIB)

    def test_creating_beside_deleting_always_creates(self, store: Store) -> None:
        def create_and_delete(name: int) -> list[str]:
            failed = []
            for index in range(self.n_times):
                key = f"rounds/7/shards/{name}-{index}"
                # with the last key of a folder, a store may also delete the folder
                if not store.put_if_absent(key, b"x"):
                    failed.append(f"{key} was taken")
                store.delete(key)
                store.put(key, b"y")
                store.delete(key)
            return failed

        with ThreadPoolExecutor(8) as pool:
            assert [line for lines in pool.map(create_and_delete, range(8)) for line in lines] == []

    def test_listing_beside_writing_and_deleting_continues(self, store: Store) -> None:
        store.put("steady/kept", b"x")
        stop = threading.Event()

        def churn(name: int) -> None:
            while not stop.is_set():
                for index in range(20):
                    store.put(f"steady/{name}/{index}", b"x")
                for index in range(20):
                    store.delete(f"steady/{name}/{index}")

        with _beside(stop, *(functools.partial(churn, name) for name in range(3))):
            for _ in range(self.n_readings):
                keys = [entry.key for entry in store.list("steady/")]
                assert "steady/kept" in keys
                assert keys == sorted(set(keys))


@contextlib.contextmanager
def _beside(stop: threading.Event, *workers: Callable[[], None]) -> Iterator[None]:
    """Run workers in threads while the block runs. When the block ends, `stop` is set and the workers must return."""
    with ThreadPoolExecutor(len(workers)) as pool:
        running = [pool.submit(worker) for worker in workers]
        try:
            yield
        finally:
            stop.set()
        for worker in running:
            worker.result()


def _check_winners(store: Store, wins: dict[str, list[int]]) -> None:
    times_won = Counter(index for won in wins.values() for index in won)
    assert {index: times_won[index] for index in range(N_KEYS)} == dict.fromkeys(range(N_KEYS), 1)
    for name, won in wins.items():
        for index in won:
            assert bytes(store.get(f"race/{index}")).decode() == name, (
                "the object has the value of a process that lost the race"
            )


def _read_whole_objects(store: Store, key: str, size: int, times: int) -> set[int]:
    """Read an object again and again, check that each reading has only one byte value, and return these values."""
    seen = set()
    for _ in range(times):
        view = store.get(key)
        assert len(view) == size
        assert view == bytes([view[0]]) * size, "a reader saw parts of two versions of an object"
        seen.add(view[0])
    return seen


def _find(store: Store, key: str) -> bytes | None:
    with contextlib.suppress(KeyNotFoundError):
        return bytes(store.get(key))
    return None
