"""Writes the records of broken rules. A store that fails is tried again, and never delays other work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from executors.attempt import Attempt
from executors.errors import StoreError
from executors.settings.rule_finding import RuleFinding
from executors.store.record_names import run_folder_was_deleted

AGAIN_S = 5.0
LAST_TRIES_S = 30.0
"""How long the supervisor waits for the store at its end, when it has no other work."""
MAX_WAITING = 1000


class RuleRecords:
    """The findings about rules that are not written yet.

    Args:
        clock: returns the seconds of a monotonic clock. Default: the system's clock.

    Example:
        records = RuleRecords()
        records.add(attempt, finding)
        records.write()
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting = deque[tuple[Attempt, RuleFinding]](maxlen=MAX_WAITING)
        self._idle_since: float | None = None
        self.next_at = float("inf")
        """The time of the next try, by the clock."""

    def add(self, attempt: Attempt, finding: RuleFinding) -> None:
        """Write a finding with the next call of `write`.

        Args:
            attempt: the attempt that the finding is about.
            finding: the finding.
        """
        self._waiting.append((attempt, finding))
        self.next_at = min(self.next_at, 0.0)

    def write(self) -> bool:
        """Write the waiting findings if a try is due. Return True if any was written. Stop at the first error."""
        if self._clock() < self.next_at:
            return False
        self.next_at = float("inf")
        has_written = False
        while self._waiting:
            attempt, finding = self._waiting[0]
            try:
                # a late write would create the folder of the deleted run again
                if not run_folder_was_deleted(attempt.store, attempt.run_id):
                    attempt.store.put_if_absent(attempt.key(finding.name), finding.to_bytes())
                    has_written = True
            except StoreError:
                self.next_at = self._clock() + AGAIN_S
                break
            self._waiting.popleft()
        return has_written

    def is_pending(self, *, is_busy: bool) -> bool:
        """Return True if findings wait, and the longest wait for the store has not passed.

        Args:
            is_busy: True if the supervisor has other work. Time with other work does not count as waiting.
        """
        if is_busy or not self._waiting:
            self._idle_since = None
            return bool(self._waiting)
        now = self._clock()
        self._idle_since = now if self._idle_since is None else self._idle_since
        return now - self._idle_since < LAST_TRIES_S
