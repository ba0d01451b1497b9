"""Tests which unsigned object a waiting replica reports, and when it reports none."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.rendezvous.frames import READ_TRIES
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity, Membership
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.standstill_watch import StandstillWatch
from executors.store import MemoryStore
from executors.store.standstill import Standstill

KEYS = Keys("otter", "main")
FORGED = b"forged"


class Scene:
    """Rank 0 of two, which waits for a round since second 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self.store = MemoryStore()
        self.reported: list[Standstill | None] = []
        patient, me = RetryingStore(self.store, clock=lambda: self.now), Identity(0, 2, 0, "me")
        self.patient = patient
        members = Membership(patient, KEYS, me, lambda: self.now)
        self.watch = StandstillWatch(patient, KEYS, me, members, self.reported.append, lambda: self.now, after_s=5.0)

    def forge(self, key: str) -> None:
        self.store.put(key, FORGED)
        for _ in range(READ_TRIES):
            self.patient.record_misread(key, FORGED)

    def look(self, now: float, good: tuple[int, ...] = (), blocked: str | None = None) -> list[Standstill | None]:
        self.now = now
        heads: Any = dict.fromkeys(good)
        self.watch.look(11, 0.0, heads, blocked)
        return self.reported


@pytest.fixture
def scene() -> Scene:
    return Scene()


def test_a_round_that_waits_for_a_living_replica_as_well_does_not_stand_still(scene: Scene) -> None:
    scene.forge(KEYS.contribution(11, 0))
    assert scene.look(60.0) == [], "rank 1 is merely late"
    scene.forge(KEYS.contribution(11, 1))
    assert scene.look(70.0) == [Standstill(12, KEYS.contribution(11, 0), n_more=1)]


def test_a_seal_without_the_key_holds_a_round_up_whatever_else_is_there(scene: Scene) -> None:
    scene.forge(KEYS.seal(11))
    assert scene.look(4.0) == [], "a short wait causes no warning"
    assert scene.look(6.0) == [Standstill(12, KEYS.seal(11))]


def test_a_standstill_is_reported_once_and_taken_back_when_the_object_is_deleted(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    key = KEYS.mean(11, 0)
    scene.forge(key)
    for now in (6.0, 6.1, 9.0, 12.0):
        scene.look(now, good=(0, 1), blocked=key)
    assert scene.reported == [Standstill(12, key)]
    scene.store.delete(key)
    assert scene.look(15.0, good=(0, 1), blocked=key) == [Standstill(12, key), None]
    warned = [record.getMessage() for record in caplog.records if "makes no progress" in record.getMessage()]
    assert [f"the object {key!r}" in text for text in warned] == [True]


def test_a_forged_first_anchor_is_reported_like_a_forged_object_of_a_round(scene: Scene) -> None:
    scene.store.put(KEYS.snapshot(0), FORGED)
    scene.now = 6.0
    scene.watch.look_at_start(0.0)
    assert scene.reported == [Standstill(0, KEYS.snapshot(0))]
