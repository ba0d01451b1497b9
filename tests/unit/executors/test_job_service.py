"""Tests requests to a service: their number, their repetition, calls that never return, old records, and texts about
ends.
"""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.fake_jobs import FakeJobs, Machines

from executors.backends.hf_jobs import HFJobs, HFJobsExecutor
from executors.backends.jobs import sdk
from executors.backends.jobs.executor import JobExecutor
from executors.backends.jobs.job_outcomes import STILL_S, explain_end, is_stale
from executors.backends.jobs.job_state_poller import JobStatePoller
from executors.backends.jobs.sdk import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    LazyModule,
    PollThrottle,
    TokenBucket,
    call_with_timeout,
)
from executors.backends.jobs.service import FIRST_PAUSE_S as FIRST_RETRY_S
from executors.backends.jobs.service import (
    LONGEST_PATIENCE_S,
    PATIENCE_S,
    TRIES,
    JobId,
    JobKey,
    JobService,
    JobServiceError,
    JobSpec,
    JobState,
    common_env,
    retrying,
)
from executors.backends.jobs.service import LONGEST_PAUSE_S as LONGEST_RETRY_S
from executors.backends.kubernetes import KubernetesJobs
from executors.backends.modal import ModalExecutor, ModalJobs
from executors.backends.slurm import SlurmJobs
from executors.errors import MissingDependencyError
from executors.store.staleness import StalenessTracker
from executors.testing import eventually


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_state_that_is_read_repeatedly_is_requested_at_once_and_then_less_and_less_often() -> None:
    clock = Clock()
    throttle = PollThrottle[str](clock)
    times = []
    for _ in range(2000):
        if throttle.due(["job"]):
            times.append(clock.now)
        clock.now += 0.01
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0
    assert pauses[0] == pytest.approx(FIRST_PAUSE_S, abs=0.02)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.02)
    throttle.forget("job")
    assert throttle.due(["job"]), "a job with an event is requested at once"
    assert not throttle.due(["job"])


def test_a_small_budget_is_spent_on_the_jobs_that_have_waited_longest() -> None:
    clock = Clock()
    throttle, budget = PollThrottle[int](clock), TokenBucket(1.0, 1, clock)
    asked = []
    for _ in range(8):
        asked += throttle.due(range(4), lambda _: budget.take())
        clock.now += 1.0
    assert asked == [0, 1, 2, 3] * 2


def test_a_budget_fills_again_and_never_holds_more_than_at_the_beginning() -> None:
    clock = Clock()
    budget = TokenBucket(5.0, 150, clock)
    for clock.now, n in ((0.0, 150), (1.0, 5), (60.0, 150)):
        assert [budget.take() for _ in range(n + 1)] == [True] * n + [False]


class Service(FakeJobs):
    """A service with jobs that another process started. It reports only their state."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.requests: list[float] = []
        self.answers: dict[JobKey, JobState] = {}

    def verify(self, job_id: JobId, key: JobKey) -> JobId:
        self.requests.append(self.clock.now)
        return job_id

    def state(self, job_id: JobId) -> JobState:
        self.requests.append(self.clock.now)
        return JobState(False, message=f"look {len(self.requests)}")


class ListingService(Service):
    """A service whose list shows only every second job."""

    def states(self, jobs: Mapping[JobKey, JobId]) -> dict[JobKey, JobState]:
        self.requests.append(self.clock.now)
        return {key: JobState(False, message="listed") for key in jobs if key.rank % 2 == 0}


def keys(n: int) -> dict[JobKey, JobId]:
    return {key: {"id": str(key.rank)} for key in (JobKey("memory://", "otter", rank, 0) for rank in range(n))}


def watched(service_class: type[Service], n: int, limit_s: float, *, together: bool) -> list[float]:
    """Return the times at which the service gets a request from a process that watches n jobs."""
    clock = Clock()
    service = service_class(clock)
    states = JobStatePoller(service, clock)
    while clock.now < limit_s:
        for jobs in [keys(n)] if together else [{key: job} for key, job in keys(n).items()]:
            states.of(jobs)
        clock.now += 0.5
    return service.requests


def most_in(times: list[float], window_s: float) -> int:
    return max(sum(begin <= time < begin + window_s for time in times) for begin in times)


def test_a_service_that_lists_jobs_gets_at_most_sixty_requests_a_minute_from_a_run_of_any_size() -> None:
    for n in (1, 8, 64):
        times = watched(ListingService, n, 300, together=True)
        assert most_in(times, 60) <= 60, n
        assert len(times) >= 300 / LONGEST_PAUSE_S, n


def test_a_service_that_lists_no_jobs_gets_fewer_requests_than_a_free_account_may_make() -> None:
    for n, together in ((1, True), (8, True), (64, True), (64, False), (200, True)):
        assert most_in(watched(Service, n, 300, together=together), 300) < 600, n


def test_a_job_that_a_look_does_not_ask_about_keeps_its_last_state() -> None:
    clock = Clock()
    states = JobStatePoller(ListingService(clock), clock)
    for _ in range(10):
        known = states.of(keys(4))
        clock.now += 0.01
        assert len(known) == 4
        assert [known[key].message for key in keys(4) if key.rank % 2 == 0] == ["listed"] * 2
        assert all(known[key].message.startswith("look") for key in keys(4) if key.rank % 2 == 1)


def test_a_job_that_a_list_shows_needs_no_request_of_its_own() -> None:
    clock = Clock()
    service = ListingService(clock)
    states = JobStatePoller(service, clock)
    listed = {key: job for key, job in keys(64).items() if key.rank % 2 == 0}
    assert len(states.of(listed)) == 32
    for key, job in listed.items():
        assert states.verified(key, job) == job
    assert len(service.requests) == 1


def test_a_request_for_another_job_is_made_at_once() -> None:
    clock = Clock()
    service = Service(clock)
    states = JobStatePoller(service, clock)
    (key,) = keys(1)
    for job_id in ("first", "second"):
        before = len(service.requests)
        states.of({key: {"id": job_id}})
        assert len(service.requests) == before + 2, (
            "two requests are made: one verifies the job, and one reads its state"
        )


def test_a_call_with_a_time_limit_passes_on_the_result_and_the_error() -> None:
    assert call_with_timeout(60, lambda: [1]) == [1]
    assert call_with_timeout(60, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        call_with_timeout(60, lambda: 1 / 0)


def test_a_call_that_never_returns_is_left_alone() -> None:
    hold = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0.01 s"):
        call_with_timeout(0.01, hold.wait)
    hold.set()


def test_a_module_is_imported_when_it_is_used_and_its_absence_has_a_message() -> None:
    assert LazyModule("json", "Nothing needs it.", "s3").loads("1") == 1
    missing = LazyModule("nowhere_to_be_found", "Backend 'it' needs it.", "s3")
    with pytest.raises(MissingDependencyError, match=r"Backend 'it' needs it\. Install it with: pip install '?boto3"):
        missing.anything  # noqa: B018


def pauses_before_giving_up(error: JobServiceError, patience_s: float = PATIENCE_S) -> list[float]:
    """Return the pauses between the tries if each try ends with this error."""
    slept: list[float] = []

    def fails() -> None:
        raise error

    with pytest.raises(JobServiceError) as raised:
        retrying(slept.append, patience_s=patience_s)(fails)
    assert raised.value is error
    return slept


def test_pauses_grow_to_a_limit_and_a_rejected_call_is_not_repeated() -> None:
    for kind in ("unavailable", "unknown"):
        slept = pauses_before_giving_up(JobServiceError("later", kind))
        assert len(slept) == TRIES - 1
        assert slept[0] < slept[-1] <= LONGEST_RETRY_S + FIRST_RETRY_S
    assert pauses_before_giving_up(JobServiceError("never", "rejected")) == []


def test_a_pause_that_a_service_asks_for_is_kept_unless_it_is_too_long() -> None:
    for asked_s, patience_s, n_pauses in (
        (25.0, PATIENCE_S, 2),
        (187.0, PATIENCE_S, 0),
        (187.0, LONGEST_PATIENCE_S, 1),
        (LONGEST_PATIENCE_S, LONGEST_PATIENCE_S, 1),
        (10.0, LONGEST_PATIENCE_S, TRIES - 1),
        (86_400.0, LONGEST_PATIENCE_S, 0),
    ):
        slept = pauses_before_giving_up(JobServiceError("later", "unavailable", retry_after_s=asked_s), patience_s)
        assert len(slept) == n_pauses, asked_s
        assert all(asked_s <= pause <= asked_s + FIRST_RETRY_S for pause in slept), asked_s


def test_a_long_pause_is_reported_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.backends.jobs.service._reported_until", 0.0)
    error = JobServiceError("Cloud: too many requests (HTTP 429).", "unavailable", retry_after_s=187.0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: pauses_before_giving_up(error, LONGEST_PATIENCE_S), range(8)))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("replicas: Cloud: too many requests (HTTP 429). Asking again in 187 s.")


def test_calls_that_never_return_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdk, "MAX_UNANSWERED", 3)
    hold = threading.Event()
    for _ in range(3):
        with pytest.raises(TimeoutError, match="no answer within"):
            call_with_timeout(0.01, hold.wait)
    with pytest.raises(TimeoutError, match="3 earlier requests have had no answer yet"):
        call_with_timeout(60, lambda: 1)
    hold.set()
    eventually(lambda: all(call.done() for call in sdk._unanswered))
    assert call_with_timeout(60, lambda: 1) == 1


def test_a_beat_of_a_clock_that_is_half_an_hour_behind_is_not_taken_for_an_old_one() -> None:
    assert not is_stale(StalenessTracker(), "0000/0", time.time() - 1800, STILL_S)


def test_a_heartbeat_is_not_old_while_newer_ones_follow_whatever_the_clock_of_its_replica() -> None:
    now = 0.0
    beats = StalenessTracker(lambda: now)
    assert not is_stale(beats, "0000/0", None, STILL_S)
    for now in (10.0, 20.0):
        assert not is_stale(beats, "0000/0", now, STILL_S), "a heartbeat of 1970 is new if another one follows"
    now += STILL_S
    assert is_stale(beats, "0000/0", 20.0, STILL_S)


def test_every_end_without_an_outcome_has_a_reason_and_a_sentence() -> None:
    ran, never_ran = True, False
    for state, has_started, output, reason, sentence in [
        (JobState(True, "timeout"), ran, "", "timeout", "R ran into its time limit of 60 s."),
        (
            JobState(True, "oom", 137), ran, "", "oom",
            "R was killed: most likely out of memory (SIGKILL, and not by Cloud).",
        ),
        (JobState(True, "oom", 137, "OOM."), ran, "", "oom", "R was killed: out of memory. Cloud says: OOM."),
        (JobState(True, "preempted"), ran, "", "preempted", "R was preempted: Cloud took its machine back."),
        (JobState(True, "cancelled"), ran, "", "cancelled", "R was cancelled at Cloud, not by `replicas`."),
        (JobState(True, "start_failed", None, "no"), ran, "", "start_failed", "R could not run. Cloud says: no."),
        (JobState(True, None, 143), ran, "", "signal", "R was ended by SIGTERM (exit code 143)."),
        (
            JobState(True, None, 1), never_ran, "a\nno pip.\n", "start_failed",
            "R ended with exit code 1 before its entrypoint was reached. Its log ends: no pip.",
        ),
        (
            JobState(True), never_ran, "", "start_failed",
            "R ended with an unknown exit code before its entrypoint was reached.",
        ),
        (
            JobState(True, None, 0, "Done"), ran, "a", "no_result",
            "R ended by itself with exit code 0, before its entrypoint returned a result. Cloud says: Done.",
        ),
    ]:  # fmt: skip
        assert explain_end("R", "Cloud", state, 60, has_started, output) == (reason, sentence)
    sentence = "R ran into the time limit of Cloud."
    assert explain_end("R", "Cloud", JobState(True, "timeout"), None, ran, "") == ("timeout", sentence), (
        "the service has its own time limit"
    )


def test_the_ranks_of_an_attempt_are_a_group_whose_name_fits_everywhere() -> None:
    for run_id, attempt in itertools.product(("otter", "o" * 40), (0, 99, 10_000)):
        ranks = {JobKey("s3://b/p", run_id, rank, attempt).group for rank in range(3)}
        spares = {JobKey("s3://b/p", run_id, rank, attempt, is_spare=True).group for rank in range(3)}
        elsewhere = {JobKey("s3://b/q", run_id, 0, attempt).group, JobKey("s3://b/p", run_id, 0, attempt + 1).group}
        elsewhere.add(JobKey("s3://b/p", run_id, 0, attempt, launched_at=1.8e9).group)
        assert [len(names) for names in (ranks, spares, ranks | spares | elsewhere)] == [1, 1, 5]
        assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]{0,52}", name) for name in ranks | spares)
    assert JobKey("s3://b/p", "otter", 0, 2).group == f"otter-{JobKey('s3://b/p', 'otter', 0, 2).name.split('-')[1]}-a2"


def test_jobs_of_a_group_share_everything_except_the_rank() -> None:
    def job(rank: int, **env: str) -> JobSpec:
        return JobSpec(JobKey("s3://b/p", "otter", rank, 0), (), (), {"REPLICA_RANK": str(rank), **env}, {})

    assert common_env([job(0, X="1"), job(3, X="1")]) == {"X": "1"}
    for other in (job(1), job(1, X="2"), job(1, X="1", Y="2")):
        with pytest.raises(ValueError, match=r"differ in '(X|Y)'"):
            common_env([job(0, X="1"), other])


def test_a_service_without_a_log_is_refused_when_its_executor_is_made(tmp_path: Path) -> None:
    class Mute(FakeJobs):
        logs, open_log = JobService.logs, JobService.open_log

    class MuteExecutor(JobExecutor):
        backend_name = "mute"

    with pytest.raises(TypeError, match=r"Mute can read no logs\. Define logs\(\) or open_log\(\)"):
        MuteExecutor(Mute(Machines(tmp_path)))


def test_a_service_knows_the_python_of_its_default_and_of_dockers_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    here = "{}.{}".format(*sys.version_info)
    for service, known in [
        (ModalJobs(), here),
        (ModalJobs(python_version="3.99"), "3.99"),
        (ModalJobs(image="python:3.98"), "3.98"),
        (ModalJobs(image="me/image"), None),
        (HFJobs(), here),
        (HFJobs(image="python:3.98-slim"), "3.98"),
        (KubernetesJobs(), here),
        (KubernetesJobs(image="docker.io/library/python:3.9.1"), "3.9"),
        (KubernetesJobs(image="me/python:3.9"), None),
        (SlurmJobs(), here),
        (SlurmJobs(python="/shared/venv/bin/python"), None),
    ]:
        assert service.python_of_replicas == known, service


@pytest.mark.parametrize(
    ("executor", "option", "advice"),
    [
        (ModalExecutor, {"python_version": "3.99"}, "python_version=3.11"),
        (ModalExecutor, {"image": "python:3.99"}, "image=python:3.11"),
        (HFJobsExecutor, {"image": "python:3.99"}, "image=python:3.11"),
    ],
)
def test_a_process_with_another_python_gets_the_option_that_gives_replicas_the_right_one(
    executor: type[ModalExecutor | HFJobsExecutor], option: dict[str, Any], advice: str
) -> None:
    with pytest.raises(ValueError, match=rf"by Python 3\.11, and .* would run 3\.99\. Give --option {advice}, or"):
        executor(**option).check_pickle("3.11")
