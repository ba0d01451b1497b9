"""The parts that phases and the grace are made of: steps, who is expected, who is gone, and how long to wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from diloco.keys import Keys
from diloco.loop import Loop
from diloco.membership import Identity, Membership
from diloco.patience import PatientStore
from diloco.phase import Phase
from diloco.phase import Plan as StepPlan
from diloco.records import Member, Seal
from diloco.rounds import Pace, Round
from diloco.sealing import Sealing
from executors.store import MemoryStore


def membership(store: MemoryStore) -> Membership:
    patient = PatientStore(store, clock=lambda: 0.0, error_patience_s=1.0)
    return Membership(patient, Keys("run", "main"), Identity(0, 2, 0, "me"))


def test_an_outcome_without_a_claim_ends_nobody() -> None:
    store, keys = MemoryStore(), Keys("run", "main")
    store.put(keys.outcome(1, 0), b"{}")
    assert not membership(store).is_gone(1)
    store.put(keys.claim(1, 0), b"{}")
    assert membership(store).is_gone(1)


def test_ranks_that_train_on_own_no_shard_where_somebody_waits() -> None:
    def member(*, in_phase: bool) -> Member:
        return Member("n", 0, 1.0, "d" * 32, in_phase)

    assert Seal({0: member(in_phase=False), 1: member(in_phase=True)}, "a" * 32, 1).owners == [1]
    assert Seal({0: member(in_phase=False), 1: member(in_phase=False)}, "a" * 32, 1).owners == [0, 1]


@pytest.mark.parametrize(
    ("told_s", "own_s", "lone_s"),
    [
        (100.0, 100.0, 230.0),
        (1e9, 100.0, 2 * 100.0 + 900.0),  # no seal's word holds a replica for ever: half of the round's time is most
        (3600.0, 3600.0, 2 * 3600.0 + 180.0),  # its own phases are that long: the bound is never below two of them
        (0.0, 100.0, 30.0),
    ],
)
def test_the_bound_of_who_sees_nobody(told_s: float, own_s: float, lone_s: float) -> None:
    now = [0.0]
    phase = Phase(StepPlan(), lambda: now[0])
    now[0] = own_s
    phase.step_made()
    members = membership(MemoryStore())
    members.seal = Seal({1: Member("other", 0, 1.0, "d" * 32)}, "a" * 32, 0, phase_s=told_s)
    sealing = Sealing.__new__(Sealing)
    sealing._phase, sealing._members, sealing._pace = phase, members, Pace()
    assert sealing.lone_s == pytest.approx(lone_s)


def stepped(phase: Phase, n: int) -> Phase:
    for _ in range(n):
        phase.step_made()
        phase.left()
    return phase


def test_steps_count_from_the_last_look_that_saw_no_seal_less_the_overlap() -> None:
    phase = stepped(Phase(StepPlan(steps_per_entry=10, overlap_steps=2), lambda: 0.0), 3)
    phase.looked(0.0)
    stepped(phase, 5)
    phase.caught_up(1)
    assert (phase.base, phase.since) == (10, 3)
    phase.looked(0.0)
    stepped(phase, 1)
    phase.caught_up(2)
    assert (phase.base, phase.since) == (30, 0)


def test_a_head_start_is_told_for_one_round() -> None:
    now = [0.0]
    phase = Phase(StepPlan(steps_per_entry=10), lambda: now[0])
    phase.looked(0.0)
    now[0] = 7.0
    phase.caught_up(1)
    assert phase.head_start_s == 7.0
    phase.met(1)
    assert phase.head_start_s == 0.0


def test_the_runs_step_is_that_of_its_newest_entry_and_at_most_a_phase_more() -> None:
    phase = stepped(Phase(StepPlan(steps_per_entry=10, total_steps=25), lambda: 0.0), 14)
    assert phase.inner_step == 10, "others may be in the midst of their phase still"
    phase.caught_up(1)
    assert 10 <= phase.inner_step <= 20
    phase.met(1)
    assert stepped(phase, 9).inner_step == 25
    assert phase.is_at_the_end
    phase.met(1)
    assert phase.inner_step == 25
    phase.met(5)
    assert phase.inner_step == 25


def test_a_last_round_does_not_overlap_with_training() -> None:
    plan = StepPlan(steps_per_entry=10, n_fragments=2, overlap_steps=3, total_steps=40)
    phase = stepped(Phase(plan, lambda: 0.0), 7)
    assert plan.last_entry == 4
    assert [phase.is_time_to_publish(entry) for entry in range(5)] == [True, True, True, False, False]


def test_who_sees_its_anchor_in_the_minority_leaves_the_decision_to_the_others_for_as_long_again() -> None:
    members = membership(MemoryStore())
    sealing = Sealing.__new__(Sealing)
    sealing._phase, sealing._members, sealing._pace = Phase(StepPlan(), lambda: 0.0), members, Pace(grace_s=30.0)
    sealing._rounds_learned = 0
    r = Round(0, 0, 4, 0.0, began_s=0.0)
    assert [sealing._is_over(r, {}, now, grace_factor=1) for now in (29.0, 31.0)] == [False, True]
    assert [sealing._is_over(r, {}, now, grace_factor=2) for now in (31.0, 59.0, 61.0)] == [False, False, True]


def sealed_by(*names: tuple[int, int]) -> Seal:
    return Seal({rank: Member(f"nonce{attempt}", attempt, 1.0, "d" * 32) for rank, attempt in names}, "a" * 32, 0)


def test_an_attempt_that_is_not_older_than_the_named_one_tells_that_a_rank_is_gone() -> None:
    store, keys = MemoryStore(), Keys("run", "main")
    members = membership(store)
    members.seal = sealed_by((1, 1))
    for attempt, outcome in [(0, True), (1, False), (2, False)]:
        store.put(keys.claim(1, attempt), b"{}")
        if outcome:
            store.put(keys.outcome(1, attempt), b"{}")
    assert not members.is_gone(1), "an older one has ended"
    store.put(keys.outcome(1, 2), b"{}")
    assert members.is_gone(1), "a newer one has ended, and the named one is behind it"


def test_when_all_are_gone_their_newest_attempts_are_expected_that_have_not_left() -> None:
    store, keys = MemoryStore(), Keys("run", "main")
    members = membership(store)
    members.seal = sealed_by((0, 0), (1, 0), (2, 0))
    for rank in (0, 1, 2):
        store.put(keys.claim(rank, 0), b"{}")
        store.put(keys.outcome(rank, 0), b"{}")
    assert members.still_expected({}) == set()
    store.put(keys.claim(1, 1), b"{}")
    store.put(keys.claim(2, 1), b"{}")
    store.put(keys.bye(2, 1), b"")
    assert members.still_expected({}) == {1}
    store.put(keys.claim(1, 2), b"{}")
    store.put(keys.outcome(1, 2), b"{}")
    assert members.still_expected({}) == set(), "the newest claim is the rank"


def test_ones_own_rank_never_counts_as_somebody_who_lives() -> None:
    members = membership(MemoryStore())
    members.seal = sealed_by((0, 0))
    assert not members.someone_lives()
    members.seal = sealed_by((0, 0), (1, 0))
    assert members.someone_lives()


def test_before_the_first_seal_the_first_attempts_of_the_launch_are_expected_processes() -> None:
    members = membership(MemoryStore())
    assert members.names(1, 0, "any")
    assert not members.names(1, 1, "any")
    assert not members.names(2, 0, "any"), "a joiner"


def test_who_has_made_no_step_decides_nothing_alone_before_the_first_seal() -> None:
    now = [0.0]
    phase = Phase(StepPlan(), lambda: now[0])
    sealing = Sealing.__new__(Sealing)
    joiner = Identity(2, 2, 0, "joiner")
    patient = PatientStore(MemoryStore(), clock=lambda: 0.0, error_patience_s=1.0)
    sealing._phase, sealing._pace = phase, Pace(grace_s=30.0)
    sealing._members, sealing._rounds_learned = Membership(patient, Keys("run", "main"), joiner), 0
    r = Round(0, 0, 4, 0.0, began_s=0.0, published_s=0.0)
    assert not sealing._is_over(r, {}, 1e6, grace_factor=1)
    now[0] = 10.0
    phase.step_made()
    assert [sealing._is_over(r, {}, at_s, grace_factor=1) for at_s in (49.0, 51.0)] == [False, True]


def test_nothing_is_in_flight_that_was_sent_out_of_phase() -> None:
    def in_flight(**changes: Any) -> bool:
        r = Round(0, 0, 4, 0.0, published=True)
        for name, value in changes.items():
            setattr(r, name, value)
        return bool(Loop.in_flight.fget(SimpleNamespace(_round=r)))  # type: ignore[attr-defined]

    assert in_flight()
    assert not in_flight(is_early=True)
    assert not in_flight(foreign=memoryview(b""))
    assert not in_flight(published=False)
