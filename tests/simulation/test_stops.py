"""A rank stops the run: all live replicas end after the same round, whatever fails in the meantime (I14)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from diloco.rendezvous.early_end import apply_sealed_end
from diloco.rendezvous.frames import Seal
from diloco.rendezvous.round_runner import RoundRunner
from diloco.rendezvous.seal import Sealer
from simulation.invariants import Violation
from simulation.scenario import Absence, Scenario
from simulation.simulation import calm, run_schedule
from simulation.test_mutants import BROKEN, Patch, wrapped

SEEDS = 60


def test_all_that_are_alive_end_after_the_same_round_in_random_schedules_of_faults() -> None:
    n_stopped = 0
    for seed in (*range(SEEDS), 5000100):  # with the last seed, the last rounds of all fragments come at once
        simulation = run_schedule(seed, is_traced=False, stops_always=True)
        n_stopped += any(process.steps.ended_by for process in simulation.processes)
    assert n_stopped > SEEDS / 2, "most of these runs are stopped before their planned end"


def test_a_share_of_all_random_schedules_is_stopped() -> None:
    assert sum(bool(Scenario.from_seed(seed).stops) for seed in range(160)) == 20


@pytest.mark.parametrize("n_fragments", [1, 2, 3])
def test_a_replica_that_comes_back_to_a_run_that_was_stopped_finds_it_ended(n_fragments: int) -> None:
    absences = [Absence(rank=2, at_s=2.0, for_s=60.0)]
    simulation = calm(
        entries=[12] * 3, n_fragments=n_fragments, is_planned=True, stops={0: 3}, absences=absences, step_s=(1.0, 1.0)
    )
    simulation.run()
    last = simulation.processes[-1]
    assert (last.rank, last.steps.ended_by, last.left_at) == (2, (0,), last.steps.n_entries)
    assert last.state.done == 0, "the replica came back after the end, so it makes no step"


def end_by_the_own_wish(apply: Any, self: RoundRunner, entry: Any, seal: Seal, mean: Any) -> Any:
    """Let a replica that asks for the end stop after its next round, even if that has not counted its contribution."""
    if self._phase.wants_to_stop:
        seal = replace(seal, stops=(self._me.rank,))
    return apply(self, entry, seal, mean)


def end_with_the_next(seal: Seal, entry: int, *where: Any) -> None:
    """End one entry too late: each other fragment then has two more rounds, and the first fragment one more."""
    apply_sealed_end(seal, entry + 1, *where)


def end_with_two_wishes(seal: Seal, entry: int, *where: Any) -> None:
    if len(seal.stops) > 1:
        apply_sealed_end(seal, entry, *where)


def seal_one_wish(seal_with: Any, self: Sealer, entry: Any, good: set[int], anchor: str) -> Any:
    wishing = [rank for rank in sorted(good) if entry.seen[rank][0].stop]
    for rank in wishing[1:]:
        head, digest = entry.seen[rank]
        entry.seen[rank] = replace(head, stop=False), digest
    return seal_with(self, entry, good, anchor)


def ending_by(rule: Callable[..., None]) -> Patch:
    """Replace the function that ends a plan, wherever a seal is applied or replayed."""

    def patched(patch: pytest.MonkeyPatch) -> None:
        for module in ("round_runner", "restore"):
            patch.setattr(f"diloco.rendezvous.{module}.apply_sealed_end", rule)

    return patched


MUTANTS: dict[str, Patch] = {
    "a replica ends because of its own request": wrapped(RoundRunner, "_apply", end_by_the_own_wish),
    "no replica reads which ranks asked for the end": ending_by(lambda *where: None),
    "a run ends an entry later": ending_by(end_with_the_next),
    "one request is not enough": ending_by(end_with_two_wishes),
    "the seal leaves out the second request": wrapped(Sealer, "_seal_with", seal_one_wish),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_undoing_the_rule_of_the_end_is_noticed(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    found = first_violation()
    assert found, f"600 schedules did not notice that {mutant}."
    assert not BROKEN.search(found), f"the mutant itself is broken: {found}"


def first_violation() -> str:
    for seed in range(600):
        try:
            run_schedule(seed, is_traced=False, stops_always=True)
        except Violation as violation:
            return str(violation)
    return ""
