"""What a run's status says when fewer replicas than asked for are enough, and of hosts whose clocks are wrong."""

from __future__ import annotations

import time
from typing import Any

import pytest

from executors.attempt import Attempt
from executors.protocol import Outcome, ReplicaStatus
from executors.run.heartbeats import Heartbeats
from executors.status import ReplicaState, RunStatus
from executors.store.memory import MemoryStore
from executors.store.records import to_bytes

PENDING, RUNNING, SUCCEEDED, FAILED = (ReplicaStatus(name) for name in ("pending", "running", "succeeded", "failed"))


def run(*statuses: ReplicaStatus, enough: int | None = None, reason: Any = "exception") -> RunStatus:
    def outcome(rank: int, status: ReplicaStatus) -> Outcome | None:
        return Outcome(rank, 0, status, reason if status is FAILED else None) if status.is_terminal else None

    states = [ReplicaState(rank, 0, status, outcome(rank, status)) for rank, status in enumerate(statuses)]
    return RunStatus("otter", "fake", states, min_replicas=enough)


def test_what_may_still_happen_is_said_only_where_fewer_are_enough() -> None:
    for statuses, enough, prospects in (
        ((RUNNING, RUNNING, PENDING), None, ""),
        ((RUNNING, RUNNING, PENDING), 2, "started with 2 of 3; 1 may still join"),
        ((PENDING, PENDING, RUNNING), 2, ""),
        ((RUNNING, FAILED, PENDING), 1, "started with 1 of 3; 1 may still join"),
        ((RUNNING, FAILED, FAILED), 2, "only 1 of 3 can still succeed, at least 2 were asked for"),
        ((SUCCEEDED, FAILED, FAILED), 2, "only 1 of 3 succeeded, at least 2 were asked for"),
        ((SUCCEEDED, SUCCEEDED, FAILED), 2, ""),
    ):
        assert run(*statuses, enough=enough).prospects == prospects, (statuses, enough)


def test_a_run_has_succeeded_when_enough_replicas_have_and_all_have_ended() -> None:
    assert run(SUCCEEDED, SUCCEEDED, FAILED, enough=2).status == "succeeded"
    assert run(SUCCEEDED, SUCCEEDED, RUNNING, enough=2).status == "running"
    assert run(SUCCEEDED, FAILED, FAILED, enough=2).status == "failed"
    assert run(SUCCEEDED, SUCCEEDED, FAILED).status == "failed"


def test_a_replica_that_was_never_started_is_no_early_failure_where_fewer_are_enough() -> None:
    assert run(RUNNING, FAILED, enough=1, reason="start_failed").failed_early == []
    assert run(RUNNING, FAILED, enough=1).failed_early == [1]
    assert run(RUNNING, FAILED, reason="start_failed").failed_early == [1]
    assert run(RUNNING, FAILED, reason="fenced").failed_early == []


@pytest.mark.parametrize("ahead_s", [-3600.0, -60.0, 0.0, 3600.0])
def test_a_replica_is_called_silent_by_the_clock_of_whoever_looks_again_whatever_its_own_says(ahead_s: float) -> None:
    attempt, now_s, began_at = Attempt(MemoryStore(), "otter", 0), 0.0, time.time() + ahead_s
    heartbeats = Heartbeats(lambda: now_s)

    def look(now: float, beat: float) -> ReplicaState:
        nonlocal now_s
        now_s = now
        attempt.store.put(attempt.key("heartbeat.json"), to_bytes({"at": began_at + beat}))
        return heartbeats.over(ReplicaState(0, 0, RUNNING), attempt, has_beat=True)

    look(0.0, 0.0)
    for second in range(1, 4):
        state = look(4.0 * second, 4.0 * second)
        assert state.note == "", "it has beaten since the last look"
        assert 0.0 <= (state.heartbeat_age_s or 0.0) <= 4.0
    ages = [look(12.0 + silent_s, 12.0).heartbeat_age_s or 0.0 for silent_s in (20.0, 40.0)]
    assert 20.0 <= ages[0] <= 24.0
    assert 40.0 <= ages[1] <= 44.0
    assert look(60.0, 12.0).note.startswith("last heartbeat ")
    assert look(61.0, 61.0).note == ""
