"""Tests the requests to Hugging Face Jobs, and how answers and failures are read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from servers.hub.faults import Misconduct, Request
from servers.hub.server import HubServer, Reply

from executors import HFJobsExecutor, Run, attach, launch
from executors.backends.jobs.service import UNKNOWN, JobId, JobKey, JobService, JobServiceError, JobSpec, JobState
from executors.errors import BackendError, MissingDependencyError
from executors.run.run import view_of
from executors.testing import eventually

CPU = "cpu-basic"
KEY = JobKey("s3://bucket/runs", "otter", 0, 0)
JOB = JobSpec(KEY, ("python", "-c", "import time; print('hanging', flush=True); time.sleep(600)"), (), {}, {})
LOGIN = r" Log in with: hf auth login \(or set HF_TOKEN"

pytestmark = pytest.mark.usefixtures("hf")


@pytest.fixture
def service() -> JobService:
    return HFJobsExecutor().service


@pytest.fixture
def job_id(hf: HubServer, service: JobService) -> JobId:
    """A job that waits for its hardware."""
    hf.hold(CPU)
    return service.start(JOB)


def ids_of(run: Run) -> list[str]:
    """Return the ids of a run's jobs, in rank order."""
    return [handle.metadata["job"]["id"] for handle in run.handles]


# Requests


def test_a_gpu_is_the_cheapest_flavor_that_has_it(hf: HubServer, service: JobService) -> None:
    cases = {
        "t4": "t4-small", "A100:4": "a100x4", "A10G:2": "a10g-largex2", "rtx pro 6000:8": "rtx-pro-6000x8",
        "RTX_PRO_6000": "rtx-pro-6000", "L40S:1": "l40sx1", None: CPU,
    }  # fmt: skip
    for gpu, flavor in cases.items():
        service.check_account(gpu, 60, ())
        assert service.describe(replace(JOB, gpu=gpu))["flavor"] == flavor, gpu
    assert hf.count("hardware") == 1
    by_hand = HFJobsExecutor(flavor="cpu-upgrade").service
    assert by_hand.describe(replace(JOB, gpu="H100"))["flavor"] == "cpu-upgrade"


def test_the_price_of_an_hour_is_that_of_the_flavor(service: JobService) -> None:
    prices = {None: 0.01, "T4": 0.40, "A100:4": 10.00}
    assert {gpu: round(service.price_per_hour(gpu) or 0, 2) for gpu in prices} == prices
    assert HFJobsExecutor(flavor="of-tomorrow").service.price_per_hour(None) is None


def test_volumes_are_mounted_and_those_that_are_invalid_are_refused_at_once(hf: HubServer) -> None:
    hf.hold(CPU)
    volumes = {"/data": "hf://datasets/org/corpus@v2/train", "/out": "hf://buckets/ada/mine"}
    service = HFJobsExecutor(volumes=volumes).service
    assert service.describe(JOB)["volumes"] == volumes
    assert hf.job(service.start(JOB)["id"]).spec["volumes"] == [
        {"type": "dataset", "source": "org/corpus", "mountPath": "/data", "revision": "v2", "path": "train"},
        {"type": "bucket", "source": "ada/mine", "mountPath": "/out"},
    ]
    for path, source in (("data", "hf://datasets/org/corpus"), ("/data", "corpus"), ("/", "hf://buckets/ada/mine")):
        with pytest.raises(ValueError, match=r"hf://|corpus"):
            HFJobsExecutor(volumes={path: source})


def test_the_token_of_the_login_is_a_secret_like_a_variable(
    hf: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(hf.token)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    hf.hold(CPU)
    service = HFJobsExecutor(secrets=["HF_TOKEN"]).service
    service.check_account(None, 60, ())
    assert hf.job(service.start(JOB)["id"]).spec["secrets"] == {"HF_TOKEN": hf.token}
    assert hf.token not in str(service.describe(JOB))


def test_a_client_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.__version__", "0.36.2")
    with pytest.raises(
        MissingDependencyError, match=r"needs huggingface_hub 1\.20 or later; this is 0\.36\.2\. Update"
    ):
        HFJobsExecutor()


def test_a_gpu_that_no_flavor_has_is_refused_with_those_that_are_known(hf: HubServer) -> None:
    for gpu in ("H100", "A100:3", "T4:x", ""):
        with pytest.raises(BackendError, match=r"Known: A100, .*L4, L4:4, .*--option flavor=NAME") as caught:
            launch("hf", "job.py:main", 2, gpu=gpu, run_id="otter")
        assert repr(gpu) in str(caught.value)
    assert hf.count("create") == 0


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


def test_labels_that_the_service_does_not_take_are_refused_at_once() -> None:
    hostile: list[dict[str, str]] = [{"a.b": "c"}, {"a": "b/c"}, {"a": "x" * 101}, {"x" * 101: "a"}, {"": "a"}]
    for labels in hostile:
        with pytest.raises(ValueError, match="at most 100 letters, digits, '-' and '_'"):
            HFJobsExecutor(labels=labels)
    for name in ("name", "replicas-run"):
        with pytest.raises(ValueError, match=f"{name!r} is set by `replicas` itself"):
            HFJobsExecutor(labels={name: "mine"})


def test_the_user_is_asked_for_once_by_all_threads_and_never_for_a_known_namespace(hf: HubServer) -> None:
    hf.hold(CPU)
    executor = HFJobsExecutor()
    together = threading.Barrier(4)

    def one(number: int) -> list[str]:
        together.wait()
        run = launch(executor, "job.py:main", 4, run_id=f"run-{number}")
        assert view_of(run).record.placements[0].executor_options["namespace"] == hf.namespace
        attach(run.url).cancel()
        return ids_of(run)

    with ThreadPoolExecutor(4) as pool:
        found = [job for ids in pool.map(one, range(4)) for job in ids]
    assert len(set(found)) == 16
    assert {job.stage for job in hf.jobs.newest_first()} == {"CANCELED"}
    assert {job.namespace for job in hf.jobs.newest_first()} == {hf.namespace}
    assert hf.count("whoami") == 1


# Answers


def test_each_way_to_end_has_its_state(hf: HubServer, service: JobService) -> None:
    hf.jobs.term_grace_s = 0.1
    ids = [service.start(replace(JOB, key=replace(KEY, rank=rank))) for rank in range(6)]
    killed, memory, evicted, deleted, forgotten, stopped = (each["id"] for each in ids)
    hf.kill(killed)
    hf.kill(memory, "OOMKilled")
    hf.kill(evicted, "Evicted")
    hf.delete(deleted)
    hf.forget(forgotten)
    service.stop(ids[5])
    hf.until(lambda: all(job.is_over for job in hf.jobs.newest_first()))
    states = [service.state(each) for each in ids]
    failed = "Job failed with exit code: 137. Reason: "
    assert states[:3] == [
        JobState(True, None, 137, f"{failed}Error"),
        JobState(True, "oom", 137, f"{failed}OOMKilled"),
        JobState(True, "preempted", 137, f"{failed}Evicted"),
    ]
    assert [state.reason for state in states[3:]] == ["lost", "lost", "cancelled"]
    assert service.find(replace(KEY, rank=3)) == [], "a deleted job is not found"
    assert hf.job(stopped).stage == "CANCELED"


def test_a_job_of_another_hub_is_not_called_unknown(hf: HubServer, service: JobService, job_id: JobId) -> None:
    hf.forget(job_id["id"])
    assert service.verify(job_id, KEY) == job_id
    elsewhere = {**job_id, "url": "https://hub.example/jobs/otters/1"}
    with pytest.raises(JobServiceError, match=r"started at 'https://hub.example/.*Set HF_ENDPOINT"):
        service.verify(elsewhere, KEY)


def test_a_page_that_is_not_found_by_a_proxy_says_nothing_of_a_job(
    hf: HubServer, service: JobService, job_id: JobId
) -> None:
    hf.fail("inspect", 404, headers={"Content-Type": "text/html"})
    assert kind_of(lambda: service.state(job_id)) == ("unavailable", 0.0)
    hf.fail("inspect", 404)
    assert service.state(job_id) == UNKNOWN


def test_only_the_services_own_limit_is_read_as_a_time_limit(hf: HubServer, service: JobService, job_id: JobId) -> None:
    meant = {
        "Job timeout": "timeout",
        "Failed to pull image python:3.99: dial tcp 1.2.3.4:443: i/o timeout": None,
        "Job failed with exit code: 1. Reason: Error": None,
        "Job failed with exit code: 137. Reason: OOMKilled": "oom",
    }
    for message, reason in meant.items():
        hf.job(job_id["id"]).stage, hf.job(job_id["id"]).message = "ERROR", message
        state = service.state(job_id)
        assert (state.reason, state.message) == (reason, message)


def test_the_states_of_a_run_are_one_request(hf: HubServer, service: JobService) -> None:
    hf.hold(CPU)
    keys = [replace(KEY, rank=rank) for rank in range(5)]
    jobs = {key: service.start(replace(JOB, key=key)) for key in keys}
    other = replace(KEY, run_id="another")
    service.start(replace(JOB, key=other))
    hf.job(jobs[keys[1]]["id"]).stage = "COMPLETED"
    hf.job(jobs[keys[3]]["id"]).stage = "RUNNING"
    hf.forget(jobs[keys[2]]["id"])
    states = service.states(jobs)
    assert {key.rank: (state.has_ended, state.message) for key, state in states.items()} == {
        0: (False, "scheduling"), 1: (True, ""), 3: (False, ""), 4: (False, "scheduling"),
    }  # fmt: skip
    assert (hf.count("list"), hf.count("inspect")) == (1, 0)


def test_jobs_are_listed_page_by_page(hf: HubServer, service: JobService) -> None:
    hf.hold(CPU)
    jobs = {key: service.start(replace(JOB, key=key)) for key in (replace(KEY, rank=rank) for rank in range(5))}
    hf.page_size = 2
    assert list(service.states(jobs)) == list(jobs)
    assert (hf.count("list"), hf.count("inspect")) == (3, 0)


def test_jobs_that_the_filter_of_labels_lets_through_are_not_found(
    hf: HubServer, service: JobService, job_id: JobId
) -> None:
    real = hf._list
    hf._list = lambda request: real(replace(request, query=""))  # type: ignore[method-assign]
    assert service.find(KEY) == [job_id]
    assert service.find(replace(KEY, rank=1)) == []
    unfiltered = hf._list
    hf._list = lambda request: Reply([{**job, "labels": None} for job in unfiltered(request).value])  # type: ignore[method-assign]
    assert service.find(KEY) == [], "a job without labels may belong to another user, so it is not found"


def test_a_log_that_breaks_off_is_read_again(hf: HubServer, service: JobService) -> None:
    job_id = service.start(replace(JOB, command=("python", "-c", "for n in range(5): print(n)")))
    eventually(lambda: service.state(job_id).has_ended)
    for answer in ("cut", "reset", 500, 429):
        hf.fail("logs", answer, after_lines=2 if isinstance(answer, str) else None)
        assert service.logs(job_id, 10).splitlines() == list("01234"), answer


def test_logs_of_silent_replicas_come_from_all_at_the_same_time() -> None:
    run = launch("hf", "job.py:hang", 3)
    for rank in range(3):
        eventually(lambda rank=rank: "hanging" in run.logs(rank=rank))  # type: ignore[misc]
    assert attach(run.url).logs().splitlines() == [f"[{rank}] hanging" for rank in range(3)]
    run.cancel()


def test_a_job_that_ended_before_it_could_be_stopped_is_not_an_error_and_one_that_runs_is(
    hf: HubServer, service: JobService, job_id: JobId
) -> None:
    hf.fail("cancel", 409)
    with pytest.raises(JobServiceError, match="HTTP 409"):
        service.stop(job_id)
    service.stop(job_id)
    hf.fail("cancel", 409)
    service.stop(job_id)


# Failures


def kind_of(call: object) -> tuple[str, float]:
    """Return the kind of error that a call raises, and the pause that the service asked for.

    Check that the message is short.
    """
    with pytest.raises(JobServiceError) as caught:
        call()  # type: ignore[operator]
    text = str(caught.value)
    assert "Hugging Face" in text
    assert len(text) < 250
    return caught.value.kind, caught.value.retry_after_s


TRANSLATED: list[tuple[Misconduct, str, str]] = [
    # the answer, the kind of error of a read, and the kind of error of a request that may have had an effect
    (400, "rejected", "rejected"),
    (401, "rejected", "rejected"),
    (403, "rejected", "rejected"),
    (402, "rejected", "rejected"),
    (408, "unavailable", "unavailable"),
    (429, "unavailable", "unavailable"),
    (500, "unavailable", "unknown"),
    (503, "unavailable", "unknown"),
    ("closed", "unavailable", "unknown"),
    ("reset", "unavailable", "unknown"),
    ("cut", "unavailable", "unknown"),
]


def test_a_failure_of_the_service_is_translated(hf: HubServer, service: JobService, job_id: JobId) -> None:
    for answer, of_a_look, of_a_start in TRANSLATED:
        hf.fail("inspect", answer)
        assert kind_of(lambda: service.state(job_id)) == (of_a_look, 0.0), answer
        hf.fail("create", answer)
        assert kind_of(lambda: service.start(JOB)) == (of_a_start, 0.0), answer
    for status in (401, 403):
        hf.fail("inspect", status)
        with pytest.raises(JobServiceError, match=f"HTTP {status}.*{LOGIN}"):
            service.state(job_id)


def test_an_answer_that_is_malformed_is_a_failure_of_the_service(
    hf: HubServer, service: JobService, job_id: JobId
) -> None:
    real_create, real_inspect = hf._create, hf._inspect
    answers: list[object] = ["Come back later.", {}, [], None]
    for answer in answers:

        def hidden(request: Request, answer: object = answer) -> Reply:
            real_create(request)
            return Reply(answer)

        hf._create = hidden  # type: ignore[method-assign]
        hf._inspect = lambda _request, _job, answer=answer: Reply(answer)  # type: ignore[method-assign, misc]
        assert kind_of(lambda: service.start(JOB)) == ("unknown", 0.0), answer
        assert kind_of(lambda: service.state(job_id)) == ("unavailable", 0.0), answer
    hf._create, hf._inspect = real_create, real_inspect  # type: ignore[method-assign]


def test_the_pause_that_a_service_asks_for_is_kept(
    hf: HubServer, service: JobService, job_id: JobId, caplog: pytest.LogCaptureFixture
) -> None:
    calls = {"cancel": lambda: service.stop(job_id), "list": lambda: service.find(KEY)}
    cases: list[tuple[dict[str, str], float]] = [
        ({"RateLimit": '"api";r=0;t=187', "RateLimit-Policy": '"fixed window";"api";q=1000;w=300'}, 187.0),
        ({"RateLimit": '"api";r=0;t=187', "Retry-After": "30"}, 187.0),
        ({"RateLimit": '"api";r=950;t=280', "Retry-After": "2"}, 2.0),
        ({"RateLimit": '"api";r=950;t=280'}, 0.0),
        ({"RateLimit": "nonsense", "Retry-After": "30"}, 30.0),
        ({"Retry-After": "30"}, 30.0),
        ({"Retry-After": "Fri, 20 Nov 2026 12:00:00 GMT"}, 0.0),
    ]
    for route, call in calls.items():
        for headers, pause_s in cases:
            hf.fail(route, 429, headers=headers)
            assert kind_of(call) == ("unavailable", pause_s), (route, headers)
        hf.fail(route, 503, headers={"Retry-After": "120"})
        assert kind_of(call) == ("unavailable", 120.0)
        assert hf.count(route) == len(cases) + 1, "the SDK itself does not repeat the request"
    assert caplog.records == []


def test_a_service_that_never_answers_is_given_up(hf: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.backends.hf_client.CALL_LIMIT_S", 0.2)
    hf.fail("whoami", "silent")
    with pytest.raises(BackendError, match=r"cannot be reached: no answer within 0\.2 s"):
        launch("hf", "job.py:main", 1)


def test_an_unreachable_service_is_an_error_that_says_nothing_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for endpoint, kind in (("http://127.0.0.1:9", "unavailable"), ("ftp://x", "rejected")):
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        with pytest.raises(JobServiceError, match="Hugging Face cannot be reached") as caught:
            HFJobsExecutor(namespace="ada").service.start(JOB)
        assert caught.value.kind == kind, endpoint


def test_an_account_that_cannot_be_used_is_refused_with_the_remedy(
    hf: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for namespace in (None, hf.namespace):
        for answer, message in ((401, f"Invalid user token.*{LOGIN}"), (500, "HTTP 500")):
            hf.fail("whoami", answer)
            with pytest.raises(BackendError, match=message):
                HFJobsExecutor(namespace=namespace).service.check_account(None, 60, ())
    with pytest.raises(BackendError, match=r"The secret 'NOT_THERE' is not set\. Jobs get secrets"):
        HFJobsExecutor(secrets=["NOT_THERE"]).service.check_account(None, 60, ())
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(BackendError, match=f"Backend 'hf' needs a Hugging Face token.{LOGIN}"):
        HFJobsExecutor().service.check_account(None, 60, ())
    monkeypatch.setenv("HF_TOKEN", "hf_pässword")
    with pytest.raises(BackendError, match="The Hugging Face token has a character that no token can have") as caught:
        HFJobsExecutor().service.check_account(None, 60, ())
    assert "ssword" not in str(caught.value)
