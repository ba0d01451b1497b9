"""The thread that has the rounds beside the training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from diloco.rendezvous.turns import Job, Wait

LONGEST_PAUSE_S, ANSWERS_PER_PAUSE = 0.05, 2
"""The rounds have a thread of their own, so they look as often as a store's answer takes twice."""


class LeftError(BaseException):
    """The training has left: nothing more is to be done."""


class RoundsThread:
    """Does jobs in their order beside the training. The thread ends with the process, or with the first error.

    Args:
        wait: what a pause waits for.
        answer_s: how long the store takes to answer, by its last answer.
    """

    is_beside = True

    def __init__(self, name: str, wait: Wait, answer_s: Callable[[], float]) -> None:
        self._name = name
        self.wait = wait
        self._answer_s = answer_s
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._error: BaseException | None = None
        self._is_told = False
        self._is_leaving = False
        self._thread: threading.Thread | None = None
        self._idle: Callable[[], bool] = lambda: False

    # -- the training's side -------------------------------------------------------------------------------------------

    def begin(self, idle: Callable[[], bool]) -> None:
        self._idle = idle

    def submit(self, job: Job) -> None:
        if self._is_leaving:
            job()  # nothing goes on beside the training any more
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
        if self._error is not None and not self._is_told:
            self._is_told = True
            raise self._error
        return self._error is None

    def until(self, done: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: done() or self._error is not None)
        if not done():
            self._is_told = True
            assert self._error is not None
            raise self._error

    def leave(self) -> None:
        with self._changed:
            self._is_leaving = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # -- the rounds' side ----------------------------------------------------------------------------------------------

    def landed(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def pause(self, seconds: float, prefixes: Sequence[str]) -> None:
        if self._is_leaving:
            raise LeftError
        self.wait(min(seconds, max(LONGEST_PAUSE_S, ANSWERS_PER_PAUSE * self._answer_s())), prefixes)
        if self._is_leaving:
            raise LeftError

    def _work(self) -> None:
        try:
            while True:
                self._next()()
        except LeftError:
            pass
        except BaseException as error:  # noqa: BLE001 - it is the training's
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next(self) -> Job:
        """Return the next job, and be idle until there is one."""
        while True:
            with self._changed:
                if self._is_leaving:
                    raise LeftError
                if self._jobs:
                    return self._jobs.popleft()
            if not self._idle():
                with self._changed:
                    self._changed.wait_for(lambda: self._jobs or self._is_leaving)
