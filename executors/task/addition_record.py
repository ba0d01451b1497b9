"""The records `added/<k>.json` of ranks that were added to a run, and how a process takes new ranks."""

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
class Addition(AddedRanks, Placement):
    """The record of one addition: the added ranks, their backend, and the options of their attempts."""

    added_at: float = checked(number(LONG_AGO, FAR_AHEAD), 0.0)
    added_by: str = checked(text(1000), "")
    added_process: str | None = checked(nullable(text(600, IDENTITY)), None)
    """The process that is about to start the ranks, as `identify_process` names it."""

    @property
    def is_orphaned(self) -> bool:
        """True if the process that wanted to start the ranks is known to have ended."""
        return self.added_process is not None and has_ended(self.added_process)

    @property
    def name(self) -> str:
        """A name with a hash of the whole record, so that a changed record has another name."""
        return f"added:{hashlib.sha256(to_bytes(asdict(self))).hexdigest()}"


def read_additions(
    store: Store, run_id: str, world_size: int, known: Sequence[Addition | None]
) -> Iterator[Addition | None]:
    """Yield the additions to a run since the last read, oldest first. None is yielded for a record that is damaged.

    Args:
        store: the store of the run.
        run_id: the run.
        world_size: the number of ranks of the launch.
        known: all additions that were read before, with None for damaged records.

    Raises:
        StoreError: the store does not answer.
    """
    taken = {rank for each in known if each is not None for rank in each.ranks}
    for k in range(len(known), MAX_ADDED):
        key = added_key(run_id, k)
        try:
            found = find_record(store, key, Addition.parse)
            if found is None:
                return
            if wrong := [rank for rank in found.ranks if rank < world_size or rank in taken]:
                raise Fields({}, key, store.url).refusal(f"it adds rank {wrong[0]}, which the run has already")
            taken.update(found.ranks)
            yield found
        except CorruptObjectError as error:
            log.warning("The record of some added ranks cannot be read, so these ranks are ignored: %s", error)
            yield None


def take_ranks(store: Store, run_id: str, world_size: int, n: int, placement: Placement) -> Addition:
    """Take `n` free ranks for an addition, and write its record.

    Args:
        store: the store of the run.
        run_id: the run.
        world_size: the number of ranks of the launch.
        n: the number of ranks to take.
        placement: the backend of the new ranks, with its options.

    Returns: the record, with its ranks.

    Raises:
        ValueError: the record could not be parsed by its readers. The message names the field.
        StoreError: the store does not answer, or the run takes no more additions.
    """
    mine = Addition(
        **{**vars(placement), "ranks": ()},
        nonce=os.urandom(8).hex(),
        added_at=time.time(),
        added_by=this_process(),
        added_process=identify_process(),
    )
    known = list[Addition | None]()
    while True:
        known += read_additions(store, run_id, world_size, known)
        if len(known) >= MAX_ADDED:
            raise StoreError(f"Run {run_id!r} takes no more replicas: {MAX_ADDED} were added.", url=store.url)
        mine = replace(mine, ranks=_free_ranks(store, run_id, world_size, n, known))
        key, written = added_key(run_id, len(known)), to_bytes(asdict(mine))
        try:
            Addition.parse(written)
        except CorruptObjectError as error:
            raise ValueError(f"These replicas cannot be recorded: {error}") from None
        store.put_if_absent(key, written)
        # The reply may be lost, and another machine may have added ranks meanwhile. So the read decides.
        try:
            standing = read_record(store, key, Addition.parse)
            if standing.nonce == mine.nonce:
                return standing
        except CorruptObjectError:
            continue


def _free_ranks(
    store: Store, run_id: str, world_size: int, n: int, known: Iterable[Addition | None]
) -> tuple[int, ...]:
    """Return the lowest ranks above the launched ranks that no record has taken."""
    taken = {rank for rank, _, _ in Inventory.of(store, run_id).records}
    taken |= {rank for each in known if each is not None for rank in each.ranks}
    return tuple(islice((rank for rank in count(world_size) if rank not in taken), n))
