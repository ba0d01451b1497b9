"""What a round costs at a link, and which settings hide it: pure functions of numbers, without a model or a store.

A replica sends its pseudo-gradient once and reads its share of everybody's; see ADR 0036 for where each term is from.
`replicas plan` prints what this says, and `replicas status` compares a run with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

BYTES_PER_ELEMENT = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256, "int4": 1 / 2 + 4 / 128}
MEAN_WIRES = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8"}
BLOCK_ELEMENTS = 1 << 20
SMALL_BYTES = 4 << 20  # up to here the mean travels inside the seal, and a round has one phase
MAX_SHARDS = 64
RANGE_BYTES = 8 << 20  # read by one request
SNAPSHOT_PART_BYTES = 64 << 20
REQUESTS_IN_TURN = {"small": 10, "sharded": 17}
MARGIN = 1.25
"""How much longer than planned a round may take before a step waits for it."""
WIRES = ("int8", "int4")
"""What is proposed, the usual one first."""
INNER_STEPS = (10, 20, 30, 50, 100, 200, 500)
FRAGMENTS = (1, 2, 4, 5, 8)
MANY_FRAGMENTS = (10, 16, 20, 25, 32, 50, 100)
"""Proposed where the store takes no object as large as with fewer."""
UNEVEN = 1.1
"""A fragment is of whole layers: the largest may have so much more than its share."""
SHORT_ROUND_STEPS = 10
MEASURED_STEPS = 1000
"""The longest runs for which outer settings were measured."""
SHORT_PLAN_OUTER, PAPER_OUTER = (1.0, 0.5), (0.7, 0.9)
"""The outer learning rate and momentum that `DiLoCo` has without arguments: in short plans, and in all others."""
WORTH_IT = 0.9
MAX_PARAMS = 10**15


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What one replica has of the way to the store, while all use it."""

    up: float
    """Bytes a second."""
    down: float
    latency_s: float
    """Of a request without a body."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """Bytes of float32 a second that one replica's free core works through."""

    encode: float = 1.5e9
    accumulate: float = 5e9
    decode: float = 5e9
    step: float = 1.5e9
    copy: float = 8e9
    """Where the live parameters are: 8 GB/s is a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Dollars."""

    put: float = 0.0
    get: float = 0.0
    """Of one request."""
    egress: float = 0.0
    """Of one byte that leaves the store's region."""


PRICED_ON = "2026-11"
PRICES: Mapping[str, Prices] = {
    "s3": Prices(put=5.00e-6, get=0.40e-6, egress=0.09e-9),
    "r2": Prices(put=4.50e-6, get=0.36e-6),
    "directory": Prices(),
}
"""S3 standard in a large region, R2 standard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is to be trained, and where."""

    params: int
    n: int
    """Replicas."""
    step_s: float
    """Seconds of an inner step."""
    link: Link
    processor: Processor = field(default_factory=Processor)
    steps: int | None = None
    """Inner steps in all; None: not known."""
    most_bytes: float = inf
    """Of one object that the store takes."""

    def __post_init__(self) -> None:
        for name, value, least in (("params", self.params, 1), ("n", self.n, 1), ("steps", self.steps, 1)):
            if value is not None and not least <= value <= MAX_PARAMS:
                raise ValueError(f"{name} must be from {least} to {MAX_PARAMS:g}, got {name}={value}.")
        speeds = {"up": self.link.up, "down": self.link.down, "step_s": self.step_s}
        for name, speed in speeds.items():
            if not 0 < speed < inf:
                raise ValueError(f"{name} must be more than 0, got {name}={speed}.")
        if not 0 <= self.link.latency_s < inf:
            raise ValueError(f"latency_s must be at least 0, got latency_s={self.link.latency_s}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Arguments of `DiLoCo`."""

    inner_steps: int
    fragments: int = 1
    overlap_steps: int = 0
    wire: str = "int8"
    mean_wire: str | None = None
    """None: as `DiLoCo` chooses it."""

    @property
    def steps_between(self) -> int:
        """Inner steps from one fragment's round to the next fragment's."""
        return self.inner_steps // self.fragments

    @property
    def resolved_mean_wire(self) -> str:
        return self.mean_wire or MEAN_WIRES.get(self.wire, self.wire)

    def fits(self, job: Job) -> bool:
        """Tell whether `DiLoCo` takes these arguments, and the store what they make of the job."""
        try:
            self.check(job)
        except ValueError:
            return False
        return True

    def check(self, job: Job) -> None:
        """Raises: ValueError: says which value, and what it may be."""
        steps = job.steps
        for name in ("inner_steps", "fragments"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {name}={getattr(self, name)}.")
        if self.inner_steps % self.fragments:
            raise ValueError(
                f"inner_steps must be a multiple of fragments, got inner_steps={self.inner_steps} and "
                f"fragments={self.fragments}."
            )
        if not 0 <= self.overlap_steps < self.steps_between:
            raise ValueError(
                f"overlap_steps must be from 0 to inner_steps / fragments - 1 = {self.steps_between - 1}, "
                f"got overlap_steps={self.overlap_steps}."
            )
        if steps is not None and steps < self.inner_steps:
            raise ValueError(
                f"steps must be at least inner_steps, got steps={steps} and inner_steps={self.inner_steps}."
            )
        for name, wire in (("wire", self.wire), ("mean_wire", self.resolved_mean_wire)):
            if wire not in BYTES_PER_ELEMENT:
                raise ValueError(f"{name} must be one of {', '.join(BYTES_PER_ELEMENT)}, got {name}={wire!r}.")
        if (size := largest_object(job, self)) > job.most_bytes:
            raise ValueError(
                f"fragments must be at least {least_fragments(job, self)}, since the store takes no object of more "
                f"than {job.most_bytes / 1e9:.3g} GB, got fragments={self.fragments}: one of up to {size / 1e9:.3g} GB."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCost:
    """What one round of one fragment takes one replica."""

    link_s: float
    requests_s: float
    processor_s: float
    noticing_s: float
    up: float
    """Bytes."""
    down: float

    @property
    def seconds(self) -> float:
        return self.link_s + self.requests_s + self.processor_s + self.noticing_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a choice costs."""

    job: Job
    choice: Choice
    round: RoundCost

    @property
    def hidden_s(self) -> float:
        """How long a round may take without holding a step up."""
        return self.choice.overlap_steps * self.job.step_s

    @property
    def late_s(self) -> float:
        """How long the step at which a round is due waits."""
        return max(0.0, self.round.seconds - self.hidden_s)

    @property
    def share(self) -> float:
        """The share of the time in which a replica does not train, from 0 to 1."""
        copies_s = 2 * 4 * self._elements / self.job.processor.copy
        lost_s = self.late_s + copies_s
        return lost_s / (self.choice.steps_between * self.job.step_s + lost_s)

    @property
    def has_room(self) -> bool:
        """Whether a round may take a quarter longer than planned before a step waits."""
        return self.round.seconds * MARGIN <= self.hidden_s

    @property
    def rounds(self) -> int | None:
        """Planned rounds of each fragment."""
        return None if self.job.steps is None else self.job.steps // self.choice.inner_steps

    @property
    def outer(self) -> tuple[float, float]:
        """The outer learning rate and momentum for rounds of this length: short rounds and short runs need less.

        Short runs and short rounds have the numbers that never measured worse than one replica alone, in
        docs/results/outer_settings.md. Longer runs were not measured, so they have the paper's numbers, or less
        momentum if their rounds are rather short.
        """
        rounds = None if self.job.steps is None else ceil(self.job.steps / self.choice.inner_steps)
        is_short = rounds is not None and (rounds - 1) * self.choice.inner_steps < MEASURED_STEPS  # as in `DiLoCo`
        if is_short or self.choice.inner_steps < SHORT_ROUND_STEPS:
            return SHORT_PLAN_OUTER
        lr, momentum = PAPER_OUTER
        return lr, 0.8 if self.choice.inner_steps < 2 * SHORT_ROUND_STEPS else momentum

    @property
    def up(self) -> float:
        """Bytes that a replica sends in `inner_steps` steps."""
        return self.choice.fragments * self.round.up

    @property
    def down(self) -> float:
        return self.choice.fragments * self.round.down

    @property
    def _elements(self) -> int:
        return ceil(self.job.params / self.choice.fragments)

    def requests_usd(self, prices: Prices, rounds: float, snapshot_every: int = 10) -> float:
        """Return what the requests of so many rounds of each fragment cost, of all replicas."""
        entries = rounds * self.choice.fragments
        gets = 25 + 2 * (self.job.n - 1) + self.round.down / RANGE_BYTES
        snapshots = entries // max(snapshot_every, self.choice.fragments)
        parts = 1 + ceil(8 * self.job.params / SNAPSHOT_PART_BYTES)  # anchor and momentum
        return entries * self.job.n * (4 * prices.put + gets * prices.get) + snapshots * parts * prices.put

    def egress_usd(self, prices: Prices, rounds: float) -> float:
        """Return what the bytes that are read cost where the replicas are outside the store's region."""
        return self.job.n * rounds * self.down * prices.egress


def round_cost(job: Job, choice: Choice) -> RoundCost:
    """Return what one round of the largest fragment takes one replica."""
    elements, n, link, cpu = ceil(job.params / choice.fragments), job.n, job.link, job.processor
    w = BYTES_PER_ELEMENT[choice.wire]
    v = BYTES_PER_ELEMENT[choice.resolved_mean_wire]
    part = 1.0  # of the fragment: what one replica reduces
    if elements * w <= SMALL_BYTES:
        # All wait for the one that seals: it reads the others, and sends the mean in the seal.
        link_s = (elements * (w + v)) / link.up + ((n - 1) * elements * w + elements * v) / link.down
        requests = REQUESTS_IN_TURN["small"]
        up, down = elements * (w + v / n), elements * ((n - 1) * w / n + v)  # on average
    else:
        part = _largest_shard(elements, n)
        up, down = elements * (w + part * v), elements * ((n - 1) * part * w + (1 - part) * v)
        link_s = up / link.up + down / link.down
        requests = REQUESTS_IN_TURN["sharded"]
    requests_s = requests * link.latency_s
    processor_s = 4 * elements * (1 / cpu.encode + n * part / cpu.accumulate + 1 / cpu.decode + 1 / cpu.step)
    # Pauses between two looks grow with the waiting, up to a second; in each of two phases half of one is lost.
    noticing_s = 2 * min(0.5, 0.15 * (link_s + requests_s + processor_s))
    return RoundCost(
        link_s=link_s, requests_s=requests_s, processor_s=processor_s, noticing_s=noticing_s, up=up, down=down
    )


def _largest_shard(elements: int, n: int) -> float:
    """Return which part of a fragment the largest shard of its mean is."""
    blocks = ceil(elements / BLOCK_ELEMENTS)
    shards = max(1, min(n, elements // BLOCK_ELEMENTS, MAX_SHARDS))  # none of a part of a block alone
    return ceil(blocks / shards) / blocks


def largest_object(job: Job, choice: Choice) -> float:
    """Return the bytes of the largest object of a round: of a contribution, or of a shard of the mean."""
    elements = ceil(job.params / choice.fragments)
    mean_bytes = _largest_shard(elements, job.n) * BYTES_PER_ELEMENT[choice.resolved_mean_wire]
    return elements * max(BYTES_PER_ELEMENT[choice.wire], mean_bytes) * (UNEVEN if choice.fragments > 1 else 1)


def least_fragments(job: Job, choice: Choice) -> int:
    """Return how many fragments, more than one, make objects that the store takes."""
    return max(2, ceil(largest_object(job, replace(choice, fragments=2)) * 2 / job.most_bytes))


def cost_of_round(
    elements: int, n: int, wire: str, mean_wire: str | None, link: Link, processor: Processor
) -> RoundCost:
    """Return what one round of a fragment of so many elements takes one of n replicas."""
    job = Job(params=elements, n=n, step_s=1.0, link=link, processor=processor)
    return evaluate(job, Choice(inner_steps=1, wire=wire, mean_wire=mean_wire)).round


def evaluate(job: Job, choice: Choice) -> Plan:
    """Return what a choice costs."""
    choice.check(job)
    return Plan(job=job, choice=choice, round=round_cost(job, choice))


def choose(
    job: Job,
    *,
    wires: Sequence[str] = WIRES,
    mean_wire: str | None = None,
    inner_steps: int | None = None,
    fragments: int | None = None,
    overlap_steps: int | None = None,
) -> Plan:
    """Return the plan with the shortest rounds that no step waits for; if there is none, the one that loses least.

    Of equal `inner_steps` it is the one with the least stale work. A wire behind the first is taken where it at least
    halves `inner_steps`, or where steps wait with either and it loses a tenth less.

    Args:
        inner_steps, fragments, overlap_steps, mean_wire: what is not to be chosen. An overlap is else a quarter more
            than a round takes.

    Raises:
        ValueError: a value is none that `DiLoCo` takes, or makes objects that are too large for the store.
    """
    multiple = fragments or 1  # of which the usual lengths are made multiples
    lengths = [multiple * ceil(length / multiple) for length in INNER_STEPS] if inner_steps is None else [inner_steps]
    few, many = (FRAGMENTS, MANY_FRAGMENTS) if fragments is None else ((fragments,), ())
    given = Choice(inner_steps=lengths[0], fragments=few[0], mean_wire=mean_wire, overlap_steps=overlap_steps or 0)

    def fitting(wire: str, parts: Sequence[int]) -> list[Choice]:
        choices = (
            replace(given, inner_steps=length, fragments=part, wire=wire) for length in lengths for part in parts
        )
        return [choice for choice in choices if choice.fits(job)]

    found = [choices for wire in wires if (choices := fitting(wire, few) or fitting(wire, many))]
    if not found:
        replace(given, wire=wires[0]).check(job)
    best, *others = (_best(job, choices, overlap_steps) for choices in found)
    for plan in others:
        if plan.has_room or best.has_room:
            is_better = plan.has_room and not (best.has_room and 2 * plan.choice.inner_steps > best.choice.inner_steps)
        else:
            is_better = plan.share <= WORTH_IT * best.share
        best = plan if is_better else best
    return best


def _best(job: Job, choices: Iterable[Choice], overlap_steps: int | None) -> Plan:
    plans = [evaluate(job, each) if overlap_steps is not None else hide(job, each) for each in choices]
    if with_room := [plan for plan in plans if plan.has_room]:
        return min(
            with_room, key=lambda plan: (plan.choice.inner_steps, plan.choice.overlap_steps, plan.choice.fragments)
        )
    return min(plans, key=lambda plan: (plan.share, plan.choice.inner_steps, plan.choice.fragments))


def hide(job: Job, choice: Choice) -> Plan:
    """Return what a choice costs with the overlap that hides a round, as far as one can."""
    overlap_steps = min(ceil(MARGIN * round_cost(job, choice).seconds / job.step_s), choice.steps_between - 1)
    return evaluate(job, replace(choice, overlap_steps=overlap_steps))
