"""Replicas that come back, or wake up, when the others are far ahead."""

from __future__ import annotations

import pytest

from diloco.rendezvous.frames import hash_order
from diloco.rendezvous.restore import RestoredWork
from simulation.simulation import Simulation, calm, restored_from
from simulation.test_accounting import counted_units
from simulation.world import Died

SLOW = "rank 7.7"


def eight(**changes: object) -> Simulation:
    return calm(world_size=8, snapshot_every=2, step_s=(0.9, 1.1), grace_s=3.0, sharded=True, **changes)


def hold(sim: Simulation, for_s: float, after_s: float, rank: int = 7) -> None:
    """Suspend a replica for a while, some time after it has sent its contribution to the sixth entry."""
    until = [0.0]

    def begin() -> None:
        until[0] = sim.world.now + for_s
        sim.world.hold(f"rank {rank}.{rank}", until[0])

    sim.store.when_created(sim.keys.contribution(5, rank), lambda: sim.world.at(after_s, begin) if after_s else begin())
    sim.run()
    woke = [(at - until[0], what) for at, who, what in sim.world.trace if SLOW in who and at >= until[0]]
    sim.after_waking = woke  # type: ignore[attr-defined]


def test_a_replica_that_slept_jumps_as_soon_as_it_sees_that_the_mean_was_collected() -> None:
    sim = eight(entries=[40] * 8, steps_per_entry=6)
    hold(sim, 120.0, 4.0)
    woke = sim.after_waking  # type: ignore[attr-defined]
    missed = next(at for at, what in woke if "/mean/" in what)
    jumped = next(at for at, what in woke if "/part/" in what)
    assert jumped - missed < 5.0
    assert not [what for at, what in woke if at < jumped and "/contribution/" in what], (
        "the replica reads no contribution, because all inputs are deleted"
    )


@pytest.mark.parametrize("in_background", [False, True])
def test_a_replica_that_was_suspended_for_longer_than_a_round_may_take_jumps(in_background: bool) -> None:
    sim = eight(entries=[400] * 8, steps_per_entry=2, in_background=in_background)
    hold(sim, 700.0, 0.0)  # raises an error if the replica fails


@pytest.mark.parametrize("n_calls", range(1, 16))
def test_a_replica_may_be_suspended_at_any_call_of_the_store_in_a_round(n_calls: int) -> None:
    """The suspension is longer than `round_timeout_s`. One call of the store takes a millisecond.

    The replica arrives first, and it is its turn to look for contributions.
    """
    rank = hash_order(range(3), "seal", 5)[0]
    speeds = [1.0 if each == rank else 1.02 for each in range(3)]
    sim = calm(
        world_size=3, entries=[20] * 3, step_s=(80.0, 80.1), speeds=speeds, grace_s=60.0, snapshot_every=2,
    )  # fmt: skip
    hold(sim, 700.0, n_calls / 1000 - 0.0005, rank)  # raises an error if the replica fails


@pytest.mark.parametrize("carry_rounds", [4, None])
def test_a_returner_that_brought_no_work_loses_none_of_its_new_steps(carry_rounds: int | None) -> None:
    sim = calm(
        world_size=3, entries=[30] * 3, steps_per_entry=4, snapshot_every=2, step_s=(0.9, 1.1), grace_s=3.0,
        carry_rounds=carry_rounds,
    )  # fmt: skip
    kept: list[RestoredWork] = []

    def dies_behind_its_record(me: object, side: object, state: object) -> None:
        if (me.rank, me.attempt) != (0, 0) or side.position != 4:  # type: ignore[attr-defined]
            return
        if side.phase.steps_since == 0 and not kept:  # type: ignore[attr-defined]
            kept.append(restored_from(side, state))  # type: ignore[arg-type]
        elif side.phase.steps_since == 1:  # type: ignore[attr-defined]
            raise Died

    sim._perhaps_copy = dies_behind_its_record  # type: ignore[method-assign]
    sim._bury = lambda process: sim._spawn(0, 40.0, kept[0])  # type: ignore[method-assign]
    sim.run()
    *_, returner = sim.states
    assert counted_units(sim, len(sim.states) - 1) == returner.done > 60
