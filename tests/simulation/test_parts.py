"""The small parts of the rendezvous: records, parts of snapshots, means and shards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from support.patience import ENDLESS

from diloco.errors import DivergenceError
from diloco.rendezvous.envelope import UNSIGNED, BadRecordError
from diloco.rendezvous.frames import (
    MAX_SHARDS,
    READ_TRIES,
    Contribution,
    MeanHead,
    Seal,
    SealedReplica,
    digests_of,
    head_bytes,
)
from diloco.rendezvous.keys import Keys
from diloco.rendezvous.membership import Identity
from diloco.rendezvous.reduction import BadInputError, BlockFormat, ShardInput, weighted_mean
from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import EntryState, Layout, Limits, PendingWork, owners, shards_of
from diloco.rendezvous.round_runner import RoundRunner
from diloco.rendezvous.snapshot import SnapshotPointer, collect_garbage, decode_part, encode_part, put_parts
from diloco.wires import FP32
from diloco.wires.wire import Floats
from executors.store import MemoryStore
from simulation.integer_state import BLOCK_ELEMENTS, IntegerState
from simulation.test_accounting import whole_snapshots
from simulation.test_membership import context

KEYS = Keys("run", "main")
HEAD = Contribution(3, 1, "nonce", 2.5, "a" * 32, 40, ("b" * 32, "c" * 32), (1.5, 1e30))


def retrying_store(store: Any) -> RetryingStore:
    return RetryingStore(store, clock=lambda: 0.0, tolerance=ENDLESS)


# -- records -----------------------------------------------------------------------------------------------------------


def test_a_contribution_comes_back_as_it_went() -> None:
    head = HEAD.head("", UNSIGNED)
    assert len(head) == head_bytes(2)
    assert len(head) % 64 == 0
    assert Contribution.parse(head + b"payload", "", UNSIGNED)[0] == HEAD


@settings(deadline=None)  # a deadline would fail on a loaded machine
@given(st.binary(max_size=40), st.integers(0, 1), st.booleans())
def test_a_seal_comes_back_as_it_went(mean: bytes, shards: int, several: bool) -> None:
    members = {0: SealedReplica("x", 0, 1.0, "d" * 32)} | ({7: SealedReplica("y", 2, 0.5, "e" * 32)} if several else {})
    seal = Seal(members, "f" * 32, shards, b"" if shards else mean)
    assert Seal.parse(b"".join(seal.data("", UNSIGNED)), "", UNSIGNED) == seal


def test_no_flipped_bit_of_a_head_goes_unnoticed() -> None:
    heads: dict[Callable[..., object], bytes] = {
        Contribution.parse: HEAD.head("", UNSIGNED),
        Seal.parse: b"".join(Seal({0: SealedReplica("x", 0, 1.0, "d" * 32)}, "f" * 32, 0, b"mean").data("", UNSIGNED)),
        MeanHead.parse: MeanHead(("b" * 32,), (2,)).head("", UNSIGNED),
        SnapshotPointer.parse: SnapshotPointer("n", 0, ("p",), ("s",), {"tensors": {}}).data("", UNSIGNED),
    }
    for parse_under, whole in heads.items():
        parse = partial(parse_under, key="", proof=UNSIGNED)
        parse(whole)
        text_end = len(whole) if whole.endswith(b"mean") else len(whole.rstrip(b"\0"))
        for at in [*range(24), text_end // 2, text_end - 1]:
            flipped = bytearray(whole)
            flipped[at] ^= 4
            with pytest.raises(BadRecordError):
                parse(bytes(flipped))


def test_parts_are_safetensors() -> None:
    arrays: dict[str, Floats] = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.full((1, 1), 1.5, np.float32),
        "empty": np.zeros(0, np.float32),
    }
    data = b"".join(encode_part(arrays))
    for read in (safetensors.numpy.load(data), decode_part(memoryview(data))):
        assert read.keys() == arrays.keys()
        assert all(read[name].tobytes() == arrays[name].tobytes() for name in arrays)
        assert all(read[name].shape == arrays[name].shape for name in arrays)


def test_after_each_collection_the_two_newest_snapshots_are_whole() -> None:
    store = retrying_store(MemoryStore())
    for entry, whole in {0: [0], 3: [0, 3], 9: [3, 9], 12: [9, 12]}.items():  # the writer of snapshot 6 died
        digests = put_parts(store, KEYS, entry, "nonce", {"a": np.full(3, entry, np.float32)}, UNSIGNED)
        assert digests is not None
        store.create(KEYS.snapshot(entry), SnapshotPointer("nonce", 0, digests, ("s",), {}).data("", UNSIGNED))
        collect_garbage(store, KEYS, entry, 3, UNSIGNED)
        assert whole_snapshots(store, KEYS, 12) == whole


# -- means and shards --------------------------------------------------------------------------------------------------


def fp32(n_elements: int, block_elements: int) -> BlockFormat:
    return BlockFormat(n_elements, block_elements, FP32, FP32, UNSIGNED)


def fp32_layout(n_elements: int, limits: Limits) -> Layout:
    return Layout(n_elements, limits, FP32, FP32)


def inputs_of(arrays: list[np.ndarray], weights: list[float], block_bytes: int) -> list[ShardInput]:
    views = [array.data.cast("B") for array in arrays]
    return [
        ShardInput(rank, weight, view, digests_of(view, block_bytes, UNSIGNED))
        for rank, (view, weight) in enumerate(zip(views, weights, strict=True))
    ]


def test_the_mean_is_the_plain_sum_of_products_in_rank_order() -> None:
    for size in (1, 63, 64, 1000, 200_000):
        rng = np.random.default_rng(size)
        arrays = [rng.normal(size=size).astype(np.float32) for _ in range(3)]
        weights = [1.0, 2.0, 3.5]
        out = np.empty(size, np.float32)
        digests = weighted_mean(inputs_of(arrays, weights, 4096), out.data.cast("B"), fp32(size, 1024))
        expected = arrays[0] * np.float32(1.0 / 6.5)
        for array, weight in zip(arrays[1:], weights[1:], strict=True):
            expected = expected + array * np.float32(weight / 6.5)
        assert out.tobytes() == expected.tobytes(), size
        assert digests == digests_of(out.data.cast("B"), 4096, UNSIGNED), size


def test_the_mean_may_be_written_over_an_input() -> None:
    arrays = [np.arange(100, dtype=np.float32), np.ones(100, np.float32)]
    inputs = inputs_of(arrays, [1.0, 1.0], 64)
    weighted_mean(inputs, inputs[0].data, fp32(100, 16))
    assert arrays[0].tobytes() == ((np.arange(100) + 1) / 2).astype(np.float32).tobytes()


def test_an_input_that_is_not_finite_or_differs_from_its_head_is_named() -> None:
    for bad in (float("nan"), float("inf")):
        arrays = [np.ones(100, np.float32) for _ in range(3)]
        arrays[1][77] = bad
        with pytest.raises(BadInputError, match="rank 1 is not finite") as caught:
            weighted_mean(inputs_of(arrays, [1.0] * 3, 64), np.empty(400, np.uint8).data, fp32(100, 16))
        assert caught.value.rank == 1
    arrays = [np.ones(100, np.float32) for _ in range(3)]
    inputs = inputs_of(arrays, [1.0] * 3, 64)
    arrays[2][50] = 2.0
    with pytest.raises(BadInputError, match="rank 2 does not match the digests in its head"):
        weighted_mean(inputs, np.empty(400, np.uint8).data, fp32(100, 16))


def test_large_but_finite_inputs_are_fine() -> None:
    out = np.empty(10, np.float32)
    weighted_mean(inputs_of([np.full(10, 1e30, np.float32)] * 2, [1.0, 1.0], 64), out.data.cast("B"), fp32(10, 16))
    assert out[0] == np.float32(1e30)


@settings(deadline=None)  # a deadline would fail on a loaded machine
@given(st.integers(1, 1200), st.integers(1, 40))
def test_shards_cover_all_blocks_once_and_evenly(n_elements: int, n_shards: int) -> None:
    layout = fp32_layout(n_elements, Limits(block_elements=4))
    n_shards = min(n_shards, layout.n_blocks)
    ranges = [layout.shard(shard, n_shards) for shard in range(n_shards)]
    assert ranges[0][:1] == ranges[0][2:3] == (0,)
    assert ranges[-1].end_block == layout.n_blocks
    assert all(left.end_block == right.first_block for left, right in pairwise(ranges))
    assert all(left.start + left.size_bytes == right.start for left, right in pairwise(ranges))
    assert ranges[-1].start + ranges[-1].size_bytes == layout.size_bytes == 4 * n_elements
    assert sum(shard.mean_bytes for shard in ranges) == layout.mean_bytes
    assert sum(shard.n_elements for shard in ranges) == n_elements
    sizes = [shard.end_block - shard.first_block for shard in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@settings(deadline=None)  # a deadline would fail on a loaded machine
@given(st.sets(st.integers(0, 300), min_size=1, max_size=200), st.integers(1, 400), st.integers(0, 50))
def test_shards_have_owners_that_agree_on_them(ranks: set[int], n_blocks: int, entry: int) -> None:
    n_shards = fp32_layout(n_blocks * 4, Limits(block_elements=4)).n_shards(len(ranks))
    assert 1 <= n_shards <= min(len(ranks), n_blocks, MAX_SHARDS)
    owned = {rank: shards_of(rank, entry, ranks, n_shards) for rank in ranks}
    assert sorted(shard for shards in owned.values() for shard in shards) == list(range(n_shards))
    for rank, shards in owned.items():
        assert all(owners(entry, ranks, shard)[0] == rank for shard in shards)


def test_a_small_fragment_or_a_large_world_is_not_cut_into_hundreds_of_shards() -> None:
    assert fp32_layout(100 << 20, Limits()).n_shards(8) == 8
    assert fp32_layout((2 << 20) + 1, Limits()).n_shards(8) == 2  # whole blocks; the last shard also has the rest
    assert fp32_layout(250, Limits()).n_shards(8) == 1
    assert fp32_layout(1000 << 20, Limits()).n_shards(300) == MAX_SHARDS


def test_ranks_that_train_on_own_no_shard_where_another_rank_waits() -> None:
    waits, trains = SealedReplica("n", 0, 1.0, "d" * 32), SealedReplica("n", 0, 1.0, "d" * 32, in_phase=False)
    assert Seal({0: trains, 1: waits}, "a" * 32, 1).owners == [1]
    assert Seal({0: trains, 1: trains}, "a" * 32, 1).owners == [0, 1]


def with_a_seal(*, sharded: bool) -> tuple[MemoryStore, list[RoundRunner]]:
    """Return a store with a seal of one contribution, and three replicas that read it: its sender and two others."""
    store = MemoryStore()
    limits = Limits(block_elements=BLOCK_ELEMENTS, small_bytes=0 if sharded else 1 << 20)
    places = [replace(context(Identity(0, 1, 0, f"n{n}"), [0.0], store), limits=limits) for n in range(3)]
    mine, *others = [RoundRunner(place, lambda result: None) for place in places]
    cast(IntegerState, places[0].training).train_step()
    places[0].training.hold(0, is_early=False)
    mine.publish(PendingWork(0, 1.0, 1, 1.0, 1, is_early=False))
    mine.sealer.try_seal(mine.current(), 0.0)
    return store, [mine, *others]


def collect(runner: RoundRunner) -> object:
    """Return the mean if a replica can read or compute it. The seal is read up to the allowed number of times."""
    *_, seal = [runner.seals.seal(0) for _ in range(READ_TRIES + 1)]
    assert seal is not None
    return runner.reducer.collect(runner.current(), seal)


def rot(store: MemoryStore, key: str) -> None:
    store.put(key, bytes(store.get(key))[:-1] + b"x")


@pytest.mark.parametrize("is_input_rotten", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_mean_that_is_made_again_is_taken_if_it_is_the_one_of_before(sharded: bool, is_input_rotten: bool) -> None:
    store, (mine, later, _) = with_a_seal(sharded=sharded)
    assert collect(mine) is not None
    mean = KEYS.mean(0, 0) if sharded else KEYS.seal(0)
    rot(store, mean)
    if is_input_rotten:
        rot(store, KEYS.contribution(0, 0))
    assert (collect(later) is None) is is_input_rotten
    assert later.current().blocked == (mean if is_input_rotten else None)


def test_the_reader_of_a_mean_knows_the_ranks_that_were_left_out() -> None:
    store, (_, maker, reader) = with_a_seal(sharded=True)
    rot(store, KEYS.contribution(0, 0))
    for each in (maker, reader):
        assert collect(each) is not None
        assert each.current().left_out == {0}


def test_an_anchor_that_is_another_in_two_entries_in_a_row_ends_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    here = context(Identity(0, 1, 0, "me"), [0.0])
    runner = RoundRunner(here, lambda result: None)
    monkeypatch.setattr(runner.replayer, "reload", lambda: True)
    right, entry = here.training.digest(0), EntryState.begin(here, 0)

    def check(anchor: str) -> None:
        runner._check_anchor(entry, Seal({0: SealedReplica("x", 0, 1.0, "d" * 32)}, anchor, 0))

    for anchor in ("a" * 32, right, "a" * 32, right, "a" * 32):
        check(anchor)
    with pytest.raises(DivergenceError, match="anchor of this replica differs from the anchor of ranks 0, even after"):
        check("a" * 32)
