"""How a replica computes a mean from inputs in a remote store: it reads the next piece while it averages one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.patience import ENDLESS

from diloco.rendezvous.envelope import UNSIGNED, unframe
from diloco.rendezvous.frames import Contribution, Seal, SealedReplica, digests_of, head_bytes
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.mean import Reducer
from diloco.rendezvous.membership import Identity
from diloco.rendezvous.phase import RoundPlan
from diloco.rendezvous.reduction import Reduce, weighted_mean
from diloco.rendezvous.retrying_store import ParallelMap, RetryingStore
from diloco.rendezvous.round import Context, EntryState, Limits, owners
from diloco.wires import FP32
from executors.store import MemoryStore

KEYS = Keys("test", "main")
N_RANKS, N_BLOCKS, BLOCK_ELEMENTS = 3, 6, 4
N_ELEMENTS, BLOCK_BYTES = N_BLOCKS * BLOCK_ELEMENTS, 4 * BLOCK_ELEMENTS
TAKEOVER_S = 5.0
SOON_S = 30.0


class Remote(MemoryStore):
    """A store in memory that calls a function with the first block of each range of a payload that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.before_block: Callable[[int], Any] = lambda first_block: None

    def get(self, key: str, *, start: int = 0, size: int | None = None) -> memoryview:
        if start >= head_bytes(N_BLOCKS):
            self.before_block((start - head_bytes(N_BLOCKS)) // BLOCK_BYTES)
        return super().get(key, start=start, size=size)


def sealed(store: MemoryStore, damaged_block: int | None = None) -> Seal:
    """Store a contribution of each rank, and return a seal of one shard. A block of rank 1 may be damaged."""
    members = {}
    for rank in range(N_RANKS):
        payload = bytearray(np.random.default_rng(rank).standard_normal(N_ELEMENTS, np.float32).tobytes())
        digests = digests_of(payload, BLOCK_BYTES, UNSIGNED)
        head = Contribution(
            rank, 0, str(rank), 1.0 + rank, "d" * 32, len(payload), digests, (1.0,) * N_BLOCKS
        ).head("", UNSIGNED)  # fmt: skip
        if rank == 1 and damaged_block is not None:
            payload[damaged_block * BLOCK_BYTES] ^= 1
        store.put(KEYS.contribution(0, rank), head + bytes(payload))
        members[rank] = SealedReplica(str(rank), 0, 1.0 + rank, unframe(head, "", UNSIGNED)[1])
    return Seal(members, "d" * 32, 1)


def context(
    store: MemoryStore,
    pieces: int,
    *,
    rank: int = N_RANKS,
    reduce: Reduce = weighted_mean,
    clock: Callable[[], float] = lambda: 0.0,
) -> Context:
    """Return the services of a replica that reads an input in a number of pieces. By default, it is in no seal."""
    limits = Limits(
        small_bytes=0, block_elements=BLOCK_ELEMENTS, takeover_after_s=TAKEOVER_S,
        piece_bytes=N_BLOCKS * BLOCK_BYTES // pieces,
    )  # fmt: skip
    state: Any = SimpleNamespace(sizes=lambda: [N_ELEMENTS], wire=FP32, mean_wire=FP32, clips=False)
    return Context(
        store=RetryingStore(store, clock=clock, tolerance=ENDLESS), keys=KEYS, me=Identity(rank, 4, 0, "me"),
        training=state, plan=RoundPlan(), limits=limits, clock=clock, wait=lambda *_: None, proof=UNSIGNED,
        reduce=reduce, map=ParallelMap(),
    )  # fmt: skip


def mean_of(here: Context, seal: Seal) -> tuple[bytes, set[int]]:
    """Return the mean that a reducer computes as the owner of its only shard, and the ranks that it leaves out."""
    entry = EntryState.begin(here, 0)
    head, mean = Reducer(here)._compute(entry, seal, 0)
    return bytes(mean), set(head.left_out)


def test_the_next_piece_is_read_while_one_is_averaged() -> None:
    store = Remote()
    seal = sealed(store)
    began, read_on = threading.Event(), threading.Event()

    def reduce(*arguments: Any, **options: Any) -> tuple[str, ...]:
        began.set()
        assert read_on.wait(SOON_S), "no further piece was read while the first one was averaged"
        return weighted_mean(*arguments, **options)

    def before_block(first: int) -> None:
        if first:
            assert began.wait(SOON_S), "the second piece was read before the first one was averaged"
            read_on.set()

    store.before_block = before_block
    mean, _ = mean_of(context(store, 3, reduce=reduce), seal)
    assert len(mean) == N_BLOCKS * BLOCK_BYTES


@pytest.mark.parametrize("pieces", [2, 3, 4])
@pytest.mark.parametrize("damaged_block", [None, 0, 3, N_BLOCKS - 1])
def test_a_mean_has_the_same_bits_in_any_number_of_pieces_and_leaves_out_the_same_ranks(
    pieces: int, damaged_block: int | None
) -> None:
    store = Remote()
    seal = sealed(store, damaged_block)
    whole = mean_of(context(store, 1), seal)
    assert mean_of(context(store, pieces), seal) == whole
    assert whole[1] == (set() if damaged_block is None else {1})


def test_a_shard_is_taken_over_after_twice_the_time_that_the_own_work_took_to_send() -> None:
    store, now = Remote(), [0.0]
    whole = sealed(store)
    owner, other = owners(0, [0, 1], 0)
    here = context(store, 1, rank=other, clock=lambda: now[0])
    seal = Seal({rank: whole.replicas[rank] for rank in (0, 1)}, whole.anchor, 1)
    reducer, entry = Reducer(here), EntryState.begin(here, 0)
    entry.move_s = 4 * TAKEOVER_S
    found = []
    for now[0] in (0.0, 2 * TAKEOVER_S, 7.9 * TAKEOVER_S, 8.1 * TAKEOVER_S):
        found.append(reducer.collect(entry, seal) is not None)
    assert found == [False, False, False, True], f"rank {other} did the work of rank {owner} at another time"


def test_after_the_first_mean_its_time_counts_for_later_takeovers() -> None:
    store, now = Remote(), 0.0
    seal = sealed(store)
    here = context(store, 1, rank=0, clock=lambda: now)
    reducer, entry = Reducer(here), EntryState.begin(here, 0)
    seal = Seal({0: seal.replicas[0]}, seal.anchor, 1)

    def reduce_slowly(first_block: int) -> None:
        nonlocal now
        now += 30.0

    store.before_block = reduce_slowly
    assert reducer.collect(entry, seal) is not None
    assert reducer.takeover_after_s == 60.0
