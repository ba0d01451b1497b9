"""Tests FarStore, with which benchmarks simulate slow links: all users share one exact rate in each direction."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from simulation.world import Faults, World
from support.far_store import PIECE_BYTES, FarStore, FarStreamingStore
from support.patience import lasting

from diloco.rendezvous.retrying_store import RetryingStore, is_local_store
from executors.errors import KeyNotFoundError
from executors.store import Buffer, MemoryStore
from executors.store.file import FileStore

LATENCY_S = 0.5
MB = 8 * PIECE_BYTES
"""The bytes that pass in one second."""


class Link:
    """A far store in simulated time, which passes only when a user sleeps. It records when each user was done."""

    def __init__(self) -> None:
        self.world = World(0, Faults())
        self.near = MemoryStore()
        self.store = self.behind(self.near)
        self.done_s: dict[str, float] = {}

    def behind(self, store: MemoryStore) -> FarStore:
        return FarStore(store, LATENCY_S, MB, clock=self.world.clock, sleep=self.world.sleep)

    def at_once(self, **users: Callable[[], object]) -> dict[str, float]:
        """Let some users make their calls at the same time, and return the time at which each was done."""

        def run(name: str, act: Callable[[], object]) -> None:
            act()
            self.done_s[name] = self.world.now

        for name, act in users.items():
            self.world.spawn(name, partial(run, name, act))
        self.world.run()
        return self.done_s


def test_each_call_takes_the_latency_and_the_time_of_its_bytes() -> None:
    link = Link()
    store, clock = link.store, link.world.clock
    took: list[float] = []

    def missing() -> None:
        with pytest.raises(KeyNotFoundError):
            store.get("a")

    def use() -> None:
        for act in (
            lambda: store.put("a", b"x" * MB),
            lambda: store.put_if_absent("b", [b"x" * MB, b"y" * MB]),
            lambda: store.put_if_absent("b", b"x" * MB),
            lambda: store.get("b"),
            lambda: store.get("b", start=MB, size=MB // 2),
            lambda: list(store.list("")),
            lambda: store.delete("a"),
            missing,
        ):
            began_s = clock()
            act()
            took.append(clock() - began_s)

    link.at_once(all=use)
    assert took == [1.5, 2.5, 1.5, 2.5, 1.0, 0.5, 0.5, 0.5]
    assert (store.up.n_bytes, store.down.n_bytes) == (4 * MB, 2.5 * MB)


def test_reads_at_once_share_the_rate_and_directions_do_not() -> None:
    link = Link()
    link.near.put("a", b"x" * MB)
    link.near.put("b", b"x" * 3 * MB)
    a, b = (lambda: link.store.get("a")), (lambda: link.store.get("b"))
    done_s = link.at_once(a=a, b=b, up=lambda: link.store.put("c", b"x" * 2 * MB))
    turn_s = PIECE_BYTES / MB
    assert done_s["up"] == 2.5
    assert abs(done_s["a"] - 2.5) <= turn_s, "a reader has half of the rate while the other one reads"
    assert done_s["b"] == 4.5, "two reads at once take as long as one after the other"


def test_each_process_has_its_own_link() -> None:
    link = Link()
    link.near.put("a", b"x" * MB)
    other = link.behind(link.near)
    assert link.at_once(one=lambda: link.store.get("a"), two=lambda: other.get("a")) == {"one": 1.5, "two": 1.5}


def test_a_user_that_wakes_up_late_loses_no_time_of_the_link() -> None:
    link = Link()
    sleep, late_s = link.world.sleep, iter([0.0] + 3 * [0.01] + 20 * [0.0])
    link.store._sleep = lambda seconds: sleep(seconds + next(late_s))
    assert link.at_once(late=lambda: link.store.put("a", b"x" * MB)) == {"late": 1.5}


def test_an_object_exists_when_its_last_byte_has_passed() -> None:
    link = Link()
    seen: dict[float, bool] = {}

    def look() -> None:
        for _ in range(4):
            link.world.sleep(0.4)
            seen[round(link.world.now, 1)] = bool(list(link.near.list("")))

    link.at_once(put=lambda: link.store.put("a", b"x" * MB), look=look)
    assert seen == {0.4: False, 0.8: False, 1.2: False, 1.6: True}


@pytest.mark.parametrize(("making_s", "done_s"), [(0.25, 2.75), (1.0, 3.5), (2.0, 6.5)])
def test_a_streamed_write_is_sent_while_its_content_is_computed(tmp_path: Path, making_s: float, done_s: float) -> None:
    world = World(0, Faults())
    store = FarStreamingStore(FileStore(tmp_path), LATENCY_S, MB, clock=world.clock, sleep=world.sleep)
    assert RetryingStore(store, clock=world.clock, tolerance=lasting(1)).streams
    assert not is_local_store(store)
    ended_s = []

    def produce(write: Callable[[Buffer], None]) -> bytes:
        for piece in (b"x" * MB, b"y" * MB):
            world.sleep(making_s)
            write(piece)
        world.sleep(making_s)
        return b"head"

    def put() -> None:
        assert store.put_if_absent_streamed("a", 4, produce)
        ended_s.append(world.now)

    world.spawn("put", put)
    world.run()
    assert bytes(store.store.get("a")) == b"head" + b"x" * MB + b"y" * MB
    assert ended_s == [pytest.approx(done_s + 4 / MB)]
    assert store.up.n_bytes == 2 * MB + 4
