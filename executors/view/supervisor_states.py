"""Finds out whether the supervisor of a rank is alive, or has ended together with the launcher of its attached run."""

from __future__ import annotations

import contextlib
import math
import time

from executors.backend import PendingReplica, SupervisorStatus
from executors.errors import BackendError, CorruptObjectError, StoreError, UnknownHandleError
from executors.restarts.lease import has_lease_ended
from executors.view.replica_handles import ReplicaHandles
from executors.view.replica_records import ReplicaRecords

LEASE_LOOK_S = 10.0  # between two reads of a lease, because another process may take it over at any time


class SupervisorStates:
    """Asks the backend, and the lease, whether the supervisors of ranks are alive.

    Args:
        records: the records of the replicas.
        handles: the handles of the replicas.

    Example:
        SupervisorStates(reader.records, reader.handles).is_alive(0)
    """

    def __init__(self, records: ReplicaRecords, handles: ReplicaHandles) -> None:
        self._records = records
        self._handles = handles
        self.is_kept_here = False
        """True if this process restarts replicas whose supervisors are gone."""
        self._lease_read_at = -math.inf
        self._lease_ended = False

    def is_alive(self, rank: int) -> bool:
        """Return True if the backend reports that the supervisor of a rank is alive."""
        supervisor = self._supervisor(rank)
        return supervisor is not None and supervisor.is_alive

    def ended_with_launcher(self, rank: int) -> bool:
        """Return True if the supervisor of a rank and the launcher of its attached run are known to have ended.

        The rule is the same for all backends. The handle of a local replica names its launcher, and the launcher renews
        a lease for jobs of a service. In a process that watches the run the answer is always False, because this
        process starts the next attempt.

        Args:
            rank: the rank.

        Example:
            reader.supervisors.ended_with_launcher(0)
        """
        supervisor = None if self.is_kept_here else self._supervisor(rank)
        if supervisor is None or supervisor.is_alive:
            return False
        return supervisor.launcher_is_gone or self._has_lease_ended()

    def _has_lease_ended(self) -> bool:
        """Return True if no process renews the lease of an attached run.

        The store is asked again after some seconds.
        """
        now = time.monotonic()
        if now >= self._lease_read_at + LEASE_LOOK_S:
            try:
                self._lease_ended = has_lease_ended(self._records.store, self._records.run_id, time.time())
            except StoreError:  # without an answer, the lease counts as renewed; the next look asks again
                return False
            self._lease_read_at = now
        return self._lease_ended

    def _supervisor(self, rank: int) -> SupervisorStatus | None:
        """Return the state of the supervisor of a rank. None: the backend does not know it."""
        with contextlib.suppress(BackendError, CorruptObjectError, UnknownHandleError):
            if (handle := self._handles.of(rank)) is not None:
                return self._records.placements.supervisors(
                    [PendingReplica(handle, self._records.attempt(rank).number)]
                )[0]
        return None
