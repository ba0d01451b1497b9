"""The data of one round in memory, and `Context`: the services that all parts of one replica's rendezvous share.

`PendingWork` goes from the training thread to the round runner, and `RoundResult` comes back. `EntryState` has what a
replica knows about one entry. The user gets a `RoundReport`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from time import monotonic
from typing import Any, Literal, NamedTuple

from diloco.rendezvous.envelope import Proof
from diloco.rendezvous.frames import MAX_SHARDS, READ_TRIES, Contribution, MeanHead, hash_order, head_bytes
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity, Membership
from diloco.rendezvous.phase import Phase, RoundPlan
from diloco.rendezvous.reduction import BlockFormat, Reduce, weighted_mean
from diloco.rendezvous.retrying_store import Ask, Map, RetryingStore, at_once, backoff
from diloco.rendezvous.standstill_watch import STANDS_AFTER_S, StandstillWatch
from diloco.rendezvous.training_state import Arrays, PackedWork, TrainingState
from diloco.wires import EACH
from diloco.wires.wire import BLOCK_ELEMENTS, Wire
from executors.patience import ROUND
from executors.store.standstill import Standstill

Background = Callable[[Callable[[], None]], None]
"""Runs a job in another thread while training continues. The call returns at once."""
Wait = Callable[[float, Sequence[str]], None]
"""Waits for a number of seconds. It may return earlier if an object below one of the key prefixes changes."""
FIRST_PAUSE_S, MOST_PAUSE_S = 0.002, 1.0
MOST_PIECES = 4
"""With this number of pieces, a quarter of the time for the average comes after the last byte of its inputs."""
LOOKS_PER_S = 2000
"""The number of times that the replicas of a run together look for an object in a second.

A bucket answers some thousand requests in a second, and a thousand replicas wait for a round at the same time.
"""
ASK_AGAIN_S, ANSWERS_PER_QUESTION, PAUSES_PER_QUESTION = 0.1, 20, 4
"""The shortest time between two questions which peers have left: in seconds, in answers of the store, and in the
shortest pauses of this run. The longest of the three counts.

Each of these questions costs three requests, and peers rarely leave.
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """The time limits of a rendezvous, and the sizes at which it changes its method. The protocol is correct for any
    values.

    Example:
        Limits(grace_s=10.0)
    """

    grace_s: float = 30.0
    """The longest wait for a missing replica: the argument `grace_s` of `DiLoCo`."""
    round_timeout_s: float = ROUND.seconds
    """Seconds after which a round without a decision ends the replica with an error."""
    takeover_after_s: float = 5.0
    """Seconds after which a replica does the work of another replica that has not done that work."""
    abort_check_s: float = 1.0
    """The shortest time, in seconds, between two looks for an abort."""
    small_bytes: int = 4 << 20
    """The largest size of a contribution, and of a mean, with which the mean is stored inside the seal.

    Larger means are cut into shards.
    """
    block_elements: int = BLOCK_ELEMENTS
    """The elements of one block, which has one digest. All replicas must agree on it."""
    piece_bytes: int = 512 << 10
    """The least size of a piece of an input from a remote store. The next piece is read while one is averaged."""


class ShardRange(NamedTuple):
    """The range of one shard: its blocks, its bytes in a contribution, and the size of its mean."""

    first_block: int
    end_block: int
    start: int
    """The offset of the shard in the payload of a contribution, in bytes."""
    size_bytes: int
    """The size of the shard in a contribution."""
    mean_bytes: int
    """The size of the shard in the mean."""
    n_elements: int


@dataclass(frozen=True)
class Layout:
    """Cuts the elements of an entry into blocks and shards: each block has one digest, and one rank reduces each shard.

    Args:
        n_elements: the number of elements of the fragment.
        limits: the sizes of blocks, and of small entries.
        wire: the encoding of contributions.
        mean_wire: the encoding of means.
        clips: True if contributions that are much larger than the others are scaled down.

    Example:
        Layout(n, Limits(), FP32, FP32).shard(0, 4)
    """

    n_elements: int
    limits: Limits
    wire: Wire
    mean_wire: Wire
    clips: bool = False

    @cached_property
    def n_blocks(self) -> int:
        """The number of blocks."""
        return -(-self.n_elements // self.limits.block_elements)

    @cached_property
    def block_bytes(self) -> int:
        """The size of each block of a contribution but the last one."""
        return self.wire.size(self.limits.block_elements)

    @cached_property
    def mean_block_bytes(self) -> int:
        """The size of each block of a mean but the last one."""
        return self.mean_wire.size(self.limits.block_elements)

    @cached_property
    def size_bytes(self) -> int:
        """The size of the payload of a contribution."""
        return self.shard(0, 1).size_bytes

    @cached_property
    def mean_bytes(self) -> int:
        """The size of the whole mean."""
        return self.shard(0, 1).mean_bytes

    @cached_property
    def head_bytes(self) -> int:
        """The size of the head of a contribution, which is the offset of its payload."""
        return head_bytes(self.n_blocks)

    @property
    def stores_mean(self) -> bool:
        """False: only the head of a mean is stored, and each replica computes the mean from all contributions."""
        return self.mean_wire.name != EACH.name

    @cached_property
    def is_small(self) -> bool:
        """True if the mean is stored inside the seal.

        Then the contributions are read whole, too. So both must be small: a mean may be larger than a contribution.
        """
        return self.stores_mean and max(self.size_bytes, self.mean_bytes) <= self.limits.small_bytes

    def n_shards(self, n_ranks: int) -> int:
        """Return the number of shards of a mean: one for each rank, but none smaller than a block, and at most 64.

        A mean that is not stored has one shard, whose head is stored.

        Args:
            n_ranks: the number of ranks that reduce the mean.
        """
        if not self.stores_mean:
            return 1
        return max(1, min(n_ranks, self.n_elements // self.limits.block_elements, MAX_SHARDS))

    def shard(self, shard: int, n_shards: int) -> ShardRange:
        """Return the range of a shard.

        Args:
            shard: the shard, from 0.
            n_shards: the number of shards.
        """
        return self._range(shard * self.n_blocks // n_shards, (shard + 1) * self.n_blocks // n_shards)

    def pieces(self, whole: ShardRange) -> list[ShardRange]:
        """Cut a range into at most `MOST_PIECES` pieces of about the same size, each of whole blocks.

        Args:
            whole: the range.
        """
        n_blocks = whole.end_block - whole.first_block
        n = max(1, min(MOST_PIECES, whole.size_bytes // self.limits.piece_bytes, n_blocks))
        ends = [whole.first_block + piece * n_blocks // n for piece in range(n + 1)]
        return [self._range(first, end) for first, end in pairwise(ends)]

    def _range(self, first: int, end: int) -> ShardRange:
        """Return the range of some blocks."""
        block = self.limits.block_elements
        n_whole = min(end, self.n_elements // block) - first
        n_elements = min(end * block, self.n_elements) - first * block
        rest = n_elements - n_whole * block
        return ShardRange(
            first,
            end,
            first * self.block_bytes,
            n_whole * self.block_bytes + self.wire.size(rest),
            n_whole * self.mean_block_bytes + self.mean_wire.size(rest),
            n_elements,
        )

    def kept_bytes(self, n_ranks: int, *, streams: bool) -> int:
        """Return the largest number of bytes of a payload that stay in memory.

        If the store streams, it is only the shard that this replica will probably reduce.

        Args:
            n_ranks: the number of ranks that are expected.
            streams: True if the store accepts a contribution while it is still being encoded.
        """
        if self.is_small or not streams or not self.wire.is_exact:
            return self.size_bytes
        largest_shard = -(-self.n_blocks // self.n_shards(n_ranks))
        return min(self.size_bytes, largest_shard * self.block_bytes)

    def blocks(self, n_elements: int, proof: Proof) -> BlockFormat:
        """Return the format of a range of whole blocks.

        Args:
            n_elements: the number of elements of the range.
            proof: the kind of digests.
        """
        return BlockFormat(n_elements, self.limits.block_elements, self.wire, self.mean_wire, proof, self.clips)


def owners(entry: int, ranks: Iterable[int], shard: int) -> list[int]:
    """Return ranks in the order in which they take over a shard. The first one is its owner.

    The shards of an entry are distributed evenly over the owners.

    Args:
        entry: the entry.
        ranks: the ranks that reduce the mean.
        shard: the shard.
    """
    order = hash_order(ranks, "mean", entry)
    turn = shard % len(order)
    return order[turn:] + order[:turn]


def shards_of(rank: int, entry: int, ranks: Iterable[int], n_shards: int) -> list[int]:
    """Return the shards of an entry that a rank owns.

    Args:
        rank: the rank.
        entry: the entry.
        ranks: the ranks that reduce the mean.
        n_shards: the number of shards.
    """
    order = hash_order(ranks, "mean", entry)
    return list(range(order.index(rank), n_shards, len(order)))


@dataclass(kw_only=True, eq=False)
class Context:
    """The services that all parts of one replica's rendezvous share.

    The context builds all of them, once. Time, waiting and randomness are arguments, so that tests run the rendezvous
    with a simulated clock.

    Args:
        store: the store of the run. An error of the store means the same as "not yet".
        keys: the keys of the rendezvous.
        me: this process as a replica of the run.
        training: the anchor, the outer state and the live work.
        plan: divides the inner steps into entries.
        proof: signs records, or adds checksums.
        wait: waits between two looks at the store. It may raise an error that ends the rounds.
        in_background: True if rounds run in a thread of their own while training continues.
        origin: the run whose newest complete snapshot is the beginning of this run. None: the run is new.
        first_state: returns the anchor and the outer state that this run begins with. None: it begins with the model
            of a replica.
        limits: time limits, and the sizes of blocks and of small entries.
        min_quorum: the least number of contributions that decide a round.
        weight: the weight of this replica's work in the mean: a number, or a callable that is asked for each
            contribution.
        carry_rounds: the number of rounds of its fragment after which uncounted work is given up. None: never.
        snapshot_every: entries from one snapshot to the next.
        clock: returns seconds of a monotonic clock.
        rng: the random generator that shortens pauses.
        reduce: averages encoded blocks.
        map: applies a function to several arguments, perhaps in several threads.
        ask: asks the store a question, perhaps in another thread.
        background: runs a job while training continues.
        on_standstill: called with the round that waits until the user deletes an object. Called with None when the
            rounds continue.

    Example:
        context = Context(store=store, keys=keys, me=me, training=state, plan=plan, proof=UNSIGNED, wait=watch.wait)
    """

    store: RetryingStore
    keys: Keys
    me: Identity
    training: TrainingState
    plan: RoundPlan
    proof: Proof
    wait: Wait
    in_background: bool = False
    origin: str | None = None
    first_state: Callable[[], Arrays] | None = None
    limits: Limits = field(default_factory=Limits)
    min_quorum: int = 1
    weight: float | Callable[[], float] = 1.0
    carry_rounds: int | None = None
    snapshot_every: int = 10
    clock: Callable[[], float] = monotonic
    rng: random.Random = field(default_factory=random.Random)
    reduce: Reduce = weighted_mean
    map: Map = map
    ask: Ask = at_once
    background: Background = lambda job: job()
    on_standstill: Callable[[Standstill | None], None] = lambda found: None
    members: Membership = field(init=False)
    """Finds out which replicas take part."""
    phase: Phase = field(init=False)
    """Counts the steps since the last round, and decides whether the next round is due."""
    standstill: StandstillWatch = field(init=False)
    """Reports objects that block the rounds of this replica, because they are not signed with the run's key."""
    layouts: tuple[Layout, ...] = field(init=False)
    """The layout of each fragment."""

    def __post_init__(self) -> None:
        training = self.training
        self.members = Membership(self.store, self.keys, self.me, self.clock, self.limits.abort_check_s, self.map)
        self.phase = Phase(self.plan, self.clock)
        after_s = min(STANDS_AFTER_S, self.limits.grace_s)
        self.standstill = StandstillWatch(
            self.store, self.keys, self.me, self.members, self.on_standstill, self.clock, after_s
        )
        self.layouts = tuple(
            Layout(n, self.limits, training.wire, training.mean_wire, training.clips) for n in training.sizes()
        )

    def state_digests(self) -> tuple[str, ...]:
        """Return the digest of the anchor and the outer state of each fragment."""
        return tuple(self.training.digest(fragment) for fragment in range(len(self.layouts)))

    @property
    def ask_again_s(self) -> float:
        """The seconds between two questions about which replicas have left. A slow store is asked less often."""
        return max(
            ASK_AGAIN_S, ANSWERS_PER_QUESTION * min(self.store.answer_s, 1.0), PAUSES_PER_QUESTION * self._least_s
        )

    def pauses(self) -> Iterator[float]:
        """Yield the pauses, in seconds, between two looks for the work of other replicas."""
        most_s = min(MOST_PAUSE_S, max(0.02, self.limits.grace_s / 4))
        return backoff(self.rng, first_s=min(most_s, max(FIRST_PAUSE_S, self._least_s)), most_s=most_s)

    @property
    def _least_s(self) -> float:
        """The shortest pause between two looks of one replica, in seconds, so that all together look `LOOKS_PER_S`
        times in a second.
        """
        return len(self.members.expected) / LOOKS_PER_S


@dataclass(frozen=True, slots=True)
class PendingWork:
    """Work that the training thread holds for an entry and hands to the round runner."""

    entry: int
    weight: float
    """The weight of the work. 0: the replica has no work, or its number of steps is not known."""
    steps: int
    """The inner steps of this process in the held work, also if the work is not sent."""
    work: float
    """The amount of work that is sent: the value of a callable weight, or otherwise the number of steps."""
    at_step: int
    """The number of steps that this process had made when the work was held."""
    is_early: bool
    """True if this replica is out of phase and continues to train. A seal then counts only a part of the live work."""


@dataclass(frozen=True, slots=True)
class ResolvedSteps:
    """The number of steps of a fragment that a seal has counted, or that were dropped."""

    fragment: int
    steps: int | None
    """The number of steps that a seal has counted or that were dropped. None: all steps in the live work."""


@dataclass(frozen=True, slots=True)
class RoundResult:
    """The result of a job of the round runner. The training thread merges it into the live parameters."""

    reports: tuple[RoundReport, ...]
    resolved: tuple[ResolvedSteps, ...]
    n_entries: int
    """The number of entries that were passed."""
    is_out_of_phase: bool
    """True if this replica is out of phase from now on."""
    has_met: bool
    """True if this replica waited for the others at the end of its phase."""
    looked_step: int
    """The number of steps of this process at the last look that found no seal.

    The number is used if this replica did not wait for the others.
    """
    looked_s: float
    """The time of the last look that found no seal."""
    ready_s: float
    """The time at which the result was complete."""
    is_urgent: bool
    """True if the result must be merged at the next step, even if means are otherwise applied at a fixed step."""


@dataclass(slots=True)
class EntryState:
    """The state of one entry, as one replica knows it: a cache of immutable objects, and measured times.

    All times are of the replica's own clock, in seconds.

    Example:
        entry = EntryState.begin(context, 12)
    """

    index: int
    """The entry: 0, 1, 2, … in the log."""
    fragment: int
    layout: Layout
    started_s: float
    """The time at which this replica last began to wait for the round, or first knew of the entry."""
    sealed_s: float | None = None
    """The time at which this replica first saw the seal of a large mean."""
    packed: PackedWork | None = None
    """The encoded work of this process."""
    published: bool = False
    """True if a contribution of this rank is in the store."""
    published_s: float | None = None
    """The time at which this replica first knew of its contribution in the store."""
    pending: PendingWork | None = None
    """The work that the training thread has handed over for the entry."""
    is_foreign: bool = False
    """True if the contribution of this rank in the store is from another process."""
    sent: set[str] = field(default_factory=set)
    """Digests of the heads that this process sent with `packed`. Any of these heads may be the stored one."""
    busy_from_s: float | None = None
    """The time at which work for the entry began."""
    began_s: float | None = None
    """The time at which this replica began to wait for the seal."""
    grace_from_s: float | None = None
    """The time at which the grace begins. None: no expected process is known to wait."""
    overwritten: set[int] = field(default_factory=set)
    """Shards whose mean has overwritten the payload in memory. The input of this replica for these shards must be read
    from the store.
    """
    seen: dict[int, tuple[Contribution, str]] = field(default_factory=dict)
    """The heads of contributions and their digests, by rank."""
    payloads: dict[int, memoryview] = field(default_factory=dict)
    """The payloads of small contributions, by rank."""
    misread: dict[int, int] = field(default_factory=dict)
    """The number of wrong readings of each rank's contribution."""
    means: dict[int, memoryview] = field(default_factory=dict)
    """The parts of the mean that were read, by shard."""
    computed: tuple[MeanHead, memoryview] | None = None
    """The mean that this replica has computed from all contributions, if means are not stored."""
    left_out: set[int] = field(default_factory=set)
    """Ranks whose input could not be used, according to the shards of the mean."""
    clipped: set[int] = field(default_factory=set)
    """Ranks whose input was scaled down in a block, according to the shards of the mean."""
    reloaded: bool = False
    """True if this replica was outvoted in this entry, and has taken the state from the log again."""
    blocked: str | None = None
    """The key of an object that the mean needs and that was missing or damaged at the last look. None: no object."""
    retry_s: float = 0.0
    """The time from which this replica may compute the mean again after inputs could not be used."""
    retry_pause_s: float = 0.0
    """The seconds from the last such try to the next one."""
    warned: set[int] = field(default_factory=set)
    """The ranks whose bad input this replica has reported."""
    ask_s: float = 0.0
    """The time of the next check which owners of shards have left."""
    turn_s: float = 0.0
    """The time of the next check whether it is the turn of this replica to look for contributions."""
    order: list[int] = field(default_factory=list)
    """The ranks in the order in which they look for contributions. Empty: not computed yet."""
    looks: int = 0
    """The number of looks of this replica for contributions."""
    looked_to: int = -1
    """The rank at which the last of these looks has ended."""
    move_s: float = 0.0
    """Seconds spent on packing, sending and reading."""
    wait_s: float = 0.0
    """Seconds spent on waiting for others."""
    reduce_s: float = 0.0
    """Seconds spent on computing the mean."""
    read_before: int = 0
    """Bytes that this process had read from the store when the entry began."""
    written_before: int = 0
    """Bytes that this process had written when the entry began."""

    @classmethod
    def begin(cls, context: Context, index: int) -> EntryState:
        """Return the state of an entry about which this replica knows nothing yet.

        Args:
            context: the services of the rendezvous.
            index: the entry.
        """
        layouts, store = context.layouts, context.store
        fragment = index % len(layouts)
        return cls(
            index, fragment, layouts[fragment], context.clock(),
            read_before=store.read_bytes, written_before=store.written_bytes,
        )  # fmt: skip

    @property
    def unreadable_ranks(self) -> set[int]:
        """The ranks whose contributions exist, but are permanently damaged."""
        return {rank for rank, tries in self.misread.items() if tries >= READ_TRIES}


@dataclass(frozen=True, slots=True)
class RoundReport:
    """The result of one round on one replica, and its cost.

        report = diloco.step()
        if report is not None:
            print(f"round {report.round}: {len(report.ranks)} replicas, waited {report.wait_s:.1f} s")

    Times are in seconds, and sizes in bytes. `sum_of` adds up the costs of several rounds.

    Attributes:
        round: Number of the round over all fragments: 1, 2, 3, …, as `DiLoCo.rounds` counts. Stored keys count from 0.
        fragment: Number of the fragment that the round averaged, from 0.
        ranks: The replicas whose contributions are in the mean.
        counted: True if this replica's contribution is in the mean.
        verdict: Treatment of this replica's work. "counted": it is in the mean. "carried": it is part of the next
            contribution. "dropped": it was discarded.
        work: Amount of this replica's work: the value of a `weight` function, or else the number of inner steps.
        same: The ranks that sent the same work as this replica, bit for bit, this rank included. They train on the same
            data. Empty if no other replica did.
        elements: Number of values in the fragment.
        wire: Encoding of contributions, such as "fp32" or "int8".
        mean_wire: Encoding of the mean.
        bytes_up: Bytes that this replica wrote to the store.
        bytes_down: Bytes that this replica read from the store.
        wait_s: Time for which the round waited for other replicas.
        move_s: Time for packing, sending and reading.
        reduce_s: Time for computing this replica's shard of the mean.
        step_s: Time for the outer step.
        train_s: Time for training since the previous round.
        norm: Euclidean norm of this replica's pseudo-gradient. None: this replica sent no work.
        mean_norm: Euclidean norm of the mean. None: no replica sent any work.
        ended: Time of the outer step, by the clock `time.monotonic` of this process.
        late_s: Time for which training waited. It is less than the duration of the round if rounds run in the
            background.
        busy_s: Time that the round took, also while training continued.
        stale_steps: Inner steps between sending the work and applying the mean.
        wire_error: Part of this replica's work that was not sent: |work - sent| / |work|. It is part of later
            contributions. With wire="top8" it is about 0.8 in every round, as intended. None: not
            measured.
        clipped: The ranks whose contribution was scaled down, because it was much larger than the others. Empty without
            `robust="clip"`.
    """

    round: int
    fragment: int
    ranks: tuple[int, ...]
    counted: bool
    verdict: Literal["counted", "carried", "dropped"]
    work: float
    same: tuple[int, ...]
    elements: int
    wire: str
    mean_wire: str
    bytes_up: int
    bytes_down: int
    wait_s: float
    move_s: float
    reduce_s: float
    step_s: float
    train_s: float
    norm: float | None
    mean_norm: float | None
    ended: float
    late_s: float = 0.0
    busy_s: float = 0.0
    stale_steps: int = 0
    wire_error: float | None = None
    clipped: tuple[int, ...] = ()

    def line(self) -> dict[str, Any]:
        """Return the fields that are stored with the run, as `executors.metrics.rows.Round` describes them.

        Example:
            report.line()["wait_s"]
        """
        seconds = {
            name: round(getattr(self, name), 6)
            for name in ("train_s", "wait_s", "move_s", "reduce_s", "step_s", "late_s", "busy_s")
        }
        return {
            "entry": self.round - 1,
            "fragment": self.fragment,
            "ranks": self.ranks,
            "verdict": self.verdict,
            "weight": self.work,
            "elements": self.elements,
            "wire": self.wire,
            "mean_wire": self.mean_wire,
            "up": self.bytes_up,
            "down": self.bytes_down,
            **seconds,
            "norm": self.norm,
            "mean_norm": self.mean_norm,
            "stale_steps": self.stale_steps,
            "wire_error": self.wire_error,
            **({"same": self.same} if self.same else {}),
            **({"clipped": self.clipped} if self.clipped else {}),
        }

    @classmethod
    def sum_of(cls, reports: Sequence[RoundReport]) -> RoundReport:
        """Return the last of several rounds that one call applied, with the costs of all of them added up.

            RoundReport.sum_of(diloco.sync())

        Args:
            reports: The reports of the rounds, at least one, in their order.
        """
        costs = ("bytes_up", "bytes_down", "wait_s", "move_s", "reduce_s", "step_s", "train_s", "late_s", "busy_s")
        return replace(reports[-1], **{cost: sum(getattr(report, cost) for report in reports) for cost in costs})


FAR = 3.0
"""If the mean is more than this number of times as large as a replica's own work, the other work is even larger."""


def leads_far(report: RoundReport) -> bool:
    """Return True if a round moved this replica by work of others alone, or by work that is much larger than its own.

    After such a round, healthy gradients may lead straight back to the values before it.

    Args:
        report: the report of the round.

    Example:
        leads_far(report)
    """
    norm, mean_norm = report.norm, report.mean_norm
    if not report.counted or report.clipped:
        return True
    return norm is not None and mean_norm is not None and mean_norm > FAR * norm
