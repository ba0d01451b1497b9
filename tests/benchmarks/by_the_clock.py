"""Rounds by the clock (W9): time to reach a loss with a slow replica, compared with rounds that wait for it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from .harness import Comparison, Options
from .launch import scratch_folder, state_of_its_own

WAITING, BY_THE_CLOCK = "every round waits for the slow one", "rounds by the clock"
SPEEDS = (1.0, 1.0, 1.0, 0.4)
STEP_S = 0.04
INNER_STEPS = 10


def by_the_clock(options: Options) -> list[Comparison]:
    """W9: four replicas of the demo's model. One of them makes 0.4 steps while the others make one."""
    speeds, for_s = (SPEEDS[2:], 2.0) if options.quick else (SPEEDS, 60.0)
    samples: dict[str, list[float]] = {WAITING: [], BY_THE_CLOCK: []}
    for seed in range(options.repetitions(2)):
        waiting = _losses(speeds, seed, for_s, inner_steps=INNER_STEPS)
        clocked = _losses(speeds, seed, for_s, round_seconds=INNER_STEPS * STEP_S)
        target = waiting[-1][1]
        samples[WAITING].append(waiting[-1][0])
        samples[BY_THE_CLOCK].append(_reached(clocked, target))
    title = (
        f"speeds {', '.join(f'{speed:g}' for speed in speeds)}: time to the loss that waiting reaches in {for_s:g} s"
    )
    return [Comparison("W9", title, "s", samples, WAITING, {BY_THE_CLOCK: 0.5})]


def _losses(speeds: tuple[float, ...], seed: int, for_s: float, **settings: Any) -> list[tuple[float, float]]:
    """Train for a while, and return the losses of the anchor with their times."""
    from executors import launch

    arguments = {"steps_s": [STEP_S / speed for speed in speeds], "seed": seed, "for_s": for_s, "settings": settings}
    with state_of_its_own(), scratch_folder("clock-") as folder:
        task = f"{__package__}.by_the_clock_replica:train"
        run = launch("local", task, len(speeds), args=arguments, rendezvous=f"{folder}/store")
        return [(at_s, loss) for at_s, loss in run.results()[0]]


def _reached(losses: list[tuple[float, float]], target: float) -> float:
    """Return the time at which a loss was reached, interpolated between two measurements. If the loss was never
    reached, return the last time.
    """
    for (before_s, before), (at_s, loss) in pairwise(losses):
        if loss <= target:
            return before_s + (at_s - before_s) * (before - target) / (before - loss)
    return losses[-1][0]
