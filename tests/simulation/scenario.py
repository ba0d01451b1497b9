"""Derives the scenario of a random schedule from its seed: the run, its replicas, its store and its faults."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from simulation.world import Faults

PHASED_SHARE = 20
"""One of 20 seeds gives a schedule in phases, which takes four times as long to run as another schedule."""
STOPPING_SHARE = 8
"""In one of 8 seeds, a rank stops the run."""
GRACE_S = 3.0
PHASES_PER_GRACE = (0.03, 0.1, 1.0, 3.0, 10.0)


@dataclass(frozen=True)
class Absence:
    """A time during which a rank has no running process."""

    rank: int
    at_s: float
    for_s: float
    dies: bool = True
    """True: the process dies, and another one starts later. False: the process is suspended, and continues."""
    leaves_outcome: bool = True
    """True if the dead process has an outcome."""


@dataclass
class Scenario:
    """The parameters of one schedule. The seed determines all of them, and all random decisions of the schedule."""

    seed: int
    world_size: int
    n_fragments: int
    entries: list[int]
    sharded: bool
    overlap: bool | None
    """True if steps are made between sending a contribution and applying the mean. None: as the mean needs it."""
    min_quorum: int
    all_leave_outcomes: bool
    copies: float
    faults: Faults
    snapshot_every: int = 3
    joiners: int = 0
    streams: bool = False
    """True if the store can write a contribution while it is being made."""
    in_background: bool = False
    """True if rounds run while training continues."""
    keeps_later_work: bool = False
    """True if steps that were made after holding the work are kept when the held work is counted."""
    overlap_by: int = 1
    """The number of steps of an overlap."""
    carry_rounds: int | None = None
    flip: tuple[int, int, int] | None = None
    """A rank, an entry and a fragment: a bit of the rank's state of this fragment flips before this entry."""
    steps_per_entry: int = 1
    step_s: tuple[float, float] = (0.1, 4.0)
    """The shortest and the longest inner step, in seconds."""
    speeds: list[float] = field(default_factory=list)
    """By rank, the factor by which its steps take longer. Further ranks have the factor 1."""
    weights: list[float] = field(default_factory=lambda: [1.0])
    """The weights of the ranks. They repeat if there are more ranks."""
    grace_s: float = 30.0
    answer_s: float = 0.001
    """Seconds that the store takes to answer."""
    upload_s: float = 0.0
    """Seconds that writing a contribution takes."""
    checks_uploads: bool = False
    """True if replicas trust the store to have the bytes that they sent. Objects may still become damaged later."""
    wires: str = "exact"
    """The wires of contributions and of means: a key of `integer_state.WIRES`."""
    is_planned: bool = False
    """True if the replicas know the number of steps of the run."""
    is_phased: bool = False
    """True if all replicas have about one speed, and only `absences` disturb them. Then I11 and I12 must hold."""
    absences: list[Absence] = field(default_factory=list)
    until_s: float | None = None
    """The time at which the schedule is stopped. None: it runs until all replicas have finished."""
    entry_s: float | None = None
    """With rounds by the clock: seconds from one entry to the next."""
    overlap_share: float = 0.0
    """With rounds by the clock: the share of that time for which an overlap lasts."""
    stops: dict[int, int] = field(default_factory=dict)
    """The position from which each process of a rank asks all to end the run, by rank."""

    @property
    def phase_s(self) -> float:
        if self.entry_s is not None:
            return self.entry_s + self.longest_step_s
        return self.steps_per_entry * sum(self.step_s) / 2

    @property
    def longest_step_s(self) -> float:
        return self.step_s[1] * (max([1.0, *self.speeds]) if self.entry_s is not None else 1.05)

    @property
    def overlap_steps(self) -> float | None:
        if self.overlap is None:
            return None
        if self.entry_s is not None:
            return self.overlap_share if self.overlap else 0
        return self.overlap_by if self.overlap and self.steps_per_entry > 1 else 0

    @classmethod
    def from_seed(cls, seed: int) -> Scenario:
        scenario = cls.phased(seed) if seed % PHASED_SHARE == 0 else cls.random(seed)
        scenario = scenario.with_other_merges(random.Random(f"sides {seed}"))
        scenario = scenario.by_the_clock() if random.Random(f"is clocked {seed}").random() < 0.25 else scenario
        return scenario.stopping() if seed % STOPPING_SHARE == STOPPING_SHARE - 1 else scenario

    def stopping(self) -> Scenario:
        """Return a copy of the scenario in which one or two ranks ask for an early end of the run.

        Each later process of such a rank asks again, as a script does that is started again.
        """
        rng = random.Random(f"stops {self.seed}")
        ranks = rng.sample(range(self.world_size), min(self.world_size, rng.choice([1, 1, 2])))
        return replace(self, stops={rank: rng.randrange(max(1, *self.entries)) for rank in ranks})

    def with_other_merges(self, rng: random.Random) -> Scenario:
        """Return a copy of the scenario, perhaps with rounds in the background and with other merges."""
        if rng.random() < 0.5:
            return self
        most = self.steps_per_entry - 1
        overlap = rng.choice([False, True, None])
        return replace(
            self,
            in_background=overlap is None or rng.random() < 0.8,
            overlap=overlap,
            overlap_by=max(1, rng.choice([1, most])),
            keeps_later_work=rng.random() < 0.6,
            carry_rounds=rng.choice([None, None, 1, 2]),
        )

    def by_the_clock(self) -> Scenario:
        """Return a copy of the scenario with rounds by the clock and replicas of different speeds.

        In a schedule in phases, a step of the slowest replica is shorter than an entry. Otherwise it may be longer.
        """
        rng = random.Random(f"clock {self.seed}")
        entry_s, slowest, step_s = self.phase_s, 5.0, self.step_s
        if self.is_phased:
            step_s = (min(step_s[0], entry_s / 2),) * 2
            slowest = min(slowest, 0.6 * entry_s / step_s[1])
        return replace(
            self,
            entry_s=entry_s,
            step_s=step_s,
            overlap_share=rng.choice([0.2, 0.5, 0.9]),
            speeds=[rng.choice([1.0, rng.uniform(1.0, slowest), slowest]) for _ in range(self.world_size)],
        )

    @classmethod
    def random(cls, seed: int) -> Scenario:
        """Return a scenario in which every fault may happen at any time."""
        rng = random.Random(f"plan {seed}")
        world_size = rng.randint(1, 4)
        entries, n_fragments = rng.choice([2, 3, 4, 5, 6, 9]), rng.randint(1, 3)
        rate = rng.choice([0.0, 0.01, 0.04, 0.1])
        kinds = ["lost_reply", "refused", "lands_later", "stale", "garbled", "slow", "asleep", "rots"]
        chosen = {kind: rate for kind in kinds if rng.random() < 0.5}
        chosen["rots"] = rng.choice([0.0, 0.0, min(chosen.get("rots", 0.0), 0.01)])
        chosen["asleep"] = min(chosen.get("asleep", 0.0), 0.02)
        faults = Faults(**chosen, dies=rng.choice([0.0, 0.005, 0.02]), deaths_left=rng.randint(0, 3))
        min_quorum = rng.choice([1, 1, 2])
        steps_per_entry = rng.choice([1, 1, 2, 3])
        scenario = cls(
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
            streams=rng.random() < 0.5,
            steps_per_entry=steps_per_entry,
            step_s=(0.1 / steps_per_entry, 4.0 / steps_per_entry),
            grace_s=rng.choice([GRACE_S, 10 * GRACE_S]),
            weights=rng.choice([[1.0], [1.0, 2.0, 3.0]]),
            is_planned=rng.random() < 0.3,
            wires=wires_of(seed),
        )
        if scenario.is_planned:
            scenario.entries = [entries] * world_size
        # A flipped bit is found only by a majority with the right state. So in such a scenario no process dies, sleeps
        # or joins, and all replicas take part in the entry whose seal refutes the wrong state.
        if world_size > 2 and rng.random() < 0.2:
            refuted = rng.randint(1, entries - 1)
            before = rng.randint(max(1, refuted - n_fragments + 1), refuted)
            scenario.flip = (rng.randrange(world_size), before, refuted % n_fragments)
            scenario.copies, scenario.joiners, faults.deaths_left, faults.asleep, faults.rots = 0.0, 0, 0, 0.0, 0.0
            scenario.entries = [entries] * world_size
            # With a short grace and a slow store, the replica with the wrong state might decide an entry alone.
            scenario.grace_s = 10 * GRACE_S
        return scenario

    @classmethod
    def phased(cls, seed: int) -> Scenario:
        """Return a scenario of replicas of about one speed. Some of them are away for a while in the first phases."""
        rng = random.Random(f"phased plan {seed}")
        world_size = rng.randint(2, 5)
        n_fragments = rng.choice([1, 1, 1, 2, 3])
        phase_s = GRACE_S * rng.choice(PHASES_PER_GRACE)
        steps_per_entry = rng.choice([1, 2, 4, 10])
        step_s = phase_s / steps_per_entry
        n_away = rng.choice([1, 1, 2, world_size - 1, world_size])
        at_s = rng.uniform(0.5, 4.0) * phase_s
        apart_s = rng.choice([0.0, phase_s / 2, GRACE_S])
        absences = [
            Absence(
                rank,
                at_s + rng.uniform(0, apart_s),
                rng.choice([0.05, 0.5, 1.5, 3.0]) * max(phase_s, rng.choice([0.1, 1.0]) * GRACE_S)
                + rng.uniform(0, GRACE_S),
                dies=rng.random() < 0.7,
                leaves_outcome=rng.random() < 0.6,
            )
            for rank in rng.sample(range(world_size), n_away)
        ]
        speeds = [1 + rng.uniform(0.0, min(0.05, GRACE_S / 4 / phase_s)) for _ in range(world_size)]
        return cls(
            seed=seed,
            world_size=world_size,
            n_fragments=n_fragments,
            entries=[rng.choice([14, 18])] * world_size,
            sharded=rng.random() < 0.5,
            overlap=rng.random() < 0.3,
            min_quorum=1,
            all_leave_outcomes=False,
            copies=0.0,
            faults=Faults(),
            snapshot_every=n_fragments + rng.choice([0, 1, 3]),
            joiners=rng.choice([0, 0, 1, 2]),
            streams=rng.random() < 0.5,
            steps_per_entry=steps_per_entry,
            step_s=(step_s, step_s),
            speeds=speeds,
            grace_s=GRACE_S,
            answer_s=rng.choice([0.0005, min(0.025, phase_s / 100)]),  # a round takes 20 answers, less than a phase
            upload_s=rng.choice([0.0, 0.0, phase_s / 10]),
            weights=rng.choice([[1.0], [1.0, 2.0, 3.0]]),
            is_planned=rng.random() < 0.3,
            wires=wires_of(seed),
            is_phased=True,
            absences=absences,
        )


def wires_of(seed: int) -> str:
    """Return the wires in the schedule of a seed."""
    drawn = random.Random(f"lossy {seed}").random()
    bounds = {"lossy": 0.25, "sparse": 0.37, "sparse, each": 0.4, "each": 0.5, "exact": 1.0}
    return next(wires for wires, bound in bounds.items() if drawn < bound)


CALM = Scenario(
    seed=1,
    world_size=3,
    n_fragments=1,
    entries=[8, 8, 8],
    sharded=True,
    overlap=False,
    min_quorum=1,
    all_leave_outcomes=True,
    copies=0.0,
    faults=Faults(),
)
"""A scenario without random faults. Copy it with `dataclasses.replace`, and do not change it."""
