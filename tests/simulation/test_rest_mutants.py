"""Undoes each rule about the rest of a sparse wire in turn: schedules with a real model must notice it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from diloco.live_parameters import HeldWork, WaitingRest, pack
from simulation.model_check import CheckedModelState
from simulation.scenario import Scenario
from simulation.simulation import run_schedule
from simulation.test_mutants import BROKEN, Patch, replaced, wrapped

SEEDS = 400
SHOWN_BY = 22
"""The seed of a schedule that shows most mutants, so it is tried first."""


def pack_without_the_rest(patch: pytest.MonkeyPatch) -> None:
    def mutant(*arguments: Any, rest: Any = None, **options: Any) -> Any:
        return pack(*arguments, **options)

    patch.setattr("diloco.model_state.pack", mutant)


def give_up_twice(remove: Callable[..., Any], self: HeldWork, sent: Any, *, keeps_later: bool, mix: float) -> Any:
    """Give up a share of the rest twice if later steps are kept."""
    if self.rest is None or not keeps_later:
        return remove(self, sent, keeps_later=keeps_later, mix=mix)
    before = self.rest._keeps
    self.rest._keeps = before * before
    try:
        return remove(self, sent, keeps_later=keeps_later, mix=mix)
    finally:
        self.rest._keeps = before


def restore_all_as_live(self: WaitingRest, progress: Tensor) -> Tensor:
    self.values.zero_()
    return progress


def leave_all_in_the_buffer(divide: Callable[..., Any], self: WaitingRest, first: int, lost: Any) -> None:
    divide(self, first, lost)
    lost[:] = 0.0


def keep_the_earlier_rest_too(divide: Callable[..., Any], self: WaitingRest, first: int, lost: Any) -> None:
    before = self.values.clone()
    divide(self, first, lost)
    self.values[first : first + len(lost)] += before[first : first + len(lost)]


MUTANTS: dict[str, Patch] = {
    "the rest is not packed": pack_without_the_rest,
    "the rest survives dropped work": replaced(WaitingRest, "clear", lambda self: None),
    "a share is given up twice with later steps": wrapped(HeldWork, "remove_sent", give_up_twice),
    "all work of an earlier attempt becomes live": replaced(WaitingRest, "restore", restore_all_as_live),
    "no rest is in the live parameters": wrapped(WaitingRest, "divide", leave_all_in_the_buffer),
    "a rest that was sent is kept": wrapped(WaitingRest, "divide", keep_the_earlier_rest_too),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_undoing_a_rule_about_the_rest_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    found = first_failure()
    assert found, f"The schedules of {SEEDS} seeds did not notice that {mutant}."
    assert not BROKEN.search(found), f"the mutant itself is broken: {found}"


def test_without_a_mutant_the_same_schedules_are_fine() -> None:
    assert not first_failure(60)


def first_failure(seeds: int = SEEDS) -> str:
    for seed in (SHOWN_BY, *range(seeds)):
        if Scenario.from_seed(seed).wires == "sparse":
            try:
                run_schedule(seed, training=CheckedModelState)
            except AssertionError as error:
                return str(error)
    return ""
