"""Undoes each rule of rounds by the clock in turn: schedules with replicas of different speeds must notice it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from diloco.rendezvous.contribution import WorkScale
from diloco.rendezvous.phase import Phase
from simulation.invariants import Violation
from simulation.scenario import Scenario
from simulation.simulation import Simulation
from simulation.test_mutants import BROKEN, Patch, replaced, wrapped


def count_steps(count_step: Any, self: Phase) -> None:
    count_step(self)
    self.steps_since = self._steps / 4


def count_the_steps_since_the_look(self: Phase, n_entries: int, looked_step: int, looked_s: float) -> None:
    self._advance(n_entries)
    self.set_steps_since(self.n_steps - looked_step)


def count_time_at_the_end_of_a_plan(self: Phase, from_s: float) -> None:
    self._counts_from_s = from_s
    self.steps_since = min(0.0, (self._clock() - from_s) / (self._plan.entry_s or 1.0))


MUTANTS: dict[str, tuple[Patch, int]] = {
    "rounds are due by steps": (wrapped(Phase, "count_step", count_steps), 1),
    "all work has the same weight": (
        replaced(WorkScale, "_weight_of", lambda self, entry, fragment: self._weight(entry)),
        0,
    ),
    "steps since a look count as entries": (
        replaced(Phase, "advance_after_catch_up", count_the_steps_since_the_look),
        9,
    ),
    "a last round waits until it is due by the clock": (
        replaced(Phase, "_count_from", count_time_at_the_end_of_a_plan),
        10,
    ),
    "no replica waits for the step of the slowest one": (replaced(Phase, "apart_s", lambda self, phase_s: 0.0), 1),
    "a sender reports its whole overlap": (
        replaced(Phase, "ahead_s", lambda self, entry: 0.0 if self._plan.is_final(entry) else self._overlap_s),
        199,
    ),
}
"""Each mutant has the seed of a schedule that shows it. If that schedule no longer shows it, others are tried."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_undoing_a_rule_of_the_clock_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, shown_by = MUTANTS[mutant]
    patch(monkeypatch)
    found = first_violation(shown_by)
    assert found, f"150 schedules did not notice that {mutant}."
    assert not BROKEN.search(found), f"the mutant itself is broken: {found}"


def clocked(seed: int) -> Scenario:
    return Scenario.phased(seed).with_other_merges(random.Random(f"sides {seed}")).by_the_clock()


def first_violation(shown_by: int) -> str:
    for seed in (shown_by, *range(150)):
        try:
            Simulation(clocked(seed), is_traced=False).run()
        except Violation as violation:
            return f"{seed}: {violation}"
    return ""


def test_without_a_mutant_replicas_of_different_speeds_are_in_every_round() -> None:
    for seed in (*range(8), 199):
        Simulation(clocked(seed)).run()
