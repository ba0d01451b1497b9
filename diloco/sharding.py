"""Who reduces which part of a mean: whole blocks, by hash over the sealed ranks, the same at every replica."""

from __future__ import annotations

from collections.abc import Iterable

from diloco.records import MAX_SHARDS, hash_order


def count_shards(n_ranks: int, size_bytes: int, block_bytes: int) -> int:
    """Return into how many shards a mean is cut: as many as ranks, but no tiny ones, and not hundreds."""
    return max(1, min(n_ranks, size_bytes // block_bytes, MAX_SHARDS))


def owners(entry: int, ranks: Iterable[int], shard: int) -> list[int]:
    """Return ranks in the order in which they are to reduce a shard; each is first as often, or once less."""
    order = hash_order(ranks, "mean", entry)
    turn = shard % len(order)
    return order[turn:] + order[:turn]


def shards_of(rank: int, entry: int, ranks: Iterable[int], n_shards: int) -> list[int]:
    """Return the shards that a rank is the first to reduce."""
    order = hash_order(ranks, "mean", entry)
    return list(range(order.index(rank), n_shards, len(order)))
