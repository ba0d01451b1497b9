"""Tests the decisions of a spare: which ranks count as lost, and which attempts it takes over."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
from support.new_runs import run_json, run_spec

from executors.attempt import Attempt
from executors.errors import StoreError
from executors.protocol import ReplicaHandle, ReplicaStatus
from executors.restarts.controller import CARRY_S, LEAVE_S
from executors.restarts.decision_log import Decision, DecisionLog
from executors.restarts.lease import attached_lease_key
from executors.store.memory import MemoryStore
from executors.store.records import to_bytes
from executors.supervisor.spare import LOOK_S, LOST_AFTER_S, Spare

RECORD = run_json(backend="modal", created_at=1.0, restarts="2,backoff=0s")


class Scene:
    """A run of two replicas that beat, with spares."""

    def __init__(self, *, lease_s: float | None = None) -> None:
        self.store, self.now = MemoryStore(), 1000.0
        self.store.put("run/run.json", to_bytes(RECORD))
        self.spec = run_spec("run", self.store.url, "", 2, (0,), restarts="2,backoff=0s", lease_s=lease_s)
        for rank in range(2):
            self.attempt(rank).store.put(self.attempt(rank).key("started.json"), b"{}")
            self.beat(rank)

    def spare(self, number: int = 0) -> Spare:
        handle = ReplicaHandle(number, "modal", {"spare": number, "job": {"id": f"job-{number}"}})
        self.store.put(f"run/spares/{number:04d}/0/handle.json", handle.to_json().encode())
        spec = replace(self.spec, ranks=(number,))
        return Spare(spec, store=self.store, clock=lambda: self.now)

    def attempt(self, rank: int, number: int = 0) -> Attempt:
        return Attempt(self.store, "run", rank, number)

    def beat(self, rank: int) -> None:
        self.store.put(self.attempt(rank).key("heartbeat.json"), to_bytes({"at": time.time(), "now": self.now}))

    def end(self, rank: int, status: ReplicaStatus = ReplicaStatus.FAILED) -> None:
        attempt = self.attempt(rank)
        attempt.record(attempt.new_outcome(status, "signal" if status is ReplicaStatus.FAILED else None))

    def look(self, *spares: Spare, for_s: float, beating: tuple[int, ...] = ()) -> list[str | None]:
        """Let spares look for a while."""
        said: list[str | None] = []
        until = self.now + for_s
        while self.now <= until and not said:
            for rank in beating:
                self.beat(rank)
            said = [why for spare in spares if spare.taken is None and (why := spare.look())]
            self.now += 2.0
        return said

    @property
    def log(self) -> list[tuple[str, dict[int, int], str | None]]:
        return [(e.kind, e.start, e.how) for e in DecisionLog(self.store, "run").read()]


def taken(spare: Spare) -> Any:
    return spare.taken and (spare.taken.rank, spare.taken.number)


def test_a_spare_leaves_a_rank_with_heartbeats_and_takes_over_a_rank_without() -> None:
    scene = Scene()
    spare = scene.spare()
    scene.look(spare, for_s=3 * LOST_AFTER_S, beating=(0, 1))
    assert (taken(spare), scene.log) == (None, [])
    scene.look(spare, for_s=LOST_AFTER_S - LOOK_S, beating=(0,))
    assert (taken(spare), scene.log) == (None, [])
    scene.look(spare, for_s=3 * LOOK_S, beating=(0,))
    assert (taken(spare), scene.log) == ((1, 1), [("restart", {1: 1}, "spare:0")])
    lost, handle = scene.attempt(1).outcome(), scene.attempt(1, 1).handle("modal")
    assert lost is not None
    assert lost.reason == "lost"
    assert "was lost: its heartbeat has not changed for 60 s and it left no outcome" in str(lost.error)
    assert handle is not None
    assert (handle.rank, handle.metadata["job"], handle.metadata["attempt"]) == (1, {"id": "job-0"}, 1)


def test_a_store_that_was_away_for_long_makes_no_rank_lost_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the store, the ranks could not beat either. They may reach the store later than the spare does."""
    scene = Scene()
    spare = scene.spare()
    scene.look(spare, for_s=2 * LOOK_S, beating=(0, 1))
    with monkeypatch.context() as patch:
        patch.setattr(scene.store, "get", fail)
        for _ in range(20):
            with pytest.raises(StoreError):
                scene.look(spare, for_s=0)
            scene.now += LOOK_S
    scene.look(spare, for_s=2 * LOOK_S)
    assert (taken(spare), scene.attempt(0).outcome(), scene.attempt(1).outcome()) == (None, None, None)
    scene.look(spare, for_s=LOST_AFTER_S, beating=(1,))
    assert taken(spare) == (0, 1), "the spare takes the lost rank"


def fail(key: str, **_: object) -> memoryview:
    raise StoreError("down")


def test_an_end_that_no_one_answers_is_answered_after_a_while_if_no_process_watches() -> None:
    scene = Scene()
    spare = scene.spare()
    scene.end(0)
    scene.look(spare, for_s=LEAVE_S - 4, beating=(1,))
    assert scene.log == []
    scene.look(spare, for_s=LOOK_S + 4, beating=(1,))
    assert (taken(spare), scene.log) == ((0, 1), [("restart", {0: 1}, "spare:0")])


@pytest.mark.parametrize("renewed", [True, False])
def test_while_a_process_renews_the_lease_a_spare_only_makes_the_starts_of_the_log(renewed: bool) -> None:
    scene = Scene(lease_s=1e6)
    spare = scene.spare()
    scene.end(0)
    for at in range(30):
        if renewed:
            scene.store.put(attached_lease_key("run"), to_bytes({"by": "me", "at": float(at + 1), "holder": "a"}))
        scene.look(spare, for_s=10, beating=(1,))
    assert taken(spare) == (None if renewed else (0, 1))
    if renewed:
        DecisionLog(scene.store, "run").append(
            lambda _: Decision(kind="restart", rank=0, ended=0, start={0: 1}, how="spare:0")
        )
        scene.look(spare, for_s=4, beating=(1,))
        assert taken(spare) == (0, 1)


@pytest.mark.parametrize("ahead_s", [0.0, 3 * 3600.0])
def test_a_spare_makes_a_start_that_was_decided_by_a_clock_that_is_ahead(
    ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene()
    spare, began, wait_s = scene.spare(), time.time(), 20.0
    monkeypatch.setattr(time, "time", lambda: began + scene.now - 1000.0)
    scene.end(0)
    at = began + ahead_s
    restart = Decision(kind="restart", rank=0, ended=0, start={0: 1}, how="launch", not_before=at + wait_s)
    DecisionLog(scene.store, "run", lambda: at).append(lambda _: restart)
    scene.look(spare, for_s=CARRY_S + wait_s - LOOK_S, beating=(1,))
    assert taken(spare) is None, "the process that decided has its time to start the attempt"
    scene.look(spare, for_s=2 * CARRY_S, beating=(1,))
    assert taken(spare) == (0, 1)


def test_two_spares_take_over_one_rank_each() -> None:
    scene = Scene()
    spares = scene.spare(0), scene.spare(1)
    scene.look(*spares, for_s=2 * LOST_AFTER_S)
    assert sorted(map(taken, spares)) == [(0, 1), (1, 1)]
    assert len(scene.log) == 2


def test_a_spare_leaves_an_attempt_that_another_process_has_begun() -> None:
    scene = Scene()
    spare = scene.spare()
    scene.end(0)
    DecisionLog(scene.store, "run").append(
        lambda _: Decision(kind="restart", rank=0, ended=0, start={0: 1}, how="spare:0")
    )
    scene.store.put(scene.attempt(0, 1).key("intent.json"), b"{}")
    scene.look(spare, for_s=3 * LOOK_S, beating=(1,))
    assert taken(spare) is None


def test_a_reply_that_is_lost_while_it_takes_over_loses_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    spare = scene.spare()
    scene.end(0)
    create = scene.store.put_if_absent

    def loses_the_reply(key: str, data: bytes) -> bool:
        made = create(key, data)
        if key.endswith("0000/1/handle.json") and made:
            raise StoreError("the reply was lost", key=key, url=scene.store.url)
        return made

    monkeypatch.setattr(scene.store, "put_if_absent", loses_the_reply)
    with pytest.raises(StoreError, match="lost"):
        scene.look(spare, for_s=LEAVE_S + 2 * LOOK_S, beating=(1,))
    scene.look(spare, for_s=2, beating=(1,))
    assert taken(spare) == (0, 1)


@pytest.mark.parametrize("ending", ["succeeded", "cancel", "stop", "given up", "deleted"])
def test_a_spare_ends_when_nothing_is_left_to_take_over(ending: str) -> None:
    scene = Scene()
    spare, log = scene.spare(), DecisionLog(scene.store, "run")
    if ending == "succeeded":
        scene.end(0, ReplicaStatus.SUCCEEDED)
        scene.end(1, ReplicaStatus.SUCCEEDED)
    elif ending == "given up":
        scene.end(0, ReplicaStatus.SUCCEEDED)
        scene.end(1)
        log.append(lambda _: Decision(kind="give_up", rank=1, ended=0))
    elif ending == "deleted":
        scene.store.delete("run/run.json")
    else:
        log.append(lambda _: Decision(kind=ending))
    why = "the run was deleted" if ending == "deleted" else "the run has ended"
    assert scene.look(spare, for_s=2) == [why]
