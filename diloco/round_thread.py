"""The thread that runs the jobs of the round runner while training continues."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from diloco.rendezvous.retrying_store import RetryingStore
from diloco.rendezvous.round import Wait
from diloco.rendezvous.training_side import RoundJob

LONGEST_PAUSE_S, ANSWERS_PER_PAUSE = 0.05, 2
"""The longest pause in the round thread, in answer times of the store.

Looks do not delay training, so they may be frequent.
"""


class LeftError(BaseException):
    """Raised in the round thread to end its current job, because the training thread has left."""


class RoundThread:
    """A `Scheduler` that runs jobs in a thread of its own. The thread ends with the process, or with the first error.

    Args:
        name: the name of the thread.
        wait: the function that waits during a pause.
        store: the store of the run. The time that it takes to answer bounds a pause.

    Example:
        TrainingSide(context, RoundThread("rounds of diloco main of rank 0", watch.wait, store))
    """

    in_background = True

    def __init__(self, name: str, wait: Wait, store: RetryingStore) -> None:
        self._name = name
        self.wait = wait
        self._store = store
        self._changed = threading.Condition()
        self._jobs: deque[RoundJob] = deque()
        self._error: BaseException | None = None
        self._is_raised = False
        self._is_leaving = False
        self._thread: threading.Thread | None = None
        self._idle: Callable[[], bool] = lambda: False

    # -- called by the training thread ---------------------------------------------------------------------------------

    def begin(self, idle: Callable[[], bool]) -> None:
        self._idle = idle

    def submit(self, job: RoundJob, /) -> None:
        if self._is_leaving:
            job()  # the round thread has ended, so no job runs while training continues
            return
        self.check()
        if self._error is not None:
            raise self._error
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()

    def check(self) -> bool:
        if self._error is not None and not self._is_raised:
            self._is_raised = True
            raise self._error
        return self._error is None

    def until(self, done: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: done() or self._error is not None)
        if not done():
            self._is_raised = True
            assert self._error is not None
            raise self._error

    def leave(self) -> None:
        with self._changed:
            self._is_leaving = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # -- called by the round thread ------------------------------------------------------------------------------------

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def pause(self, seconds: float, prefixes: Sequence[str]) -> None:
        if self._is_leaving:
            raise LeftError
        self.wait(min(seconds, max(LONGEST_PAUSE_S, ANSWERS_PER_PAUSE * self._store.answer_s)), prefixes)
        if self._is_leaving:
            raise LeftError

    def _work(self) -> None:
        try:
            while True:
                self._next()()
        except LeftError:
            pass
        except BaseException as error:  # noqa: BLE001 - the training thread raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> RoundJob:
        """Return the next job. Until there is one, call the function for idle times."""
        while True:
            with self._changed:
                if self._is_leaving:
                    raise LeftError
                if self._jobs:
                    return self._jobs.popleft()
            if not self._idle():
                with self._changed:
                    self._changed.wait_for(lambda: self._jobs or self._is_leaving)
