"""Asks cloud services why they ended replicas. The outcome has only a signal; the ended job has the reason."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from executors.attempt import Attempt
from executors.backend import PendingReplica
from executors.errors import BackendError, CorruptObjectError, UnknownHandleError
from executors.protocol import Outcome
from executors.registry.placements import Placements, known_supervisors

ASK_WHY_S = 3600.0  # seconds after the end of a job from which its service may have forgotten it
ANSWERS_IN_S = 20.0  # seconds until a service shows the end of a job


class ServiceReasons:
    """Asks services why they ended replicas of a run, and records the reasons beside the outcomes.

    Example:
        explained = ServiceReasons().ask(ends, placements, reader.handles.of)
    """

    def __init__(self) -> None:
        self._waited_until: dict[tuple[int, int], float] = {}
        """The monotonic time until which an answer may come, by rank and attempt. 0.0: no answer is awaited."""

    def is_awaited(self, end: Outcome | None) -> bool:
        """Return True if the service may soon report the reason of an end.

        Args:
            end: the outcome of an attempt. None: the attempt has not ended.
        """
        return end is not None and time.monotonic() < self._waited_until.get((end.rank, end.attempt), 0.0)

    def ask(self, ends: Sequence[Outcome], placements: Placements, handle_of: Callable[[int], Any]) -> list[Outcome]:
        """Return the outcomes for which a reason was recorded now. The caller must read them again.

        Args:
            ends: the outcomes of replicas that have ended.
            placements: the backends of the run.
            handle_of: returns the handle of a rank, or None if it has no handle.
        """
        told = [end for end in ends if end.was_told_to_end and self._waited_until.get((end.rank, end.attempt)) != 0.0]
        if not told or time.time() - max(end.finished_at for end in told) > ASK_WHY_S:
            return []
        explained = []
        with contextlib.suppress(BackendError, CorruptObjectError, UnknownHandleError):
            known = [(end, handle) for end in told if (handle := handle_of(end.rank)) is not None]
            found = known_supervisors(placements, [PendingReplica(handle, end.attempt) for end, handle in known])
            for (end, handle), supervisor in zip(known, found, strict=True):
                if not supervisor.is_alive:
                    self._waited_until[end.rank, end.attempt] = 0.0
                    attempt = Attempt.from_handle(handle, placements.name_at(end.rank)).at(end.attempt)
                    attempt.record_service_reason(supervisor.reason, supervisor.error)
                    explained.append(end)
                elif placements.lease_s is not None:  # only replicas that run as jobs have reasons at a service
                    self._waited_until.setdefault((end.rank, end.attempt), time.monotonic() + ANSWERS_IN_S)
        return explained
