"""Plans the settings of a DiLoCo: estimates the time of a round at a link, and chooses settings that hide it.

These are pure functions of numbers, without a model or a store. A replica sends its pseudo-gradient once, and reads a
part of the pseudo-gradient of each other replica. ADR 0036 has the source of each term. `replicas plan` prints the
result, and `replicas status` compares a run with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

from diloco.outer_defaults import PAPER_OUTER, SHORT_PLAN_OUTER, SHORT_ROUND_STEPS, default_outer, is_short_plan

BYTES_PER_ELEMENT = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / 256, "int4": 1 / 2 + 4 / 128, "top8": 388 / 4096}
MEAN_WIRES = {"fp32": "fp32", "bf16": "bf16", "int8": "int8", "int4": "int8", "top8": "int4"}
"""The default wire of the means, for each wire of contributions."""
EACH = "each"
"""The wire of means that are not stored: each replica reads all contributions."""
EACH_REPLICAS = 4
"""The largest number of replicas for which such means are proposed. From 8 replicas on, they have more bytes."""
SPARSE_WIRE = "top8"
"""The wire that leaves most of the work to later contributions. Means cannot be encoded in it."""
SPARSE_ENCODE, SPARSE_ACCUMULATE, SPARSE_DECODE = 0.4, 0.7, 0.3
"""The speeds of the sparse wire, relative to the speeds of int8, which `Processor` has. A benchmark measures them."""
EXACT_ENCODE, EXACT_ACCUMULATE, EXACT_DECODE = 2.5, 1.6, 2.0
"""The speeds of the wire fp32, relative to the speeds of int8, which `Processor` has. They are estimates: a copy
needs less time than rounding, and no benchmark has measured the ratios on several processors.
"""
SPARSE_ROUNDS, SPARSE_INNER_STEPS = 60, 20
"""The sparse wire is proposed for at least this number of rounds, with at most this number of inner steps.

Outside of these limits it cost more than 1 % of loss from random parameters, because the rest is about 1.3 rounds of
work. After pretraining it cost 0.2 % in ten rounds of 50 steps, and 0.5 % in four (`docs/results/scaling.json`).
"""
SPARSE_LOSS_PERCENT = (0.4, 1.0)
"""The smallest and the largest loss above `fp32` that the sparse wire had within these limits, in percent.

`docs/how-to/slow-links.md` has the measurement. int8 and int4 had no loss that could be measured.
"""
BLOCK_ELEMENTS = 1 << 20
SMALL_BYTES = 4 << 20
"""The largest contribution, and the largest mean, with which a mean is inside the seal.

Such a round has one phase instead of two.
"""
MAX_SHARDS = 64
RANGE_BYTES = 8 << 20
"""The bytes that one request reads."""
PIECE_BYTES, MOST_PIECES = 512 << 10, 4
"""The least size of a piece of an input, and the largest number of pieces.

The next piece is read while one is averaged.
"""
SNAPSHOT_PART_BYTES = 64 << 20
REQUESTS_IN_TURN = {"small": 10, "sharded": 17}
"""For each kind of round, the number of requests that must follow one another."""
MARGIN = 1.25
"""A good plan has room for rounds that take this factor longer than estimated."""
WIRES = ("int8", "int4")
"""The wires that a plan may propose, the usual one first."""
INNER_STEPS = (10, 20, 30, 50, 100, 200, 500)
FRAGMENTS = (1, 2, 4, 5, 8)
MANY_FRAGMENTS = (10, 16, 20, 25, 32, 50, 100)
"""The numbers of fragments to propose if fewer fragments would make objects that are too large for the store."""
UNEVEN = 1.1
"""The largest fragment may be larger than the average by this factor, because a fragment has whole layers."""
WORTH_IT = 0.9
"""If no plan hides the rounds, another wire is proposed only if it loses at most this share of the time."""
MAX_PARAMS = 10**15


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The speed of one replica's link to the store, while all replicas use it.

    Example:
        Link(up=2e6, down=4e6, latency_s=0.01)
    """

    up: float
    """Bytes per second to the store."""
    down: float
    """Bytes per second from the store."""
    latency_s: float
    """The seconds that a request without a body takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Processor:
    """The speed of one free core of a replica, in bytes of float32 per second. `diloco.processor` measures it.

    Example:
        Processor(copy=160e9)
    """

    encode: float = 1.5e9
    """The speed of encoding a contribution."""
    accumulate: float = 5e9
    """The speed of adding one contribution to a mean."""
    decode: float = 5e9
    """The speed of decoding a mean."""
    step: float = 1.5e9
    """The speed of the outer step."""
    copy: float = 8e9
    """The speed of copies on the device of the live parameters. 8 GB/s is the speed of a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """The prices of a store, in US dollars.

    Example:
        PRICES["s3"].put
    """

    put: float = 0.0
    """The price of one write request."""
    get: float = 0.0
    """The price of one read request."""
    egress: float = 0.0
    """The price of one byte that leaves the region of the store."""


PRICED_ON = "2026-11"
PRICES: Mapping[str, Prices] = {
    "s3": Prices(put=5.00e-6, get=0.40e-6, egress=0.09e-9),
    "r2": Prices(put=4.50e-6, get=0.36e-6),
    "directory": Prices(),
}
"""The prices of S3 Standard in a large region, of R2 Standard, and of a directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The training that is planned: the model, the replicas, their link and their processor.

    Raises:
        ValueError: a value is out of its range. The message names the value and the range.

    Example:
        Workload(params=10**9, n=4, step_s=1.0, link=Link(up=2e6, down=4e6, latency_s=0.01))
    """

    params: int
    """The number of parameters of the model."""
    n: int
    """The number of replicas."""
    step_s: float
    """The seconds that an inner step takes."""
    link: Link
    processor: Processor = field(default_factory=Processor)
    steps: int | None = None
    """The number of inner steps of the run. None: not known."""
    most_bytes: float = inf
    """The size of the largest object that the store accepts, in bytes."""

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
    """One choice of arguments of `DiLoCo`. The fields have the names of the arguments.

    Example:
        Choice(inner_steps=100, overlap_steps=20, wire="int8").check(workload)
    """

    inner_steps: int
    fragments: int = 1
    overlap_steps: int = 0
    wire: str = "int8"
    mean_wire: str | None = None
    """The wire of the means, with the default filled in. None: the default of `DiLoCo` for `wire`."""

    @property
    def steps_between(self) -> int:
        """Inner steps from the round of one fragment to the round of the next one."""
        return self.inner_steps // self.fragments

    @property
    def resolved_mean_wire(self) -> str:
        """The wire of the means, with the default filled in."""
        return self.mean_wire or MEAN_WIRES.get(self.wire, self.wire)

    def fits(self, workload: Workload) -> bool:
        """Return True if `DiLoCo` accepts these arguments, and the store accepts the objects that they make."""
        try:
            self.check(workload)
        except ValueError:
            return False
        return True

    def check(self, workload: Workload) -> None:
        """Check these arguments for a workload.

        Args:
            workload: the workload.

        Raises:
            ValueError: `DiLoCo` or the store would refuse an argument. The message names the argument and its range.
        """
        steps = workload.steps
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
        for_means = [*(name for name in BYTES_PER_ELEMENT if name != SPARSE_WIRE), EACH]
        for name, wire, legal in (
            ("wire", self.wire, list(BYTES_PER_ELEMENT)),
            ("mean_wire", self.resolved_mean_wire, for_means),
        ):
            if wire not in legal:
                raise ValueError(f"{name} must be one of {', '.join(legal)}, got {name}={wire!r}.")
        if (size := largest_object(workload, self)) > workload.most_bytes:
            raise ValueError(
                f"fragments must be at least {least_fragments(workload, self)}, because the store accepts no object of "
                f"more than {workload.most_bytes / 1e9:.3g} GB, got fragments={self.fragments}, which makes objects of "
                f"up to {size / 1e9:.3g} GB."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCost:
    """The estimated cost of one round of one fragment for one replica.

    Example:
        round_cost(workload, choice).seconds
    """

    link_s: float
    """The seconds of transfers at the speed of the link."""
    requests_s: float
    """The seconds of latency of requests that wait for each other."""
    processor_s: float
    """The seconds of computation, without the part that runs while the link moves the inputs of a mean."""
    noticing_s: float
    """The average seconds between the creation of an object and the next read that looks for it."""
    up: float
    """Bytes that the replica sends."""
    down: float
    """Bytes that the replica reads."""

    @property
    def seconds(self) -> float:
        """The seconds of the whole round."""
        return self.link_s + self.requests_s + self.processor_s + self.noticing_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A choice of arguments, and its estimated cost for a workload.

    Example:
        choose(workload).share
    """

    workload: Workload
    choice: Choice
    round: RoundCost

    @property
    def hidden_s(self) -> float:
        """Seconds that a round may take without making a step wait."""
        return self.choice.overlap_steps * self.workload.step_s

    @property
    def late_s(self) -> float:
        """Seconds for which `step()` waits when a round is due."""
        return max(0.0, self.round.seconds - self.hidden_s)

    @property
    def share(self) -> float:
        """The share of the time in which a replica does not train, from 0 to 1."""
        copies_s = 2 * 4 * self._elements / self.workload.processor.copy
        lost_s = self.late_s + copies_s
        return lost_s / (self.choice.steps_between * self.workload.step_s + lost_s)

    @property
    def has_room(self) -> bool:
        """True if no step waits even if a round takes a quarter longer than estimated."""
        return self.round.seconds * MARGIN <= self.hidden_s

    @property
    def rounds(self) -> int | None:
        """The number of planned rounds of each fragment. None: the number of steps is not known."""
        return None if self.workload.steps is None else self.workload.steps // self.choice.inner_steps

    @property
    def outer(self) -> tuple[float, float]:
        """The proposed outer learning rate and momentum. Short runs and short rounds need less momentum.

        For short runs and short rounds, the values never measured worse than one replica alone in
        docs/results/outer_settings.md. Longer runs were not measured, so they get the values of the paper, or less
        momentum if their rounds are rather short.
        """
        rounds = None if self.workload.steps is None else ceil(self.workload.steps / self.choice.inner_steps)
        inner_steps = self.choice.inner_steps
        if is_short_plan(inner_steps, rounds):
            return default_outer(inner_steps, rounds)
        if inner_steps < SHORT_ROUND_STEPS:
            return SHORT_PLAN_OUTER
        lr, momentum = PAPER_OUTER
        return lr, 0.8 if inner_steps < 2 * SHORT_ROUND_STEPS else momentum

    @property
    def up(self) -> float:
        """Bytes that a replica sends in `inner_steps` steps."""
        return self.choice.fragments * self.round.up

    @property
    def down(self) -> float:
        """Bytes that a replica reads in `inner_steps` steps."""
        return self.choice.fragments * self.round.down

    @property
    def _elements(self) -> int:
        return ceil(self.workload.params / self.choice.fragments)

    def requests_usd(self, prices: Prices, rounds: float, snapshot_every: int = 10) -> float:
        """Return the price of all requests of all replicas, in US dollars.

        Args:
            prices: the prices of the store.
            rounds: the number of rounds of each fragment.
            snapshot_every: the number of rounds from one snapshot to the next. Default 10.
        """
        entries = rounds * self.choice.fragments
        gets = 25 + 2 * (self.workload.n - 1) + self.round.down / RANGE_BYTES
        snapshots = entries // max(snapshot_every, self.choice.fragments)
        parts = 1 + ceil(8 * self.workload.params / SNAPSHOT_PART_BYTES)  # a snapshot has the anchor and the momentum
        return entries * self.workload.n * (4 * prices.put + gets * prices.get) + snapshots * parts * prices.put

    def egress_usd(self, prices: Prices, rounds: float) -> float:
        """Return the price of all bytes that replicas outside the region of the store read, in US dollars.

        Args:
            prices: the prices of the store.
            rounds: the number of rounds of each fragment.
        """
        return self.workload.n * rounds * self.down * prices.egress


def round_cost(workload: Workload, choice: Choice) -> RoundCost:
    """Return the estimated cost of one round of the largest fragment for one replica.

    Args:
        workload: the workload.
        choice: the arguments of `DiLoCo`.
    """
    elements, n, link, cpu = ceil(workload.params / choice.fragments), workload.n, workload.link, workload.processor
    w = BYTES_PER_ELEMENT[choice.wire]
    is_stored = choice.resolved_mean_wire != EACH
    v = BYTES_PER_ELEMENT[choice.resolved_mean_wire] if is_stored else 0.0
    part = 1.0  # the share of the fragment whose mean one replica computes
    pieces = 1
    if is_stored and elements * max(w, v) <= SMALL_BYTES:
        # All replicas wait for one replica, which reads the contributions of the others, and sends the mean inside the
        # seal.
        link_s = (elements * (w + v)) / link.up + ((n - 1) * elements * w + elements * v) / link.down
        requests = REQUESTS_IN_TURN["small"]
        up, down = elements * (w + v / n), elements * ((n - 1) * w / n + v)  # the average over all replicas
    else:
        part = _largest_shard(elements, n) if is_stored else 1.0
        up, down = elements * (w + part * v), elements * ((n - 1) * part * w + (1 - part) * v)
        link_s = up / link.up + down / link.down
        requests = REQUESTS_IN_TURN["sharded"]
        pieces = max(1, min(MOST_PIECES, int(elements * part * w) // PIECE_BYTES))
    requests_s = requests * link.latency_s
    size = 4 * elements
    encode_s, add_s, decode_s = size / cpu.encode, n * part * size / cpu.accumulate, size / cpu.decode
    if choice.wire == SPARSE_WIRE:
        # to compute the rest, the sender decodes its own contribution, which takes longer than with int8
        encode_s = encode_s / SPARSE_ENCODE + decode_s / SPARSE_DECODE
        add_s /= SPARSE_ACCUMULATE
    inputs_s = (n - 1) * part * elements * w / link.down
    add_s -= (1 - 1 / pieces) * min(add_s, inputs_s)
    processor_s = encode_s + add_s + decode_s + size / cpu.step
    # The pauses between two reads grow with the wait, up to one second. Each phase of the round loses half a pause on
    # average.
    noticing_s = 2 * min(0.5, 0.15 * (link_s + requests_s + processor_s))
    return RoundCost(
        link_s=link_s, requests_s=requests_s, processor_s=processor_s, noticing_s=noticing_s, up=up, down=down
    )


def _largest_shard(elements: int, n: int) -> float:
    """Return the size of the largest shard as a share of the fragment, from 0 to 1."""
    blocks = ceil(elements / BLOCK_ELEMENTS)
    shards = max(1, min(n, elements // BLOCK_ELEMENTS, MAX_SHARDS))  # the same division as in `Layout.n_shards`
    return ceil(blocks / shards) / blocks


def largest_object(workload: Workload, choice: Choice) -> float:
    """Return the size of the largest object of a round in bytes: a contribution, or a shard of the mean.

    Args:
        workload: the workload.
        choice: the arguments of `DiLoCo`.
    """
    elements = ceil(workload.params / choice.fragments)
    # a mean that is not stored has only a head
    mean_bytes = _largest_shard(elements, workload.n) * BYTES_PER_ELEMENT.get(choice.resolved_mean_wire, 0.0)
    return elements * max(BYTES_PER_ELEMENT[choice.wire], mean_bytes) * (UNEVEN if choice.fragments > 1 else 1)


def least_fragments(workload: Workload, choice: Choice) -> int:
    """Return the smallest number of fragments, at least 2, whose objects the store accepts.

    Args:
        workload: the workload.
        choice: the arguments of `DiLoCo`. Its number of fragments does not matter.
    """
    return max(2, ceil(largest_object(workload, replace(choice, fragments=2)) * 2 / workload.most_bytes))


def faster_exact_round(plan: Plan) -> RoundCost | None:
    """Return the cost of a round with the wire fp32, if it is less by a tenth than with the plan's wire. None: it is
    not.

    Over a fast store, encoding takes longer than the bytes that it saves.

    Args:
        plan: the plan, with the speeds of the processor for int8.

    Example:
        faster_exact_round(choose(workload))
    """
    cpu, choice = plan.workload.processor, replace(plan.choice, wire="fp32", mean_wire=None)
    if plan.choice.wire == choice.wire or not choice.fits(plan.workload):
        return None
    exact = replace(
        cpu,
        encode=EXACT_ENCODE * cpu.encode,
        accumulate=EXACT_ACCUMULATE * cpu.accumulate,
        decode=EXACT_DECODE * cpu.decode,
    )
    cost = round_cost(replace(plan.workload, processor=exact), choice)
    return cost if cost.seconds < WORTH_IT * plan.round.seconds else None


def cost_of_round(
    elements: int, n: int, wire: str, mean_wire: str | None, link: Link, processor: Processor
) -> RoundCost:
    """Return the estimated cost of one round of one fragment for one replica.

    Args:
        elements: the number of values of the fragment.
        n: the number of replicas.
        wire: the wire of contributions.
        mean_wire: the wire of means. None: the default of `DiLoCo` for `wire`.
        link: the link of a replica.
        processor: the processor of a replica.
    """
    workload = Workload(params=elements, n=n, step_s=1.0, link=link, processor=processor)
    return evaluate(workload, Choice(inner_steps=1, wire=wire, mean_wire=mean_wire)).round


def evaluate(workload: Workload, choice: Choice) -> Plan:
    """Return the estimated cost of a choice of arguments.

    Args:
        workload: the workload.
        choice: the arguments of `DiLoCo`.

    Raises:
        ValueError: `DiLoCo` or the store would refuse an argument.
    """
    choice.check(workload)
    return Plan(workload=workload, choice=choice, round=round_cost(workload, choice))


def choose(
    workload: Workload,
    *,
    wires: Sequence[str] = WIRES,
    mean_wire: str | None = None,
    inner_steps: int | None = None,
    fragments: int | None = None,
    overlap_steps: int | None = None,
) -> Plan:
    """Return the plan with the shortest rounds for which no step waits. If there is none, return the fastest plan.

    If several plans have these `inner_steps`, the one with the smallest overlap is chosen. A later wire of `wires` is
    chosen if it at least halves `inner_steps`, or if steps wait with both wires and the later wire loses a tenth less
    time.

    If steps wait with every usual wire, the sparse wire is tried, too. It costs more loss, so it is proposed only for
    runs of at least 60 rounds of up to 20 inner steps.

    Args:
        workload: the workload.
        wires: the wires to choose from, the usual one first.
        mean_wire: the wire of means. None: the default of `DiLoCo` for `wire`.
        inner_steps: a fixed value. None: the planner chooses it.
        fragments: a fixed value. None: the planner chooses it.
        overlap_steps: a fixed value. None: the planner chooses it, so that a round may take a quarter longer than
            estimated.

    Raises:
        ValueError: `DiLoCo` would refuse a value, or the store would refuse the objects that it makes.

    Example:
        choose(workload, inner_steps=100).choice
    """
    multiple = fragments or 1  # inner_steps must be a multiple of fragments, so the usual lengths are rounded up
    lengths = [multiple * ceil(length / multiple) for length in INNER_STEPS] if inner_steps is None else [inner_steps]
    few, many = (FRAGMENTS, MANY_FRAGMENTS) if fragments is None else ((fragments,), ())
    given = Choice(inner_steps=lengths[0], fragments=few[0], mean_wire=mean_wire, overlap_steps=overlap_steps or 0)

    def fitting(wire: str, parts: Sequence[int]) -> list[Choice]:
        choices = (
            replace(given, inner_steps=length, fragments=part, wire=wire) for length in lengths for part in parts
        )
        return [choice for choice in choices if choice.fits(workload)]

    found = [choices for wire in wires if (choices := fitting(wire, few) or fitting(wire, many))]
    if not found:
        replace(given, wire=wires[0]).check(workload)
    best, *others = (_best(workload, choices, overlap_steps) for choices in found)
    for plan in others:
        if plan.has_room or best.has_room:
            is_better = plan.has_room and not (best.has_room and 2 * plan.choice.inner_steps > best.choice.inner_steps)
        else:
            is_better = plan.share <= WORTH_IT * best.share
        best = plan if is_better else best
    if wires == WIRES and not best.has_room and mean_wire != SPARSE_WIRE:
        sparse = [choice for choice in fitting(SPARSE_WIRE, few) if _suits_sparse_wire(workload, choice)]
        if sparse:
            if workload.n <= EACH_REPLICAS and mean_wire is None:
                sparse = [replace(choice, mean_wire=EACH) for choice in sparse]
            plan = _best(workload, sparse, overlap_steps)
            best = plan if plan.has_room or plan.share <= WORTH_IT * best.share else best
    return best


def _suits_sparse_wire(workload: Workload, choice: Choice) -> bool:
    """Return True if a run has enough rounds, and rounds that are short enough, for the sparse wire."""
    rounds = 0 if workload.steps is None else workload.steps // choice.inner_steps
    return choice.inner_steps <= SPARSE_INNER_STEPS and rounds >= SPARSE_ROUNDS


def _best(workload: Workload, choices: Iterable[Choice], overlap_steps: int | None) -> Plan:
    """Return the best plan of some choices with one wire."""
    plans = [
        evaluate(workload, each) if overlap_steps is not None else with_hiding_overlap(workload, each)
        for each in choices
    ]
    if with_room := [plan for plan in plans if plan.has_room]:
        return min(
            with_room, key=lambda plan: (plan.choice.inner_steps, plan.choice.overlap_steps, plan.choice.fragments)
        )
    return min(plans, key=lambda plan: (plan.share, plan.choice.inner_steps, plan.choice.fragments))


def with_larger_wire(plan: Plan) -> Plan | None:
    """Return a plan with the next larger wire and otherwise the same settings. None: the plan has the usual wire.

    The difference is the gain in time of the smaller wire.

    Args:
        plan: a plan whose wire was chosen by `choose`.

    Example:
        with_larger_wire(choose(workload))
    """
    wires = (*WIRES, SPARSE_WIRE)
    if (place := wires.index(plan.choice.wire)) == 0:
        return None
    choice = replace(plan.choice, wire=wires[place - 1], mean_wire=None)
    return evaluate(plan.workload, choice) if choice.fits(plan.workload) else None


def with_hiding_overlap(workload: Workload, choice: Choice) -> Plan:
    """Return the plan of a choice with the smallest overlap that hides a round, or with the largest one if none does.

    Args:
        workload: the workload.
        choice: the arguments of `DiLoCo`. Its overlap is replaced.
    """
    overlap_steps = min(ceil(MARGIN * round_cost(workload, choice).seconds / workload.step_s), choice.steps_between - 1)
    return evaluate(workload, replace(choice, overlap_steps=overlap_steps))
