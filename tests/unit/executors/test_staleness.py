"""A process measures by its own clock how long something has not changed."""

from __future__ import annotations

from executors.store.staleness import StalenessTracker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_value_counts_from_the_first_look_that_saw_it_and_a_new_value_counts_again() -> None:
    clock = Clock()
    tracker = StalenessTracker(clock)
    assert tracker.note("rank 0", "beat 1") == 0.0
    clock.now += 5.0
    assert tracker.note("rank 0", "beat 1") == 5.0
    clock.now += 2.0
    assert tracker.unchanged_s("rank 0") == 7.0
    assert tracker.note("rank 0", "beat 2") == 0.0


def test_the_time_between_two_looks_counts_for_no_more_than_the_longest_gap() -> None:
    clock = Clock()
    tracker = StalenessTracker(clock, longest_gap_s=10.0)
    tracker.note("lease")
    clock.now += 3600.0
    assert tracker.unchanged_s("lease") == 10.0
    assert tracker.note("lease") == 10.0, "an outage of an hour counts as one look"
    clock.now += 4.0
    assert tracker.note("lease") == 14.0


def test_each_key_counts_for_itself_and_a_forgotten_one_begins_again() -> None:
    clock = Clock()
    tracker = StalenessTracker(clock)
    tracker.note("a")
    clock.now += 1.0
    tracker.note("b")
    clock.now += 1.0
    assert (tracker.note("a"), tracker.note("b")) == (2.0, 1.0)
    tracker.forget("a")
    tracker.forget("never noted")
    assert (list(tracker), "a" in tracker) == (["b"], False)
    assert tracker.note("a") == 0.0
