"""A launch at a service that starts all jobs of a group in one call: all of them or none, each once."""

from __future__ import annotations

import pytest
from support.fake_jobs import FakeExecutor, Machines, attached, ends, start

from executors import Run, launch
from executors.attempt import Attempt
from executors.backend import SupervisorStatus
from executors.backends.jobs.job_starter import LOOKS
from executors.backends.jobs.service import JobKey, Kind
from executors.errors import BackendError, LaunchError
from executors.protocol import ReplicaStatus
from executors.run.resume import resume
from executors.run.run import manager_of, view_of
from executors.run.start_spec import start_specs_of, trusted_task
from executors.testing import eventually

N = 8

pytestmark = pytest.mark.usefixtures("quick_tries")


@pytest.fixture(autouse=True)
def _groups(machines: Machines) -> None:
    """The service accepts jobs but does not start them, because these tests need only their states."""
    machines.is_held = machines.starts_together = True


def launched(machines: Machines, n: int = N, run_id: str = "otter") -> Run:
    """Launch, and check that each rank has one job, the job of its handle."""
    run = launch(FakeExecutor(), "job.py:main", n, run_id=run_id)
    assert machines.living() == [(rank, 0) for rank in range(n)]
    assert [machines.job_of(run, rank).job.key.rank for rank in range(n)] == list(range(n))
    return run


def cancels(rank: int | None = None) -> bool:
    """Cancel a rank, or all ranks if it is None, as another process would."""
    attached().cancel(rank)
    return True


def test_one_call_starts_all_ranks_and_each_knows_which_it_is(machines: Machines) -> None:
    machines.is_held = False
    run = start(3)
    assert ends(run) == [("succeeded", None)] * 3
    assert run.results() == [{"rank": rank} for rank in range(3)]
    assert machines.count("start") == 1
    assert [Attempt(view_of(run).store, "otter", rank).has("intent.json") for rank in range(3)] == [True] * 3


def test_ranks_that_are_resumed_are_a_group_of_their_own(machines: Machines) -> None:
    run = launched(machines, 4)
    for rank in (1, 3):
        run.cancel(rank)
    resume(run)
    assert machines.living() == [(0, 0), (1, 1), (2, 0), (3, 1)]
    run.cancel(2)
    resume(attached(), ranks=[2])
    assert machines.living() == [(0, 0), (1, 1), (2, 1), (3, 1)], (
        "the resumed ranks run beside the others, in a second group of the same name"
    )
    assert machines.count("start") == 3
    attached().cancel()
    assert machines.living() == []


def test_a_job_whose_answer_was_lost_is_found_and_not_started_again(machines: Machines) -> None:
    cases: list[tuple[Kind, bool, int]] = [("unavailable", False, 2), ("unknown", False, 2), ("unknown", True, 1)]
    for kind, applied, n_asked in cases:
        machines.calls.clear()
        machines.fail("start", kind, after_applying=applied)
        run = launched(machines, run_id=f"{kind}-{applied}".lower())
        assert machines.count("start") == n_asked, (kind, applied)
        run.cancel()


def test_a_job_that_a_list_does_not_show_is_requested_alone_and_no_rank_keeps_two_jobs(machines: Machines) -> None:
    late: list[JobKey] = []

    def hides(key: JobKey) -> int:
        late.extend([key] if key.rank in (2, 5) else [])
        return 99 if key.rank in (2, 5) and len(late) <= 2 * LOOKS else 0

    machines.hides = hides
    machines.fail("start", after_applying=True)
    run = launched(machines)
    assert machines.count("start") == 2
    assert len(machines.jobs) == N + 2
    assert not any(machines.job_of(run, rank).state().has_ended for rank in range(N))


def test_a_refusal_ends_the_launch_and_says_why_once(machines: Machines) -> None:
    kinds: list[tuple[Kind, int | None]] = [("rejected", 1), ("unknown", None)]
    for kind, times in kinds:
        machines.fail("start", kind, times=times)
        said = f"'fake' could not start any of {N} replicas, which start together: Fake: {kind}, as the test asked."
        with pytest.raises(LaunchError, match=said):
            start(N)
        assert machines.living() == []
        assert {outcome.reason for outcome in attached().outcomes()} == {"start_failed"}
        attached().remove()
        machines.forgive()


def test_jobs_after_a_lost_answer_are_ended_when_the_launch_is_given_up(machines: Machines) -> None:
    machines.fail("start", after_applying=True, times=None)
    machines.fail("find", "rejected", times=N)
    with pytest.raises(LaunchError, match="any of 8 replicas"):
        start(N)
    assert machines.living() == []


def test_jobs_that_no_one_left_a_handle_of_are_found_each_by_its_key(machines: Machines) -> None:
    run = launched(machines, 3)
    for rank in range(3):
        view_of(run).store.delete(f"otter/replicas/{rank:04d}/0/handle.json")
    other = attached()
    eventually(
        lambda: None not in other.handles, "the handles are found, although not every look searches for the jobs"
    )
    other.cancel()
    assert machines.living() == []


def test_a_rank_that_is_cancelled_while_its_group_waits_ends_no_other(machines: Machines) -> None:
    machines.fail("start", "unavailable", when=lambda: cancels(3))
    run = launched(machines)
    assert [str(state.status) for state in run.status().replicas if state.rank != 3] == ["pending"] * (N - 1)
    assert run.status().replicas[3].status == "cancelled"
    run.cancel()


def test_a_group_that_is_cancelled_while_it_waits_is_not_asked_for_again(machines: Machines) -> None:
    machines.fail("start", "unavailable", when=cancels)
    with pytest.raises(LaunchError, match="it was cancelled while it was being started"):
        start(N)
    assert machines.count("start") == 1


@pytest.mark.parametrize("has_looked", [False, True])
def test_a_cancel_is_not_reported_as_done_if_the_service_cannot_say_whether_a_job_exists(
    machines: Machines, has_looked: bool
) -> None:
    run, other = launched(machines, 2), attached()
    left = Attempt(view_of(run).store, "otter", 1)
    view_of(run).store.delete(left.key("handle.json"))
    machines.fail("find", "unavailable", times=None)
    if has_looked:
        assert other.status().counts == "2 pending", "status shows the run although the service does not answer"
    with pytest.raises(BackendError, match="Fake: unavailable"):
        other.cancel()
    assert machines.living() == [], "the cancel ends the jobs, because this machine has noted their ids"
    assert left.has("cancel.json")
    assert left.outcome() is None
    machines.forgive()
    other.cancel()
    assert machines.living() == []


def test_a_supervisor_whose_job_the_service_cannot_look_for_now_counts_as_one_that_lives(machines: Machines) -> None:
    run = launch(FakeExecutor(), "job.py:main", 2, run_id="otter", restarts="2", detach=True)
    attempt = Attempt(view_of(run).store, "otter", 0)
    end = attempt.record(attempt.new_outcome(ReplicaStatus.FAILED, "exception"))
    view_of(run).store.delete(attempt.key("handle.json"))
    other = attached()
    controller = manager_of(other).restart_here(
        start_specs_of(view_of(other), trusted_task(view_of(other)), detach=True), None
    )
    machines.fail("find", "unavailable", times=None)
    other.status()
    assert controller._supervisors([end]) == {0: SupervisorStatus(is_alive=True)}
    machines.forgive()
    machines.end(machines.jobs[0], "cancelled")
    eventually(lambda: not controller._supervisors([end])[0].is_alive)
    run.cancel()


def test_one_request_has_the_states_of_all_jobs_of_a_group(machines: Machines) -> None:
    run = launched(machines)
    machines.calls.clear()
    assert attached().status().counts == f"{N} pending"
    assert [name for name, _ in machines.calls] == ["states"]
    run.cancel()
