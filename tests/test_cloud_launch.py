"""A launch at a vendor that refuses, breaks off and forgets: one job for each rank or none at all, and no other."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from servers.hub_faults import Misconduct, Request
from servers.hub_server import HubServer, Reply

from executors import HFJobsExecutor, Run, attach, launch
from executors.cloud_launch import LOOKS
from executors.errors import BackendError, LaunchError, RunNotFoundError
from executors.resuming import resume
from executors.testing import eventually

CPU = "cpu-basic"
N = 8

pytestmark = pytest.mark.usefixtures("quick_tries")


@pytest.fixture(autouse=True)
def _no_hardware(hf: HubServer) -> None:
    """Jobs are taken and do not start: what is told of them is enough here."""
    hf.hold(CPU)


def is_rank(rank: int) -> Callable[[Request], bool]:
    def asks_for_it(request: Request) -> bool:
        if request.route == "create":
            return bool(request.json["labels"]["replicas-rank"] == str(rank))
        return f"replicas-rank%3D{rank}&" in f"{request.query}&"

    return asks_for_it


def living(hub: HubServer) -> list[str]:
    """Return the ranks of the jobs that run or will."""
    return sorted(job.labels["replicas-rank"] for job in hub.jobs.newest_first() if not job.is_over)


def launched(hub: HubServer, n: int = N) -> Run:
    """Launch, and see that each rank has one job, which is its handle's."""
    run = launch("hf", "job.py:main", n)
    assert living(hub) == [str(rank) for rank in range(n)]
    jobs = [hub.job(handle.metadata["job"]["id"]) for handle in run.handles]
    assert [job.labels["replicas-rank"] for job in jobs] == [str(rank) for rank in range(n)]
    assert not any(job.is_over for job in jobs)
    return run


PASSING: list[tuple[Misconduct, bool]] = [
    (429, False),
    (408, False),
    (500, False),
    (500, True),
    (503, True),
    ("closed", False),
    ("closed", True),
    ("reset", False),
    ("reset", True),
    ("cut", True),
]


@pytest.mark.parametrize(("answer", "applied"), PASSING)
def test_an_answer_lost_in_the_middle_of_a_launch_costs_no_job_and_leaves_none(
    hf: HubServer, answer: Misconduct, applied: bool
) -> None:
    hf.fail("create", answer, after_applying=applied, when=is_rank(3))
    hf.fail("create", answer, after_applying=applied, when=is_rank(5), times=2)
    launched(hf)
    surplus = [job for job in hf.jobs.newest_first() if job.is_over]
    assert all(job.stage == "CANCELED" for job in surplus)


def test_the_job_behind_a_lost_answer_is_found_and_not_asked_for_again(hf: HubServer) -> None:
    hf.fail("create", "reset", after_applying=True, times=None)
    launched(hf, 2)
    assert hf.count("create") == 2


REFUSALS: list[tuple[Misconduct, int | None, str]] = [
    (401, 1, "HTTP 401.*hf auth login"),
    (403, 1, "HTTP 403.*hf auth login"),
    (402, 1, "Payment Required"),
    (429, None, "HTTP 429"),
    (500, None, "HTTP 500"),
    ("reset", None, "cannot be reached"),
]


@pytest.mark.parametrize(("answer", "times", "message"), REFUSALS)
def test_a_rank_that_cannot_be_started_ends_all_and_is_named(
    hf: HubServer, answer: Misconduct, times: int | None, message: str
) -> None:
    hf.fail("create", answer, times=times, when=is_rank(3))
    with pytest.raises(LaunchError, match=f"'hf' could not start replica 3 of 8: .*{message}") as caught:
        launch("hf", "job.py:main", N, run_id="otter")
    assert caught.value.rank == 3
    assert "Those already started were ended." in str(caught.value)
    assert "may still run" not in str(caught.value)
    assert living(hf) == []
    outcomes = attach("otter").outcomes()
    assert [outcome.reason for outcome in outcomes] == ["cancelled"] * 3 + ["start_failed"] + ["cancelled"] * 4
    assert "Hugging Face" in (outcomes[3].error or "")


def test_a_job_created_behind_the_last_lost_answer_is_ended_with_the_others(hf: HubServer) -> None:
    hf.fail("create", 500, after_applying=True, times=None, when=is_rank(3))
    hf.fail("list", 400, times=1, when=is_rank(3))
    with pytest.raises(LaunchError, match="replica 3"):
        launch("hf", "job.py:main", N)
    assert living(hf) == []


def test_jobs_that_the_service_does_not_list_yet_are_ended_with_the_others(
    hf: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf, "_list", lambda request: Reply([]))
    hf.fail("create", 400, when=is_rank(3))
    with pytest.raises(LaunchError, match="replica 3"):
        launch("hf", "job.py:main", N)
    assert living(hf) == []


def test_what_could_not_be_ended_is_named(hf: HubServer) -> None:
    hf.fail("create", 500, after_applying=True)
    hf.fail("list", 403, times=None)  # neither to take the job over nor to end it
    with pytest.raises(LaunchError, match=r"What could not be ended may still run: .*r0000-a0 .*HTTP 403"):
        launch("hf", "job.py:main", 1, run_id="otter")
    hf.forgive()
    hf.release(CPU)  # a marker is there, which ends those that come up
    hf.until(lambda: not living(hf))
    assert [outcome.reason for outcome in attach("otter").outcomes()] == ["start_failed"]


@pytest.mark.parametrize(("answer", "message"), [(401, "Invalid user token.*hf auth login"), (500, "HTTP 500")])
def test_an_account_that_cannot_be_used_is_refused_before_anything_is_written(
    hf: HubServer, answer: Misconduct, message: str
) -> None:
    hf.fail("whoami", answer, times=None)
    for executor in (HFJobsExecutor(), HFJobsExecutor(namespace=hf.namespace)):
        with pytest.raises(BackendError, match=message):
            launch(executor, "job.py:main", N, run_id="otter")
    with pytest.raises(RunNotFoundError):
        attach("otter")
    assert hf.count("create") == 0


def refuse_last(hub: HubServer, rank: int) -> None:
    """Refuse the last rank, once the others have their jobs."""

    def is_last(request: Request) -> bool:
        if is_rank(rank)(request):
            eventually(lambda: len(living(hub)) == rank)
        return is_rank(rank)(request)

    hub.fail("create", 402, when=is_last)


def list_late(hub: HubServer, rank: int, n_looks: int | None) -> None:
    """Let the first looks for the job of a rank, or all, see a list that lacks the newest job of it."""
    asks_for_it = is_rank(rank)
    looks: list[Request] = []
    real = hub._list

    def late(request: Request) -> Reply:
        reply = real(request)
        if asks_for_it(request):
            looks.append(request)
            if n_looks is None or len(looks) <= n_looks:
                reply.value = reply.value[1:]
        return reply

    hub._list = late  # type: ignore[method-assign]


@pytest.mark.parametrize(("n_looks", "n_asked"), [(LOOKS - 1, 2), (LOOKS, 3), (2 * LOOKS, 3)])
def test_a_job_whose_answer_was_lost_and_that_is_listed_late_is_not_doubled(
    hf: HubServer, n_looks: int, n_asked: int
) -> None:
    """It is looked for several times before it is asked for again, and then one of the two is ended."""
    hf.fail("create", "reset", after_applying=True, when=is_rank(1))
    list_late(hf, 1, n_looks)
    launched(hf, 2)
    assert hf.count("create") == n_asked


def test_a_job_that_is_not_listed_yet_is_ended_with_the_others(hf: HubServer) -> None:
    list_late(hf, 0, None)
    refuse_last(hf, 1)
    with pytest.raises(LaunchError, match="replica 1 of 2"):
        launch("hf", "job.py:main", 2)
    assert living(hf) == []


def test_jobs_that_the_filter_of_labels_lets_through_are_left_alone(hf: HubServer) -> None:
    other = launched(hf, 1)
    real = hf._list
    hf._list = lambda request: real(replace(request, query=""))  # type: ignore[method-assign]
    hf.fail("create", "reset", after_applying=True, when=is_rank(1))
    hf.fail("create", 402, when=is_rank(0))
    with pytest.raises(LaunchError, match="replica 0 of 2"):
        launch("hf", "job.py:main", 2)
    assert not hf.job(other.handles[0].metadata["job"]["id"]).is_over
    assert living(hf) == ["0"]


@pytest.mark.parametrize("answer", ["Come back later.", {}, [], None])
def test_an_answer_that_is_none_leaves_it_open_whether_a_job_stands(hf: HubServer, answer: object) -> None:
    pages: list[Reply] = []
    real = hf._create

    def hidden(request: Request) -> Reply:
        reply = real(request)
        if is_rank(1)(request) and not pages:
            pages.append(reply)
            return Reply(answer)
        return reply

    hf._create = hidden  # type: ignore[method-assign]
    launched(hf, 2)
    assert hf.count("create") == 2


def test_what_hinders_the_end_of_several_jobs_is_said_once_and_not_of_those_that_were_refused(hf: HubServer) -> None:
    refuse_last(hf, 3)
    hf.fail("list", 403, times=None)
    hf.fail("cancel", 403, times=None)
    with pytest.raises(LaunchError) as caught:
        launch("hf", "job.py:main", 4, run_id="otter")
    told = str(caught.value).partition("What could not be ended may still run: ")[2]
    assert told.count("HTTP 403") == 1
    assert [rank in told for rank in ("r0000", "r0001", "r0002", "r0003")] == [True, True, True, False]


def abandoned_intent(run: Run, rank: int, attempt: int, age_s: float) -> None:
    """Leave the intent of a launcher that died before it had called the vendor."""
    key = f"{run.run_id}/replicas/{rank:04d}/{attempt}/intent.json"
    record = {"nonce": "of another", "by": "elsewhere:1", "job": "-", "at": time.time() - age_s}
    assert run.store.put_if_absent(key, json.dumps(record).encode())


def test_a_launcher_that_died_before_the_vendor_knew_leaves_a_rank_pending_that_can_be_cancelled(
    hf: HubServer,
) -> None:
    run = launched(hf, 1)
    run.cancel()
    abandoned_intent(run, 0, 1, age_s=5)
    again = attach(run.url)
    assert [(state.status, state.attempt) for state in again.status().replicas] == [("pending", 1)]
    assert str(run.executor.poll(run.handles[0])) == "pending", "nor is the job of the attempt before asked about"
    again.cancel()
    assert [(outcome.status, outcome.attempt) for outcome in again.outcomes()] == [("cancelled", 1)]


def test_an_intent_that_came_to_nothing_is_a_failed_start_in_the_end(hf: HubServer) -> None:
    run = launched(hf, 1)
    run.cancel()
    abandoned_intent(run, 0, 1, age_s=3600)
    again = attach(run.url)
    assert again.wait(60)
    (outcome,) = again.outcomes()
    assert outcome.reason == "start_failed"
    assert "Hugging Face knows no job of it. Did elsewhere:1 die?" in (outcome.error or "")


def test_a_run_is_resumed_after_a_resume_that_failed(hf: HubServer) -> None:
    run = launched(hf, 2)
    run.cancel(0)
    hf.fail("create", 403)
    with pytest.raises(LaunchError, match="replica 0 of 2"):
        resume(attach(run.url))
    again = resume(attach(run.url))
    assert [state.attempt for state in again.status().replicas] == [2, 0]
    assert living(hf) == ["0", "1"]
    again.cancel()


def test_a_run_that_is_being_launched_can_be_cancelled_by_another(hf: HubServer) -> None:
    """Who attaches early sees no handles yet, and finds them later."""
    run = launched(hf, 1)
    key = f"{run.run_id}/replicas/0000/0/handle.json"
    handle = bytes(run.store.get(key))
    run.store.delete(key)
    job = hf.jobs.newest_first()[0]
    labels, job.labels = job.labels, {}
    other = attach(run.url)
    assert other.handles == [None]
    job.labels = labels
    run.store.put(key, handle)
    other.cancel()
    assert job.stage == "CANCELED"
