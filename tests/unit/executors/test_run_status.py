"""What a run's status says when fewer replicas than asked for are enough."""

from __future__ import annotations

from typing import Any

from executors.protocol import Outcome, ReplicaStatus
from executors.status import ReplicaState, RunStatus

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
