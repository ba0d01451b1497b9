"""Undoes each rule about phases and the grace in turn: schedules in phases must notice it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from diloco.rendezvous.contribution import StepAccount, WorkScale
from diloco.rendezvous.frames import Seal
from diloco.rendezvous.membership import Membership
from diloco.rendezvous.phase import Phase
from diloco.rendezvous.round import PendingWork, RoundResult
from diloco.rendezvous.round_runner import RoundRunner
from diloco.rendezvous.seal import Sealer
from diloco.rendezvous.training_side import TrainingSide
from diloco.rendezvous.training_state import Verdict
from simulation import test_phases as scenes
from simulation.scenario import Scenario
from simulation.simulation import Simulation
from simulation.test_mutants import BROKEN, Patch, replaced, wrapped


def count_the_own_waiting(is_over: Any, self: Sealer, entry: Any, *rest: Any, **options: Any) -> Any:
    if entry.grace_from_s is None:
        entry.grace_from_s = entry.published_s if entry.began_s is None else entry.began_s
    return is_over(self, entry, *rest, **options)


def wait_for_the_next_round(deliver: Any, self: TrainingSide, late_s: float = 0.0) -> list[Any]:
    """Undo the first rule: send the work at once and wait, while the others are in the middle of their phase."""
    reports = self._merge(late_s)
    while self.is_out_of_phase and not self._plan.is_over(self.position):
        self._scheduler.submit(partial(self.runner.run_round, self._pending or self._hold(is_early=False)))
        self._scheduler.until(self._has_result)
        reports += self._merge()
    return reports


def present_when_an_expected_contribution_is_seen(present: Any, self: RoundRunner, pending: PendingWork) -> None:
    entry = self.current()
    for rank in self._members.expected:
        self.sealer.look_at_contribution(entry, rank)
    if any(self._members.names(rank, head.attempt, head.nonce) for rank, (head, _) in entry.seen.items()):
        present(self, pending)
    else:
        self.poll.start()


def forget_the_head_start(prepare: Any, self: RoundRunner, *arguments: Any, **options: Any) -> None:
    merge_ready = self._merge_ready

    def forgetting(result: RoundResult) -> None:
        self._phase.head_start_s = 0.0
        merge_ready(result)

    self._merge_ready = forgetting
    prepare(self, *arguments, **options)
    self._merge_ready = merge_ready


names_me = Membership.names_me.fget  # type: ignore[attr-defined]


def begin_the_grace_for_an_older_attempt(
    is_over: Any, self: Sealer, entry: Any, good: Any, now: float, **options: Any
) -> Any:
    waits = any(rank in self._members.expected and head.in_phase for rank, head in good.items())
    if entry.grace_from_s is None and waits:
        entry.grace_from_s = now
    return is_over(self, entry, good, now, **options)


def count_presented_work_again(verdict_of: Any, self: StepAccount, entry: Any, seal: Seal) -> Any:
    verdict, is_partly = verdict_of(self, entry, seal)
    return (Verdict.KEPT, True) if is_partly else (verdict, is_partly)


def lose_steps_made_since(verdict_of: Any, self: StepAccount, entry: Any, seal: Seal) -> Any:
    verdict, is_partly = verdict_of(self, entry, seal)
    return verdict, is_partly and verdict is not Verdict.COUNTED


def begin_the_grace_with_the_first_look(
    is_over: Any, self: Sealer, entry: Any, good: Any, now: float, *, grace_factor: int
) -> Any:
    """Begin the grace only at this replica's own look, although it lets another replica look first."""
    if entry.grace_from_s is not None:
        return now - entry.grace_from_s >= self._grace_s(entry) * grace_factor
    began_s, entry.began_s = entry.began_s, now
    try:
        return is_over(self, entry, good, now, grace_factor=grace_factor)
    finally:
        entry.began_s = began_s


def seal_no_phase_if_no_replica_waits(data: Any, self: Seal, *arguments: Any) -> Any:
    """Write the longest phase of its replicas into a seal, although early contributions report a phase of 0."""
    waits = any(member.in_phase for member in self.replicas.values())
    return data(self if waits else replace(self, phase_s=0.0), *arguments)


def learn_a_short_grace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("diloco.rendezvous.seal.LEAST_GRACE_PHASES", 0.0)
    patch.setattr("diloco.rendezvous.seal.LEAST_GRACE", 0.0)


def wait_before_leaving(self: TrainingSide) -> None:
    entry = self.runner.entry
    if entry is not None and entry.published and (found := self.runner._wait_for_mean()) is not None:
        self.runner._apply(*found)
    self.say_bye()


def count_the_steps_that_were_made(self: Phase, n_entries: int) -> None:
    self.base_step += self.steps_since
    self._steps, self._trained_s = 0, 0.0


def take_what_was_trained_for_a_phase(count_step: Any, self: Phase) -> None:
    count_step(self)
    self.phase_s = self._trained_s


def adopt_one_entry_at_a_look(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: RoundRunner, reports: list[Any]) -> None:
        if self.known_open_entry == self.position or self.seals.seal(self.position) is None:
            return
        if (found := self._wait_for_mean()) is not None:
            reports.append(self._apply(*found))

    patch.setattr(RoundRunner, "_apply_sealed", mutant)
    patch.setattr("diloco.rendezvous.training_side.EARLY_CONTRIBUTIONS", 1)


def never_end_a_wait_out_of_phase(check_time: Any, self: Sealer, *arguments: Any) -> None:
    if not self._phase.is_out_of_phase:
        check_time(self, *arguments)


def schedule(shown_by: int) -> Callable[[], None]:
    """Return a function that runs the schedule that once showed a mutant, and then others in case it no longer does."""

    def notices() -> None:
        for seed in (shown_by, *range(150)):
            Simulation(Scenario.phased(seed)).run()

    return notices


def in_model(scene: str) -> Callable[[], object]:
    return lambda: scenes.as_much_work_is_counted_as_in_a_model_of_phases(scene)


def resumed() -> None:
    for leaves_outcome in (True, False):
        scenes.a_run_that_is_resumed_as_a_whole_is_in_phase_from_its_start(leaves_outcome)


MUTANTS: dict[str, tuple[Patch, Callable[[], object]]] = {
    "an unexpected replica counts its own wait": (wrapped(Sealer, "_is_over", count_the_own_waiting), schedule(1)),
    "a late replica waits for the next round": (
        wrapped(TrainingSide, "deliver", wait_for_the_next_round),
        schedule(26),
    ),
    "nothing bounds the wait for expected replicas": (
        replaced(Sealer, "unobserved_wait_s", 1e9),
        scenes.a_replica_whose_peers_vanished_continues_alone,
    ),
    "a late replica contributes when it sees an expected contribution": (
        wrapped(RoundRunner, "contribute_early", present_when_an_expected_contribution_is_seen),
        schedule(1),
    ),
    "no replica has a head start": (wrapped(RoundRunner, "_prepare_result", forget_the_head_start), schedule(1)),
    "a seal expects ranks instead of processes": (
        replaced(Membership, "names", lambda self, rank, attempt, nonce: rank in self.expected),
        in_model("a kill every 60 s, phase 100"),
    ),
    "a newer attempt does not end the older one": (  # after a resume without outcomes, all replicas are out of phase
        replaced(Membership, "lives", lambda self, rank: not self._has_left(rank, self.expected[rank])),
        resumed,
    ),
    "a peer always lives": (replaced(Membership, "has_live_peer", lambda self: True), resumed),
    "first attempts are out of phase before the first seal": (
        replaced(Membership, "names_me", property(lambda self: self.seal is not None and names_me(self))),
        in_model("three die"),
    ),
    "a newer attempt begins the grace for its older one": (
        wrapped(Sealer, "_is_over", begin_the_grace_for_an_older_attempt),
        schedule(1),
    ),
    "presented work counts again": (wrapped(StepAccount, "verdict", count_presented_work_again), schedule(8)),
    "an adopted seal removes later steps": (wrapped(StepAccount, "verdict", lose_steps_made_since), schedule(1)),
    "a contribution without work has the weight of work": (
        replaced(WorkScale, "_early_weight", lambda self, entry, fragment: 1.0),
        schedule(1),
    ),
    "the bound of a wait ignores the phase": (
        replaced(Sealer, "unobserved_wait_s", property(lambda self: self._most_grace_s)),
        schedule(11),
    ),
    "the grace begins with the first look": (
        wrapped(Sealer, "_is_over", begin_the_grace_with_the_first_look),
        scenes.a_dead_replica_costs_the_others_one_grace_from_when_they_waited,
    ),
    "no replica looks": (replaced(RoundRunner, "look", lambda self: False), schedule(1)),
    "an early contribution does not report the phase": (
        wrapped(Seal, "data", seal_no_phase_if_no_replica_waits),
        schedule(5),
    ),
    "the length of a phase is the time of training so far": (
        wrapped(Phase, "count_step", take_what_was_trained_for_a_phase),
        scenes.three_of_ten_steps_tell_how_long_ten_take,
    ),
    "a learned grace is short": (learn_a_short_grace, schedule(192)),
    "a replica that leaves out of phase waits": (
        replaced(TrainingSide, "leave", wait_before_leaving),
        scenes.a_replica_that_leaves_out_of_phase_does_not_wait,
    ),
    "a replica counts its own steps instead of the run's steps": (
        replaced(Phase, "_advance", count_the_steps_that_were_made),
        schedule(26),
    ),
    "a look adopts only one entry": (adopt_one_entry_at_a_look, schedule(1)),
    "a wait out of phase has no end": (
        wrapped(Sealer, "check_time", never_end_a_wait_out_of_phase),
        scenes.a_quorum_that_cannot_be_reached_ends_a_replica_out_of_phase,
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_undoing_a_rule_about_phases_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, notices = MUTANTS[mutant]
    patch(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)) as noticed:
        notices()
    assert not BROKEN.search(str(noticed.value)), f"the mutant itself is broken: {noticed.value}"


def test_without_a_mutant_the_schedules_that_show_them_are_fine() -> None:
    for seed in (1, 5, 8, 11, 26, 33):
        Simulation(Scenario.phased(seed)).run()
