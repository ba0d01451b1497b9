"""A faulty store fails as planned, and chaos injects the faults of its specs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from executors.errors import KeyNotFoundError, StoreError
from executors.store import MemoryStore, Store
from executors.store.faulty import FaultPoint, FaultyStore
from executors.worker.chaos import EVERY_REPLICA, check_chaos, fault_points, inject_faults

KEYS = [f"k/{index}" for index in range(200)]


class DeathError(Exception):
    """Stands for SIGKILL."""


def die() -> None:
    raise DeathError


def outcomes_of(store: Store, keys: Iterable[str]) -> dict[str, object]:
    """Read keys; return the bytes or the error of each."""
    found: dict[str, object] = {}
    for key in keys:
        try:
            found[key] = bytes(store.get(key))
        except StoreError as error:
            found[key] = str(error)
    return found


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


def test_the_faults_of_a_call_do_not_depend_on_other_calls_or_threads(full: MemoryStore) -> None:
    forward, backward, together = (FaultyStore(full, seed=3, error=0.2, corrupt=0.2) for _ in range(3))
    expected = outcomes_of(forward, KEYS)
    assert outcomes_of(backward, reversed(KEYS)) == expected
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


def test_a_damaged_read_is_one_bit_off_or_cut_and_the_object_stays_right(full: MemoryStore) -> None:
    right = b"k/7" * 10
    view = FaultyStore(full, seed=0, corrupt=1.0).get("k/7")
    assert sum((a ^ b).bit_count() for a, b in zip(view, right, strict=True)) == 1
    assert view.readonly
    view = FaultyStore(full, seed=0, truncate=1.0).get("k/7")
    assert len(view) < len(right)
    assert right.startswith(bytes(view))
    assert bytes(full.get("k/7")) == right


def test_delays_are_waited_with_the_given_sleep(full: MemoryStore) -> None:
    waited: list[float] = []
    store = FaultyStore(full, seed=0, delay_s=0.3, sleep=waited.append)
    for key in KEYS:
        store.get(key)
    assert len(waited) == len(KEYS)
    assert 0 < min(waited) < 0.05 < 0.25 < max(waited) <= 0.3


def test_a_fault_point_hits_the_call_it_names_and_no_other(full: MemoryStore) -> None:
    actions: dict[Any, bool] = {"error": False, "lost": True}
    for action, is_done in actions.items():
        store = FaultyStore(MemoryStore("points"), seed=0)
        store.fail_at("put_if_absent", key="*/seal/*", count=2, action=action)
        assert store.put_if_absent("main/seal/0", b"x")
        assert store.put_if_absent("main/mean/0", b"x")
        store.put("main/seal/1", b"x")
        with pytest.raises(StoreError, match="'main/seal/2'"):
            store.put_if_absent("main/seal/2", b"x")
        assert store.put_if_absent("main/seal/3", b"x")
        assert bool([*store.list("main/seal/2")]) is is_done
        assert len(store.log) == 1
    store = FaultyStore(full, seed=0)
    store.fail_at("get", key="k/7", inside=True, action="error")
    assert bytes(store.get("k/7", size=3)) == b"k/7"
    with pytest.raises(StoreError, match="Injected"):
        store.get("k/7", start=3, size=3)


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


def test_a_replica_can_die_before_a_call_or_after_one_that_was_done(full: MemoryStore) -> None:
    inner = MemoryStore("dying")
    store = FaultyStore(inner, seed=0)
    store.fail_at("put", key="before", before=die)
    store.fail_at("put", key="after", after=die)
    for key in ("before", "after"):
        with pytest.raises(DeathError):
            store.put(key, b"x")
    assert [entry.key for entry in inner.list("")] == ["after"]
    assert store.log == ["#1 put 'before': fault point before it", "#2 put 'after': fault point after it"]
    seen: list[str] = []
    store = FaultyStore(full, seed=0)
    store.fail_at("get", count=2, after=lambda: seen.append("after"))
    for key, expected in (("k/1", 0), ("nothing", 0), ("k/2", 1), ("k/3", 1)):
        outcomes_of(store, [key])
        assert len(seen) == expected, key


def test_invalid_values_are_refused() -> None:
    rates: dict[str, dict[str, Any]] = {
        "lost must be a rate from 0 to 1": {"lost": 2},
        "error must be a rate": {"error": -0.1},
        "The delay must be a number of seconds from 0 on, got -1": {"delay_s": -1},
        "The delay must be a number of seconds from 0 on, got nan": {"delay_s": float("nan")},
    }
    for says, arguments in rates.items():
        with pytest.raises(ValueError, match=says):
            FaultyStore(MemoryStore("x"), seed=0, **arguments)
    points: tuple[tuple[dict[str, Any], str], ...] = (
        ({"verb": "putt", "action": "error"}, "put_if_absent, put, get"),
        ({"verb": "put", "count": 0, "action": "error"}, "count must be at least 1, got count=0"),
        ({"verb": "put"}, "exactly one"),
        ({"verb": "put", "action": "error", "before": print}, "exactly one"),
        ({"verb": "put", "action": "explode"}, "'error' or 'lost'"),
    )
    for arguments, says in points:
        with pytest.raises(ValueError, match=says):
            FaultyStore(MemoryStore("x"), seed=0).fail_at(**arguments)


def test_tables_of_fault_points_are_found_by_their_entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed can name calls of its own; without it, its names are unknown."""
    announced = tmp_path / "another-1.0.dist-info"
    announced.mkdir()
    (announced / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
    (announced / "entry_points.txt").write_text("[replicas.fault_points]\nanother = another_package:POINTS\n")
    (tmp_path / "another_package.py").write_text(
        "from executors.store.faulty import FaultPoint\n"
        "POINTS = {'vote': FaultPoint('put', '*/vote/{round}/{rank}'), 'claim': FaultPoint('get', 'not ours')}\n"
    )
    fault_points.cache_clear()
    with pytest.raises(ValueError, match=r"No fault point 'vot'\..*Known: .*claim, claim-read, .*outcome"):
        check_chaos(["kill:rank=0,at=vot"], 1)
    monkeypatch.syspath_prepend(tmp_path)
    fault_points.cache_clear()
    try:
        with pytest.raises(ValueError, match=r"No fault point 'vot'\. Did you mean 'vote'\? Known: "):
            check_chaos(["kill:rank=0,at=vot"], 1)
        assert fault_points()["vote"] == FaultPoint("put", "*/vote/{round}/{rank}")
        assert fault_points()["claim"] == EVERY_REPLICA["claim"], "the names of every replica are not replaced"
        specs = [f"kill:rank=0,at={name},count=2,when=after" for name in fault_points()]
        assert check_chaos(specs, 1) == tuple(specs)
    finally:
        fault_points.cache_clear()


def test_chaos_hits_the_attempt_of_the_rank_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.kill", lambda pid, number: die())
    specs = ["store:rank=1,error=1", "kill:rank=0,at=outcome,attempt=1", "kill:rank=2,at=outcome,attempt=all"]
    keys = [f"run/replicas/{rank:04d}/1/outcome.json" for rank in range(4)]

    def hit(rank: int, attempt: int, key: str) -> str:
        try:
            inject_faults(MemoryStore(), specs, rank, attempt).put_if_absent(key, b"")
        except (StoreError, DeathError) as error:
            return type(error).__name__
        return ""

    assert [hit(rank, 1, keys[rank]) for rank in range(4)] == ["DeathError", "StoreError", "DeathError", ""]
    assert [hit(rank, 0, keys[rank]) for rank in (0, 2)] == ["", "DeathError"]
    assert hit(0, 1, keys[2]) == ""
