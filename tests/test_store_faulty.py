"""A faulty store fails as it is told, and otherwise keeps the contract of a store."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from executors.errors import KeyNotFoundError, StoreError
from executors.store import MemoryStore, Store
from executors.store.faulty import FaultyStore
from executors.testing import StoreContract


class TestFaultyStoreWithoutFaults(StoreContract):
    in_process = True

    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore("test"), seed=0)


def outcomes_of(store: Store, keys: list[str]) -> dict[str, object]:
    """Read keys; return the bytes or the error of each."""
    found: dict[str, object] = {}
    for key in keys:
        try:
            found[key] = bytes(store.get(key))
        except StoreError as error:
            found[key] = str(error)
    return found


KEYS = [f"k/{index}" for index in range(200)]


@pytest.fixture
def full() -> MemoryStore:
    store = MemoryStore("full")
    for key in KEYS:
        store.put(key, key.encode() * 10)
    return store


def test_a_seed_fails_the_same_calls_each_time_and_another_seed_others(full: MemoryStore) -> None:
    rates: dict[str, Any] = {"error": 0.1, "lost": 0.1, "corrupt": 0.1, "truncate": 0.1}
    first, again, other = (FaultyStore(full, seed=seed, **rates) for seed in (1, 1, 2))
    assert outcomes_of(first, KEYS) == outcomes_of(again, KEYS) != outcomes_of(other, KEYS)
    assert first.log == again.log != other.log
    for what in ("not done, error", "done, reply lost", "flipped", "cut from"):
        assert sum(what in line for line in first.log) in range(5, 60), what


def test_what_a_call_suffers_does_not_depend_on_the_order_of_others(full: MemoryStore) -> None:
    forward, backward = (FaultyStore(full, seed=3, error=0.2, corrupt=0.2) for _ in range(2))
    assert outcomes_of(forward, KEYS) == outcomes_of(backward, KEYS[::-1])


def test_threads_suffer_what_one_thread_suffers(full: MemoryStore) -> None:
    alone, together = (FaultyStore(full, seed=4, error=0.3) for _ in range(2))
    expected = outcomes_of(alone, KEYS)
    found: dict[str, object] = {}
    threads = [threading.Thread(target=lambda n=n: found.update(outcomes_of(together, KEYS[n::4]))) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_an_error_means_that_nothing_was_done_and_a_lost_reply_that_it_was() -> None:
    inner = MemoryStore("inner")
    failing, losing = FaultyStore(inner, seed=0, error=1.0), FaultyStore(inner, seed=0, lost=1.0)
    with pytest.raises(StoreError, match=r"put_if_absent of 'a'.*not done") as caught:
        failing.put_if_absent("a", b"x")
    assert (caught.value.key, caught.value.url) == ("a", inner.url)
    with pytest.raises(KeyNotFoundError):
        inner.get("a")
    with pytest.raises(StoreError, match="reply was lost"):
        losing.put_if_absent("a", b"x")
    assert bytes(inner.get("a")) == b"x"
    assert losing.log == ["#1 put_if_absent 'a': done, reply lost"]


def test_a_corrupt_read_is_one_bit_off_and_the_object_stays_right(full: MemoryStore) -> None:
    view = FaultyStore(full, seed=0, corrupt=1.0).get("k/7")
    right = bytes(full.get("k/7"))
    assert sum((a ^ b).bit_count() for a, b in zip(view, right, strict=True)) == 1
    assert view.readonly
    assert right == b"k/7" * 10


def test_a_truncated_read_is_a_beginning(full: MemoryStore) -> None:
    view = FaultyStore(full, seed=0, truncate=1.0).get("k/7")
    assert len(view) < 30
    assert (b"k/7" * 10).startswith(bytes(view))


def test_delays_are_waited_with_what_was_given(full: MemoryStore) -> None:
    waited: list[float] = []
    store = FaultyStore(full, seed=0, delay_s=0.3, sleep=waited.append)
    for key in KEYS:
        store.get(key)
    assert len(waited) == len(KEYS)
    assert 0 < min(waited) < 0.05 < 0.25 < max(waited) <= 0.3


@pytest.mark.parametrize(("action", "stands"), [("error", False), ("lost", True)])
def test_a_fault_point_hits_the_call_it_names_and_no_other(action: Any, stands: bool) -> None:
    store = FaultyStore(MemoryStore("points"), seed=0)
    store.fail_at("put_if_absent", key="*/seal/*", count=2, action=action)
    assert store.put_if_absent("main/seal/0", b"x")
    assert store.put_if_absent("main/mean/0", b"x")
    store.put("main/seal/1", b"x")
    with pytest.raises(StoreError, match="'main/seal/2'"):
        store.put_if_absent("main/seal/2", b"x")
    assert store.put_if_absent("main/seal/3", b"x")
    assert bool([*store.list("main/seal/2")]) is stands
    assert len(store.log) == 1


def test_a_fault_point_without_a_count_hits_every_call() -> None:
    store = FaultyStore(MemoryStore("every"), seed=0)
    store.fail_at("*", key="a", count=None, action="error")
    calls: list[Callable[[], Any]] = [
        lambda: store.put("a", b""),
        lambda: store.put_if_absent("a", b""),
        lambda: store.get("a"),
        lambda: store.list("a"),
        lambda: store.delete("a"),
    ]
    for call in calls * 2:
        with pytest.raises(StoreError, match="Injected"):
            call()
    store.put("b", b"")


def test_a_replica_can_die_before_or_after_a_call() -> None:
    inner = MemoryStore("dying")
    store = FaultyStore(inner, seed=0)

    class DeathError(Exception):
        pass

    def die() -> None:
        raise DeathError

    store.fail_at("put", key="before", before=die)
    store.fail_at("put", key="after", after=die)
    for key in ("before", "after"):
        with pytest.raises(DeathError):
            store.put(key, b"x")
    assert [entry.key for entry in inner.list("")] == ["after"]
    assert store.log == ["#1 put 'before': fault point before it", "#2 put 'after': fault point after it"]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # forking beside other tests' threads
def test_a_process_can_be_killed_at_a_fault_point() -> None:
    pid = os.fork()
    if pid == 0:
        store = FaultyStore(MemoryStore("killed"), seed=0)
        store.fail_at("put", before=lambda: os.kill(os.getpid(), signal.SIGKILL))
        store.put("a", b"x")
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"verb": "putt", "action": "error"}, "put_if_absent, put, get"),
        ({"verb": "put", "count": 0, "action": "error"}, "count"),
        ({"verb": "put"}, "exactly one"),
        ({"verb": "put", "action": "error", "before": print}, "exactly one"),
        ({"verb": "put", "action": "explode"}, "'error' or 'lost'"),
    ],
)
def test_a_fault_point_that_makes_no_sense_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        FaultyStore(MemoryStore("x"), seed=0).fail_at(**arguments)


@pytest.mark.parametrize("arguments", [{"lost": 2}, {"error": -0.1}, {"delay_s": -1}, {"delay_s": float("nan")}])
def test_a_rate_that_is_none_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        FaultyStore(MemoryStore("x"), seed=0, **arguments)


def test_a_fault_point_after_a_call_counts_those_that_were_done(full: MemoryStore) -> None:
    seen: list[str] = []
    store = FaultyStore(full, seed=0)
    store.fail_at("get", count=2, after=lambda: seen.append("after"))
    for key, expected in (("k/1", 0), ("nothing", 0), ("k/2", 1), ("k/3", 1)):
        outcomes_of(store, [key])
        assert len(seen) == expected


def test_a_fault_point_may_be_reads_that_begin_inside_an_object(full: MemoryStore) -> None:
    store = FaultyStore(full, seed=0)
    store.fail_at("get", key="k/7", inside=True, action="error")
    assert bytes(store.get("k/7", size=3)) == b"k/7"
    with pytest.raises(StoreError, match="Injected"):
        store.get("k/7", start=3, size=3)
