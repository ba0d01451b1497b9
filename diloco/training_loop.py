"""The loop that calls `DiLoCo.step()`: where it begins, where it ends, and the lines that say so when it is wrong."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
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
    """

    def __init__(self, settings: Settings, begins_at: int) -> None:
        self._settings = settings
        self._begins_at = begins_at
        self._knows_begin = begins_at == 0
        self._has_warned = False
        self.has_told_of_stop = False
        """Whether the line was printed that says who stopped the run."""
        self._calls = 0

    def trust(self) -> None:
        """Accept that the loop begins where the run is: `steps()`, or a trainer's callback, has seen to it."""
        self._knows_begin = True

    def steps(self, position: Position) -> Iterator[int]:
        """Yield the run's step until the run is over; see `DiLoCo.steps`."""
        self.trust()
        idle, calls = 0, self._calls
        while not position.is_over:
            yield position.inner_step
            idle, calls = (0, self._calls) if self._calls != calls else (idle + 1, calls)
            if idle == IDLE_PASSES:
                raise DiLoCoError(
                    f"The loop over steps() has made {IDLE_PASSES} passes without calling step(), so the run makes no "
                    "progress. Call diloco.step() at the end of the loop's body."
                )

    def step_called(self) -> None:
        """Count a call of `step()`.

        The first call prints one line if a loop of the user's own may have begun at 0 in the midst of a run.
        """
        self._calls += 1
        if self._knows_begin:
            return
        self._knows_begin = True
        total = self._settings.total_steps
        until = f" of {total}" if total is not None else ""
        # Not a warning: from here, a loop that begins at the right step looks the same.
        print(
            f"replicas: this replica continues at inner step {self._begins_at}{until}. A loop of your own must begin "
            f"there: for step in diloco.steps(), or range(diloco.inner_step, {total or '…'}).",
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

    def warn_past_the_end(self, step: int) -> None:
        """Warn, once, that `step()` is called after the last planned round."""
        if self._has_warned:
            return
        self._has_warned = True
        settings = self._settings
        planned = f"total_steps={settings.total_steps}"
        if settings.round_seconds is not None:
            planned = f"total_rounds={settings.total_rounds}"
        warnings.warn(
            f"step() was called after the end of the run ({planned}, at inner step {step}). Steps beyond the end "
            "change nothing: the model keeps the anchor. End the loop with `for step in diloco.steps()`, or when "
            "diloco.is_over is True.",
            stacklevel=4,
        )
