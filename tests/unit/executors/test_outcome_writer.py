"""If the store does not accept a record of an end, the write is repeated for a limited time."""

from __future__ import annotations

import pytest
from support.patience import lasting

from executors.attempt import Attempt
from executors.errors import StoreError, UnwritableStoreError
from executors.patience import SUPERVISOR
from executors.protocol import Outcome
from executors.store import MemoryStore
from executors.supervisor.exits import OutcomeWriter

PATIENCE_S = 10.0


class FailingStore(MemoryStore):
    """A store that refuses writes below some prefixes."""

    fails_below: tuple[str, ...] = ()
    failure: type[StoreError] = StoreError

    def put_if_absent(self, key: str, data: object) -> bool:
        if key.startswith(self.fails_below):
            raise self.failure("no")
        return super().put_if_absent(key, data)  # type: ignore[arg-type]


class Scene:
    """A supervisor of two ranks, which have ended while their store refused writes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.recorded: list[Outcome] = []
        self.store = FailingStore()
        self.store.put("run/run.json", b"{}")
        self.store.fails_below = ("run/",)
        self.patience = lasting(PATIENCE_S)
        self.ends = OutcomeWriter(
            lambda _, end: self.recorded.append(end), lambda: self.patience, clock=lambda: self.now
        )
        for rank in range(2):
            self.ends.add(Attempt(self.store, "run", rank), "no_result", "Gone.", exit_code=3)

    def recorded_within(self, n_s: int) -> list[int]:
        """Return the ranks whose end is recorded after a number of seconds."""
        for _ in range(n_s):
            self.now += 1
            self.ends.try_again()
        return sorted(end.rank for end in self.recorded)


def test_an_end_is_recorded_as_it_was_when_the_store_is_back() -> None:
    scene = Scene()
    assert scene.recorded_within(3600) == []
    scene.store.fails_below = ()
    assert scene.recorded_within(10) == [0, 1]
    assert [(end.reason, end.error, end.exit_code) for end in scene.recorded] == [("no_result", "Gone.", 3)] * 2
    assert Attempt(scene.store, "run", 0).outcome() == next(end for end in scene.recorded if end.rank == 0)
    assert not scene.ends.is_pending(is_busy=True)


def test_an_end_that_can_never_be_recorded_keeps_off_no_other() -> None:
    scene = Scene()
    scene.store.fails_below = ("run/replicas/0000/",)
    assert scene.recorded_within(20) == [1]


def test_a_supervisor_with_nothing_else_to_do_waits_for_the_store_only_so_long() -> None:
    scene = Scene()
    scene.recorded_within(3600)
    assert scene.ends.is_pending(is_busy=True)
    for _ in range(2):
        assert scene.ends.is_pending(is_busy=False)
        scene.now += PATIENCE_S - 1
        assert scene.ends.is_pending(is_busy=False)
        assert scene.ends.is_pending(is_busy=True), (
            "the outcome stays pending, because another rank was started meanwhile"
        )
    assert scene.ends.is_pending(is_busy=False)
    scene.now += PATIENCE_S
    assert not scene.ends.is_pending(is_busy=False)


class Refused(StoreError):
    """An error of the store that only a user can repair."""

    refusal = "permission"


@pytest.mark.parametrize(("failure", "waits"), [(StoreError, True), (UnwritableStoreError, True), (Refused, False)])
def test_a_store_that_refuses_is_not_waited_for_as_one_that_is_away_or_full(
    failure: type[StoreError], waits: bool
) -> None:
    scene = Scene()
    scene.store.failure, scene.patience = failure, SUPERVISOR
    scene.recorded_within(20)
    assert scene.ends.is_pending(is_busy=True)
    assert scene.ends.is_pending(is_busy=False)
    scene.now += 3600
    assert scene.ends.is_pending(is_busy=False) is waits


def test_an_end_of_a_run_that_was_deleted_is_not_kept() -> None:
    scene = Scene()
    scene.store.delete("run/run.json")
    assert scene.recorded_within(10) == []
    assert not scene.ends.is_pending(is_busy=True)
