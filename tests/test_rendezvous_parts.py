"""The small parts of the rendezvous: records, the mean, snapshots' parts, hash orders."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from diloco.records import (
    MAX_SHARDS,
    BadRecordError,
    Contribution,
    MeanHead,
    Member,
    Seal,
    digests_of,
    hash_order,
    head_bytes,
    shard_blocks,
)
from diloco.reduction import BadInputError, Floats, Input, weighted_mean
from diloco.sharding import count_shards, owners, shards_of
from diloco.snapshot import Pointer, decode_part, encode_part

HEAD = Contribution(3, 1, "nonce", 2.5, "a" * 32, 40, ("b" * 32, "c" * 32), (1.5, 1e30))


def test_a_contribution_comes_back_as_it_went() -> None:
    head = HEAD.head()
    assert len(head) == head_bytes(2)
    assert len(head) % 64 == 0
    assert Contribution.parse(head + b"payload")[0] == HEAD


@given(st.binary(max_size=40), st.integers(0, 1), st.booleans())
def test_a_seal_comes_back_as_it_went(mean: bytes, shards: int, several: bool) -> None:
    members = {0: Member("x", 0, 1.0, "d" * 32)} | ({7: Member("y", 2, 0.5, "e" * 32)} if several else {})
    seal = Seal(members, "f" * 32, shards, b"" if shards else mean)
    assert Seal.parse(b"".join(seal.data())) == seal


@pytest.mark.parametrize("kind", [Contribution, Seal, MeanHead, Pointer])
def test_no_flipped_bit_of_a_head_goes_unnoticed(kind: type) -> None:
    whole = {
        Contribution: HEAD.head(),
        Seal: b"".join(Seal({0: Member("x", 0, 1.0, "d" * 32)}, "f" * 32, 0, b"mean").data()),
        MeanHead: MeanHead(("b" * 32,), (2,)).head(),
        Pointer: Pointer("n", 0, ("p",), ("s",), {"tensors": {}}).data(),
    }[kind]
    kind.parse(whole)  # type: ignore[attr-defined]
    text_end = len(whole.rstrip(b"\0")) if kind is not Seal else len(whole)
    for at in [*range(24), text_end // 2, text_end - 1]:
        flipped = bytearray(whole)
        flipped[at] ^= 4
        with pytest.raises(BadRecordError):
            kind.parse(bytes(flipped))  # type: ignore[attr-defined]
    with pytest.raises(BadRecordError):
        kind.parse(b"")  # type: ignore[attr-defined]


def inputs_of(arrays: list[np.ndarray], weights: list[float], block_bytes: int) -> list[Input]:
    views = [array.data.cast("B") for array in arrays]
    return [
        Input(rank, weight, view, digests_of(view, block_bytes))
        for rank, (view, weight) in enumerate(zip(views, weights, strict=True))
    ]


@pytest.mark.parametrize("size", [1, 63, 64, 1000, 200_000])
def test_the_mean_is_the_plain_sum_of_products_in_rank_order(size: int) -> None:
    rng = np.random.default_rng(size)
    arrays = [rng.normal(size=size).astype(np.float32) for _ in range(3)]
    weights = [1.0, 2.0, 3.5]
    out = np.empty(size, np.float32)
    digests = weighted_mean(inputs_of(arrays, weights, 4096), out.data.cast("B"), block_bytes=4096)
    expected = arrays[0] * np.float32(1.0 / 6.5)
    for array, weight in zip(arrays[1:], weights[1:], strict=True):
        expected = expected + array * np.float32(weight / 6.5)
    assert out.tobytes() == expected.tobytes()
    assert digests == digests_of(out.data.cast("B"), 4096)


def test_the_mean_may_be_written_over_an_input() -> None:
    arrays = [np.arange(100, dtype=np.float32), np.ones(100, np.float32)]
    inputs = inputs_of(arrays, [1.0, 1.0], 64)
    weighted_mean(inputs, inputs[0].data, block_bytes=64)
    assert arrays[0].tobytes() == ((np.arange(100) + 1) / 2).astype(np.float32).tobytes()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_input_that_is_not_finite_is_named(bad: float) -> None:
    arrays = [np.ones(100, np.float32) for _ in range(3)]
    arrays[1][77] = bad
    with pytest.raises(BadInputError, match="rank 1 is not finite") as caught:
        weighted_mean(inputs_of(arrays, [1.0] * 3, 64), np.empty(400, np.uint8).data, block_bytes=64)
    assert caught.value.rank == 1


def test_large_but_finite_inputs_are_fine() -> None:
    arrays = [np.full(10, 1e30, np.float32)] * 2
    out = np.empty(10, np.float32)
    weighted_mean(inputs_of(arrays, [1.0, 1.0], 64), out.data.cast("B"), block_bytes=64)
    assert out[0] == np.float32(1e30)


def test_an_input_that_is_not_what_its_head_says_is_named() -> None:
    arrays = [np.ones(100, np.float32) for _ in range(3)]
    inputs = inputs_of(arrays, [1.0] * 3, 64)
    arrays[2][50] = 2.0
    with pytest.raises(BadInputError, match="rank 2 is not what its head promises"):
        weighted_mean(inputs, np.empty(400, np.uint8).data, block_bytes=64)


@given(st.integers(1, 300), st.integers(1, 40))
def test_shards_cover_all_blocks_once_and_evenly(n_blocks: int, n_shards: int) -> None:
    n_shards = min(n_shards, n_blocks)
    ranges = [shard_blocks(n_blocks, n_shards, shard) for shard in range(n_shards)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == n_blocks
    assert all(left[1] == right[0] for left, right in pairwise(ranges))
    sizes = [end - start for start, end in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@given(st.sets(st.integers(0, 300), min_size=1, max_size=200), st.integers(1, 400), st.integers(0, 50))
def test_shards_have_owners_who_agree_on_them(ranks: set[int], n_blocks: int, entry: int) -> None:
    n_shards = count_shards(len(ranks), n_blocks * 16, 16)
    assert 1 <= n_shards <= min(len(ranks), n_blocks, MAX_SHARDS)
    owned = {rank: shards_of(rank, entry, ranks, n_shards) for rank in ranks}
    assert sorted(shard for shards in owned.values() for shard in shards) == list(range(n_shards))
    for rank, shards in owned.items():
        assert all(owners(entry, ranks, shard)[0] == rank for shard in shards)


def test_a_small_fragment_or_a_large_world_is_not_cut_into_hundreds_of_shards() -> None:
    assert count_shards(8, 400 << 20, 4 << 20) == 8
    assert count_shards(8, (8 << 20) + 5, 4 << 20) == 2  # whole blocks; the rest goes with the last
    assert count_shards(8, 1000, 4 << 20) == 1
    assert count_shards(300, 4000 << 20, 4 << 20) == MAX_SHARDS


def test_every_rank_has_its_turn() -> None:
    first = Counter(hash_order(range(4), "seal", entry)[0] for entry in range(400))
    assert min(first.values()) > 60
    assert hash_order({3, 1, 2}, "seal", 5) == hash_order([1, 2, 3], "seal", 5)


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
