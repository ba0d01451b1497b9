"""The page that a rank shares with its supervisor."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest

from executors.errors import HangError
from executors.replica import Replica, shared_page
from executors.replica.shared_page import OTHERS, ROW, STEPS, TAIL_BYTES, SharedPage


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(shared_page, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def replica_with(page: SharedPage | None) -> Replica:
    return Replica(0, 1, "run", 0, "memory://page", page=page)


def in_a_child(act: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            act()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_a_supervisor_reads_the_values_that_its_rank_writes() -> None:
    page = SharedPage()
    page.announce(5.0)
    assert page.outcome_fields() == {
        "progress_marks": 0,
        "saved_marks": 0,
        "reached": None,
        "notice": None,
        "stacks": (),
    }

    def rank() -> None:
        replica = replica_with(page)
        assert replica.ending_s == 0.0
        replica.report(step=812, loss=1.0)
        replica.progress(kept=True)
        replica.section("evaluate", 600).__enter__()
        page.write_tail(b"the last line\n")

    in_a_child(rank)
    assert page.outcome_fields() == {
        "progress_marks": 2,
        "saved_marks": 1,
        "reached": {"step": 812.0},
        "notice": None,
        "stacks": (),
    }
    assert (page.section, page.limit_s, page.tail()) == ("evaluate", 600.0, "the last line\n")


def test_a_replica_without_a_page_may_say_the_same_and_nothing_happens() -> None:
    replica = replica_with(None)
    with replica.section("evaluate"), replica.atomic(), replica.unwatched():
        replica.progress(kept=True)
    assert replica.ending_s is None
    assert not replica.is_to_leave(after_round=True)


@pytest.mark.parametrize("limit_s", [0, -1, math.nan])
def test_a_limit_that_is_invalid_is_refused(limit_s: float) -> None:
    with pytest.raises(ValueError, match="section\\('evaluate'\\): limit_s must be more than 0, got"):
        replica_with(None).section("evaluate", limit_s)


def test_a_round_counts_as_kept_when_its_seal_took_this_attempts_work() -> None:
    replica = replica_with(page := SharedPage())
    for entry, verdict in enumerate(["carried", "dropped", "counted"]):
        replica.record_round(0.0, entry=entry, verdict=verdict)
    assert (page.progress_marks, page.saved_marks, page.reached) == (3, 1, {"round": 3.0})


def test_intervals_are_learned_by_section_and_sections_are_no_part_of_those_around(clock: Clock) -> None:
    page = SharedPage()
    clock.now += 500  # the time of the imports
    for _ in range(6):
        page.progress()
        clock.now += 2
        with replica_with(page).section("evaluate"):
            clock.now += 30
            with replica_with(page).unwatched():
                clock.now += 400
            assert page.intervals[1] <= 30
    assert page.since == clock.now - 2
    page.progress()
    assert page.intervals == (7, 2.0)
    page.enter("evaluate")
    assert page.intervals == (6, 30.0)
    following = SharedPage(after=page)
    assert (following.section, following.intervals, following.progress_marks) == (STEPS, (7, 2.0), 0)
    clock.now += 100
    following.progress()
    assert following.intervals == (8, 2.0), "the time before the first mark of an attempt is not an interval"
    following.enter("evaluate")
    assert following.intervals == (6, 30.0)


def test_a_section_that_an_error_ends_teaches_nothing(clock: Clock) -> None:
    page = SharedPage()
    section = replica_with(page).section("evaluate")
    section.__enter__()
    clock.now += 3600
    section.__exit__(HangError, HangError(), None)
    page.enter("evaluate")
    assert page.intervals == (0, 0.0)


def test_sections_of_more_names_than_there_is_room_for_share_one() -> None:
    page = SharedPage()
    for number in range(100):
        page.enter(f"section {number}" + "é" * 100)
    assert page.section == OTHERS
    for _ in range(100):
        page.leave()
    assert page.section == STEPS


def test_a_torn_value_is_not_a_section() -> None:
    page = SharedPage()
    for torn in (math.nan, -5.0, 1e300):
        page._numbers[ROW] = torn
        assert (page.section, page.intervals) == (STEPS, (0, 0.0))


@pytest.mark.parametrize("sizes", [[10], [TAIL_BYTES], [TAIL_BYTES - 3, 10, 10], [3 * TAIL_BYTES + 7, 1], [40_000] * 5])
def test_the_tail_is_the_end_of_the_written_bytes(sizes: list[int]) -> None:
    page, written = SharedPage(), b""
    for number, size in enumerate(sizes):
        data = bytes(65 + (number + at) % 26 for at in range(size))
        page.write_tail(data)
        written += data
    assert page.tail() == written[-TAIL_BYTES:].decode()


def test_the_end_of_a_rank_waits_until_it_leaves_its_atomic_part() -> None:
    replica = replica_with(page := SharedPage())
    outer = replica.atomic()
    outer.__enter__()
    with replica.atomic():
        page.deferred = HangError("no progress")
    assert (page.atomic_since > 0, page.hang_raised_at) == (True, 0)
    with pytest.raises(HangError, match="no progress"):
        outer.__exit__(None, None, None)
    assert (page.atomic_since, page.hang_raised_at > 0) == (0, True)


def test_a_rank_is_killed_after_its_grace_or_sixty_seconds_later_in_an_atomic_part() -> None:
    page = SharedPage()
    assert page.kill_at(100.0, 5.0) == 105.0
    page.atomic_since = 90.0
    assert page.kill_at(100.0, 5.0) == 165.0
    page.atomic_since, page.atomic_left = 0.0, 120.0
    assert page.kill_at(100.0, 5.0) == 125.0
    page.atomic_left = 500.0
    assert page.kill_at(100.0, 5.0) == 165.0


@pytest.mark.parametrize(("notice", "name", "at_once"), [(15, "SIGTERM", True), (2, "SIGINT", True), (0, None, False)])
def test_a_notice_ends_a_replica_at_once_and_a_stop_after_a_round(
    notice: int, name: str | None, at_once: bool, clock: Clock
) -> None:
    replica = replica_with(page := SharedPage())
    assert (replica.ending_s, replica.is_to_leave(after_round=True)) == (None, False)
    page.announce(5e9, notice)
    assert (page.notice, page.is_stopping, page.knows_of_end) == (name, not notice, False)
    assert (replica.is_to_leave(after_round=False), replica.is_to_leave(after_round=True)) == (at_once, True)
    assert not page.knows_of_end
    assert replica.ending_s
    assert page.knows_of_end


def test_a_page_that_is_detached_shares_nothing_more() -> None:
    page = SharedPage()
    page.progress()

    def helper() -> None:
        page.detach()
        page.progress()
        page.write_tail(b"of a helper")
        assert page.progress_marks == 2

    in_a_child(helper)
    assert (page.progress_marks, page.tail()) == (1, "")


def test_a_diagnosis_of_any_length_is_kept_as_far_as_there_is_room() -> None:
    page = SharedPage()
    page.note_hang("é" * 5000)
    assert page.diagnosis.startswith("é" * 1000)
    page.note_hang("short")
    assert page.diagnosis == "short"
