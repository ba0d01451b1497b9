"""Ranks added to a run: where they are, as `added/<k>.json` says, and how they are taken."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice

from executors.errors import CorruptObjectError, StoreError
from executors.process import IDENTITY, has_ended, identify_process, this_process
from executors.store import Store
from executors.store.added_ranks import MAX_ADDED, AddedRanks, added_key
from executors.store.inventory import Inventory
from executors.store.records import (
    FAR_AHEAD,
    LONG_AGO,
    Fields,
    checked,
    find_record,
    nullable,
    number,
    read_record,
    text,
    to_bytes,
)
from executors.task.record import Placement

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Added(AddedRanks, Placement):
    """Where added ranks are, and what an attempt is started with there."""

    added_at: float = checked(number(LONG_AGO, FAR_AHEAD), 0.0)
    added_by: str = checked(text(1000), "")
    added_process: str | None = checked(nullable(text(600, IDENTITY)), None)
    """The process that is about to start the ranks, as `identify_process` names it."""

    @property
    def is_orphaned(self) -> bool:
        """Whether the process that was about to start the ranks is known to have ended."""
        return self.added_process is not None and has_ended(self.added_process)

    @property
    def name(self) -> str:
        """A hash: another record of the same ranks, or nonce, has another name."""
        return f"added:{hashlib.sha256(to_bytes(asdict(self))).hexdigest()}"


def read_added(store: Store, run_id: str, world_size: int, known: Sequence[Added | None]) -> Iterator[Added | None]:
    """Yield what was added to a run since, oldest first; None for a record that cannot be read: it adds nothing.

    Args:
        known: all that were added before.
    """
    taken = {rank for each in known if each is not None for rank in each.ranks}
    for k in range(len(known), MAX_ADDED):
        key = added_key(run_id, k)
        try:
            found = find_record(store, key, Added.parse)
            if found is None:
                return
            if wrong := [rank for rank in found.ranks if rank < world_size or rank in taken]:
                raise Fields({}, key, store.url).refusal(f"it adds rank {wrong[0]}, which the run has already")
            taken.update(found.ranks)
            yield found
        except CorruptObjectError as error:
            log.warning("Nothing is known of ranks that somebody added: %s", error)
            yield None


def take_ranks(store: Store, run_id: str, world_size: int, n: int, placement: Placement) -> Added:
    """Take `n` ranks that nobody has; return the record of it, which is written.

    Raises:
        ValueError: what is to be recorded of them could not be read again.
        StoreError: the store does not answer, or the run has no room for more.
    """
    mine = Added(
        **{**vars(placement), "ranks": ()},
        nonce=os.urandom(8).hex(),
        added_at=time.time(),
        added_by=this_process(),
        added_process=identify_process(),
    )
    known = list[Added | None]()
    while True:
        known += read_added(store, run_id, world_size, known)
        if len(known) >= MAX_ADDED:
            raise StoreError(f"Run {run_id!r} takes no more replicas: {MAX_ADDED} were added.", url=store.url)
        mine = replace(mine, ranks=_free_ranks(store, run_id, world_size, n, known))
        key, written = added_key(run_id, len(known)), to_bytes(asdict(mine))
        try:
            Added.parse(written)
        except CorruptObjectError as error:
            raise ValueError(f"These replicas cannot be recorded: {error}") from None
        store.put_if_absent(key, written)
        # What stands decides: an answer may be lost, and another machine may have added ranks meanwhile.
        try:
            standing = read_record(store, key, Added.parse)
            if standing.nonce == mine.nonce:
                return standing
        except CorruptObjectError:
            continue


def _free_ranks(store: Store, run_id: str, world_size: int, n: int, known: Iterable[Added | None]) -> tuple[int, ...]:
    """Return the lowest ranks beyond the first world that no record names."""
    taken = {rank for rank, _, _ in Inventory.of(store, run_id).records}
    taken |= {rank for each in known if each is not None for rank in each.ranks}
    return tuple(islice((rank for rank in count(world_size) if rank not in taken), n))
