"""The outer learning rate and momentum that a run has if the user gives neither.

They follow a measurement of short runs, `docs/results/outer_settings.md`. These are pure functions of numbers, so that
`replicas plan` has them without torch.
"""

from __future__ import annotations

SHORT_ROUND_STEPS = 10
"""Rounds of fewer steps than this need less outer momentum than the paper has."""
LONG_ROUND_STEPS = 50
"""From this number of inner steps on, a round bears a larger outer momentum in short plans."""
MEASURED_STEPS = 1000
"""The inner steps of the longest plans that were measured."""
SHORT_PLAN_OUTER = (1.0, 0.5)
"""The outer learning rate and momentum of plans of up to `MEASURED_STEPS` steps.

No other momentum above 0 gave a lower loss than one replica alone in all measured plans.
"""
LONG_ROUND_OUTER = (1.0, 0.8)
"""The outer learning rate and momentum of such plans if their rounds have at least `LONG_ROUND_STEPS` steps.

All measured plans with such rounds ended below one replica alone, and nearly all of them below `SHORT_PLAN_OUTER`.
"""
PAPER_OUTER = (0.7, 0.9)
"""The outer learning rate and momentum of the paper (arXiv 2311.08105), for all other plans."""


def is_short_plan(inner_steps: int, rounds: int | None) -> bool:
    """Return True if the last planned round begins before step `MEASURED_STEPS`.

    The beginning of the last round decides, and not the total. So replicas whose different totals lead to the same
    rounds have the same outer settings. An extension of the run does not change these settings.

    Args:
        inner_steps: inner steps of a round.
        rounds: planned rounds. None: not known.
    """
    return rounds is not None and (rounds - 1) * inner_steps < MEASURED_STEPS


def default_outer(inner_steps: int, rounds: int | None) -> tuple[float, float]:
    """Return the outer learning rate and momentum of a plan.

        >>> default_outer(10, 100), default_outer(50, 20), default_outer(50, 200)
        ((1.0, 0.5), (1.0, 0.8), (0.7, 0.9))

    Args:
        inner_steps: inner steps of a round.
        rounds: planned rounds. None: not known.
    """
    if not is_short_plan(inner_steps, rounds):
        return PAPER_OUTER
    return LONG_ROUND_OUTER if inner_steps >= LONG_ROUND_STEPS else SHORT_PLAN_OUTER
