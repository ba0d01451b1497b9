"""Tests `start_attempts`: the order of writes, starts and cleanup, for a failure at each step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from support.new_runs import run_spec

from executors.backend import EndedJobs, JobsOfRun
from executors.backends.inline import InlineExecutor
from executors.errors import LaunchError, StoreError
from executors.protocol import ReplicaHandle
from executors.restarts.lease import LeaseHolder
from executors.run.start_attempts import StartPlan, start_attempts
from executors.settings.run_spec import StartSpec
from executors.store.memory import MemoryStore

UNDONE_WITHOUT_A_BACKEND = ["prepare", "lease.end", "undo []"]


class Recorder(InlineExecutor):
    """A backend of a service that records each call, and starts all requested ranks."""

    ends_jobs = True

    def __init__(self, events: list[str], fail: Callable[[str], None]) -> None:
        self.events = events
        self.fail = fail

    def start_ranks(self, start: StartSpec, *more: Any) -> list[ReplicaHandle]:
        self.events.append(f"start {list(start.ranks)}")
        self.fail(f"start {list(start.ranks)}")
        return [ReplicaHandle(rank, "inline", {}) for rank in start.ranks]

    def cancel(self, handle: ReplicaHandle) -> None:
        self.events.append(f"cancel {handle.rank}")
        raise RuntimeError("a user's executor may raise anything")

    def end_jobs(self, run: JobsOfRun, *more: Any) -> EndedJobs:
        self.events.append(f"end jobs of {list(run.ranks or ())}")
        return EndedJobs()


class Lease(LeaseHolder):
    def __init__(self, events: list[str], fail: Callable[[str], None]) -> None:
        super().__init__(MemoryStore(), "otter", name="starts/0.json")
        self.events = events
        self.fail = fail

    def start(self) -> None:
        self.events.append("lease.start")
        self.fail("lease.start")

    def end(self) -> None:
        self.events.append("lease.end")

    def release_containers(self) -> None:
        self.events.append("lease.release")
        self.fail("lease.release")


def started(step: str | None, error: BaseException, *, undoes: bool = True) -> list[str]:
    """Start ranks 0 and 1, then rank 2, with a failure at a step. Return the recorded calls."""
    events: list[str] = []

    def fail(reached: str) -> None:
        if reached == step:
            raise error

    def prepare() -> None:
        events.append("prepare")
        fail("prepare")

    def undo(cause: BaseException, ranks: Sequence[int]) -> None:
        assert cause is error
        events.append(f"undo {list(ranks)}")

    spec = run_spec("otter", "memory:", "0" * 64, 3, (0, 1))
    orders = [StartSpec(spec, "time:time").with_spec(lease_name="starts/0.json", ranks=each) for each in ((0, 1), (2,))]
    plan = StartPlan(
        store=MemoryStore(),
        backend=Recorder(events, fail),
        orders=orders,
        lease=Lease(events, fail),
        prepare=prepare,
        undo=undo if undoes else None,
    )
    if step is None:
        assert sorted(start_attempts(plan).handles) == [0, 1, 2]
    else:
        with pytest.raises(type(error)) as raised:
            start_attempts(plan)
        assert raised.value is error
    return events


def test_the_lease_is_held_before_the_first_replica_starts_and_released_after_the_last() -> None:
    assert started(None, OSError()) == ["prepare", "lease.start", "start [0, 1]", "start [2]", "lease.release"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), StoreError("gone"), LaunchError("no")])
def test_a_start_that_fails_before_a_backend_was_asked_asks_no_service(error: BaseException) -> None:
    assert started("prepare", error) == UNDONE_WITHOUT_A_BACKEND
    assert started("lease.start", error) == ["prepare", "lease.start", "lease.end", "undo []"]


def test_an_interrupted_start_first_ends_jobs_then_writes_to_the_store_and_then_cancels_replicas() -> None:
    events = started("start [2]", KeyboardInterrupt())
    asked = events[events.index("start [2]") + 1 :]
    assert asked[:3] == ["lease.end", "end jobs of [0, 1, 2]", "undo [0, 1]"]
    assert sorted(asked[3:]) == ["cancel 0", "cancel 1"]


def test_after_a_refusal_a_backend_ends_its_own_jobs_and_replicas_of_earlier_starts_are_cancelled() -> None:
    events = started("start [2]", LaunchError("no third one"))
    asked = events[events.index("start [2]") + 1 :]
    assert asked[:2] == ["lease.end", "undo [0, 1]"]
    assert sorted(asked[2:]) == ["cancel 0", "cancel 1"]


def test_a_start_that_is_interrupted_at_its_very_end_is_undone_as_a_whole() -> None:
    events = started("lease.release", KeyboardInterrupt())
    assert events[5:7] == ["lease.end", "end jobs of [0, 1, 2]"]
    assert sorted(events[7:]) == ["cancel 0", "cancel 1", "cancel 2", "undo [0, 1, 2]"]


def test_a_start_that_its_caller_repeats_ends_nothing() -> None:
    """An attempt with the same number may belong to another process."""
    assert started("start [2]", StoreError("gone"), undoes=False)[-2:] == ["start [2]", "lease.end"]


def test_a_store_that_never_answers_does_not_keep_the_error_of_a_start_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.run.start_attempts.STORE_S", 0.01)
    monkeypatch.setattr("executors.run.start_attempts.HEAD_START_S", 0.01)
    answers, events = threading.Event(), list[str]()

    def refuse(reached: str) -> None:
        if reached == "start [1]":
            raise LaunchError("no")

    spec = run_spec("otter", "memory:", "0" * 64, 2, (0,))
    plan = StartPlan(
        store=MemoryStore(),
        backend=Recorder(events, refuse),
        orders=[StartSpec(spec, "time:time"), StartSpec(spec, "time:time").with_spec(ranks=(1,))],
        undo=lambda error, ranks: assert_waits(answers),
    )
    with pytest.raises(LaunchError, match="no"):
        start_attempts(plan)
    assert events == ["start [0]", "start [1]", "cancel 0"]
    answers.set()


def assert_waits(answers: threading.Event) -> None:
    assert answers.wait(60)
