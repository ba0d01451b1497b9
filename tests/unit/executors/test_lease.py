"""A lease ends the containers of a run that nobody watches, and no others."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from executors.errors import KeyNotFoundError, StoreError
from executors.store import MemoryStore, records
from executors.store.records import to_bytes
from executors.supervision.lease import Lease, LeaseHolder, LeaseWatch, key_of

LIMIT_S = 900.0


class Scene:
    """A run's lease, and a container that looks at it once a minute."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.now = 0.0
        self.watch = LeaseWatch(self.store, "run", LIMIT_S, clock=lambda: self.now)

    def write(self, **lease: object) -> None:
        self.store.put(key_of("run"), to_bytes(asdict(Lease(**lease))))  # type: ignore[arg-type]

    def is_over_within(self, minutes: int) -> int | None:
        """Return after how many minutes it is over."""
        for minute in range(1, minutes + 1):
            self.now += 60
            if self.watch.is_over():
                return minute
        return None

    def is_away(self, minutes: int) -> None:
        """Have the store fail for a while: meanwhile nothing is over."""

        def fail(key: str, max_bytes: int | None = None) -> memoryview:
            raise StoreError("down")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.store, "get_at_most", fail, raising=False)
            patch.setattr(self.store, "get", fail)
            assert self.is_over_within(minutes) is None


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_lease_is_over_when_its_content_has_been_the_same_for_its_time(scene: Scene) -> None:
    for at in range(5):
        scene.write(holder="one", at=at)
        assert scene.is_over_within(10) is None
    assert scene.is_over_within(10) == 6, "15 minutes after it was first read"


def test_a_lease_that_was_never_written_is_over_too(scene: Scene) -> None:
    assert scene.is_over_within(60) == 15


def test_another_holder_goes_on_with_it(scene: Scene) -> None:
    scene.write(holder="one")
    assert scene.is_over_within(14) is None
    scene.write(holder="another")
    assert scene.is_over_within(14) is None


def test_a_run_that_was_let_go_needs_nobody_until_somebody_takes_it_again(scene: Scene) -> None:
    scene.write(detached=True)
    assert scene.is_over_within(60) is None
    scene.write(holder="another")
    assert scene.is_over_within(60) == 16


def test_looks_that_fail_count_for_nothing(scene: Scene) -> None:
    scene.write(holder="one", at=1)
    assert scene.is_over_within(5) is None
    scene.is_away(60)
    scene.write(holder="one", at=2)
    assert scene.is_over_within(5) is None
    scene.store.put(key_of("run"), b"not a lease")
    assert scene.is_over_within(60) is None


def test_a_store_that_was_away_longer_than_the_lease_ends_nothing_when_it_is_back(scene: Scene) -> None:
    """Whoever renews the lease was without the store, too, and may come to it later than the container."""
    scene.write(holder="one", at=1)
    assert scene.is_over_within(5) is None
    scene.is_away(60)
    assert scene.is_over_within(60) == 11, "the outage counts as one look"


def test_time_in_which_nobody_looked_counts_as_one_look(scene: Scene) -> None:
    scene.write(holder="one", at=1)
    assert scene.is_over_within(5) is None
    scene.now += 4 * LIMIT_S
    assert scene.is_over_within(60) == 11


def test_who_renews_the_lease_goes_on_after_one_stale_answer_and_ends_when_the_run_is_deleted(
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
    assert list(store.list("")) == [], "it does not begin to exist again"
