"""Each rule about phases and the grace undone in turn: schedules in phases must notice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import test_rendezvous_phases as scenes
from rendezvous_simulation import Simulation
from simulated_plan import Plan
from test_rendezvous_phases import SCENES, useful_share

from diloco.membership import Membership
from diloco.phase import Phase
from diloco.records import Contribution, Seal
from diloco.rendezvous import Rendezvous
from diloco.rounds import Round
from diloco.sealing import Sealing
from diloco.work import Settled

Patch = Callable[[pytest.MonkeyPatch], None]
Notices = Callable[[pytest.MonkeyPatch], None]


def who_is_not_expected_counts_its_own_waiting(patch: pytest.MonkeyPatch) -> None:
    is_over = Sealing._is_over

    def mutant(self: Sealing, r: Round, good: Mapping[int, Contribution], now: float, *, grace_factor: int) -> bool:
        if r.grace_from_s is None:
            r.grace_from_s = r.published_s if r.began_s is None else r.began_s
        return is_over(self, r, good, now, grace_factor=grace_factor)

    patch.setattr(Sealing, "_is_over", mutant)


def who_was_late_waits_for_the_next_round_at_once(patch: pytest.MonkeyPatch) -> None:
    """The first rule: publish what there is and wait, while the others are in the midst of their phase."""

    def mutant(self: Rendezvous) -> list[Any]:
        adopted = []
        while not self._plan.is_over(self.position) and self._is_behind():
            self._publish()
            if (entry := self._adopt()) is not None:
                adopted.append(entry)
            adopted += self._adopt_sealed()
        return adopted

    patch.setattr(Rendezvous, "_fall_in", mutant)


def nothing_bounds_the_wait_for_who_is_expected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sealing, "lone_s", 1e9)


def one_presents_oneself_when_an_expected_contribution_is_seen(patch: pytest.MonkeyPatch) -> None:
    present = Rendezvous._present

    def mutant(self: Rendezvous) -> None:
        r = self._current()
        for rank in self._members.expected:
            self._sealing.look_at_contribution(r, rank)
        if any(self._members.names(rank, head.attempt, head.nonce) for rank, (head, _) in r.seen.items()):
            present(self)
        else:
            self.phase.looked(self._clock())

    patch.setattr(Rendezvous, "_present", mutant)


def nobody_has_a_head_start(patch: pytest.MonkeyPatch) -> None:
    caught_up = Phase.caught_up

    def mutant(self: Phase, n_entries: int) -> None:
        caught_up(self, n_entries)
        self.head_start_s = 0.0

    patch.setattr(Phase, "caught_up", mutant)


def what_cannot_be_read_back_was_nothing(patch: pytest.MonkeyPatch) -> None:
    settle = Rendezvous._settle

    def mutant(self: Rendezvous, r: Round, seal: Seal) -> Any:
        settled, part = settle(self, r, seal)
        is_lost = r.is_early and settled is Settled.DROPPED and self._members.seal is not None
        return (Settled.COUNTED, []) if is_lost and self._log.settle(seal) is Settled.COUNTED else (settled, part)

    patch.setattr(Rendezvous, "_settle", mutant)


def ranks_seal_and_not_processes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "names", lambda self, rank, attempt, nonce: rank in self.expected)


def a_newer_attempt_does_not_end_the_older_one(patch: pytest.MonkeyPatch) -> None:
    """After a resume without outcomes everybody is out of phase."""
    patch.setattr(Membership, "lives", lambda self, rank: not self._has_left(rank, self.expected[rank]))


def somebody_always_lives(patch: pytest.MonkeyPatch) -> None:
    """After a resume of the whole run everybody is out of phase."""
    patch.setattr(Membership, "someone_lives", lambda self: True)


def first_attempts_are_out_of_phase_before_the_first_seal(patch: pytest.MonkeyPatch) -> None:
    names_me = Membership.names_me.fget  # type: ignore[attr-defined]
    patch.setattr(Membership, "names_me", property(lambda self: self.seal is not None and names_me(self)))


def a_newer_attempt_begins_the_grace_for_its_older_one(patch: pytest.MonkeyPatch) -> None:
    is_over = Sealing._is_over

    def mutant(self: Sealing, r: Round, good: Mapping[int, Contribution], now: float, *, grace_factor: int) -> bool:
        if r.grace_from_s is None and any(
            rank in self._members.expected and head.in_phase for rank, head in good.items()
        ):
            r.grace_from_s = now
        return is_over(self, r, good, now, grace_factor=grace_factor)

    patch.setattr(Sealing, "_is_over", mutant)


def work_that_was_presented_counts_again(patch: pytest.MonkeyPatch) -> None:
    settle = Rendezvous._settle

    def mutant(self: Rendezvous, r: Round, seal: Seal) -> Any:
        settled, part = settle(self, r, seal)
        return (Settled.COUNTED, []) if part else (settled, part)

    patch.setattr(Rendezvous, "_settle", mutant)


def steps_made_since_are_lost_at_the_adoption(patch: pytest.MonkeyPatch) -> None:
    settle = Rendezvous._settle

    def mutant(self: Rendezvous, r: Round, seal: Seal) -> Any:
        settled, part = settle(self, r, seal)
        return (settled, None) if settled is Settled.COUNTED else (settled, part)

    patch.setattr(Rendezvous, "_settle", mutant)


def a_presence_weighs_as_much_as_work(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rendezvous, "_early_weight", lambda self, r: 1.0)


def the_bound_knows_no_phase(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sealing, "lone_s", property(lambda self: self._most_grace_s))


def the_grace_begins_with_the_first_look(patch: pytest.MonkeyPatch) -> None:
    """Whoever lets another look first begins to count when it looks itself."""
    is_over = Sealing._is_over

    def mutant(self: Sealing, r: Round, good: Mapping[int, Contribution], now: float, *, grace_factor: int) -> bool:
        if r.grace_from_s is not None:
            return now - r.grace_from_s >= self._grace_s(r) * grace_factor
        began_s, r.began_s = r.began_s, now
        try:
            return is_over(self, r, good, now, grace_factor=grace_factor)
        finally:
            r.began_s = began_s

    patch.setattr(Sealing, "_is_over", mutant)


def nobody_looks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rendezvous, "_look_around", lambda self: [])


def who_presents_itself_says_nothing_of_its_phase(patch: pytest.MonkeyPatch) -> None:
    """The largest of its members' phases is in a seal, and those of them who presented themselves said 0."""
    data = Seal.data

    def mutant(self: Seal) -> Any:
        waits = any(member.in_phase for member in self.members.values())
        return data(self if waits else replace(self, phase_s=0.0))

    patch.setattr(Seal, "data", mutant)


def a_phase_lasts_as_long_as_was_trained_so_far(patch: pytest.MonkeyPatch) -> None:
    def seconds(self: Phase) -> float:
        return self._trained_s if self._steps else self._known_s

    patch.setattr(Phase, "seconds", property(seconds))


def a_learned_grace_is_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("diloco.sealing.LEAST_GRACE_PHASES", 0.0)
    patch.setattr("diloco.sealing.LEAST_GRACE", 0.0)


def who_leaves_out_of_phase_waits(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: Rendezvous) -> None:
        if self._round is not None and self._round.published:
            self._adopt()
        self.say_bye()

    patch.setattr(Rendezvous, "leave", mutant)


def steps_that_were_made_count_and_not_the_runs(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: Phase, n_entries: int) -> None:
        self.base += self.since
        self._begin_measuring()

    patch.setattr(Phase, "_advance", mutant)


def one_entry_is_adopted_at_a_look(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: Rendezvous) -> list[Any]:
        if self._unsealed == self.position or self._log.seal(self.position) is None:
            return []
        entry = self._adopt()
        return [] if entry is None else [entry]

    patch.setattr(Rendezvous, "_adopt_sealed", mutant)
    patch.setattr("diloco.rendezvous.PRESENTATIONS", 1)


def nothing_ends_a_wait_out_of_phase(patch: pytest.MonkeyPatch) -> None:
    check_time = Rendezvous._check_time

    def mutant(self: Rendezvous, r: Round) -> None:
        if not self.phase.is_out:
            check_time(self, r)

    patch.setattr(Rendezvous, "_check_time", mutant)


def schedules(patch: pytest.MonkeyPatch) -> None:
    """Schedules in phases, and a scene with many kills."""
    for seed in range(150):
        Simulation(Plan.phased(seed)).run()
    plan, model = SCENES["a kill every 60 s, phase 100"]
    simulation = Simulation(plan)
    simulation.run()
    assert useful_share(simulation) >= model - 0.03
    plan, model = SCENES["three die"]
    simulation = Simulation(plan)
    simulation.run()
    assert useful_share(simulation) >= model - 0.03


def resumed(patch: pytest.MonkeyPatch) -> None:
    for leaves_outcome in (True, False):
        scenes.a_run_that_is_resumed_as_a_whole_is_in_phase_from_its_start(leaves_outcome=leaves_outcome)


def alone(scene: Callable[[], None]) -> Notices:
    return lambda patch: scene()


MUTANTS: dict[Patch, Notices] = {
    who_is_not_expected_counts_its_own_waiting: schedules,
    who_was_late_waits_for_the_next_round_at_once: schedules,
    nothing_bounds_the_wait_for_who_is_expected: alone(scenes.who_waits_for_those_who_vanished_goes_on_alone),
    one_presents_oneself_when_an_expected_contribution_is_seen: schedules,
    nobody_has_a_head_start: schedules,
    what_cannot_be_read_back_was_nothing: alone(scenes.what_was_counted_and_cannot_be_read_back_is_dropped),
    ranks_seal_and_not_processes: schedules,
    a_newer_attempt_does_not_end_the_older_one: resumed,
    somebody_always_lives: resumed,
    first_attempts_are_out_of_phase_before_the_first_seal: schedules,
    a_newer_attempt_begins_the_grace_for_its_older_one: schedules,
    work_that_was_presented_counts_again: schedules,
    steps_made_since_are_lost_at_the_adoption: schedules,
    a_presence_weighs_as_much_as_work: schedules,
    the_bound_knows_no_phase: schedules,
    the_grace_begins_with_the_first_look: alone(scenes.a_dead_replica_costs_the_others_one_grace_from_when_they_waited),
    nobody_looks: schedules,
    who_presents_itself_says_nothing_of_its_phase: schedules,
    a_phase_lasts_as_long_as_was_trained_so_far: alone(scenes.who_has_made_three_of_ten_steps_knows_how_long_ten_take),
    a_learned_grace_is_short: schedules,
    who_leaves_out_of_phase_waits: scenes.who_leaves_out_of_phase_waits_for_nobody,
    steps_that_were_made_count_and_not_the_runs: schedules,
    one_entry_is_adopted_at_a_look: schedules,
    nothing_ends_a_wait_out_of_phase: alone(scenes.a_quorum_that_nobody_is_left_for_ends_who_is_out_of_phase),
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_undoing_a_rule_about_phases_is_noticed(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        MUTANTS[mutant](monkeypatch)


@pytest.mark.parametrize("part", range(3))
def test_without_a_mutant_the_schedules_in_phases_are_fine(part: int) -> None:
    for seed in range(part, 150, 3):
        Simulation(Plan.phased(seed)).run()
