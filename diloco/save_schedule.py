"""Decides when attached state is kept: as often as it costs little, so that a resumed replica has lost little."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, thread_time

MOST_SHARE = 0.01
"""The largest share of the time for copies, because training waits for them."""
MOST_UPLOAD_SHARE = 0.25
"""The largest share of the time for uploads, because they share a link with the rounds."""


class SaveSchedule:
    """Decides after which rounds a replica keeps its attached state.

    State is kept after the first round, and then once in every period at any cost. In between, state is kept if the
    copies take at most 1 % of the time of training, and the uploads at most a quarter of the time.

    Args:
        entries_per_round: entries of the log in which each fragment has one round.
        entries_per_period: entries from one snapshot to the next. The state of the first round of a period is not
            deleted: a run that continues from that snapshot needs it.
        position: the entries that the run has had.
        clock: seconds; a test gives its own, as the next.
        work_time: seconds that this thread has worked. By the clock, a loaded machine would make copies look expensive.

    Example:
        schedule = SaveSchedule(1, 10, position=0)
        if schedule.is_due(position):
            with schedule.keeping(position):
                copy()
            schedule.hand_over()  # and in another thread: with schedule.uploading(): upload()
    """

    def __init__(
        self,
        entries_per_round: int,
        entries_per_period: int,
        position: int,
        *,
        clock: Callable[[], float] = monotonic,
        work_time: Callable[[], float] = thread_time,
    ) -> None:
        self._entries_per_round = entries_per_round
        self._entries_per_period = entries_per_period
        self._clock, self._work_time = clock, work_time
        self._period = position // entries_per_period
        self._position: int | None = None
        """Where it was kept last, by this process."""
        self._kept_at = self._copy_s = self._upload_s = 0.0
        # Each is written by one thread alone, so no lock guards them.
        self._n_begun = self._n_ended = 0

    @property
    def is_uploading(self) -> bool:
        """Whether an upload is under way, or waits for its turn."""
        return self._n_begun != self._n_ended

    def is_due(self, position: int) -> bool:
        """Return whether to keep now that the run has had `position` entries."""
        if position // self._entries_per_period != self._period:
            return True
        if self.is_uploading:
            return False
        if self._position is None:
            return position > 0
        if position - self._position < self._entries_per_round:
            return False
        least_s = max(self._copy_s / MOST_SHARE, self._upload_s / MOST_UPLOAD_SHARE)
        return self._clock() - self._kept_at >= least_s

    def is_first_of_period(self, position: int) -> bool:
        """Return whether what is kept now stays for a run that continues from this period's snapshot."""
        return self._position is None or position // self._entries_per_period != self._period

    @contextmanager
    def keeping(self, position: int) -> Iterator[None]:
        """Measure the copies that are made within, which training waits for."""
        began, worked = self._clock(), self._work_time()
        yield
        self._copy_s = self._work_time() - worked
        self._position, self._kept_at = position, began
        self._period = position // self._entries_per_period

    def hand_over(self) -> None:
        """Note that an upload will be made; called in the training's thread."""
        self._n_begun += 1

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Measure an upload that was handed over; called in the thread that makes it."""
        began = self._clock()
        try:
            yield
        finally:
            self._upload_s = self._clock() - began
            self._n_ended += 1
