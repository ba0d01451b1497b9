"""A replica notices a seal soon after it is there, with fewer looks than growing pauses need."""

from __future__ import annotations

import random
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.rendezvous.arrival_forecast import ArrivalForecast
from diloco.rendezvous.retrying_store import backoff
from diloco.rendezvous.round_runner import _Wait

ANSWER_S = 0.1


class Clock:
    """A clock and a store: an object is seen if it is there in the middle of an answer."""

    def __init__(self) -> None:
        self.now = 0.0

    def look(self, there_at: float) -> bool:
        seen_at = self.now + ANSWER_S / 2
        self.now += ANSWER_S
        return there_at <= seen_at


def waited(forecast: ArrivalForecast, there_s: float, rng: random.Random) -> tuple[float, int]:
    """Return the seconds from the object's arrival to the look that sees it, and the number of looks."""
    clock = Clock()
    context: Any = SimpleNamespace(
        pauses=lambda: backoff(rng), store=SimpleNamespace(answer_s=ANSWER_S), clock=lambda: clock.now
    )
    wait, looks = _Wait(context, forecast, "seal", 0.0), 1
    while True:
        wait.looked_at = clock.now
        if clock.look(there_s):
            wait.end()
            return wait.looked_at + ANSWER_S / 2 - there_s, looks
        clock.now += wait.pause_s()
        looks += 1


@pytest.mark.parametrize("usual_s", [0.5, 1.2, 3.0, 8.0, 40.0])
@pytest.mark.parametrize("spread", [0.0, 0.02, 0.1])
def test_an_object_is_noticed_within_a_latency_on_average_and_with_fewer_looks(usual_s: float, spread: float) -> None:
    rng = random.Random(1)
    times = [usual_s * rng.uniform(1 - spread, 1 + spread) for _ in range(200)]
    learned = ArrivalForecast()
    new = [waited(learned, there_s, rng) for there_s in times][4:]
    old = [waited(ArrivalForecast(), there_s, rng) for there_s in times][4:]
    late_s, looks = fmean(delay_s for delay_s, _ in new), fmean(n for _, n in new)
    if usual_s * spread <= ANSWER_S:  # else the time cannot be predicted to a latency
        assert late_s <= ANSWER_S
    assert late_s <= max(ANSWER_S, fmean(delay_s for delay_s, _ in old))
    assert looks <= fmean(n for _, n in old)


def test_an_object_that_comes_ever_earlier_is_not_waited_for_as_long_as_before() -> None:
    rng, forecast = random.Random(2), ArrivalForecast()
    for _ in range(10):
        waited(forecast, 8.0, rng)
    delays = [waited(forecast, 0.5, rng)[0] for _ in range(60)]
    assert max(delays) <= 1.0 + 2 * ANSWER_S, "no pause is longer than a second"
    assert fmean(delays[-20:]) <= ANSWER_S


def test_nothing_is_expected_without_an_earlier_round() -> None:
    assert ArrivalForecast().expected_s("seal") == 0.0
