"""Means that are not stored: schedules of faults, and mutants that undo each rule about them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diloco.rendezvous.frames import MeanHead, Seal
from diloco.rendezvous.mean import Reducer
from diloco.rendezvous.round import EntryState
from simulation.invariants import Violation
from simulation.scenario import Scenario
from simulation.simulation import Simulation
from simulation.test_mutants import BROKEN, Patch, replaced, wrapped
from simulation.world import Faults

SEEDS = 300


def scenario_of(seed: int, **changes: Any) -> Scenario:
    """Return the schedule of a seed with means that are not stored, and perhaps with damaged objects."""
    scenario = replace(Scenario.from_seed(seed), wires="sparse, each" if seed % 2 else "each", flip=None)
    return replace(scenario, **changes)


def first_violation(seeds: int = SEEDS, **changes: Any) -> str:
    for seed in range(seeds):
        if seed % 20:
            try:
                Simulation(scenario_of(seed, **changes), is_traced=False).run()
            except Violation as violation:
                return f"seed {seed}: {violation}"
    return ""


ROTTING = {"faults": Faults(rots=0.02), "copies": 0.0, "joiners": 0}
TRUSTING = {"checks_uploads": True}


@pytest.mark.parametrize(
    "changes",
    [{}, ROTTING, TRUSTING, {**ROTTING, **TRUSTING}],
    ids=["any faults", "damaged objects", "a store that checks uploads", "damage after a checked upload"],
)
def test_replicas_that_compute_each_mean_themselves_keep_every_invariant(changes: dict[str, Any]) -> None:
    assert not first_violation(40, **changes)


def trust_the_own_mean(decide: Callable[..., Any], self: Reducer, entry: EntryState, seal: Seal, stored: Any) -> Any:
    return entry.computed[1] if entry.computed is not None else decide(self, entry, seal, stored)


def do_not_compare_digests(self: Reducer, entry: EntryState, seal: Seal, stored: MeanHead) -> Any:
    return self._compute(entry, seal, 0)[1]


def leave_nothing_out(reduced: Callable[..., Any], self: Reducer, *arguments: Any, **options: Any) -> Any:
    return replace(reduced(self, *arguments, **options), left_out=())


def apply_at_once(collect: Callable[..., Any], self: Reducer, entry: EntryState, seal: Seal) -> Any:
    """Apply the own mean, without a stored head that decides which contributions are in it."""
    if not seal.inputs or entry.layout.stores_mean:
        return collect(self, entry, seal)
    self._compute_early(entry, seal)
    return None if entry.computed is None else [entry.computed[1]]


MUTANTS: dict[str, tuple[Patch, dict[str, Any]]] = {
    "the stored head does not decide which work counts": (
        wrapped(Reducer, "_compute_as_decided", trust_the_own_mean),
        ROTTING,
    ),
    "digests are not compared": (replaced(Reducer, "_compute_as_decided", do_not_compare_digests), ROTTING),
    "a head does not name the ranks that it leaves out": (wrapped(Reducer, "_reduced", leave_nothing_out), ROTTING),
    "no head is stored": (wrapped(Reducer, "collect", apply_at_once), {}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_undoing_a_rule_about_means_that_are_not_stored_is_noticed(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch, changes = MUTANTS[mutant]
    patch(monkeypatch)
    found = first_violation(**changes)
    assert found, f"The schedules of {SEEDS} seeds did not notice that {mutant}."
    assert not BROKEN.search(found), f"the mutant itself is broken: {found}"
