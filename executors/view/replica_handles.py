"""Finds the handles of replicas: from the launch in this process, in the store, or at the backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from executors.attempt import Attempt
from executors.attempt.handles import kept_handles
from executors.errors import CorruptObjectError, UnknownHandleError
from executors.view.replica_records import RECENT_S, ReplicaRecords


class ReplicaHandles:
    """Finds the handles of a run's replicas. Each is read once for each attempt.

    Args:
        records: the records of the replicas.
        launched: the handles of the launch, in rank order. None: they are read from the store.

    Example:
        view_of(attach("first-try")).reader.handles.of(0)
    """

    def __init__(self, records: ReplicaRecords, launched: Sequence[Any] | None = None) -> None:
        self._records = records
        self._handles: dict[int, tuple[int | None, Any]] = {rank: (0, each) for rank, each in enumerate(launched or ())}
        self._launches: dict[int, Mapping[int, Any]] = {}
        """The handles of launches that wrote all handles into one object, by the number of the attempt."""

    def of(self, rank: int, *, insists: bool = False) -> Any:
        """Return the handle of a rank. None if it has no handle yet, or the backend cannot find it now.

        Args:
            rank: the rank.
            insists: True: if the backend cannot answer now, raise BackendError. False, the default: return None.

        Raises:
            CorruptObjectError: the record in the store is not a handle of this backend.
            BackendError: `insists` is True, and the backend cannot say now whether it has a job of this rank.
        """
        _, handle = self._handles.get(rank, (None, None))
        if handle is None:  # not kept, because the launcher may write the handle later
            self._records.update(RECENT_S)
            handle = self._newest(rank, insists=insists)
        return handle

    def all(self) -> list[Any]:
        """Return the handles in rank order.

        An element is None if the rank has no handle, or its handle cannot be read.
        """
        if any(self._handles.get(rank, (None, None))[1] is None for rank in self._records.ranks):
            self._records.update()
        return self.newest(self._records.ranks)

    def at(self, attempt: Attempt) -> Any:
        """Return the handle of an attempt. None if it has no handle, or this process cannot read the handle."""
        if attempt.number == self._records.inventory.newest_launched(attempt.rank):
            return self._readable(attempt.rank)
        number, known = self._handles.get(attempt.rank, (None, None))
        return known if number == attempt.number else attempt.handle(self._records.backend(attempt.rank))

    def newest(self, ranks: Sequence[int]) -> list[Any]:
        """Return the handles of the ranks' newest attempts.

        An element is None if the rank has no handle that can be read.

        Args:
            ranks: the ranks.
        """
        records = self._records
        newest = {rank: records.inventory.newest_launched(rank) for rank in ranks}
        unread = Counter(number for rank, number in newest.items() if self._handles.get(rank, (None,))[0] != number)
        for number, n in unread.items():
            if number is not None and n > 1 and not records.is_near and number not in self._launches:
                self._launches[number] = kept_handles(records.store, records.run_id, number, records.backend)
        far = [
            rank
            for rank, number in newest.items()
            if number is not None and not self._has(rank, number) and rank not in self._launches.get(number, {})
        ]
        found = dict(zip(far, records.map(self._readable, far), strict=True))
        return [found[rank] if rank in found else self._readable(rank) for rank in ranks]

    def _has(self, rank: int, number: int) -> bool:
        found, handle = self._handles.get(rank, (None, None))
        return handle is not None and found == number

    def _readable(self, rank: int) -> Any:
        try:
            return self._newest(rank)
        except (CorruptObjectError, UnknownHandleError) as error:
            self._records.keep_problem(self._records.attempt(rank), error)
            return None

    def _newest(self, rank: int, *, insists: bool = False) -> Any:
        """Return the handle of the rank's newest attempt that was launched. Each handle is read once."""
        launched = self._records.inventory.newest_launched(rank)
        if launched is None or self._has(rank, launched):
            return self._handles.get(rank, (None, None))[1]
        attempt, backend = self._records.attempt(rank).at(launched), self._records.backend(rank)
        found = self._launches.get(launched, {}).get(rank) or attempt.handle(backend)
        if found is None:
            found = self._records.placements.find_handle(attempt.bare_handle(backend), insists=insists)
            if found is None and (
                outcome := attempt.outcome()
            ):  # the backend has recorded that it could not start the attempt
                self._records.keep(outcome)
        self._handles[rank] = (launched, found)
        return found
