"""Each rule between the training and the rounds undone in turn: schedules with both beside each other must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diloco.rendezvous.participant import Participant
from diloco.rendezvous.phase import Phase
from diloco.rendezvous.rounds_apart import Rounds
from simulation.invariants import Violation
from simulation.plan import Plan
from simulation.simulation import Simulation
from simulation.test_mutants import BROKEN, Patch, replaced, wrapped


def keep_the_steps_of_what_was_counted(merge: Any, self: Participant, *arguments: Any) -> Any:
    made = self.phase.made
    reports = merge(self, *arguments)
    self.phase.made = made
    return reports


def do_each_job(self: Participant, job: Callable[[], object]) -> Callable[[], None]:
    return lambda: (job(), None)[1]


def count_steps_from_the_look(looked: Any, self: Phase, at_s: float, at_step: int, **options: Any) -> None:
    looked(self, at_s, at_step)


def look_on_after_landing(bring: Any, self: Rounds, *arguments: Any, **options: Any) -> None:
    was_looking = self._is_looking
    bring(self, *arguments, **options)
    self._is_looking = was_looking


def do_not_wait_for_an_answer(patch: pytest.MonkeyPatch) -> None:
    apart = Participant.apart

    def mutant(self: Participant, act: Any) -> Any:
        return None if act.__name__ == "<lambda>" else apart(self, act)

    patch.setattr(Participant, "apart", mutant)


MUTANTS: dict[str, tuple[Patch, int]] = {
    "the steps of what was counted stay in the account": (
        wrapped(Participant, "_merge_landed", keep_the_steps_of_what_was_counted),
        1,
    ),
    "a job is done although something else has landed": (replaced(Participant, "_unless_landed", do_each_job), 11156),
    "the rounds look on after they have landed": (wrapped(Rounds, "_bring", look_on_after_landing), 1),
    "a sender that overlaps does not say how early it is": (replaced(Phase, "ahead_s", lambda self, entry: 0.0), 1060),
    "a step counts from the look in its midst": (wrapped(Phase, "looked", count_steps_from_the_look), 2840),
    "phases of one step wait for no answer": (do_not_wait_for_an_answer, 2400),
}
"""And the seed of a schedule that shows each; should it no longer do so, others do."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_undoing_a_rule_between_both_sides_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, shown_by = MUTANTS[mutant]
    patch(monkeypatch)
    found = first_violation(shown_by)
    assert found, f"400 schedules did not notice that {mutant}."
    assert not BROKEN.search(found), f"not the rule, the mutant is broken: {found}"


def first_violation(shown_by: int) -> str:
    for seed in (shown_by, *range(0, 8000, 20)):
        plan = Plan.from_seed(seed)
        try:
            if plan.is_beside:
                Simulation(plan, is_traced=False).run()
        except Violation as violation:
            return str(violation)
    return ""
