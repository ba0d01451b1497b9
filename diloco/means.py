"""The mean of a sealed entry: read it, compute a shard that is due, take over one that is missing.

`mean/<shard>` is itself the decision about unreadable inputs. So whoever computed a shard, also its owner, uses what
stands, which another replica may have written first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from xxhash import xxh3_128_hexdigest

from diloco.keys import Keys
from diloco.membership import Identity, Membership
from diloco.parallel import Map
from diloco.patience import PatientStore
from diloco.records import (
    BadRecordError,
    Contribution,
    MeanHead,
    Member,
    Seal,
    count_blocks,
    digests_of,
    head_bytes,
    shard_blocks,
)
from diloco.reduction import BadInputError, Input, Reduce, is_finite
from diloco.rounds import READ_TRIES, Pace, Round, asking_again_s
from diloco.sharding import owners


class InputGoneError(Exception):
    """A sealed input is no longer there: the mean stands by now, or a newer snapshot does."""


class Means:
    """Brings the mean of a sealed entry about."""

    def __init__(
        self,
        store: PatientStore,
        keys: Keys,
        me: Identity,
        membership: Membership,
        pace: Pace,
        *,
        reduce: Reduce,
        clock: Callable[[], float],
        map: Map,
    ) -> None:
        self._store = store
        self._keys = keys
        self._me = me
        self._membership = membership
        self._block_bytes = pace.block_bytes
        self._reduce = reduce
        self._clock = clock
        self._map = map
        self._least_patience_s = pace.patience_s
        self._usual_s = 0.0

    @property
    def patience_s(self) -> float:
        """How long to wait for another's shard or seal before doing it oneself."""
        return max(2 * self._usual_s, self._least_patience_s)

    def collect(self, r: Round, seal: Seal) -> list[memoryview] | None:
        """Do the next things that are missing; return the mean as consecutive ranges once all of it stands.

        Where nobody had any work to send, the mean is no range at all.
        """
        if not seal.inputs:
            return []
        if not seal.shards:
            mean = memoryview(seal.mean) if seal.lost_mean is None else self._recover_small(r, seal)
            r.stuck = mean is None
            return None if mean is None else [mean]
        now = self._clock()
        asks = r.sealed_s is not None and now >= r.ask_s  # not at the first look: usually nobody is gone
        if asks or r.sealed_s is None:
            r.ask_s = now + asking_again_s(self._store)
        r.sealed_s = now if r.sealed_s is None else r.sealed_s
        orders = [owners(r.entry, seal.owners, shard) for shard in range(seal.shards)]
        missing = sorted(set(range(seal.shards)) - r.means.keys(), key=lambda shard: orders[shard][0] != self._me.rank)
        # One's own first, because others wait for them, and one of the others': the rest stands when that does.
        n_first = 1 + sum(orders[shard][0] == self._me.rank for shard in missing)
        for shards in (missing[:n_first], missing[n_first:]):
            keys = [self._keys.mean(r.entry, shard) for shard in shards]
            for shard, data in zip(shards, self._map(self._store.look, keys), strict=True):
                mean = self._check(r, seal, shard, data)
                if mean is None and self._is_due(r, seal, orders[shard], asks=asks):
                    mean = self._bring_about(r, seal, shard)
                if mean is not None:
                    r.means[shard] = mean
            if not r.means.keys() >= set(shards):
                return None
        self._usual_s = 0.8 * self._usual_s + 0.2 * (self._clock() - r.sealed_s)
        return [r.means[shard] for shard in range(seal.shards)]

    def _is_due(self, r: Round, seal: Seal, order: list[int], *, asks: bool) -> bool:
        """Tell whether a missing shard is this replica's to reduce: after a while for each of those before it.

        Args:
            asks: leave out those that are gone.
        """
        assert r.sealed_s is not None
        waited_s, place = self._clock() - r.sealed_s, 0
        for rank in order[: order.index(self._me.rank)] if self._me.rank in order else order:
            place += not (asks and self._membership.is_gone(rank, seal.members[rank].attempt))
            if waited_s < self.patience_s * place:
                return False
        return True

    def _bring_about(self, r: Round, seal: Seal, shard: int) -> memoryview | None:
        started = self._clock()
        try:
            head, payload = self._compute(r, seal, shard)
        except InputGoneError:
            r.stuck = True
            return None
        r.reduce_s += self._clock() - started
        self._store.create(self._keys.mean(r.entry, shard), [head.head(), payload])
        return self._adopt_standing(r, seal, shard, head, payload)

    def _adopt_standing(
        self, r: Round, seal: Seal, shard: int, head: MeanHead, payload: memoryview
    ) -> memoryview | None:
        """Return what stands, whose bytes need not be read when its head says that they are these."""
        mine = head.head()
        standing = self._store.look(self._keys.mean(r.entry, shard), size=len(mine))
        if standing is not None and standing == mine:
            r.left_out.update(head.left_out)
            return payload
        return self._check(r, seal, shard, self._store.look(self._keys.mean(r.entry, shard)))

    def _check(self, r: Round, seal: Seal, shard: int, data: memoryview | None) -> memoryview | None:
        """Return a shard of the mean that stands, as it was read or read again; None when none does."""
        first, end = self._blocks(r, seal, shard)
        head = None
        for readings in range(READ_TRIES):
            if readings:
                data = self._store.look(self._keys.mean(r.entry, shard))
            if data is None:
                return None
            payload = data[head_bytes(end - first) :]
            try:
                head = MeanHead.parse(data)
            except BadRecordError:
                continue
            fits = len(payload) == self._size(r, first, end) and digests_of(payload, self._block_bytes) == head.blocks
            if fits and is_finite(np.frombuffer(payload, np.float32)):
                r.left_out.update(head.left_out)
                return payload
        return self._recover(r, seal, shard, head)

    def _recover(self, r: Round, seal: Seal, shard: int, said: MeanHead | None) -> memoryview | None:
        """Compute a shard that stands and is rotten, while its inputs stand; its head proves it, if that is left."""
        try:
            head, payload = self._compute(r, seal, shard)
        except InputGoneError:
            r.stuck = True
            return None
        if said is not None and said != head:
            r.stuck = True  # another processor sums up differently, or an input has rotted since
            return None
        return payload

    def _recover_small(self, r: Round, seal: Seal) -> memoryview | None:
        """Compute the mean that a seal contained, while its inputs stand; the seal's digest proves it."""
        whole = replace(seal, shards=1)
        try:
            mean = self._compute(r, whole, 0)[1]
        except InputGoneError:
            return None
        return mean if xxh3_128_hexdigest(mean) == seal.lost_mean else None

    def _compute(self, r: Round, seal: Seal, shard: int) -> tuple[MeanHead, memoryview]:
        """Reduce a shard.

        Raises: InputGoneError.
        """
        first, end = self._blocks(r, seal, shard)
        start, size = first * self._block_bytes, self._size(r, first, end)
        members = seal.inputs
        out = self._result_buffer(r, seal, start, size)
        tries: dict[int, int] = {}
        while members:
            try:
                inputs = list(self._map(lambda rank: self._input(r, seal, rank, shard), members))
                r.spoilt.add(shard)
                blocks = self._reduce(inputs, out, block_bytes=self._block_bytes)
                return MeanHead(blocks, tuple(sorted(set(seal.inputs) - set(members)))), out
            except BadInputError as bad:
                tries[bad.rank] = tries.get(bad.rank, 0) + 1
                if tries[bad.rank] >= READ_TRIES:
                    del members[bad.rank]
        np.frombuffer(out, np.float32)[:] = 0.0
        return MeanHead(digests_of(out, self._block_bytes), tuple(seal.inputs)), out

    def _input(self, r: Round, seal: Seal, rank: int, shard: int) -> Input:
        first, end = self._blocks(r, seal, shard)
        start, size = first * self._block_bytes, self._size(r, first, end)
        member = seal.members[rank]
        if rank == self._me.rank and shard not in r.spoilt and (kept := self._kept(r, seal, start, size)) is not None:
            assert r.packed is not None
            return Input(rank, member.weight, kept, r.packed.blocks[first:end])
        contribution = self._head(r, rank, member)
        if len(contribution.blocks) != count_blocks(r.size_bytes, self._block_bytes):
            raise BadInputError(rank, "has a head of another payload")
        offset = head_bytes(len(contribution.blocks)) + start
        data = self._store.look(self._keys.contribution(r.entry, rank), start=offset, size=size)
        if data is None:
            raise InputGoneError
        if len(data) != size:
            raise BadInputError(rank, "was cut off")
        return Input(rank, member.weight, data, contribution.blocks[first:end])

    def _head(self, r: Round, rank: int, member: Member) -> Contribution:
        if rank in r.seen and r.seen[rank][1] == member.digest:
            return r.seen[rank][0]
        size = head_bytes(count_blocks(r.size_bytes, self._block_bytes))
        data = self._store.look(self._keys.contribution(r.entry, rank), size=size)
        if data is None:
            raise InputGoneError
        try:
            contribution, digest = Contribution.parse(data)
        except BadRecordError:
            raise BadInputError(rank, "has a head that is not what was written") from None
        if digest != member.digest:
            raise InputGoneError  # a write that landed after the sealed one had been used and deleted
        r.seen[rank] = (contribution, digest)
        return contribution

    def _result_buffer(self, r: Round, seal: Seal, start: int, size: int) -> memoryview:
        kept = self._kept(r, seal, start, size)  # is free once it stands in the store
        return np.empty(size, np.uint8).data if kept is None else kept

    def _kept(self, r: Round, seal: Seal, start: int, size: int) -> memoryview | None:
        """Return the memory of a range of the payload that this process sent, if it was sealed and is in memory."""
        member = seal.members.get(self._me.rank)
        if r.packed is None or member is None or member.nonce != self._me.nonce:
            return None
        return r.packed.part(start, size)

    def _blocks(self, r: Round, seal: Seal, shard: int) -> tuple[int, int]:
        return shard_blocks(count_blocks(r.size_bytes, self._block_bytes), seal.shards, shard)

    def _size(self, r: Round, first: int, end: int) -> int:
        return min(end * self._block_bytes, r.size_bytes) - first * self._block_bytes
