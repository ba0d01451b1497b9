"""How replicas on Hugging Face Jobs fare and end, as far as the contract of executors does not say it already."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers.hub_server import HubServer, Reply

from executors import HFJobsExecutor, Run, attach, launch
from executors.errors import BackendError, ReplicaLostError
from executors.testing import eventually
from executors.vendor import VendorError

CPU, GPU = "cpu-basic", "h200"


def ids_of(run: Run) -> list[str]:
    """Return the ids of a run's jobs, in rank order."""
    return [handle.metadata["job"]["id"] for handle in run.handles]


def hanging(run: Run) -> None:
    """Wait until every replica says that it hangs."""
    for rank in range(run.world_size):
        eventually(lambda rank=rank: "hanging" in run.logs(rank=rank))  # type: ignore[misc]


def reasons(run: Run) -> list[tuple[str, str | None]]:
    assert run.wait(60)
    return [(str(outcome.status), outcome.reason) for outcome in run.outcomes()]


def test_each_way_to_end_a_job_from_outside_has_its_reason(hf: HubServer) -> None:
    hf.jobs.term_grace_s = 0.1
    run = launch("hf", "job.py:hang", 6, args={"deaf": True})  # who hears SIGTERM leaves an outcome of its own
    hanging(run)
    killed, memory, evicted, deleted, forgotten, stopped = ids_of(run)
    hf.kill(killed)
    hf.kill(memory, "OOMKilled")
    hf.kill(evicted, "Evicted")
    hf.delete(deleted)
    hf.forget(forgotten)
    HFJobsExecutor()._api.cancel_job(job_id=stopped, namespace=hf.namespace)
    assert reasons(run) == [
        ("failed", "signal"),
        ("failed", "oom"),
        ("failed", "preempted"),
        ("failed", "lost"),
        ("failed", "lost"),
        ("cancelled", "cancelled"),
    ]
    outcomes = run.outcomes()
    assert [outcome.exit_code for outcome in outcomes] == [137, 137, 137, None, None, None]
    assert "Hugging Face says: Job failed with exit code: 137. Reason: OOMKilled" in (outcomes[1].error or "")
    assert "was lost: Hugging Face reports it gone and it left no outcome." in (outcomes[3].error or "")
    assert "was cancelled at Hugging Face, not by `replicas`" in (outcomes[5].error or "")
    assert "hanging" in outcomes[0].output_tail
    with pytest.raises(ReplicaLostError):
        run.results()
    assert [outcome.reason for outcome in attach(run.url).outcomes()] == [outcome.reason for outcome in outcomes]


def test_the_vendors_limit_ends_a_replica_that_does_not_end_itself(
    hf: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.cloud.MARGIN_S", -57)
    hf.jobs.term_grace_s = 0.1
    run = launch("hf", "job.py:hang", 1, args={"deaf": True}, timeout=60)
    assert reasons(run) == [("failed", "timeout")]
    assert "ran into its time limit of 60 s" in (run.outcomes()[0].error or "")


def test_what_prevents_a_start_is_told_in_the_outcome(hf: HubServer) -> None:
    hf.hold(CPU)
    run = launch("hf", "job.py:main", 1)
    run.store.delete(f"{run.run_id}/task/code.tar.gz")
    hf.release(CPU)
    assert reasons(run) == [("failed", "start_failed")]
    (outcome,) = run.outcomes()
    assert outcome.exit_code == 78
    assert "before its entrypoint was reached. Its log ends: replicas: replica 0 of run" in (outcome.error or "")
    assert (outcome.error or "").endswith("Hugging Face says: Job failed with exit code: 78. Reason: Error.")
    assert "cannot read task/code.tar.gz" in (outcome.error or "")


def test_replicas_that_get_no_hardware_are_pending_and_can_be_cancelled(hf: HubServer) -> None:
    hf.hold(GPU)
    run = launch("hf", "job.py:main", 2, gpu="H200")
    assert [job.flavor for job in hf.jobs.newest_first()] == [GPU, GPU]
    assert [state.status for state in run.status().replicas] == ["pending", "pending"]
    assert attach(run.url).status().counts == "2 pending"
    assert run.logs(rank=0) == ""
    run.cancel()
    assert reasons(run) == [("cancelled", "cancelled")] * 2
    assert [job.stage for job in hf.jobs.newest_first()] == ["CANCELED"] * 2


@pytest.mark.parametrize("gpu", ["H100", "A100:3", "T4:x", ""])
def test_a_gpu_that_no_flavor_has_is_refused_with_those_that_are_known(hf: HubServer, gpu: str) -> None:
    with pytest.raises(BackendError, match=r"Known: T4, L4, L4:4, .*--option flavor=NAME") as caught:
        launch("hf", "job.py:main", 2, gpu=gpu, run_id="otter")
    assert repr(gpu) in str(caught.value)
    assert hf.count("create") == 0


@pytest.mark.parametrize(
    ("gpu", "flavor"), [("t4", "t4-small"), ("A100:4", "a100x4"), ("rtx pro 6000:8", "rtx-pro-6000x8"), (None, CPU)]
)
def test_a_gpu_is_a_flavor(hf: HubServer, gpu: str | None, flavor: str) -> None:
    hf.hold(flavor)
    run = launch("hf", "job.py:main", 1, gpu=gpu)
    assert hf.job(ids_of(run)[0]).flavor == flavor
    run.cancel()


def test_a_flavor_said_by_hand_goes_before_the_gpu(hf: HubServer) -> None:
    hf.hold("cpu-upgrade")
    run = launch(HFJobsExecutor(flavor="cpu-upgrade"), "job.py:main", 1, gpu="H100")
    assert hf.job(ids_of(run)[0]).flavor == "cpu-upgrade"
    run.cancel()


def test_the_users_labels_stand_beside_ours_and_names_are_never_too_long(hf: HubServer) -> None:
    hf.hold(CPU)
    labels = {"team": "ml", "empty": "", "x" * 100: "y" * 100}
    run_id = "r" * 40
    run = launch(HFJobsExecutor(labels=labels), "job.py:main", 1, run_id=run_id)
    found = hf.job(ids_of(run)[0]).labels
    assert found.items() >= labels.items()
    assert found["replicas-run"] == run_id
    assert found["name"].startswith(run_id)
    assert max(map(len, found.values())) <= 100
    run.cancel()


@pytest.mark.parametrize("labels", [{"a.b": "c"}, {"a": "b/c"}, {"a": "x" * 101}, {"x" * 101: "a"}, {"": "a"}])
def test_a_label_that_the_service_does_not_take_is_refused_at_once(labels: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="letters, digits, '-' and '_', at most 100"):
        HFJobsExecutor(labels=labels)


@pytest.mark.parametrize("name", ["name", "replicas-run"])
def test_a_label_of_ours_is_not_the_users(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r} is set by `replicas` itself"):
        HFJobsExecutor(labels={name: "mine"})


def test_the_user_is_asked_for_once_and_never_for_a_known_namespace_of_a_handle(hf: HubServer) -> None:
    hf.hold(CPU)
    run = launch("hf", "job.py:main", 8)
    assert hf.count("whoami") == 1
    assert run.record.executor_options["namespace"] == hf.namespace
    again = attach(run.url)
    again.status()
    again.cancel()
    assert hf.count("whoami") == 1
    assert all(job.namespace == hf.namespace for job in hf.jobs.newest_first())


def test_logs_of_silent_replicas_come_from_all_at_the_same_time(hf: HubServer) -> None:
    run = launch("hf", "job.py:hang", 3)
    hanging(run)
    text = attach(run.url).logs()
    assert text.splitlines() == [f"[{rank}] hanging" for rank in range(3)]
    run.cancel()


def test_a_log_that_breaks_off_is_read_again(hf: HubServer, quick_tries: None) -> None:
    run = launch("hf", "job.py:main", 1, args={"times": 5})
    run.results()
    lines = [f"hello {number} of rank 0" for number in range(5)]
    for answer in ("cut", "reset", 500, 429):
        hf.fail("logs", answer, after_lines=2 if isinstance(answer, str) else None)
        assert run.logs(rank=0).splitlines() == lines


def test_a_log_that_is_gone_leaves_what_the_replica_kept(hf: HubServer) -> None:
    run = launch("hf", "job.py:main", 1, args={"times": 2})
    run.results()
    hf.forget(ids_of(run)[0])
    assert run.logs(rank=0).splitlines() == ["hello 0 of rank 0", "hello 1 of rank 0"]


def test_threads_may_use_one_executor(hf: HubServer) -> None:
    hf.hold(CPU)
    executor = HFJobsExecutor()
    start = threading.Barrier(4)

    def one(number: int) -> list[str]:
        start.wait()
        run = launch(executor, "job.py:main", 4, run_id=f"run-{number}")
        run.status()
        run.cancel()
        return ids_of(run)

    with ThreadPoolExecutor(4) as pool:
        found = [job_id for ids in pool.map(one, range(4)) for job_id in ids]
    assert len(set(found)) == 16
    assert {job.stage for job in hf.jobs.newest_first()} == {"CANCELED"}
    assert hf.count("whoami") == 1


@pytest.fixture
def polled(hf: HubServer) -> Run:
    hf.hold(CPU)
    return launch("hf", "job.py:main", 1)


@pytest.mark.parametrize("answer", [429, 500, 503, "reset", "closed", "cut"])
def test_a_service_that_cannot_tell_leaves_a_replica_as_it_is(hf: HubServer, polled: Run, answer: object) -> None:
    hf.fail("inspect", answer, times=None)  # type: ignore[arg-type]
    assert attach(polled.url).status().counts == "1 pending"
    assert hf.count("inspect") == 1
    hf.forgive()
    polled.cancel()


@pytest.mark.parametrize("status", [401, 403])
def test_a_service_that_lets_nobody_in_is_told(hf: HubServer, polled: Run, status: int) -> None:
    hf.fail("inspect", status, times=None)
    with pytest.raises(BackendError, match=f"HTTP {status}.*hf auth login"):
        attach(polled.url).status()
    hf.forgive()
    polled.cancel()


@pytest.mark.parametrize("applied", [False, True])
@pytest.mark.parametrize("answer", [429, 500, "reset"])
def test_a_cancellation_is_asked_for_until_it_is_heard(
    hf: HubServer, polled: Run, quick_tries: None, answer: object, applied: bool
) -> None:
    hf.fail("cancel", answer, after_applying=applied, times=3)  # type: ignore[arg-type]
    polled.cancel()
    assert [job.stage for job in hf.jobs.newest_first()] == ["CANCELED"]
    assert reasons(polled) == [("cancelled", "cancelled")]


@pytest.mark.parametrize(("header", "seconds"), [("30", 30.0), ("Fri, 20 Nov 2026 12:00:00 GMT", 0.0)])
def test_a_service_says_how_long_it_wants_to_be_left_alone(
    hf: HubServer, polled: Run, header: str, seconds: float
) -> None:
    hf.fail("cancel", 429, headers={"Retry-After": header})
    with pytest.raises(VendorError, match="HTTP 429") as error:
        HFJobsExecutor().stop_job(polled.handles[0].metadata["job"])
    assert error.value.retry_after_s == seconds
    polled.cancel()


def test_a_service_that_never_answers_is_given_up(hf: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.hf_jobs.ANSWER_S", 0.2)
    hf.fail("whoami", "silent")
    with pytest.raises(BackendError, match=r"cannot be reached: no answer within 0\.2 s"):
        launch("hf", "job.py:main", 1)


def test_a_job_that_ended_before_it_could_be_cancelled_is_no_error(hf: HubServer) -> None:
    hf.jobs.term_grace_s = 0.1
    run = launch("hf", "job.py:hang", 1, args={"deaf": True})
    hanging(run)
    hf.kill(ids_of(run)[0])
    hf.until(lambda: hf.job(ids_of(run)[0]).is_over)
    hf.fail("cancel", 409)
    HFJobsExecutor().cancel(run.handles[0])
    assert reasons(run) == [("cancelled", "cancelled")]


def test_a_cancel_that_is_refused_for_a_job_that_runs_is_an_error(hf: HubServer) -> None:
    hf.hold(CPU)
    run = launch("hf", "job.py:main", 1)
    hf.fail("cancel", 409)
    with pytest.raises(BackendError, match="HTTP 409"):
        run.cancel()
    run.cancel()
    assert reasons(run) == [("cancelled", "cancelled")]


def test_the_log_of_a_cancelled_replica_says_that_it_was_cancelled(hf: HubServer) -> None:
    run = launch("hf", "job.py:hang", 1)
    hanging(run)
    run.cancel()
    eventually(lambda: "was told to end (SIGTERM), since it was cancelled." in run.logs(rank=0))
    assert "nobody of ours" not in run.logs(rank=0)


def test_what_is_no_answer_of_the_service_is_told_as_its_failure(hf: HubServer) -> None:
    hf.hold(CPU)
    run = launch("hf", "job.py:main", 1)
    real = hf._inspect
    hf._inspect = lambda _request, job: Reply("Come back later.")  # type: ignore[method-assign]
    assert attach(run.url).status().counts == "1 pending"  # the store tells what it knows meanwhile
    hf._inspect = real  # type: ignore[method-assign]
    run.cancel()
