"""Decides when attached state is saved.

If state is saved more often, a resumed replica loses less work. The cost of saving is limited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, thread_time

MOST_SHARE = 0.01
"""The largest share of the time for copies, because training waits for them."""
MOST_UPLOAD_SHARE = 0.25
"""The largest share of the time for uploads, because they share a link with the rounds."""


class SaveSchedule:
    """Decides after which rounds a replica saves its attached state.

    State is saved after the first round, and then once in every period, whatever it costs. In between, state is saved
    if the copies take at most 1 % of the training's time, and the uploads at most a quarter of the time.

    Args:
        entries_per_round: entries of the log in which each fragment has one round.
        entries_per_period: entries from one snapshot to the next. The state of the first round of a period is not
            deleted, because a run that continues from that snapshot needs it.
        position: the number of entries that the run has completed.
        clock: returns seconds of a monotonic clock. A test gives its own.
        work_time: returns the seconds of processor time that this thread has used. With clock time, copies would seem
            expensive on a busy machine. A test gives its own.

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
        """The position at which this process saved the state last."""
        self._kept_at = self._copy_s = self._upload_s = 0.0
        # Only one thread writes each of the following values, so no lock guards them.
        self._n_begun = self._n_ended = 0

    @property
    def is_uploading(self) -> bool:
        """True if an upload is running or waits for its turn."""
        return self._n_begun != self._n_ended

    def is_due(self, position: int) -> bool:
        """Return True if the state must be saved now.

        Args:
            position: the number of entries that the run has completed.
        """
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
        """Return True if the state that is saved now must be kept for runs that continue from this period's snapshot.

        Args:
            position: the number of entries that the run has completed.
        """
        return self._position is None or position // self._entries_per_period != self._period

    @contextmanager
    def keeping(self, position: int) -> Iterator[None]:
        """Measure the copies that are made in this context. Training waits for them.

        Args:
            position: the number of entries that the run has completed.
        """
        began, worked = self._clock(), self._work_time()
        yield
        self._copy_s = self._work_time() - worked
        self._position, self._kept_at = position, began
        self._period = position // self._entries_per_period

    def hand_over(self) -> None:
        """Record that an upload will be made. The training thread calls this."""
        self._n_begun += 1

    @contextmanager
    def uploading(self) -> Iterator[None]:
        """Measure an upload that `hand_over` has recorded. It is called in the thread that makes the upload."""
        began = self._clock()
        try:
            yield
        finally:
            self._upload_s = self._clock() - began
            self._n_ended += 1
