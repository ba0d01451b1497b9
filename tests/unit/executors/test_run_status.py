"""Tests the status of runs with `min_replicas`, and of runs on hosts whose clocks are wrong."""

from __future__ import annotations

import json
import shlex
import time
from dataclasses import replace
from typing import Any

import pytest

from executors.attempt import Attempt, Beat
from executors.errors import CorruptObjectError
from executors.protocol import Outcome, ReplicaStatus, Standstill, WarningCount
from executors.status import ReplicaState, RunStatus
from executors.store.memory import MemoryStore
from executors.store.records import to_bytes
from executors.store.url import command_to_delete
from executors.view.heartbeats import Heartbeats

PENDING, RUNNING, SUCCEEDED, FAILED = (ReplicaStatus(name) for name in ("pending", "running", "succeeded", "failed"))


STANDS = Standstill(round=12, key="otter/diloco/main/r11/contribution/1", n_more=1)


def standing(found: Standstill, status: ReplicaStatus = ReplicaStatus.RUNNING) -> RunStatus:
    warned = WarningCount(1, "a text", 5.0, found)
    states = [ReplicaState(rank, 0, status, warned=warned) for rank in range(3)]
    return RunStatus("otter", "fake", states, store_url="file:///data/its%20runs")


def test_a_blocked_round_is_reported_once_with_the_command_that_deletes_the_object() -> None:
    line = (
        "Round 12 makes no progress: the object 'otter/diloco/main/r11/contribution/1' (and 1 more) was made without "
        "the run's key, or is damaged. Delete it: rm '/data/its runs/otter/diloco/main/r11/contribution/1'"
    )
    now = standing(STANDS)
    assert now.doubts == now.to_json()["standstills"] == [line]
    assert "Round 12 makes no progress" in now.to_html()
    (ended,) = standing(STANDS, ReplicaStatus.FAILED).standstills
    assert ended.startswith("Round 12 made no progress when the replica ended: ")
    assert standing(replace(STANDS, round=0)).standstills[0].startswith("The first anchor makes no progress: ")


def test_a_heartbeat_can_only_name_objects_of_rounds_of_its_run() -> None:
    """The line advises to delete the object, so it must not name any other object."""
    assert standing(replace(STANDS, key="other/diloco/main/seal/1")).standstills == []
    beat = Beat(5.0, {}, WarningCount(1, "a text", 5.0, STANDS)).to_bytes()
    assert Beat.parse(beat).warned == WarningCount(1, "a text", 5.0, STANDS)
    for key in (
        "otter/run.json",
        "otter/diloco/main/seal/1/../../x",
        "../x",
        "/etc/passwd",
        "otter/diloco/a\nb/seal/1",
    ):
        bad = json.loads(beat)
        bad["replicas.warnings"]["standstill"]["key"] = key
        with pytest.raises(CorruptObjectError, match="standstill"):
            Beat.parse(to_bytes(bad))


def test_the_command_that_deletes_an_object_is_one_for_a_shell() -> None:
    key = "otter/diloco/it's/seal/1"
    assert shlex.split(command_to_delete("file:///data", key)) == ["rm", f"/data/{key}"]
    url = "s3://bucket/a%20prefix?endpoint_url=http%3A%2F%2Flocalhost%3A9000&region=x"
    assert shlex.split(command_to_delete(url, key)) == [
        *["aws", "s3", "rm", f"s3://bucket/a prefix/{key}"],
        *["--endpoint-url", "http://localhost:9000", "--region", "x"],
    ]
    assert command_to_delete("memory://x", key) == ""


def run(*statuses: ReplicaStatus, enough: int | None = None, reason: Any = "exception") -> RunStatus:
    def outcome(rank: int, status: ReplicaStatus) -> Outcome | None:
        return Outcome(rank, 0, status, reason if status is FAILED else None) if status.is_terminal else None

    states = [ReplicaState(rank, 0, status, outcome(rank, status)) for rank, status in enumerate(statuses)]
    return RunStatus("otter", "fake", states, min_replicas=enough)


def test_ranks_that_may_still_come_are_mentioned_only_if_fewer_are_enough() -> None:
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


def test_a_replica_that_was_never_started_is_not_an_early_failure_if_fewer_are_enough() -> None:
    assert run(RUNNING, FAILED, enough=1, reason="start_failed").failed_early == []
    assert run(RUNNING, FAILED, enough=1).failed_early == [1]
    assert run(RUNNING, FAILED, reason="start_failed").failed_early == [1]
    assert run(RUNNING, FAILED, reason="fenced").failed_early == []


@pytest.mark.parametrize("ahead_s", [-3600.0, -60.0, 0.0, 3600.0])
def test_a_replica_counts_as_silent_by_the_readers_clock_and_not_by_its_own(
    ahead_s: float,
) -> None:
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
        assert state.note == "", "a replica with a new heartbeat has no note"
        assert 0.0 <= (state.heartbeat_age_s or 0.0) <= 4.0
    ages = [look(12.0 + silent_s, 12.0).heartbeat_age_s or 0.0 for silent_s in (20.0, 40.0)]
    assert 20.0 <= ages[0] <= 24.0
    assert 40.0 <= ages[1] <= 44.0
    assert look(60.0, 12.0).note.startswith("last heartbeat ")
    assert look(61.0, 61.0).note == ""
