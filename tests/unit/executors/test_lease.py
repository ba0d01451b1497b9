"""A lease ends the containers of a run that no process watches, and no others."""

from __future__ import annotations

import time
from dataclasses import asdict

import pytest
from support.new_runs import run_spec

from executors.errors import KeyNotFoundError, StoreError
from executors.restarts.lease import (
    Lease,
    LeaseHolder,
    LeaseWatch,
    attached_lease_key,
    finish_start,
    new_lease,
    was_start_abandoned,
    with_lease,
)
from executors.settings.run_spec import RunSpec
from executors.store import MemoryStore, records
from executors.store.records import to_bytes
from executors.supervisor.store_polls import DeletionWatch

LIMIT_S = 900.0


class Scene:
    """A run's lease, and a container that looks at it once a minute."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.now = 0.0
        self.watch = LeaseWatch(self.store, "run", LIMIT_S, clock=lambda: self.now)

    def write(self, **lease: object) -> None:
        self.store.put(attached_lease_key("run"), to_bytes(asdict(Lease(**lease))))  # type: ignore[arg-type]

    def is_over_within(self, minutes: int) -> int | None:
        """Return the number of minutes after which the lease has ended."""
        for minute in range(1, minutes + 1):
            self.now += 60
            if self.watch.has_expired():
                return minute
        return None

    def is_away(self, minutes: int) -> None:
        """Let the store fail for a while. The lease must not end in that time."""

        def fail(key: str, max_bytes: int | None = None) -> memoryview:
            raise StoreError("down")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.store, "get_at_most", fail, raising=False)
            patch.setattr(self.store, "get", fail)
            assert self.is_over_within(minutes) is None


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_lease_has_ended_when_its_content_has_not_changed_for_its_duration(scene: Scene) -> None:
    for at in range(5):
        scene.write(holder="one", at=at)
        assert scene.is_over_within(10) is None
    assert scene.is_over_within(10) == 6, "the lease has ended 15 minutes after it was first read"


def test_a_lease_that_was_never_written_ends_too(scene: Scene) -> None:
    assert scene.is_over_within(60) == 15


def test_another_process_can_take_over_a_lease(scene: Scene) -> None:
    scene.write(holder="one")
    assert scene.is_over_within(14) is None
    scene.write(holder="another")
    assert scene.is_over_within(14) is None


def test_a_released_run_needs_no_watching_process_until_one_takes_it_again(scene: Scene) -> None:
    scene.write(detached=True)
    assert scene.is_over_within(60) is None
    scene.write(holder="another")
    assert scene.is_over_within(60) == 16


def test_failed_looks_do_not_count(scene: Scene) -> None:
    scene.write(holder="one", at=1)
    assert scene.is_over_within(5) is None
    scene.is_away(60)
    scene.write(holder="one", at=2)
    assert scene.is_over_within(5) is None
    scene.store.put(attached_lease_key("run"), b"not a lease")
    assert scene.is_over_within(60) is None


def test_a_store_that_was_away_longer_than_the_lease_ends_nothing_when_it_is_back(scene: Scene) -> None:
    """The process that renews the lease had no store either. It may reach the store later than the container does."""
    scene.write(holder="one", at=1)
    assert scene.is_over_within(5) is None
    scene.is_away(60)
    assert scene.is_over_within(60) == 11, "the outage counts as one read"


def test_time_in_which_no_one_looked_counts_as_one_look(scene: Scene) -> None:
    scene.write(holder="one", at=1)
    assert scene.is_over_within(5) is None
    scene.now += 4 * LIMIT_S
    assert scene.is_over_within(60) == 11


def test_a_process_that_renews_the_lease_continues_after_one_stale_answer_and_ends_when_the_run_is_deleted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = MemoryStore()
    store.put("run/run.json", b"{}")
    holder = LeaseHolder(store, "run")
    get, stale = store.get, ["stale"]

    def is_stale_once(key: str, **part: int | None) -> memoryview:
        if stale:
            raise KeyNotFoundError(stale.pop())
        return get(key, **part)  # type: ignore[arg-type]

    monkeypatch.setattr(records, "GONE_PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(store, "get", is_stale_once)
    holder.renew()
    assert [entry.key for entry in store.list("")] == ["run/lease.json", "run/run.json"]
    store.delete("run/run.json")
    store.delete("run/lease.json")
    holder.renew()
    assert list(store.list("")) == [], "the deleted lease is not written again"


# A store that refuses


def refuse(scene: Scene, patch: pytest.MonkeyPatch, *, refuses: bool = True) -> None:
    """Let every read of the store fail, as a revoked key does or as an outage does."""

    def fail(key: str, max_bytes: int | None = None) -> memoryview:
        error = StoreError("Access Denied (HTTP 403)")
        error.refusal = "permission" if refuses else ""
        raise error

    patch.setattr(scene.store, "get_at_most", fail, raising=False)
    patch.setattr(scene.store, "get", fail)


def test_a_store_that_refuses_for_a_whole_lease_ends_an_attached_run(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.write(holder="one", at=1)
    assert scene.is_over_within(1) is None
    refuse(scene, monkeypatch)
    assert scene.is_over_within(60) == 15
    assert scene.watch.why == "its store has refused it for 15 min: Access Denied (HTTP 403)"


def test_a_store_that_takes_the_credentials_again_begins_the_count_again(scene: Scene) -> None:
    scene.write(holder="one", at=1)
    assert scene.is_over_within(1) is None
    for at in range(2, 4):
        with pytest.MonkeyPatch.context() as patch:
            refuse(scene, patch)
            assert scene.is_over_within(14) is None
        scene.write(holder="one", at=at)
        assert scene.is_over_within(1) is None


def test_an_outage_between_refusals_neither_counts_nor_forgives(scene: Scene) -> None:
    for refuses, minutes in ((True, 10), (False, 30)):
        with pytest.MonkeyPatch.context() as patch:
            refuse(scene, patch, refuses=refuses)
            assert scene.is_over_within(minutes) is None
    with pytest.MonkeyPatch.context() as patch:
        refuse(scene, patch)
        assert scene.is_over_within(60) == 5


def test_containers_that_were_released_survive_a_store_that_refuses(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene.write(detached=True)
    assert scene.is_over_within(1) is None
    refuse(scene, monkeypatch)
    assert scene.is_over_within(60) is None


# Detached starts with their own lease


def start_of(store: MemoryStore) -> tuple[RunSpec, LeaseHolder]:
    """Begin a detached start."""
    store.put("run/run.json", b"{}")
    spec = with_lease(run_spec("run", store.url, "", 2, (0, 1), detach=True), LIMIT_S, detach=True)
    holder = new_lease(store, spec)
    assert holder is not None
    holder.start()
    assert holder is not None
    return spec, holder


def test_a_detached_start_releases_its_containers_when_all_of_them_are_started() -> None:
    store, now = MemoryStore(), 0.0
    spec, holder = start_of(store)
    watch = LeaseWatch(store, "run", LIMIT_S, clock=lambda: now, name=spec.lease_name)
    finish_start(holder, spec)
    for _ in range(60):
        now += 60
        assert not watch.has_expired()
    assert watch.is_released
    assert not was_start_abandoned(store, "run", time.time() + 1e6)


def test_a_detached_start_that_ends_half_way_ends_its_containers_within_a_lease_and_that_is_reported() -> None:
    store, now = MemoryStore(), 0.0
    spec, holder = start_of(store)
    holder.end()
    watch = LeaseWatch(store, "run", LIMIT_S, clock=lambda: now, name=spec.lease_name)
    looks: list[bool] = []
    while not looks or not looks[-1]:
        now += 60
        looks.append(watch.has_expired())
    assert len(looks) == 16
    assert watch.why == "its launcher ended before all replicas of this detached launch were started"
    assert not was_start_abandoned(store, "run", time.time()), "a start is not abandoned while its process lives"
    assert was_start_abandoned(store, "run", time.time() + 1e6)


def test_an_attached_start_keeps_the_lease_of_the_run() -> None:
    store = MemoryStore()
    store.put("run/run.json", b"{}")
    spec = with_lease(run_spec("run", store.url, "", 2, (0, 1)), LIMIT_S, detach=False)
    holder = new_lease(store, spec)
    assert holder is not None
    holder.start()
    finish_start(holder, spec)
    assert [entry.key for entry in store.list("")] == ["run/lease.json", "run/run.json"]
    assert holder is not None
    holder.end()


# A run that is deleted


def test_a_replica_notices_within_a_lease_that_its_run_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "GONE_PAUSES_S", (0.0, 0.0, 0.0))
    store, now = MemoryStore(), 0.0
    store.put("run/run.json", b"{}")
    watch = DeletionWatch(store, "run", LIMIT_S, clock=lambda: now)

    def minutes() -> int | None:
        nonlocal now
        for minute in range(1, 31):
            now += 60
            if watch.is_gone():
                return minute
        return None

    assert minutes() is None
    store.delete("run/run.json")
    assert (minutes() or 99) <= LIMIT_S / 60 + 1


def test_a_run_that_is_back_at_the_next_look_was_not_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "GONE_PAUSES_S", (0.0, 0.0, 0.0))
    store, now = MemoryStore(), 0.0
    watch = DeletionWatch(store, "run", LIMIT_S, clock=lambda: now)
    for _ in range(10):
        now += 300
        assert not watch.is_gone()
        store.put("run/run.json", b"{}")
        now += 300
        assert not watch.is_gone()
        store.delete("run/run.json")
