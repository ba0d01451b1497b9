"""What a random schedule of the rendezvous consists of. All of it follows from the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

from simulated_world import Faults


@dataclass
class Plan:
    """What a schedule consists of; all of it follows from the seed."""

    seed: int
    world_size: int
    n_fragments: int
    entries: list[int]
    sharded: bool
    overlap: bool
    min_quorum: int
    all_leave_outcomes: bool
    copies: float
    faults: Faults
    snapshot_every: int = 3
    joiners: int = 0
    streams: bool = False
    """Whether the store takes contributions while they are being made."""
    flip: tuple[int, int, int] | None = None
    """A bit of this rank's state flips before this entry, in this fragment."""

    @classmethod
    def from_seed(cls, seed: int) -> Plan:
        rng = random.Random(f"plan {seed}")
        world_size = rng.randint(1, 4)
        entries, n_fragments = rng.choice([2, 3, 4, 5, 6, 9, 12]), rng.randint(1, 3)
        rate = rng.choice([0.0, 0.01, 0.04, 0.1])
        kinds = ["lost_reply", "refused", "lands_later", "stale", "garbled", "slow", "asleep", "rots"]
        chosen = {kind: rate for kind in kinds if rng.random() < 0.5}
        chosen["rots"] = rng.choice([0.0, 0.0, min(chosen.get("rots", 0.0), 0.01)])
        chosen["asleep"] = min(chosen.get("asleep", 0.0), 0.02)
        faults = Faults(**chosen, dies=rng.choice([0.0, 0.005, 0.02]), deaths_left=rng.randint(0, 3))
        min_quorum = rng.choice([1, 1, 2])
        plan = cls(
            seed=seed,
            world_size=world_size,
            n_fragments=n_fragments,
            entries=[entries - (rng.randint(0, 2) if rng.random() < 0.3 else 0) for _ in range(world_size)],
            sharded=rng.random() < 0.6,
            overlap=rng.random() < 0.4,
            min_quorum=min_quorum,
            all_leave_outcomes=min_quorum > 1 or rng.random() < 0.5,
            copies=rng.choice([0.0, 0.0, 0.15]),
            faults=faults,
            snapshot_every=n_fragments + rng.choice([0, 0, 1, 3]),
            joiners=rng.choice([0, 0, 0, 1, 2]),
            streams=seed % 2 == 1,
        )
        if world_size > 2 and rng.random() < 0.2:  # a majority must be right: nobody dies, sleeps or comes later
            plan.flip = (rng.randrange(world_size), rng.randint(1, entries), rng.randrange(n_fragments))
            plan.copies, plan.joiners, faults.deaths_left, faults.asleep, faults.rots = 0.0, 0, 0, 0.0, 0.0
            plan.entries = [entries] * world_size
        return plan
