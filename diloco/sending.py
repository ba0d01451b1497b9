"""Sending one's contribution: packed and written in one pass where the store can, else packed into memory and sent.

Streamed, only the shard stays in memory that this replica will probably reduce, as far as can be told before the
sealing; every other byte goes from the processor's cache to the store. Should another shard become due, its own input
is read like everybody's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from diloco.keys import Keys
from diloco.membership import Identity, Membership
from diloco.patience import PatientStore
from diloco.phase import Phase
from diloco.records import BadRecordError, Contribution, count_blocks, digests_of, head_bytes, shard_blocks
from diloco.rounds import READ_TRIES, Pace, Round
from diloco.sharding import count_shards, shards_of
from diloco.work import Packed, Work
from executors.store import Buffer


def kept_bytes(size_bytes: int, n_ranks: int, pace: Pace, *, streams: bool) -> int:
    """Return how much of a payload stays in memory when so many ranks are expected, at most."""
    if size_bytes <= pace.small_bytes or not streams:
        return size_bytes
    n_shards = count_shards(n_ranks, size_bytes, pace.block_bytes)
    largest_shard = -(-count_blocks(size_bytes, pace.block_bytes) // n_shards)
    return min(size_bytes, largest_shard * pace.block_bytes)


class Sending:
    """Brings this replica's contributions into the store."""

    def __init__(
        self,
        store: PatientStore,
        keys: Keys,
        me: Identity,
        members: Membership,
        phase: Phase,
        work: Work,
        pace: Pace,
    ) -> None:
        self._store = store
        self._keys = keys
        self._me = me
        self._members = members
        self._phase = phase
        self._work = work
        self._pace = pace

    def send(self, r: Round, weight: float, waited_s: float) -> None:
        """Send the contribution to an entry, perhaps: who wants to know reads what stands.

        Args:
            weight: 0: a head alone, of one that has nothing to send.

        Raises: ContributionError: it is not finite, or a parameter has changed its shape.
        """
        key = self._keys.contribution(r.entry, self._me.rank)
        n_blocks = count_blocks(r.size_bytes, self._pace.block_bytes)

        def head(packed: Packed | None) -> bytes:
            return Contribution(
                rank=self._me.rank,
                attempt=self._me.attempt,
                nonce=self._me.nonce,
                weight=weight,
                anchor=self._work.digest(r.fragment),
                size_bytes=r.size_bytes if packed else 0,
                blocks=packed.blocks if packed else (),
                norms=packed.norms if packed else (),
                waited_s=waited_s,
                phase_s=self._phase.seconds or (self._members.seal.phase_s if self._members.seal else 0.0),
                head_start_s=0.0 if r.is_early else self._phase.head_start_s,
                in_phase=not r.is_early,
            ).head(n_blocks)

        if not weight:
            self._store.create(key, head(None))
            return

        if r.size_bytes <= self._pace.small_bytes or not self._store.streams:
            r.packed = packed = r.packed or self._work.pack(r.entry)
            self._store.create(key, [head(packed), packed.kept])
            return

        def produce(write: Callable[[Buffer], None]) -> bytes:
            r.packed = None  # until it is whole
            r.packed = packed = self._work.pack(r.entry, write, self._range_of_own_shard(r))
            return head(packed)

        self._store.create_streamed(key, head_bytes(n_blocks), head_bytes(n_blocks) + r.size_bytes, produce)

    def read_back(self, r: Round, digest: str) -> memoryview | None:
        """Return the payload of this process's own contribution as it stands; None when it cannot be had.

        Args:
            digest: of its head, by the seal that counts it.
        """
        first = head_bytes(count_blocks(r.size_bytes, self._pace.block_bytes))
        for _ in range(READ_TRIES):
            data = self._store.look(self._keys.contribution(r.entry, self._me.rank))
            if data is None:
                continue  # gone, or no answer just now
            with suppress(BadRecordError):
                head, found = Contribution.parse(data)
                payload = data[first:]
                if found != digest:
                    return None
                if len(payload) == r.size_bytes and digests_of(payload, self._pace.block_bytes) == head.blocks:
                    return payload
        return None

    def _range_of_own_shard(self, r: Round) -> tuple[int, int]:
        """Return the bytes of the shard that this replica will reduce if all who are expected are sealed."""
        n_blocks = count_blocks(r.size_bytes, self._pace.block_bytes)
        ranks = {*self._members.expected, self._me.rank}
        n_shards = count_shards(len(ranks), r.size_bytes, self._pace.block_bytes)
        for shard in shards_of(self._me.rank, r.entry, ranks, n_shards):
            first, end = shard_blocks(n_blocks, n_shards, shard)
            return first * self._pace.block_bytes, min(end * self._pace.block_bytes, r.size_bytes)
        return 0, 0
