"""How often a service is asked, and asked again; calls that never return; sentences on how a job ended."""

from __future__ import annotations

import itertools
import threading

import pytest

from executors.backends.jobs.executor import explain
from executors.backends.jobs.sdk import FIRST_PAUSE_S, LONGEST_PAUSE_S, LazyModule, PollThrottle, call_with_timeout
from executors.backends.jobs.service import FIRST_PAUSE_S as FIRST_RETRY_S
from executors.backends.jobs.service import LONGEST_PAUSE_S as LONGEST_RETRY_S
from executors.backends.jobs.service import LONGEST_RETRY_AFTER_S, TRIES, JobServiceError, JobState, retrying
from executors.errors import MissingDependencyError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked_in(seconds: float, n_jobs: int, every_s: float = 0.05) -> int:
    """Return how often jobs are asked about that are polled all the time."""
    clock = Clock()
    throttle = PollThrottle(clock)
    asked = 0
    while clock.now < seconds:
        asked += sum(throttle.is_due(f"job {number}") for number in range(n_jobs))
        clock.now += every_s
    return asked


def test_a_job_is_asked_about_at_once_and_then_ever_less_often() -> None:
    clock = Clock()
    throttle = PollThrottle(clock)
    times = []
    for _ in range(2000):
        if throttle.is_due("job"):
            times.append(clock.now)
        clock.now += 0.01
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0
    assert pauses[0] == pytest.approx(FIRST_PAUSE_S, abs=0.02)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.02)
    throttle.forget("job")
    assert throttle.is_due("job"), "something happened to it"
    assert not throttle.is_due("job")


def test_a_run_of_any_size_stays_below_what_a_free_account_may_ask() -> None:
    for n_jobs in (1, 8, 64):
        assert asked_in(600, n_jobs) - asked_in(300, n_jobs) <= 600, n_jobs


def test_a_call_returns_what_it_returns_and_raises_what_it_raises() -> None:
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
    assert LazyModule("json", "not needed").loads("1") == 1
    missing = LazyModule("nowhere_to_be_found", "Install it.")
    with pytest.raises(MissingDependencyError, match=r"Install it\."):
        missing.anything  # noqa: B018


def pauses_before_giving_up(error: JobServiceError) -> list[float]:
    """Return the pauses between the tries, when every one ends so."""
    slept: list[float] = []

    def fails() -> None:
        raise error

    with pytest.raises(JobServiceError) as raised:
        retrying(slept.append)(fails)
    assert raised.value is error
    return slept


def test_pauses_grow_to_a_limit_and_what_was_rejected_is_not_asked_again() -> None:
    for kind in ("unavailable", "unknown"):
        slept = pauses_before_giving_up(JobServiceError("later", kind))
        assert len(slept) == TRIES - 1
        assert slept[0] < slept[-1] <= LONGEST_RETRY_S + FIRST_RETRY_S
    assert pauses_before_giving_up(JobServiceError("never", "rejected")) == []


def test_a_service_is_left_alone_as_long_as_it_says_but_not_for_ever() -> None:
    for asked_s, least_s in ((30.0, 30.0), (86_400.0, LONGEST_RETRY_AFTER_S)):
        slept = pauses_before_giving_up(JobServiceError("later", "unavailable", retry_after_s=asked_s))
        assert all(least_s <= pause <= least_s + FIRST_RETRY_S for pause in slept), asked_s


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
        assert explain("R", "Cloud", state, 60, has_started, output) == (reason, sentence)
