"""The mean of a sealed entry: read it, compute a shard that is due, take over one that is missing.

`mean/<shard>` is itself the decision about unreadable inputs. So a replica that computed a shard, also its owner, uses
the stored one, which another replica may have written first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import numpy as np

from diloco.rendezvous.envelope import BadRecordError
from diloco.rendezvous.frames import READ_TRIES, Contribution, MeanHead, Seal, SealedReplica
from diloco.rendezvous.frames import head_bytes as head_bytes_of
from diloco.rendezvous.reduction import BadInputError, Input, Write, is_mean
from diloco.rendezvous.round import Context, EntryState, ShardRange, owners

log = logging.getLogger(__name__)

T = TypeVar("T")


class InputGoneError(Exception):
    """A sealed input is no longer there: the mean exists by now, or a newer snapshot does."""


class Reducer:
    """Reads or computes the mean of a sealed entry."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store
        self._keys = context.keys
        self._me = context.me
        self._proof = context.proof
        self._usual_s = 0.0
        self.takeover_after_s = context.limits.takeover_after_s
        """Seconds that this replica waits for the shard or the seal of another replica before it makes it itself."""

    def collect(self, entry: EntryState, seal: Seal) -> list[memoryview] | None:
        """Do the next things that are missing; return the mean as consecutive ranges once all of it exists.

        Where no member sent any work, the mean has no ranges at all.
        """
        entry.blocked = None
        if (whole := seal.whole_mean) is not None:
            return whole
        if not seal.shards:
            mean = self._recover_small(entry, seal)
            entry.blocked = self._keys.seal(entry.index) if mean is None else None
            return None if mean is None else [mean]
        now = self._context.clock()
        asks = entry.sealed_s is not None and now >= entry.ask_s  # not at the first look: usually nobody is gone
        if asks or entry.sealed_s is None:
            entry.ask_s = now + self._context.ask_again_s
        entry.sealed_s = now if entry.sealed_s is None else entry.sealed_s
        orders = [owners(entry.index, seal.owners, shard) for shard in range(seal.shards)]
        missing = sorted(
            set(range(seal.shards)) - entry.means.keys(), key=lambda shard: orders[shard][0] != self._me.rank
        )
        # One's own first, because others wait for them, and one of the others': when that exists, so do the rest.
        n_first = 1 + sum(orders[shard][0] == self._me.rank for shard in missing)
        for shards in (missing[:n_first], missing[n_first:]):
            keys = [self._keys.mean(entry.index, shard) for shard in shards]
            for shard, data in zip(shards, self._context.map(self._store.peek, keys), strict=True):
                mean = self._check(entry, seal, shard, data)
                if mean is None and self._is_due(entry, seal, orders[shard], asks=asks):
                    mean = self._bring_about(entry, seal, shard)
                if mean is not None:
                    entry.means[shard] = mean
            if not entry.means.keys() >= set(shards):
                next_seal = self._keys.seal(entry.index + len(self._context.layouts))
                if asks and self._store.peek(next_seal, size=0) is not None:  # who went on had it: it was collected
                    entry.blocked = self._keys.mean(entry.index, shards[0])
                return None
        self._usual_s = 0.8 * self._usual_s + 0.2 * (self._context.clock() - entry.sealed_s)
        self.takeover_after_s = max(2 * self._usual_s, self._context.limits.takeover_after_s)
        return [entry.means[shard] for shard in range(seal.shards)]

    def _is_due(self, entry: EntryState, seal: Seal, order: list[int], *, asks: bool) -> bool:
        """Return whether a missing shard is this replica's to reduce: after a while for each rank before it.

        Args:
            asks: leave out those that are gone.
        """
        assert entry.sealed_s is not None
        waited_s, place = self._context.clock() - entry.sealed_s, 0
        for rank in order[: order.index(self._me.rank)] if self._me.rank in order else order:
            place += not (asks and self._context.members.is_gone(rank, seal.replicas[rank].attempt))
            if waited_s < self.takeover_after_s * place:
                return False
        return True

    def _bring_about(self, entry: EntryState, seal: Seal, shard: int) -> memoryview | None:
        key, started = self._keys.mean(entry.index, shard), self._context.clock()
        head: MeanHead | None
        payload: memoryview | None = None
        try:
            if self._store.maps and self._memory_of_mine(entry, seal, shard) is None:
                head = self._stream(entry, seal, shard)
            else:
                head, payload = self._compute(entry, seal, shard)
        except InputGoneError:
            entry.blocked = key
            return None
        entry.reduce_s += self._context.clock() - started
        if head is not None and payload is not None:
            self._store.create(key, [head.head(key, self._proof), payload])
        return self._adopt_stored(entry, seal, shard, head, payload)

    def _adopt_stored(
        self, entry: EntryState, seal: Seal, shard: int, head: MeanHead | None, payload: memoryview | None
    ) -> memoryview | None:
        """Return the stored shard, whose bytes need not be read when its head is that of the computed one.

        Args:
            head: None: another replica had written the shard.
            payload: None: it was streamed.
        """
        key = self._keys.mean(entry.index, shard)
        mine = b"" if head is None else head.head(key, self._proof)
        stored = self._store.peek(key, size=len(mine)) if mine else None
        is_mine = stored is not None and stored == mine
        if head is not None and payload is not None and is_mine:
            entry.left_out.update(head.left_out)
            return payload
        return self._check(entry, seal, shard, self._store.peek(key, moves=not is_mine))

    def _check(self, entry: EntryState, seal: Seal, shard: int, data: memoryview | None) -> memoryview | None:
        """Return a stored shard of the mean, as it was read or read again; None when there is none."""
        layout, part = entry.layout, entry.layout.shard(shard, seal.shards)
        head, key = None, self._keys.mean(entry.index, shard)
        for readings in range(READ_TRIES):
            if readings:
                data = self._store.peek(key)
            if data is None:
                return None
            payload = data[head_bytes_of(part.end_block - part.first_block) :]
            with suppress(BadRecordError):
                head = MeanHead.parse(data, key, self._proof, wire=layout.mean_wire.name)
                if is_mean(payload, layout.blocks(part.n_elements, self._proof), head.blocks):
                    entry.left_out.update(head.left_out)
                    return payload
            self._store.record_misread(key, data)
        return self._recover(entry, seal, shard, head)

    def _recover(self, entry: EntryState, seal: Seal, shard: int, stored: MeanHead | None) -> memoryview | None:
        """Compute a stored shard that is rotten, while its inputs exist; its head proves it, if that is readable."""
        head: MeanHead | None = None
        with suppress(InputGoneError):
            head, payload = self._compute(entry, seal, shard)
        if head is None or (stored is not None and stored != head):
            # an input is gone, or has rotted since, or another processor sums up differently
            entry.blocked = self._keys.mean(entry.index, shard)
            return None
        return payload

    def _recover_small(self, entry: EntryState, seal: Seal) -> memoryview | None:
        """Compute the mean that a seal contained, while its inputs exist; the seal's digest proves it."""
        try:
            mean = self._compute(entry, replace(seal, shards=1), 0)[1]
        except InputGoneError:
            return None
        return mean if self._proof.digest(mean) == seal.lost_mean else None

    def _compute(self, entry: EntryState, seal: Seal, shard: int) -> tuple[MeanHead, memoryview]:
        """Reduce a shard.

        Raises: InputGoneError.
        """
        layout, part = entry.layout, entry.layout.shard(shard, seal.shards)
        blocks = layout.blocks(part.n_elements, self._proof)
        mine = self._memory_of_mine(entry, seal, shard)
        out = np.empty(part.mean_bytes, np.uint8).data if mine is None else mine

        def reduce(inputs: Sequence[Input], left_out: tuple[int, ...]) -> tuple[MeanHead, memoryview]:
            if mine is not None:
                entry.overwritten.add(shard)
            return MeanHead(self._context.reduce(inputs, out, blocks), left_out, layout.mean_wire.name), out

        return self._with_inputs(entry, seal, shard, reduce)

    def _stream(self, entry: EntryState, seal: Seal, shard: int) -> MeanHead | None:
        """Reduce a shard into the store, block by block; None: it is there.

        Raises: InputGoneError.
        """
        layout, part = entry.layout, entry.layout.shard(shard, seal.shards)
        blocks, key = layout.blocks(part.n_elements, self._proof), self._keys.mean(entry.index, shard)
        out = np.empty(min(part.mean_bytes, layout.mean_block_bytes), np.uint8).data
        head_bytes = head_bytes_of(part.end_block - part.first_block)

        def reduce(inputs: Sequence[Input], left_out: tuple[int, ...]) -> MeanHead | None:
            heads: list[MeanHead] = []

            def produce(write: Write) -> bytes:
                heads.append(
                    MeanHead(self._context.reduce(inputs, out, blocks, write), left_out, layout.mean_wire.name)
                )
                return heads[-1].head(key, self._proof)

            self._store.create_streamed(key, head_bytes, head_bytes + part.mean_bytes, produce)
            return heads[-1] if heads else None

        return self._with_inputs(entry, seal, shard, reduce)

    def _with_inputs(
        self, entry: EntryState, seal: Seal, shard: int, act: Callable[[Sequence[Input], tuple[int, ...]], T]
    ) -> T:
        """Return what is made of a shard's inputs, and of the ranks whose input has to be left out.

        Raises: InputGoneError.
        """
        members, tries = seal.inputs, dict[int, int]()
        while True:
            try:
                inputs = list(self._context.map(lambda rank: self._input(entry, seal, rank, shard), members))
                return act(inputs, tuple(sorted(set(seal.inputs) - set(members))))
            except BadInputError as bad:
                tries[bad.rank] = tries.get(bad.rank, 0) + 1
                if tries[bad.rank] >= READ_TRIES:
                    log.warning("%s It is left out of the mean of round %s.", bad, entry.index + 1)
                    del members[bad.rank]

    def _input(self, entry: EntryState, seal: Seal, rank: int, shard: int) -> Input:
        part = entry.layout.shard(shard, seal.shards)
        blocks = slice(part.first_block, part.end_block)
        member = seal.replicas[rank]
        if rank == self._me.rank and shard not in entry.overwritten:
            kept = self._kept(entry, seal, part)
            if kept is not None:
                assert entry.packed is not None
                return Input(rank, member.weight, kept, entry.packed.blocks[blocks])
        contribution = self._head(entry, rank, member)
        if len(contribution.blocks) != entry.layout.n_blocks or contribution.wire != entry.layout.wire.name:
            raise BadInputError(rank, "has a head of another payload")
        key = self._keys.contribution(entry.index, rank)
        start = entry.layout.head_bytes + part.start
        data = self._store.peek(key, start=start, size=part.size_bytes, is_copied=True)  # by the reduction
        if data is None:
            raise InputGoneError
        if len(data) != part.size_bytes:
            raise BadInputError(rank, "was cut off")
        return Input(rank, member.weight, data, contribution.blocks[blocks])

    def _head(self, entry: EntryState, rank: int, member: SealedReplica) -> Contribution:
        if rank in entry.seen and entry.seen[rank][1] == member.digest:
            return entry.seen[rank][0]
        key = self._keys.contribution(entry.index, rank)
        data = self._store.peek(key, size=entry.layout.head_bytes)
        if data is None:
            raise InputGoneError
        try:
            contribution, digest = Contribution.parse(data, key, self._proof)
        except BadRecordError:
            raise BadInputError(rank, "has a head that is not what was written") from None
        if digest != member.digest:
            raise InputGoneError  # a write that landed after the sealed one had been used and deleted
        entry.seen[rank] = (contribution, digest)
        return contribution

    def _memory_of_mine(self, entry: EntryState, seal: Seal, shard: int) -> memoryview | None:
        """Return the memory of what this process sent for a shard, where its mean fits into it: that is stored now."""
        layout = entry.layout
        fits = layout.wire.is_exact and layout.wire.name == layout.mean_wire.name
        return self._kept(entry, seal, layout.shard(shard, seal.shards)) if fits else None

    def _kept(self, entry: EntryState, seal: Seal, part: ShardRange) -> memoryview | None:
        """Return the memory of a range of the payload that this process sent, if it was sealed and is in memory."""
        member = seal.replicas.get(self._me.rank)
        if entry.packed is None or member is None or member.digest not in entry.sent:
            return None
        return entry.packed.part(part.start, part.size_bytes)
