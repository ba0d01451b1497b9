"""Reads the mean of a sealed entry, or computes it.

`Reducer` computes this replica's shards, and shards that other replicas have not written in time.

A stored shard also decides which inputs are left out of the mean because they could not be read. So every replica uses
the stored shard, also the replica that has computed the same shard itself: another replica may have stored it first,
with other inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from typing import TypeVar

import numpy as np

from diloco.rendezvous.envelope import BadRecordError
from diloco.rendezvous.frames import READ_TRIES, Contribution, MeanHead, Seal, SealedReplica
from diloco.rendezvous.frames import head_bytes as head_bytes_of
from diloco.rendezvous.reduction import BadInputError, ShardInput, Write, is_mean
from diloco.rendezvous.round import Context, EntryState, ShardRange, owners

log = logging.getLogger(__name__)

T = TypeVar("T")
MOST_RETRY_S = 60.0
"""The longest time, in seconds, between two tries to compute a mean whose inputs could not be used."""


class InputGoneError(Exception):
    """A sealed contribution was deleted. It is deleted only after the mean or a newer snapshot exists."""


# More than 20 methods: reading, computing and recovering a mean are one decision, made again at each look. All of them
# share the entry's memory, and what one of them finds damaged decides what the next one does.
class Reducer:
    """Reads or computes the mean of a sealed entry.

    Args:
        context: the services of the rendezvous.

    Example:
        mean = Reducer(context).collect(entry, seal)
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._store = context.store
        self._keys = context.keys
        self._me = context.me
        self._proof = context.proof
        self._usual_s: float | None = None
        """The usual time from the seal to the whole mean. None: not known yet."""
        self.takeover_after_s = context.limits.takeover_after_s
        """Seconds that this replica waits for another replica's shard or seal before it makes that object itself."""

    def collect(self, entry: EntryState, seal: Seal) -> list[memoryview] | None:
        """Read the shards that exist, compute the shards that are due, and return the mean once it is complete.

        Args:
            entry: the state of the entry, which keeps the shards that were read.
            seal: the seal of the entry.

        Returns:
            The mean as consecutive ranges of bytes, empty if no replica sent any work. None: a shard is missing. Then
            `entry.blocked` names the missing object if waiting for it is pointless.
        """
        entry.blocked = None
        if (whole := seal.whole_mean) is not None:
            return whole
        if not seal.shards:
            mean = self._recover_small(entry, seal)
            entry.blocked = self._keys.seal(entry.index) if mean is None else None
            return None if mean is None else [mean]
        if not entry.layout.stores_mean:
            self._compute_early(entry, seal)
        now = self._context.clock()
        # The first look does not ask which owners have left: usually none has, and each question costs requests.
        asks = entry.sealed_s is not None and now >= entry.ask_s
        if asks or entry.sealed_s is None:
            entry.ask_s = now + self._context.ask_again_s
        if entry.sealed_s is None:
            entry.sealed_s = now
            self._wait_longer_than(entry.move_s)
        orders = [owners(entry.index, seal.owners, shard) for shard in range(seal.shards)]
        missing = sorted(
            set(range(seal.shards)) - entry.means.keys(), key=lambda shard: orders[shard][0] != self._me.rank
        )
        # This replica's own shards come first, because others wait for them. One shard of another replica is read with
        # them: if it exists, the others probably exist, too, and are read next.
        n_first = 1 + sum(orders[shard][0] == self._me.rank for shard in missing)
        for shards in (missing[:n_first], missing[n_first:]):
            keys = [self._keys.mean(entry.index, shard) for shard in shards]
            for shard, data in zip(shards, self._context.map(self._store.peek, keys), strict=True):
                mean = self._check(entry, seal, shard, data)
                if mean is None and self._is_due(entry, seal, orders[shard], asks=asks):
                    mean = self._reduce_shard(entry, seal, shard)
                if mean is not None:
                    entry.means[shard] = mean
            if not entry.means.keys() >= set(shards):
                next_seal = self._keys.seal(entry.index + len(self._context.layouts))
                # The fragment's next entry has a seal, and its sealer had this mean. So the mean existed, and was
                # deleted as garbage.
                if asks and self._store.peek(next_seal, size=0) is not None:
                    entry.blocked = self._keys.mean(entry.index, shards[0])
                return None
        taken_s = self._context.clock() - entry.sealed_s
        self._usual_s = taken_s if self._usual_s is None else 0.8 * self._usual_s + 0.2 * taken_s
        self._wait_longer_than(self._usual_s)
        return [entry.means[shard] for shard in range(seal.shards)]

    def _wait_longer_than(self, seconds: float) -> None:
        """Choose the time after which this replica takes over: twice the expected time of the others.

        Args:
            seconds: the time that this replica needed to send its contribution, or that earlier means took. The owner
                of a shard reads about as many bytes as it has sent before.
        """
        limit_s = self._context.limits.takeover_after_s
        self.takeover_after_s = max(limit_s, 2 * seconds, 2 * (self._usual_s or 0.0))

    def _is_due(self, entry: EntryState, seal: Seal, order: list[int], *, asks: bool) -> bool:
        """Return True if this replica must compute a missing shard now.

        The owner of the shard computes it at once. Each later rank in the order waits `takeover_after_s` longer than
        the one before.

        Args:
            order: the ranks that may compute the shard, the owner first.
            asks: True: ask the store which ranks have left, and do not wait for them.
        """
        assert entry.sealed_s is not None
        waited_s, place = self._context.clock() - entry.sealed_s, 0
        for rank in order[: order.index(self._me.rank)] if self._me.rank in order else order:
            place += not (asks and self._context.members.is_gone(rank, seal.replicas[rank].attempt))
            if waited_s < self.takeover_after_s * place:
                return False
        return True

    def _reduce_shard(self, entry: EntryState, seal: Seal, shard: int) -> memoryview | None:
        """Compute a shard, store it, and return the stored one. None: an input was deleted, or the store failed."""
        key, started = self._keys.mean(entry.index, shard), self._context.clock()
        head: MeanHead | None
        payload: memoryview | None = None
        try:
            if not entry.layout.stores_mean:
                self._read_own_from_store(entry)
                head, payload = entry.computed = entry.computed or self._compute(entry, seal, shard)
            elif self._store.maps and self._memory_of_mine(entry, seal, shard) is None:
                head = self._stream(entry, seal, shard)
            else:
                head, payload = self._compute(entry, seal, shard)
        except InputGoneError:
            entry.blocked = key
            return None
        entry.reduce_s += self._context.clock() - started
        if head is not None and payload is not None:
            stored = [payload] if entry.layout.stores_mean else []
            self._store.create(key, [head.head(key, self._proof), *stored])
        return self._adopt_stored(entry, seal, shard, head, payload)

    def _adopt_stored(
        self, entry: EntryState, seal: Seal, shard: int, head: MeanHead | None, payload: memoryview | None
    ) -> memoryview | None:
        """Return the stored shard. Its payload is not read if its head equals the head of the computed shard.

        Args:
            head: the head of the computed shard. None: another replica has written the shard.
            payload: the computed shard. None: it was streamed into the store.
        """
        key = self._keys.mean(entry.index, shard)
        mine = b"" if head is None else head.head(key, self._proof)
        stored = self._store.peek(key, size=len(mine)) if mine else None
        is_mine = stored is not None and stored == mine
        if head is not None and payload is not None and is_mine:
            entry.left_out.update(head.left_out)
            entry.clipped.update(head.clipped)
            return payload
        return self._check(entry, seal, shard, self._store.peek(key, moves=not is_mine))

    def _check(self, entry: EntryState, seal: Seal, shard: int, data: memoryview | None) -> memoryview | None:
        """Return the payload of a stored shard after checking it. None: the shard does not exist, or cannot be used.

        Args:
            data: the first reading of the shard. A wrong reading is repeated.
        """
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
                if not layout.stores_mean:
                    return self._compute_as_decided(entry, seal, head)
                if is_mean(payload, layout.blocks(part.n_elements, self._proof), head.blocks):
                    entry.left_out.update(head.left_out)
                    entry.clipped.update(head.clipped)
                    return payload
            self._store.record_misread(key, data)
        return self._recover(entry, seal, shard, head)

    def _compute_early(self, entry: EntryState, seal: Seal) -> None:
        """Compute a mean that is not stored, before its head is stored.

        The head decides which contributions are in the mean. Usually these are all of them.
        """
        if entry.computed is None and 0 not in entry.means:
            began = self._context.clock()
            if owners(entry.index, seal.owners, 0)[0] == self._me.rank:
                self._read_own_from_store(entry)
            with suppress(InputGoneError):
                entry.computed = self._compute(entry, seal, 0)
            entry.reduce_s += self._context.clock() - began

    def _read_own_from_store(self, entry: EntryState) -> None:
        """Let this replica read its own contribution from the store, because its head decides for all replicas.

        The contribution in its memory is intact. If the stored one is damaged, all other replicas need a mean without
        it. A store that checks uploads has accepted the bytes that are in memory, so reading them would waste traffic.
        """
        if 0 not in entry.overwritten and not self._store.checks_uploads:
            entry.overwritten.add(0)
            entry.computed = None

    def _compute_as_decided(self, entry: EntryState, seal: Seal, stored: MeanHead) -> memoryview | None:
        """Return a mean that is not stored, with the contributions that its stored head counts.

        None: one of them cannot be read, or the digests differ. Then only a later snapshot helps this replica.

        Args:
            stored: the stored head.
        """
        found = entry.computed
        if found is None or found[0] != stored:
            if self._context.clock() < entry.retry_s:
                entry.blocked = self._keys.mean(entry.index, 0)
                return None
            counted = {rank: member for rank, member in seal.replicas.items() if rank not in stored.left_out}
            try:
                found = self._compute(entry, replace(seal, replicas=counted), 0)
            except InputGoneError:
                found = None
        if found is None or found[0].blocks != stored.blocks or not {*found[0].left_out} <= {*stored.left_out}:
            entry.blocked = self._keys.mean(entry.index, 0)
            self._retry_later(entry)
            return None
        entry.left_out.update(stored.left_out)
        entry.clipped.update(stored.clipped)
        return found[1]

    def _recover(self, entry: EntryState, seal: Seal, shard: int, stored: MeanHead | None) -> memoryview | None:
        """Compute a damaged shard again from its inputs. Its head proves the result, if the head can be read.

        Args:
            stored: the head of the stored shard. None: the head is damaged, too.
        """
        head: MeanHead | None = None
        entry.blocked = self._keys.mean(entry.index, shard)
        if self._context.clock() < entry.retry_s:
            return None
        with suppress(InputGoneError):
            head, payload = self._compute(entry, seal, shard)
        if head is None or (stored is not None and stored != head):
            # An input was deleted or damaged later, or the processor of the writer adds in another order.
            self._retry_later(entry)
            return None
        entry.blocked = None
        return payload

    def _retry_later(self, entry: EntryState) -> None:
        """Plan the next try to compute a mean whose inputs could not be used.

        Each try reads all inputs. If an input is damaged in the store, only a later snapshot helps. Without a pause,
        this replica would read all of them again in each look, until that snapshot exists.
        """
        entry.retry_pause_s = min(max(self._context.limits.takeover_after_s, 2 * entry.retry_pause_s), MOST_RETRY_S)
        entry.retry_s = self._context.clock() + entry.retry_pause_s

    def _recover_small(self, entry: EntryState, seal: Seal) -> memoryview | None:
        """Compute the damaged mean of a seal again from its inputs. The digest in the seal proves the result."""
        try:
            mean = self._compute(entry, replace(seal, shards=1), 0)[1]
        except InputGoneError:
            return None
        return mean if self._proof.digest(mean) == seal.lost_mean else None

    def _compute(self, entry: EntryState, seal: Seal, shard: int) -> tuple[MeanHead, memoryview]:
        """Compute a shard in memory, and return its head and its payload.

        Raises:
            InputGoneError: an input was deleted.
        """
        mine = self._memory_of_mine(entry, seal, shard)
        size = entry.layout.shard(shard, seal.shards).mean_bytes
        out = np.empty(size, np.uint8).data if mine is None else mine

        def reduce(members: Collection[int]) -> tuple[MeanHead, memoryview]:
            try:
                return self._reduced(entry, seal, shard, members, out), out
            finally:
                if mine is not None:
                    entry.overwritten.add(shard)

        return self._without_bad_inputs(entry, seal, reduce)

    def _stream(self, entry: EntryState, seal: Seal, shard: int) -> MeanHead | None:
        """Compute a shard block by block into the store, and return its head. None: another replica had already created
        the shard.

        Raises:
            InputGoneError: an input was deleted.
        """
        layout, part = entry.layout, entry.layout.shard(shard, seal.shards)
        key = self._keys.mean(entry.index, shard)
        out = np.empty(min(part.mean_bytes, layout.mean_block_bytes), np.uint8).data
        head_bytes = head_bytes_of(part.end_block - part.first_block)

        def reduce(members: Collection[int]) -> MeanHead | None:
            heads: list[MeanHead] = []

            def produce(write: Write) -> bytes:
                heads.append(self._reduced(entry, seal, shard, members, out, write))
                return heads[-1].head(key, self._proof)

            self._store.create_streamed(key, head_bytes, head_bytes + part.mean_bytes, produce)
            return heads[-1] if heads else None

        return self._without_bad_inputs(entry, seal, reduce)

    def _reduced(
        self,
        entry: EntryState,
        seal: Seal,
        shard: int,
        members: Collection[int],
        out: memoryview,
        write: Write | None = None,
    ) -> MeanHead:
        """Compute a shard, and return its head.

        Args:
            members: the ranks whose inputs are averaged.
            out: memory for the mean, or for one block of it if there is a `write`.
            write: called with each block of the mean.

        Raises:
            BadInputError: an input must be left out.
            InputGoneError: an input was deleted.
        """
        layout = entry.layout
        digests, clipped, at = list[str](), set[int](), 0
        for piece, inputs in self._pieces(entry, seal, shard, members):
            blocks = layout.blocks(piece.n_elements, self._proof)
            place = out[at : at + piece.mean_bytes] if write is None else out
            digests += self._context.reduce(inputs, place, blocks, write, clipped)
            at += piece.mean_bytes
        left_out = tuple(sorted(set(seal.inputs) - set(members)))
        return MeanHead(tuple(digests), left_out, layout.mean_wire.name, tuple(sorted(clipped)))

    def _pieces(
        self, entry: EntryState, seal: Seal, shard: int, members: Collection[int]
    ) -> Iterator[tuple[ShardRange, list[ShardInput]]]:
        """Yield the pieces of a shard with their inputs.

        If the store is remote, the next piece is read while the caller averages one. A directory has no such wait, and
        a shard in it is one piece.
        """
        whole = entry.layout.shard(shard, seal.shards)
        pieces = [whole] if self._store.maps else entry.layout.pieces(whole)

        def begin(piece: ShardRange) -> Iterator[ShardInput]:
            return iter(self._context.map(lambda rank: self._input(entry, seal, rank, shard, piece), members))

        reading = begin(pieces[0])
        for piece, following in zip_longest(pieces, pieces[1:]):
            inputs = list(reading)
            if following is not None:
                reading = begin(following)
            yield piece, inputs

    def _without_bad_inputs(self, entry: EntryState, seal: Seal, act: Callable[[Collection[int]], T]) -> T:
        """Call a function with the ranks that a mean contains, and return its result.

        If an input is bad, call the function again, which then reads the inputs again. After `READ_TRIES` wrong
        readings of an input, it is left out.

        Args:
            act: the function. It may raise `BadInputError`.

        Raises:
            InputGoneError: an input was deleted.
        """
        members, tries = list(seal.inputs), dict[int, int]()
        while True:
            try:
                return act(members)
            except BadInputError as bad:
                tries[bad.rank] = tries.get(bad.rank, 0) + 1
                if tries[bad.rank] >= READ_TRIES:
                    if bad.rank not in entry.warned:
                        entry.warned.add(bad.rank)
                        log.warning("%s The mean of round %s does not include it.", bad, entry.index + 1)
                    members.remove(bad.rank)

    def _input(self, entry: EntryState, seal: Seal, rank: int, shard: int, part: ShardRange) -> ShardInput:
        """Return the input of one rank for a part of a shard, from memory or from the store.

        Raises:
            BadInputError: the contribution is not the sealed one, or was cut off.
            InputGoneError: the contribution was deleted.
        """
        blocks = slice(part.first_block, part.end_block)
        member = seal.replicas[rank]
        if rank == self._me.rank and shard not in entry.overwritten:
            kept = self._kept(entry, seal, part)
            if kept is not None:
                assert entry.packed is not None
                return ShardInput(rank, member.weight, kept, entry.packed.blocks[blocks])
        contribution = self._head(entry, rank, member)
        if len(contribution.blocks) != entry.layout.n_blocks or contribution.wire != entry.layout.wire.name:
            raise BadInputError(rank, "has a head of another payload")
        key = self._keys.contribution(entry.index, rank)
        start = entry.layout.head_bytes + part.start
        # the reduction copies the memory
        # a directory still has the bytes of this process in the memory of this machine
        moves = rank != self._me.rank or not self._store.streams
        data = self._store.peek(key, start=start, size=part.size_bytes, moves=moves, is_copied=True)
        if data is None:
            raise InputGoneError
        if len(data) != part.size_bytes:
            raise BadInputError(rank, "was cut off")
        return ShardInput(rank, member.weight, data, contribution.blocks[blocks])

    def _head(self, entry: EntryState, rank: int, member: SealedReplica) -> Contribution:
        """Return the head of a sealed contribution.

        Raises:
            BadInputError: the head is damaged.
            InputGoneError: the sealed contribution was deleted.
        """
        if rank in entry.seen and entry.seen[rank][1] == member.digest:
            return entry.seen[rank][0]
        key = self._keys.contribution(entry.index, rank)
        data = self._store.peek(key, size=entry.layout.head_bytes)
        if data is None:
            raise InputGoneError
        try:
            contribution, digest = Contribution.parse(data, key, self._proof)
        except BadRecordError:
            raise BadInputError(rank, "has a head with other bytes than were written") from None
        if digest != member.digest:
            raise InputGoneError  # a delayed write stored this object after the sealed object was used and deleted
        entry.seen[rank] = (contribution, digest)
        return contribution

    def _memory_of_mine(self, entry: EntryState, seal: Seal, shard: int) -> memoryview | None:
        """Return the memory of this process's input for a shard, if the mean may overwrite it. None: it may not.

        The contribution is in the store, so its memory is no longer needed. The mean fits into it if both wires are the
        same exact wire.
        """
        layout = entry.layout
        fits = layout.wire.is_exact and layout.wire.name == layout.mean_wire.name
        return self._kept(entry, seal, layout.shard(shard, seal.shards)) if fits else None

    def _kept(self, entry: EntryState, seal: Seal, part: ShardRange) -> memoryview | None:
        """Return a range of the payload that this process sent.

        None: the seal does not count it, or it is no longer in memory.
        """
        member = seal.replicas.get(self._me.rank)
        if entry.packed is None or member is None or member.digest not in entry.sent:
            return None
        return entry.packed.part(part.start, part.size_bytes)
