"""Tests waiting for a store that fails, on a clock that only the test moves: the duration and the messages."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from executors import patience
from executors.errors import CorruptObjectError, KeyNotFoundError, StoreError, UnsafeStoreError, UnwritableStoreError
from executors.patience import (
    AGAIN_S,
    BRIEF,
    CONTROLLER,
    FIRST_WORD_S,
    FOLLOWER,
    LONGEST_PAUSE_S,
    OUTCOME,
    ROUND,
    SUPERVISOR,
    Outage,
    Waits,
    name_span,
    retry,
)

MINUTE = 60.0


class Refused(StoreError):
    """An error of the store that only a user can repair."""

    refusal = "permission"


class Scene:
    """A process that waits, and the lines that it prints."""

    def __init__(self) -> None:
        self.now = 100.0
        self.said: list[str] = []
        self.waits = Waits(self.said.append, lambda: self.now)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def is_asked(self, error: StoreError, for_s: float) -> str:
        """Return the answer of a store that first fails for a number of seconds."""
        back_at = self.now + for_s

        def act() -> str:
            if self.now < back_at:
                raise error
            return "the answer"

        return retry(act, OUTCOME, "the store", sleep=self.sleep, waits=self.waits)


@pytest.mark.parametrize("error", [StoreError("away"), UnwritableStoreError("full")], ids=["away", "full"])
def test_an_outage_of_a_quarter_of_an_hour_costs_no_work(error: StoreError) -> None:
    scene = Scene()
    assert scene.is_asked(error, 15 * MINUTE) == "the answer"
    for each in (ROUND, SUPERVISOR, CONTROLLER, FOLLOWER):
        assert each.limit_for(error) > 15 * MINUTE, each.process


def test_a_wait_that_has_ended_raises_the_last_failure_and_reports_that_it_was_waited_for() -> None:
    scene = Scene()
    with pytest.raises(StoreError, match="away") as raised:
        scene.is_asked(StoreError("away"), 10 * OUTCOME.seconds)
    assert OUTCOME.seconds <= scene.now - 100.0 < OUTCOME.seconds + 10.0
    assert raised.value.was_waited_for


def test_a_store_that_refuses_is_not_waited_for_as_long_as_one_that_is_away() -> None:
    scene = Scene()
    with pytest.raises(Refused):
        scene.is_asked(Refused("403"), 15 * MINUTE)
    assert OUTCOME.refused_seconds is not None
    assert OUTCOME.refused_seconds <= scene.now - 100.0 < OUTCOME.refused_seconds + 10.0


@pytest.mark.parametrize("kind", [CorruptObjectError, UnsafeStoreError])
def test_a_request_that_waiting_does_not_help_is_repeated_only_a_few_times(kind: type[StoreError]) -> None:
    assert CONTROLLER.limit_for(kind("rotten")) == BRIEF.seconds


def test_a_missing_object_is_an_answer() -> None:
    scene = Scene()
    with pytest.raises(KeyNotFoundError):
        scene.is_asked(KeyNotFoundError("none"), 15 * MINUTE)
    assert scene.now == 100.0
    assert scene.said == []


def test_a_hiccup_is_not_spoken_of() -> None:
    scene = Scene()
    scene.is_asked(StoreError("away"), FIRST_WORD_S / 2)
    assert scene.said == []


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_a_wait_is_reported_after_5_s_then_once_a_minute_and_when_it_ends(
    chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.patience._chance", lambda: chance)
    scene = Scene()
    scene.is_asked(StoreError("Cannot read 'x': away."), 3.5 * AGAIN_S)
    first = r"waiting for the store, (\d+) s so far, 30 min at most: Cannot read .x.: away\."
    found = re.fullmatch(first, scene.said[0])
    assert found is not None
    assert FIRST_WORD_S <= int(found[1]) <= FIRST_WORD_S + LONGEST_PAUSE_S
    assert len(scene.said) == 1 + 3 + 1
    assert scene.said[-1].startswith("the wait for the store has ended after ")


def test_a_process_that_waits_for_several_things_prints_one_line_a_minute() -> None:
    scene = Scene()
    outages = [Outage(ROUND, f"thing {number}", waits=scene.waits) for number in range(8)]
    for _ in range(int(5 * AGAIN_S)):
        scene.now += 1
        for outage in outages:
            assert outage.tolerates(StoreError("away"))
    assert len(scene.said) == 5


def test_a_request_without_an_answer_is_reported_by_the_process_that_looks() -> None:
    scene = Scene()
    with scene.waits.asking("s3://bucket/runs"):
        scene.now += FIRST_WORD_S
        scene.waits.look()
    assert scene.said == ["waiting for s3://bucket/runs, 5 s so far."]


def test_time_with_something_else_to_do_does_not_count_to_the_patience() -> None:
    scene = Scene()
    outage = Outage(BRIEF, waits=scene.waits)
    for _ in range(100):
        scene.now += 1
        outage.restart()
        assert outage.tolerates(StoreError("away"))
    scene.now += BRIEF.seconds
    assert not outage.tolerates(StoreError("away"))


def test_a_backend_that_fails_is_waited_for_as_one_that_refuses() -> None:
    from executors.errors import BackendError

    assert CONTROLLER.limit_for(BackendError("down")) == CONTROLLER.refused_seconds


def test_tests_shorten_every_wait_by_one_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SCALE", 0.01)
    assert [each.limit_s for each in patience.TABLE] == pytest.approx([each.seconds / 100 for each in patience.TABLE])
    assert replace(ROUND, seconds=60.0).limit_for(StoreError("away")) == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (90.0, "90 s"), (120.0, "2 min"), (3600.0, "1 h"), (7 * 86400.0, "7 days"), (86400.0, "1 day")],
)
def test_the_length_of_a_wait_is_shown_in_one_unit(seconds: float, words: str) -> None:
    assert name_span(seconds) == words
