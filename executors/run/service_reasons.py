"""Why services told replicas to end: an outcome knows of a signal alone, and its job says more once that is gone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from executors.attempt import Attempt
from executors.errors import BackendError, CorruptObjectError, UnknownHandleError
from executors.native import NativeExecutor, Unfinished
from executors.protocol import Outcome, ServerlessExecutor
from executors.run.fleet import parents_of

ASK_WHY_S = 3600.0  # services forget their jobs
ANSWERS_IN_S = 20.0  # a job may take some seconds to be gone


class ServiceReasons:
    """Asks services why they told the replicas of a run to end, and leaves what they say beside the outcomes."""

    def __init__(self) -> None:
        self._waited_until: dict[tuple[int, int], float] = {}
        """Until when the answer for an attempt is worth waiting for; 0: it has come, or there is none."""

    def is_awaited(self, end: Outcome | None) -> bool:
        """Tell whether a service is about to say why it told a replica to end."""
        return end is not None and time.monotonic() < self._waited_until.get((end.rank, end.attempt), 0.0)

    def ask(
        self, ends: Sequence[Outcome], executor: Callable[[], ServerlessExecutor], handle_of: Callable[[int], Any]
    ) -> list[Outcome]:
        """Return those of these ends that are explained now: their outcomes may say more than before."""
        told = [end for end in ends if end.was_told_to_end and self._waited_until.get((end.rank, end.attempt)) != 0.0]
        if not told or time.time() - max(end.finished_at for end in told) > ASK_WHY_S:
            return []
        explained = []
        with contextlib.suppress(BackendError, CorruptObjectError, UnknownHandleError):
            service = executor()
            if not isinstance(service, NativeExecutor):
                return []
            known = [(end, handle) for end in told if (handle := handle_of(end.rank)) is not None]
            parents = parents_of(service, [Unfinished(handle, end.attempt) for end, handle in known])
            for (end, handle), parent in zip(known, parents, strict=True):
                if not parent.is_alive:
                    self._waited_until[end.rank, end.attempt] = 0.0
                    Attempt.from_handle(handle, service.backend_name).at(end.attempt).note_why(
                        parent.reason, parent.error
                    )
                    explained.append(end)
                elif service.lease_s is not None:  # its replicas run as jobs, which have reasons to end
                    self._waited_until.setdefault((end.rank, end.attempt), time.monotonic() + ANSWERS_IN_S)
        return explained
