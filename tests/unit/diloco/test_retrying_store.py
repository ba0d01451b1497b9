"""Tests how the rendezvous treats wrong readings of a store, and how long it tolerates errors."""

from __future__ import annotations

import threading

import pytest
from support.patience import lasting

from diloco.rendezvous.frames import READ_TRIES
from diloco.rendezvous.retrying_store import FAILURES, READS_AHEAD, RetryingStore, read_ahead
from executors.errors import StoreError
from executors.store import MemoryStore
from executors.store.faulty import FaultyStore


class Scene:
    """A store that is read over a period of simulated time."""

    now = 100.0

    def __init__(self) -> None:
        self.faulty = FaultyStore(MemoryStore(), seed=0)
        self.store = RetryingStore(self.faulty, clock=lambda: self.now, tolerance=lasting(60.0))

    def misread(self, data: bytes, *, n: int = 1, every_s: float = 0.0) -> None:
        for _ in range(n):
            self.now += every_s
            self.store.record_misread("seal/0", data)

    def delete(self, *, is_refused: bool) -> None:
        """Delete an object after a round of ten minutes."""
        self.now += 600.0
        if is_refused:
            self.faulty.fail_at("delete", key="*", action="error")
        self.store.remove("contribution")


def test_an_object_that_was_misread_in_a_moment_is_not_damaged_however_long_no_one_looks_again() -> None:
    scene = Scene()
    scene.misread(b"x", n=READ_TRIES)
    scene.now += 3600.0  # the laptop was closed
    assert not scene.store.is_damaged("seal/0", for_s=10.0)
    scene.misread(b"x")
    assert scene.store.is_damaged("seal/0", for_s=10.0)


def test_an_object_is_damaged_that_is_the_same_wrong_bytes_for_so_long() -> None:
    scene = Scene()
    scene.misread(b"x", n=4, every_s=3.0)
    assert not scene.store.is_damaged("seal/0", for_s=10.0)
    scene.misread(b"y", n=4, every_s=3.0)
    assert not scene.store.is_damaged("seal/0", for_s=10.0), "bytes that differ at each read show a fault of the reader"
    scene.misread(b"y", every_s=3.0)
    assert scene.store.is_damaged("seal/0", for_s=10.0)
    assert scene.store.count_misreads("seal/0") == 9
    assert scene.store.count_misreads("seal/1") == 0


def test_deletes_that_fail_now_and_then_between_long_rounds_end_no_one() -> None:
    scene = Scene()
    for is_refused in (True, True, False, True, True):
        scene.delete(is_refused=is_refused)


def test_a_store_that_refuses_every_delete_is_reported() -> None:
    scene = Scene()
    for _ in range(FAILURES - 1):
        scene.delete(is_refused=True)
    with pytest.raises(StoreError):
        scene.delete(is_refused=True)


def test_the_next_parts_of_a_state_in_a_remote_store_are_read_while_one_is_used() -> None:
    store = Scene().store
    begun = [threading.Event() for _ in range(6)]

    def read(number: int) -> int:
        begun[number].set()
        return number

    found = []
    for number in read_ahead(store, read, range(6)):
        found.append(number)
        for ahead in begun[number + 1 : number + 1 + READS_AHEAD]:
            assert ahead.wait(30), f"nothing was read while part {number} was used"
    assert found == list(range(6))


def test_at_most_two_parts_of_a_state_wait_in_memory() -> None:
    store, begun = Scene().store, list[int]()

    def read(number: int) -> int:
        begun.append(number)
        return number

    for number in read_ahead(store, read, range(9)):
        assert max(begun) <= number + READS_AHEAD


def test_a_store_on_this_machine_is_read_when_the_part_is_needed() -> None:
    store, begun = RetryingStore(MemoryStore(), clock=lambda: 0.0, tolerance=lasting(60.0)), list[int]()

    def read(number: int) -> int:
        begun.append(number)
        return number

    for number in read_ahead(store, read, range(4)):
        assert begun[-1] == number


def test_an_error_of_a_part_is_raised_where_the_part_is_used() -> None:
    def read(number: int) -> int:
        if number == 2:
            raise StoreError("gone")
        return number

    parts = read_ahead(Scene().store, read, range(6))
    assert [next(parts), next(parts)] == [0, 1]
    with pytest.raises(StoreError, match="gone"):
        next(parts)
