"""A lease ends the containers of a run that nobody watches, and no others."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from executors.errors import StoreError
from executors.store import MemoryStore
from executors.store.records import to_bytes
from executors.supervision.lease import Lease, LeaseWatch, key_of

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


def test_looks_that_fail_count_for_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.write(holder="one", at=1)
    assert scene.is_over_within(5) is None

    def fail(key: str, max_bytes: int) -> memoryview:
        raise StoreError("down")

    with monkeypatch.context() as patch:
        patch.setattr(scene.store, "get_at_most", fail, raising=False)
        patch.setattr(scene.store, "get", fail)
        assert scene.is_over_within(60) is None
    scene.write(holder="one", at=2)
    assert scene.is_over_within(5) is None
    scene.store.put(key_of("run"), b"not a lease")
    assert scene.is_over_within(60) is None
