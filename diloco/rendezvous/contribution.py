"""Sending one's contribution: packed and written in one pass where the store can, else packed into memory and sent.

Streamed in fp32, only the shard stays in memory that this replica will probably reduce, as far as it can know before
the sealing; every other byte goes from the processor's cache to the store. Should another shard become due, its own
input is read like everybody's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from diloco.errors import ContributionError
from diloco.rendezvous.envelope import unframe
from diloco.rendezvous.frames import MAX_WEIGHT, Contribution
from diloco.rendezvous.round import Context, EntryState, Send, shards_of
from diloco.rendezvous.training_state import Packed
from executors.store import Buffer


def send_contribution(context: Context, entry: EntryState, send: Send, waited_s: float) -> None:
    """Send the contribution to an entry, perhaps: read the store to know. Without a weight it is a head alone.

    Raises: ContributionError: it is not finite, or a parameter has changed its shape.
    """
    store, me, members, phase = context.store, context.me, context.members, context.phase
    layout, training = entry.layout, context.training
    key = context.keys.contribution(entry.index, me.rank)

    def head(packed: Packed | None) -> bytes:
        head = Contribution(
            rank=me.rank,
            attempt=me.attempt,
            nonce=me.nonce,
            weight=send.weight,
            anchor=training.digest(entry.fragment),
            size_bytes=layout.size_bytes if packed else 0,
            blocks=packed.blocks if packed else (),
            norms=packed.norms if packed else (),
            waited_s=waited_s,
            phase_s=phase.seconds or (members.seal.phase_s if members.seal else 0.0),
            head_start_s=0.0 if send.is_early else phase.head_start_s + phase.ahead_s(entry.index),
            in_phase=not send.is_early,
            wire=layout.wire.name,
            steps=send.steps if packed else 0,
            stop=phase.wants_to_stop,
        ).head(key, context.proof, layout.n_blocks)
        entry.sent.add(unframe(head, key, context.proof)[1])
        return head

    def produce(write: Callable[[Buffer], None]) -> bytes:
        entry.packed = None  # until it is whole
        entry.packed = packed = training.pack(entry.index, write, _range_to_keep(context, entry))
        return head(packed)

    if not send.weight:
        store.create(key, head(None))
    elif layout.is_small or not store.streams or (entry.packed and len(entry.packed.kept) == layout.size_bytes):
        entry.packed = packed = entry.packed or training.pack(entry.index)
        store.create(key, [head(packed), packed.kept])
    else:
        store.create_streamed(key, layout.head_bytes, layout.head_bytes + layout.size_bytes, produce)


def _range_to_keep(context: Context, entry: EntryState) -> tuple[int, int] | None:
    """Return which bytes stay in memory: all where the wire loses something, to know what the others decode.

    Else those of the shard that this replica will reduce if all expected ranks are sealed.
    """
    if not entry.layout.wire.is_exact:
        return None
    rank = context.me.rank
    ranks = {*context.members.expected, rank}
    n_shards = entry.layout.n_shards(len(ranks))
    for shard in shards_of(rank, entry.index, ranks, n_shards):
        part = entry.layout.shard(shard, n_shards)
        return part.start, part.start + part.size_bytes
    return 0, 0


def check_weight(weight: float | Callable[[], float], rank: int, entry: int, *, may_be_zero: bool = False) -> float:
    """Return the weight of a contribution, asking for it where it is a callable.

    A scalar of torch or numpy is a number, too: tokens are often counted in one.

    Raises: ContributionError: it is not a positive number.
    """
    value: Any = weight() if callable(weight) else weight
    if hasattr(value, "item"):
        with suppress(RuntimeError, ValueError):  # it has more than one element
            value = value.item()
    if may_be_zero and not isinstance(value, bool) and value == 0:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_WEIGHT:
        raise ContributionError(
            f"Contribution of rank {rank} for round {entry + 1}: weight must be a positive number, at most "
            f"{MAX_WEIGHT:g}, got {value!r}."
        )
    return float(value)
