"""A launch at a service with faults starts exactly one job for each rank, or none at all."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import pytest
from support.fake_jobs import FakeExecutor, FakeJobs, Machines, attached, launched, start

from executors import Run, attach, launch
from executors.attempt import STALE_INTENT_S, Attempt
from executors.backends.jobs.job_starter import LOOKS
from executors.backends.jobs.service import Kind
from executors.errors import BackendError, LaunchError, RunNotFoundError, StoreError
from executors.launcher import plan_launch
from executors.protocol import ReplicaStatus
from executors.registry.run_index import find_preparation, local_store
from executors.run.resume import resume
from executors.run.run import view_of
from executors.store.file import FileStore
from executors.store.staleness import StalenessTracker
from executors.task.launch_request import LaunchRequest
from executors.testing import eventually

N = 8

pytestmark = pytest.mark.usefixtures("quick_tries")


@pytest.fixture(autouse=True)
def _no_machines(machines: Machines) -> None:
    """The service accepts jobs but does not start them, because these tests need only their states."""
    machines.is_held = True


def test_all_jobs_are_asked_for_at_the_same_time(machines: Machines) -> None:
    together = threading.Barrier(N)
    machines.fail("start", when=lambda: together.wait(30) < 0)  # this condition is never true: it waits for all calls
    launched(machines, N)


def test_an_answer_lost_in_the_middle_of_a_launch_costs_no_job_and_leaves_none(machines: Machines) -> None:
    cases: list[tuple[Kind, bool]] = [("unavailable", False), ("unknown", False), ("unknown", True)]
    for number, (kind, applied) in enumerate(cases):
        machines.fail("start", kind, after_applying=applied, rank=3)
        machines.fail("start", kind, after_applying=applied, rank=5, times=2)
        launched(machines, N, f"run-{number}").cancel()
        assert machines.living() == [], (kind, applied)


def test_the_job_after_a_lost_answer_is_found_and_not_asked_for_again(machines: Machines) -> None:
    machines.fail("start", after_applying=True, times=None)
    launched(machines, 2)
    assert machines.count("start") == 2


def test_a_job_whose_answer_was_lost_and_that_is_listed_late_is_not_doubled(machines: Machines) -> None:
    """The launcher looks for the job several times before it starts another one. Then one of the two is ended."""
    for n_looks, n_asked in ((LOOKS - 1, 2), (LOOKS, 3), (2 * LOOKS, 3)):
        looks: list[Any] = []

        def hides(key: Any, looks: list[Any] = looks, n_looks: int = n_looks) -> int:
            looks.extend([key] if key.rank == 1 else [])
            return int(key.rank == 1 and len(looks) <= n_looks)

        machines.hides = hides
        machines.calls.clear()
        machines.fail("start", after_applying=True, rank=1)
        run = launched(machines, 2, f"run-{n_looks}")
        assert machines.count("start") == n_asked, n_looks
        run.cancel()


def doubled(machines: Machines, n_looks: int = 1000) -> Run:
    """Launch two ranks at a service that loses an answer. The service lists the job of that rank only after some
    requests."""
    looks: list[Any] = []

    def hides(key: Any) -> int:
        looks.extend([key] if key.rank == 1 else [])
        return 99 if key.rank == 1 and len(looks) <= n_looks else 0

    machines.hides = hides
    machines.fail("start", after_applying=True, rank=1)
    run = start(2)
    machines.hides = lambda _: 0
    return run


def test_a_second_job_that_is_listed_at_the_end_of_the_launch_is_ended_there(machines: Machines) -> None:
    run = doubled(machines, n_looks=LOOKS + 1)
    assert machines.count("start") == 3
    assert machines.living() == [(0, 0), (1, 0)]
    assert not machines.job_of(run, 1).state().has_ended


def test_a_second_job_that_is_listed_later_is_ended_with_its_replica(machines: Machines) -> None:
    doubled(machines)
    assert machines.living() == [(0, 0), (1, 0), (1, 0)]
    attached().cancel()
    assert machines.living() == []


def test_a_second_job_is_ended_when_its_replica_is_lost(machines: Machines) -> None:
    run = doubled(machines)
    machines.end(machines.job_of(run, 1), "preempted")
    eventually(lambda: attached().outcomes()[1].reason == "preempted")
    assert machines.living() == [(0, 0)]


def test_a_rank_that_cannot_be_started_ends_all_and_is_named(machines: Machines) -> None:
    cases: list[tuple[Kind, int | None]] = [("rejected", 1), ("unavailable", None), ("unknown", None)]
    for kind, times in cases:
        run_id = f"run-{kind}"
        machines.fail("start", kind, times=times, rank=3)
        with pytest.raises(LaunchError, match=f"'fake' could not start replica 3 of 8: Fake: {kind}") as caught:
            launch(FakeExecutor(), "job.py:main", N, run_id=run_id)
        assert caught.value.rank == 3
        assert str(caught.value).endswith("as the test asked. Those already started were ended.")
        assert machines.living() == []
        outcomes = Run(local_store(), run_id, executor=FakeExecutor()).outcomes()
        reasons = [outcome.reason for outcome in outcomes]
        assert reasons == ["cancelled"] * 3 + ["start_failed"] + ["cancelled"] * 4, kind
        assert "Fake: " in (outcomes[3].error or "")
        machines.forgive()


def test_a_job_created_after_the_last_lost_answer_is_ended_with_the_others(machines: Machines) -> None:
    machines.fail("start", after_applying=True, times=None, rank=3)
    machines.fail("find", "rejected", rank=3)
    with pytest.raises(LaunchError, match="replica 3"):
        start(N)
    assert machines.living() == []


def refuse_last(machines: Machines, rank: int) -> None:
    """Refuse the last rank, once the others have their jobs."""
    machines.fail("start", "rejected", rank=rank, when=lambda: eventually(lambda: len(machines.living()) == rank))


def test_jobs_that_are_not_listed_yet_are_ended_with_the_others(machines: Machines) -> None:
    machines.hides = lambda key: 99
    refuse_last(machines, 3)
    with pytest.raises(LaunchError, match="replica 3 of 4"):
        start(4)
    assert machines.living() == []


def test_the_error_names_jobs_that_could_not_be_ended_once_and_not_the_refused_ones(machines: Machines) -> None:
    refuse_last(machines, 3)
    machines.fail("find", "rejected", times=None)
    machines.fail("stop", "rejected", times=None)
    with pytest.raises(LaunchError) as caught:
        start(4)
    listed = str(caught.value).partition("These may still run: ")[2]
    assert listed.count("Fake: rejected") == 1
    assert [rank in listed for rank in ("r0000-a0", "r0001-a0", "r0002-a0", "r0003-a0")] == [True, True, True, False]
    machines.forgive()
    machines.release()  # a cancel marker exists, which ends replicas that start
    eventually(lambda: machines.living() == [], within_s=60)
    assert {outcome.reason for outcome in attached().outcomes()} == {"cancelled", "start_failed"}


def test_an_account_that_cannot_be_used_is_refused_before_anything_is_written(machines: Machines) -> None:
    for kind in ("rejected", "unknown"):
        machines.fail("check_account", kind)
        with pytest.raises(BackendError, match=kind):
            start(N)
    with pytest.raises(BackendError, match="'NOT_THERE'"):
        start(N, secrets=["NOT_THERE"])
    with pytest.raises(RunNotFoundError):
        attached()
    assert machines.count("start") == 0


@pytest.mark.parametrize("error", [StoreError("the bucket is away"), KeyboardInterrupt()])
def test_a_launch_that_ends_while_its_code_is_uploaded_leaves_no_one_waiting(
    machines: Machines, error: BaseException
) -> None:
    put = FileStore.put

    def put_or_fail(store: FileStore, key: str, data: Any) -> None:
        if key.endswith("/code.tar.gz"):
            raise error
        put(store, key, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileStore, "put", put_or_fail)
        with pytest.raises(type(error)):
            start(2)
    with pytest.raises(RunNotFoundError):
        attached()
    assert find_preparation("otter") is not None
    assert machines.count("start") == 0
    launched(machines, 2)  # the id of the run is free again


def test_an_interrupt_in_the_middle_of_a_launch_ends_the_started_jobs(machines: Machines) -> None:
    def interrupt() -> bool:
        eventually(lambda: len(machines.living()) == 3)
        os.kill(os.getpid(), signal.SIGINT)
        eventually(lambda: machines.living() == [], "the other jobs end while the job of this rank is being started")
        return True

    machines.fail("start", rank=2, after_applying=True, when=interrupt)
    with pytest.raises(KeyboardInterrupt):
        start(4)
    assert machines.living() == []
    assert [outcome.status for outcome in attached().outcomes()] == ["cancelled"] * 4
    assert machines.count("start") == 4


def test_a_rank_that_waits_for_its_machine_is_seen_and_cancelled_by_another(machines: Machines) -> None:
    def look_and_cancel() -> bool:
        run = attached()
        assert run.status().counts == "1 pending"
        assert run.logs(rank=0) == ""
        run.cancel()
        return True

    machines.fail("start", "rejected", when=look_and_cancel)
    with pytest.raises(LaunchError, match="replica 0 of 1: it was cancelled while it was being started") as caught:
        start()
    assert caught.value.cancelled
    assert [outcome.status for outcome in attached().outcomes()] == ["cancelled"]


def test_starts_that_wait_are_interrupted_by_the_undo(machines: Machines) -> None:
    decides = machines.hold(0)
    machines.fail("start", "rejected", rank=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeJobs, "interrupt_starts", lambda _: decides.set())
        with pytest.raises(LaunchError, match="replica 1 of 2"):
            start(2)
    assert machines.living() == []
    assert [outcome.reason for outcome in attached().outcomes()] == ["cancelled", "start_failed"]


def test_a_start_that_begins_to_wait_after_the_launch_was_given_up_is_interrupted_as_well(machines: Machines) -> None:
    """This start was looking for its app or its image when the other starts were interrupted."""
    looks, given_up, waits, decides = (threading.Event() for _ in range(4))

    def interrupt(_: FakeJobs) -> None:
        given_up.set()
        if waits.is_set():
            decides.set()

    def wait_for_a_machine() -> bool:
        looks.set()
        given_up.wait(30)
        waits.set()
        return not decides.wait(30)

    machines.fail("start", when=wait_for_a_machine, rank=0)
    machines.fail("start", "rejected", rank=1, when=lambda: looks.wait(30))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeJobs, "interrupt_starts", interrupt)
        with pytest.raises(LaunchError, match="replica 1 of 2"):
            start(2)
    assert decides.is_set(), "the start waited for the full time that a machine may take"
    assert machines.living() == []


def test_a_launch_prints_its_progress(machines: Machines) -> None:
    told: list[str] = []
    plan_launch(LaunchRequest.of("job.py:main", n=3, run_id="otter"), FakeExecutor()).start(told.append)
    assert told == [f"{n} of 3 started" for n in range(4)]
    attached().cancel()


# --- launchers that died


def abandon_intent(run: Run, age_s: float) -> None:
    """Write the intent of a launcher that died before it called the service."""
    record = {"nonce": "of another", "by": "elsewhere:1", "job": "-", "at": time.time() - age_s}
    assert view_of(run).store.put_if_absent("otter/replicas/0000/1/intent.json", json.dumps(record).encode())


def test_a_launcher_that_died_before_the_service_knew_leaves_a_rank_pending_that_can_be_cancelled(
    machines: Machines,
) -> None:
    run = launched(machines, 1)
    run.cancel()
    abandon_intent(run, age_s=5)
    assert [(state.status, state.attempt) for state in attached().status().replicas] == [("pending", 1)]
    with pytest.raises(ValueError, match="no replica to resume: 1 pending"):
        resume(attached())
    assert str(view_of(run).executor.poll(run.handles[0])) == "pending", (
        "the service is not asked about the job of the previous attempt"
    )
    attached().cancel()
    assert [(outcome.status, outcome.attempt) for outcome in attached().outcomes()] == [("cancelled", 1)]


@pytest.mark.parametrize("kind", ["unavailable", "unknown"])
def test_a_service_that_cannot_answer_leaves_a_rank_that_is_being_started_as_it_is(
    machines: Machines, kind: Kind, caplog: pytest.LogCaptureFixture
) -> None:
    run = launched(machines, 1)
    run.cancel()
    abandon_intent(run, age_s=5)
    machines.calls.clear()
    machines.fail("find", kind, times=None)
    assert attached().status().counts == "1 pending"
    assert machines.count("find") == 1, "one look asks the service once, and the next look asks again"
    assert "rank 0: Fake cannot report the state of its job" in caplog.text
    machines.forgive()
    machines.fail("find", "rejected")
    with pytest.raises(BackendError, match="Fake: rejected"):
        attached().status()


def test_an_intent_that_came_to_nothing_is_a_failed_start_in_the_end(machines: Machines) -> None:
    run = launched(machines, 1)
    run.cancel()
    abandon_intent(run, age_s=7200)
    assert attached().wait(60)
    (outcome,) = attached().outcomes()
    assert outcome.reason == "start_failed"
    assert outcome.error == "Replica 0 was never started: Fake knows no job of it. Did elsewhere:1 die?"
    resume(attached())
    assert machines.living() == [(0, 2)]


def test_an_intent_is_old_by_the_clock_of_the_process_that_looks(machines: Machines) -> None:
    run = launched(machines, 1)
    run.cancel()
    abandon_intent(run, age_s=STALE_INTENT_S + 600)  # the writer's clock is late, or the reader's clock is ahead
    now, executor = 0.0, FakeExecutor()
    executor._intents = StalenessTracker(lambda: now)
    other = attach("otter", executor=executor)
    for now in (0.0, STALE_INTENT_S - 1):  # noqa: B007 - it is the clock
        n_asked = machines.count("find")
        eventually(lambda n=n_asked: other.status() and machines.count("find") > n, "the process searches for the job")  # type: ignore[misc]
        assert other.status().counts == "1 pending"
    now = STALE_INTENT_S
    eventually(lambda: other.status().counts == "1 failed")


def test_a_start_whose_attempt_was_ended_meanwhile_asks_for_no_job(machines: Machines) -> None:
    def end() -> bool:
        attempt = Attempt(local_store(), "otter", 0)
        attempt.record(attempt.new_outcome(ReplicaStatus.FAILED, "start_failed", error="It was never started."))
        return True

    machines.fail("start", "unavailable", when=end)
    with pytest.raises(LaunchError, match=r"could not start replica 0 of 1: .* recorded its end before it was started"):
        launch(FakeExecutor(), "job.py:main", 1, run_id="otter")
    assert (machines.count("start"), machines.jobs) == (1, [])
    assert attached().outcomes()[0].error == "It was never started."


def test_a_job_whose_launcher_left_no_handle_is_found_by_its_key(machines: Machines) -> None:
    run = launched(machines, 1)
    key = "otter/replicas/0000/0/handle.json"
    handle = bytes(view_of(run).store.get(key))
    view_of(run).store.delete(key)
    machines.hides = lambda _: 1
    other = attached()
    assert other.handles == [None], "a process that attaches early sees no handle"
    machines.hides = lambda _: 0
    eventually(lambda: other.handles != [None], "the handle is found, although not every look searches for the job")
    other.cancel()
    assert json.loads(bytes(view_of(run).store.get(key))) == json.loads(handle)
    assert machines.living() == []
