"""How often a vendor is asked, on a clock of the tests; and calls that never return."""

from __future__ import annotations

import itertools
import threading

import pytest

from executors.bounded import within
from executors.pace import FIRST_PAUSE_S, LONGEST_PAUSE_S, Pace


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def asked_in(seconds: float, n_jobs: int, every_s: float = 0.05) -> int:
    """Return how often jobs are asked about that are polled all the time."""
    clock = Clock()
    pace = Pace(clock)
    asked = 0
    while clock.now < seconds:
        asked += sum(pace.is_due(f"job {number}") for number in range(n_jobs))
        clock.now += every_s
    return asked


def test_a_job_is_asked_about_at_once_and_then_ever_less_often() -> None:
    clock = Clock()
    pace = Pace(clock)
    times = []
    for _ in range(2000):
        if pace.is_due("job"):
            times.append(clock.now)
        clock.now += 0.01
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert times[0] == 0
    assert pauses[0] == pytest.approx(FIRST_PAUSE_S, abs=0.02)
    assert pauses == sorted(pauses)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.02)


@pytest.mark.parametrize("n_jobs", [1, 8, 64])
def test_a_run_of_any_size_stays_below_what_a_free_account_may_ask(n_jobs: int) -> None:
    before, after = asked_in(300, n_jobs), asked_in(600, n_jobs)
    assert after - before <= 600


def test_a_job_to_which_something_happened_is_asked_about_at_once() -> None:
    pace = Pace(Clock())
    assert pace.is_due("job")
    assert not pace.is_due("job")
    pace.forget("job")
    assert pace.is_due("job")


def test_a_call_returns_what_it_returns_and_raises_what_it_raises() -> None:
    assert within(60, lambda: [1]) == [1]
    assert within(60, lambda: None) is None
    with pytest.raises(ZeroDivisionError):
        within(60, lambda: 1 / 0)


def test_a_call_that_never_returns_is_left_to_itself() -> None:
    hold = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0.01 s"):
        within(0.01, hold.wait)
    hold.set()
