"""Undoes each rule between the training thread and the round runner in turn: schedules with both must notice it."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.rendezvous.phase import Phase
from diloco.rendezvous.round_runner import RoundRunner
from diloco.rendezvous.training_side import TrainingSide
from simulation.invariants import Violation
from simulation.scenario import Scenario
from simulation.simulation import Simulation
from simulation.test_mutants import BROKEN, Patch, replaced, wrapped


def keep_the_steps_of_what_was_counted(merge: Any, self: TrainingSide, *arguments: Any) -> Any:
    made = self.phase.uncounted_steps
    reports = merge(self, *arguments)
    self.phase.uncounted_steps = made
    return reports


def count_steps_from_the_look(looked: Any, self: Phase, at_s: float, at_step: int, **options: Any) -> None:
    looked(self, at_s, at_step)


def look_on_after_a_result(prepare: Any, self: RoundRunner, *arguments: Any, **options: Any) -> None:
    was_looking = self.poll.is_on
    prepare(self, *arguments, **options)
    self.poll.is_on = was_looking


def do_not_wait_for_an_answer(patch: pytest.MonkeyPatch) -> None:
    run = TrainingSide.run_in_round_thread

    def mutant(self: TrainingSide, act: Any) -> Any:
        return None if getattr(act, "__name__", "") == "<lambda>" else run(self, act)

    patch.setattr(TrainingSide, "run_in_round_thread", mutant)


MUTANTS: dict[str, tuple[Patch, int]] = {
    "the steps of counted work stay in the account": (
        wrapped(TrainingSide, "_merge", keep_the_steps_of_what_was_counted),
        1,
    ),
    "the round runner continues to look after its result has arrived": (
        wrapped(RoundRunner, "_prepare_result", look_on_after_a_result),
        1,
    ),
    "a sender with an overlap does not report how early it is": (
        replaced(Phase, "ahead_s", lambda self, entry: 0.0),
        1060,
    ),
    "a step counts from a look in the middle of it": (wrapped(Phase, "note_unsealed", count_steps_from_the_look), 2840),
    "phases of one step wait for no answer": (do_not_wait_for_an_answer, 2400),
}
"""Each mutant has the seed of a schedule that shows it. If that schedule no longer shows it, others are tried."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_undoing_a_rule_between_both_sides_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, shown_by = MUTANTS[mutant]
    patch(monkeypatch)
    found = first_violation(shown_by)
    assert found, f"400 schedules did not notice that {mutant}."
    assert not BROKEN.search(found), f"the mutant itself is broken: {found}"


def first_violation(shown_by: int) -> str:
    for seed in (shown_by, *range(0, 8000, 20)):
        scenario = Scenario.from_seed(seed)
        try:
            if scenario.in_background:
                Simulation(scenario, is_traced=False).run()
        except Violation as violation:
            return str(violation)
    return ""
