"""Decides which replica stores its model as the first snapshot of a run, and stores it.

Any replica may do this, because the pointer decides whose model counts. But behind a slow link, a model of gigabytes
takes minutes to store. So a replica first looks whether another one is storing its model.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

from diloco.rendezvous.round import Context
from diloco.rendezvous.snapshot import PART_BYTES, SnapshotPointer, parts_of, put_parts

log = logging.getLogger(__name__)

SLOW_LINK = 1e6
"""The speed of a slow link, in bytes per second. A replica is waited for while each part of its model takes at most as
long as on such a link.
"""
MAX_OFFERS = 64
"""The number of replicas that are looked at. More than a few have begun only if the store has foreign objects."""
_OFFER = re.compile(r"(\d{1,15})/(\d{1,15})")


class FirstSnapshot:
    """Stores the model of this replica as the first snapshot, unless another replica is doing so.

    Rank 0 begins at once, and each further rank a few seconds later than the one before it. So usually only rank 0
    stores its model.

    Args:
        context: the services of the rendezvous.
        load_newest: loads the newest snapshot of the run that a context belongs to, and returns its entry.

    Example:
        FirstSnapshot(context, load_newest).store_if_due()
    """

    def __init__(self, context: Context, load_newest: Callable[[Context], int | None]) -> None:
        self._context = context
        self._store = context.store
        self._keys = context.keys
        self._me = context.me
        self._load_newest = load_newest
        self._has_state = context.origin is None and context.first_state is None
        """True if the training state is the state that the run begins with."""
        self._first_entry = 0
        """The entry of the other run whose state this run begins with. 0: this run begins with a new state."""
        self._has_offered = False
        self._seen: tuple[list[tuple[int, int]], int] = ([], 0)
        """The replicas that were storing their models at the last look, and the number of parts in the store."""
        self._since_s = context.clock()
        """The time at which this replica began to wait, or last saw a difference."""

    def store_if_due(self) -> bool:
        """Store the model if this replica need not wait for another one, and return True. Otherwise return False.

        The model is stored under the nonce of this process. Then this tries to create the pointer. The pointer that
        exists afterwards decides which process's model begins the run. A run that continues from another run begins
        with the newest state of that run.

        If a state must be read first, the call ends after that. Meanwhile another replica may have begun to store it.
        """
        context, keys, me = self._context, self._keys, self._me
        if not self._is_due() or self._store.exists(keys.snapshot(0)):
            return False
        if not self._has_offered:
            self._store.create(keys.offer(me.rank, me.attempt), b"")
            self._has_offered = True
        if not self._has_state:
            self._load_state()
            self._has_state = True
            return True
        training, proof = context.training, context.proof
        digests = put_parts(self._store, keys, 0, me.nonce, training.arrays(), proof)
        if digests is not None:
            state, agreement = context.state_digests(), training.agreement()
            pointer = SnapshotPointer(me.nonce, me.rank, digests, state, agreement, self._first_entry)
            self._store.create(keys.snapshot(0), pointer.data(keys.snapshot(0), proof))
        return True

    def _is_due(self) -> bool:
        """Return True if this replica may store its model now.

        Another replica that has begun is waited for while it lives and further parts of its model appear.
        """
        context, now, rank = self._context, self._context.clock(), self._me.rank
        takeover_s = context.limits.takeover_after_s
        if now < self._since_s + rank * takeover_s:
            return False
        running = [other for other in self._others() if context.members.runs(*other)]
        if not running:
            return True
        seen = (running, len(self._store.list_keys(self._keys.parts(0))))
        if seen != self._seen:
            self._seen, self._since_s = seen, now
        return now >= self._since_s + self._part_s + (rank + 1) * takeover_s

    @cached_property
    def _part_s(self) -> float:
        """Seconds that the largest part of the model takes behind a slow link.

        One array may be larger than a usual part, and a replica must begin before all of them give up.
        """
        parts = parts_of(self._context.training.arrays(), PART_BYTES)
        largest = max(sum(array.nbytes for array in part.values()) for part in parts)
        return min(largest / SLOW_LINK, self._context.limits.round_timeout_s / 2)

    def _others(self) -> list[tuple[int, int]]:
        """Return the rank and the attempt of each other replica that has begun to store its model.

        A replica that has begun as well waits only for lower ranks. Otherwise two could wait for each other.
        """
        prefix, me = self._keys.offers(), self._me
        found = (_OFFER.fullmatch(key.removeprefix(prefix)) for key in self._store.list_keys(prefix))
        others = sorted((int(offer[1]), int(offer[2])) for offer in found if offer is not None)
        return [
            (rank, attempt) for rank, attempt in others[:MAX_OFFERS]
            if rank < me.rank or (rank != me.rank and not self._has_offered)
        ]  # fmt: skip

    def _load_state(self) -> None:
        """Load the state that this run begins with: the newest state of the run that it continues, or a warm start."""
        context, origin = self._context, self._context.origin
        if origin is None:
            assert context.first_state is not None
            context.training.load(context.first_state())
            return
        # The other run has ended, so no new object will appear in it, and a short wait is enough.
        limits = replace(context.limits, round_timeout_s=context.limits.grace_s)
        # The reader gets its own copy of the plan. If the other run was stopped, the reader would apply that early end
        # to this replica's plan, and only this replica would end too early.
        keys, plan = replace(self._keys, run_id=origin), replace(context.plan)
        self._first_entry = self._load_newest(replace(context, keys=keys, limits=limits, plan=plan)) or 0
        log.warning("rank %s: it continues from round %s of run %s.", self._me.rank, self._first_entry, origin)
