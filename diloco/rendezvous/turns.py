"""Who has the turn: the training, the rounds, or both beside each other.

The training hands jobs over and takes back what they brought about. `InTurn` does each job at once, in the caller;
`diloco.rounds_thread.RoundsThread` does them in their order beside the training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Job = Callable[[], None]
Wait = Callable[[float, Sequence[str]], None]
"""Returns after some seconds, or earlier when something changes below one of the key prefixes."""


class Turns(Protocol):
    """How jobs of the rounds are done; all but `pause` and `landed` are called by the training."""

    wait: Wait
    """What a pause waits for."""

    is_beside: bool
    """Whether the training goes on while a job is done."""

    def begin(self, idle: Callable[[], bool]) -> None:
        """Take what is to be done, beside the training, while there is no job; it returns whether there is anything."""

    def submit(self, job: Job) -> None:
        """Have a job done when those before it are. Raises what one of them raised."""

    def check(self) -> bool:
        """Raise what a job has raised, once; from then on return False."""

    def until(self, done: Callable[[], bool]) -> None:
        """Return when something is so that the rounds bring about. Raises what a job raised."""

    def landed(self) -> None:
        """Tell the training that something was brought about."""

    def pause(self, seconds: float, prefixes: Sequence[str]) -> None:
        """Wait between two looks. Ends the rounds where the training has left them."""

    def leave(self) -> None:
        """End the rounds where they stand, within one call of the store and one pause. Safe to call again."""


class InTurn:
    """Does each job at once."""

    is_beside = False

    def __init__(self, wait: Wait) -> None:
        self.wait = self.pause = wait

    def begin(self, idle: Callable[[], bool]) -> None:
        pass

    def submit(self, job: Job) -> None:
        job()

    def check(self) -> bool:
        return True

    def until(self, done: Callable[[], bool]) -> None:
        assert done()

    def landed(self) -> None:
        pass

    def leave(self) -> None:
        pass
