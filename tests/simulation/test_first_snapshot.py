"""The first snapshot of a run behind a slow link: one replica stores its model, and the others take over if it dies."""

from __future__ import annotations

from typing import Any

import pytest

from diloco.rendezvous import first_snapshot
from diloco.rendezvous.round import Limits
from simulation.integer_state import SLOTS
from simulation.invariants import Process
from simulation.simulation import Simulation, calm
from simulation.world import SimulatedStore

SLOW_S = 40.0
"""The time for which a model is stored. It is longer than all takeovers of a world of three together."""
TAKEOVER_S = Limits().takeover_after_s


def slow(monkeypatch: pytest.MonkeyPatch) -> Simulation:
    """Return a calm simulation in which storing a first snapshot takes a long time."""
    put = SimulatedStore.put

    def slow_put(self: SimulatedStore, key: str, data: Any) -> None:
        if "/part/0/" in key:
            self._world.note(f"uploads {key}")
            self._world.sleep(SLOW_S)
        put(self, key, data)

    monkeypatch.setattr(SimulatedStore, "put", slow_put)
    model_bytes = 4 * SLOTS
    monkeypatch.setattr(first_snapshot, "SLOW_LINK", model_bytes / SLOW_S)
    return calm()


def uploads(simulation: Simulation) -> list[tuple[float, str]]:
    """Return the time and the process of each upload of a first snapshot that began."""
    return [(at_s, who) for at_s, who, what in simulation.world.trace if what.startswith("uploads ")]


def test_while_a_replica_stores_its_model_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = slow(monkeypatch)
    simulation.run()
    assert [who for _, who in uploads(simulation)] == ["rank 0.0"]


def test_a_lower_rank_that_begins_later_waits_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = slow(monkeypatch)
    simulation.world.at(0.0, lambda: simulation.world.hold("rank 0.0", TAKEOVER_S + 4.0))
    simulation.run()
    assert [who for _, who in uploads(simulation)] == ["rank 1.1"]


@pytest.mark.parametrize("left", ["an outcome", "a next attempt", "nothing"])
def test_another_replica_stores_its_model_if_the_first_one_dies(monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    simulation = slow(monkeypatch)

    def bury(process: Process) -> None:
        if left == "an outcome":
            simulation._record_end(0, process.slot)
        elif left == "a next attempt":
            simulation._spawn(0, 1.0)

    monkeypatch.setattr(simulation, "_bury", bury)
    simulation.world.at(10.0, lambda: simulation.world.kill("rank 0.0"))
    simulation.run()
    (first_s, first), (second_s, second), *more = uploads(simulation)
    assert (first, more) == ("rank 0.0", [])
    assert second != first
    # a replica that left nothing is waited for as long as a slow link needs for its model
    slow_link_s = SLOW_S if left == "nothing" else 0.0
    assert slow_link_s < second_s - first_s < slow_link_s + 4 * TAKEOVER_S
