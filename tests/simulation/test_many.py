"""Rounds of many replicas: a replica makes few requests, and dead replicas cost no more than the grace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.many import CountingStore, main

from diloco.rendezvous.frames import hash_order
from simulation.scenario import CALM, Absence, Scenario
from simulation.simulation import Simulation

STEP_S, SPREAD_S = 60.0, 12.0
"""Arrivals are further apart than the wait after which other replicas look for contributions."""


def calm_rounds(n: int, rounds: int) -> Scenario:
    step_s = (STEP_S - SPREAD_S, STEP_S + SPREAD_S)
    return replace(CALM, world_size=n, entries=[rounds] * n, sharded=False, step_s=step_s, until_s=10 * rounds * STEP_S)


def looks_of_a_replica(n: int) -> float:
    """Simulate two rounds, and return how many contributions a replica has looked for, on average."""
    run = Simulation(calm_rounds(n, rounds=2), is_traced=False)
    run.store = store = CountingStore(run.world)
    run.run()
    assert (run.live, run.failures) == (set(), [])
    return sum(number for key, number in store.kinds.items() if key == "contribution") / n


def test_a_replica_among_many_looks_for_few_contributions() -> None:
    """If each replica looked for all contributions, the requests of a round would grow like the square."""
    assert looks_of_a_replica(64) < 1.5 * looks_of_a_replica(16)


def test_a_replica_that_looks_while_the_others_still_train_takes_part_in_every_round() -> None:
    """The store is as slow, compared to a round, as an ordinary bucket is for a thousand replicas."""
    n, rounds, answer_s = 64, 3, 0.5
    run = Simulation(replace(calm_rounds(n, rounds), answer_s=answer_s), is_traced=False)
    run.store = store = CountingStore(run.world, answer_s=answer_s)
    run.map = store.map_at_once
    run.run()
    assert (run.live, run.failures) == (set(), [])
    sent = {(entry, rank) for entry in range(rounds) for rank in range(n)}
    assert {pair for pair in sent if run.keys.contribution(*pair) not in store.created_s} == set()


@pytest.mark.parametrize("n_dead", [1, 8, 9])
def test_replicas_that_die_silently_cost_a_round_no_more_than_the_grace(n_dead: int) -> None:
    """They are the first replicas in the order of those that may decide the round."""
    n = 24
    dead = hash_order(range(n), "seal", 0)[:n_dead]
    absences = [Absence(rank, at_s=10.0, for_s=1e6, leaves_outcome=False) for rank in dead]
    run = Simulation(replace(calm_rounds(n, rounds=1), absences=absences), is_traced=False)
    run.run()
    sent_s = [run.store.created_s[run.keys.contribution(0, rank)] for rank in range(n) if rank not in dead]
    assert run.store.created_s[run.keys.seal(0)] < max(sent_s) + run.scenario.grace_s + 2


def test_the_benchmark_of_many_replicas_makes_a_section_of_the_page_of_results(tmp_path: Path) -> None:
    file = tmp_path / "many.json"
    main(["--rounds-at", "2", "4", "--views-at", "2", "--write", str(file)])
    (table,) = json.loads(file.read_text())["tables"]
    rows = {row["cost"]: row for row in table["rows"]}
    assert set(table["columns"]) == {"cost", "2", "4", "exponent"}
    assert rows["requests of `replicas status`"]["2"] > 0
    assert rows["kB of a seal"]["4"] > rows["kB of a seal"]["2"]
