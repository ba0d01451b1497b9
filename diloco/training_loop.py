"""Follows the user's loop around `DiLoCo.step()`, and warns if the loop begins or ends at a wrong step.

A replica that is started again after the last round has no step left to make. Its loop over `steps()` still makes one
pass, whose step is undone, because code after the loop needs the variables that the loop sets.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from diloco.errors import DiLoCoError
from diloco.settings import DiLoCoSettings

IDLE_PASSES = 1000
"""After this number of passes of `for step in diloco.steps()` without a call of `step()`, the loop gets an error.

A body may skip a batch now and then, but a body that never calls `step()` would run forever.
"""


class Position(Protocol):
    """The run's position: the two properties of a `DiLoCo` that the loop reads."""

    @property
    def inner_step(self) -> int:
        """The run's step."""

    @property
    def is_over(self) -> bool:
        """True when the run has ended."""


class TrainingLoop:
    """The user's training loop, as one DiLoCo sees it.

    Args:
        settings: the settings of the DiLoCo.
        begins_at: the run's step when this process joined it. It is more than 0 in a replica that was started again.

    Example:
        loop = TrainingLoop(settings, begins_at=100)
        for step in loop.steps(diloco, undo): ...
    """

    def __init__(self, settings: DiLoCoSettings, begins_at: int) -> None:
        self._settings = settings
        self._begins_at = begins_at
        self.knows_begin = begins_at == 0
        """True if the loop is known to begin at the run's step."""
        self._has_warned = False
        self.has_printed_stop = False
        """True once the line about the replicas that stopped the run was printed."""
        self.n_calls = 0
        """The number of calls of `step()`."""
        self.is_trainers = False
        """True if the loop belongs to a trainer. Its callback itself warns about an early end."""
        self._has_made_last_pass = False
        """True if a process that began after the end of the run has made its one allowed step.

        That step is undone, not counted, and causes no warning.
        """

    def trust(self) -> None:
        """Record that the loop begins at the run's step, because it uses `steps()` or has read the run's step."""
        self.knows_begin = True

    def steps(self, position: Position, undo: Callable[[], None]) -> Iterator[int]:
        """Yield the run's step until the run has ended. `DiLoCo.steps` describes it for users.

        Args:
            position: the run's position, read before each pass.
            undo: sets the model to the anchor.

        Raises:
            DiLoCoError: the loop does not call `step()`.
        """
        if position.is_over and not self.n_calls and not self._has_made_last_pass:
            yield max(0, position.inner_step - 1)
            undo()  # the body may not have called step(), for example while it accumulates gradients
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

    def print_begin(self) -> None:
        """Print once the step at which this replica continues, because a loop that the user wrote may have begun at 0.

        Call it at the first call of `step()`, unless the script has read the run's step.
        """
        self.knows_begin = True
        total = self._settings.total_steps
        until = f" of {total}" if total is not None else ""
        # This line is not a warning, because the loop may know the right step by other means.
        print(
            f"replicas: this replica continues at inner step {self._begins_at}{until}. A loop of your own must begin "
            "at diloco.inner_step and end when diloco.is_over is True, as `for step in diloco.steps()` does.",
            file=sys.stderr,
        )

    def print_stop(self, ranks: Sequence[int], round_: int) -> None:
        """Print one line that names the replicas that stopped the run.

        Args:
            ranks: these replicas.
            round_: the number of the last round.
        """
        self.has_printed_stop = True
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        print(f"replicas: {named} stopped the run, which ends with round {round_}.", file=sys.stderr)

    def warn_of_early_close(self) -> None:
        """Warn that this replica asked all replicas to stop, but leaves before a round has passed the request on."""
        warnings.warn(
            "close() was called after stop() and before the round that ends the run, so the other replicas continue. "
            "Call step() until diloco.is_over is True.",
            stacklevel=5,
        )

    def warn_of_early_end(self, at: int, uncounted: int) -> int:
        """Warn that the loop has ended before the last planned round, so replicas that continue end with a different
        model.

        A loop over a number of epochs ends too early in a replica that was started again, because the steps that it
        makes ahead of the others do not count.

        Args:
            at: the run's step, or its round if rounds go by the clock.
            uncounted: steps since the last round that counted this replica.

        Returns:
            The number of uncounted steps that the caller must still warn of.
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

    def warn_of_call_after_end(self, call: str, step: int) -> None:
        """Warn once that `step()` or `sync()` was called after the last planned round.

        In a process that began after the end of the run, the first call is correct: it belongs to the one allowed pass
        of `steps()`.

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
