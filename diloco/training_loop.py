"""The loop that calls `DiLoCo.step()`: where it begins, where it ends, and the lines that say so when it is wrong.

A replica that is started again after the last round has no step left to make. Its loop over `steps()` then makes one
pass all the same, whose step is undone: the code after the loop needs the variables that the loop sets.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from diloco.errors import DiLoCoError
from diloco.settings import Settings

IDLE_PASSES = 1000
"""Passes through the body of `for step in diloco.steps()` without a call of `step()`. A body may leave out a batch now
and then; one that never calls `step()` would run for ever."""


class Position(Protocol):
    """The part of a `DiLoCo` that says where the run is."""

    @property
    def inner_step(self) -> int: ...

    @property
    def is_over(self) -> bool: ...


class TrainingLoop:
    """What one DiLoCo knows about the user's training loop.

    Args:
        settings: of the run.
        begins_at: the run's step when this process joined it; more than 0 in a replica that came back.

    Example:
        loop = TrainingLoop(settings, begins_at=100)
        for step in loop.steps(diloco, undo): ...
    """

    def __init__(self, settings: Settings, begins_at: int) -> None:
        self._settings = settings
        self._begins_at = begins_at
        self.knows_begin = begins_at == 0
        """Whether the loop begins where the run is, as far as that can be seen from here."""
        self._has_warned = False
        self.has_told_of_stop = False
        """Whether the line was printed that says who stopped the run."""
        self.n_calls = 0
        """The number of calls of `step()`."""
        self.is_trainers = False
        """Whether a trainer has the loop. Its callback warns itself of an early end."""
        self._has_made_last_pass = False
        """Whether a process that found the run over has made the one step that is neither counted nor warned of."""

    def trust(self) -> None:
        """Accept that the loop begins where the run is: it uses `steps()`, or has read where the run is."""
        self.knows_begin = True

    def steps(self, position: Position, undo: Callable[[], None]) -> Iterator[int]:
        """Yield the run's step until the run is over; see `DiLoCo.steps`.

        Args:
            position: where the run is, asked again before each pass.
            undo: gives the model the anchor.

        Raises:
            DiLoCoError: the loop does not call `step()`.
        """
        if position.is_over and not self.n_calls and not self._has_made_last_pass:
            yield max(0, position.inner_step - 1)
            undo()  # the body may have left out step(), as where it accumulates gradients
            self._has_made_last_pass = True
        idle, calls = 0, self.n_calls
        while not position.is_over:
            yield position.inner_step
            idle, calls = (0, self.n_calls) if self.n_calls != calls else (idle + 1, calls)
            if idle == IDLE_PASSES:
                raise DiLoCoError(
                    f"The loop over steps() has made {IDLE_PASSES} passes without calling step(), so the run makes no "
                    "progress. Call diloco.step() at the end of the loop's body."
                )

    def tell_of_begin(self) -> None:
        """Print, once, at which step this replica continues, because a loop of the user's own may have begun at 0.

        Call it at the first call of `step()`, unless the script has asked where the run is.
        """
        self.knows_begin = True
        total = self._settings.total_steps
        until = f" of {total}" if total is not None else ""
        # Not a warning: a loop may begin at the right step by other means, and looks the same from here.
        print(
            f"replicas: this replica continues at inner step {self._begins_at}{until}. A loop of your own must begin "
            "there, at diloco.inner_step, and end when diloco.is_over is True, as `for step in diloco.steps()` does.",
            file=sys.stderr,
        )

    def tell_of_stop(self, ranks: Sequence[int], round_: int) -> None:
        """Print one line that says which replicas have stopped the run."""
        self.has_told_of_stop = True
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        print(f"replicas: {named} stopped the run, which ends with round {round_}.", file=sys.stderr)

    def warn_of_early_close(self) -> None:
        """Warn that this replica asked all to stop, and leaves before a round has told the others."""
        warnings.warn(
            "close() was called after stop() and before the round that ends the run, so the other replicas go on. Call "
            "step() until diloco.is_over is True.",
            stacklevel=5,
        )

    def warn_of_early_end(self, at: int, uncounted: int) -> int:
        """Warn of a loop that has ended before the last planned round: the replicas that continue end otherwise.

        A loop with a number of epochs ends so in a replica that was started again, because the steps that it makes
        ahead of the others do not count.

        Args:
            at: the run's step, or its round where rounds go by the clock.
            uncounted: steps since the last round that counted this replica.

        Returns: the uncounted steps that are left to warn of.
        """
        settings = self._settings
        is_by_clock = settings.round_seconds is not None
        name, total = ("total_rounds", settings.total_rounds) if is_by_clock else ("total_steps", settings.total_steps)
        if total is None or self.is_trainers:
            return uncounted
        lost = f" {uncounted} step{'s' * (uncounted > 1)} since its last round are lost." if uncounted else ""
        warnings.warn(
            f"The loop of this replica has ended at {'round' if is_by_clock else 'inner step'} {at}, before the end of "
            f"the run ({name}={total}), so replicas that continue end with another model.{lost} Continue the loop "
            "until diloco.is_over is True.",
            stacklevel=5,
        )
        return 0

    def called_past_the_end(self, call: str, step: int) -> None:
        """Warn, once, that `step()` or `sync()` is called after the last planned round.

        The first call is no mistake in a process that found the run over: it belongs to the last pass of `steps()`.

        Args:
            call: the name of the method.
            step: the run's step.
        """
        is_last_pass = not self.n_calls and not self._has_made_last_pass
        self._has_made_last_pass = True
        if is_last_pass or self._has_warned:
            return
        self._has_warned = True
        settings = self._settings
        planned = f"total_steps={settings.total_steps}"
        if settings.round_seconds is not None:
            planned = f"total_rounds={settings.total_rounds}"
        warnings.warn(
            f"{call}() was called after the end of the run ({planned}, at inner step {step}). Steps beyond the end "
            "change nothing: the model keeps the anchor. End the loop with `for step in diloco.steps()`, or when "
            "diloco.is_over is True.",
            stacklevel=5,
        )
