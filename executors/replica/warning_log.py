"""The warnings of one attempt, collected in any thread of the replica and written while training continues.

A warning only changes a list in memory. The heartbeat's thread writes the whole record when a write is due. So a loop
that warns costs little time and few requests.
"""

from __future__ import annotations

import os
import time
from _thread import RLock  # not `threading`, which runs a hook at every fork of the process
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from executors.attempt import Attempt
from executors.attempt.outcome import MAX_FIRST, MAX_WARNINGS
from executors.attempt.warning_record import MAX_CHARACTERS, NAME, RecordedWarning, RecordedWarnings
from executors.errors import StoreError
from executors.protocol import Standstill, WarningCount
from executors.store.record_names import run_folder_was_deleted

MAX_OF_PLACE = 8
"""The most texts of one place in the code, because a message with a number in it must not displace all others."""
N_AT_ONCE = 8
"""The first texts of an attempt are written at once, because its process may not live long."""
# The wait before a new text is written after the first one, and before a repeated text is counted in the record.
NEW_S, REPEAT_S = 10.0, 60.0
RETRY_S = 5.0
CUT = "…"


class WarningLog:
    """Collects the warnings of one attempt and writes them to its `warnings.json`.

    Any thread of the process that made this object may call `add`. Only the writing thread calls the other methods.

    Args:
        attempt: the attempt of the record.
        clock: returns seconds of a monotonic clock, for the time between two writes.
        now: returns Unix time, for the times of the warnings.

    Example:
        warnings = WarningLog(attempt)
        warnings.add("The data set has 3 unreadable files.")
        warnings.write(is_last=True)
    """

    def __init__(
        self, attempt: Attempt, *, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._attempt = attempt
        self._clock = clock
        self._now = now
        self._pid = os.getpid()
        self.on_first: Callable[[], None] = lambda: None
        """Is called for each of the first texts, in the thread that warned. It wakes the thread that writes."""
        # Re-entrant: a signal handler that warns may interrupt the thread that holds it.
        self._lock = RLock()
        self._kept: dict[str, RecordedWarning] = {}
        self._of_place: Counter[str] = Counter()
        self._left_out = 0
        self._standstill: Standstill | None = None
        self._due_at: float | None = None
        """The time of the next write. None: there is no new warning."""

    def add(self, text: str, place: str = "") -> None:
        """Add a warning. The call never raises and never waits for the store. It does nothing in a forked process.

        Args:
            text: the warning for the user. It is cut to `MAX_CHARACTERS`, and `rank 3: ` at its begin is removed.
            place: the module and line of the warning. At most `MAX_OF_PLACE` texts of the same place are recorded.
                Warnings with an empty place have no such limit.

        Example:
            warnings.add("rank 3: the tracker 'wandb' refuses numbers", place="executors.worker.tracking")
        """
        if os.getpid() != self._pid:
            return
        try:
            at, text = self._now(), self._tidy(text)
            with self._lock:
                is_among_first = self._merge(text, place, at)
            if is_among_first:
                self.on_first()
        except Exception:  # noqa: BLE001 - a warning that cannot be kept is still in the log, and ends nothing
            return

    def stand_still(self, found: Standstill | None) -> None:
        """Note a round that cannot continue, for the heartbeat and the outcome.

        The caller also adds a warning about it.

        Args:
            found: the standstill. None: the rounds continue.

        Example:
            warnings.stand_still(Standstill(round=12, key="otter/diloco/main/seal/11"))
        """
        if os.getpid() == self._pid:
            self._standstill = found
            self.on_first()

    @property
    def count(self) -> WarningCount | None:
        """The number of warnings and the first of them, for heartbeats and outcomes. None if there are no warnings."""
        with self._lock:
            if not self._kept:
                return None
            first = next(iter(self._kept.values()))
            n = len(self._kept) + bool(self._left_out)
            return WarningCount(n, _cut(first.text, MAX_FIRST), first.at, self._standstill)

    def write(self, *, is_last: bool = False) -> bool:
        """Write new warnings if a write is due.

        Args:
            is_last: True to write all new warnings now, even if the store has just failed. Default False.

        Returns: True if nothing is left to write.
        """
        with self._lock:
            if self._due_at is None or not (is_last or self._clock() >= self._due_at):
                return self._due_at is None
            record = RecordedWarnings(warnings=[*self._kept.values()], left_out=self._left_out)
            self._due_at = None  # before the write, so that a warning during the write is due again
        store = self._attempt.store
        # a late write would create the folder of the deleted run again
        if run_folder_was_deleted(store, self._attempt.run_id):
            return True
        try:
            store.put(self._attempt.key(NAME), record.to_bytes())
        except StoreError:  # the heartbeat's thread logs the error
            with self._lock:
                self._be_due(RETRY_S)
        return self._due_at is None

    def _tidy(self, text: str) -> str:
        text = str(text[: 2 * MAX_CHARACTERS]).strip().removeprefix("replicas: ")
        return _cut(text.removeprefix(f"rank {self._attempt.rank}: "), MAX_CHARACTERS)

    def _merge(self, text: str, place: str, at: float) -> bool:
        """Add a text to the record. Return True if it is one of the first texts, which are written at once."""
        known = self._kept.get(text)
        if known is not None:
            self._kept[text] = replace(known, last_at=max(at, known.last_at), count=known.count + 1)
        elif len(self._kept) >= MAX_WARNINGS or (place and self._of_place[place] >= MAX_OF_PLACE):
            self._left_out += 1
        else:
            self._kept[text] = RecordedWarning(text=text, at=at, last_at=at, count=1)
            self._of_place[place] += 1
            is_among_first = len(self._kept) <= N_AT_ONCE
            self._be_due(0.0 if is_among_first else NEW_S)
            return is_among_first
        self._be_due(REPEAT_S)
        return False

    def _be_due(self, in_s: float) -> None:
        at = self._clock() + in_s
        self._due_at = at if self._due_at is None else min(at, self._due_at)


def _cut(text: str, max_characters: int) -> str:
    return text if len(text) <= max_characters else text[: max_characters - 1] + CUT
