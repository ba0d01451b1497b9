"""Attached state is saved early, often if saving is cheap, and never for more than its share of the time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diloco.save_schedule import MOST_SHARE, MOST_UPLOAD_SHARE, SaveSchedule


class Time:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.worked += seconds


def schedule_of(time: Time, *, per_round: int = 1, per_period: int = 10, position: int = 0) -> SaveSchedule:
    return SaveSchedule(per_round, per_period, position, clock=lambda: time.now, work_time=lambda: time.worked)


def play(round_s: float, copy_s: float, upload_s: float, rounds: int) -> list[int]:
    """Return the rounds after which state is saved."""
    time, kept = Time(), []
    schedule = schedule_of(time)
    for position in range(1, rounds + 1):
        time.now += round_s
        if schedule.is_due(position):
            with schedule.keeping(position):
                time.work(copy_s)
            schedule.hand_over()
            with schedule.uploading():
                time.now += upload_s
            kept.append(position)
    return kept


def test_the_first_round_is_kept_and_a_cheap_state_every_round_from_then_on() -> None:
    assert play(round_s=1.0, copy_s=0.001, upload_s=0.01, rounds=6) == [1, 2, 3, 4, 5, 6]


def test_a_state_that_costs_two_hundredths_of_a_round_is_kept_every_second_round() -> None:
    assert play(round_s=1.0, copy_s=0.02, upload_s=0.0, rounds=9) == [1, 3, 5, 7, 9]


def test_a_costly_state_is_still_kept_once_in_every_period() -> None:
    assert play(round_s=1.0, copy_s=0.0, upload_s=1000.0, rounds=31) == [1, 10, 20, 30]


@given(st.floats(0.01, 10.0), st.floats(1e-4, 1.0), st.floats(0.0, 5.0))
def test_copies_and_uploads_take_no_more_than_their_share_except_once_in_each_period(
    round_s: float, copy_s: float, upload_s: float
) -> None:
    rounds = 200
    kept = play(round_s, copy_s, upload_s, rounds)
    extra = [position for position in kept if position % 10 and position != 1]
    took_s = rounds * round_s + len(kept) * (copy_s + upload_s)
    assert len(extra) * copy_s <= MOST_SHARE * took_s + copy_s
    assert len(extra) * upload_s <= MOST_UPLOAD_SHARE * took_s + upload_s


def test_nothing_is_kept_while_an_upload_is_under_way_unless_a_period_begins() -> None:
    time = Time()
    schedule = schedule_of(time)
    with schedule.keeping(1):
        pass
    time.now += 1e6
    schedule.hand_over()
    schedule.hand_over()
    with schedule.uploading():
        pass
    assert [position for position in range(2, 12) if schedule.is_due(position)] == [10, 11]
    with schedule.uploading():
        pass
    assert schedule.is_due(2)


def test_with_fragments_a_round_is_one_of_each() -> None:
    schedule = schedule_of(Time(), per_round=4, per_period=40)
    with schedule.keeping(4):
        pass
    assert [position for position in range(5, 12) if schedule.is_due(position)] == [8, 9, 10, 11]


def test_the_first_state_of_a_period_stays_for_a_run_that_continues_from_its_snapshot() -> None:
    schedule = schedule_of(Time())
    firsts = []
    for position in range(1, 24):
        firsts += [position] if schedule.is_first_of_period(position) else []
        with schedule.keeping(position):
            pass
    assert firsts == [1, 10, 20]
