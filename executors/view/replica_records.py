"""Remembers the records of a run's replicas that this process has read: newest attempts, outcomes and damaged
records.

One list of the store shows which records are new, and only these are read. ADR 0019 gives the reasons.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from executors.attempt import Attempt
from executors.errors import CorruptObjectError, UnwritableStoreError
from executors.protocol import Outcome, ReplicaStatus
from executors.registry.run_placements import RunPlacements
from executors.store import Store
from executors.store.inventory import Inventory
from executors.store.parallel import at_store
from executors.store.url import is_near
from executors.task.record import RunRecord

RECENT_S = 0.2
T = TypeVar("T")
R = TypeVar("R")


class ReplicaRecords:
    """Reads the records of a run's replicas, and keeps what this process has seen.

    Args:
        store: the store of the run.
        run_id: the id of the run.
        record: the record of the run.
        placements: the backends of the ranks.

    Example:
        records = view_of(attach("first-try")).reader.records
        records.update()
        print(records.attempt(0).number)
    """

    def __init__(self, store: Store, run_id: str, record: RunRecord, placements: RunPlacements) -> None:
        self.store = store
        self.run_id = run_id
        self.record = record
        self.placements = placements
        self._ranks: Sequence[int] = range(record.world_size)
        self.is_near = is_near(store.url)
        self._inventory = Inventory()
        self._merging = threading.Lock()
        self._updated_at = -math.inf
        self._outcomes: dict[int, Outcome] = {}
        self._unrecorded: set[int] = set()
        """Ranks whose end is known but could not be recorded. The next look tries again."""
        self._problems: dict[int, Outcome] = {}

    @property
    def inventory(self) -> Inventory:
        """The list of the replicas' records at the last look."""
        return self._inventory

    @property
    def ranks(self) -> Sequence[int]:
        """The launched ranks and the ranks that were added before the last look."""
        return self._ranks

    def backend(self, rank: int) -> str:
        """Return the name of the backend that has a rank."""
        return self.placements.name_at(rank)

    def map(self, act: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Call a function for several items, in parallel threads if the run's store is remote."""
        return at_store(self.store, act, list(items))

    def update(self, max_age_s: float = 0.0) -> None:
        """List the replicas' records again, unless the last list is less than `max_age_s` seconds old."""
        if time.monotonic() - self._updated_at >= max_age_s:
            found = Inventory.of(self.store, self.run_id)
            with self._merging:  # a thread with an older list must not remove records that another thread has found
                self._inventory |= found
                added = self._inventory.added(self.record.world_size)
                if added:
                    self.placements.learn(added)
                    placed = {*self.placements.ranks}
                    self._ranks = [*range(self.record.world_size), *(rank for rank in added if rank in placed)]
            self._updated_at = time.monotonic()

    def count_joined(self) -> int:
        """Return the number of ranks that joined the running run by themselves, as of the last look."""
        return len(self._inventory.joined(self.record.world_size) - {*self._ranks})

    def attempt(self, rank: int) -> Attempt:
        """Return a rank's newest attempt, as of the last look."""
        return Attempt(self.store, self.run_id, rank, self._inventory.newest(rank))

    def launched(self, rank: int) -> list[Attempt]:
        """Return the attempts of a rank that have a log, oldest first, as of the last look."""
        found = [self.attempt(rank).at(number) for number in self._inventory.launched(rank)]
        return found or [self.attempt(rank).at(0)]

    def outcome(self, rank: int) -> Outcome | None:
        """Return the outcome of a rank's newest attempt, as of the last look. None while the attempt continues."""
        known = self._outcomes.get(rank)
        is_final = known is not None and known.status is ReplicaStatus.SUCCEEDED
        return known if is_final or (known and known.attempt == self._inventory.newest(rank)) else None

    @property
    def ends(self) -> dict[int, Outcome]:
        """The known outcomes of the newest attempts, by rank."""
        return {rank: end for rank in self.ranks if (end := self.outcome(rank)) is not None}

    def problem(self, rank: int) -> Outcome | None:
        """Return a substitute outcome for a rank with damaged or forged records. None if the records are sound."""
        found = self._problems.get(rank)
        return found if found is not None and found.attempt == self._inventory.newest(rank) else None

    def read_new_outcomes(self, asked: Sequence[int] | None) -> Sequence[int]:
        """List the records, and read the new outcomes. Return the requested ranks.

        Args:
            asked: the requested ranks. None: all ranks.
        """
        self.update()
        ranks = self.ranks if asked is None else asked
        over = [each for each in map(self.attempt, ranks) if self._inventory.has(each.rank, each.number, "outcome")]
        self.map(self.read_outcome, [each for each in over if self.outcome(each.rank) is None])
        return ranks

    def read_outcome(self, attempt: Attempt) -> bool:
        """Read and remember the outcome of an attempt. Return False if it has none yet.

        Args:
            attempt: the attempt.
        """
        try:
            outcome = attempt.outcome()
        except CorruptObjectError as error:
            self.keep_problem(attempt, error)
            return True
        if outcome is not None:
            self.keep(outcome)
        return outcome is not None

    def keep(self, outcome: Outcome) -> None:
        """Remember an outcome that another object of this process has found.

        Args:
            outcome: the outcome.
        """
        self._outcomes[outcome.rank] = outcome

    def keep_problem(self, attempt: Attempt, error: Exception) -> None:
        """Remember that a record of an attempt is damaged or forged.

        Args:
            attempt: the attempt.
            error: the error of reading the record.
        """
        self._problems[attempt.rank] = unreadable(attempt, error)

    def keep_unrecorded(self, rank: int, error: UnwritableStoreError) -> Outcome:
        """Remember an outcome only until the next look, because it could not be written to the store. Return the
        outcome.

        Args:
            rank: the rank.
            error: the error of the store, which has the outcome. An error without an outcome is raised.
        """
        if error.outcome is None:
            raise error
        said = error.outcome.error or ""
        self._outcomes[rank] = found = replace(error.outcome, error=f"{said} It cannot be recorded: {error}".strip())
        self._unrecorded.add(rank)
        return found

    def forget_unrecorded(self) -> None:
        """Forget the outcomes that could not be written, so that this look tries again."""
        while self._unrecorded:
            self._outcomes.pop(self._unrecorded.pop(), None)


def unreadable(attempt: Attempt, error: Exception) -> Outcome:
    """Return a substitute outcome for an attempt with damaged records. It is not written to the store.

    Args:
        attempt: the attempt.
        error: the error of reading the record.
    """
    return attempt.new_outcome(ReplicaStatus.FAILED, "lost", error=str(error), finished_at=time.time())
