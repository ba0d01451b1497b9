"""The last lines of jobs whose logs come over a stream that stays open while a job is silent."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

QUIET_S = 0.5  # a stream that was silent for so long has told what there is
FIRST_LINE_S = 2.0  # how long the first line may take
LONGEST_S = 30.0


class _Reading:
    """One stream, read by a thread of its own."""

    def __init__(self, n_lines: int, fetch: Callable[[], Iterator[str]]) -> None:
        self.n_lines = n_lines
        self.lines: deque[str] = deque(maxlen=n_lines)
        self.error: Exception | None = None
        self.has_ended = False
        self._spoke_at = time.monotonic()
        self._changed = threading.Condition()
        threading.Thread(target=self._read, args=(fetch,), name="replicas-logs", daemon=True).start()

    def _read(self, fetch: Callable[[], Iterator[str]]) -> None:
        try:
            for line in fetch():
                with self._changed:
                    self.lines.append(line)
                    self._spoke_at = time.monotonic()
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - told to whoever reads
            self.error = error
        with self._changed:
            self.has_ended = True
            self._changed.notify_all()

    def wait(self) -> list[str]:
        """Return the lines once the stream has ended or is silent: at once where it has been for a while."""
        give_up_at = time.monotonic() + LONGEST_S
        with self._changed:
            while not self.has_ended:
                now = time.monotonic()
                left_s = self._spoke_at + (QUIET_S if self.lines else FIRST_LINE_S) - now
                if left_s <= 0 or now > give_up_at:
                    break
                self._changed.wait(left_s)
            return list(self.lines)


class LinesOfJobs:
    """Reads logs without waiting for the silence of a job to end: a stream still open serves the next reader, too."""

    def __init__(self) -> None:
        self._open: dict[str, _Reading] = {}
        self._lock = threading.Lock()

    def read(self, job: str, n_lines: int, fetch: Callable[[], Iterator[str]]) -> list[str]:
        """Return the last `n_lines` lines of a job.

        Args:
            fetch: opens the stream. One that breaks off is opened once more.

        Raises:
            Exception: what the stream raised, when it brought no line.
        """
        if n_lines < 1:
            return []
        reading = self._reading(job, n_lines, fetch)
        lines = reading.wait()
        if reading.error is not None:
            again = self._reading(job, n_lines, fetch)
            lines = again.wait() or lines
            if again.error is not None and not lines:
                raise again.error
        return lines[-n_lines:]

    def _reading(self, job: str, n_lines: int, fetch: Callable[[], Iterator[str]]) -> _Reading:
        with self._lock:
            reading = self._open.get(job)
            if reading is None or reading.has_ended or reading.n_lines < n_lines:
                reading = self._open[job] = _Reading(n_lines, fetch)
            return reading
