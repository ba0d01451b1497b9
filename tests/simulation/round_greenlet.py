"""Runs the round runner of a simulated process in a greenlet of its own, while the process continues to train."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from diloco.rendezvous.round import Wait
from diloco.rendezvous.training_side import RoundJob
from simulation.world import World


class LeftError(BaseException):
    """The training has left, so the current job ends."""


class RoundGreenlet:
    """A `Scheduler` for a simulated world, as `diloco.round_thread.RoundThread` is one for real threads."""

    in_background = True

    def __init__(self, world: World) -> None:
        self.wait: Wait = world.wait
        self._world = world
        self._jobs: deque[RoundJob] = deque()
        self._idle: Callable[[], bool] = lambda: False
        self._error: BaseException | None = None
        self._is_raised = self._is_leaving = self._is_started = self._has_ended = False

    # -- called by the training ----------------------------------------------------------------------------------------

    def begin(self, idle: Callable[[], bool]) -> None:
        self._idle = idle

    def submit(self, job: RoundJob, /) -> None:
        if self._is_leaving:
            job()
            return
        self.check()
        if self._error is not None:
            raise self._error
        self._jobs.append(job)
        if not self._is_started:
            self._is_started = True
            self._world.spawn(self._world.who(), self._work)
        self._world.wake(self)

    def check(self) -> bool:
        if self._error is not None and not self._is_raised:
            self._is_raised = True
            raise self._error
        return self._error is None

    def until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._error is not None:
                self._is_raised = True
                raise self._error
            self._world.suspend(self)

    def leave(self) -> None:
        self._is_leaving = True
        self._world.wake(self)
        self._world.wake(self._jobs)
        while self._is_started and not self._has_ended:
            self._world.suspend(self)

    # -- called by the round runner ------------------------------------------------------------------------------------

    def notify(self) -> None:
        self._world.wake(self)

    def pause(self, seconds: float, prefixes: Sequence[str]) -> None:
        if self._is_leaving:
            raise LeftError
        self._world.suspend(self._jobs, seconds)  # `leave` wakes it, where the real thread looks every 50 ms
        if self._is_leaving:
            raise LeftError

    def _work(self) -> None:
        try:
            while True:
                self._next()()
        except LeftError:
            pass
        except BaseException as error:  # noqa: BLE001 - the training raises it, also if the process was killed
            self._error = error
        self._has_ended = True
        self._world.wake(self)

    def _next(self) -> RoundJob:
        while True:
            if self._is_leaving:
                raise LeftError
            if self._jobs:
                return self._jobs.popleft()
            if not self._idle() and not self._jobs and not self._is_leaving:
                self._world.suspend(self)
